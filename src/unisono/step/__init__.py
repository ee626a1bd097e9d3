"""A user's step, from stateful code to a compiled program."""
