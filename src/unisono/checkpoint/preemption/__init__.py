"""Saving before the machine is taken away."""
