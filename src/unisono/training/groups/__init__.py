"""Batches that one program runs together, and where they come from."""
