"""Names of `tf.linalg`, for editors and type checkers; `python -m tools.stubs` makes this file."""

import builtins as _b
from typing import Any as _Any

def cholesky(x: _Any = ..., upper: _b.bool = ..., name: _b.str | None = ..., *, input: _Any = ...) -> _Any:
    """Computes the Cholesky decomposition of a positive semi-definite matrix."""
def det(x: _Any = ..., name: _b.str | None = ..., *, input: _Any = ...) -> _Any:
    """Computes the determinant of a square tensor."""
def diag(diagonal: _Any, name: _b.str | None = ...) -> _Any:
    """Return matrices with a diagonal, and zeros elsewhere."""
def diag_part(x: _Any = ..., offset: _Any = ..., axis1: _Any = ..., axis2: _Any = ..., name: _b.str | None = ..., *, input: _Any = ...) -> _Any:
    """Return specified diagonals."""
def eigh(x: _Any = ..., name: _b.str | None = ..., *, tensor: _Any = ...) -> _Any:
    """Computes the eigenvalues and eigenvectors of a complex Hermitian."""
def einsum(subscripts: _Any, *operands: _Any, name: _b.str | None = ..., **kwargs: _Any) -> _Any:
    """Evaluates the Einstein summation convention on the operands."""
def global_norm(t_list: _Any, name: _b.str | None = ...) -> _Any:
    """Return the Euclidean norm of all tensors together."""
def inv(x: _Any = ..., name: _b.str | None = ..., *, input: _Any = ...) -> _Any:
    """Computes the inverse of a square tensor."""
def matmul(a: _Any, b: _Any, transpose_a: _b.bool = ..., transpose_b: _b.bool = ..., name: _b.str | None = ...) -> _Any:
    """Return the product of matrices."""
def matvec(a: _Any, b: _Any, transpose_a: _b.bool = ..., adjoint_a: _b.bool = ..., name: _b.str | None = ...) -> _Any:
    """Return the product of matrices with vectors."""
def norm(x: _Any = ..., ord: _Any = ..., axis: _Any = ..., keepdims: _b.bool = ..., name: _b.str | None = ..., *, tensor: _Any = ...) -> _Any:
    """Matrix or vector norm."""
def qr(x: _Any = ..., mode: _Any = ..., name: _b.str | None = ..., *, input: _Any = ...) -> _Any:
    """Computes the QR decomposition of a tensor."""
def solve(a: _Any = ..., b: _Any = ..., name: _b.str | None = ..., *, matrix: _Any = ..., rhs: _Any = ...) -> _Any:
    """Solves a linear system of equations given by `a x = b`."""
def svd(tensor: _Any, full_matrices: _b.bool = ..., compute_uv: _b.bool = ..., name: _b.str | None = ...) -> _Any:
    """Return the singular values, and the matrices `u` and `v`: `tensor = u @ diag(s) @ v.T`."""
def trace(x: _Any, offset: _Any = ..., axis1: _Any = ..., axis2: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return the sum along diagonals of the tensor."""
