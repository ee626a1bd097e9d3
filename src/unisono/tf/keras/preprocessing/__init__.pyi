"""Names of `tf.keras.preprocessing` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.preprocessing import (
    text_dataset_from_directory as text_dataset_from_directory,
    timeseries_dataset_from_array as timeseries_dataset_from_array,
)
from unisono.tf.adapters._directories import (
    image_dataset_from_directory as image_dataset_from_directory,
)
from unisono.tf.keras.preprocessing import (
    image as image,
    sequence as sequence,
    text as text,
)
