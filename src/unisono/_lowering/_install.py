"""Install the lowerings of this package in JAX, for the whole process.

Tests: tests/virtual/test_pooling.py, tests/virtual/test_products.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from unisono._backend import wants_own_lowering
from unisono._lowering._convolution import install_fast_convolutions
from unisono._lowering._pooling import install_fast_pooling
from unisono._lowering._products import install_fast_products

#: Variables of the environment, which keep XLA's own code where they are `xla`, and what they decide about.
_SWITCHES: dict[str, Callable[[], None]] = {
    "UNISONO_CONVOLUTIONS": install_fast_convolutions,
    "UNISONO_MAX_POOLING": install_fast_pooling,
    "UNISONO_PRODUCTS": install_fast_products,
}


@functools.cache
def install_lowerings() -> None:
    """Install all lowerings that the environment does not forbid, once per process."""
    for switch, install in _SWITCHES.items():
        if wants_own_lowering(switch):
            install()
