"""Steps that run ahead of callbacks which see single batches, and may read or change anything.

Such callbacks mostly read the logs: progress bars, loggers. The steps behind them run ahead, in programs
that keep the state they are given. Where a callback reads the weights (Keras' `Callback.model` moves the
state into the variables), the group's program runs once more, from its beginning to the very step that the
callback has seen: the same program, hence the same bits. Where the callback has changed the state, or stops
the training, what was computed ahead is discarded, and the batches are used again.

A callback that does so often would make this slower than steps one by one. So after each such moment a
number of steps, which doubles every time, run one by one.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from time import perf_counter
from typing import TYPE_CHECKING

import jax

from unisono._types import PyTree
from unisono.training.groups._batch_placement import BatchGroup, BatchStager
from unisono.training.groups._batch_source import BatchSource
from unisono.training.groups._lookahead import StepLookahead
from unisono.training.groups._multi_step import LazyArray
from unisono.training.groups._step_profile import start_steps
from unisono.training.trainer._protocol import State
from unisono.training.trainer._step_programs import StepProgram

if TYPE_CHECKING:
    from unisono.training.trainer._trainer_function import TrainerFunction

#: Programs that run ahead: the one whose steps are handed out, and the next.
_GROUPS = 2

#: Steps that run one by one after a callback has used the state, the first time.
_PATIENCE = 32

#: As many steps as no training has.
_FOREVER = 1 << 60

#: The largest state, in bytes, of which several versions are kept.
_LARGEST_STATE = 64 << 20


@dataclasses.dataclass(eq=False)
class StartedGroup:
    """A group of steps that was started, and can be run again up to any of them.

    Args:
        placed: the number of batches, and the batches on the devices.
    """

    group: BatchGroup
    stager: BatchStager
    program: StepProgram
    before: State
    placed: tuple[jax.Array, PyTree]
    logs: PyTree
    after: State
    #: Steps that were handed out.
    used: int = 0

    @property
    def left(self) -> int:
        """Steps that were not handed out."""
        return self.group.count - self.used


class Speculation(StepLookahead):
    """A lookahead for callbacks that see single batches."""

    #: A step that was not run ahead runs by itself.
    is_ahead = False
    is_guess = True
    # What ran by itself ends its call.
    hand_out = BatchSource.hand_out

    def __init__(self, per_call: int = 1) -> None:
        super().__init__(per_call)
        #: Programs that are known to have no effects besides their results.
        self._repeatable: set[StepProgram] = set()
        self._started: collections.deque[StartedGroup] = collections.deque()
        self._is_first = True
        #: Steps that still run one by one, and how many do after the next use of the state.
        self._alone, self._patience = 0, _PATIENCE

    # --- the steps -----------------------------------------------------------------------------

    # Steps in TensorFlow's form, whose state Keras does not carry, are not run in this way.
    def step(  # type: ignore[override]
        self, function: TrainerFunction, state: State, iterator: Iterator[PyTree]
    ) -> tuple[PyTree, State]:
        """Run the steps of a call, or hand out those that were run ahead, and start others."""
        carried = function.carried
        self.continue_from(is_unchanged=carried.is_unchanged(state))
        logs, self.left_of_call = None, self._per_call
        while True:
            self.skip(1)
            self._run_ahead(function, state, iterator)
            if not self.pending:
                break
            count, logs, state_after = self.next_steps(self.left_of_call)
            self.skip(count - 1)
            # At once: where the data raise, these steps count.
            state = carried.keep_unread(state_after)
            self.left_of_call -= count
            if not self.left_of_call:
                return logs, state
        if self.left_of_call < self._per_call and not self.has_next(iterator):
            return logs, state
        self.run_alone(is_used=not carried.is_returned(state))
        self.skip(self.left_of_call - 1)
        return function.run(self, state, iterator)

    def _run_ahead(self, function: TrainerFunction, given: State, iterator: Iterator[PyTree]) -> None:
        """Start groups, as far ahead as the callbacks allow; none where the next batch must run by itself."""
        began = perf_counter()
        try:
            while self.wants_group:
                newest = self._started[-1].after if self._started else None
                function.begin_with(given if newest is None else newest, is_placed=newest is not None)
                group = function.loop.take(self, iterator, is_ahead=True, keeps_state=True)
                if group is None:
                    return
                started = self._start(function, group, is_first=newest is None)
                if started is None:
                    # It comes again.
                    self.give_back([group.first])
                    return
                self._started.append(started)
        except Exception as error:
            # Raised again where Keras asks for this step.
            if not self.pending:
                raise
            self._raised = error
        finally:
            function.timer.calls += perf_counter() - began

    def _start(self, function: TrainerFunction, group: BatchGroup, is_first: bool) -> StartedGroup | None:
        """Start a group that can run again; None where its first batch must run by itself."""
        if group.stager is None:
            return None
        program, state, data = function.prepare(group)
        if is_first and sum(x.nbytes for x in jax.tree.leaves(state)) > _LARGEST_STATE:
            # Several versions of it would be kept.
            self._give_up()
        if program not in self._repeatable and program.jaxpr(state, data).effects:
            # It prints, for example: a step that is discarded or runs again would be seen.
            self._give_up()
            return None
        self._repeatable.add(program)
        if function.timer.work is not None:
            function.learn(group, program, state, data)
        start = partial(program, state, data, [])
        logs, after = start_steps(function.timer, group, start)
        function.num_steps += group.count
        function.loop.group_size.wait_for_capacity(jax.tree.leaves(logs), group.count, group.seconds)
        if function.loop.constant is not None:
            function.loop.constant.note_started(group.count)
        return StartedGroup(group, group.stager, program, state, data, logs, after)

    def _give_up(self) -> None:
        """Run all further steps one by one."""
        self._alone = self._patience = _FOREVER

    # --- what was started ----------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """How many steps were started and not handed out."""
        return sum(started.left for started in self._started)

    @property
    def num_queued(self) -> int:
        """How many steps of the program whose results are handed out follow the last one."""
        return self._started[0].left if self._started else 0

    @property
    def wants_group(self) -> bool:
        """Whether one more group should be started before the next step is handed out."""
        if self._alone or (self.left is not None and self.pending > self.left):
            return False
        return sum(started.left > 0 for started in self._started) < _GROUPS

    def begin_epoch(self, steps: int | None, ends_data: bool = False) -> None:
        """Note that an epoch begins; discard what is left of one that was interrupted."""
        super().begin_epoch(steps, ends_data)
        self._is_first = True
        self._started.clear()

    def next_steps(self, most: int) -> tuple[int, PyTree, Callable[[], State]]:
        """Hand out the next steps of one group.

        Returns:
            How many, the last one's logs, and what computes the state after it where that is read.
        """
        while not self._started[0].left:
            self._started.popleft()
        started = self._started[0]
        count = min(most, started.left)
        started.used += count
        index = started.used - 1
        logs = jax.tree.map(lambda every: LazyArray.of_step(every, index), started.logs)
        return count, logs, cache(partial(self._state_once, [started], started.used))

    def _state_once(self, group: list[StartedGroup], steps: int) -> State:
        """Return the state after some of a group's steps, and let the group go: its arrays may be large."""
        state = self._state_after(group[0], steps)
        group.clear()
        return state

    def _state_after(self, started: StartedGroup, steps: int) -> State:
        """Return the state after some of a group's steps, which are run again."""
        if steps == started.group.count:
            return started.after
        self.note_use()
        _, state = started.program(started.before, (started.stager.number(steps), started.placed[1]))
        return state

    # --- what callbacks do ---------------------------------------------------------------------

    def note_use(self) -> None:
        """Note that a callback used the state in the middle of a group: let steps run alone for a while."""
        self._alone, self._patience = self._patience, min(2 * self._patience, _FOREVER)

    def continue_from(self, is_unchanged: bool) -> None:
        """Discard what runs ahead where it is of no use: its batches come again.

        Args:
            is_unchanged: whether the state is that of the last step, and not one that a callback has set.
        """
        if not is_unchanged and self.pending:
            self.note_use()
        # Also where the state was read only: it may be read again at each of the next steps.
        if not is_unchanged or self._alone:
            unused = [b for started in self._started for b in started.group.batches[started.used :]]
            self.give_back(unused)
            self._started.clear()

    def run_alone(self, is_used: bool) -> None:
        """Note that the next step runs by itself, in a program of one step.

        Args:
            is_used: whether a callback used the state since the step before.
        """
        self._started.clear()
        if not self._alone:
            return
        # At an epoch's end, Keras itself reads the state.
        is_used, self._is_first = is_used and not self._is_first, False
        self._alone = self._patience if is_used else self._alone - 1

    # --- the batches ---------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """How many batches may follow, up to the end of the epoch; Keras' loop is at the step it asks for."""
        return sys.maxsize if self.left is None else self.left - self.pending
