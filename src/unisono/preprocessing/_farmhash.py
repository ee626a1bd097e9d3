"""FarmHash's 64-bit fingerprint of many strings at once, in NumPy.

The hash is a few operations on 64-bit words of a string, which differ by its length: strings of one class of
lengths are computed together. No package is needed, and all versions of Python have the same numbers.

Source: https://github.com/google/farmhash/blob/master/src/farmhash.cc (`farmhashna::Hash64`)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_K0, _K1, _K2 = map(np.uint64, (0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F))
_SEED = 81
#: Bytes behind the last string that a word may begin in.
_BEHIND = 8

_Words = np.ndarray[Any, np.dtype[np.uint64]]
_Places = np.ndarray[Any, np.dtype[np.int64]]


def fingerprints_of(strings: Sequence[bytes]) -> _Words:
    """Return the fingerprint of each string.

    >>> fingerprints_of([b"hello"]).tolist()
    [13009744463427800296]
    """
    texts = _StringBytes(strings)
    result = np.empty(len(strings), np.uint64)
    for low, high, compute in _CLASSES:
        (which,) = np.nonzero((texts.lengths >= low) & (texts.lengths <= high))
        if len(which):
            result[which] = compute(texts, texts.begins[which], texts.lengths[which])
    return result


class _StringBytes:
    """Strings one after the other, in which a word can begin at any byte."""

    def __init__(self, strings: Sequence[bytes]) -> None:
        self.lengths: _Places = np.fromiter(map(len, strings), np.int64, len(strings))
        self.begins: _Places = np.cumsum(self.lengths) - self.lengths
        self._bytes = np.frombuffer(b"".join([*strings, bytes(_BEHIND)]), np.uint8)

    def byte(self, at: _Places) -> _Words:
        """The bytes at some places."""
        return self._bytes[at].astype(np.uint64)

    def half(self, at: _Places) -> _Words:
        """The words of 32 bits that begin at some bytes."""
        return self._view("<u4")[at].astype(np.uint64)

    def word(self, at: _Places) -> _Words:
        """The words of 64 bits that begin at some bytes."""
        return self._view("<u8")[at].astype(np.uint64)

    def _view(self, dtype: str) -> np.ndarray:
        count = len(self._bytes) - np.dtype(dtype).itemsize + 1
        return np.ndarray((count,), dtype, self._bytes, strides=(1,))


def _empty(texts: _StringBytes, at: _Places, lengths: _Places) -> _Words:
    return np.full(len(at), _K2)


def _to_3(texts: _StringBytes, at: _Places, lengths: _Places) -> _Words:
    first, middle, last = texts.byte(at), texts.byte(at + lengths // 2), texts.byte(at + lengths - 1)
    y = first + (middle << 8)
    z = lengths.astype(np.uint64) + (last << 2)
    return _mixed(y * _K2 ^ z * _K0) * _K2


def _to_7(texts: _StringBytes, at: _Places, lengths: _Places) -> _Words:
    size = lengths.astype(np.uint64)
    first, last = texts.half(at), texts.half(at + lengths - 4)
    return _joined(size + (first << 3), last, _factor(lengths))


def _to_16(texts: _StringBytes, at: _Places, lengths: _Places) -> _Words:
    factor = _factor(lengths)
    a, b = texts.word(at) + _K2, texts.word(at + lengths - 8)
    c = _rotated(b, 37) * factor + a
    d = (_rotated(a, 25) + b) * factor
    return _joined(c, d, factor)


def _to_32(texts: _StringBytes, at: _Places, lengths: _Places) -> _Words:
    factor = _factor(lengths)
    a, b = texts.word(at) * _K1, texts.word(at + 8)
    end = at + lengths
    c, d = texts.word(end - 8) * factor, texts.word(end - 16) * _K2
    return _joined(_rotated(a + b, 43) + _rotated(c, 30) + d, a + _rotated(b + _K2, 18) + c, factor)


def _to_64(texts: _StringBytes, at: _Places, lengths: _Places) -> _Words:
    factor = _factor(lengths)
    a, b = texts.word(at) * _K2, texts.word(at + 8)
    end = at + lengths
    c, d = texts.word(end - 8) * factor, texts.word(end - 16) * _K2
    y = _rotated(a + b, 43) + _rotated(c, 30) + d
    z = _joined(y, a + _rotated(b + _K2, 18) + c, factor)
    e, f = texts.word(at + 16) * factor, texts.word(at + 24)
    g, h = (y + texts.word(end - 32)) * factor, (z + texts.word(end - 24)) * factor
    return _joined(_rotated(e + f, 43) + _rotated(g, 30) + h, e + _rotated(f + a, 18) + g, factor)


def _longer(texts: _StringBytes, at: _Places, lengths: _Places) -> _Words:
    """The fingerprints of strings of more than 64 bytes, read in blocks of 64, the last ones again."""
    state = _HashState(texts.word(at))
    blocks = (lengths - 1) // 64
    for block in range(int(blocks.max())):
        (which,) = np.nonzero(blocks > block)
        state.read(which, texts, at[which] + 64 * block)
    return state.end(texts, at + lengths - 64, lengths)


class _HashState:
    """The seven words that FarmHash keeps of each string that it has read in part."""

    def __init__(self, first: _Words) -> None:
        count = len(first)
        seed = np.full(count, _SEED, np.uint64)
        y = seed * _K1 + np.uint64(113)
        z = _mixed(y * _K2 + np.uint64(113)) * _K2
        zero = np.zeros(count, np.uint64)
        #: x, y, z and the pairs v and w.
        self._words = np.stack([seed * _K2 + first, y, z, zero, zero, zero, zero])

    def read(self, which: _Places, texts: _StringBytes, at: _Places) -> None:
        """Read a block of 64 bytes of some of the strings."""
        x, y, z, v1, v2, w1, w2 = self._words[:, which]
        x = _rotated(x + y + v1 + texts.word(at + 8), 37) * _K1
        y = _rotated(y + v2 + texts.word(at + 48), 42) * _K1
        x = x ^ w2
        y = y + v1 + texts.word(at + 40)
        z = _rotated(z + w1, 33) * _K1
        v1, v2 = _weak(texts, at, v2 * _K1, x + w1)
        w1, w2 = _weak(texts, at + 32, z + w2, y + texts.word(at + 16))
        self._words[:, which] = z, y, x, v1, v2, w1, w2

    def end(self, texts: _StringBytes, at: _Places, lengths: _Places) -> _Words:
        """Read the last 64 bytes, and return the fingerprints."""
        x, y, z, v1, v2, w1, w2 = self._words
        factor = _K1 + ((z & np.uint64(0xFF)) << 1)
        w1 = w1 + ((lengths - 1) & 63).astype(np.uint64)
        v1 = v1 + w1
        w1 = w1 + v1
        x = _rotated(x + y + v1 + texts.word(at + 8), 37) * factor
        y = _rotated(y + v2 + texts.word(at + 48), 42) * factor
        x = x ^ w2 * np.uint64(9)
        y = y + v1 * np.uint64(9) + texts.word(at + 40)
        z = _rotated(z + w1, 33) * factor
        v1, v2 = _weak(texts, at, v2 * factor, x + w1)
        w1, w2 = _weak(texts, at + 32, z + w2, y + texts.word(at + 16))
        z, x = x, z
        first = _joined(v1, w1, factor) + _mixed(y) * _K0 + z
        return _joined(first, _joined(v2, w2, factor) + x, factor)


def _weak(texts: _StringBytes, at: _Places, a: _Words, b: _Words) -> tuple[_Words, _Words]:
    """Return FarmHash's `WeakHashLen32WithSeeds` of 32 bytes."""
    first, second, third, last = (texts.word(at + begin) for begin in (0, 8, 16, 24))
    a = a + first
    b = _rotated(b + a + last, 21)
    c = a
    a = a + second + third
    return a + last, b + _rotated(a, 44) + c


def _factor(lengths: _Places) -> _Words:
    return _K2 + lengths.astype(np.uint64) * np.uint64(2)


def _joined(first: _Words, second: _Words, factor: _Words) -> _Words:
    """Return FarmHash's `HashLen16` of two words."""
    a = _mixed((first ^ second) * factor)
    return _mixed((second ^ a) * factor) * factor


def _mixed(words: _Words) -> _Words:
    return words ^ (words >> np.uint64(47))


def _rotated(words: _Words, bits: int) -> _Words:
    return (words >> np.uint64(bits)) | (words << np.uint64(64 - bits))


#: The shortest and the longest strings of a class, and their function.
_CLASSES = (
    (0, 0, _empty),
    (1, 3, _to_3),
    (4, 7, _to_7),
    (8, 16, _to_16),
    (17, 32, _to_32),
    (33, 64, _to_64),
    (65, np.iinfo(np.int64).max, _longer),
)
