"""The train, test and predict functions that Keras' own loop calls.

A batch that divides is split over the replicas. The ragged last batch of an epoch runs whole on
every replica: exact for every layer, loss and metric. A batch size that never divides is padded
and split where every layer treats rows apart; then losses and metrics see the true rows of all
replicas, so that they too are exact.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._context import Context, OneReplica, ReplicaContext, ReplicaEngine, entered
from unisono._errors import InvalidArgumentError
from unisono._values import ReduceOp
from unisono.step._compiler import CompiledStep
from unisono.step._engines import SHARDED, UNSHARDED, SpmdEngine
from unisono.step._variables import Merge, kind_of, localize, merge_all, merge_rule
from unisono.training._clock import StepClock
from unisono.training._joined import DeafEngine, JoiningEngine, NotAloneError, are_sums, can_join
from unisono.training._placing import BatchPlacer
from unisono.training._rows import depends_on_batch, pad_rows

_LOG = logging.getLogger("unisono")

State = tuple[Sequence[Any], ...]


class StatePart(Sequence[Any]):
    """One list of a step's state, as Keras' loop carries it from step to step.

    Not a list, because Keras looks into every list that it stores on a model: 0.2 ms a step.

    Args:
        values: arrays, where the next step wants them.
        view: gives the array that Keras and callbacks see.
    """

    def __init__(self, values: list[Any], view: Callable[[Any], Any] = lambda value: value) -> None:
        self.values = values
        self._view = view

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> Any:
        value = self.values[index]
        return [self._view(v) for v in value] if isinstance(index, slice) else self._view(value)


class Task(enum.Enum):
    """What a step does; the value names the lists of variables in its state, in Keras' order."""

    TRAIN = ("trainable", "non_trainable", "optimizer", "metrics")
    TEST = ("trainable", "non_trainable", "metrics")
    PREDICT = ("trainable", "non_trainable")


class Mode(enum.Enum):
    """How a batch reaches the replicas."""

    SPLIT = "each replica gets its equal part"
    WHOLE = "every replica gets all rows and computes the same"
    PADDED = "filled up to a size that divides, and split"
    SCAN = "several batches in one program, each split"


