"""Names of `tf.sysconfig`, for editors and type checkers; `python -m tools.stubs` makes this file."""

