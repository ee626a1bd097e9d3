"""Names of `tf.random.experimental`, for editors and type checkers; `python -m tools.stubs` makes this file."""

import builtins as _b
from typing import Any as _Any
from unisono.tf.adapters.numbers._stateless import (
    RandomGenerator as _unisono_tf_adapters_numbers__stateless_RandomGenerator,
)

Generator = _unisono_tf_adapters_numbers__stateless_RandomGenerator
def stateless_split(seed: _Any, num: _b.int = ..., name: _b.str | None = ..., **kwargs: _Any) -> _Any:
    """Return new seeds, made of one."""
