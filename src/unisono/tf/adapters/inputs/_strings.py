"""`tf.strings` on the host: functions of bytes, and of arrays of them, for datasets and eager code.

Tests: tests/unit/tf/test_strings.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from unisono._errors import InvalidArgumentError
from unisono.preprocessing._fingerprints import hash_buckets, on_host
from unisono.tf._entries import TensorLike
from unisono.tf.adapters.inputs._host_tensor import HostTensor, TextLike


def _each(
    function: Callable[..., Any], caller: str, *inputs: TextLike | TensorLike, dtype: Any = object
) -> HostTensor:
    """Return what a function gives for each string of arrays that broadcast."""
    arrays = np.broadcast_arrays(*(on_host(x, f"tf.strings.{caller}") for x in inputs))
    found = np.empty(arrays[0].size, dtype)
    for index, items in enumerate(zip(*(array.ravel().tolist() for array in arrays), strict=True)):
        found[index] = function(*items)
    return found.reshape(arrays[0].shape).view(HostTensor)


def _in_text(function: Callable[[Any], Any], encoding: str) -> Callable[[bytes], bytes]:
    """Return a function of bytes; with an encoding it works on characters, not on those of ASCII alone."""
    return (lambda item: function(item.decode(encoding)).encode(encoding)) if encoding else function


def lower(text: TextLike, encoding: str = "") -> HostTensor:
    """Return strings in lower case.

    >>> lower(["Sea", "SHIP"]).tolist()
    [b'sea', b'ship']
    """
    return _each(_in_text(lambda item: item.lower(), encoding), "lower", text)


def upper(text: TextLike, encoding: str = "") -> HostTensor:
    """Return strings in upper case.

    >>> upper("ü", encoding="utf-8").numpy().decode()
    'Ü'
    """
    return _each(_in_text(lambda item: item.upper(), encoding), "upper", text)


def strip(text: TextLike) -> HostTensor:
    """Return strings without the white space at their ends.

    >>> strip(" sea ").numpy()
    b'sea'
    """
    return _each(bytes.strip, "strip", text)


def regex_replace(text: TextLike, pattern: str, rewrite: str, replace_global: bool = True) -> HostTensor:
    r"""Return strings in which a pattern is replaced.

    Args:
        text: strings.
        pattern: a regular expression.
        rewrite: what stands there instead; `\1` is the first group, `\0` the whole.
        replace_global: whether all places are replaced, or the first alone.

    >>> regex_replace(["a1b22"], "[0-9]+", r"<\0>").tolist()
    [b'a<1>b<22>']
    """
    # Python takes `\0` for an octal number.
    written = re.sub(rb"\\(\d)", rb"\\g<\1>", _bytes(rewrite))
    compiled, count = re.compile(_bytes(pattern)), 0 if replace_global else 1
    return _each(lambda item: compiled.sub(written, item, count=count), "regex_replace", text)


def regex_full_match(text: TextLike, pattern: str) -> HostTensor:
    """Return which strings a pattern describes as a whole.

    >>> regex_full_match(["sea", "seas"], "s.a").tolist()
    [True, False]
    """
    compiled = re.compile(_bytes(pattern))
    return _each(lambda item: bool(compiled.fullmatch(item)), "regex_full_match", text, dtype=bool)


def _bytes(given: TextLike) -> bytes:
    value: bytes = on_host(given, "tf.strings").item()
    return value


def split(text: TextLike, sep: str | bytes | None = None, maxsplit: int = -1) -> HostTensor:
    """Return the parts of one string.

    Args:
        text: a string.
        sep: what stands between the parts; None for white space.
        maxsplit: how often to split; -1 for everywhere.

    Raises:
        InvalidArgumentError: there are several strings.

    >>> split("a/b/c", "/").tolist()
    [b'a', b'b', b'c']
    """
    given = on_host(text, "tf.strings.split")
    if given.ndim:
        raise InvalidArgumentError(
            "`tf.strings.split` takes one string: the parts of several are ragged, and arrays are dense. "
            f"Received: an array of shape {given.shape}. Split in `Dataset.map`, before the batch."
        )
    parts = given.item().split(_bytes(sep) or None if sep is not None else None, maxsplit)
    return on_host(np.array(parts, object), "tf.strings.split").view(HostTensor)


def join(inputs: Sequence[TextLike], separator: str = "") -> HostTensor:
    """Return strings made of one string of each input.

    >>> join([["a", "b"], "c"], separator="-").tolist()
    [b'a-c', b'b-c']
    """
    between = _bytes(separator)
    return _each(lambda *items: between.join(items), "join", *inputs)


def substr(text: TextLike, start: TensorLike, size: TensorLike, unit: str = "BYTE") -> HostTensor:
    """Return a part of each string.

    Args:
        text: strings.
        start: where the part begins; from the end where it is negative.
        size: how many bytes or characters it has.
        unit: "BYTE" or "UTF8_CHAR".

    >>> substr(["abcd"], 1, 2).tolist(), substr("abcd", -3, 2).numpy()
    ([b'bc'], b'bc')
    """

    def part(item: bytes, start: int, size: int) -> bytes:
        def cut(item: Any) -> Any:
            first = start + len(item) if start < 0 else start
            return item[first : first + size]

        return _in_text(cut, "utf-8" if unit == "UTF8_CHAR" else "")(item)

    return _each(part, "substr", text, start, size)


def length(text: TextLike, unit: str = "BYTE") -> HostTensor:
    """Return how many bytes, or characters, strings have.

    >>> length(["ü"]).tolist(), length(["ü"], unit="UTF8_CHAR").tolist()
    ([2], [1])
    """
    size = (lambda item: len(item.decode())) if unit == "UTF8_CHAR" else len
    return _each(size, "length", text, dtype=np.int32)


def to_number(text: TextLike, out_type: DTypeLike = "float32") -> HostTensor:
    """Return the numbers that strings show.

    >>> to_number(["1.5", "-2"]).tolist()
    [1.5, -2.0]
    """
    dtype = np.dtype(out_type)
    return _each(int if dtype.kind == "i" else float, "to_number", text, dtype=dtype)


def to_hash_bucket_fast(text: TextLike, num_buckets: int) -> HostTensor:
    """Return the bucket of each string.

    >>> to_hash_bucket_fast(["hello", "world"], 10).tolist()
    [6, 8]
    """
    return hash_buckets(on_host(text, "tf.strings.to_hash_bucket_fast"), num_buckets).view(HostTensor)
