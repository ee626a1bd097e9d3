"""A launch on a terminal."""
