"""Names of `tf.keras.datasets.reuters` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.datasets.reuters import (
    get_label_names as get_label_names,
    get_word_index as get_word_index,
    load_data as load_data,
)
