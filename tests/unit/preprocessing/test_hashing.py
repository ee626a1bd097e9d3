"""Errors of `Hashing` and `HashedCrossing`; their numbers are in test_lookup.py."""

import jax
import keras
import numpy as np
import pytest

import unisono
from unisono.preprocessing import HashedCrossing, Hashing


def test_errors():
    for layer in (Hashing, HashedCrossing):
        with pytest.raises(unisono.InvalidArgumentError, match="at least 1"):
            layer(0)
    with pytest.raises(unisono.InvalidArgumentError, match="of one shape"):
        HashedCrossing(3)((np.arange(2), np.arange(3)))
    with pytest.raises(unisono.InvalidArgumentError, match="int, one_hot"):
        HashedCrossing(3, output_mode="count")
    with pytest.raises(unisono.InvalidTypeError, match="numbers or strings"):
        Hashing(3)(np.array([["a"], None], object))


def test_a_compiled_step_is_told_where_to_hash():
    layer = Hashing(3)
    with pytest.raises(unisono.InvalidTypeError, match=r"dataset\.map"):
        jax.jit(lambda x: layer(x))(np.arange(3))


def test_layers_are_saved():
    for layer in (Hashing(9, mask_value="m"), HashedCrossing(9)):
        again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
        assert again.get_config() == layer.get_config()
