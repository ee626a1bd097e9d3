"""Names of `tf.keras.utils.legacy` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.utils.legacy import (
    deserialize_keras_object as deserialize_keras_object,
    serialize_keras_object as serialize_keras_object,
)
