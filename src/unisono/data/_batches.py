"""Check host batches before they are put onto the devices, and compute the specs of their parts; pure.

Tests: tests/virtual/data/test_distribute.py, tests/virtual/training/test_keras_data.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono._features import load
from unisono._types import ArrayLike, PyTree, UserValue
from unisono._values import PerReplica
from unisono.data._pipeline._structure import TensorSpec
from unisono.data._sharding import balanced_sizes

#: The placeholder for the element of a replica whose input has ended before the others'.
ENDED = object()


def as_array(leaf: object) -> ArrayLike:
    """Convert tensors of other libraries to NumPy arrays."""
    if isinstance(leaf, (np.ndarray, jax.Array)):
        return leaf
    # A torch tensor may require gradients, or be on a GPU: NumPy accepts neither.
    if hasattr(leaf, "detach"):
        leaf = leaf.detach().cpu()
    if hasattr(leaf, "__array__"):
        return np.asarray(leaf)
    return leaf


def owned(array: ArrayLike) -> ArrayLike:
    """Return a copy of a NumPy array, which its source may write to again; other arrays as they are.

    JAX may read an aligned buffer in place, and what it copies to a device after the call has returned.
    """
    return np.array(array, subok=True) if isinstance(array, np.ndarray) else array


def check_values(batch: PyTree, name: str = "batch") -> None:
    """Check that JAX can represent the arrays of a batch. Only the values of 64-bit integers are read.

    Raises:
        InvalidTypeError: an array holds strings or Python objects.
        InvalidArgumentError: an integer of 64 bits does not fit into 32, where JAX has
            only 32 bits.

    >>> check_values({"ids": np.array([1, 2])})
    """
    for number, leaf in enumerate(jax.tree.leaves(batch)):
        dtype = getattr(leaf, "dtype", None)
        # JAX's typed random keys have dtypes of their own, which devices hold.
        if not isinstance(dtype, np.dtype):
            continue
        kind = dtype.kind
        # `V` is the kind of bfloat16 and its like. The range comes last, because it reads all values.
        if kind not in "biufcV" or (kind in "iu" and dtype.itemsize == 8 and not _fits(leaf)):
            # Paths are built for the error only.
            path, _ = jax.tree_util.tree_leaves_with_path(batch)[number]
            raise load("mistake")("unusable", f"{name}{jax.tree_util.keystr(path)}", np.asarray(leaf), kind)


def check_no_rows(what: str, data: object) -> None:
    """Raise for rows of Hugging Face or torch: only the user knows what is input and what is target."""
    unusable = _rows_of_hugging_face(data) or _rows_of_torch(data)
    if unusable is not None:
        received, write = unusable
        raise InvalidTypeError(f"{what} needs batches `(x, y)`. Received: {received}. Write {write}.")


def is_of_class(data: object, path: str) -> bool:
    """Return whether an object is of another library's class, which need not be imported.

    >>> is_of_class({}, "builtins.dict")
    True
    """
    return any(f"{kind.__module__}.{kind.__qualname__}" == path for kind in type(data).__mro__)


def _rows_of_hugging_face(data: object) -> tuple[str, str] | None:
    """Return the kind of rows and the line to write; None for other data. It imports neither library."""
    columns = getattr(data, "column_names", None)
    if is_of_class(data, "datasets.arrow_dataset.Column"):
        return (
            "a column of a Hugging Face dataset",
            "`data.with_format('numpy')[:]['x']`, an array of all rows",
        )
    if columns is None or not hasattr(data, "with_format"):
        return None
    if isinstance(data, dict):
        return f"Hugging Face's splits {list(data)}", f"`data = data[{next(iter(data), 'train')!r}]`"
    made = "from_source(data)" if hasattr(data, "__len__") else "from_generator(lambda: data)"
    return (
        f"a Hugging Face dataset of rows with the columns {columns}",
        f"`data = data.with_format('numpy')` and `unisono.data.Dataset.{made}"
        ".map(lambda row: (row['x'], row['y'])).batch(64)`",
    )


def _rows_of_torch(data: object) -> tuple[str, str] | None:
    # One with `__iter__` may give batches.
    if not is_of_class(data, "torch.utils.data.dataset.Dataset") or hasattr(data, "__iter__"):
        return None
    return (
        f"a torch dataset of rows, {type(data).__name__}",
        "`torch.utils.data.DataLoader(data, batch_size=64)`",
    )


def empty(what: str) -> InvalidArgumentError:
    """Return the error for data without rows."""
    return InvalidArgumentError(
        f"Data must hold at least one row. Received: {what}. Check the source: a filter that keeps nothing, "
        "a generator that was read before, a batch size with `drop_remainder=True` above the number of rows."
    )


def _fits(array: np.ndarray | jax.Array) -> bool:
    is_kept = jax.dtypes.canonicalize_dtype(array.dtype).itemsize == 8
    if is_kept or isinstance(array, jax.Array) or not np.size(array):
        return True
    narrow = np.iinfo(np.int32 if array.dtype.kind == "i" else np.uint32)
    return bool(array.max() <= narrow.max and array.min() >= narrow.min)


def check_batched(batch: PyTree, strict: bool) -> None:
    """Check that the elements of an input are batches.

    Args:
        strict: whether every number must have rows; otherwise a batch may also hold scalars, which all
            replicas receive.

    Raises:
        InvalidArgumentError: there are numbers without rows.
    """
    ranks = [np.ndim(leaf) for leaf in jax.tree.leaves(batch) if not isinstance(leaf, (str, bytes))]
    if not ranks or min(ranks) or (not strict and max(ranks)):
        return
    path, leaf = next(
        (path, leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(batch) if not np.ndim(leaf)
    )
    raise unbatched(f"batch{jax.tree_util.keystr(path)}", leaf)


def keys_of_dicts() -> InvalidTypeError:
    """Return the error for torch's loader of dicts: Keras takes their keys for the parts of a batch."""
    return InvalidTypeError(
        "A batch must be `(x, y)`. Received: dicts from a loader, of which only the keys would be left. "
        "Write `unisono.data.Dataset.from_generator(lambda: loader)"
        ".map(lambda batch: (batch['x'], batch['y']))`."
    )


