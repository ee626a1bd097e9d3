"""The compiled programs of steps, and the values and flags on which they depend."""
