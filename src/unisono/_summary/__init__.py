"""The implementation of `unisono.summary`: event files, and how summaries get there."""
