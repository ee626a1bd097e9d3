"""Names of `tf.keras.models` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.models import (
    Model as Model,
    Sequential as Sequential,
    clone_model as clone_model,
    model_from_json as model_from_json,
    save_model as save_model,
)
from unisono.tf.adapters.models._loading import (
    load_model as load_model,
)