@dataclasses.dataclass(frozen=True, eq=False)
class TrainerStep:
    """A Keras step on all replicas, as a pure function of `(state, batch)`.

    Args:
        model: the model.
        strategy: whose replicas.
        task: which of the model's steps.
    """

    model: Any
    strategy: Any
    task: Task

    def one_device(self, state: State, batch: Any) -> tuple[Any, State]:
        """Keras' own step, on all rows."""
        if self.task is Task.TRAIN:
            logs, new = self.model.train_step(state, batch)
        elif self.task is Task.TEST:
            logs, new = self.model.test_step(state, batch)
        else:
            logs, non_trainable = self.model.predict_step(state, batch)
            new = (state[0], non_trainable)
        return logs, new

    def whole(self, state: State, batch: Any) -> tuple[Any, State]:
        """The step as one replica of one: every device computes the same."""
        with entered(Context(self.strategy, ReplicaContext(self.strategy, OneReplica()), means=True)):
            return self.one_device(state, batch)

    def split(self, state: State, batch: Any) -> tuple[Any, State]:
        """The step of one replica on its part of the rows."""
        engine = self._engine()
        if engine.num_replicas == 1:
            return self.whole(state, batch)
        rules = self._rules()
        local = tuple(
            [localize(r, v, engine) for r, v in zip(rs, vs, strict=True)]
            for rs, vs in zip(rules, state, strict=True)
        )
        logs, new, rules = self._one_replica(engine, rules, local, batch)
        merged = _merge_state(rules, local, new, engine)
        if self.task is Task.PREDICT and self.strategy.mesh.is_spread:
            # Every process gets all rows, as in tf.distribute.
            logs = jax.tree.map(lambda x: engine.all_gather(x, 0), logs)
        return self._merged_logs(logs, merged, engine), merged

    def _one_replica(
        self, engine: ReplicaEngine, rules: tuple[list[Merge], ...], local: State, batch: Any
    ) -> tuple[Any, State, tuple[list[Merge], ...]]:
        """One replica's step, and by which rules the rest of its state is merged."""
        passengers: list[Any] | None = None
        if self.task is Task.TRAIN and self.strategy.mesh.is_spread and can_join(self.model):
            passengers = self._passengers(DeafEngine(engine), rules[-1], local, batch)
        if passengers is None:
            return *self._inside(engine, local, batch), rules
        joining = JoiningEngine(engine, passengers)
        logs, new = self._inside(joining, local, batch)
        return logs, (*new[:-1], joining.arrived), (*rules[:-1], [Merge.KEEP] * len(passengers))

    def _passengers(
        self, engine: DeafEngine, rules: list[Merge], local: State, batch: Any
    ) -> list[Any] | None:
        """The metrics after the step, if they can travel with the gradients; else None."""
        if any(rule is not Merge.SUM for rule in rules):
            return None
        try:
            _, new = self._inside(engine, local, batch)
        except NotAloneError:
            return None
        metrics = list(new[-1])
        return metrics if engine.calls == 1 and are_sums(metrics) else None

    def _inside(self, engine: ReplicaEngine, local: State, batch: Any) -> tuple[Any, State]:
        with entered(Context(self.strategy, ReplicaContext(self.strategy, engine), means=True)):
            return self.one_device(local, batch)

    def padded(self, true_rows: int, state: State, batch: Any) -> tuple[Any, State]:
        """The step of one replica on its part of a padded batch of `true_rows` true rows."""
        engine = self._engine()
        rules = self._rules()
        # Metrics see all true rows on every replica: their copies are equal, not parts of a sum.
        rules = tuple([Merge.KEEP if r is Merge.SUM else r for r in rs] for rs in rules)
        local = tuple(
            [localize(r, v, engine) for r, v in zip(rs, vs, strict=True)]
            for rs, vs in zip(rules, state, strict=True)
        )
        context = Context(
            self.strategy, ReplicaContext(self.strategy, engine), means=True, true_rows=true_rows
        )
        rows = jax.tree.leaves(batch)[0].shape[0]
        with entered(context):
            logs, new = self.one_device(local, batch)
        merged = _merge_state(rules, local, new, engine)
        if self.task is Task.PREDICT:
            return gather_rows(logs, engine, true_rows), merged
        merged = self._recount_loss(local, merged, true_rows, rows)
        return self._merged_logs(logs, merged, engine), merged

    def _engine(self) -> ReplicaEngine:
        replicas = self.strategy.num_replicas_in_sync
        return OneReplica() if replicas == 1 else SpmdEngine(replicas, self.strategy.cross_device_ops)

    def _rules(self) -> tuple[list[Merge], ...]:
        """The rule of every variable, in the order of the state."""
        return tuple(
            # Trainable and optimizer variables change by aggregated gradients: copies are equal.
            [Merge.KEEP] * len(variables)
            if name in ("trainable", "optimizer")
            else [_fit_rule(v) for v in variables]
            for name, variables in zip(self.task.value, variables_of(self.model, self.task), strict=True)
        )

    def _merged_logs(self, logs: Any, state: State, engine: ReplicaEngine) -> Any:
        """The logs of all replicas: from the merged metrics, or the replicas' mean for others."""
        if self.task is Task.PREDICT:
            return logs
        with keras.StatelessScope(zip(self.model.metrics_variables, state[-1], strict=True)):
            results = self.model.get_metrics_result()
        if isinstance(logs, dict) and set(logs) == set(results):
            return results
        return engine.all_reduce(ReduceOp.MEAN, jax.tree.map(_as_float, logs))

    def _recount_loss(self, old: State, new: State, true_rows: int, rows: int) -> State:
        """Make the loss tracker count true rows, where Keras counted a replica's padded ones."""
        tracker = {id(v) for v in self.model.metrics[0].variables}
        metrics = [
            a + (b - a) * true_rows / rows if id(v) in tracker else b
            for v, a, b in zip(self.model.metrics_variables, old[-1], new[-1], strict=True)
        ]
        return (*new[:-1], metrics)


