"""Names of `tf.keras.applications.densenet` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.applications.densenet import (
    DenseNet121 as DenseNet121,
    DenseNet169 as DenseNet169,
    DenseNet201 as DenseNet201,
    decode_predictions as decode_predictions,
    preprocess_input as preprocess_input,
)
