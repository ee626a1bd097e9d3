"""Names of `tf.keras.saving` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.saving import (
    CustomObjectScope as CustomObjectScope,
    KerasFileEditor as KerasFileEditor,
    custom_object_scope as custom_object_scope,
    deserialize_keras_object as deserialize_keras_object,
    get_custom_objects as get_custom_objects,
    get_registered_name as get_registered_name,
    get_registered_object as get_registered_object,
    load_weights as load_weights,
    register_keras_serializable as register_keras_serializable,
    save_model as save_model,
    save_weights as save_weights,
    serialize_keras_object as serialize_keras_object,
)
from unisono.tf.adapters.models._loading import (
    load_model as load_model,
)
