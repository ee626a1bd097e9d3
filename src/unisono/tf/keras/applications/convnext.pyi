"""Names of `tf.keras.applications.convnext` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.applications.convnext import (
    ConvNeXtBase as ConvNeXtBase,
    ConvNeXtLarge as ConvNeXtLarge,
    ConvNeXtSmall as ConvNeXtSmall,
    ConvNeXtTiny as ConvNeXtTiny,
    ConvNeXtXLarge as ConvNeXtXLarge,
    decode_predictions as decode_predictions,
    preprocess_input as preprocess_input,
)
