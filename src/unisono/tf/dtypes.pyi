"""Names of `tf.dtypes`, for editors and type checkers; `python -m tools.stubs` makes this file."""

import builtins as _b
import numpy as _np
from typing import Any as _Any
from jax.lax import (
    complex as complex,
)
from jax.numpy import (
    dtype as _jax_numpy_dtype,
)
from numpy import (
    dtype as _numpy_dtype,
)

DType = _numpy_dtype
as_dtype = _jax_numpy_dtype
bfloat16: _np.dtype[_Any]
bool: _np.dtype[_Any]
complex64: _np.dtype[_Any]
double: _np.dtype[_Any]
float16: _np.dtype[_Any]
float32: _np.dtype[_Any]
float64: _np.dtype[_Any]
half: _np.dtype[_Any]
int16: _np.dtype[_Any]
int32: _np.dtype[_Any]
int64: _np.dtype[_Any]
int8: _np.dtype[_Any]
string: _b.str
uint16: _np.dtype[_Any]
uint32: _np.dtype[_Any]
uint64: _np.dtype[_Any]
uint8: _np.dtype[_Any]
