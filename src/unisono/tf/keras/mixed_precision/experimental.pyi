"""Names of `tf.keras.mixed_precision.experimental` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.config import (
    set_dtype_policy as _keras_config_set_dtype_policy,
)
from keras.dtype_policies import (
    DTypePolicy as _keras_dtype_policies_DTypePolicy,
)

Policy = _keras_dtype_policies_DTypePolicy
set_policy = _keras_config_set_dtype_policy
