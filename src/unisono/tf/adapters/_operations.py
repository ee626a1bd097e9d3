"""Operations whose arguments TensorFlow orders otherwise, each a few lines over `keras.ops`.

Tests: tests/unit/tf/test_operations.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.typing import DTypeLike
from keras import ops

from unisono._errors import InvalidArgumentError
from unisono._types import PyTree
from unisono.step.eager._recording import recording_here
from unisono.tf._entries import TensorLike, device_dtype
from unisono.tf.adapters._random import Seed, seed_of
from unisono.tf.adapters.inputs._host_tensor import HostTensor, is_text, text

#: One axis, several of them, or None for all.
Axes: TypeAlias = int | Sequence[int] | None

#: A number for rows and columns, one for each of them, or one for each of four dimensions.
Sizes: TypeAlias = int | Sequence[int]


def squared_difference(x: TensorLike, y: TensorLike) -> Any:
    """Return `(x - y) ** 2`.

    >>> float(squared_difference(3.0, 1.0))
    4.0
    """
    return ops.square(ops.subtract(x, y))


def argmax(input: TensorLike, axis: int = 0, output_type: DTypeLike = "int32") -> Any:
    """Return the index of the largest number along an axis.

    >>> argmax([[1.0, 3.0], [2.0, 0.0]], axis=1).tolist()
    [1, 0]
    """
    return ops.cast(ops.argmax(input, axis), device_dtype(np.dtype(output_type)))


def argmin(input: TensorLike, axis: int = 0, output_type: DTypeLike = "int32") -> Any:
    """Return the index of the smallest number along an axis.

    >>> argmin([[1.0, 3.0], [2.0, 0.0]], axis=1).tolist()
    [0, 1]
    """
    return ops.cast(ops.argmin(input, axis), device_dtype(np.dtype(output_type)))


def add_n(inputs: Sequence[TensorLike]) -> Any:
    """Return the sum of a list of tensors of one shape.

    >>> float(add_n([1.0, 2.0, 3.0]))
    6.0
    """
    total = ops.convert_to_tensor(inputs[0])
    for value in inputs[1:]:
        total = ops.add(total, value)
    return total


def cumsum(x: TensorLike, axis: int = 0, exclusive: bool = False, reverse: bool = False) -> Any:
    """Return the sums of the entries up to each one along `axis`.

    >>> cumsum([1, 2, 3], exclusive=True).tolist(), cumsum([1, 2, 3], reverse=True).tolist()
    ([0, 1, 3], [6, 5, 3])
    """
    return _cumulated(ops.cumsum, 0, x, axis, exclusive, reverse)


def cumprod(x: TensorLike, axis: int = 0, exclusive: bool = False, reverse: bool = False) -> Any:
    """Return the products of the entries up to each one along `axis`.

    >>> cumprod([2, 3, 4], exclusive=True).tolist(), cumprod([2, 3, 4], 0, True, True).tolist()
    ([1, 2, 6], [12, 4, 1])
    """
    return _cumulated(ops.cumprod, 1, x, axis, exclusive, reverse)


def _cumulated(
    cumulate: Callable[..., Any], first: int, x: TensorLike, axis: int, exclusive: bool, reverse: bool
) -> Any:
    """Return cumulated entries; where they are `exclusive`, without the one at the same place."""
    array = jnp.asarray(x)
    array = jnp.flip(array, axis) if reverse else array
    if exclusive:
        start = jnp.full_like(jax.lax.slice_in_dim(array, 0, 1, axis=axis), first)
        rest = jax.lax.slice_in_dim(array, 0, array.shape[axis] - 1, axis=axis)
        array = jnp.concatenate([start, rest], axis=axis)
    result = cumulate(array, axis=axis)
    return jnp.flip(result, axis) if reverse else result


def confusion_matrix(
    labels: TensorLike,
    predictions: TensorLike,
    num_classes: int | None = None,
    weights: TensorLike | None = None,
    dtype: DTypeLike = "int32",
) -> jax.Array:
    """Return how often each label (row) was predicted as each class (column).

    >>> confusion_matrix([0, 1, 1], [0, 1, 0]).tolist()
    [[1, 0], [1, 1]]
    """
    labels, predictions = jnp.asarray(labels, "int32"), jnp.asarray(predictions, "int32")
    if num_classes is None:
        num_classes = int(jnp.maximum(labels.max(), predictions.max())) + 1
    ones = jnp.ones(labels.shape) if weights is None else jnp.asarray(weights)
    matrix = jnp.zeros((num_classes, num_classes), ones.dtype).at[labels, predictions].add(ones)
    return matrix.astype(dtype)


def concat(values: Sequence[TensorLike], axis: int) -> jax.Array | HostTensor:
    """Return tensors one behind the other along an axis; one alone, not in a list, as it is.

    >>> concat([[1, 2], [3]], 0).tolist(), concat(np.ones((1, 2)), 0).shape
    ([1, 2, 3], (1, 2))
    """
    if not isinstance(values, (list, tuple)):
        values = [values]
    if any(map(is_text, values)):
        return text(np.concatenate([text(v) for v in values], int(axis)))
    return jnp.concatenate([jnp.asarray(v) for v in values], int(axis))


def stack(values: Sequence[TensorLike], axis: int = 0) -> jax.Array | HostTensor:
    """Return tensors of one shape along a new axis.

    >>> stack([[1, 2], [3, 4]], axis=1).tolist()
    [[1, 3], [2, 4]]
    """
    if any(map(is_text, values)):
        return text(np.stack([text(v) for v in values], axis))
    return jnp.stack([jnp.asarray(v) for v in values], axis)


def bincount(
    arr: TensorLike, weights: TensorLike | None = None, minlength: int | None = None, **kwargs: object
) -> Any:
    """Return how often each number from 0 on is there.

    >>> bincount([0, 1, 1]).tolist()
    [1, 2]
    """
    return ops.bincount(jnp.asarray(arr), weights, minlength or 0)


def unsorted_segment_mean(data: TensorLike, segment_ids: TensorLike, num_segments: int) -> jax.Array:
    """Return the means of segments; 0 where there is nothing.

    >>> unsorted_segment_mean([1.0, 2.0, 4.0], [0, 1, 0], 3).tolist()
    [2.5, 2.0, 0.0]
    """
    rows, ids = jnp.asarray(data), jnp.asarray(segment_ids)
    numbers = jax.ops.segment_sum(jnp.ones(ids.shape, rows.dtype), ids, num_segments)
    total = jax.ops.segment_sum(rows, ids, num_segments)
    return total / jnp.maximum(numbers, 1).reshape(-1, *[1] * (total.ndim - 1))


def meshgrid(*args: TensorLike, indexing: str = "xy") -> Any:
    """Return the coordinates of a grid."""
    return ops.meshgrid(*map(jnp.asarray, args), indexing=indexing)


def split(
    value: TensorLike, num_or_size_splits: int | Sequence[int], axis: int = 0, num: int | None = None
) -> Any:
    """Return a tensor in pieces: a number of equal ones, or ones of the given sizes.

    >>> [p.tolist() for p in split([1, 2, 3], [1, 2])]
    [[1], [2, 3]]
    """
    if isinstance(num_or_size_splits, int):
        return ops.split(value, num_or_size_splits, axis)
    sizes = [int(s) for s in num_or_size_splits]
    if -1 in sizes:
        sizes[sizes.index(-1)] = ops.shape(value)[axis] - sum(s for s in sizes if s != -1)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    return ops.split(value, ends, axis)


def gather(
    params: TensorLike,
    indices: TensorLike,
    validate_indices: bool | None = None,
    axis: int | None = None,
    batch_dims: int = 0,
) -> Any:
    """Return the slices of `params` at `indices`.

    >>> gather([[1, 2], [3, 4]], [1]).tolist()
    [[3, 4]]
    """
    axis = batch_dims if axis is None else axis
    if batch_dims:

        def take(p: jax.Array, i: jax.Array) -> Any:
            return gather(p, i, axis=axis - 1, batch_dims=batch_dims - 1)

        return jax.vmap(take)(jnp.asarray(params), jnp.asarray(indices))
    return (
        np.take(text(params), np.asarray(indices), axis)
        if is_text(params)
        else ops.take(params, indices, axis)
    )


def where(condition: TensorLike, x: TensorLike | None = None, y: TensorLike | None = None) -> jax.Array:
    """Return `x` where the condition holds, else `y`; with the condition alone, the indices where it holds.

    >>> where([True, False], 1, 2).tolist(), where([False, True]).tolist()
    ([1, 2], [[1]])
    """
    if x is None:
        return jnp.stack(jnp.nonzero(jnp.asarray(condition)), axis=-1)
    return jnp.where(jnp.asarray(condition), jnp.asarray(x), jnp.asarray(y))


def boolean_mask(tensor: TensorLike, mask: TensorLike, axis: int | None = None) -> jax.Array:
    """Return the entries where a mask holds; outside of functions, since the size depends on the data.

    >>> boolean_mask([1, 2, 3], [True, False, True]).tolist()
    [1, 3]
    """
    start = axis or 0
    mask = jnp.asarray(mask)
    if isinstance(mask, jax.core.Tracer):
        raise InvalidArgumentError(
            "The size of `tf.boolean_mask` depends on the data, and a function is compiled for given sizes. "
            "Received: a mask that the function computes. Write `tf.where(mask, x, 0)`, or call it outside."
        )
    return jnp.asarray(tensor)[(slice(None),) * start + (mask,)]


def one_hot(
    indices: TensorLike,
    depth: int,
    on_value: float | None = None,
    off_value: float | None = None,
    axis: int | None = None,
    dtype: DTypeLike | None = None,
) -> Any:
    """Return vectors that are `on_value` at their index, else `off_value`.

    >>> one_hot([1], 3).tolist()
    [[0.0, 1.0, 0.0]]
    """
    axis = -1 if axis is None else axis
    if on_value is None and off_value is None:
        return ops.one_hot(indices, depth, axis=axis, dtype=dtype or "float32")
    hot = ops.one_hot(indices, depth, axis=axis, dtype="bool")
    made = jnp.where(hot, 1 if on_value is None else on_value, 0 if off_value is None else off_value)
    return made if dtype is None else made.astype(dtype)


def shape(input: Any, out_type: DTypeLike = "int32") -> tuple[int, ...]:
    """Return the shape, as integers: programs are compiled for given shapes."""
    return tuple(jnp.shape(input))


def diag(diagonal: TensorLike) -> jax.Array:
    """Return matrices with a diagonal, and zeros elsewhere."""
    diagonal = jnp.asarray(diagonal)
    return diagonal[..., None] * jnp.eye(diagonal.shape[-1], dtype=diagonal.dtype)


def global_norm(t_list: Sequence[TensorLike]) -> Any:
    """Return the Euclidean norm of all tensors together.

    >>> float(global_norm([3.0, 4.0]))
    5.0
    """
    return ops.sqrt(add_n([ops.sum(ops.square(t)) for t in t_list if t is not None]))


def clip_by_norm(t: TensorLike, clip_norm: TensorLike, axes: Axes = None) -> Any:
    """Return a tensor, made shorter where its norm is larger than `clip_norm`.

    >>> clip_by_norm([3.0, 4.0], 2.5).tolist()
    [1.5, 2.0]
    """
    t = jnp.asarray(t)
    norm = ops.sqrt(ops.sum(ops.square(t), axis=axes, keepdims=True))
    return t * (clip_norm / ops.maximum(norm, clip_norm))


def clip_by_global_norm(
    t_list: Sequence[TensorLike], clip_norm: TensorLike, use_norm: TensorLike | None = None
) -> tuple[list[Any], Any]:
    """Return tensors, made shorter together where their norm is larger than `clip_norm`; and that norm."""
    norm = global_norm(t_list) if use_norm is None else use_norm
    scale = clip_norm / ops.maximum(norm, clip_norm)
    return [None if t is None else t * scale for t in t_list], norm


def l2_normalize(x: TensorLike, axis: Axes = None, epsilon: float = 1e-12) -> Any:
    """Return a tensor divided by its norm along an axis."""
    x = jnp.asarray(x)
    return x * ops.rsqrt(ops.maximum(ops.sum(ops.square(x), axis=axis, keepdims=True), epsilon))


def l2_loss(t: TensorLike) -> Any:
    """Return half of the sum of squares."""
    return ops.sum(ops.square(t)) / 2


def matmul(a: TensorLike, b: TensorLike, transpose_a: bool = False, transpose_b: bool = False) -> Any:
    """Return the product of matrices.

    Raises:
        InvalidArgumentError: their sizes do not fit.
    """
    if transpose_a:
        a = ops.swapaxes(a, -1, -2)
    if transpose_b:
        b = ops.swapaxes(b, -1, -2)
    try:
        return ops.matmul(a, b)
    except TypeError as error:
        first, second = (jnp.asarray(x).shape for x in (a, b))
        if min(len(first), len(second)) < 2 or first[-1] == second[-2]:
            raise
        # Programs catch this one.
        raise InvalidArgumentError(
            "Of two matrices the first must have as many columns as the second has rows. Received: shapes "
            f"{first} and {second}. Transpose one of them."
        ) from error


def while_loop(
    cond: Callable[..., Any],
    body: Callable[..., Any],
    loop_vars: Any,
    shape_invariants: object = None,
    parallel_iterations: int = 10,
    back_prop: bool = True,
    swap_memory: bool = False,
    maximum_iterations: int | None = None,
) -> Any:
    """Return the values after a loop; where a tape records, Python's: JAX cannot differentiate its own."""
    if recording_here() is None:
        return ops.while_loop(cond, body, loop_vars, maximum_iterations)
    is_sequence = isinstance(loop_vars, (list, tuple))
    values = tuple(loop_vars) if is_sequence else (loop_vars,)
    for _ in itertools.count() if maximum_iterations is None else range(int(maximum_iterations)):
        if not bool(cond(*values)):
            break
        found = body(*values)
        values = tuple(found) if isinstance(found, (list, tuple)) else (found,)
    return values if is_sequence else values[0]


