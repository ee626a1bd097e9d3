"""Colors of images as `tf.image` changes them.

Tests: tests/unit/tf/test_colors.py.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.typing import ArrayLike

from unisono._errors import InvalidArgumentError
from unisono.tf._entries import TensorLike
from unisono.tf.adapters._images import convert_image_dtype
from unisono.tf.adapters._random import Seed, seed_of


def adjust_brightness(image: TensorLike, delta: ArrayLike) -> jax.Array:
    """Return images with a number added to all values."""
    return _as_floats(image, lambda x: x + jnp.asarray(delta, x.dtype))


def adjust_contrast(images: TensorLike, contrast_factor: ArrayLike) -> jax.Array:
    """Return images whose distance from each channel's mean is multiplied."""

    def adjusted(x: jax.Array) -> jax.Array:
        mean = x.mean((-3, -2), keepdims=True)
        return (x - mean) * contrast_factor + mean

    return _as_floats(images, adjusted)


def adjust_saturation(image: TensorLike, saturation_factor: ArrayLike) -> jax.Array:
    """Return images whose saturation is multiplied."""
    return _in_hsv(image, lambda hsv: hsv.at[..., 1].set(jnp.clip(hsv[..., 1] * saturation_factor, 0, 1)))


def adjust_hue(image: TensorLike, delta: ArrayLike) -> jax.Array:
    """Return images whose colors are turned by a part of the circle of colors."""
    return _in_hsv(image, lambda hsv: hsv.at[..., 0].set((hsv[..., 0] + delta) % 1.0))


def _in_hsv(image: TensorLike, change: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Return images whose hue, saturation and value are changed."""
    return _as_floats(image, lambda x: hsv_to_rgb(change(rgb_to_hsv(x))))


def adjust_gamma(image: TensorLike, gamma: float = 1, gain: float = 1) -> jax.Array:
    """Return images to the power of `gamma`, times `gain`."""
    return _as_floats(image, lambda x: gain * x**gamma)


def rgb_to_hsv(images: TensorLike) -> jax.Array:
    """Return images with hue, saturation and value instead of colors."""
    found: jax.Array = keras.ops.image.rgb_to_hsv(jnp.asarray(images), "channels_last")
    return found


def hsv_to_rgb(images: TensorLike) -> jax.Array:
    """Return images with colors instead of hue, saturation and value."""
    found: jax.Array = keras.ops.image.hsv_to_rgb(jnp.asarray(images), "channels_last")
    return found


def random_brightness(image: TensorLike, max_delta: float, seed: Seed = None) -> jax.Array:
    """Return images with a random number added, from -`max_delta` to `max_delta`."""
    _check_range("max_delta", 0.0, max_delta)
    return adjust_brightness(image, _between(-max_delta, max_delta, seed))


def random_contrast(image: TensorLike, lower: float, upper: float, seed: Seed = None) -> jax.Array:
    """Return images with a random contrast, of a factor from `lower` to `upper`."""
    _check_range("upper", max(lower, 0.0), upper)
    return adjust_contrast(image, _between(lower, upper, seed))


def random_saturation(image: TensorLike, lower: float, upper: float, seed: Seed = None) -> jax.Array:
    """Return images with a random saturation, of a factor from `lower` to `upper`."""
    _check_range("upper", max(lower, 0.0), upper)
    return adjust_saturation(image, _between(lower, upper, seed))


def random_hue(image: TensorLike, max_delta: float, seed: Seed = None) -> jax.Array:
    """Return images whose colors are turned by a random part of the circle, up to `max_delta`."""
    _check_range("max_delta", 0.0, max_delta)
    return adjust_hue(image, _between(-max_delta, max_delta, seed))


def _check_range(name: str, least: float, value: float) -> None:
    if value < least:
        raise InvalidArgumentError(f"`{name}` must be at least {least}. Received: {value}.")


def _between(low: float, high: float, seed: Seed) -> jax.Array:
    drawn: jax.Array = keras.random.uniform((), low, high, seed=seed_of(seed))
    return drawn


def _as_floats(image: TensorLike, change: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Return changed images of the same dtype; integers are changed as floats between 0 and 1."""
    given = jnp.asarray(image)
    floats = convert_image_dtype(given, "float32") if given.dtype.kind in "iu" else given
    changed = change(floats.astype("float32")).astype(floats.dtype)
    if given.dtype.kind not in "iu":
        return changed
    largest = float(np.iinfo(given.dtype).max)
    # With the rounding of TensorFlow's conversion back.
    return jnp.clip(changed * (largest + 0.5), 0, largest).astype(given.dtype)
