"""What looks at whole gradients where each replica has a part of them: norms, and whether all are finite.

Tests: tests/virtual/strategies/test_sharded_state.py.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import keras
from jax import lax

from unisono._mesh import AXIS
from unisono.step._keras_internals import clipped_by, finite_by
from unisono.step._layout import Gradients


def is_split(shape: Sequence[int]) -> bool:
    """Whether a weight of this shape is updated in parts.

    >>> is_split((3, 5)), is_split((1,)), is_split(()), is_split((0, 2))
    (True, True, False, False)
    """
    return len(shape) > 0 and math.prod(shape) > 0


@contextlib.contextmanager
def asking_all(optimizer: keras.Optimizer) -> Iterator[None]:
    """Let Keras' own methods that look at whole gradients ask all replicas for their parts."""
    with contextlib.ExitStack() as stack:
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            stack.enter_context(
                finite_by(optimizer, lambda original: functools.partial(_check_finite, original))
            )
            optimizer = optimizer.inner_optimizer
        clip = functools.partial(functools.partial, _clip, optimizer)
        stack.enter_context(clipped_by(optimizer, clip))
        yield


def _check_finite(original: Callable[[Gradients], jax.Array], grads: Gradients) -> jax.Array:
    # One part that is not finite makes all replicas skip the step. As integers: booleans are not reduced.
    found: jax.Array = lax.pmin(jnp.asarray(original(grads)).astype(jnp.int32), AXIS)
    return found.astype(bool)


def _clip(
    optimizer: keras.Optimizer, original: Callable[[Gradients], Gradients], grads: Gradients
) -> Gradients:
    """`Optimizer._clip_gradients` by the norms of whole gradients."""
    if not (optimizer.clipnorm and optimizer.clipnorm > 0) and not optimizer.global_clipnorm:
        return original(grads)
    given = [g for g in grads if g is not None]
    squares = _sums_of_squares(given)
    if optimizer.clipnorm and optimizer.clipnorm > 0:
        clipped = iter(g * _scale_of(s, optimizer.clipnorm) for g, s in zip(given, squares, strict=True))
        return [None if g is None else next(clipped) for g in grads]
    norm = jnp.sqrt(sum(squares[1:], squares[0]))
    limit = optimizer.global_clipnorm
    # As Keras does: a norm that is not finite makes everything NaN.
    scale = limit * jnp.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
    return [None if g is None else g * scale for g in grads]


def _sums_of_squares(grads: Sequence[jax.Array]) -> list[jax.Array]:
    """The sum of squares of each whole gradient; one collective for all that come in parts."""
    own = [jnp.sum(jnp.square(g)) for g in grads]
    split = [i for i, g in enumerate(grads) if is_split(g.shape)]
    if split:
        for i, total in zip(split, lax.psum([own[i] for i in split], AXIS), strict=True):
            own[i] = total
    return own


def _scale_of(square: jax.Array, limit: float) -> jax.Array:
    # As Keras' `clip_by_norm`: the two `where`s keep a zero gradient from becoming NaN.
    is_positive = square > 0
    norm = jnp.where(is_positive, jnp.sqrt(jnp.where(is_positive, square, jnp.ones_like(square))), square)
    return limit / jnp.maximum(norm, limit)
