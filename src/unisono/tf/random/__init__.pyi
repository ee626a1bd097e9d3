"""Names of `tf.random`, for editors and type checkers; `python -m tools.stubs` makes this file."""

import builtins as _b
from typing import Any as _Any
from unisono.tf.adapters._random import (
    set_seed as set_seed,
)
from unisono.tf.adapters.numbers._stateless import (
    RandomGenerator as _unisono_tf_adapters_numbers__stateless_RandomGenerator,
    get_global_generator as get_global_generator,
    set_global_generator as set_global_generator,
)
from unisono.tf.random import (
    experimental as experimental,
)

Generator = _unisono_tf_adapters_numbers__stateless_RandomGenerator
def categorical(logits: _Any, num_samples: _b.int, dtype: _Any = ..., seed: _b.int | None = ..., name: _b.str | None = ...) -> _Any:
    """Return draws of categories."""
def normal(shape: _Any, mean: _b.float = ..., stddev: _b.float = ..., dtype: _Any = ..., seed: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return numbers of a normal distribution."""
def shuffle(x: _Any = ..., axis: _Any = ..., seed: _Any = ..., name: _b.str | None = ..., *, value: _Any = ...) -> _Any:
    """Shuffle the elements of a tensor uniformly at random along an axis."""
def split(seed: _Any, num: _b.int = ..., name: _b.str | None = ..., **kwargs: _Any) -> _Any:
    """Return new seeds, made of one."""
def stateless_normal(shape: _Any, seed: _Any, *args: _Any, alg: _b.str | None = ..., name: _b.str | None = ..., **kwargs: _Any) -> _Any:
    """Return numbers of a normal distribution."""
def stateless_truncated_normal(shape: _Any, seed: _Any, *args: _Any, alg: _b.str | None = ..., name: _b.str | None = ..., **kwargs: _Any) -> _Any:
    """Return numbers of a normal distribution, none further than two standard deviations from its mean."""
def stateless_uniform(shape: _Any, seed: _Any, *args: _Any, alg: _b.str | None = ..., name: _b.str | None = ..., **kwargs: _Any) -> _Any:
    """Return numbers of a uniform distribution."""
def truncated_normal(shape: _Any, mean: _b.float = ..., stddev: _b.float = ..., dtype: _Any = ..., seed: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return numbers of a normal distribution, none further than two standard deviations from its mean."""
def uniform(shape: _Any, minval: _b.float = ..., maxval: _b.float | None = ..., dtype: _Any = ..., seed: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return numbers of a uniform distribution."""