def _fit_rule(variable: Any) -> Merge:
    rule = merge_rule(kind_of(variable))
    if rule is not Merge.STACK:
        return rule
    # Keras carries one array for each variable: copies that differ become their mean or first.
    return merge_rule(dataclasses.replace(kind_of(variable), owns_copies=False))


def _as_float(value: Any) -> Any:
    value = jnp.asarray(value)
    return value if jnp.issubdtype(value.dtype, jnp.inexact) else value.astype(jnp.float32)


def _merge_state(rules: Sequence[list[Merge]], old: State, new: State, engine: ReplicaEngine) -> State:
    """Merge what the step changed; what it did not is the same object, and stays untouched."""
    old_flat, new_flat = list(itertools.chain(*old)), list(itertools.chain(*new))
    rules_flat = list(itertools.chain(*rules))
    offsets = (Merge.SUM, Merge.SEED)
    changed = [
        i
        for i, (a, b, r) in enumerate(zip(old_flat, new_flat, rules_flat, strict=True))
        if a is not b or r in offsets
    ]
    merged = merge_all([rules_flat[i] for i in changed], [new_flat[i] for i in changed], engine)
    for i, value in zip(changed, merged, strict=True):
        new_flat[i] = value
    values = iter(new_flat)
    return tuple([next(values) for _ in part] for part in new)


def variables_of(model: Any, task: Task) -> tuple[list[Any], ...]:
    """The variables behind a step's state."""
    every = {
        "trainable": lambda: model.trainable_variables,
        "non_trainable": lambda: model.non_trainable_variables,
        "optimizer": lambda: model.optimizer.variables,
        "metrics": lambda: model.metrics_variables,
    }
    return tuple(list(every[name]()) for name in task.value)


def gather_rows(tree: Any, engine: ReplicaEngine, true_rows: int) -> Any:
    """Return the true rows of all replicas, in order, on every replica.

    The derivative of a loss of them by this replica's rows is this replica's part, times the
    number of replicas, because `fit` averages gradients.
    """
    return jax.tree.map(lambda x: _gathered(x, engine)[:true_rows], tree)


def _gathered(x: Any, engine: ReplicaEngine) -> Any:
    rows, replicas = x.shape[0], engine.num_replicas

    @jax.custom_vjp
    def gather(x: Any) -> Any:
        return engine.all_gather(x, 0)

    def forward(x: Any) -> tuple[Any, None]:
        return gather(x), None

    def backward(_: None, cotangent: Any) -> tuple[Any]:
        # Every replica computes the same loss, so the cotangent is at hand: no communication.
        own = jax.lax.dynamic_slice_in_dim(cotangent, engine.replica_id * rows, rows)
        return (own * replicas,)

    gather.defvjp(forward, backward)
    return gather(x)


