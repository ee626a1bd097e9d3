"""Names of `tf.image`, for editors and type checkers; `python -m tools.stubs` makes this file."""

import builtins as _b
from typing import Any as _Any
from unisono.tf.adapters._images import (
    ResizeMethod as ResizeMethod,
)

def adjust_brightness(image: _Any, delta: _Any, name: _b.str | None = ...) -> _Any:
    """Return images with a number added to all values."""
def adjust_contrast(images: _Any, contrast_factor: _Any, name: _b.str | None = ...) -> _Any:
    """Return images whose distance from each channel's mean is multiplied."""
def adjust_gamma(image: _Any, gamma: _b.float = ..., gain: _b.float = ..., name: _b.str | None = ...) -> _Any:
    """Return images to the power of `gamma`, times `gain`."""
def adjust_hue(image: _Any, delta: _Any, name: _b.str | None = ...) -> _Any:
    """Return images whose colors are turned by a part of the circle of colors."""
def adjust_saturation(image: _Any, saturation_factor: _Any, name: _b.str | None = ...) -> _Any:
    """Return images whose saturation is multiplied."""
def central_crop(image: _Any, central_fraction: _b.float, name: _b.str | None = ...) -> _Any:
    """Return the middle of images, as large as a fraction of them says."""
def convert_image_dtype(image: _Any, dtype: _Any, saturate: _b.bool = ..., name: _b.str | None = ...) -> _Any:
    """Return images of another dtype: floats lie between 0 and 1, integers use their whole range."""
def crop_to_bounding_box(image: _Any, offset_height: _b.int, offset_width: _b.int, target_height: _b.int, target_width: _b.int, name: _b.str | None = ...) -> _Any:
    """Return a piece of images."""
def decode_image(contents: _b.bytes, channels: _b.int = ..., name: _b.str | None = ..., **kwargs: _Any) -> _Any:
    """Return the pixels of an image file: an array of shape [height, width, channels], uint8."""
def decode_jpeg(contents: _b.bytes, channels: _b.int = ..., name: _b.str | None = ..., **kwargs: _Any) -> _Any:
    """Return the pixels of an image file: an array of shape [height, width, channels], uint8."""
def decode_png(contents: _b.bytes, channels: _b.int = ..., name: _b.str | None = ..., **kwargs: _Any) -> _Any:
    """Return the pixels of an image file: an array of shape [height, width, channels], uint8."""
def encode_jpeg(image: _Any, format: _b.str = ..., quality: _b.int = ..., name: _b.str | None = ..., **kwargs: _Any) -> _Any:
    """Return a JPEG file of pixels of shape [height, width, channels], uint8, as a tensor of bytes."""
def encode_png(image: _Any, compression: _b.int = ..., name: _b.str | None = ...) -> _Any:
    """Return a PNG file of pixels of shape [height, width, channels], as a tensor of bytes."""
def extract_patches(images: _Any, sizes: _Any, strides: _Any, rates: _Any, padding: _b.str, name: _b.str | None = ...) -> _Any:
    """Return the patches of images, each with its rows, columns and channels in one axis."""
def flip_left_right(x: _Any = ..., axis: _Any = ..., name: _b.str | None = ..., *, image: _Any = ...) -> _Any:
    """Reverse the order of elements in the tensor along the given axis."""
def flip_up_down(x: _Any = ..., axis: _Any = ..., name: _b.str | None = ..., *, image: _Any = ...) -> _Any:
    """Reverse the order of elements in the tensor along the given axis."""
def grayscale_to_rgb(x: _Any = ..., repeats: _Any = ..., axis: _Any = ..., name: _b.str | None = ..., *, images: _Any = ...) -> _Any:
    """Repeat each element of a tensor after themselves."""
def hsv_to_rgb(images: _Any, name: _b.str | None = ...) -> _Any:
    """Return images with colors instead of hue, saturation and value."""
def pad_to_bounding_box(image: _Any, offset_height: _b.int, offset_width: _b.int, target_height: _b.int, target_width: _b.int, name: _b.str | None = ...) -> _Any:
    """Return images with zeros around them."""
def per_image_standardization(image: _Any, name: _b.str | None = ...) -> _Any:
    """Return images with mean 0 and variance 1 each."""
