"""First values of variables in parts: one compiled program for all that differ in their seed alone.

A model has many weights of few shapes. If each first value were a program of its own, the compiler would need
as long for them as for the training step.

Tests: tests/virtual/strategies/test_replica_grid.py.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from unisono.step._value_handle import DeferredValue
from unisono.training._jaxprs import called_by
from unisono.training.rows._row_derivatives import alone

#: How many programs are kept.
_KEPT = 256


@dataclasses.dataclass(frozen=True)
class FirstValueProgram:
    """The making of a first value, without its seed.

    Args:
        kind: of the initializer.
        config: its arguments but for the seed, as JSON.
        dtype: of the value.
        initializer: one of this kind, with any seed.
    """

    kind: type
    config: str
    shape: tuple[int, ...]
    dtype: str
    initializer: Any = dataclasses.field(compare=False, repr=False)

    def drawn(self, seed: jax.Array) -> jax.Array:
        """Return the value.

        Args:
            seed: the two numbers that Keras makes of an initializer's.
        """
        initializer = copy.copy(self.initializer)
        if hasattr(initializer, "seed"):
            initializer.seed = seed
        return jnp.asarray(initializer(self.shape, dtype=self.dtype))


def made(value: DeferredValue, sharding: NamedSharding) -> jax.Array:
    """Return a first value that lies so: in one program, so that the whole is on no device.

    >>> import keras
    >>> mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> lies = NamedSharding(mesh, jax.sharding.PartitionSpec("model"))
    >>> made(DeferredValue(keras.initializers.Ones(), (2,), "float32"), lies)
    Array([1., 1.], dtype=float32)
    """
    initializer: Any = value.initializer
    program = _program_of(value) if value.is_repeatable else None
    if program is None:
        whole: jax.Array = jax.jit(value.whole, out_shardings=sharding)()
        return whole
    seed = getattr(initializer, "seed", None)
    # As Keras makes them of a whole number.
    return _compiled(program, sharding)(np.array([seed or 0, 0], np.uint32))


def _program_of(value: DeferredValue) -> FirstValueProgram | None:
    """Return the making of a value; None where it cannot be compared with others."""
    initializer: Any = value.initializer
    try:
        config = {k: v for k, v in initializer.get_config().items() if k != "seed"}
        text = json.dumps(config, sort_keys=True)
    except (NotImplementedError, TypeError, ValueError):  # an initializer with an array, for example
        return None
    return FirstValueProgram(type(initializer), text, value.shape, value.dtype.name, initializer)


@functools.lru_cache(_KEPT)
def _compiled(program: FirstValueProgram, sharding: NamedSharding) -> Callable[[Any], jax.Array]:
    return jax.jit(_step_by_step(program.drawn), out_shardings=sharding)


def _step_by_step(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Return a function for `jax.jit` that rounds as the operations do one by one.

    XLA multiplies the constants of two operations first where it sees both: the square root of two, for
    example, by which `jax.random.normal` multiplies, and a standard deviation. On one device Keras computes
    first values without `jax.jit`.
    """

    def run(seed: jax.Array) -> jax.Array:
        closed = jax.make_jaxpr(function)(seed)
        known: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        known |= zip(closed.jaxpr.invars, [seed], strict=True)

        def of(atom: Any) -> Any:
            if not isinstance(atom, jex.Literal):
                return known[atom]
            aval: Any = atom.aval
            return jnp.asarray(atom.val, aval.dtype)

        for equation in closed.jaxpr.eqns:
            called, given = called_by(equation), equation.invars
            if called is None:
                given = list(dict.fromkeys(v for v in given if isinstance(v, jex.Var)))
                called = alone(closed.jaxpr, equation, given)
            apart = jax.lax.optimization_barrier(list(map(of, given)))
            known |= zip(equation.outvars, jex.jaxpr_as_fun(called)(*apart), strict=True)
        value: jax.Array = of(closed.jaxpr.outvars[0])
        return value

    return run
