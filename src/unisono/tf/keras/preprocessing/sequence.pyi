"""Names of `tf.keras.preprocessing.sequence` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras._tf_keras.keras.preprocessing.sequence import (
    TimeseriesGenerator as TimeseriesGenerator,
    make_sampling_table as make_sampling_table,
    skipgrams as skipgrams,
)
from keras.preprocessing.sequence import (
    pad_sequences as pad_sequences,
)