class TrainerFunction:
    """Keras' `train_function`, `test_function` or `predict_function` on a strategy's replicas.

    Args:
        model: the bound model.
        strategy: its strategy.
        task: which function.
    """

    def __init__(self, model: Any, strategy: Any, task: Task) -> None:
        self._step = TrainerStep(model, strategy, task)
        self._model, self._strategy, self._task = model, strategy, task
        self._programs: dict[Any, CompiledStep] = {}
        self._returned: tuple[StatePart, ...] | None = None
        self._usual_rows: int | None = None
        self._can_pad: bool | None = None
        #: Where the host's time goes.
        self.clock = StepClock()
        mesh = strategy.mesh
        split = self.clock.timing(BatchPlacer(mesh, mesh.sharded))
        self._place = {
            Mode.SPLIT: split,
            Mode.PADDED: split,
            Mode.WHOLE: self.clock.timing(BatchPlacer(mesh, mesh.replicated)),
            Mode.SCAN: self.clock.timing(BatchPlacer(mesh, mesh.scanned)),
        }

    @property
    def num_programs(self) -> int:
        """How many programs were compiled."""
        return len(self._programs)

    def __call__(self, state: State, iterator: Iterator[Any]) -> tuple[Any, State]:
        """Run as many batches as the model executes at once; Keras' convention."""
        batches = self._take(iterator)
        try:
            if self._model.run_eagerly or not self._model.jit_compile:
                return self._eagerly(state, batches)
            return self._compiled(state, batches)
        except BaseException:
            self._give_back(state)
            raise
        finally:
            self.clock.ended()

    def _take(self, iterator: Iterator[Any]) -> list[Any]:
        wanted = max(1, self._model.steps_per_execution)
        self.clock.begin()
        batches = list(itertools.islice(iterator, wanted))
        self._strategy.note_step(self._task.name.lower(), batches)
        if not batches:
            raise StopIteration
        self.clock.took(batches)
        return batches

    def _eagerly(self, state: State, batches: list[Any]) -> tuple[Any, State]:
        """Op by op, all rows as one replica, so that a debugger sees values."""
        outputs = []
        for batch in batches:
            logs, state = self._step.whole(state, batch)
            outputs.append(logs)
        return self._joined(outputs), state

    def _compiled(self, state: State, batches: list[Any]) -> tuple[Any, State]:
        state = self._placed(state)
        wanted = self._model.steps_per_execution
        if wanted > 1 and len(batches) == wanted and self._same_and_divide(batches):
            outputs, state = self._scan(state, batches)
        else:
            collected = []
            for batch in batches:
                logs, state = self._one(state, batch)
                collected.append(logs)
            outputs = self._joined(collected)
        store = self._strategy.store_state
        if not self._strategy.mesh.is_spread:
            self._returned = tuple(StatePart(list(store(part))) for part in state)
            return outputs, self._returned
        view = self._strategy.mesh.local
        self._returned = tuple(StatePart(list(store(part)), view) for part in state)
        return jax.tree.map(view, outputs), self._returned

    def _placed(self, state: State) -> State:
        if self._returned is not None and all(a is b for a, b in zip(state, self._returned, strict=True)):
            return tuple(list(self._strategy.fetch_state(part.values)) for part in self._returned)
        parts = self._strategy.same_on_all(tuple(list(part) for part in state), self._task.name)
        parts = self._strategy.mesh.put(parts, self._strategy.mesh.replicated)
        return tuple(list(self._strategy.fetch_state(part)) for part in parts)

    def _one(self, state: State, batch: Any) -> tuple[Any, State]:
        rows = _rows(batch)
        mode = self._mode(rows)
        if mode is Mode.PADDED:
            replicas = self._strategy.num_replicas_in_sync
            batch = jax.tree.map(lambda x: pad_rows(x, replicas), batch)
        program = self._program(mode, rows if mode is Mode.PADDED else None)
        return program(state, self._place[mode](batch))

    def _mode(self, rows: int) -> Mode:
        replicas = self._strategy.num_replicas_in_sync
        if self._usual_rows is None:
            self._usual_rows = rows
        if rows % replicas == 0 and rows > 0:
            return Mode.SPLIT
        if rows != self._usual_rows or rows < replicas:
            return Mode.WHOLE
        if self._can_pad is None:
            self._can_pad = self._decide_padding(rows, replicas)
        return Mode.PADDED if self._can_pad else Mode.WHOLE

    def _decide_padding(self, rows: int, replicas: int) -> bool:
        reason = depends_on_batch(self._model)
        if reason:
            _LOG.warning(
                "A batch of %d rows does not divide over %d replicas, and %s: every replica computes all "
                "rows, which is exact but no faster than one device. Use a batch size of %d.",
                rows, replicas, reason, -(-rows // replicas) * replicas,
            )  # fmt: skip
        else:
            _LOG.info(
                "A batch of %d rows does not divide over %d replicas: it is filled up and split. "
                "A batch size of %d wastes nothing.",
                rows, replicas, -(-rows // replicas) * replicas,
            )  # fmt: skip
        return reason is None

    def _same_and_divide(self, batches: list[Any]) -> bool:
        shapes = [[np.shape(x) for x in jax.tree.leaves(b)] for b in batches]
        return all(s == shapes[0] for s in shapes) and self._mode(_rows(batches[0])) is Mode.SPLIT

    def _scan(self, state: State, batches: list[Any]) -> tuple[Any, State]:
        stacked = jax.tree.map(lambda *xs: np.stack([np.asarray(x) for x in xs]), *batches)
        program = self._program(Mode.SCAN, len(batches))
        outputs, state = program(state, self._place[Mode.SCAN](stacked))
        if self._task is Task.PREDICT:
            outputs = jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:]), outputs)
        return outputs, state

    def _program(self, mode: Mode, detail: Any) -> CompiledStep:
        if (mode, detail) not in self._programs:
            self._programs[mode, detail] = self._compile(mode, detail)
        return self._programs[mode, detail]

    def _compile(self, mode: Mode, detail: Any) -> CompiledStep:
        predicts = self._task is Task.PREDICT and not self._strategy.mesh.is_spread
        step: Callable[..., Any]
        outputs = UNSHARDED
        if mode is Mode.WHOLE:
            step, batch = self._step.whole, UNSHARDED
        elif mode is Mode.PADDED:
            step, batch = (lambda s, b: self._step.padded(detail, s, b)), SHARDED
        elif mode is Mode.SPLIT:
            step, batch = self._step.split, SHARDED
            outputs = SHARDED if predicts else UNSHARDED
        else:
            step, batch = self._scanned, jax.sharding.PartitionSpec(None, *SHARDED)
            outputs = batch if predicts else UNSHARDED
        return CompiledStep(
            step,
            self._strategy.mesh,
            state_shardings=self._strategy.mesh.replicated,
            in_specs=(UNSHARDED, batch),
            out_specs=(outputs, UNSHARDED),
        )

    def _scanned(self, state: State, batches: Any) -> tuple[Any, State]:
        """Several steps in one program; logs are those of the last one, as in Keras."""

        def one(state: State, batch: Any) -> tuple[State, Any]:
            logs, new = self._step.split(state, batch)
            # A scan carries fixed types: a weak type from a Python number must not change it.
            return jax.tree.map(lambda a, b: jnp.asarray(b, a.dtype), state, new), logs

        state, logs = jax.lax.scan(one, state, batches)
        if self._task is Task.PREDICT:
            return logs, state
        return jax.tree.map(lambda x: x[-1], logs), state

    def _joined(self, outputs: list[Any]) -> Any:
        if self._task is not Task.PREDICT:
            return outputs[-1]
        if len(outputs) == 1:
            return outputs[0]
        return jax.tree.map(lambda *xs: np.concatenate([np.asarray(x) for x in xs]), *outputs)

    def _give_back(self, state: State) -> None:
        """Put the state of a step that failed back into the variables, which Keras has emptied."""
        for variables, values in zip(variables_of(self._model, self._task), state, strict=True):
            for variable, value in zip(variables, values, strict=True):
                if not value.is_deleted():
                    variable.assign(self._strategy.mesh.local(value))


def _rows(batch: Any) -> int:
    """The number of rows of a batch.

    Raises:
        InvalidArgumentError: when its arrays have none, or not the same number.
    """
    sizes = [(path, np.shape(x)) for path, x in jax.tree_util.tree_leaves_with_path(batch)]
    if not sizes:
        raise InvalidArgumentError(
            "A batch must hold at least one array. Received: an empty batch. Yield `(x, y)` from the data."
        )
    path, first = sizes[0]
    for other, shape in sizes:
        if not shape or shape[0] != first[0]:
            raise InvalidArgumentError(
                "All arrays of a batch must have the same number of rows. Received: shape "
                f"{shape} at batch{jax.tree_util.keystr(other)}, and {first} at "
                f"batch{jax.tree_util.keystr(path)}. Give every array one row for each example."
            )
    return int(first[0])
