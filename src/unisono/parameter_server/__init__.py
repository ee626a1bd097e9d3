"""Parameter servers: variables live on server tasks, workers compute, the chief coordinates."""
