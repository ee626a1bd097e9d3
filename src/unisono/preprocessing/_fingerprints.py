"""Strings as arrays of bytes, and TensorFlow's fingerprints of them.

Sources: https://github.com/google/farmhash (Fingerprint64),
https://www.tensorflow.org/api_docs/python/tf/strings/to_hash_bucket_fast,
https://www.tensorflow.org/api_docs/python/tf/sparse/cross_hashed
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono.preprocessing._farmhash import fingerprints_of

#: The seed of TensorFlow's crossed columns and of `tf.sparse.cross_hashed`.
CROSS_KEY = 0xDECAFCAFFE

_MULTIPLIER = np.uint64(0xC6A4A7935BD1E995)
_SHIFT = np.uint64(47)


def terms_of_file(path: str | Path, is_integer: bool) -> list[bytes] | list[int]:
    """Return the terms of a vocabulary file, one in each line.

    Raises:
        InvalidArgumentError: a line of integers is none.
    """
    lines = Path(path).read_bytes().splitlines()
    if not is_integer:
        return lines
    terms = []
    for number, line in enumerate(lines, start=1):
        try:
            # No JAX array holds more.
            terms.append(int(np.int64(int(line[:64]))))
        except (ValueError, OverflowError):
            raise InvalidArgumentError(
                f"Each line of a vocabulary of integers must be one. Received: {line[:64]!r} in line "
                f"{number} of {path}. Take it out, or read the file as strings."
            ) from None
    return terms


def on_host(values: object, caller: str) -> np.ndarray:
    r"""Return values as a NumPy array; strings as an object array of bytes.

    Args:
        values: numbers or strings: an array, a nested list, or one of them.

    Returns:
        An array of numbers, or of bytes.

    Raises:
        InvalidTypeError: the values belong to a JAX program that is being traced, or are neither numbers nor
            strings.

    >>> on_host(["a", "ü"], "StringLookup")
    array([b'a', b'\xc3\xbc'], dtype=object)
    """
    if isinstance(values, jax.core.Tracer):
        raise InvalidTypeError(
            f"{caller} computes on the host, before a step. Received: {values} inside a compiled step. "
            "Call it in the input pipeline: dataset.map(lambda x, y: (layer(x), y))."
        )
    array = np.asarray(values)
    if array.dtype.kind in "USO":
        # Anew, as objects: NumPy's own strings lose trailing zero bytes.
        return _as_bytes(np.asarray(values, object), caller)
    return array


def _as_bytes(array: np.ndarray, caller: str) -> np.ndarray:
    flat = array.ravel().tolist()
    result = np.empty(len(flat), object)
    for index, item in enumerate(flat):
        if not isinstance(item, (str, bytes)):
            raise InvalidTypeError(
                f"{caller} takes numbers or strings. Received: {item!r:.200} of type {type(item).__name__} "
                f"in an array of shape {array.shape}. Pad rows of different lengths with ''."
            )
        result[index] = item.encode() if isinstance(item, str) else item
    return result.reshape(array.shape)


def decimal_strings(array: np.ndarray) -> np.ndarray:
    """Return an array's texts to hash: bytes as they are, numbers as decimal integers.

    >>> decimal_strings(np.array([3, -1]))
    array([b'3', b'-1'], dtype=object)
    """
    if array.dtype.kind == "O":
        return array
    flat = [b"%d" % int(item) for item in array.ravel().tolist()]
    result = np.empty(len(flat), object)
    result[:] = flat
    return result.reshape(array.shape)


def fingerprints(array: np.ndarray) -> np.ndarray:
    """Return FarmHash's 64-bit fingerprints of an object array of bytes.

    >>> int(fingerprints(np.array([b"hello"], object))[0])
    13009744463427800296
    """
    return fingerprints_of(array.ravel().tolist()).reshape(array.shape)


def hash_buckets(array: np.ndarray, buckets: int) -> np.ndarray:
    """Return `tf.strings.to_hash_bucket_fast` of strings, or of numbers written in decimals.

    >>> hash_buckets(on_host(["hello", "world"], "doctest"), 10).tolist()
    [6, 8]
    """
    if buckets == 1:
        return np.zeros(array.shape, np.int64)
    return (fingerprints(decimal_strings(array)) % np.uint64(buckets)).astype(np.int64)


def crossed_buckets(columns: Sequence[np.ndarray], buckets: int, key: int = CROSS_KEY) -> np.ndarray:
    """Return the bucket of each combination of values, as TensorFlow's `sparse_cross_hashed`.

    Args:
        columns: arrays whose shapes broadcast, of bytes or of integers, which count as their own hash.

    >>> crossed_buckets([on_host(["a"], "doctest"), np.array([1])], 100).shape
    (1,)
    """
    crossed = np.asarray(np.uint64(key))
    with np.errstate(over="ignore"):
        for column in columns:
            hashes = fingerprints(column) if column.dtype.kind == "O" else column.astype(np.int64)
            crossed = _joined(crossed, hashes.astype(np.uint64))
    return (crossed % np.uint64(buckets)).astype(np.int64)


def _joined(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return TensorFlow's `FingerprintCat64` of two arrays."""
    result = first ^ _MULTIPLIER
    result = result ^ (_mixed(second * _MULTIPLIER) * _MULTIPLIER)
    result = _mixed(result * _MULTIPLIER) * _MULTIPLIER
    return _mixed(result)


def _mixed(numbers: np.ndarray) -> np.ndarray:
    mixed: np.ndarray = numbers ^ (numbers >> _SHIFT)
    return mixed
