"""Names of `tf.train.experimental`, for editors and type checkers; `python -m tools.stubs` makes this file."""

