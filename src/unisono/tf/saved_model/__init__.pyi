"""Names of `tf.saved_model`, for editors and type checkers; `python -m tools.stubs` makes this file."""

import builtins as _b
from unisono.tf.adapters._keras import (
    SaveOptions as SaveOptions,
    SaveOptions as _unisono_tf_adapters__keras_SaveOptions,
)
from unisono.tf.adapters._saving import (
    load_model as _unisono_tf_adapters__saving_load_model,
    save_model as _unisono_tf_adapters__saving_save_model,
)
from unisono.tf.saved_model import (
    signature_constants as signature_constants,
)

CLASSIFY_METHOD_NAME: _b.str
DEFAULT_SERVING_SIGNATURE_DEF_KEY: _b.str
LoadOptions = _unisono_tf_adapters__keras_SaveOptions
PREDICT_METHOD_NAME: _b.str
REGRESS_METHOD_NAME: _b.str
load = _unisono_tf_adapters__saving_load_model
save = _unisono_tf_adapters__saving_save_model
