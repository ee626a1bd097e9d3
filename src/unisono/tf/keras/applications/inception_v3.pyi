"""Names of `tf.keras.applications.inception_v3` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.applications.inception_v3 import (
    InceptionV3 as InceptionV3,
    decode_predictions as decode_predictions,
    preprocess_input as preprocess_input,
)
