"""A faster derivative of max-pooling on CPUs, with the same bits.

XLA's CPU backend compiles `select_and_scatter`, the derivative of max-pooling, to a sequential scatter.
Here it is written as elementwise operations on strided slices: one for each position in the window. The
first of equal maxima gets the gradient, and where windows overlap gradients are added in the order in
which XLA adds them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import primitives
from jax.interpreters import mlir

#: Windows with more positions become a loop instead of one operation for each position: the program's
#: size, and the time to compile it, grow with them.
_LONGEST_UNROLLED = 32

_is_installed = False


def install_fast_pooling() -> None:
    """Let JAX lower the derivative of max-pooling on CPUs to `pooling_gradient`; once for the process."""
    global _is_installed
    if not _is_installed:
        _is_installed = True
        rule = mlir.lower_fun(pooling_gradient, multiple_results=False)
        mlir.register_lowering(primitives.select_and_scatter_add_p, rule, platform="cpu")


def pooling_gradient(
    source: Any,
    operand: Any,
    *,
    select_prim: Any,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
) -> Any:
    """Return the gradient of max- or min-pooling by its input; the parameters of JAX's primitive.

    Args:
        source: gradient of the pooled values.
        operand: what was pooled.
        select_prim: `lax.ge_p` for max-pooling, `lax.le_p` for min-pooling.
        window_dimensions: for each dimension.
        window_strides: for each dimension.
        padding: for each dimension, before and after.

    Returns:
        An array of the operand's shape.

    >>> pooling_gradient(
    ...     jnp.array([1.0, 10.0]), jnp.array([3.0, 3.0, 2.0, 5.0]), select_prim=lax.ge_p,
    ...     window_dimensions=(2,), window_strides=(2,), padding=[(0, 0)],
    ... )
    Array([ 1.,  0.,  0., 10.], dtype=float32)
    """
    worst = _worst(operand.dtype, select_prim is lax.ge_p)
    padded = lax.pad(operand, worst, [(low, high, 0) for low, high in padding])
    windows = _PoolWindows(padded.shape, source.shape, tuple(window_strides), tuple(window_dimensions))
    chosen = windows.chosen(padded, select_prim.bind)
    gradient = windows.scattered(chosen, source)
    starts = [low for low, _ in padding]
    return lax.slice(gradient, starts, [s + n for s, n in zip(starts, operand.shape, strict=True)])


class _PoolWindows:
    """The windows of a pooling; a position is a row-major number within a window.

    Args:
        shape: of the padded operand.
        counts: how many windows there are along each dimension.
        strides: of the windows.
        sizes: of a window.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        counts: tuple[int, ...],
        strides: tuple[int, ...],
        sizes: tuple[int, ...],
    ) -> None:
        self._shape, self._counts, self._strides, self._sizes = shape, counts, strides, sizes
        self._spans = [(n - 1) * s + 1 for n, s in zip(counts, strides, strict=True)]
        self._offsets = list(itertools.product(*map(range, sizes)))

    def chosen(self, padded: Any, keeps: Callable[[Any, Any], Any]) -> Any:
        """Return the position of each window's value; XLA keeps the first unless another is better.

        Args:
            padded: the padded operand.
            keeps: whether a value stays, given the next one.
        """

        def step(position: Any, carried: tuple[Any, Any]) -> tuple[Any, Any]:
            best, chosen = carried
            value = self._at(padded, position)
            stays = keeps(best, value)
            return jnp.where(stays, best, value), jnp.where(stays, chosen, position)

        first = self._at(padded, 0), jnp.zeros(self._counts, jnp.int32)
        return self._repeat(range(1, len(self._offsets)), step, first)[1]

    def scattered(self, chosen: Any, source: Any) -> Any:
        """Return the sum of the windows' gradients at each place of the padded operand.

        Args:
            chosen: from `chosen`.
            source: each window's gradient.
        """
        if self._strides == self._sizes:
            return self._tiled(chosen, source)

        def step(position: Any, total: Any) -> Any:
            return self._add_at(total, position, jnp.where(chosen == position, source, 0))

        # A later position of an earlier window is the earlier position of a later one: XLA goes by windows.
        backwards = range(len(self._offsets) - 1, -1, -1)
        return self._repeat(backwards, step, jnp.zeros(self._shape, source.dtype))

    def _tiled(self, chosen: Any, source: Any) -> Any:
        """Windows that do not overlap: each place asks whether it is the chosen one of its window."""
        pairs = [size for pair in zip(self._counts, self._sizes, strict=True) for size in pair]
        own = jnp.zeros((), jnp.int32)
        for i, size in enumerate(self._sizes):
            own = own * size + lax.broadcasted_iota(jnp.int32, pairs, 2 * i + 1)
        inside = tuple(range(1, 2 * len(self._sizes), 2))
        is_chosen = jnp.expand_dims(chosen, inside) == own
        values = jnp.where(is_chosen, jnp.expand_dims(source, inside), jnp.zeros((), source.dtype))
        covered = [n * s for n, s in zip(self._counts, self._sizes, strict=True)]
        rest = [(0, whole - part, 0) for whole, part in zip(self._shape, covered, strict=True)]
        return lax.pad(values.reshape(covered), jnp.zeros((), source.dtype), rest)

    def _repeat(self, positions: range, step: Callable[[Any, Any], Any], carried: Any) -> Any:
        if len(self._offsets) <= _LONGEST_UNROLLED:
            for position in positions:
                carried = step(position, carried)
            return carried

        def body(i: Any, carried: Any) -> Any:
            return step(jnp.int32(positions.start) + jnp.int32(positions.step) * i, carried)

        return lax.fori_loop(0, len(positions), body, carried)

    def _at(self, padded: Any, position: Any) -> Any:
        """Each window's value at a position."""
        if isinstance(position, int):
            starts = self._offsets[position]
            stops = [a + n for a, n in zip(starts, self._spans, strict=True)]
            return lax.slice(padded, starts, stops, self._strides)
        part = lax.dynamic_slice(padded, self._offset(position), self._spans)
        return lax.slice(part, [0] * part.ndim, part.shape, self._strides)

    def _add_at(self, total: Any, position: Any, values: Any) -> Any:
        """Add each window's value at a position."""
        zero = jnp.zeros((), values.dtype)
        if isinstance(position, int):
            sizes = zip(self._offsets[position], self._spans, self._shape, self._strides, strict=True)
            edges = [(start, whole - start - span, stride - 1) for start, span, whole, stride in sizes]
            return _add(total, lax.pad(values, zero, edges))
        spread = lax.pad(values, zero, [(0, 0, stride - 1) for stride in self._strides])
        starts = self._offset(position)
        part = lax.dynamic_slice(total, starts, self._spans)
        return lax.dynamic_update_slice(total, _add(part, spread), starts)

    def _offset(self, position: Any) -> tuple[Any, ...]:
        return tuple(jnp.unravel_index(position, self._sizes))


def _add(a: Any, b: Any) -> Any:
    return jnp.logical_or(a, b) if a.dtype == jnp.bool_ else a + b


def _worst(dtype: Any, is_maximum: bool) -> Any:
    """The value that no other loses to, for the padding."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.array(-jnp.inf if is_maximum else jnp.inf, dtype)
    if dtype == jnp.bool_:
        return jnp.array(not is_maximum)
    limits = np.iinfo(dtype)
    return jnp.array(limits.min if is_maximum else limits.max, dtype)
