"""Layers that see the rows of one replica alone, and what stands for them while a step is read.

Tests: tests/virtual/training/test_step_reading.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TypeVar

import jax
import jax.numpy as jnp
import keras

from unisono._types import PyTree
from unisono.step._keras_internals import all_layers
from unisono.training.replica._rows import PER_REPLICA, DiscardingScope, is_per_replica

Layer = TypeVar("Layer", bound=keras.Layer)


def per_replica(layer: Layer) -> Layer:
    """Let a layer see the rows of one replica alone, also where its result for a row depends on others.

    `fit` computes a layer that relates the rows of a batch over all rows, as one device does. Statistics of
    each replica's rows, as in BatchNormalization, need no message between the replicas.

    Args:
        layer: any layer; its state counts as the mean of the replicas'.

    Returns:
        The layer.

    >>> centered = per_replica(keras.layers.Lambda(lambda x: x - keras.ops.mean(x, axis=0)))
    """
    setattr(layer, PER_REPLICA, True)
    return layer


@contextlib.contextmanager
def replaced_calls(model: keras.Model, found: dict[int, keras.Layer]) -> Iterator[None]:
    """Replace layers that are meant to see one replica's rows by others whose rows are apart, for a block.

    Args:
        found: gets those that were called.
    """
    with contextlib.ExitStack() as stack:
        for layer in all_layers(model):
            if is_per_replica(layer):
                stack.enter_context(_replaced_call(layer, found))
        yield


@contextlib.contextmanager
def _replaced_call(layer: keras.Layer, found: dict[int, keras.Layer]) -> Iterator[None]:
    original = layer.call

    def call(*args: PyTree, **kwargs: PyTree) -> PyTree:
        normalizes = kwargs.get("training") and layer.trainable
        if isinstance(layer, keras.layers.BatchNormalization) and not normalizes:
            # With moving statistics each row is normalized alone.
            return original(*args, **kwargs)
        found[id(layer)] = layer
        return _apart(functools.partial(original, *args, **kwargs), (args, kwargs), layer)

    # Not through Keras' own `__setattr__`, which tracks the parts of a layer.
    object.__setattr__(layer, "call", call)
    try:
        yield
    finally:
        object.__delattr__(layer, "call")


def _apart(call: Callable[[], PyTree], given: PyTree, layer: keras.Layer) -> PyTree:
    """Return arrays like the results of a layer, of which each row depends on that row of what is given."""
    if isinstance(layer, keras.layers.BatchNormalization):
        shapes = given[0][0] if given[0] else given[1]["inputs"]
    else:
        with DiscardingScope():
            shapes = jax.eval_shape(call)
    arrays = [x for x in jax.tree.leaves(given) if isinstance(x, jax.Array) and x.ndim]
    weights = sum((jnp.sum(v.value).astype("float32") for v in layer.variables), jnp.zeros(()))
    rows = arrays[0].shape[0] if arrays else 0

    def like(shape: jax.ShapeDtypeStruct) -> jax.Array:
        value = weights
        if shape.ndim and shape.shape[0] == rows:
            for x in arrays:
                value = value + jnp.sum(x, axis=range(1, x.ndim)).astype("float32")
            value = value.reshape(-1, *[1] * (shape.ndim - 1))
        return jnp.broadcast_to(value, shape.shape).astype(shape.dtype)

    return jax.tree.map(like, shapes)
