"""Names of `tf.keras.applications.mobilenet` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.applications.mobilenet import (
    MobileNet as MobileNet,
    decode_predictions as decode_predictions,
    preprocess_input as preprocess_input,
)
