"""What a worker does with the closures that it is sent."""
