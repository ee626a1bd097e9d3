"""Names of `tf.keras.utils` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.utils import (
    Config as Config,
    CustomObjectScope as CustomObjectScope,
    FeatureSpace as FeatureSpace,
    Progbar as Progbar,
    PyDataset as PyDataset,
    Sequence as Sequence,
    array_to_img as array_to_img,
    audio_dataset_from_directory as audio_dataset_from_directory,
    clear_session as clear_session,
    custom_object_scope as custom_object_scope,
    deserialize_keras_object as deserialize_keras_object,
    disable_interactive_logging as disable_interactive_logging,
    enable_interactive_logging as enable_interactive_logging,
    get_custom_objects as get_custom_objects,
    get_registered_name as get_registered_name,
    get_registered_object as get_registered_object,
    get_source_inputs as get_source_inputs,
    img_to_array as img_to_array,
    is_interactive_logging_enabled as is_interactive_logging_enabled,
    is_keras_tensor as is_keras_tensor,
    load_img as load_img,
    model_to_dot as model_to_dot,
    normalize as normalize,
    pack_x_y_sample_weight as pack_x_y_sample_weight,
    pad_sequences as pad_sequences,
    plot_model as plot_model,
    register_keras_serializable as register_keras_serializable,
    save_img as save_img,
    serialize_keras_object as serialize_keras_object,
    set_random_seed as set_random_seed,
    split_dataset as split_dataset,
    standardize_dtype as standardize_dtype,
    text_dataset_from_directory as text_dataset_from_directory,
    timeseries_dataset_from_array as timeseries_dataset_from_array,
    to_categorical as to_categorical,
    unpack_x_y_sample_weight as unpack_x_y_sample_weight,
)
from unisono import (
    SidecarEvaluator as SidecarEvaluator,
)
from unisono.tf.adapters._directories import (
    get_file as get_file,
    image_dataset_from_directory as image_dataset_from_directory,
)
from unisono.tf.keras.utils import (
    bounding_boxes as bounding_boxes,
    experimental as experimental,
    legacy as legacy,
)