def map_fn(fn: Callable[[Any], Any], elems: PyTree, dtype: object = None, **kwargs: object) -> PyTree:
    """Return a function's results for each row, stacked."""
    return ops.vectorized_map(fn, jax.tree.map(jnp.asarray, elems))


def dropout(
    x: TensorLike,
    rate: float | None = None,
    noise_shape: Sequence[int] | None = None,
    seed: Seed = None,
    name: str | None = None,
    keep_prob: float | None = None,
) -> Any:
    """Return a tensor with entries set to zero at random, and the others scaled."""
    if (rate is None) == (keep_prob is None):
        raise InvalidArgumentError(
            f"One of `rate` and `keep_prob` must be given. Received: {rate!r} and {keep_prob!r}."
        )
    rate = 1.0 - (keep_prob or 0.0) if rate is None else rate
    return keras.random.dropout(x, rate, noise_shape, seed_of(seed))


def softmax_cross_entropy(labels: TensorLike, logits: TensorLike, axis: int = -1) -> Any:
    """Return the cross entropy of each example."""
    return -ops.sum(ops.multiply(labels, ops.log_softmax(logits, axis)), axis)


def sigmoid_cross_entropy(labels: TensorLike, logits: TensorLike) -> Any:
    """Return the cross entropy of each entry, in the form that never overflows."""
    overlap = ops.multiply(logits, labels)
    return ops.maximum(logits, 0) - overlap + ops.log1p(ops.exp(-ops.abs(logits)))


