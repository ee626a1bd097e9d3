"""Names of `tf.nest`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.tree import (
    assert_same_structure as assert_same_structure,
    flatten as flatten,
    map_structure as map_structure,
    pack_sequence_as as pack_sequence_as,
)
