"""Names of `tf.keras.applications.efficientnet_v2` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.applications.efficientnet_v2 import (
    EfficientNetV2B0 as EfficientNetV2B0,
    EfficientNetV2B1 as EfficientNetV2B1,
    EfficientNetV2B2 as EfficientNetV2B2,
    EfficientNetV2B3 as EfficientNetV2B3,
    EfficientNetV2L as EfficientNetV2L,
    EfficientNetV2M as EfficientNetV2M,
    EfficientNetV2S as EfficientNetV2S,
    decode_predictions as decode_predictions,
    preprocess_input as preprocess_input,
)