def _window(size: Sizes, data_format: str | None) -> tuple[int | tuple[int, ...], str]:
    if data_format not in (None, "NHWC", "NCHW"):
        raise InvalidArgumentError(f"`data_format` is 'NHWC' or 'NCHW'. Received: {data_format!r}.")
    last = data_format != "NCHW"
    if not isinstance(size, int) and len(size) == 4:
        size = size[1:3] if last else size[2:]
    return size if isinstance(size, int) else tuple(size), "channels_last" if last else "channels_first"


def _pool(pool: Callable[..., Any]) -> Callable[..., Any]:
    """Return a pooling of Keras with TensorFlow's arguments."""

    def pooled(
        input: TensorLike, ksize: Sizes, strides: Sizes, padding: str, data_format: str | None = None
    ) -> Any:
        window, form = _window(ksize, data_format)
        return pool(input, window, _window(strides, data_format)[0], padding.lower(), form)

    pooled.__name__, pooled.__doc__ = pool.__name__, pool.__doc__
    return pooled


max_pool, avg_pool = _pool(ops.max_pool), _pool(ops.average_pool)


def conv2d(
    input: TensorLike,
    filters: TensorLike,
    strides: Sizes,
    padding: str,
    data_format: str | None = None,
    dilations: Sizes = 1,
) -> Any:
    """Return a convolution."""
    steps, form = _window(strides, data_format)
    return ops.conv(input, filters, steps, padding.lower(), form, _window(dilations, data_format)[0])


def assert_equal(x: TensorLike, y: TensorLike, message: str | None = None, **kwargs: object) -> None:
    """Raise an error where two tensors differ; outside of functions.

    Raises:
        InvalidArgumentError: they differ.
    """
    if not bool(ops.all(ops.equal(x, y))):
        raise InvalidArgumentError(message or f"Two tensors must be equal. Received: {x} and {y}.")
