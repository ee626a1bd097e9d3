"""A few bytes by which the batches of several processes are compared: pure.

Integers must be equal. Floats may differ in rounding, as machines of different kinds compute them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

#: Bytes of the digest of all that must be equal: half of a SHA-256, against accidents and not attackers.
_DIGEST = 16

#: Sums of floats, each with its own signs: two different batches agree in one by chance, hardly in four.
_SUMS = 4

#: Bytes of a fingerprint.
SIZE = _DIGEST + 8 * _SUMS

#: Elements of an array of floats that are summed, at most: about a millisecond, for batches of any size.
_ELEMENTS = 1 << 16

#: How far sums may be apart, as a share of the sum of magnitudes: float32 rounds an element by 6e-8, and
#: another row of a batch of 1000 changes about 1e-3.
_ROUNDING = 1e-5


def fingerprint(arrays: Sequence[ArrayLike]) -> bytes:
    """Return `SIZE` bytes for the arrays of a batch.

    >>> one, other = np.arange(6.0), np.arange(6.0)[::-1]
    >>> are_near([fingerprint([one]), fingerprint([one * (1 + 1e-7)])])
    True
    >>> are_near([fingerprint([one]), fingerprint([other])])
    False
    """
    state, sums = hashlib.sha256(), np.zeros(_SUMS)
    for array in map(np.asarray, arrays):
        state.update(f"{array.shape} {array.dtype}".encode())
        # Kind V: bfloat16 and the float8 types, which NumPy does not count as floats.
        if array.dtype.kind in "fcV" and array.size and not array.dtype.hasobject:
            sums += _sums_of(array)
        elif array.dtype.kind not in "OV":
            state.update(np.ascontiguousarray(array).tobytes())
    return state.digest()[:_DIGEST] + sums.astype("<f8").tobytes()


def _sums_of(array: np.ndarray) -> np.ndarray:
    """Sums of some elements with alternating signs, as shares of the sum of their magnitudes."""
    flat = array.reshape(-1)[:: max(1, array.size // _ELEMENTS)]
    flat = np.concatenate([flat.real, flat.imag]) if array.dtype.kind == "c" else flat
    values = np.nan_to_num(flat.astype(np.float64), nan=1.5, posinf=2.5, neginf=-2.5)
    values /= np.abs(values).sum() or 1.0
    # Multiplicative hashing by the golden ratio instead of NumPy's random generator: the same signs on all
    # machines, whatever the version of NumPy.
    numbers = np.arange(1, len(values) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    signs = (
        (numbers[None] >> (np.uint64(40) + np.arange(_SUMS, dtype=np.uint64))[:, None]) & np.uint64(1)
    ) * 2.0
    return np.asarray((signs - 1.0) @ values)


def are_near(fingerprints: Sequence[bytes]) -> bool:
    """Return whether all are fingerprints of the same batch."""
    if any(f[:_DIGEST] != fingerprints[0][:_DIGEST] for f in fingerprints):
        return False
    sums = np.array([np.frombuffer(f[_DIGEST:SIZE], "<f8") for f in fingerprints])
    return bool((np.abs(sums - sums[0]) <= _ROUNDING).all())
