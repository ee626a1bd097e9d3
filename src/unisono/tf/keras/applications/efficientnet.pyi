"""Names of `tf.keras.applications.efficientnet` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.applications.efficientnet import (
    EfficientNetB0 as EfficientNetB0,
    EfficientNetB1 as EfficientNetB1,
    EfficientNetB2 as EfficientNetB2,
    EfficientNetB3 as EfficientNetB3,
    EfficientNetB4 as EfficientNetB4,
    EfficientNetB5 as EfficientNetB5,
    EfficientNetB6 as EfficientNetB6,
    EfficientNetB7 as EfficientNetB7,
    decode_predictions as decode_predictions,
    preprocess_input as preprocess_input,
)
