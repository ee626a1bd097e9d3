"""Names of `tf.keras.preprocessing.text` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras._tf_keras.keras.preprocessing.text import (
    Tokenizer as Tokenizer,
    hashing_trick as hashing_trick,
    one_hot as one_hot,
    text_to_word_sequence as text_to_word_sequence,
    tokenizer_from_json as tokenizer_from_json,
)
