"""Takes batches in groups, and starts a program for each: what a call of a train function does.

How many batches a group has, whether its program may repeat the step in a loop, and how far the host is ahead
of the devices is decided here. What a program is, the runner says: `trainer/_trainer_function` for Keras' own
steps, `stateful/_stateful_function` for those in TensorFlow's form.

Tests: tests/virtual/training/test_counts.py, tests/virtual/training/test_lookahead.py,
tests/virtual/training/stateful/test_ahead.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.extend.core as jex
import keras

from unisono._features import load
from unisono._system._task_reports import process_events
from unisono._types import PyTree
from unisono.step._run_ahead import run_ahead_of
from unisono.training.groups._batch_placement import BatchGroup, BatchStager, StagerCache
from unisono.training.groups._batch_policy import BatchPolicy, Mode
from unisono.training.groups._batch_source import BatchNotes, BatchSource, GroupResult, KnownForm
from unisono.training.groups._group_size import AdaptiveGroupSize
from unisono.training.groups._multi_step import is_slow_in_loop, may_loop, slots_for, slots_of_size
from unisono.training.groups._step_profile import HostTimer, start_steps

if TYPE_CHECKING:
    from unisono.step._replicas import Replicas
    from unisono.training.groups._constant_groups import ConstantGroups


#: A state of so many arrays makes the program of a loop long to compile, and fewer steps than these do not
#: make up for it. For dense layers with Adam on two CPU devices, the loop of a state with 1,230 arrays took
#: 4.4 s of CPU time longer to compile than the single step, and saved 12 ms at each step; with 430 arrays it
#: saved 4 ms.
_MANY_ARRAYS, _PAYING_STEPS = 300, 300


class GroupTrace(NamedTuple):
    """The traced program of a group.

    Args:
        result_bytes: what the results of one of its steps take in the devices' memory; 0 for logs.
        discard: called where the program is not used.
        compilation: compiles it, in any thread.
        use: lets groups run what was compiled.
    """

    jaxpr: jex.ClosedJaxpr
    result_bytes: int
    discard: Callable[[], object]
    compilation: Callable[[], Any]
    use: Callable[[Any], None]


class GroupRunner(Protocol):
    """Runs the groups that a `StepLoop` takes."""

    #: Its usual number of rows decides how a batch reaches the replicas.
    batch_policy: BatchPolicy

    def mode_of(self, batch: PyTree) -> tuple[Mode, int]:
        """Return how the rows of a batch reach the replicas, and how many rows it has."""

    def trace(self, group: BatchGroup, stager: BatchStager) -> GroupTrace:
        """Return the program of a group of several batches, as it will run."""

    def start(self, group: BatchGroup) -> tuple[PyTree, jax.Array | None]:
        """Start a group's program.

        Returns:
            The logs or predictions of its steps, stacked if the group has a stager; and the smallest group
            size that a process proposes, None where nothing must be agreed.
        """


class StepLoop:
    """Takes batches in groups, and starts a program for each.

    Args:
        kind: `"train"`, `"test"` or `"predict"`.
        notes_lone: whether a batch that runs alone is noted here, and not by its own program.
    """

    def __init__(
        self,
        model: keras.Model,
        replicas: Replicas,
        kind: str,
        runner: GroupRunner,
        notes_lone: bool = True,
    ) -> None:
        self._model, self._replicas, self._kind, self._runner = model, replicas, kind, runner
        self._notes_lone = notes_lone
        #: Gives how many steps the next program may have.
        self.limit: Callable[[], int] = lambda: sys.maxsize
        self._stagers = StagerCache(replicas.mesh)
        self._run_ahead = run_ahead_of(replicas.mesh)
        platform = replicas.mesh.platform
        self.group_size = AdaptiveGroupSize(replicas.process_group.size, platform)
        #: Whether a program may repeat the step in a loop; None until the first such program is traced.
        self._can_loop = may_loop(platform)
        #: The most batches in one program, where large predictions allow no more.
        self._most_slots = sys.maxsize
        #: The last call, the steps of all calls so far, and whether a loop would not pay for them.
        self._source, self._planned, self._is_short = BatchSource(), 0, False
        events = process_events() if kind == "train" else None
        #: Where the host's time goes.
        self.timer = HostTimer(events, replicas.mesh, model.compute_dtype)
        if events is not None and events.is_read:
            self.timer.count_work()
        self._notes = BatchNotes(replicas.process_group, kind, self.timer)
        #: True if the step of the batch that was taken last runs op by op.
        self.was_eager = False
        #: Takes groups where a loop must have a constant length; None elsewhere.
        self.constant: ConstantGroups | None = None
        if self._can_loop is False:
            make = load("groups of constant length")
            self.constant = make(model, replicas, runner, self._stagers, self._notes, self.timer)

    @property
    def is_constant(self) -> bool:
        """True if a group always has as many batches as its program has room for."""
        return self.constant is not None

    @property
    def is_eager(self) -> bool:
        """Whether the model's steps run op by op."""
        return bool(self._model.run_eagerly or not self._model.jit_compile)

    def run(self, source: BatchSource, iterator: Iterator[PyTree]) -> list[GroupResult]:
        """Run the groups of one call: one ahead of Keras' loop, else those of `steps_per_execution` batches.

        A group ends where a batch does not fit it, so that a call takes several where shapes change.
        """
        results: list[GroupResult] = []
        left = 1 if source.is_ahead else source.left_of_call or self._model.steps_per_execution
        while left > 0:
            group = self.take(source, iterator, source.is_ahead, left)
            if group is None:
                break
            start = partial(self._runner.start, group)
            value, agreed = start_steps(self.timer, group, start)
            is_stacked = group.stager is not None
            if is_stacked:
                # Not the logs: with several processes they are the first device's here, which may be ready
                # long before the other devices have read their batches, where replicas train apart.
                token = self._run_ahead.newest
                self.group_size.wait_for_capacity(token, group.count, group.seconds, agreed)
            if self.constant is not None:
                self.constant.note_started(group.count)
            results.append(GroupResult(value, group.count, is_stacked))
            left -= group.count
        if not results:
            self._notes.share([])
            raise StopIteration
        return results

    def take(
        self,
        source: BatchSource,
        iterator: Iterator[PyTree],
        is_ahead: bool,
        left: int = 1,
        keeps_state: bool = False,
    ) -> BatchGroup | None:
        """Return the next group; None at the end of the data.

        Args:
            is_ahead: whether it has as many batches as pay.
            left: how many it has at most, otherwise.
        """
        began = perf_counter()
        try:
            first = source.take_first(iterator)
        except StopIteration:
            return None
        seconds = perf_counter() - began
        self.was_eager = self.is_eager
        if self.was_eager:
            self._notes.add(first, seconds, self._notes_lone, source.is_again)
            return BatchGroup(first, Mode.WHOLE, 0)
        if is_ahead and source is not self._source:
            self._begin(source)
        usual = self._runner.batch_policy.usual_rows
        wanted: int = self._model.steps_per_execution
        facts = usual, is_ahead, wanted, self._is_short, self._most_slots
        form = self._notes.add(first, seconds, self._notes_lone, source.is_again, facts)
        if form is None:
            form = self._form(first, wanted, is_ahead)
        mode, rows, slots = form.mode, form.rows, form.slots
        alone = BatchGroup(first, mode, rows)
        if slots < 2 or mode in (Mode.WHOLE, Mode.JOINED):
            return alone
        if self.constant is not None:
            stops = self._kind == "train" and self._model.stop_training
            room = min(1 if stops else source.room + 1 if is_ahead else left, self.limit())
            return self.constant.next_group(source, iterator, alone, slots, room, keeps_state)
        if self._can_loop is False:
            return alone
        stager = self._stagers.get(first, slots)
        group = BatchGroup(first, mode, rows, stager, keeps_state)
        if self._can_loop is None:
            self._decide(group, stager, is_ahead)
        if group.stager is None:
            return group
        if not self._notes_lone:
            self._notes.share([first])
        room = left - 1
        if is_ahead:
            # A callback stopped the training before the first batch: Keras looks after it.
            stops = self._kind == "train" and self._model.stop_training
            room = 0 if stops else min(max(self.group_size.size, wanted) - 1, slots - 1, source.room)
        room = min(room, self.limit() - 1)
        if room > 0:
            waits = not is_ahead or self.group_size.is_agreed
            more = source.take_more(iterator, room, stager.fits, waits)
            group.fill(self._notes.each(source, more), self.timer)
        return group

    def _form(self, batch: PyTree, wanted: int, is_ahead: bool) -> KnownForm:
        """Return the form of a batch that has another one than the last."""
        mode, rows = self._runner.mode_of(batch)
        is_exact = not is_ahead or (self._is_short and wanted == 1)
        slots = slots_for(batch, wanted if is_exact else None, wanted, self._most_slots)
        # The first batch says which size is usual.
        usual = self._runner.batch_policy.usual_rows
        facts = usual, is_ahead, wanted, self._is_short, self._most_slots
        return self._notes.know(KnownForm.of(batch, facts, mode, rows, slots))

    def _begin(self, source: BatchSource) -> None:
        """Note a new call, and decide whether its steps are too few to make up for the compilation of a loop.

        By the number of steps that are planned, not of those that ran: a training that is resumed then has
        the same programs as one that was not interrupted.
        """
        self._source = source
        self._planned += source.planned or _PAYING_STEPS
        # Several processes plan each for itself, and must run the same program.
        is_free = self._kind == "train" and not self.group_size.is_agreed and not self._can_loop
        self._is_short = is_free and self._planned < _PAYING_STEPS and _is_large(self._model)

    def _decide(self, group: BatchGroup, stager: BatchStager, is_ahead: bool) -> None:
        """Decide by the trace of the first program with a loop whether, and how many, steps run in one.

        Before further batches are taken, which could not be given back to the data.
        """
        trace = self._runner.trace(group, stager)
        self._can_loop = not is_slow_in_loop(trace.jaxpr, self._replicas.mesh.platform)
        if self._kind != "train" and is_ahead:
            # With a message in each step a loop of test steps was not faster between processes (2 cores, MLP,
            # November 2026: 3.4 ms a step of `evaluate` instead of 3.0, 4.1 of `predict` instead of 2.9).
            if self.group_size.is_agreed:
                from unisono.training.groups._agreed_size import exchanges_in_loop

                self._can_loop &= not exchanges_in_loop(trace.jaxpr)
            self._most_slots = slots_of_size(trace.result_bytes)
        if not self._can_loop or self._most_slots < stager.slots:
            trace.discard()
            group.stager = None


def _is_large(model: keras.Model) -> bool:
    return len(model.variables) + len(model.optimizer.variables) >= _MANY_ARRAYS
