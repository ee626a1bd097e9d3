"""Images as `tf.image` names them, over `keras.ops.image`.

Tests: tests/unit/tf/test_tensors.py, tests/unit/tf/test_colors.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import numpy.typing as npt
from jax.typing import ArrayLike
from keras import ops

from unisono._errors import InvalidArgumentError
from unisono.tf._entries import TensorLike
from unisono.tf.adapters._random import Seed, seed_of


class ResizeMethod:
    """The names of the ways to resize."""

    BILINEAR = "bilinear"
    NEAREST_NEIGHBOR = "nearest"
    BICUBIC = "bicubic"
    LANCZOS3 = "lanczos3"
    LANCZOS5 = "lanczos5"


def resize(
    images: TensorLike,
    size: Sequence[int],
    method: str = "bilinear",
    preserve_aspect_ratio: bool = False,
    antialias: bool = False,
) -> Any:
    """Return images of another size, as float32 (with "nearest", of their own dtype)."""
    images = jnp.asarray(images)
    made = images if method == "nearest" else images.astype("float32")
    if preserve_aspect_ratio:
        height, width = made.shape[-3:-1]
        scale = min(size[0] / height, size[1] / width)
        size = round(height * scale), round(width * scale)
    return ops.image.resize(made, tuple(size), method, antialias, data_format="channels_last")


def resize_with_pad(
    image: TensorLike,
    target_height: int,
    target_width: int,
    method: str = "bilinear",
    antialias: bool = False,
) -> Any:
    """Return images of another size, as large as their aspect ratio allows, with zeros around them."""
    image = jnp.asarray(image)
    height, width = image.shape[-3:-1]
    ratio = max(width / target_width, height / target_height)
    made = resize(image, (int(height / ratio), int(width / ratio)), method, antialias=antialias)
    rows, columns = (target_height - height / ratio) // 2, (target_width - width / ratio) // 2
    return pad_to_bounding_box(made, max(0, int(rows)), max(0, int(columns)), target_height, target_width)


def _random_flip(axis: int) -> Callable[..., jax.Array]:
    """Return a function of images that flips each of them along an axis or not, by chance."""

    def flipped(image: TensorLike, seed: int | None = None) -> jax.Array:
        image = jnp.asarray(image)
        flips = keras.random.uniform(image.shape[:-3], seed=seed_of(seed)) < 0.5
        return jnp.where(flips[..., None, None, None], jnp.flip(image, axis), image)

    return flipped


random_flip_left_right, random_flip_up_down = _random_flip(-2), _random_flip(-3)


def random_crop(value: TensorLike, size: Sequence[int], seed: int | None = None) -> Any:
    """Return a piece of an array, at a random place."""
    value = jnp.asarray(value)
    room = jnp.asarray([have - want + 1 for have, want in zip(value.shape, size, strict=True)])
    starts = (keras.random.uniform(room.shape, seed=seed_of(seed)) * room).astype("int32")
    return ops.slice(value, starts, tuple(size))


def convert_image_dtype(image: TensorLike, dtype: npt.DTypeLike, saturate: bool = False) -> Any:
    """Return images of another dtype: floats lie between 0 and 1, integers use their whole range."""
    image, target = jnp.asarray(image), jnp.dtype(dtype)
    to_int, from_int = (float(np.iinfo(d).max) if d.kind in "iu" else 1.0 for d in (target, image.dtype))
    is_float = jnp.issubdtype(image.dtype, jnp.floating), jnp.issubdtype(target, jnp.floating)
    if is_float == (False, True):
        return image.astype(target) * (1 / from_int)
    if is_float == (True, False):
        return jnp.clip(image * (to_int + 0.5), 0, to_int).astype(target)
    return image.astype(target)


def per_image_standardization(image: TensorLike) -> Any:
    """Return images with mean 0 and variance 1 each."""
    image = jnp.asarray(image, "float32")
    axes = (-3, -2, -1)
    count = image.shape[-3] * image.shape[-2] * image.shape[-1]
    mean = image.mean(axes, keepdims=True)
    # TensorFlow's lower bound of the deviation, so that a uniform image is not divided by zero.
    deviation = jnp.maximum(image.std(axes, keepdims=True), count**-0.5)
    return (image - mean) / deviation


def central_crop(image: TensorLike, central_fraction: float) -> Any:
    """Return the middle of images, as large as a fraction of them says."""
    image = jnp.asarray(image)
    height, width = image.shape[-3:-1]
    top, left = (int((size - size * central_fraction) / 2) for size in (height, width))
    return image[..., top : height - top, left : width - left, :]


def crop_to_bounding_box(
    image: TensorLike, offset_height: int, offset_width: int, target_height: int, target_width: int
) -> Any:
    """Return a piece of images.

    Raises:
        InvalidArgumentError: it does not lie in them.
    """
    image = jnp.asarray(image)
    bottom, right = offset_height + target_height, offset_width + target_width
    if min(offset_height, offset_width) < 0 or bottom > image.shape[-3] or right > image.shape[-2]:
        raise InvalidArgumentError(
            f"The piece must lie in the image. Received: rows {offset_height} to {bottom} and columns "
            f"{offset_width} to {right} of shape {image.shape}."
        )
    return image[..., offset_height:bottom, offset_width:right, :]


def pad_to_bounding_box(
    image: TensorLike, offset_height: int, offset_width: int, target_height: int, target_width: int
) -> Any:
    """Return images with zeros around them.

    Raises:
        InvalidArgumentError: they do not fit into the target.
    """
    image = jnp.asarray(image)
    below = target_height - offset_height - image.shape[-3]
    right = target_width - offset_width - image.shape[-2]
    if min(offset_height, offset_width, below, right) < 0:
        raise InvalidArgumentError(
            f"The image must fit into the target. Received: shape {image.shape} at row {offset_height}, "
            f"column {offset_width} of {target_height} rows and {target_width} columns."
        )
    rest = [(0, 0)] * (image.ndim - 3)
    return jnp.pad(image, [*rest, (offset_height, below), (offset_width, right), (0, 0)])


def resize_with_crop_or_pad(image: TensorLike, target_height: int, target_width: int) -> Any:
    """Return the middle of images, with zeros around it where they are smaller."""
    image = jnp.asarray(image)
    height, width = image.shape[-3:-1]
    have = min(height, target_height), min(width, target_width)
    cut = crop_to_bounding_box(
        image, max(height - target_height, 0) // 2, max(width - target_width, 0) // 2, *have
    )
    rows, columns = max(target_height - height, 0) // 2, max(target_width - width, 0) // 2
    return pad_to_bounding_box(cut, rows, columns, target_height, target_width)


def total_variation(images: TensorLike) -> jax.Array:
    """Return the sum of differences between neighbours, of one image or of each.

    >>> float(total_variation(jnp.array([[[0.0], [2.0]], [[1.0], [1.0]]])))
    4.0
    """
    images = jnp.asarray(images)
    axes = (-3, -2, -1)
    rows, columns = jnp.diff(images, axis=-3), jnp.diff(images, axis=-2)
    return jnp.abs(rows).sum(axes) + jnp.abs(columns).sum(axes)


def extract_patches(
    images: TensorLike, sizes: Sequence[int], strides: Sequence[int], rates: Sequence[int], padding: str
) -> Any:
    """Return the patches of images, each with its rows, columns and channels in one axis.

    Args:
        images: of shape (n, height, width, channels).
        sizes: `[1, rows, columns, 1]` of a patch.
        strides: `[1, rows, columns, 1]` from patch to patch.
        rates: `[1, rows, columns, 1]` from pixel to pixel of a patch.
        padding: "VALID" or "SAME".

    >>> extract_patches(np.ones((1, 4, 4, 3)), [1, 2, 2, 1], [1, 2, 2, 1], [1, 1, 1, 1], "VALID").shape
    (1, 2, 2, 12)
    """
    size, stride, rate = (tuple(int(n) for n in given[1:3]) for given in (sizes, strides, rates))
    given = ops.convert_to_tensor(images)
    return ops.image.extract_patches(given, size, stride, rate, padding.lower())


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
    found: jax.Array = ops.image.rgb_to_hsv(jnp.asarray(images), "channels_last")
    return found


def hsv_to_rgb(images: TensorLike) -> jax.Array:
    """Return images with colors instead of hue, saturation and value."""
    found: jax.Array = ops.image.hsv_to_rgb(jnp.asarray(images), "channels_last")
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
