"""Random numbers of a seed that the caller gives each time, and generators of TensorFlow 2.

Tests: tests/unit/tf/test_stateless.py.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import numpy.typing as npt

from unisono._errors import InvalidArgumentError
from unisono._types import PyTree
from unisono.checkpoint._tracking import Holder
from unisono.step._program import current_frame
from unisono.step._scope import is_discovering
from unisono.tf._entries import device_dtype
from unisono.tf.adapters import _colors, _images, _random


def key_of(seed: PyTree) -> jax.Array:
    """Return the key of JAX for a seed of TensorFlow's stateless operations.

    Args:
        seed: two integers.

    Raises:
        InvalidArgumentError: it has another shape.

    >>> key_of((1, 2))
    Array([1, 2], dtype=uint32)
    """
    pair = seed if isinstance(seed, jax.Array) else np.asarray(seed, np.int64) & 0xFFFFFFFF
    if pair.shape != (2,):
        raise InvalidArgumentError(
            f"A seed must be two integers. Received: seed of shape {pair.shape}. Write `seed=(1, 2)`, or "
            "`generator.make_seeds()[:, 0]`."
        )
    return jnp.asarray(pair, np.uint32)


def normal(
    shape: Sequence[int],
    seed: PyTree,
    mean: float = 0.0,
    stddev: float = 1.0,
    dtype: npt.DTypeLike = "float32",
    **kwargs: Any,
) -> Any:
    """Return numbers of a normal distribution, the same for the same seed."""
    return keras.random.normal(tuple(shape), mean, stddev, device_dtype(dtype), key_of(seed))


def truncated_normal(
    shape: Sequence[int],
    seed: PyTree,
    mean: float = 0.0,
    stddev: float = 1.0,
    dtype: npt.DTypeLike = "float32",
    **kwargs: Any,
) -> Any:
    """Return numbers of a truncated normal distribution, the same for the same seed."""
    return keras.random.truncated_normal(tuple(shape), mean, stddev, device_dtype(dtype), key_of(seed))


def uniform(
    shape: Sequence[int],
    seed: PyTree,
    minval: float = 0,
    maxval: float | None = None,
    dtype: npt.DTypeLike = "float32",
    **kwargs: Any,
) -> Any:
    """Return numbers of a uniform distribution, the same for the same seed."""
    return _random.uniform(shape, minval, maxval, dtype, key_of(seed))


def split(seed: PyTree, num: int = 2, **kwargs: Any) -> jax.Array:
    """Return new seeds, made of one.

    Args:
        seed: two integers.
        num: how many.
        **kwargs: are not used.

    Returns:
        An array of shape (num, 2).
    """
    return jax.random.bits(key_of(seed), (num, 2), np.uint32).astype(np.int32)


def of_image(random: Callable[..., Any]) -> Callable[..., Any]:
    """Return the stateless form of an augmentation, whose `seed` is two integers.

    Args:
        random: the augmentation, with an argument `seed`.
    """

    def augmented(*args: Any, seed: PyTree = None, **kwargs: Any) -> Any:
        if seed is None:
            *args, seed = args  # type: ignore[assignment]  # the last one, where it is not named
        return random(*args, seed=key_of(seed), **kwargs)

    augmented.__name__ = f"stateless_{random.__name__}"
    return augmented


random_brightness = of_image(_colors.random_brightness)
random_contrast = of_image(_colors.random_contrast)
random_crop = of_image(_images.random_crop)
random_flip_left_right = of_image(_images.random_flip_left_right)
random_flip_up_down = of_image(_images.random_flip_up_down)
random_hue = of_image(_colors.random_hue)
random_saturation = of_image(_colors.random_saturation)


class RandomGenerator(Holder):
    """Random numbers of a state of their own, as `tf.random.Generator` makes them.

    Args:
        seed: of the state; None for one by chance.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self.reset_from_seed(secrets.randbits(31) if seed is None else seed)

    @property
    def state(self) -> Any:
        """The variable that holds the state; in a step that makes the generator anew, its numbers."""
        return jnp.asarray([self._seed, self._drawn]) if self._seeds is None else self._seeds.state

    @property
    def objects(self) -> dict[str, Any]:
        """What a checkpoint saves and restores."""
        return {} if self._seeds is None else {"state": self._seeds.state}

    @classmethod
    def from_seed(cls, seed: int, alg: Any = None) -> RandomGenerator:
        """Return a generator that begins with a seed.

        Args:
            seed: any integer.
            alg: is not used: the numbers are JAX's.
        """
        return cls(int(seed))

    @classmethod
    def from_non_deterministic_state(cls, alg: Any = None) -> RandomGenerator:
        """Return a generator that begins by chance.

        Args:
            alg: is not used.
        """
        return cls()

    def reset_from_seed(self, seed: int) -> None:
        """Begin again.

        Args:
            seed: any integer.
        """
        self._seed, self._drawn = int(seed) & 0x7FFFFFFF, 0
        # One that a step makes each time, and does not keep, needs no variable: it draws the same each time.
        is_made_again = current_frame() is not None and not is_discovering()
        self._seeds = None if is_made_again else keras.random.SeedGenerator(self._seed)

    def _next(self) -> Any:
        """Return the seed of the next numbers."""
        if self._seeds is not None:
            return self._seeds.next()
        self._drawn += 1
        return key_of((self._seed, self._drawn - 1))

    def normal(
        self,
        shape: Sequence[int],
        mean: float = 0.0,
        stddev: float = 1.0,
        dtype: npt.DTypeLike = "float32",
        name: str | None = None,
    ) -> Any:
        """Return numbers of a normal distribution."""
        return keras.random.normal(tuple(shape), mean, stddev, device_dtype(dtype), self._next())

    def truncated_normal(
        self,
        shape: Sequence[int],
        mean: float = 0.0,
        stddev: float = 1.0,
        dtype: npt.DTypeLike = "float32",
        name: str | None = None,
    ) -> Any:
        """Return numbers of a truncated normal distribution."""
        return keras.random.truncated_normal(tuple(shape), mean, stddev, device_dtype(dtype), self._next())

    def uniform(
        self,
        shape: Sequence[int],
        minval: float = 0,
        maxval: float | None = None,
        dtype: npt.DTypeLike = "float32",
        name: str | None = None,
    ) -> Any:
        """Return numbers of a uniform distribution."""
        return _random.uniform(shape, minval, maxval, dtype, self._next())

    def make_seeds(self, count: int = 1) -> jax.Array:
        """Return seeds for the stateless operations.

        Args:
            count: how many.

        Returns:
            An array of shape (2, count).
        """
        return split(self._next(), count).T

    def split(self, count: int = 1) -> list[RandomGenerator]:
        """Return new generators.

        Args:
            count: how many.
        """
        return [RandomGenerator(int(seed) & 0x7FFFFFFF) for seed in self.make_seeds(count)[0]]


_GLOBAL: list[RandomGenerator] = []


def get_global_generator() -> RandomGenerator:
    """Return the generator that a program has set, or one that begins by chance."""
    if not _GLOBAL:
        _GLOBAL.append(RandomGenerator())
    return _GLOBAL[0]


def set_global_generator(generator: RandomGenerator) -> None:
    """Set what `get_global_generator` returns.

    Args:
        generator: the generator.
    """
    _GLOBAL[:] = [generator]
