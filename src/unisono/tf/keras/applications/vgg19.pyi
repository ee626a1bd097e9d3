"""Names of `tf.keras.applications.vgg19` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.applications.vgg19 import (
    VGG19 as VGG19,
    decode_predictions as decode_predictions,
    preprocess_input as preprocess_input,
)
