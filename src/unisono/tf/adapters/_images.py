"""Images as `tf.image` names them, over `keras.ops.image`.

Tests: tests/unit/tf/test_tensors.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import numpy.typing as npt
from keras import ops

from unisono._types import PyTree
from unisono.step.variables._seeds import seed_of_step


def resize(
    images: PyTree,
    size: Sequence[int],
    method: str = "bilinear",
    preserve_aspect_ratio: bool = False,
    antialias: bool = False,
    name: str | None = None,
) -> Any:
    """Return images of another size, as float32 (with "nearest", of their own dtype)."""
    images = jnp.asarray(images)
    made = images if method == "nearest" else images.astype("float32")
    if preserve_aspect_ratio:
        height, width = made.shape[-3:-1]
        scale = min(size[0] / height, size[1] / width)
        size = round(height * scale), round(width * scale)
    return ops.image.resize(made, tuple(size), method, antialias, data_format="channels_last")


def flip_left_right(image: PyTree) -> Any:
    """Return images with left and right exchanged."""
    return ops.flip(image, axis=-2)


def random_flip_left_right(image: PyTree, seed: int | None = None) -> Any:
    """Return images, each of them flipped or not, by chance."""
    image = jnp.asarray(image)
    flips = keras.random.uniform(image.shape[:-3], seed=seed_of_step(seed)) < 0.5
    return jnp.where(flips[..., None, None, None], jnp.flip(image, -2), image)


def random_crop(value: PyTree, size: Sequence[int], seed: int | None = None, name: str | None = None) -> Any:
    """Return a piece of an array, at a random place."""
    value = jnp.asarray(value)
    room = jnp.asarray([have - want + 1 for have, want in zip(value.shape, size, strict=True)])
    starts = (keras.random.uniform(room.shape, seed=seed_of_step(seed)) * room).astype("int32")
    return ops.slice(value, starts, tuple(size))


def convert_image_dtype(image: PyTree, dtype: npt.DTypeLike, saturate: bool = False) -> Any:
    """Return images of another dtype: floats lie between 0 and 1, integers use their whole range."""
    image, target = jnp.asarray(image), jnp.dtype(dtype)
    to_int, from_int = (float(np.iinfo(d).max) if d.kind in "iu" else 1.0 for d in (target, image.dtype))
    is_float = jnp.issubdtype(image.dtype, jnp.floating), jnp.issubdtype(target, jnp.floating)
    if is_float == (False, True):
        return image.astype(target) * (1 / from_int)
    if is_float == (True, False):
        return jnp.clip(image * (to_int + 0.5), 0, to_int).astype(target)
    return image.astype(target)


def per_image_standardization(image: PyTree) -> Any:
    """Return images with mean 0 and variance 1 each."""
    image = jnp.asarray(image, "float32")
    axes = (-3, -2, -1)
    count = image.shape[-3] * image.shape[-2] * image.shape[-1]
    mean = image.mean(axes, keepdims=True)
    # TensorFlow's lower bound of the deviation, so that a uniform image is not divided by zero.
    deviation = jnp.maximum(image.std(axes, keepdims=True), count**-0.5)
    return (image - mean) / deviation


def grayscale_to_rgb(images: PyTree, name: str | None = None) -> Any:
    """Return images of one channel as ones of three equal channels."""
    return jnp.repeat(jnp.asarray(images), 3, axis=-1)
