"""Operations at indices, and of matrices, whose arguments or results TensorFlow orders otherwise.

Tests: tests/unit/tf/test_indexing.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono.tf._entries import TensorLike
from unisono.tf.adapters.inputs._host_tensor import HostTensor


def size(input: Any, out_type: Any = "int32") -> Any:
    """Return the number of entries, which is known while a function is traced.

    >>> size([[1, 2], [3, 4]]).numpy()
    np.int32(4)
    """
    if isinstance(input, keras.KerasTensor):
        return keras.ops.size(input)
    return np.asarray(np.size(input), np.int32).view(HostTensor)


def rank(input: Any) -> Any:
    """Return the number of dimensions, which is known while a function is traced.

    >>> rank([[1, 2], [3, 4]]).numpy()
    np.int32(2)
    """
    return np.asarray(np.ndim(input), np.int32).view(HostTensor)


def _at(indices: TensorLike) -> tuple[Any, ...]:
    """Return rows of indices as JAX takes them: one array for each dimension."""
    return tuple(jnp.moveaxis(jnp.asarray(indices), -1, 0))


def gather_nd(params: TensorLike, indices: TensorLike, batch_dims: int = 0) -> jax.Array:
    """Return the entries or slices of `params` at rows of indices.

    >>> gather_nd([[1, 2], [3, 4]], [[0, 1], [1, 0]]).tolist()
    [2, 3]
    """
    array, rows = jnp.asarray(params), jnp.asarray(indices)
    if batch_dims:
        found: jax.Array = jax.vmap(lambda p, i: gather_nd(p, i, batch_dims - 1))(array, rows)
        return found
    return array[_at(rows)]


def scatter_nd(indices: TensorLike, updates: TensorLike, shape: Sequence[int]) -> jax.Array:
    """Return zeros of a shape, with updates added at rows of indices.

    >>> scatter_nd([[1], [1], [3]], [1, 2, 4], [4]).tolist()
    [0, 3, 0, 4]
    """
    values = jnp.asarray(updates)
    return jnp.zeros(tuple(int(n) for n in shape), values.dtype).at[_at(indices)].add(values)


def _scatter(method: str) -> Callable[[TensorLike, TensorLike, TensorLike], jax.Array]:
    """Return a function of a tensor that gives it other values at rows of indices."""

    def scatter(tensor: TensorLike, indices: TensorLike, updates: TensorLike) -> jax.Array:
        place = jnp.asarray(tensor).at[_at(indices)]
        found: jax.Array = getattr(place, method)(jnp.asarray(updates))
        return found

    return scatter


tensor_scatter_nd_update, tensor_scatter_nd_add, tensor_scatter_nd_sub = map(
    _scatter, ("set", "add", "subtract")
)
tensor_scatter_nd_max, tensor_scatter_nd_min = map(_scatter, ("max", "min"))


def matvec(a: TensorLike, b: TensorLike, transpose_a: bool = False, adjoint_a: bool = False) -> Any:
    """Return the product of matrices with vectors.

    >>> matvec([[1, 2], [3, 4]], [1, 1]).tolist()
    [3, 7]
    """
    matrix = jnp.asarray(a)
    if transpose_a or adjoint_a:
        matrix = jnp.swapaxes(matrix.conj() if adjoint_a else matrix, -1, -2)
    return jnp.einsum("...ij,...j->...i", matrix, jnp.asarray(b))


def svd(tensor: TensorLike, full_matrices: bool = False, compute_uv: bool = True) -> Any:
    """Return the singular values, and the matrices `u` and `v`: `tensor = u @ diag(s) @ v.T`.

    >>> [a.shape for a in svd(jnp.ones((3, 2)))]
    [(2,), (3, 2), (2, 2)]
    """
    matrices = jnp.asarray(tensor)
    if not compute_uv:
        return jnp.linalg.svd(matrices, full_matrices, compute_uv=False)
    u, s, adjoint = jnp.linalg.svd(matrices, full_matrices)
    return s, u, jnp.swapaxes(adjoint.conj(), -1, -2)
