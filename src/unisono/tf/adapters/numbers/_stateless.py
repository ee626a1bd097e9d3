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

from unisono._errors import InvalidArgumentError
from unisono.spi import Holder, running_step
from unisono.tf._entries import TensorLike
from unisono.tf.adapters import _images, _random


def key_of(seed: TensorLike) -> jax.Array:
    """Return the key of JAX for a seed of TensorFlow's stateless operations.

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


def _of_seed(draw: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return the stateless form of a distribution, whose `seed` is two integers."""

    def drawn(
        shape: Sequence[int], seed: TensorLike, *args: object, alg: str | None = None, **kwargs: object
    ) -> jax.Array:
        return draw(shape, *args, seed=key_of(seed), **kwargs)

    drawn.__name__, drawn.__doc__ = f"stateless_{draw.__name__}", draw.__doc__
    return drawn


normal, truncated_normal, uniform = map(_of_seed, (_random.normal, _random.truncated_normal, _random.uniform))


def split(seed: TensorLike, num: int = 2, **kwargs: object) -> jax.Array:
    """Return new seeds, made of one.

    Returns:
        An array of shape (num, 2).
    """
    return jax.random.bits(key_of(seed), (num, 2), np.uint32).astype(np.int32)


def _of_image(random: Callable[..., Any]) -> Callable[..., Any]:
    """Return the stateless form of an augmentation, whose `seed` is two integers."""

    def augmented(*args: Any, seed: Any = None, **kwargs: object) -> Any:
        if seed is None:
            *args, seed = args  # type: ignore[assignment]  # the last one, where it is not named
        return random(*args, seed=key_of(seed), **kwargs)

    augmented.__name__ = f"stateless_{random.__name__}"
    return augmented


random_brightness = _of_image(_images.random_brightness)
random_contrast = _of_image(_images.random_contrast)
random_crop = _of_image(_images.random_crop)
random_flip_left_right = _of_image(_images.random_flip_left_right)
random_flip_up_down = _of_image(_images.random_flip_up_down)
random_hue = _of_image(_images.random_hue)
random_saturation = _of_image(_images.random_saturation)


def _of_generator(draw: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return the method of a generator for a function that takes a seed."""

    def drawn(self: RandomGenerator, *args: object, name: str | None = None, **kwargs: object) -> jax.Array:
        return draw(*args, seed=self._next(), **kwargs)

    drawn.__name__, drawn.__doc__ = draw.__name__, draw.__doc__
    return drawn


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
    def from_seed(cls, seed: int, alg: str | None = None) -> RandomGenerator:
        """Return a generator that begins with a seed."""
        return cls(int(seed))

    @classmethod
    def from_non_deterministic_state(cls, alg: str | None = None) -> RandomGenerator:
        """Return a generator that begins by chance."""
        return cls()

    def reset_from_seed(self, seed: int) -> None:
        """Begin again."""
        self._seed, self._drawn = int(seed) & 0x7FFFFFFF, 0
        # One that a step makes each time, and does not keep, needs no variable: it draws the same each time.
        self._seeds = None if running_step().is_repeated else keras.random.SeedGenerator(self._seed)

    def _next(self) -> Any:
        """Return the seed of the next numbers."""
        if self._seeds is not None:
            return self._seeds.next()
        self._drawn += 1
        return key_of((self._seed, self._drawn - 1))

    normal = _of_generator(_random.normal)
    truncated_normal = _of_generator(_random.truncated_normal)
    uniform = _of_generator(_random.uniform)

    def make_seeds(self, count: int = 1) -> jax.Array:
        """Return seeds for the stateless operations.

        Returns:
            An array of shape (2, count).
        """
        return split(self._next(), count).T

    def split(self, count: int = 1) -> list[RandomGenerator]:
        """Return new generators."""
        return [RandomGenerator(int(seed) & 0x7FFFFFFF) for seed in self.make_seeds(count)[0]]


_GLOBAL: list[RandomGenerator] = []


def get_global_generator() -> RandomGenerator:
    """Return the generator that a program has set, or one that begins by chance."""
    if not _GLOBAL:
        _GLOBAL.append(RandomGenerator())
    return _GLOBAL[0]


def set_global_generator(generator: RandomGenerator) -> None:
    """Set what `get_global_generator` returns."""
    _GLOBAL[:] = [generator]
