"""Fourier transforms as `tf.signal` names them, over `jax.numpy.fft`.

Tests: tests/unit/tf/test_signal_numbers.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from unisono.tf._entries import TensorLike


def rfft(input_tensor: TensorLike, fft_length: Sequence[int] | None = None) -> jax.Array:
    """Return the transform of real numbers along the last axis."""
    return jnp.fft.rfft(jnp.asarray(input_tensor), _length(fft_length))


def irfft(input_tensor: TensorLike, fft_length: Sequence[int] | None = None) -> jax.Array:
    """Return the real numbers of a transform."""
    return jnp.fft.irfft(jnp.asarray(input_tensor), _length(fft_length))


def rfft2d(input_tensor: TensorLike, fft_length: Sequence[int] | None = None) -> jax.Array:
    """Return the transform of real numbers along the last two axes."""
    return jnp.fft.rfft2(jnp.asarray(input_tensor), _lengths(fft_length))


def irfft2d(input_tensor: TensorLike, fft_length: Sequence[int] | None = None) -> jax.Array:
    """Return the real numbers of a transform along two axes."""
    return jnp.fft.irfft2(jnp.asarray(input_tensor), _lengths(fft_length))


def _length(fft_length: Sequence[int] | None) -> int | None:
    return None if fft_length is None else int(jnp.ravel(jnp.asarray(fft_length))[0])


def _lengths(fft_length: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if fft_length is None else tuple(map(int, fft_length))


def hann_window(window_length: int, periodic: bool = True, dtype: DTypeLike = "float32") -> jax.Array:
    """Return a Hann window.

    >>> hann_window(4).tolist()
    [0.0, 0.5, 1.0, 0.5]
    """
    return _raised_cosine(window_length, periodic, 0.5, dtype)


def hamming_window(window_length: int, periodic: bool = True, dtype: DTypeLike = "float32") -> jax.Array:
    """Return a Hamming window."""
    return _raised_cosine(window_length, periodic, 0.54, dtype)


def _raised_cosine(length: int, periodic: bool, height: float, dtype: DTypeLike) -> jax.Array:
    if length == 1:
        return jnp.ones(1, dtype)
    # As in TensorFlow, where a window of odd length is symmetric, "periodic" or not.
    steps = length if periodic and length % 2 == 0 else length - 1
    return (height - (1 - height) * jnp.cos(2 * jnp.pi * jnp.arange(length) / steps)).astype(dtype)


def frame(
    signal: TensorLike,
    frame_length: int,
    frame_step: int,
    pad_end: bool = False,
    pad_value: float = 0,
    axis: int = -1,
) -> jax.Array:
    """Return the frames of a signal, which may overlap, as an axis before that of their samples."""
    signal = jnp.moveaxis(jnp.asarray(signal), axis, -1)
    size = signal.shape[-1]
    count = -(-size // frame_step) if pad_end else max(0, 1 + (size - frame_length) // frame_step)
    missing = max(0, (count - 1) * frame_step + frame_length - size) if pad_end else 0
    signal = jnp.pad(signal, [(0, 0)] * (signal.ndim - 1) + [(0, missing)], constant_values=pad_value)
    places = jnp.arange(count)[:, None] * frame_step + jnp.arange(frame_length)
    frames = signal[..., places]
    return frames if axis in (-1, frames.ndim - 2) else jnp.moveaxis(frames, (-2, -1), (axis, axis + 1))


def stft(
    signals: TensorLike,
    frame_length: int,
    frame_step: int,
    fft_length: int | None = None,
    window_fn: Callable[..., Any] | None = hann_window,
    pad_end: bool = False,
) -> jax.Array:
    """Return the transforms of a signal's frames."""
    frames = frame(signals, frame_length, frame_step, pad_end)
    if window_fn is not None:
        frames = frames * window_fn(frame_length, dtype=frames.dtype)
    # The smallest power of two that encloses a frame.
    length = 1 << (frame_length - 1).bit_length() if fft_length is None else int(fft_length)
    return jnp.fft.rfft(frames, length)
