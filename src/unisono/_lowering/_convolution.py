"""Faster convolutions on CPUs.

XLA's CPU backend computes a convolution fast where its layout is batch, space, features. It brings others
into this layout in the entry computation of a program only: in the body of a loop the derivative by the
kernel takes 5 to 40 times as long. And it fuses the transposition with what computes the operand, element
by element in the transposed order, though the operand is in memory already: in a residual network of 20
layers that took 76 of 270 ms. Here operands are transposed explicitly. Where the operands of a derivative
by the kernel exceed the caches, it is the sum of those of four parts of the batch, in a loop, whose operands
are finished arrays and whose parts fit: 9.9 ms instead of 12.8 for 64 images of 26x26x32, 8.0 instead of 10.8
for 32x32x16 (2 cores, jaxlib 0.10.2, 2026-11-22). The loop carries the sum: four kernels at once took 14 and
9 ms, and more memory. Dot products of shifted slices and of all windows as rows of one matrix were slower.

Convolutions of 1x1 are matrix products. Results differ from XLA's own by the order of sums alone.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, TypeAlias

import jax
from jax import lax

#: Types for which XLA has fast convolutions; others stay as they are.
_DTYPES = ("bfloat16", "float16", "float32", "float64")

#: In how many parts the sum over a batch is computed. Two and eight were slower.
_PARTS = 4

#: The fewest images in a part.
_FEWEST = 8

#: The bytes of both operands between which parts pay: those of smaller ones fit the caches already, parts of
#: larger ones do not either.
_SMALLEST, _LARGEST = 6 << 20, 24 << 20

#: The fewest features on either side, and the most products of features: XLA brings the operands of each
#: part into the order of its matrix product, which takes longer than the product where a kernel is large.
#: With 512 features on both sides and 3x3 points four parts took 79 ms instead of 4.
_FEWEST_FEATURES, _MOST_PAIRS = 8, 1 << 12

#: The arguments of the primitive `conv_general_dilated`.
Parameters: TypeAlias = dict[str, Any]


def is_canonical(numbers: lax.ConvDimensionNumbers) -> bool:
    """Return whether a convolution has the layout of XLA's fast code: batch, space, features."""
    canonical = _canonical(len(numbers.lhs_spec) - 2)
    return (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec) == canonical


def is_replaced(lhs: jax.core.ShapedArray, rhs: jax.core.ShapedArray, parameters: Parameters) -> bool:
    """Return whether `replacement` computes a convolution, or XLA's own lowering."""
    if parameters["feature_group_count"] != 1 or parameters["batch_group_count"] != 1:
        return False
    if lhs.dtype != rhs.dtype or lhs.dtype.name not in _DTYPES or _is_sharded(parameters["out_sharding"]):
        return False
    sizes = (*lhs.shape, *rhs.shape)
    if lhs.ndim < 3 or not all(isinstance(n, int) and n > 0 for n in sizes):
        return False
    numbers = parameters["dimension_numbers"]
    return not is_canonical(numbers) or _is_product(rhs.shape, numbers, parameters)


def _is_sharded(out_sharding: jax.sharding.NamedSharding | None) -> bool:
    """Return whether the result lies in parts; in a `shard_map` JAX names one of a whole, too."""
    return out_sharding is not None and any(axes is not None for axes in out_sharding.spec)


def replacement(lhs: jax.Array, rhs: jax.Array, **parameters: Any) -> jax.Array:
    """Return a convolution, computed in the layout of XLA's fast code.

    >>> numbers = lax.conv_dimension_numbers((1, 1, 3), (1, 1, 2), ("NCH", "OIH", "NCH"))
    >>> replacement(
    ...     jax.numpy.array([[[1.0, 2.0, 3.0]]]), jax.numpy.array([[[1.0, 10.0]]]),
    ...     window_strides=(1,), padding=[(0, 0)], lhs_dilation=(1,), rhs_dilation=(1,),
    ...     dimension_numbers=numbers, feature_group_count=1, batch_group_count=1, precision=None,
    ...     preferred_element_type=None, out_sharding=None,
    ... )
    Array([[[21., 32.]]], dtype=float32)
    """
    parameters = {**parameters, "out_sharding": None}
    numbers = parameters["dimension_numbers"]
    if not is_sum_of_parts(lhs, rhs, parameters) or _is_product(rhs.shape, numbers, parameters):
        return _in_fast_layout(lhs, rhs, parameters)
    return _sum_of_parts(lhs, rhs, parameters)


