"""Names of `tf.contrib`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from jax.scipy import (
    ndimage as _jax_scipy_ndimage,
)
from unisono.tf.contrib import (
    distribute as distribute,
    training as training,
)

resampler = _jax_scipy_ndimage
