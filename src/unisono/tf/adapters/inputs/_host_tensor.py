"""Tensors of the host: elements of datasets, and strings.

Tests: tests/unit/tf/test_elements.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from unisono.preprocessing._fingerprints import on_host
from unisono.step.eager._recording import watched_array
from unisono.tf.adapters._spellings import check_shape

#: A string, or an array or nested list of them.
TextLike: TypeAlias = str | bytes | np.ndarray | Sequence["TextLike"]


class HostTensor(np.ndarray):
    """An array of a dataset's element, or of strings: NumPy's, with the method `numpy()` that tensors have.

    >>> np.arange(3).view(HostTensor).numpy()
    array([0, 1, 2])
    """

    def numpy(self) -> Any:
        """Return a copy of the plain array, or number, or bytes."""
        return np.array(self)[()]

    def set_shape(self, shape: Sequence[int | None] | None) -> None:
        """Check the shape.

        Args:
            shape: with None where any size is allowed.

        Raises:
            InvalidArgumentError: the array has another shape.
        """
        check_shape(self, shape)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: object) -> Any:
        # Where a tape watches the element, JAX computes, so that the tape can record it.
        arrays = [watched_array(x) if isinstance(x, HostTensor) else None for x in inputs]
        if method == "__call__" and any(a is not None for a in arrays) and hasattr(jnp, ufunc.__name__):
            given = [x if a is None else a for x, a in zip(inputs, arrays, strict=True)]
            return getattr(jnp, ufunc.__name__)(*given, **kwargs)
        plain = [_plain(x) for x in inputs]
        if any(isinstance(x, np.ndarray) and x.dtype == object for x in plain):
            # Strings are bytes here; a program writes text.
            plain = [on_host(x, ufunc.__name__) if np.asarray(x).dtype.kind in "SU" else x for x in plain]
        found = getattr(ufunc, method)(*plain, **jax.tree.map(_plain, kwargs))
        return jax.tree.map(as_tensor, found)

    def __getitem__(self, key: Any) -> Any:
        array = watched_array(self)
        found = super().__getitem__(key) if array is None else array[key]
        return as_tensor(found) if isinstance(found, (bytes, np.generic)) else found

    def __iter__(self) -> Any:
        # NumPy's own gives numbers and bytes without `numpy()`.
        return map(self.__getitem__, range(len(self)))

    # A number or string is what it holds for plain Python, too: a key of a dict, and a string's methods.
    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self.item())

    def __len__(self) -> int:
        return len(self.item()) if self._is_string() else super().__len__()

    def __getattr__(self, name: str) -> Any:
        if self._is_string():
            return getattr(self.item(), name)
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}.")

    def __fspath__(self) -> Any:
        return self.item()

    def _is_string(self) -> bool:
        return self.ndim == 0 and self.dtype == object


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, HostTensor) else value


def as_tensor(leaf: Any) -> Any:
    """Return an array, number or string of the host as a tensor; other objects as they are."""
    if isinstance(leaf, bytes):
        # As an object: NumPy's own strings end before a zero byte.
        return np.asarray(leaf, object).view(HostTensor)
    # Not what a traced function reads, and no datasets, which windows hold.
    return np.asarray(leaf).view(HostTensor) if isinstance(leaf, (np.ndarray, np.generic)) else leaf


def is_text(value: object) -> bool:
    """Return whether a value is a string, or an array of strings.

    Args:
        value: any; not a list.
    """
    return isinstance(value, (str, bytes)) or (isinstance(value, np.ndarray) and value.dtype.kind in "SUO")


def is_text_dtype(dtype: object) -> bool:
    """Return whether a dtype is `tf.string`."""
    return dtype == "string" if isinstance(dtype, str) else getattr(dtype, "kind", "") == "O"


def text(values: object) -> HostTensor:
    """Return strings as a tensor of the host.

    >>> text(["a", "b"]).numpy()
    array([b'a', b'b'], dtype=object)
    """
    return on_host(values, "A tensor of strings").view(HostTensor)
