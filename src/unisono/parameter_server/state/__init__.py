"""What a server holds, and how that survives a crash."""
