"""A Keras step on one replica or on all, as a pure function of `(state, batch)`.

Tests: tests/virtual/training/test_exact.py.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import keras

from unisono._context import OneReplica, ReplicaEngine, entered
from unisono._features import load
from unisono._system._blocks import garbage_collection_paused
from unisono._types import ArrayLike, PyTree
from unisono._values import ReduceOp
from unisono.step._engines import SpmdEngine
from unisono.step._keras_internals import replace_losses
from unisono.step.variables._merge_rules import Merge, kind_of, localize, merge_all, merge_rule
from unisono.training.replica._fused_metrics import (
    DryRunEngine,
    FusingEngine,
    NeedsPeersError,
    are_sums,
    can_fuse,
)
from unisono.training.replica._rows import first_rows, gather_rows, has_own
from unisono.training.replica._step_reading import StepReader, StepReading, read_step
from unisono.training.trainer._protocol import State

if TYPE_CHECKING:
    from unisono.step._replicas import Replicas


class TrainerTask(enum.Enum):
    """What a step does; the value names the lists of variables in its state, in Keras' order."""

    TRAIN = ("trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables")
    TEST = ("trainable_variables", "non_trainable_variables", "metrics_variables")
    PREDICT = ("trainable_variables", "non_trainable_variables")

    def __init__(self, *_: str) -> None:
        #: The name of a model's step.
        self.step = f"{self.name.lower()}_step"
        #: The attribute of a model with the function that Keras' loop calls.
        self.function = f"{self.name.lower()}_function"


#: The lists of what an optimizer writes, which is equal on all replicas.
UPDATED = ("trainable_variables", "optimizer_variables")

#: What each method of a model runs.
TASKS = {
    "fit": TrainerTask.TRAIN,
    "evaluate": TrainerTask.TEST,
    "predict": TrainerTask.PREDICT,
    "train_on_batch": TrainerTask.TRAIN,
    "test_on_batch": TrainerTask.TEST,
    "predict_on_batch": TrainerTask.PREDICT,
}


