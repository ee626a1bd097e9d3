"""Initial values of variables by few compiled programs, with the bits of Keras' own.

Keras computes each initial value by itself, and JAX compiles a program for every new shape: 0.1 to 0.5 s for
each shape of uniform random numbers on CPUs, 3.3 s for a ResNet of 20 layers (November 2026). JAX's generator
gives the element of a number the same bits in arrays of all shapes. So the first numbers of a long array are
those of a short one, and a few lengths serve all shapes. Zeros and ones need no program at all.

With `UNISONO_INITIAL_VALUES=xla` in the environment Keras' own programs stay.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.typing import DTypeLike

from unisono._backend import wants_own_lowering
from unisono._types import KerasWrap
from unisono.step._keras_internals import with_names

#: Makes an initial value.
Initializer = Callable[..., jax.Array]

#: Lengths for which random numbers are computed; longer arrays take Keras' own way.
_LENGTHS = (1 << 16, 1 << 18, 1 << 20)

#: The seeds that are taken over: Keras makes others of them, or counts calls.
_SEEDS = range(1 << 32)

#: Types of constants that NumPy knows and JAX keeps.
_CONSTANT = ("float32", "float16", "int32")


class _FewPrograms:
    """Keras' random numbers, with those of a uniform distribution computed for few lengths."""

    def __init__(self, given: Any) -> None:
        self._given = given

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given, name)

    def uniform(
        self,
        shape: Sequence[int],
        minval: float = 0.0,
        maxval: float = 1.0,
        dtype: DTypeLike | None = None,
        seed: object = None,
    ) -> jax.Array:
        """Return what Keras' function of this name returns."""
        own = uniform(shape, minval, maxval, dtype or keras.config.floatx(), seed)
        return self._given.uniform(shape, minval, maxval, dtype, seed) if own is None else own


def uniform(
    shape: Sequence[int], minval: float, maxval: float, dtype: DTypeLike, seed: object
) -> jax.Array | None:
    """Return uniform random numbers with the bits of Keras' own; None where it must compute them.

    >>> uniform((2, 3), 0.0, 1.0, "float32", 7).tolist() == keras.random.uniform((2, 3), seed=7).tolist()
    True
    """
    is_known = type(seed) is int and seed in _SEEDS and dtype == "float32"
    # Bounds may be arrays, which differ by position.
    is_known = is_known and _is_shape(shape) and not np.ndim(minval) and not np.ndim(maxval)
    if not is_known or not _is_by_position():
        return None
    size = math.prod(shape)
    length = next((length for length in _LENGTHS if length >= size), None)
    if not size or length is None:
        return None
    flat = jax.random.uniform(np.array([seed, 0], np.uint32), (length,), dtype, minval, maxval)
    if isinstance(flat, jax.core.Tracer):
        return None
    return _on_device(np.asarray(flat)[:size].reshape(shape))


def _is_shape(shape: object) -> bool:
    """Return whether a shape is usual; Keras takes a number, too, and tells what is wrong with others."""
    if not isinstance(shape, (tuple, list)):
        return False
    return all(isinstance(n, (int, np.integer)) and n >= 0 for n in shape)


def _on_device(value: np.ndarray) -> jax.Array:
    # `jnp.array` would compile a program that copies it. Copied it must be: a step is given its memory.
    placed: jax.Array = jax.device_put(value, may_alias=False)
    return placed


def _is_by_position() -> bool:
    """Return whether the number at a position is the same in arrays of all shapes, and programs are CPUs'."""
    generator, by_position = (
        getattr(jax.config, name) for name in ("jax_default_prng_impl", "jax_threefry_partitionable")
    )
    return generator == "threefry2x32" and bool(by_position) and jax.default_backend() == "cpu"


def random_value(
    original: Initializer, self: keras.Initializer, shape: Sequence[int], dtype: DTypeLike | None = None
) -> jax.Array:
    """Return what an initializer of Keras returns, for its method `__call__`."""
    return _with_few_programs(original)(self, shape, dtype)


@functools.cache
def _with_few_programs(original: Initializer) -> Initializer:
    return with_names(original, random=_FewPrograms)


def constant_value(
    original: Initializer, self: keras.Initializer, shape: Sequence[int], dtype: DTypeLike | None = None
) -> jax.Array:
    """Return zeros or ones without a program, for the method `__call__` of Keras' `Zeros` and `Ones`."""
    kind = keras.config.floatx() if dtype is None else dtype
    is_known = kind in _CONSTANT and _is_shape(shape) and math.prod(shape) <= _LENGTHS[-1]
    if not is_known or jax.default_backend() != "cpu":
        return original(self, shape, dtype)
    return _on_device(np.full(shape, isinstance(self, keras.initializers.Ones), kind))


def wraps() -> list[KerasWrap]:
    """Return what is wrapped of Keras' initializers."""
    if not wants_own_lowering("UNISONO_INITIAL_VALUES"):
        return []
    own = keras.initializers
    return [
        (own.VarianceScaling, "__call__", random_value),
        (own.RandomUniform, "__call__", random_value),
        (own.Zeros, "__call__", constant_value),
        (own.Ones, "__call__", constant_value),
    ]
