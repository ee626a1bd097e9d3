"""Names of `tf.keras.mixed_precision` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.config import (
    dtype_policy as _keras_config_dtype_policy,
    set_dtype_policy as _keras_config_set_dtype_policy,
)
from keras.dtype_policies import (
    DTypePolicy as _keras_dtype_policies_DTypePolicy,
)
from keras.mixed_precision import (
    DTypePolicy as DTypePolicy,
    dtype_policy as dtype_policy,
    set_dtype_policy as set_dtype_policy,
)
from keras.optimizers import (
    LossScaleOptimizer as LossScaleOptimizer,
)
from unisono.tf.keras.mixed_precision import (
    experimental as experimental,
)

Policy = _keras_dtype_policies_DTypePolicy
global_policy = _keras_config_dtype_policy
set_global_policy = _keras_config_set_dtype_policy
