"""Random numbers with TensorFlow's arguments, over `keras.random`.

Tests: tests/unit/tf/test_tensors.py.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.typing import DTypeLike

from unisono.spi import running_step, set_step_seed
from unisono.tf._entries import device_dtype

#: A number, a key of JAX, or None.
Seed: TypeAlias = int | jax.Array | None

#: By thread: the layers whose call runs, the innermost last.
_CALLS = threading.local()

#: A layer's attribute with the generator of what it draws without a seed. Keras saves it with the layer.
_SEEDS = "seeds_of_call"


@contextlib.contextmanager
def layer_call(layer: keras.Layer) -> Iterator[None]:
    """Let a layer's call draw random numbers without a seed: of a generator that becomes part of the layer.

    Keras on JAX demands one, as a compiled step has no other state.
    """
    # Keras takes no further state for a layer that is built.
    if not layer.built and not hasattr(layer, _SEEDS) and _draws(layer):
        setattr(layer, _SEEDS, keras.random.SeedGenerator())
    around = getattr(_CALLS, "layers", ())
    _CALLS.layers = (*around, layer)
    try:
        yield
    finally:
        _CALLS.layers = around


def _draws(layer: keras.Layer) -> bool:
    """Return whether the code of a program's own layer names random operations."""
    if type(layer) is keras.layers.Lambda:
        return _names_random(getattr(layer.function, "__code__", None))
    kind: Any = type(layer)
    return _class_draws(kind)


@functools.cache
def _class_draws(kind: type) -> bool:
    own = (c for c in kind.__mro__ if not c.__module__.startswith(("keras.", "builtins", "unisono.")))
    return any(_names_random(getattr(f, "__code__", None)) for c in own for f in vars(c).values())


def _names_random(code: types.CodeType | None) -> bool:
    if code is None:
        return False
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return any("random" in name for name in code.co_names) or any(map(_names_random, inner))


def seed_of(seed: Seed) -> Any:
    """Return the seed for random numbers: that of the code, of the step, or of the layer that is called.

    Returns:
        The seed; None for Keras' own generator, outside of steps.
    """
    found = running_step().seed(seed)
    if found is None:
        held = (getattr(layer, _SEEDS, None) for layer in reversed(getattr(_CALLS, "layers", ())))
        return next((seeds for seeds in held if seeds is not None), None)
    return found


def _distribution(draw: Callable[..., jax.Array], kind: str) -> Callable[..., jax.Array]:
    """Return the function of `tf.random` for one of `keras.random`."""

    def drawn(
        shape: Sequence[int],
        mean: float = 0.0,
        stddev: float = 1.0,
        dtype: DTypeLike = "float32",
        seed: Seed = None,
    ) -> jax.Array:
        return draw(tuple(shape), mean, stddev, device_dtype(dtype), seed_of(seed))

    drawn.__name__ = draw.__name__
    drawn.__doc__ = f"""Return numbers of a normal distribution{kind}.

    Args:
        shape: of the result.
        mean: of the distribution.
        stddev: its standard deviation.
        dtype: of the numbers.
        seed: for the same numbers at each call; None for new ones.
    """
    return drawn


normal = _distribution(keras.random.normal, "")
truncated_normal = _distribution(
    keras.random.truncated_normal, ", none further than two standard deviations from its mean"
)


def uniform(
    shape: Sequence[int],
    minval: float = 0,
    maxval: float | None = None,
    dtype: DTypeLike = "float32",
    seed: Any = None,
) -> Any:
    """Return numbers of a uniform distribution.

    Args:
        shape: of the result.
        minval: the smallest number.
        maxval: all numbers are smaller; None for 1.
        dtype: of the numbers: integers with an integer dtype.
        seed: for the same numbers at each call; None for new ones.
    """
    kind = keras.backend.standardize_dtype(device_dtype(dtype))
    draw = keras.random.randint if "int" in kind else keras.random.uniform
    numbers: jax.Array = draw(tuple(shape), minval, 1 if maxval is None else maxval, kind, seed_of(seed))
    return numbers


def categorical(logits: Any, num_samples: int, dtype: DTypeLike = "int32", seed: int | None = None) -> Any:
    """Return draws of categories.

    Args:
        logits: of shape (rows, categories).
        num_samples: how many are drawn in each row.
        dtype: of the indices.
        seed: for numbers that can be repeated.
    """
    drawn: jax.Array = keras.random.categorical(
        logits, num_samples, device_dtype(np.dtype(dtype)), seed_of(seed)
    )
    return drawn


def as_initializer(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `tf.random.normal` and its like as an initializer of Keras; other initializers as they are."""
    if inspect.unwrap(function) not in (normal, truncated_normal, uniform):
        return function

    def initialized(shape: Sequence[int], dtype: DTypeLike = "float32") -> Any:
        # Keras asks for stand-ins where it builds a model while tracing, and for the numbers afterwards.
        is_traced = isinstance(jnp.zeros(()), jax.core.Tracer)
        return keras.ops.zeros(tuple(shape), dtype) if is_traced else function(shape, dtype=dtype)

    return initialized


def set_seed(seed: int) -> None:
    """Let all random numbers begin with a seed: Keras', NumPy's, Python's and those of steps."""
    keras.utils.set_random_seed(seed)
    set_step_seed(seed)
