"""Names of `tf.keras.layers.experimental.preprocessing` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.layers import (
    Normalization as Normalization,
    Rescaling as Rescaling,
)
from unisono.preprocessing import (
    HashedCrossing as HashedCrossing,
    Hashing as Hashing,
    IntegerLookup as IntegerLookup,
    StringLookup as StringLookup,
    TextVectorization as TextVectorization,
)
