"""Several steps of `fit` in one program.

The program holds one body, repeated as often as there are batches: the numbers do not depend on how
many steps run together. Whether steps run in a loop is a matter of their operations and of the platform.

Tests: tests/unit/training/test_multi_step.py, tests/virtual/training/test_lookahead.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from unisono._backend import wants_own_lowering
from unisono._types import PyTree, Tree
from unisono.training._jaxprs import Trace, equations


def may_loop(platform: str) -> bool | None:
    """Return whether steps may run together in a loop whose length is data: None where the steps decide.

    On GPUs a loop needs a constant length; see `_constant_groups`.

    Args:
        platform: of the devices: `"cpu"`, `"gpu"` or `"tpu"`.

    >>> may_loop("gpu"), may_loop("cpu")
    (False, None)
    """
    return False if platform == "gpu" else None


# XLA's CPU backend brings convolutions into the layout of its fast kernels (`ConvCanonicalization`) in
# the entry computation of a program only. In the body of a loop, a convolution in another layout keeps
# its slow form: the derivative by the kernel takes 5 to 40 times as long as alone. Matrix products,
# attention, reductions, pooling, sorting, scatters, random numbers and Fourier transforms take the same
# time in both places. The library's own lowering (`_lowering/_convolution`) brings convolutions into the
# fast layout in loops, too; what it leaves to XLA, such as grouped and depthwise ones, is slow there.
def is_slow_in_loop(jaxpr: Trace, platform: str) -> bool:
    """Return whether a program's steps should run one by one instead of in a loop.

    The answer depends on the program and the platform alone, so that all workers get the same.

    >>> import jax
    >>> def convolve(x, kernel):
    ...     return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", feature_group_count=2).sum()
    >>> images, kernel = jax.numpy.ones((2, 2, 8, 8)), jax.numpy.ones((4, 1, 3, 3))
    >>> is_slow_in_loop(jax.make_jaxpr(jax.grad(convolve, 1))(images, kernel), "cpu")
    True
    >>> is_slow_in_loop(jax.make_jaxpr(jax.numpy.sin)(1.0), "cpu")
    False
    """
    if platform != "cpu":
        return False
    return any(_is_slow(e) for e in equations(jaxpr) if e.primitive.name == "conv_general_dilated")


def _is_slow(convolution: core.JaxprEqn) -> bool:
    """Return whether nothing brings a convolution into the layout of the fast kernels."""
    from unisono._lowering._convolution import is_canonical, is_replaced

    lhs: Any
    rhs: Any
    lhs, rhs = (v.aval for v in convolution.invars)
    is_lowered = wants_own_lowering("UNISONO_CONVOLUTIONS") and is_replaced(lhs, rhs, convolution.params)
    return not (is_canonical(convolution.params["dimension_numbers"]) or is_lowered)


#: The most steps, and the most bytes of batches, in one program. Three buffers of that many bytes are kept.
MOST_STEPS, _BYTES = 32, 8 << 20

#: From `(state, data)` to `(logs, state)`; traced.
Program = Callable[[PyTree, PyTree], tuple[PyTree, PyTree]]


def multi_step_program(step: Program, slots: int) -> Program:
    """Return the program that repeats a step over the first batches of several.

    Args:
        step: from `(state, batch)` to `(logs, state)`; pure.

    Returns:
        A function of `(state, (count, batches))`, whose arrays have a first dimension of `slots`.
        It gives the logs, stacked likewise, and the state after `count` steps.

    >>> run = multi_step_program(lambda state, batch: ({"seen": batch}, state + batch), slots=3)
    >>> logs, state = run(jnp.array(1), (2, jnp.array([10, 20, 0])))
    >>> int(state), logs["seen"].tolist()
    (31, [10, 20, 0])
    """

    def program(state: PyTree, several: tuple[jax.Array, PyTree]) -> tuple[PyTree, PyTree]:
        count, batches = several

        # Traced once: for its shapes first, and from jit's cache in the loop.
        @jax.jit
        def one(state: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
            logs, new = step(state, batch)
            # A loop carries fixed types: a weak type from a Python number must not change one.
            logs = jax.tree.map(jnp.asarray, logs)
            return logs, jax.tree.map(lambda old, x: jnp.asarray(x, old.dtype), state, new)

        def at(i: jax.Array, state: PyTree) -> tuple[PyTree, PyTree]:
            after: tuple[PyTree, PyTree] = one(state, entry_at(i, batches))
            return after

        shapes, _ = jax.eval_shape(lambda state: one(state, entry_at(0, batches)), state)
        return repeated(count, slots, shapes, at, state)

    return program


def repeated(
    count: int | jax.Array,
    slots: int,
    like: PyTree,
    step: Callable[[jax.Array, Tree], tuple[PyTree, Tree]],
    state: Tree,
) -> tuple[PyTree, Tree]:
    """Return the results of `count` steps, stacked in arrays with room for `slots`, and the state after them.

    Args:
        like: shapes and types of what a step gives.
        step: from its number and the state to what it gives and the new state.
    """

    def body(i: jax.Array, carried: tuple[PyTree, Tree]) -> tuple[PyTree, Tree]:
        every, state = carried
        found, state = step(i, state)
        put = lambda xs, x: jax.lax.dynamic_update_index_in_dim(xs, x, i, 0)  # noqa: E731
        return jax.tree.map(put, every, found), state

    every = jax.tree.map(lambda x: jnp.zeros((slots, *x.shape), x.dtype), like)
    result: tuple[PyTree, Tree] = jax.lax.fori_loop(0, count, body, (every, state))
    return result


def entry_at(i: int | jax.Array, stacked: Tree) -> Tree:
    """Return one entry of arrays along their first dimensions, or of a function of its number."""
    if callable(stacked):
        return stacked(i)  # type: ignore[no-any-return]
    entry: Tree = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), stacked)
    return entry


def of_constant_count(program: Program, count: int) -> Program:
    """Return a program of several steps that always runs as many, in a loop whose length XLA knows."""
    return lambda state, several: program(state, (count, several[1]))


def slots_for(batch: PyTree, wanted: int | None = None, least: int = 1, most: int = MOST_STEPS) -> int:
    """Return how many batches like this one may share a program; 1 where it must run alone.

    Depends on shapes alone, so that the same training is always the same program.

    Args:
        wanted: the number that the user asks for; None for as many as pay.
        least: the fewest, where the user asks for some, and more may run ahead.
        most: the most, unless the user asks for more.

    >>> slots_for((np.zeros((64, 784), "float32"), np.zeros(64)))
    32
    >>> slots_for(np.zeros((64, 784), "float32"), wanted=100)
    100
    """
    if wanted == 1:
        return 1
    # Of rows that are on the devices, their numbers alone are staged.
    leaves: list[Any] = [getattr(getattr(x, "choice", None), "numbers", x) for x in jax.tree.leaves(batch)]
    # Arrays of a device would be read back, which holds the host up: only where the user asks for groups.
    kinds = np.ndarray if wanted is None and least == 1 else (np.ndarray, jax.Array)
    numbers = (isinstance(x, kinds) and x.ndim and x.dtype.kind not in "OSUMm" for x in leaves)
    if not leaves or not all(numbers):
        return 1
    if wanted is not None:
        return wanted
    return max(least, min(most, slots_of_size(sum(x.nbytes for x in leaves))))


def slots_of_size(size: int) -> int:
    """Return how many batches, or predictions, of some bytes may be in one program.

    >>> slots_of_size(4 << 20)
    2
    """
    return max(1, min(MOST_STEPS, _BYTES // max(1, size)))


#: Arrays, or one array with an entry for each of them.
Arrays: TypeAlias = Sequence[np.ndarray] | np.ndarray | jax.Array


class LazyArray:
    """An array of a step's result, which is waited for where it is read.

    `float` of a JAX array takes 25 µs longer than of its NumPy copy (JAX 0.10, a busy machine, 2026-11-28).

    Args:
        read: returns the arrays of all steps of a program, or all arrays of one step.
        index: which of them; None where `read` returns the array itself.

    >>> float(LazyArray(lambda: np.array([1.0, 2.0]), 1))
    2.0
    """

    def __init__(self, read: Callable[[], Arrays], index: int | None) -> None:
        self._read, self._index = read, index

    @classmethod
    def of_step(cls, every: jax.Array, step: int) -> LazyArray:
        """Return one step's value."""
        return cls(lambda: every, step)

    @property
    def value(self) -> jax.Array | np.ndarray:
        """The array alone, on its devices where the others are on devices."""
        every: Any = self._read()
        value: jax.Array | np.ndarray = every if self._index is None else every[self._index]
        return value

    def block_until_ready(self) -> LazyArray:
        """Wait for the array, and raise what its step has raised; `jax.block_until_ready` calls it."""
        jax.block_until_ready(self._read())
        return self

    def __array__(self, dtype: np.typing.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        every = self._read()
        # One transfer for all steps.
        host = np.asarray(every) if isinstance(every, jax.Array) else every
        return np.asarray(host if self._index is None else host[self._index], dtype)

    def __float__(self) -> float:
        return float(self.__array__())

    def __format__(self, spec: str) -> str:
        return format(self.__array__()[()], spec)

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's."""
        return self.__array__().shape

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The array's."""
        return self.__array__().dtype
