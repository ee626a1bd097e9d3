"""Names of `tf.keras.optimizers.legacy` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.optimizers import (
    Adagrad as Adagrad,
    Adam as Adam,
    RMSprop as RMSprop,
    SGD as SGD,
)
from keras.optimizers.legacy import (
    Ftrl as Ftrl,
    Optimizer as Optimizer,
)
