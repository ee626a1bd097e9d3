"""A user's own `train_step(state, data)`, `test_step` or `predict_step`, read from its trace before it runs.

The whole step is traced for two numbers of rows, with an engine that notes what the replicas would reduce:
gradients must be means over rows when they are averaged, so that clipping by hand, or a second forward pass
at weights that a replica has moved itself, is seen.

Tests: tests/virtual/training/test_step_reading.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NoReturn

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import keras

from unisono._context import ReplicaEngine
from unisono._types import PyTree, Tree
from unisono._values import ReduceOp
from unisono.step._keras_internals import stored_dtype
from unisono.step.variables._merge_rules import Merge, kind_of
from unisono.training._jaxprs import has_groups, value_numbers
from unisono.training.replica._fused_metrics import NeedsPeersError
from unisono.training.replica._rows import StandInEngine, rows_of
from unisono.training.replica._step_reading import (
    StateRules,
    StepReading,
    calls_apart,
    cause_of,
    shapes_of,
    with_rows,
)
from unisono.training.rows._row_analysis import traced_states
from unisono.training.rows._row_states import Constant, Reduced, RowState, RowWise
from unisono.training.rows._row_words import unreadable

Variables = tuple[list[keras.Variable], ...]

#: One replica's step: from an engine, the state and a batch to logs and the new state.
OneReplicaStep = Callable[[ReplicaEngine, tuple[list[jax.Array], ...], PyTree], tuple[PyTree, PyTree]]


class ReadingEngine(StandInEngine):
    """An engine for a step that is read: it notes what would be reduced, and computes nothing.

    Args:
        num_replicas: of which the traced rows are one's part.
        unknown: a traced scalar that stands for whatever the replicas have in common.
        state: the values with which the step begins.
    """

    is_empty = False

    def __init__(self, num_replicas: int, unknown: jax.Array, state: Sequence[jax.Array]) -> None:
        self.num_replicas, self._unknown = num_replicas, unknown
        self._state = {id(x): x for x in state}
        #: What was reduced, and how.
        self.reduced: list[tuple[ReduceOp, jax.Array]] = []

    #: Not the first one's: what alone the first replica adds, such as the value of a sum, is left out.
    replica_id = 1

    def total(self, size: int) -> int:
        """Return the size in all replicas, which run one program."""
        return size * self.num_replicas

    def all_reduce(self, op: ReduceOp, tree: Tree) -> Tree:
        """Note the arrays of `tree`, and return others of their shapes that are equal on all replicas."""
        arrays = jax.tree.map(jnp.asarray, tree)
        self.reduced += [(op, jax.lax.stop_gradient(x)) for x in jax.tree.leaves(arrays)]
        result: Tree = _in_place_of(arrays, self._unknown)
        return result

    def like(self, x: jax.Array) -> jax.Array:
        """Return an array that is equal on all replicas, without a derivative."""
        return jax.lax.stop_gradient(jnp.broadcast_to(self._unknown, x.shape).astype(x.dtype))

    def updated(self, values: Sequence[jax.Array]) -> list[jax.Array] | None:
        """Return arrays in place of what an optimizer makes of values and of reduced gradients.

        Its arithmetic is a third of a step's trace. Its results are equal on all replicas where the values
        are those with which the step begins. None where they are others.
        """
        if not all(id(x) in self._state for x in values):
            return None
        arrays: list[jax.Array] = _in_place_of(list(values), self._unknown)
        return arrays

    def all_gather(self, tree: object, axis: int) -> NoReturn:
        """Reject the call: the step needs the rows of all replicas."""
        raise NeedsPeersError

    def exchange(self, tree: object) -> NoReturn:
        """Reject the call, as `all_gather` does."""
        raise NeedsPeersError


@jax.custom_jvp
def _in_place_of(tree: PyTree, unknown: jax.Array) -> PyTree:
    # Of equal shapes one array will do: a trace takes as long as it has operations.
    @functools.cache
    def like(shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
        return jnp.broadcast_to(unknown, shape).astype(dtype)

    return jax.tree.map(lambda x: like(x.shape, x.dtype), tree)


@_in_place_of.defjvp
def _no_gradient(primals: tuple[PyTree, ...], tangents: tuple[PyTree, ...]) -> NoReturn:
    # A gradient that passes through a reduction belongs to all replicas.
    raise NeedsPeersError


def read_own_step(
    model: keras.Model,
    run: OneReplicaStep,
    variables: Variables,
    rules: Sequence[Sequence[Merge]],
    batch: PyTree,
    replicas: int,
    predicts: bool,
) -> StepReading:
    """Return what is known of a step of a user's own.

    Args:
        variables: of the step's state.
        rules: how their copies merge as they are declared.
        predicts: whether the step returns predictions, and no logs.
    """
    every = rows_of(batch) or 0
    rows = max(2, every // replicas)
    step = _OwnStep(model, run, variables, rules, 2 * rows * replicas)
    arrays = shapes_of(batch)
    try:
        program, states = traced_states(
            step, (arrays, step.parts(every)), step.kept, rows, rows * replicas, step.seeds
        )
    except NeedsPeersError:
        return _together("its step needs the rows of all replicas")
    except Exception as error:  # a user's step may do anything with another number of rows

        def trace(n: int) -> object:
            return jax.eval_shape(step, with_rows(arrays, n), step.parts(n), *step.kept)

        reason, apart = unreadable(error, trace, rows, every)
        return StepReading("" if apart else reason, apart=apart, unfillable=reason)
    reading = step.reading(program, states, predicts, rows)
    if every == replicas and not reading.mixes:
        from unisono.training.rows._other_sizes import runs_with

        if not runs_with(1, step, (arrays, step.parts(every)), step.kept, program):
            return _together("one row is computed in another way than several")
    return dataclasses.replace(reading, has_groups=has_groups(program))


def _together(reason: str) -> StepReading:
    return StepReading(mixes=reason, unfillable=reason)


class _OwnStep:
    """A step as a function of a batch and its state: to logs, the new state, and what it would reduce. Pure.

    Args:
        total: the rows of all replicas, however many a trace has.
    """

    def __init__(
        self,
        model: keras.Model,
        run: OneReplicaStep,
        variables: Variables,
        rules: Sequence[Sequence[Merge]],
        total: int,
    ) -> None:
        self._model, self._run, self._lists, self._total = model, run, variables, total
        self._variables = [v for part in variables for v in part]
        self._declared = [rule for part in rules for rule in part]
        #: A replica's part of a sum is itself a sum over its rows.
        self._is_part = [rule is Merge.SUM for rule in self._declared]
        specs = [jax.ShapeDtypeStruct(tuple(v.shape), stored_dtype(v)) for v in self._variables]
        self.kept = ([x for x, part in zip(specs, self._is_part, strict=True) if not part], _UNKNOWN)
        kept = [v for v, part in zip(self._variables, self._is_part, strict=True) if not part]
        #: Which of them are states of random generators.
        self.seeds = [i for i, v in enumerate(kept) if kind_of(v).is_seed]
        self._sums = [x for x, part in zip(specs, self._is_part, strict=True) if part]
        self._ops: list[ReduceOp] = []
        #: The paths of logs and of the metrics' results, as texts.
        self._logs: list[str] = []
        self._named: list[str] = []
        self._apart: dict[int, keras.Layer] = {}

    def parts(self, rows: int) -> list[jax.ShapeDtypeStruct]:
        """Return shapes whose sums over rows are those of the replica's parts of sums."""
        return [jax.ShapeDtypeStruct((rows, *x.shape), x.dtype) for x in self._sums]

    def __call__(
        self, batch: PyTree, parts: list[jax.Array], kept: list[jax.Array], unknown: jax.Array
    ) -> tuple[list[jax.Array], ...]:
        """Return logs, the state after the step, what replicas would reduce, and the results of metrics."""
        sums, others = iter([jnp.sum(x, axis=0, dtype=x.dtype) for x in parts]), iter(kept)
        flat = [next(sums) if is_part else next(others) for is_part in self._is_part]
        state, start = [], 0
        for part in self._lists:
            state.append(flat[start : start + len(part)])
            start += len(part)
        engine = ReadingEngine(self._total // (rows_of(batch) or 1), unknown, kept)
        with calls_apart(self._model, self._apart):
            logs, new = self._run(engine, tuple(state), batch)
        self._ops = [op for op, _ in engine.reduced]
        paths = jax.tree_util.tree_leaves_with_path(logs)
        self._logs = [jax.tree_util.keystr(path) for path, _ in paths]
        results = self._results(list(new[-1])) if isinstance(logs, dict) else {}
        self._named = list(results)
        return (
            [jnp.asarray(x) for _, x in paths],
            [x for part in new for x in part],
            [x for _, x in engine.reduced],
            [jnp.asarray(x) for x in results.values()],
        )

    def _results(self, metrics: list[jax.Array]) -> dict[str, jax.Array]:
        """Return the results of metrics, by the texts of their paths in logs."""
        if len(metrics) != len(self._model.metrics_variables):
            return {}
        with keras.StatelessScope(list(zip(self._model.metrics_variables, metrics, strict=True))):
            results = self._model.get_metrics_result()
        return {f"[{name!r}]": x for name, x in results.items() if not isinstance(x, dict)}

    def _results_in_logs(self, trace: jex.ClosedJaxpr) -> frozenset[str]:
        """Return which logs are the results of metrics: both are computed alike."""
        numbers = value_numbers(trace)
        results = dict(zip(self._named, numbers[len(numbers) - len(self._named) :], strict=True))
        logs = zip(self._logs, numbers, strict=False)
        return frozenset(name for name, number in logs if results.get(name) == number)

    def reading(
        self, trace: jex.ClosedJaxpr, states: Sequence[RowState], predicts: bool, rows: int
    ) -> StepReading:
        """Return what the states of the results of a trace for some rows mean."""
        in_metrics = frozenset() if predicts else self._results_in_logs(trace)
        logs, rest = states[: len(self._logs)], states[len(self._logs) : len(states) - len(self._named)]
        after, reduced = rest[: len(self._variables)], rest[len(self._variables) :]
        for op, state in zip(self._ops, reduced, strict=True):
            if state not in REDUCIBLE[op]:
                return _together(
                    f"what its step gives the optimizer or a metric is no {op.name.lower()} over the rows "
                    f"({cause_of(state)})"
                )
        for name, state, aval in zip(self._logs, logs, trace.out_avals, strict=False):
            if predicts and aval.shape[:1] != (rows,):
                return _together(f"the result {name} of its step has not one entry for each row")
            right = {Constant(), RowWise(0)} if predicts else {Constant(), Reduced(-1)}
            if name not in in_metrics and state not in right:
                return _together(f"the result {name} of its step depends on several rows ({cause_of(state)})")
        found = StateRules(self._apart.values())
        count = 0
        for variable, state, declared, is_part in zip(
            self._variables, after, self._declared, self._is_part, strict=True
        ):
            if is_part and state != Reduced(0):
                return _together(f"{variable.path} is no sum over rows ({cause_of(state)})")
            if declared is Merge.KEEP and state != Constant():
                return _together(f"{variable.path} would differ between replicas ({cause_of(state)})")
            if declared not in (Merge.KEEP, Merge.SUM):
                found.add(variable, state, count)
            count += not is_part
        mixes = found.mixes[0] if found.mixes else ""
        return StepReading(
            mixes,
            found.rules,
            found.names,
            found.draws,
            "the model has a step of its own",
            tuple(found.findings),
            results=frozenset(name[2:-2] for name in in_metrics),
        )


_UNKNOWN = jax.ShapeDtypeStruct((), jnp.float32)

#: What a mean, and a sum, over replicas must be of one replica's rows to be those of one device.
REDUCIBLE = {
    ReduceOp.MEAN: {Constant(), Reduced(-1)},
    ReduceOp.SUM: {Constant(), Constant(1), Reduced(0)},
}
