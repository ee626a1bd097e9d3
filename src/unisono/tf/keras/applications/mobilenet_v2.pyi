"""Names of `tf.keras.applications.mobilenet_v2` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.applications.mobilenet_v2 import (
    MobileNetV2 as MobileNetV2,
    decode_predictions as decode_predictions,
    preprocess_input as preprocess_input,
)
