"""The process that holds variables, and how others speak with it."""
