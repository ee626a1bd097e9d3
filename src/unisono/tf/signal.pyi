"""Names of `tf.signal`, for editors and type checkers; `python -m tools.stubs` makes this file."""

import builtins as _b
from typing import Any as _Any

def fft(a: _Any = ..., n: _b.int | None = ..., axis: _b.int = ..., norm: _b.str | None = ..., name: _b.str | None = ..., *, input: _Any = ...) -> _Any:
    """Compute a one-dimensional discrete Fourier transform along a given axis."""
def fft2d(a: _Any = ..., s: _Any = ..., axes: _Any = ..., norm: _b.str | None = ..., name: _b.str | None = ..., *, input: _Any = ...) -> _Any:
    """Compute a two-dimensional discrete Fourier transform along given axes."""
def frame(signal: _Any, frame_length: _b.int, frame_step: _b.int, pad_end: _b.bool = ..., pad_value: _b.float = ..., axis: _b.int = ..., name: _b.str | None = ...) -> _Any:
    """Return the frames of a signal, which may overlap, as an axis before that of their samples."""
def hamming_window(window_length: _b.int, periodic: _b.bool = ..., dtype: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return a Hamming window."""
def hann_window(window_length: _b.int, periodic: _b.bool = ..., dtype: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return a Hann window."""
def ifft(a: _Any = ..., n: _b.int | None = ..., axis: _b.int = ..., norm: _b.str | None = ..., name: _b.str | None = ..., *, input: _Any = ...) -> _Any:
    """Compute a one-dimensional inverse discrete Fourier transform."""
def ifft2d(a: _Any = ..., s: _Any = ..., axes: _Any = ..., norm: _b.str | None = ..., name: _b.str | None = ..., *, input: _Any = ...) -> _Any:
    """Compute a two-dimensional inverse discrete Fourier transform."""
def irfft(input_tensor: _Any, fft_length: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return the real numbers of a transform."""
def irfft2d(input_tensor: _Any, fft_length: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return the real numbers of a transform along two axes."""
def rfft(input_tensor: _Any, fft_length: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return the transform of real numbers along the last axis."""
def rfft2d(input_tensor: _Any, fft_length: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return the transform of real numbers along the last two axes."""
def stft(signals: _Any, frame_length: _b.int, frame_step: _b.int, fft_length: _b.int | None = ..., window_fn: _Any = ..., pad_end: _b.bool = ..., name: _b.str | None = ...) -> _Any:
    """Return the transforms of a signal's frames."""
