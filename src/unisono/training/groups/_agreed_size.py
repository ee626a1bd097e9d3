"""Groups of several processes: the smallest size that these propose, and exchanges in each step.

A step's program returns the smallest size beside its results.

Tests: tests/cluster/test_contract.py.
"""

from __future__ import annotations

import jax

from unisono._types import PyTree
from unisono.training._jaxprs import Trace, equations, inner_programs
from unisono.training.groups._multi_step import Program

#: The operations by which replicas exchange values.
_EXCHANGES = frozenset(
    {"psum", "psum_invariant", "pmin", "pmax", "ppermute", "all_to_all", "all_gather", "all_gather_invariant"}
    | {"reduce_scatter"}
)


def with_agreed_size(program: Program, axis_name: str | None) -> Program:
    """Return a program that also returns the smallest group size that the processes propose.

    Args:
        program: from `(state, data)` to `(logs, state)`, run on every device of `axis_name`; None where a
            single replica has devices of several processes.

    Returns:
        A function of `(state, (proposed, data))` that gives `(logs, smallest)` and the state; a replica
        proposes one size, or one for each of its devices.
    """

    def with_wish(state: PyTree, data: tuple[jax.Array, PyTree]) -> tuple[PyTree, PyTree]:
        logs, state = program(state, data[1])
        return (logs, smallest_of(data[0], axis_name)), state

    return with_wish


def smallest_of(proposed: jax.Array, axis_name: str | None) -> jax.Array:
    """Return the smallest group size that the processes propose.

    Args:
        proposed: by the processes of a replica.
        axis_name: of the replicas; None where there is one.
    """
    smallest = proposed.min()
    return smallest if axis_name is None else jax.lax.pmin(smallest, axis_name)


def exchanges_in_loop(jaxpr: Trace) -> bool:
    """Return whether replicas exchange values in the body of a loop, hence at each step."""
    loops = (e for e in equations(jaxpr) if e.primitive.name in ("while", "scan"))
    bodies = (program for loop in loops for program in inner_programs(loop))
    return any(e.primitive.name in _EXCHANGES for body in bodies for e in equations(body))