def random_brightness(image: _Any, max_delta: _b.float, seed: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return images with a random number added, from -`max_delta` to `max_delta`."""
def random_contrast(image: _Any, lower: _b.float, upper: _b.float, seed: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return images with a random contrast, of a factor from `lower` to `upper`."""
def random_crop(value: _Any, size: _Any, seed: _b.int | None = ..., name: _b.str | None = ...) -> _Any:
    """Return a piece of an array, at a random place."""
def random_flip_left_right(image: _Any, seed: _b.int | None = ..., name: _b.str | None = ...) -> _Any:
    ...
def random_flip_up_down(image: _Any, seed: _b.int | None = ..., name: _b.str | None = ...) -> _Any:
    ...
def random_hue(image: _Any, max_delta: _b.float, seed: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return images whose colors are turned by a random part of the circle, up to `max_delta`."""
def random_saturation(image: _Any, lower: _b.float, upper: _b.float, seed: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return images with a random saturation, of a factor from `lower` to `upper`."""
def resize(images: _Any, size: _Any, method: _b.str = ..., preserve_aspect_ratio: _b.bool = ..., antialias: _b.bool = ..., name: _b.str | None = ...) -> _Any:
    """Return images of another size, as float32 (with "nearest", of their own dtype)."""
def resize_image_with_crop_or_pad(image: _Any, target_height: _b.int, target_width: _b.int, name: _b.str | None = ...) -> _Any:
    """Return the middle of images, with zeros around it where they are smaller."""
def resize_images(images: _Any, size: _Any, method: _b.str = ..., preserve_aspect_ratio: _b.bool = ..., antialias: _b.bool = ..., name: _b.str | None = ...) -> _Any:
    """Return images of another size, as float32 (with "nearest", of their own dtype)."""
def resize_with_crop_or_pad(image: _Any, target_height: _b.int, target_width: _b.int, name: _b.str | None = ...) -> _Any:
    """Return the middle of images, with zeros around it where they are smaller."""
def resize_with_pad(image: _Any, target_height: _b.int, target_width: _b.int, method: _b.str = ..., antialias: _b.bool = ..., name: _b.str | None = ...) -> _Any:
    """Return images of another size, as large as their aspect ratio allows, with zeros around them."""
def rgb_to_grayscale(images: _Any, data_format: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Convert RGB images to grayscale."""
def rgb_to_hsv(images: _Any, name: _b.str | None = ...) -> _Any:
    """Return images with hue, saturation and value instead of colors."""
def rot90(m: _Any = ..., k: _b.int = ..., axes: _Any = ..., name: _b.str | None = ..., *, image: _Any = ...) -> _Any:
    """Rotate an array by 90 degrees counterclockwise in the plane specified by axes."""
def stateless_random_brightness(*args: _Any, seed: _Any = ..., name: _b.str | None = ..., **kwargs: _Any) -> _Any:
    ...
def stateless_random_contrast(*args: _Any, seed: _Any = ..., name: _b.str | None = ..., **kwargs: _Any) -> _Any:
    ...
def stateless_random_crop(*args: _Any, seed: _Any = ..., name: _b.str | None = ..., **kwargs: _Any) -> _Any:
    ...
def stateless_random_flip_left_right(*args: _Any, seed: _Any = ..., name: _b.str | None = ..., **kwargs: _Any) -> _Any:
    ...
def stateless_random_flip_up_down(*args: _Any, seed: _Any = ..., name: _b.str | None = ..., **kwargs: _Any) -> _Any:
    ...
def stateless_random_hue(*args: _Any, seed: _Any = ..., name: _b.str | None = ..., **kwargs: _Any) -> _Any:
    ...
def stateless_random_saturation(*args: _Any, seed: _Any = ..., name: _b.str | None = ..., **kwargs: _Any) -> _Any:
    ...
def total_variation(images: _Any, name: _b.str | None = ...) -> _Any:
    """Return the sum of differences between neighbours, of one image or of each."""
def transpose(x: _Any = ..., axis1: _Any = ..., axis2: _Any = ..., name: _b.str | None = ..., *, image: _Any = ...) -> _Any:
    """Interchange two axes of a tensor."""
