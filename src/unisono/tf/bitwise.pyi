"""Names of `tf.bitwise`, for editors and type checkers; `python -m tools.stubs` makes this file."""

import builtins as _b
from typing import Any as _Any

def bitwise_and(x: _Any, y: _Any, name: _b.str | None = ...) -> _Any:
    """Compute the bit-wise AND of two arrays element-wise."""
def bitwise_or(x: _Any, y: _Any, name: _b.str | None = ...) -> _Any:
    """Compute the bit-wise OR of two arrays element-wise."""
def bitwise_xor(x: _Any, y: _Any, name: _b.str | None = ...) -> _Any:
    """Compute the bit-wise XOR of two arrays element-wise."""
