"""What `unisono.summary` writes: event files, and how records reach them."""
