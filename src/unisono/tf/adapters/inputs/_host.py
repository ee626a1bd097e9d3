"""Plain Python among tensors: `tf.py_function`, `tf.TensorArray`.

Tests: tests/unit/tf/test_host.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from unisono._errors import InvalidArgumentError, NeedsValueError
from unisono._types import PyTree
from unisono.preprocessing._fingerprints import on_host
from unisono.tf._entries import device_dtype
from unisono.tf.adapters.inputs._host_tensor import HostTensor


def _host_function(kind: Callable[[Any], Any], inputs: str) -> Callable[..., Any]:
    """Return `tf.py_function` or its like, by what it makes of each argument."""

    def host_function(
        func: Callable[..., Any] | None = None,
        inp: Sequence[PyTree] | None = None,
        Tout: PyTree = None,  # noqa: N803 (TensorFlow's name)
        stateful: bool = True,
    ) -> Any:
        if func is None:
            return lambda function: host_function(function, None, Tout)
        if inp is None:
            return functools.wraps(func)(lambda *args: host_function(func, args, Tout))
        return _call(func, inp, Tout, kind)

    host_function.__doc__ = f"""Call a function with {inputs}, in `Dataset.map` or outside of functions.

    Args:
        func: takes them; None for a decorator.
        inp: its arguments; None for a function of them.
        Tout: the dtypes of its results: a list, or one of them; `[]` or None for no result.
        stateful: is not used.

    Raises:
        NeedsValueError: in a step, which is traced.
    """
    return host_function


py_function = _host_function(
    lambda x: x if hasattr(x, "numpy") else np.asarray(x).view(HostTensor), "tensors, each with `numpy()`"
)
numpy_function = _host_function(lambda x: np.asarray(x).view(np.ndarray)[()], "arrays of NumPy")


def _call(func: Callable[..., Any], inp: Sequence[PyTree], dtypes: PyTree, kind: Callable[..., Any]) -> Any:
    if any(isinstance(x, jax.core.Tracer) for x in inp):
        raise NeedsValueError(
            "`tf.py_function` and `tf.numpy_function` run in `Dataset.map` and outside of functions. "
            "Received: tensors in a step, which is traced. Write `jax.pure_callback` there, with the "
            "result's shape."
        )
    result = func(*map(kind, inp))
    if dtypes is None or (isinstance(dtypes, (list, tuple)) and not dtypes):
        return None
    if isinstance(dtypes, (list, tuple)):
        results = result if isinstance(result, (list, tuple)) else [result]
        return [_as(x, dtype) for x, dtype in zip(results, dtypes, strict=True)]
    return _as(result, dtypes)


def _as(value: PyTree, dtype: Any) -> Any:
    if isinstance(dtype, str) and dtype == "string":
        return on_host(value, "tf.py_function").view(HostTensor)
    if isinstance(value, jax.Array):
        return value.astype(device_dtype(np.dtype(dtype)))
    return np.asarray(value, np.dtype(dtype)).view(HostTensor)


class TensorArray:
    """A list of tensors, whose places are known while a function is traced.

    Args:
        dtype: of the tensors.
        size: how many there are; more with `dynamic_size`.
        dynamic_size: whether `write` makes it longer.
        **kwargs: are not used.
    """

    def __init__(self, dtype: Any, size: Any = 0, dynamic_size: bool = False, **kwargs: object) -> None:
        self.dtype = dtype
        self.dynamic_size = bool(dynamic_size)
        self._items: list[Any] = [None] * _place(0 if size is None else size)

    def write(self, index: Any, value: PyTree, name: str | None = None) -> TensorArray:
        """Set one tensor; return the array.

        Raises:
            InvalidArgumentError: there is no such place.
        """
        place = _place(index)
        if self.dynamic_size:
            self._items += [None] * (place + 1 - len(self._items))
        if not 0 <= place < len(self._items):
            raise InvalidArgumentError(
                f"A place must be below the size, {len(self._items)}. Received: index={place}. Write "
                "`tf.TensorArray(dtype, size=0, dynamic_size=True)` for an array that grows."
            )
        self._items[place] = jnp.asarray(value, device_dtype(np.dtype(self.dtype)))
        return self

    def read(self, index: Any, name: str | None = None) -> Any:
        """Return one tensor.

        Raises:
            InvalidArgumentError: nothing was written there.
        """
        place = _place(index)
        if not 0 <= place < len(self._items) or self._items[place] is None:
            raise InvalidArgumentError(
                f"A tensor is read after it was written. Received: index={place}, of {len(self._items)}."
            )
        return self._items[place]

    def stack(self, name: str | None = None) -> Any:
        """Return all tensors as one, along a new first axis."""
        return jnp.stack([self.read(i) for i in range(len(self._items))])

    def concat(self, name: str | None = None) -> Any:
        """Return all tensors as one, along their first axis."""
        return jnp.concatenate([self.read(i) for i in range(len(self._items))])

    def gather(self, indices: Any, name: str | None = None) -> Any:
        """Return some tensors as one, along a new first axis."""
        return jnp.stack([self.read(i) for i in np.asarray(indices)])

    def unstack(self, value: PyTree, name: str | None = None) -> TensorArray:
        """Set all tensors to those along the first axis of one; return the array."""
        self._items = list(jnp.asarray(value, device_dtype(np.dtype(self.dtype))))
        return self

    def size(self, name: str | None = None) -> int:
        """Return how many places there are."""
        return len(self._items)


def _place(index: Any) -> int:
    if isinstance(index, jax.core.Tracer):
        raise NeedsValueError(
            "The places of a `tf.TensorArray` are known while a function is traced. Received: an index that "
            "is computed. Write `jax.lax.scan`, or `tf.map_fn`, for a loop of tensors."
        )
    return int(index)
