"""The train, test and predict functions that Keras' own loop calls.

A batch that divides is split over the replicas. The ragged last batch of an epoch runs whole on
every replica: exact for every layer, loss and metric. A batch size that never divides is padded
and split where every layer treats rows apart; then losses and metrics see the true rows of all
replicas, so that they too are exact.
"""

from __future__ import annotations

import enum
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

import jax
import numpy as np

from unisono._errors import InvalidArgumentError
from unisono._mesh import AXIS
from unisono.data._batches import check_values, unbatched
from unisono.step._dispatch import CompiledStep
from unisono.step._engines import SHARDED, UNSHARDED
from unisono.step._interrupts import INTERRUPTS
from unisono.training._model_state import hold_state, release_state
from unisono.training.replica._rows import depends_on_batch, one_batch_size, pad_rows
from unisono.training.trainer._batch_placement import BatchPlacer, BatchStager
from unisono.training.trainer._host_timing import HostTimer
from unisono.training.trainer._lookahead import (
    AdaptiveGroupSize,
    StepLookahead,
    multi_step_program,
    slots_for,
    with_agreed_size,
)
from unisono.training.trainer._loop_cost import is_slow_in_loop
from unisono.training.trainer._trainer_step import State, TrainerStep, TrainerTask, variables_of

_LOG = logging.getLogger("unisono")

#: Numbers of train functions, alike on workers that make the same ones.
_NUMBERS = itertools.count()


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
        self._seen: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> Any:
        numbers = range(len(self.values))[index]
        return [self._at(i) for i in numbers] if isinstance(numbers, range) else self._at(numbers)

    def _at(self, number: int) -> Any:
        if number not in self._seen:
            self._seen[number] = self._view(self.values[number])
        return self._seen[number]

    def behind(self, number: int, seen: Any) -> Any | None:
        """Return the array of which `seen` was given to Keras and callbacks; None for any other.

        Args:
            number: of the array.
            seen: any.
        """
        return self.values[number] if self._seen.get(number) is seen else None


class Mode(enum.Enum):
    """How a batch reaches the replicas."""

    SPLIT = "each replica gets its equal part"
    WHOLE = "every replica gets all rows and computes the same"
    PADDED = "filled up to a size that divides, and split"
    TOGETHER = "several batches in one program, each split or padded"


