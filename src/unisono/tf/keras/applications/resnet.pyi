"""Names of `tf.keras.applications.resnet` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.applications.resnet import (
    ResNet101 as ResNet101,
    ResNet152 as ResNet152,
    ResNet50 as ResNet50,
    decode_predictions as decode_predictions,
    preprocess_input as preprocess_input,
)
