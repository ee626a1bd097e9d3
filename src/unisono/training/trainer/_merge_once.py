"""Steps of `evaluate` and `predict` on several replicas, which exchange nothing until the end of a group.

What a test step adds to its metrics does not depend on what they hold: each replica's part of every step
starts from zero. At the end of the group one message carries the parts of all steps, and the metrics and the
logs of each step follow from their sums. Predictions travel in one message, too. Between two processes a
message costs more than the step of a small model: `evaluate` of an MLP took 1.8 ms a step with a message
in each (2 cores, 2026-11-22).

The numbers do not depend on how many steps run together: parts are added up in the order of the replicas,
and sums in the order of the steps.

Tests: tests/virtual/training/test_merge_once.py, tests/virtual/strategies/test_multi_worker_program.py.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from unisono._context import ReplicaEngine
from unisono._types import PyTree
from unisono.step.variables._merge_rules import Merge, merge_all
from unisono.training.groups._multi_step import Program, entry_at, repeated
from unisono.training.replica._fused_metrics import DryRunEngine, NeedsPeersError
from unisono.training.trainer._protocol import State
from unisono.training.trainer._trainer_step import TrainerStep, TrainerTask, in_lists, localized

#: One replica's step: from `(kept, metrics, batch)` to the outputs, or the metrics after it, and the new
#: values of what it has changed in `kept`, the rest of the state.
_OneStep = Callable[[State, list[jax.Array], PyTree], tuple[PyTree, list[jax.Array]]]


class _LoneStep(NamedTuple):
    """A step without exchanges.

    Args:
        outputs: shapes of what it returns first.
        changed: the places of what it changes in the rest of the state.
    """

    one: _OneStep
    outputs: PyTree
    changed: list[int]


def merge_once(step: TrainerStep, slots: int, otherwise: Program) -> Program:
    """Return the program of several steps that merges what they computed once, at its end.

    Args:
        otherwise: what runs where a step needs the other replicas, or where its metrics are no sums.

    Returns:
        As `multi_step_program` does; for one slot, as `TrainerStep.split` does.
    """

    def program(state: State, data: PyTree) -> tuple[PyTree, State]:
        engine = step.engine()
        kept, metrics = (state[:-1], list(state[-1])) if step.task is TrainerTask.TEST else (state, [])
        rules = [rule for part in step.rules()[: len(kept)] for rule in part]
        local = localized(step.rules()[: len(kept)], kept, engine)
        first = data if slots == 1 else entry_at(0, data[1])
        apart = _apart(step, engine, local, [jnp.zeros_like(m) for m in metrics], first)
        if apart is None:
            return otherwise(state, data)
        outputs, changed = _all_steps(apart, local, metrics, data, slots)
        merged = merge_all([rules[i] for i in apart.changed], changed, engine)
        new = list(itertools.chain(*kept))
        for i, value in zip(apart.changed, merged, strict=True):
            new[i] = value
        if step.task is TrainerTask.PREDICT:
            axis = 0 if slots == 1 else 1
            return jax.tree.map(lambda x: engine.all_gather(x, axis), outputs), in_lists(new, kept)
        logs, metrics = _running_sums(step, metrics, _sums(outputs, engine), data, slots)
        return logs, (*in_lists(new, kept), metrics)

    return program


def _apart(
    step: TrainerStep, engine: ReplicaEngine, kept: State, zeros: list[jax.Array], batch: PyTree
) -> _LoneStep | None:
    """Return one replica's step; None where it needs the others, or metrics whose values it adds to."""
    rules, is_test = step.rules(), step.task is TrainerTask.TEST
    if is_test and any(rule is not Merge.SUM for rule in rules[-1]):
        return None
    dry = DryRunEngine(engine)
    changed: list[int] = []
    keys: list[str] = []

    @jax.jit
    def one(kept: State, metrics: list[jax.Array], batch: PyTree) -> tuple[PyTree, list[jax.Array]]:
        logs, new = step.inside(dry, (*kept, metrics) if is_test else kept, batch)
        keys[:] = logs if isinstance(logs, dict) else [""]
        pairs = list(zip(itertools.chain(*kept), itertools.chain(*new[: len(kept)]), strict=True))
        # What a step did not change is the same object.
        changed[:] = [i for i, (a, b) in enumerate(pairs) if a is not b]
        outputs = logs
        if is_test:
            outputs = [jnp.asarray(a, z.dtype) for a, z in zip(new[-1], zeros, strict=True)]
        # A loop carries fixed types: a weak type from a Python number must not change one.
        new_values = [jnp.asarray(pairs[i][1], pairs[i][0].dtype) for i in changed]
        return jax.tree.map(jnp.asarray, outputs), new_values

    try:
        traced = one.trace(kept, zeros, batch)
    except NeedsPeersError:
        return None
    flat_rules = [rule for part in rules[: len(kept)] for rule in part]
    # Equal copies stay equal, and a random stream goes on in each replica. Others are merged at each step.
    if dry.calls or any(flat_rules[i] not in (Merge.KEEP, Merge.SEED) for i in changed):
        return None
    if is_test:
        first = sum(map(len, kept))
        given = traced.jaxpr.jaxpr.invars[first : first + len(zeros)]
        names = {*step.results(zeros)}
        if {*keys} != names or step.result_names(keys, names) != names or not adds_only(traced.jaxpr, given):
            return None
    return _LoneStep(one, traced.out_info[0], list(changed))


