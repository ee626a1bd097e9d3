"""Groups of a constant number of steps, for devices on which the length of a loop may not be data.

On GPUs XLA reads the condition of a loop on the host, and waits for the device in each iteration
(`WhileThunk` in XLA's sources, November 2026), unless it knows at compilation how often the loop runs. So a
full group runs in a program of constantly many steps, and the steps that are left over run one by one: two
programs for a kind of batch.

Whether the loop is faster is measured. Steps run one by one first. Where a step is short, or the devices
wait for the host before most of them, the loop's program is compiled in a thread, beside the steps that
follow. When it is ready, a few groups run alone, and the form with the shorter time for a step is kept. A
device that is never ready may still be slow for the host's sake: its kernels are launched one by one, by a
thread of XLA's. Where a step is long and the host is ahead, a loop could gain little, and is never compiled.
The environment may decide it instead.

XLA's options to put the loops within a step into CUDA graphs, too, or to unroll them there, changed nothing
that could be measured in an MLP, a CNN and a transformer, and made an LSTM slower (H200, JAX 0.11.2,
2026-11-28).

Tests: tests/unit/training/test_constant_groups.py, tests/virtual/training/test_constant_groups.py.
"""

from __future__ import annotations

import enum
import json
import logging
import statistics
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import jax
import keras

from unisono._errors import InvalidArgumentError
from unisono._system._environ import process_environ
from unisono._types import PyTree
from unisono.collectives._process_group import ProcessGroup
from unisono.data._batches import owned
from unisono.step._run_ahead import run_ahead_of
from unisono.training.groups._batch_placement import BatchGroup, StagerCache, form_of
from unisono.training.groups._batch_source import BatchNotes, BatchSource
from unisono.training.groups._multi_step import slots_of_size
from unisono.training.groups._step_profile import HostTimer

if TYPE_CHECKING:
    from unisono.step._replicas import Replicas
    from unisono.training.groups._step_loop import GroupRunner

_Answer = TypeVar("_Answer")

_LOG = logging.getLogger("unisono")

#: Steps of a kind of batch before any is measured: the first ones are compiled, and fill what runs ahead.
_WARM_UP = 32
#: Steps, one by one, whose time is measured.
_MEASURED = 32
#: The share of steps before which the devices waited for the host, from which on a loop may pay.
_IDLE = 0.5
#: Seconds of a step up to which a loop may pay in any case. On an H200 a transformer's step of 270 kernels
#: took 1.9 ms by itself, and 0.8 in a loop, while no step found the device ready (2026-11-28).
_SHORT = 0.01
#: Groups that run alone to be measured; their shortest time counts, as the first one loads the program.
_TRIALS = 3
#: Steps after which processes ask each other again whether the program is compiled.
_ASK_EVERY = 64


class TrialPhase(enum.Enum):
    """How far the trial of a kind of batch is."""

    WARM_UP = enum.auto()
    MEASURE = enum.auto()
    COMPILE = enum.auto()
    TRY = enum.auto()
    TOGETHER = enum.auto()
    ALONE = enum.auto()


#: Decides in place of the measurement: `always` or `never`.
SWITCH = "UNISONO_STEPS_TOGETHER"
_CHOICES = {"": TrialPhase.WARM_UP, "always": TrialPhase.TOGETHER, "never": TrialPhase.ALONE}

#: Compiles a program, in another thread, and lets groups run what was compiled.
Preparation: TypeAlias = tuple[Callable[[], object], Callable[[object], None]]
#: Makes the program of a group of some length; returns None where steps must run one by one.
Prepare: TypeAlias = Callable[[int], Preparation | None]


