"""Names of `tf.keras.applications.vgg16` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.applications.vgg16 import (
    VGG16 as VGG16,
    decode_predictions as decode_predictions,
    preprocess_input as preprocess_input,
)
