"""Faster sums of products over several dimensions on CPUs, as in the gradient of a dense layer's kernel.

The gradient of the kernel contracts the batch and all positions: `[batch, position, m]` with
`[batch, position, n]`. XLA's CPU backend makes one dimension of the two by transposing an operand in memory
first. Dimensions that lie side by side are one dimension without any work: merged before XLA sees them, the
matrix product reads its operands where they are. A transformer's step (4 layers, width 128, batch 64) took
262 ms instead of 280, a small GPT's 158 instead of 229 (2 cores, jaxlib 0.10.2, 2026-11-22). Results differ
from XLA's own by the order of sums alone.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax import lax

#: Of the primitive `dot_general`: contracted dimensions of both operands, then their batch dimensions.
DimensionNumbers: TypeAlias = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


class _Operand(NamedTuple):
    """An operand of a product, as a matrix.

    Args:
        free: the sizes of the other dimensions of the operand, which the result has.
    """

    shape: tuple[int, int]
    contracted: int
    free: tuple[int, ...]


def is_replaced(lhs: jax.core.ShapedArray, rhs: jax.core.ShapedArray, parameters: Mapping[str, Any]) -> bool:
    """Return whether `replacement` computes a product, or XLA's own lowering."""
    return is_merged(lhs, rhs, parameters["dimension_numbers"])


def is_merged(
    lhs: jax.core.ShapedArray,
    rhs: jax.core.ShapedArray,
    dimension_numbers: DimensionNumbers,
) -> bool:
    """Return whether `replacement` computes a product, or XLA's own lowering.

    Args:
        lhs: the shape and type of the first operand.
        rhs: the same of the second one.
        dimension_numbers: as in `jax.lax.dot_general`.

    >>> x = jax.ShapeDtypeStruct((8, 16, 32), "float32")
    >>> is_merged(x, x, (((0, 1), (0, 1)), ((), ())))
    True
    >>> is_merged(x, x, (((1, 2), (1, 2)), ((0,), (0,))))
    False
    """
    (contracted, _), batch = dimension_numbers
    if any(batch) or len(contracted) < 2:
        return False
    if not all(isinstance(size, int) and size > 0 for size in (*lhs.shape, *rhs.shape)):
        return False
    return _as_matrices(lhs.shape, rhs.shape, dimension_numbers) is not None


def replacement(
    lhs: jax.Array,
    rhs: jax.Array,
    *,
    dimension_numbers: DimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    out_sharding: object = None,
) -> jax.Array:
    """Return a product for which `is_merged`, computed as a product of two matrices.

    Raises:
        ValueError: where the dimensions cannot be merged.

    >>> x = jax.numpy.ones((2, 3, 4))
    >>> replacement(x, x, dimension_numbers=(((0, 1), (0, 1)), ((), ())))[0]
    Array([6., 6., 6., 6.], dtype=float32)
    """
    matrices = _as_matrices(lhs.shape, rhs.shape, dimension_numbers)
    if matrices is None:
        raise ValueError(
            "The contracted dimensions must lie side by side in the same order. "
            f"Received: {dimension_numbers=}, shapes {lhs.shape} and {rhs.shape}."
        )
    left, right = matrices
    result = lax.dot_general(
        lhs.reshape(left.shape),
        rhs.reshape(right.shape),
        (((left.contracted,), (right.contracted,)), ((), ())),
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    return result.reshape(*left.free, *right.free)


def _as_matrices(
    lhs: tuple[int, ...], rhs: tuple[int, ...], numbers: DimensionNumbers
) -> tuple[_Operand, _Operand] | None:
    """Both operands with merged dimensions; None where these do not lie side by side in the same order."""
    pairs = sorted(zip(*numbers[0], strict=True))
    left = _as_matrix(lhs, [a for a, _ in pairs])
    right = _as_matrix(rhs, [b for _, b in pairs])
    return None if left is None or right is None else (left, right)


def _as_matrix(shape: tuple[int, ...], contracted: list[int]) -> _Operand | None:
    free = [d for d in range(len(shape)) if d not in contracted]
    if not _is_side_by_side(contracted) or not _is_side_by_side(free):
        return None
    sizes = tuple(shape[d] for d in free)
    k, n = math.prod(shape[d] for d in contracted), math.prod(sizes)
    is_first = contracted[0] == 0
    return _Operand((k, n) if is_first else (n, k), 0 if is_first else 1, sizes)


def _is_side_by_side(dimensions: list[int]) -> bool:
    return all(after == before + 1 for before, after in itertools.pairwise(dimensions))
