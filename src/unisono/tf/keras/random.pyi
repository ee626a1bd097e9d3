"""Names of `tf.keras.random` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.random import (
    SeedGenerator as SeedGenerator,
    beta as beta,
    binomial as binomial,
    categorical as categorical,
    dropout as dropout,
    gamma as gamma,
    normal as normal,
    randint as randint,
    shuffle as shuffle,
    truncated_normal as truncated_normal,
    uniform as uniform,
)