class TrainerFunction:
    """Keras' `train_function`, `test_function` or `predict_function` on a strategy's replicas.

    Args:
        model: the bound model.
        strategy: its strategy.
        task: which function.
    """

    def __init__(self, model: Any, strategy: Any, task: TrainerTask) -> None:
        self._step = TrainerStep(model, strategy, task)
        self._model, self._strategy, self._task = model, strategy, task
        self._names = tuple(f"{name}_variables" for name in task.value)
        self._programs: dict[Any, CompiledStep] = {}
        self._returned: tuple[StatePart, ...] | None = None
        # What the last program of a call gives; nothing else holds the state until the call ends.
        self._done: list[Any] = []
        self._number, self._count = next(_NUMBERS), 0
        self._steps = 0
        self._usual_rows: int | None = None
        self._can_pad: bool | None = None
        self._is_fixed = False
        self._groups: dict[Any, BatchStager] = {}
        #: Whether several steps may run in one program; None until the first program is traced.
        self._may_loop: bool | None = None
        self._pace = AdaptiveGroupSize(strategy.mesh.is_spread)
        #: What runs ahead of Keras' loop, during a call of `fit` in which nobody can tell.
        self.lookahead: StepLookahead | None = None
        #: Where the host's time goes.
        self.timer = HostTimer()
        mesh = strategy.mesh
        split = self.timer.timing(BatchPlacer(mesh, mesh.sharded))
        self._place = {
            Mode.SPLIT: split,
            Mode.PADDED: split,
            Mode.WHOLE: self.timer.timing(BatchPlacer(mesh, mesh.replicated)),
        }
        self._place_group = self.timer.timing(BatchStager.placed)

    @property
    def num_programs(self) -> int:
        """How many programs were compiled."""
        return len(self._programs)

    def __call__(self, state: State, iterator: Iterator[Any]) -> tuple[Any, State]:
        """Run as many batches as the model executes at once; Keras' convention."""
        if INTERRUPTS.pending:
            INTERRUPTS.deliver()
        logs = self.lookahead.asked() if self.lookahead is not None else None
        if logs is not None:
            # What this step computes was computed with the steps before it.
            return logs, self._returned_for(state)
        self.timer.begin()
        self._done.clear()
        try:
            if self.lookahead is not None:
                return self._run_ahead(self.lookahead, state, iterator)
            batches = self._take(iterator)
            if self._model.run_eagerly or not self._model.jit_compile:
                return self._eagerly(state, batches)
            return self._compiled(state, batches)
        except BaseException:
            self._give_back(state)
            raise
        finally:
            self.timer.ended()

    def _take(self, iterator: Iterator[Any]) -> list[Any]:
        wanted = max(1, self._model.steps_per_execution)
        batches = list(itertools.islice(iterator, wanted))
        self._strategy.note_step(self._task.name.lower(), batches)
        if not batches:
            raise StopIteration
        check_values(batches[0] if len(batches) == 1 else batches)
        self.timer.took(batches)
        return batches

    def _returned_for(self, state: State) -> State:
        if self._returned is None or any(a is not b for a, b in zip(state, self._returned, strict=True)):
            raise InvalidArgumentError(
                "The weights may not be changed between two batches of an epoch unless a callback of `fit` "
                "does it, in `on_train_batch_begin` or `on_train_batch_end`. Received: other weights."
            )
        return self._returned

    def _run_ahead(self, ahead: StepLookahead, state: State, iterator: Iterator[Any]) -> tuple[Any, State]:
        """Run the next step, and those after it that fit into its program."""
        strategy, kind = self._strategy, self._task.name.lower()
        try:
            batch = ahead.first(iterator)
        except StopIteration:
            strategy.note_step(kind, [])
            raise
        strategy.note_step(kind, [batch])
        check_values(batch)
        self.timer.took([batch])
        group, state = self._group(batch, slots_for(batch)), self._placed(state, batch)
        if group is None or not self._loops(state, group):
            return self._one_by_one(state, [batch])
        self.timer.begin()
        began = perf_counter()
        most = min(self._pace.size, group.slots) - 1
        for further in ahead.more(iterator, most, group.fits, waits=strategy.mesh.is_spread):
            strategy.note_step(kind, [further])
            check_values(further)
            self.timer.took([group.added(further)])
            self.timer.begin()
        logs, state = self._together(state, group, perf_counter() - began)
        return ahead.done(logs, group.count), self._keep(state)

    def _eagerly(self, state: State, batches: list[Any]) -> tuple[Any, State]:
        """Op by op, all rows as one replica, so that a debugger sees values."""
        outputs = []
        for batch in batches:
            logs, state = self._step.whole(state, batch)
            outputs.append(logs)
        return self._joined(outputs), state

    def _compiled(self, state: State, batches: list[Any]) -> tuple[Any, State]:
        state = self._placed(state, batches[0])
        wanted = self._model.steps_per_execution
        group = None
        if wanted > 1:
            batches = [jax.tree.map(np.asarray, batch) for batch in batches]
            group = self._group(batches[0], wanted)
        if group is not None and all(map(group.fits, batches[1:])) and self._loops(state, group):
            for batch in batches[1:]:
                group.added(batch)
            logs, state = self._together(state, group)
            return self._of_group(logs, group.count), self._keep(state)
        return self._one_by_one(state, batches)

    def _one_by_one(self, state: State, batches: list[Any]) -> tuple[Any, State]:
        collected = []
        for batch in batches:
            logs, state = self._one(state, batch)
            collected.append(logs)
        outputs = self._joined(collected)
        return jax.tree.map(self._strategy.mesh.local, outputs), self._keep(state)

    def _keep(self, state: State) -> State:
        """The state as Keras carries it."""
        mesh = self._strategy.mesh
        view = {"view": mesh.local} if mesh.is_spread else {}
        self._count += 1
        self._returned = tuple(StatePart(list(self._strategy.store_state(p)), **view) for p in state)
        # Keras does this when the function has returned, and in between it may be interrupted.
        hold_state(self._model, self._names, self._returned)
        if mesh.is_spread and self._task is TrainerTask.TRAIN:
            self._strategy.note_state(self, self._steps, self._compared)
        return self._returned

    def _compared(self) -> tuple[list[str], list[Any]]:
        """Names and arrays of what all workers must hold alike after a step; the cause before the effect."""
        trainable, non_trainable, optimizer, _ = zip(
            variables_of(self._model, self._task), self._returned or (), strict=True
        )
        pairs = [
            p for vs, xs in (optimizer, trainable, non_trainable) for p in zip(vs, xs.values, strict=True)
        ]
        return [v.path for v, _ in pairs], [x for _, x in pairs]

    def _placed(self, state: State, batch: Any) -> State:
        if self._returned is not None and all(a is b for a, b in zip(state, self._returned, strict=True)):
            return tuple(list(self._strategy.fetch_state(part.values)) for part in self._returned)
        values = [value for part in state for value in part]
        # What the last step returned lies on the devices already.
        last = self._last(state)
        known = [array is not None for array in last]
        key = self._number, self._count
        found = self._strategy.same_on_all(values, self._task.name, known, key, batch)
        if found is not None:
            rows = zip(values, found, last, strict=True)
            last = [new if placed is None or new is not old else placed for old, new, placed in rows]
        flat = iter(self._strategy.mesh.put(last, self._strategy.mesh.replicated))
        return tuple(list(self._strategy.fetch_state([next(flat) for _ in part])) for part in state)

    def _last(self, state: State) -> list[Any]:
        """The last step's arrays; None where a state has another."""
        if self._returned is None:
            return [None for part in state for _ in part]
        pairs = zip(self._returned, state, strict=True)
        return [returned.behind(i, value) for returned, part in pairs for i, value in enumerate(part)]

    def _one(self, state: State, batch: Any) -> tuple[Any, State]:
        rows = _rows(batch)
        mode = self._mode(rows)
        if mode is Mode.PADDED:
            replicas = self._strategy.num_replicas_in_sync
            batch = jax.tree.map(lambda x: pad_rows(x, replicas), batch)
        program = self._program(mode, rows if mode is Mode.PADDED else None)
        self._steps += 1
        return program(state, self._place[mode](batch), self._done)

    def _mode(self, rows: int) -> Mode:
        replicas = self._strategy.num_replicas_in_sync
        if self._usual_rows is None:
            self._usual_rows, self._is_fixed = rows, replicas > 1 and self._has_one_size()
        if self._is_fixed:
            return Mode.WHOLE
        if rows % replicas == 0 and rows > 0:
            return Mode.SPLIT
        if rows != self._usual_rows or rows < replicas:
            return Mode.WHOLE
        if self._can_pad is None:
            self._can_pad = self._decide_padding(rows, replicas)
        return Mode.PADDED if self._can_pad else Mode.WHOLE

    def _has_one_size(self) -> bool:
        reason = one_batch_size(self._model)
        if reason:
            _LOG.warning(
                "A batch cannot be split over %d replicas, because %s: every replica computes all rows, "
                "which is exact but no faster than one device.",
                self._strategy.num_replicas_in_sync, reason,
            )  # fmt: skip
        return reason is not None

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

    def _group(self, batch: Any, slots: int) -> BatchStager | None:
        """Where several batches like this one are collected, with this one; None if it must run alone."""
        if slots < 2 or self._may_loop is False or self._mode(rows := _rows(batch)) is Mode.WHOLE:
            return None
        leaves, structure = jax.tree.flatten(batch)
        key = (slots, rows, structure, tuple((x.shape, x.dtype) for x in leaves))
        if key not in self._groups:
            self._groups[key] = BatchStager(self._strategy.mesh, batch, slots)
        group = self._groups[key]
        group.begin()
        group.added(batch)
        return group

    def _loops(self, state: State, group: BatchStager) -> bool:
        """Whether steps may run in one program, by the first such program's trace."""
        if self._may_loop is None:
            program, arguments = self._program_of(group)
            self._may_loop = not is_slow_in_loop(
                program.jaxpr(state, arguments), self._strategy.mesh.platform
            )
            if not self._may_loop:
                del self._programs[next(key for key, value in self._programs.items() if value is program)]
        return self._may_loop

    def _program_of(self, group: BatchStager) -> tuple[CompiledStep, Any]:
        """The program for several steps, and what it takes beside the state."""
        mode, mesh = self._mode(group.rows), self._strategy.mesh
        program = self._program(Mode.TOGETHER, (group.slots, mode, group.rows if mode is Mode.PADDED else 0))
        data = self._place_group(group)
        return program, (mesh.put_own(np.int32(self._pace.wish)), data) if mesh.is_spread else data

    def _together(self, state: State, group: BatchStager, collecting: float = 0.0) -> tuple[Any, State]:
        program, arguments = self._program_of(group)
        logs, state = program(state, arguments, self._done)
        self._steps += group.count
        agreed, mesh = None, self._strategy.mesh
        if mesh.is_spread:
            logs, agreed = jax.tree.map(mesh.local, logs)
        self._pace.started(jax.tree.leaves(logs), group.count, collecting, agreed)
        return logs, state

    def _of_group(self, logs: Any, count: int) -> Any:
        """The logs of the last of several steps, as in Keras; the predictions of all of them."""
        if self._task is not TrainerTask.PREDICT:
            return jax.tree.map(lambda x: x[count - 1], logs)
        return jax.tree.map(lambda x: np.asarray(x)[:count].reshape(-1, *x.shape[2:]), logs)

    def _program(self, mode: Mode, detail: Any) -> CompiledStep:
        if (mode, detail) not in self._programs:
            self._programs[mode, detail] = self._compile(mode, detail)
        return self._programs[mode, detail]

    def _compile(self, mode: Mode, detail: Any) -> CompiledStep:
        step, batch, outputs = self._step_of(*detail[1:] if mode is Mode.TOGETHER else (mode, detail))
        if mode is Mode.TOGETHER:
            step = multi_step_program(step, slots=detail[0])
            batch, outputs = (UNSHARDED, _later(batch)), _later(outputs)
            if self._strategy.mesh.is_spread:
                step, batch, outputs = with_agreed_size(step, AXIS), (SHARDED, batch), (outputs, UNSHARDED)
        return CompiledStep(
            step,
            self._strategy.mesh,
            state_shardings=self._strategy.mesh.replicated,
            in_specs=(UNSHARDED, batch),
            out_specs=(outputs, UNSHARDED),
        )

    def _step_of(self, mode: Mode, rows: Any) -> tuple[Callable[..., Any], Any, Any]:
        """The step of one batch, and how the batch and what it returns lie on the replicas."""
        if mode is Mode.WHOLE:
            return self._step.whole, UNSHARDED, UNSHARDED
        if mode is Mode.PADDED:
            return functools.partial(self._step.padded, rows), SHARDED, UNSHARDED
        predicts = self._task is TrainerTask.PREDICT and not self._strategy.mesh.is_spread
        return self._step.split, SHARDED, SHARDED if predicts else UNSHARDED

    def _joined(self, outputs: list[Any]) -> Any:
        if self._task is not TrainerTask.PREDICT:
            return outputs[-1]
        if len(outputs) == 1:
            return outputs[0]
        return jax.tree.map(lambda *xs: np.concatenate([np.asarray(x) for x in xs]), *outputs)

    def _give_back(self, state: State) -> None:
        """Put the newest state of a step that failed back into the variables, which Keras has emptied."""
        if self._done:
            state = tuple(list(self._strategy.store_state(part)) for part in self._done[0][1])
        for variables, values in zip(variables_of(self._model, self._task), state, strict=True):
            for variable, value in zip(variables, values, strict=True):
                if not value.is_deleted():
                    variable.assign(self._strategy.mesh.local(value))
        release_state(self._model)


def _later(spec: Any) -> Any:
    """How several arrays lie, of which each lies like `spec`."""
    return jax.sharding.PartitionSpec(None, *spec)


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
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if not np.ndim(leaf):
            raise unbatched(f"batch{jax.tree_util.keystr(path)}", leaf)
    path, first = sizes[0]
    for other, shape in sizes:
        if shape[0] != first[0]:
            raise InvalidArgumentError(
                "All arrays of a batch must have the same number of rows. Received: shape "
                f"{shape} at batch{jax.tree_util.keystr(other)}, and {first} at "
                f"batch{jax.tree_util.keystr(path)}. Give every array one row for each example."
            )
    return int(first[0])
