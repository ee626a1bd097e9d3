"""Names of `tf.keras.applications.nasnet` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.applications.nasnet import (
    NASNetLarge as NASNetLarge,
    NASNetMobile as NASNetMobile,
    decode_predictions as decode_predictions,
    preprocess_input as preprocess_input,
)
