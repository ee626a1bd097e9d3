"""`unisono.function`."""
