"""Names of `tf.version`, for editors and type checkers; `python -m tools.stubs` makes this file."""

import builtins as _b

GIT_VERSION: _b.str
VERSION: _b.str
