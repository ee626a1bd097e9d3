"""Names of `tf.saved_model.signature_constants`, for editors and type checkers; `python -m tools.stubs` makes this file."""

import builtins as _b

CLASSIFY_METHOD_NAME: _b.str
DEFAULT_SERVING_SIGNATURE_DEF_KEY: _b.str
PREDICT_METHOD_NAME: _b.str
REGRESS_METHOD_NAME: _b.str
