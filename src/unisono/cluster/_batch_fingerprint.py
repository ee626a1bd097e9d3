"""A few bytes that tell whether batches of several processes hold the same: pure.

Integers must be equal. Floats may differ in rounding, as machines of different kinds compute them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

#: Bytes of the digest of all that must be equal.
_DIGEST = 16

#: Sums of floats, each with signs of its own.
_SUMS = 4

#: Bytes of a fingerprint.
SIZE = _DIGEST + 8 * _SUMS

#: Elements of an array of floats that are looked at.
_ELEMENTS = 1 << 16

#: How far sums may be apart, as a share of what an array's elements add up to.
_ROUNDING = 1e-5


def fingerprint(arrays: Sequence[Any]) -> bytes:
    """Return `SIZE` bytes for the arrays of a batch.

    Args:
        arrays: on the host.

    >>> one, other = np.arange(6.0), np.arange(6.0)[::-1]
    >>> are_near([fingerprint([one]), fingerprint([one * (1 + 1e-7)])])
    True
    >>> are_near([fingerprint([one]), fingerprint([other])])
    False
    """
    state, sums = hashlib.sha256(), np.zeros(_SUMS)
    for array in map(np.asarray, arrays):
        state.update(f"{array.shape} {array.dtype}".encode())
        # Also bfloat16 and its like, which are no floats for NumPy.
        if array.dtype.kind in "fcV" and array.size and not array.dtype.hasobject:
            sums += _sums_of(array)
        elif array.dtype.kind not in "OV":
            state.update(np.ascontiguousarray(array).tobytes())
    return state.digest()[:_DIGEST] + sums.astype("<f8").tobytes()


def _sums_of(array: np.ndarray) -> np.ndarray:
    """Sums of some of an array's elements with changing signs, as shares of the sum without."""
    flat = array.reshape(-1)[:: max(1, array.size // _ELEMENTS)]
    flat = np.concatenate([flat.real, flat.imag]) if array.dtype.kind == "c" else flat
    values = np.nan_to_num(flat.astype(np.float64), nan=1.5, posinf=2.5, neginf=-2.5)
    values /= np.abs(values).sum() or 1.0
    # The same on all machines, whatever the version of NumPy.
    numbers = np.arange(1, len(values) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    signs = (
        (numbers[None] >> (np.uint64(40) + np.arange(_SUMS, dtype=np.uint64))[:, None]) & np.uint64(1)
    ) * 2.0
    return np.asarray((signs - 1.0) @ values)


def are_near(fingerprints: Sequence[bytes]) -> bool:
    """Whether all are those of the same batch.

    Args:
        fingerprints: of the processes.
    """
    if any(f[:_DIGEST] != fingerprints[0][:_DIGEST] for f in fingerprints):
        return False
    sums = np.array([np.frombuffer(f[_DIGEST:SIZE], "<f8") for f in fingerprints])
    return bool((np.abs(sums - sums[0]) <= _ROUNDING).all())
