"""Names of `tf.keras.applications.resnet50` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.applications.resnet50 import (
    ResNet50 as ResNet50,
    decode_predictions as decode_predictions,
    preprocess_input as preprocess_input,
)
