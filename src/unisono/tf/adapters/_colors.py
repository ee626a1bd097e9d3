"""Colors of images as `tf.image` changes them.

Tests: tests/unit/tf/test_colors.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np

from unisono._errors import InvalidArgumentError
from unisono.tf._entries import TensorLike
from unisono.tf.adapters._images import convert_image_dtype
from unisono.tf.adapters._random import seed_of


def adjust_brightness(image: TensorLike, delta: Any) -> Any:
    """Return images with a number added to all values."""
    return _as_floats(image, lambda x: x + jnp.asarray(delta, x.dtype))


def adjust_contrast(images: TensorLike, contrast_factor: Any) -> Any:
    """Return images whose distance from each channel's mean is multiplied."""

    def adjusted(x: Any) -> Any:
        mean = x.mean((-3, -2), keepdims=True)
        return (x - mean) * contrast_factor + mean

    return _as_floats(images, adjusted)


def adjust_saturation(image: TensorLike, saturation_factor: Any) -> Any:
    """Return images whose saturation is multiplied."""

    def adjusted(x: Any) -> Any:
        hue, saturation, value = _hsv(x)
        return _rgb(hue, jnp.clip(saturation * saturation_factor, 0, 1), value)

    return _as_floats(image, adjusted)


def adjust_hue(image: TensorLike, delta: Any) -> Any:
    """Return images whose colors are turned by a part of the circle of colors."""

    def adjusted(x: Any) -> Any:
        hue, saturation, value = _hsv(x)
        return _rgb((hue + delta) % 1.0, saturation, value)

    return _as_floats(image, adjusted)


def adjust_gamma(image: TensorLike, gamma: float = 1, gain: float = 1) -> Any:
    """Return images to the power of `gamma`, times `gain`."""
    return _as_floats(image, lambda x: gain * x**gamma)


def rgb_to_hsv(images: TensorLike) -> Any:
    """Return images with hue, saturation and value instead of colors."""
    return jnp.stack(_hsv(jnp.asarray(images)), -1)


def hsv_to_rgb(images: TensorLike) -> Any:
    """Return images with colors instead of hue, saturation and value."""
    return _rgb(*jnp.moveaxis(jnp.asarray(images), -1, 0))


def random_brightness(image: TensorLike, max_delta: float, seed: int | None = None) -> Any:
    """Return images with a random number added, from -`max_delta` to `max_delta`."""
    _check_range("max_delta", 0.0, max_delta)
    return adjust_brightness(image, _between(-max_delta, max_delta, seed))


def random_contrast(image: TensorLike, lower: float, upper: float, seed: int | None = None) -> Any:
    """Return images with a random contrast, of a factor from `lower` to `upper`."""
    _check_range("upper", max(lower, 0.0), upper)
    return adjust_contrast(image, _between(lower, upper, seed))


def random_saturation(image: TensorLike, lower: float, upper: float, seed: int | None = None) -> Any:
    """Return images with a random saturation, of a factor from `lower` to `upper`."""
    _check_range("upper", max(lower, 0.0), upper)
    return adjust_saturation(image, _between(lower, upper, seed))


def random_hue(image: TensorLike, max_delta: float, seed: int | None = None) -> Any:
    """Return images whose colors are turned by a random part of the circle, up to `max_delta`."""
    _check_range("max_delta", 0.0, max_delta)
    return adjust_hue(image, _between(-max_delta, max_delta, seed))


def _check_range(name: str, least: float, value: float) -> None:
    if value < least:
        raise InvalidArgumentError(f"`{name}` must be at least {least}. Received: {value}.")


def _between(low: float, high: float, seed: int | None) -> Any:
    return keras.random.uniform((), low, high, seed=seed_of(seed))


def _as_floats(image: TensorLike, change: Callable[[Any], Any]) -> Any:
    """Return changed images of the same dtype; integers are changed as floats between 0 and 1."""
    given = jnp.asarray(image)
    floats = convert_image_dtype(given, "float32") if given.dtype.kind in "iu" else given
    changed = change(floats.astype("float32")).astype(floats.dtype)
    if given.dtype.kind not in "iu":
        return changed
    largest = float(np.iinfo(given.dtype).max)
    # With the rounding of TensorFlow's conversion back.
    return jnp.clip(changed * (largest + 0.5), 0, largest).astype(given.dtype)


def _hsv(image: Any) -> tuple[Any, Any, Any]:
    red, green, blue = jnp.moveaxis(image, -1, 0)
    value = image.max(-1)
    chroma = value - image.min(-1)
    safe = jnp.where(chroma > 0, chroma, 1)
    sector = jnp.where(
        red == value,
        (green - blue) / safe,
        jnp.where(green == value, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    hue = jnp.where(chroma > 0, sector / 6, 0) % 1.0
    return hue, jnp.where(value > 0, chroma / jnp.where(value > 0, value, 1), 0), value


def _rgb(hue: Any, saturation: Any, value: Any) -> Any:
    # Each color is full in a third of the circle, and rises or falls in a sixth on either side.
    places = jnp.stack([hue * 6 - 3, hue * 6 - 2, hue * 6 - 4], -1)
    signs, starts = jnp.asarray([1.0, -1.0, -1.0], value.dtype), jnp.asarray([-1.0, 2.0, 2.0], value.dtype)
    colors = jnp.clip(starts + signs * jnp.abs(places), 0, 1)
    return ((colors - 1) * saturation[..., None] + 1) * value[..., None]
