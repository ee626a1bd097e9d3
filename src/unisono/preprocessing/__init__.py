"""Keras' preprocessing layers for strings and hashes, on the host and without TensorFlow.

Keras 3 computes `StringLookup`, `IntegerLookup`, `TextVectorization`, `Hashing` and `HashedCrossing` with
TensorFlow. The layers of these names here give the same numbers with NumPy. Strings cannot enter a JAX
program: call the layers in the input pipeline, `dataset.map(lambda x, y: (lookup(x), y))`. Where they are the
first layers of a model, of a strategy or under `unisono.tf`, `fit`, `evaluate` and `predict` call them on the
data before the step.
"""

# At once, not on first use: an import registers the layers, so that Keras can load a model that has them.
from unisono.preprocessing._hashing import HashedCrossing, Hashing
from unisono.preprocessing._lookup import IntegerLookup, StringLookup
from unisono.preprocessing._text import TextVectorization

__all__ = ["HashedCrossing", "Hashing", "IntegerLookup", "StringLookup", "TextVectorization"]