class _EarlyValues(NamedTuple):
    """What a replica adds to the state besides the gradients, known before they are reduced.

    Args:
        metrics: the metrics' variables after the step.
        averaged: moving statistics after the step, by their place among the non-trainable variables.
    """

    metrics: list[jax.Array]
    averaged: dict[int, jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class TrainerStep:
    """A Keras step on all replicas, as a pure function of `(state, batch)`."""

    model: keras.Model
    replicas: Replicas
    task: TrainerTask
    #: Has read the step before its program is made; without one, copies merge as variables are declared.
    reader: StepReader | None = None

    @property
    def gathers_predictions(self) -> bool:
        """Whether the step gathers predictions, for each of several processes to have all rows.

        As in tf.distribute; in one process they stay on their devices.
        """
        return self.task is TrainerTask.PREDICT and self.replicas.process_group.size > 1

    def one_device(self, state: State, batch: PyTree) -> tuple[PyTree, State]:
        """Run Keras' own step on all rows."""
        variables = [v for part in variables_of(self.model, self.task) for v in part]

        def code(values: list[jax.Array]) -> tuple[PyTree, list[jax.Array]]:
            logs, new = self._keras_step(in_lists(values, state), batch)
            return logs, list(itertools.chain(*new))

        logs, values = self.replicas.state_layout.run_replica(variables, list(itertools.chain(*state)), code)
        return logs, in_lists(values, state)

    def _keras_step(self, state: State, batch: PyTree) -> tuple[PyTree, State]:
        if self.task is TrainerTask.PREDICT:
            logs, non_trainable = self.model.predict_step(state, batch)
            return logs, (state[0], non_trainable)
        step = self.model.train_step if self.task is TrainerTask.TRAIN else self.model.test_step
        try:
            new: tuple[PyTree, State] = step(state, batch)
        except BaseException:
            # Keras drops a step's added losses at its end. Left there, the next step would take them for its
            # own: a dry run that needs the other replicas ends by an error.
            replace_losses(self.model, [])
            raise
        return new

    def whole(self, state: State, batch: PyTree) -> tuple[PyTree, State]:
        """Run the step as one replica of one: every device computes the same."""
        return self.inside(OneReplica(), state, batch)

    def split(self, state: State, batch: PyTree) -> tuple[PyTree, State]:
        """Run the step of one replica on its part of the rows."""
        engine = self.engine()
        if engine.num_replicas == 1:
            return self.whole(state, batch)
        rules = self.rules()
        local = localized(rules, state, engine)
        logs, new, rules = self._one_replica(engine, rules, local, batch)
        merged = _merge_state(rules, local, new, engine)
        if self.gathers_predictions:
            logs = jax.tree.map(lambda x: engine.all_gather(x, 0), logs)
        return self._merged_logs(logs, merged, engine), merged

    def _one_replica(
        self, engine: ReplicaEngine, rules: tuple[list[Merge], ...], local: State, batch: PyTree
    ) -> tuple[PyTree, State, tuple[list[Merge], ...]]:
        """Run one replica's step; return by which rules the rest of its state is merged, too."""
        fused: _EarlyValues | None = None
        if self.task is TrainerTask.TRAIN and self.replicas.process_group.size > 1 and can_fuse(self.model):
            fused = self._values_to_fuse(DryRunEngine(engine), rules, local, batch)
        if fused is None:
            return *self.inside(engine, local, batch), rules
        joining = FusingEngine(engine, [*fused.metrics, *fused.averaged.values()])
        logs, (trainable, non_trainable, optimizer, metrics) = self.inside(joining, local, batch)
        sums = iter(joining.sums)
        metrics = [next(sums) for _ in metrics]
        means = {i: (next(sums) / engine.num_replicas).astype(x.dtype) for i, x in fused.averaged.items()}
        non_trainable = [means.get(i, x) for i, x in enumerate(non_trainable)]
        kept = [Merge.KEEP if i in means else rule for i, rule in enumerate(rules[1])]
        rules = (rules[0], kept, rules[2], [Merge.KEEP] * len(metrics))
        return logs, (trainable, non_trainable, optimizer, metrics), rules

    def _values_to_fuse(
        self, engine: DryRunEngine, rules: tuple[list[Merge], ...], local: State, batch: PyTree
    ) -> _EarlyValues | None:
        """Return what can be reduced with the gradients; None where the step's metrics cannot."""
        if any(rule is not Merge.SUM for rule in rules[-1]):
            return None
        try:
            _, new = self.inside(engine, local, batch)
        except NeedsPeersError:
            return None
        metrics = list(new[-1])
        if engine.calls != 1 or not are_sums(metrics):
            return None
        # What the step did not change is the same object, and needs no merge.
        changed = {i: x for i, x in enumerate(new[1]) if x is not local[1][i]}
        averaged = {i: x for i, x in changed.items() if rules[1][i] is Merge.MEAN and are_sums([x])}
        return _EarlyValues(metrics, averaged)

    def read(self, batch: PyTree) -> StepReading:
        """Return how the step treats rows and state, by its trace.

        Args:
            batch: pytree of arrays; only shapes and types count.
        """
        with garbage_collection_paused():
            return self._read(batch)

    def _read(self, batch: PyTree) -> StepReading:
        model, task, count = self.model, self.task, self.replicas.num_replicas_in_sync
        names = [task.step, "stateless_call"]
        if task is not TrainerTask.PREDICT:
            names += ["compute_loss_and_updates", "compute_metrics"]
        if not any(has_own(model, name) for name in names):
            has_loss = task is not TrainerTask.PREDICT
            return read_step(model, task is TrainerTask.TRAIN, batch, count, has_loss)

        def run(engine: ReplicaEngine, state: State, batch: PyTree) -> tuple[PyTree, State]:
            with entered(self.replicas.context(engine, means=True)):
                return self._keras_step(state, batch)

        variables, predicts = variables_of(model, task), task is TrainerTask.PREDICT
        read = load("reading of a step of your own")
        # As they are declared: what was read of a batch of another size is no declaration.
        reading: StepReading = read(model, run, variables, self._rules({}), batch, count, predicts)
        return reading

    def inside(
        self, engine: ReplicaEngine, local: State, batch: PyTree, true_rows: int | None = None
    ) -> tuple[PyTree, State]:
        """Run Keras' own step on one replica's rows, without a merge."""
        with entered(self.replicas.context(engine, means=True, true_rows=true_rows)):
            return self.one_device(local, batch)

    def padded(self, true_rows: int, state: State, batch: PyTree) -> tuple[PyTree, State]:
        """Run the step of one replica on its part of a padded batch of `true_rows` true rows."""
        engine = self.engine()
        rules = self.rules()
        # Metrics see all true rows on every replica: their copies are equal, not parts of a sum.
        rules = tuple([Merge.KEEP if r is Merge.SUM else r for r in rs] for rs in rules)
        local = localized(rules, state, engine)
        rows = jax.tree.leaves(batch)[0].shape[0]
        logs, new = self.inside(engine, local, batch, true_rows)
        merged = _merge_state(rules, local, new, engine)
        if self.task is TrainerTask.PREDICT:
            return first_rows(gather_rows(logs, engine), true_rows), merged
        merged = self._recount_loss(local, merged, true_rows, rows)
        return self._merged_logs(logs, merged, engine), merged

    def engine(self) -> ReplicaEngine:
        """Return how a replica exchanges values with the others inside a program."""
        count = self.replicas.num_replicas_in_sync
        return OneReplica() if count == 1 else SpmdEngine(count, self.replicas.cross_device_ops)

    def rules(self) -> tuple[list[Merge], ...]:
        """Return the rule of every variable, in the order of the state."""
        return self._rules(self.reader.rules if self.reader is not None else {})

    def _rules(self, found: Mapping[int, Merge]) -> tuple[list[Merge], ...]:
        """Return the rule of every variable: as it was found, by `id`, or else as it is declared."""
        return tuple(
            # Trainable and optimizer variables change by aggregated gradients: copies are equal.
            [Merge.KEEP] * len(variables)
            if name in UPDATED
            else [found.get(id(v)) or _fit_rule(v) for v in variables]
            for name, variables in zip(self.task.value, variables_of(self.model, self.task), strict=True)
        )

    def _merged_logs(self, logs: PyTree, state: State, engine: ReplicaEngine) -> PyTree:
        """Return the logs of all replicas: from the merged metrics, or the replicas' mean for others."""
        if self.task is TrainerTask.PREDICT:
            return logs
        results = self.results(state[-1])
        if not isinstance(logs, dict):
            return engine.all_reduce(ReduceOp.MEAN, jax.tree.map(as_float, logs))
        names = self.result_names(logs, results)
        others = {name: jax.tree.map(as_float, x) for name, x in logs.items() if name not in names}
        others = engine.all_reduce(ReduceOp.MEAN, others) if others else {}
        return {name: results[name] if name in names else others[name] for name in logs}

    def result_names(self, logs: Iterable[str], results: Iterable[str]) -> frozenset[str]:
        """Return the names of logs that are the results of the model's metrics.

        Args:
            logs: names of all logs.
            results: names of all results.
        """
        known = self.reader.results if self.reader is not None else None
        if known is not None:
            return known
        return frozenset(logs) if {*logs} == {*results} else frozenset()

    def results(self, metrics: Sequence[jax.Array]) -> dict[str, PyTree]:
        """Return the results of the model's metrics."""
        with keras.StatelessScope(zip(self.model.metrics_variables, metrics, strict=True)):
            results: dict[str, PyTree] = self.model.get_metrics_result()
        return results

    def _recount_loss(self, old: State, new: State, true_rows: int, rows: int) -> State:
        """Make the loss tracker count true rows, where Keras counted a replica's padded ones."""
        tracker = {id(v) for v in self.model.metrics[0].variables}
        metrics = [
            a + (b - a) * true_rows / rows if id(v) in tracker else b
            for v, a, b in zip(self.model.metrics_variables, old[-1], new[-1], strict=True)
        ]
        return (*new[:-1], metrics)


def _fit_rule(variable: keras.Variable) -> Merge:
    rule = merge_rule(kind_of(variable))
    if rule is not Merge.STACK:
        return rule
    # Keras carries one array for each variable: copies that differ become their mean or first.
    return merge_rule(dataclasses.replace(kind_of(variable), owns_copies=False))


def as_float(value: ArrayLike) -> jax.Array:
    """Return an array of which replicas may take the mean."""
    array = jnp.asarray(value)
    return array if jnp.issubdtype(array.dtype, jnp.inexact) else array.astype(jnp.float32)


def _merge_state(rules: Sequence[list[Merge]], old: State, new: State, engine: ReplicaEngine) -> State:
    """Merge what the step changed; what it did not is the same object, and stays."""
    old_flat, new_flat = list(itertools.chain(*old)), list(itertools.chain(*new))
    rules_flat = list(itertools.chain(*rules))
    offsets = (Merge.SUM, Merge.SEED)
    changed = [
        i
        for i, (a, b, r) in enumerate(zip(old_flat, new_flat, rules_flat, strict=True))
        if a is not b or r in offsets
    ]
    before = [old_flat[i] for i in changed]
    merged = merge_all([rules_flat[i] for i in changed], [new_flat[i] for i in changed], engine, before)
    for i, value in zip(changed, merged, strict=True):
        new_flat[i] = value
    return in_lists(new_flat, new)


def localized(rules: Sequence[list[Merge]], state: State, engine: ReplicaEngine) -> State:
    """Return the copies of a state with which a replica starts a step."""
    return tuple(
        [localize(r, v, engine) for r, v in zip(rs, vs, strict=True)]
        for rs, vs in zip(rules, state, strict=True)
    )


def in_lists(values: Iterable[jax.Array], like: Sequence[Sized]) -> State:
    """Return values in lists as long as those of a state."""
    rest = iter(values)
    return tuple(list(itertools.islice(rest, len(part))) for part in like)


def variables_of(model: keras.Model, task: TrainerTask) -> tuple[list[keras.Variable], ...]:
    """Return the variables behind a step's state."""
    return tuple(
        list(model.optimizer.variables if name == "optimizer_variables" else getattr(model, name))
        for name in task.value
    )