def unbatched(name: str, leaf: ArrayLike) -> InvalidArgumentError | InvalidTypeError:
    """Return the error for a scalar instead of rows."""
    if isinstance(leaf, str):
        return keys_of_dicts()
    return InvalidArgumentError(
        f"Data must be batches, with one row for each example. Received: {name} of shape () = {leaf!r:.60}. "
        "Did you forget `.batch()`? Write `dataset.batch(64)`."
    )


def common_rows(batch: PyTree, arrays: list[Any]) -> int:
    """Return the number of rows, which all arrays of a batch must share; scalars are ignored."""
    shapes = [np.shape(a) if hasattr(a, "shape") else () for a in arrays]
    rows = next((s[0] for s in shapes if s), 0)
    for (path, _), shape in zip(jax.tree_util.tree_leaves_with_path(batch), shapes, strict=True):
        if shape and shape[0] != rows:
            raise InvalidArgumentError(
                "All arrays of a batch must have the same number of rows. Received: shape "
                f"{shape} at batch{jax.tree_util.keystr(path)}, where others have {rows} rows. "
                "Give every array one row for each example; of a dataset of rows write `dataset.batch(64)`."
            )
    return int(rows)


def as_spec(spec: UserValue) -> TensorSpec:
    """Return one component of a specification as a `TensorSpec`.

    Args:
        spec: an object with a shape and a dtype, of NumPy, JAX, Grain or TensorFlow.

    >>> as_spec(jax.ShapeDtypeStruct((2, 3), "float32"))
    TensorSpec(shape=(2, 3), dtype=dtype('float32'))
    """
    # TensorFlow's dtypes are not NumPy's, and its shapes of unknown rank have no length.
    dtype = getattr(spec.dtype, "as_numpy_dtype", spec.dtype)
    is_unknown = spec.shape is None or getattr(spec.shape, "rank", 0) is None
    return TensorSpec(None if is_unknown else tuple(spec.shape), dtype)


def split_spec(spec: PyTree, replicas: int, here: Sequence[int] | None = None) -> PyTree:
    """Return the specification of each replica's part of a global batch.

    Args:
        here: the numbers of this process' replicas; None for all.

    Returns:
        The pytree with a `PerReplica` of `TensorSpec` for each component with rows; with one replica, a
        `TensorSpec`.

    >>> split_spec(TensorSpec((5, 3), "int64"), 2).values[1]
    TensorSpec(shape=(2, 3), dtype=dtype('int32'))
    """

    def split(leaf: object) -> TensorSpec | PerReplica:
        whole = on_devices(leaf)
        # As the batches themselves: one replica gets plain arrays, and scalars are equal on all.
        if replicas == 1 or whole.shape == ():
            return whole
        own = range(replicas) if here is None else here
        if whole.shape is None or whole.shape[0] is None:
            return PerReplica([whole] * len(own))
        sizes = balanced_sizes(whole.shape[0], replicas)
        return PerReplica(TensorSpec((sizes[i], *whole.shape[1:]), whole.dtype) for i in own)

    return jax.tree.map(split, spec)


def on_devices(spec: object) -> TensorSpec:
    """Return a component's specification on the devices, where 64-bit types may become 32-bit ones."""
    own = as_spec(spec)
    if own.dtype.kind not in "biufc":
        return own
    return TensorSpec(own.shape, jax.dtypes.canonicalize_dtype(own.dtype))
