"""Names of `tf.keras.distillation` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.distillation import (
    DistillationLoss as DistillationLoss,
    Distiller as Distiller,
    FeatureDistillation as FeatureDistillation,
    LogitsDistillation as LogitsDistillation,
)