def best_length(most: int, steps: int | None, multiple: int = 1, is_exact: bool = False) -> int:
    """Return how many steps a group should have, so that an epoch is the fewest dispatches.

    Args:
        most: the most steps that may be in a program.
        steps: of an epoch, the last of which may have fewer rows and run alone; None where it is unknown.
        multiple: the length is one of its multiples, and `multiple` itself where that is more than `most`.
        is_exact: whether the last step of an epoch is like the others, too.

    >>> best_length(32, 1000), best_length(32, 31), best_length(32, None), best_length(32, 1000, multiple=10)
    (27, 30, 32, 30)
    """
    lengths: list[int] = [*range(multiple, max(most, multiple) + 1, multiple)]
    if steps is None:
        return lengths[-1]
    lengths = [n for n in lengths if n <= steps] or lengths[:1]
    counts = (steps,) if is_exact else (steps, steps - 1)
    return min(lengths, key=lambda n: (max(s // n + s % n for s in counts), -n))


def first_phase() -> TrialPhase:
    """Return the phase that the environment chooses."""
    chosen = process_environ().get(SWITCH, "")
    if chosen not in _CHOICES:
        raise InvalidArgumentError(
            f"The variable {SWITCH} of the environment must be `always` or `never`, or not be set. "
            f"Received: {chosen}."
        )
    return _CHOICES[chosen]


def pays(alone: float, together: float) -> bool:
    """Return whether steps should run together, by the seconds that one of them takes."""
    return together < alone


class GroupTrial:
    """Finds out of one kind of batch whether its steps run together.

    Args:
        processes: of which all must decide alike.
        length: how many steps a group has.
    """

    def __init__(self, processes: ProcessGroup, length: int) -> None:
        self._processes, self.length = processes, length
        #: The most steps that could have run together so far.
        self.longest = 1
        self.phase = TrialPhase.WARM_UP
        #: How many of its steps have run by themselves in this phase.
        self.steps = self._idle = 0
        self._epoch: object = None
        self._last = 0.0
        self._alone: list[float] = []
        self._together: list[float] = []
        self._compiled: Future[object] | None = None
        self._use: Callable[[object], None] | None = None

    def note_step(self, epoch: object, is_idle: bool, now: float) -> None:
        """Note that a step of this kind is about to run by itself.

        Args:
            epoch: in another one than before, the time between the two steps is no step's.
            is_idle: whether the devices have nothing to do.
            now: by the clock.
        """
        self.steps += 1
        if self.phase is TrialPhase.MEASURE:
            self._idle += is_idle
            if epoch == self._epoch:
                self._alone.append(now - self._last)
        self._epoch, self._last = epoch, now

    def advance(self, prepare: Prepare) -> None:
        """Go on to the next phase where it is time to; all processes do so at the same step."""
        if self.phase is TrialPhase.WARM_UP and self.steps >= _WARM_UP:
            self._begin(TrialPhase.MEASURE)
        elif self.phase is TrialPhase.MEASURE and self.steps >= _MEASURED and self._alone:
            is_short = statistics.median(self._alone) <= _SHORT
            may_pay = all(self.of_all(is_short or self._idle >= _IDLE * self.steps))
            prepared = prepare(self.length) if may_pay else None
            if prepared is None:
                self._begin(TrialPhase.ALONE)
                return
            compile_, self._use = prepared
            self._compiled = _in_thread(compile_)
            self._begin(TrialPhase.COMPILE)
        elif self.phase is TrialPhase.COMPILE and self._is_time_to_ask() and self._compiled is not None:
            answers = self.of_all([self._compiled.done(), self._compiled.done() and self._has_failed()])
            if any(failed for _, failed in answers):
                self._begin(TrialPhase.ALONE)
            elif all(done for done, _ in answers):
                self.put_to_use()
                self._begin(TrialPhase.TRY)

    def put_to_use(self) -> None:
        """Let groups run in the program that was compiled."""
        if self._use is not None and self._compiled is not None:
            self._use(self._compiled.result())

    def note_group(self, seconds: float) -> None:
        """Note how long a group took that ran alone, from taking its first batch on."""
        self._together.append(seconds / self.length)
        if len(self._together) < _TRIALS:
            return
        times = self.of_all([statistics.median(self._alone), min(self._together)])
        alone, together = (max(each) for each in zip(*times, strict=True))
        self._begin(TrialPhase.TOGETHER if pays(alone, together) else TrialPhase.ALONE)
        _LOG.debug("A step takes %.3f ms by itself, %.3f in a group of %d.",
                   1000 * alone, 1000 * together, self.length)  # fmt: skip

    def _begin(self, phase: TrialPhase) -> None:
        self.phase, self.steps = phase, 0

    def _is_time_to_ask(self) -> bool:
        return self._processes.size == 1 or self.steps % _ASK_EVERY == 0

    def _has_failed(self) -> bool:
        """Return whether the compilation failed, for which steps by themselves need no error."""
        error = self._compiled and self._compiled.exception()
        if error:
            _LOG.warning(
                "Steps run one by one, as the program of %d was not compiled: %s", self.length, error
            )
        return bool(error)

    def of_all(self, value: _Answer) -> list[_Answer]:
        """Return a value of each process; JSON."""
        if self._processes.size == 1:
            return [value]
        return [json.loads(data) for data in self._processes.gather(json.dumps(value).encode())]


class ConstantGroups:
    """Takes groups of constant length, or single batches, as it pays.

    Args:
        runner: makes the programs.
        stagers: collect the batches of a group.
        notes: of the batches that are taken.
    """

    def __init__(
        self,
        model: keras.Model,
        replicas: Replicas,
        runner: GroupRunner,
        stagers: StagerCache,
        notes: BatchNotes,
        timer: HostTimer,
    ) -> None:
        self._model, self._processes, self._runner = model, replicas.process_group, runner
        self._stagers, self._notes, self._timer = stagers, notes, timer
        self._run_ahead = run_ahead_of(replicas.mesh)
        self._trials: dict[Hashable, GroupTrial] = {}
        self._began = 0.0
        #: Batches that were too few for a group, and follow alone.
        self._num_given_back = 0
        #: The kind of batch whose group is being measured.
        self._tried: GroupTrial | None = None

    def next_group(
        self,
        source: BatchSource,
        iterator: Iterator[PyTree],
        alone: BatchGroup,
        most: int,
        room: int,
        keeps_state: bool = False,
    ) -> BatchGroup:
        """Return a group of constant length, or else the one of its first batch alone.

        Args:
            alone: the batch that was taken.
            most: how many batches may be in a program.
            room: how many may run before something must happen in between.
            keeps_state: whether the group may run again, up to any of its steps.
        """
        self._began, self._tried = perf_counter(), None
        if source.is_again and self._num_given_back:
            self._num_given_back -= 1
            return alone
        trial = self._trial_of(alone, source, most, keeps_state)
        if trial.phase is TrialPhase.ALONE:
            return alone
        if trial.phase is not TrialPhase.TOGETHER:
            newest = self._run_ahead.newest
            trial.note_step(source.epoch, newest is None or newest.is_ready(), self._began)
            trial.longest = max(trial.longest, min(most, room))
            trial.advance(partial(self._prepare, alone, keeps_state, trial))
        if trial.phase not in (TrialPhase.TRY, TrialPhase.TOGETHER) or trial.length > room:
            return alone
        group = self._group(alone, source, iterator, trial.length, keeps_state)
        if group.count == trial.length:
            self._tried = trial if trial.phase is TrialPhase.TRY else None
            return group
        # The end of the data, or a batch of another shape: there is no program for so many.
        source.give_back(group.batches[1:])
        self._num_given_back = group.count - 1
        return BatchGroup(group.first, alone.mode, alone.rows)

    def _trial_of(self, alone: BatchGroup, source: BatchSource, most: int, keeps_state: bool) -> GroupTrial:
        """Return the trial of a kind of batch, of which the programs differ from all others."""
        is_free = source.is_ahead or keeps_state
        kind = alone.mode, alone.rows, alone.choice is None, is_free, keeps_state, form_of(alone.first)
        if kind not in self._trials:
            # More than one step is not tried out where the user asks for it.
            wanted: int = self._model.steps_per_execution
            length = best_length(most, source.epoch_steps, wanted) if is_free else wanted
            trial = self._trials[kind] = GroupTrial(self._processes, length)
            if length < 2 or wanted > 1:
                trial.phase = TrialPhase.ALONE if length < 2 else TrialPhase.TOGETHER
            else:
                trial.phase = first_phase()
        return self._trials[kind]

    def _prepare(
        self, alone: BatchGroup, keeps_state: bool, trial: GroupTrial, length: int
    ) -> Preparation | None:
        """Trace the program of a group; return None where its steps must run one by one."""
        if trial.longest < length:
            # Something happens between steps more often, such as a backup.
            trial.length = length = trial.longest
        if length < 2:
            return None
        stager = self._stagers.get(alone.first, length)
        group = BatchGroup(alone.first, alone.mode, alone.rows, stager, keeps_state)
        trace = self._runner.trace(group, stager)
        stager.is_unread = True
        if trace.jaxpr.effects or slots_of_size(trace.result_bytes) < length:
            trace.discard()
            return None
        return trace.compilation, trace.use

    def _group(
        self,
        alone: BatchGroup,
        source: BatchSource,
        iterator: Iterator[PyTree],
        length: int,
        keeps_state: bool,
    ) -> BatchGroup:
        """Return a group of the next batches, up to a length; it holds them all."""
        stager = self._stagers.get(alone.first, length)
        group = BatchGroup(_own(alone.first), alone.mode, alone.rows, stager, keeps_state, holds=True)
        more = source.take_more(iterator, length - 1, stager.fits, waits=True)
        group.fill(self._notes.each(source, map(_own, more)), self._timer)
        stager.is_unread = group.count < length
        return group

    def note_started(self, steps: int) -> None:
        """Note that a program was started; wait for it where it is measured."""
        tried, self._tried = self._tried, None
        if tried is not None and tried.length == steps and (newest := self._run_ahead.newest) is not None:
            newest.block_until_ready()
            tried.note_group(perf_counter() - self._began)


def _own(batch: PyTree) -> PyTree:
    """Return a batch whose source does not write into it when it makes the next one."""
    return jax.tree.map(owned, batch)


def _in_thread(compile_: Callable[[], object]) -> Future[object]:
    """Compile in a thread, which then ends. At its own end Python waits for it: nothing can interrupt XLA."""
    threads = ThreadPoolExecutor(1, "unisono-compilation")
    compiled = threads.submit(compile_)
    threads.shutdown(wait=False)
    return compiled