def _all_steps(
    apart: _LoneStep, kept: State, metrics: list[jax.Array], data: PyTree, slots: int
) -> tuple[PyTree, list[jax.Array]]:
    """Run the steps; return what each one gave, stacked, and what the last one changed."""
    zeros = [jnp.zeros_like(m) for m in metrics]
    if slots == 1:
        return apart.one(kept, zeros, data)
    count, batches = data
    flat = list(itertools.chain(*kept))

    def one(i: jax.Array, changed: list[jax.Array]) -> tuple[PyTree, list[jax.Array]]:
        now = list(flat)
        for place, value in zip(apart.changed, changed, strict=True):
            now[place] = value
        return apart.one(in_lists(now, kept), zeros, entry_at(i, batches))

    return repeated(count, slots, apart.outputs, one, [flat[i] for i in apart.changed])


def _sums(parts: list[jax.Array], engine: ReplicaEngine) -> list[jax.Array]:
    """Return the sums over the replicas, in one message for each dtype."""
    sums: list[jax.Array] = list(parts)
    for dtype in dict.fromkeys(p.dtype for p in parts):
        places = [i for i, p in enumerate(parts) if p.dtype == dtype]
        flat = jnp.concatenate([parts[i].reshape(-1) for i in places])
        # Not an all-reduce: a ring adds in an order that depends on where in the message a number lies.
        every = engine.all_gather(flat[None], 0)
        total = functools.reduce(jnp.add, [every[r] for r in range(engine.num_replicas)])
        start = 0
        for i in places:
            sums[i] = total[start : start + parts[i].size].reshape(parts[i].shape)
            start += parts[i].size
    return sums


def _running_sums(
    step: TrainerStep, metrics: list[jax.Array], added: list[jax.Array], data: PyTree, slots: int
) -> tuple[PyTree, list[jax.Array]]:
    """Return the logs of each step, stacked, and the metrics after the last one."""
    if slots == 1:
        after = [m + a for m, a in zip(metrics, added, strict=True)]
        return step.results(after), after

    def results(values: list[jax.Array]) -> PyTree:
        return jax.tree.map(jnp.asarray, step.results(values))

    def one(i: jax.Array, values: list[jax.Array]) -> tuple[PyTree, list[jax.Array]]:
        values = [v + entry_at(i, a) for v, a in zip(values, added, strict=True)]
        return results(values), values

    return repeated(data[0], slots, jax.eval_shape(results, metrics), one, metrics)


def adds_only(program: core.ClosedJaxpr, given: Sequence[core.Var]) -> bool:
    """Return whether a program returns each of some arguments plus what depends on none of them.

    Args:
        program: its first outputs belong to the arguments, in their order.

    >>> shapes = jax.numpy.ones(2), jax.numpy.ones(2)
    >>> for update in (lambda v, x: v + jax.numpy.sin(x), lambda v, x: 0.9 * v + x, lambda v, x: v + v * x):
    ...     traced = jax.make_jaxpr(update)(*shapes)
    ...     print(adds_only(traced, traced.jaxpr.invars[:1]))
    True
    False
    False
    """
    depends = set(given)
    adds: dict[core.Var, core.JaxprEqn] = {}
    for equation in program.jaxpr.eqns:
        used = [v for v in equation.invars if isinstance(v, core.Var) and v in depends]
        if used:
            depends.update(equation.outvars)
        if equation.primitive.name == "add" and len(used) == 1:
            adds[equation.outvars[0]] = equation

    def is_sum(value: object, argument: core.Var) -> bool:
        while value is not argument:
            if not isinstance(value, core.Var) or value not in adds:
                return False
            (value,) = (v for v in adds[value].invars if isinstance(v, core.Var) and v in depends)
        return True

    outputs = program.jaxpr.outvars[: len(given)]
    return all(is_sum(output, argument) for output, argument in zip(outputs, given, strict=True))
