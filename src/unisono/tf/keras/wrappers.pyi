"""Names of `tf.keras.wrappers` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.wrappers import (
    SKLearnClassifier as SKLearnClassifier,
    SKLearnRegressor as SKLearnRegressor,
    SKLearnTransformer as SKLearnTransformer,
)
