"""Names of `tf.keras.applications.inception_resnet_v2` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.applications.inception_resnet_v2 import (
    InceptionResNetV2 as InceptionResNetV2,
    decode_predictions as decode_predictions,
    preprocess_input as preprocess_input,
)
