"""Names of `tf.keras.applications.resnet_v2` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.applications.resnet_v2 import (
    ResNet101V2 as ResNet101V2,
    ResNet152V2 as ResNet152V2,
    ResNet50V2 as ResNet50V2,
    decode_predictions as decode_predictions,
    preprocess_input as preprocess_input,
)
