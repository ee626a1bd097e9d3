"""Names of `tf.keras.datasets.imdb` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.datasets.imdb import (
    get_word_index as get_word_index,
    load_data as load_data,
)
