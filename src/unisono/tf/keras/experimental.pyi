"""Names of `tf.keras.experimental` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono import (
    SidecarEvaluator as SidecarEvaluator,
)
from unisono.experimental import (
    export_saved_model as export_saved_model,
    load_from_saved_model as load_from_saved_model,
)