def _sum_of_parts(lhs: jax.Array, rhs: jax.Array, parameters: Parameters) -> jax.Array:
    size = lhs.shape[0] // _PARTS
    whole = size * _PARTS
    pairs = [x[:whole].reshape(_PARTS, size, *x.shape[1:]) for x in (lhs, rhs)]

    def add(total: jax.Array, pair: list[jax.Array]) -> tuple[jax.Array, None]:
        return total + _in_fast_layout(pair[0], pair[1], parameters), None

    # The first part begins the sum: zeros would lack its type's axes in a `shard_map`.
    first = _in_fast_layout(pairs[0][0], pairs[1][0], parameters)
    total, _ = lax.scan(add, first, [x[1:] for x in pairs])
    if whole < lhs.shape[0]:
        total += _in_fast_layout(lhs[whole:], rhs[whole:], parameters)
    return total


def is_sum_of_parts(
    lhs: jax.core.ShapedArray | jax.Array, rhs: jax.core.ShapedArray | jax.Array, parameters: Parameters
) -> bool:
    """Return whether a convolution is computed as a sum over parts of the batch: a derivative by a kernel."""
    numbers = parameters["dimension_numbers"]
    # Features are the first dimension of both operands: the batch.
    is_by_kernel = numbers.lhs_spec[1] == numbers.rhs_spec[1] == 0
    if not is_by_kernel or lhs.dtype.name not in ("float32", "float64") or lhs.shape[0] < _PARTS * _FEWEST:
        return False
    inputs, outputs = lhs.shape[numbers.lhs_spec[0]], rhs.shape[numbers.rhs_spec[0]]
    size = (lhs.size + rhs.size) * lhs.dtype.itemsize
    return (
        min(inputs, outputs) >= _FEWEST_FEATURES
        and inputs * outputs <= _MOST_PAIRS
        and _SMALLEST <= size <= _LARGEST
    )


def _in_fast_layout(lhs: jax.Array, rhs: jax.Array, parameters: Parameters) -> jax.Array:
    numbers = parameters["dimension_numbers"]
    canonical = lax.ConvDimensionNumbers(*_canonical(lhs.ndim - 2))
    data = lhs.transpose(numbers.lhs_spec[0], *numbers.lhs_spec[2:], numbers.lhs_spec[1])
    kernel = rhs.transpose(*numbers.rhs_spec[2:], numbers.rhs_spec[1], numbers.rhs_spec[0])
    if _is_product(rhs.shape, numbers, parameters):
        result = _product(data, kernel, parameters)
    else:
        result = lax.conv_general_dilated(data, kernel, **{**parameters, "dimension_numbers": canonical})
    out = numbers.out_spec
    return result.transpose(sorted(range(lhs.ndim), key=(out[0], *out[2:], out[1]).__getitem__))


def _canonical(space: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """JAX names the batch dimension first, then the features', then space; a kernel's outputs first."""
    data = (0, space + 1, *range(1, space + 1))
    return data, (space + 1, space, *range(space)), data


def _is_product(shape: tuple[int, ...], numbers: lax.ConvDimensionNumbers, parameters: Parameters) -> bool:
    """Whether a convolution is a matrix product for each point in space."""
    return (
        all(shape[i] == 1 for i in numbers.rhs_spec[2:])
        and all(n == 1 for n in parameters["lhs_dilation"])
        and not any(itertools.chain(*parameters["padding"]))
    )


def _product(data: jax.Array, kernel: jax.Array, parameters: Parameters) -> jax.Array:
    strides = parameters["window_strides"]
    taken = lax.slice(data, (0,) * data.ndim, data.shape, (1, *strides, 1))
    features, outputs = kernel.shape[-2:]
    rows = taken.reshape(math.prod(taken.shape[:-1]), features)
    result = lax.dot(
        rows,
        kernel.reshape(features, outputs),
        precision=parameters["precision"],
        preferred_element_type=parameters["preferred_element_type"],
    )
    return result.reshape(*taken.shape[:-1], outputs)
