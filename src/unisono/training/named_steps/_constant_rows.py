"""Named steps in groups of constant length, for devices on which the length of a loop may not be data.

As in `training/groups/_constant_groups`: steps run one by one first, the loop's program is compiled beside
them, and the faster form stays. An Estimator keeps what was found for its next training or evaluation.

Tests: tests/virtual/estimator/test_constant_rows.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, MutableMapping
from time import perf_counter
from typing import TYPE_CHECKING, TypeAlias

from unisono._lowering._compiler_options import Executables
from unisono.step._run_ahead import RunAhead
from unisono.training.groups._batch_placement import form_of
from unisono.training.groups._constant_groups import (
    GroupTrial,
    Preparation,
    TrialPhase,
    best_length,
    first_phase,
)
from unisono.training.named_steps._rows import Row, RowSource

if TYPE_CHECKING:
    from unisono.collectives._process_group import ProcessGroup

#: By kind of step: the name of the phase that was found best, and the steps of a group.
Choices: TypeAlias = MutableMapping[Hashable, tuple[str, int]]

#: By the programs that several loops share.
_CHOICES: weakref.WeakKeyDictionary[Executables, Choices] = weakref.WeakKeyDictionary()

_DECIDED = TrialPhase.TOGETHER, TrialPhase.ALONE

#: Steps by themselves after which a group is as long as the longest call so far.
_MOST_ALONE = 64


class ConstantRows:
    """Says how many rows the next program takes, and finds out whether several are faster.

    Args:
        processes: of which all decide alike.
        executables: of earlier loops, whose choices hold for this one, too.
    """

    def __init__(
        self, processes: ProcessGroup, run_ahead: RunAhead, executables: Executables | None = None
    ) -> None:
        self._processes, self._run_ahead = processes, run_ahead
        self._choices = {} if executables is None else _CHOICES.setdefault(executables, {})
        self._trials: dict[Hashable, GroupTrial] = {}
        #: By the form of a row, the kind of step that takes it.
        self._kinds: dict[Hashable, Hashable] = {}
        #: The most steps that a call could run together.
        self._longest = 1
        self._call = object()
        self._num_given_back = 0
        #: Whose group is being measured, and when its first row was asked for.
        self._tried: GroupTrial | None = None
        self._began = 0.0

    def begin_call(self, room: int) -> None:
        """Note that up to so many steps may run until something must happen in between."""
        self._longest, self._call = max(self._longest, room), object()

    def wanted(self, row: Row, room: int) -> int:
        """Return how many rows to take: as many as a group has, or one."""
        self._began = perf_counter()
        trial = None if row.is_whole else self._trials.get(form_of(row.batch))
        if self._num_given_back or trial is None or trial.phase not in (TrialPhase.TRY, TrialPhase.TOGETHER):
            return 1
        return trial.length if 2 <= trial.length <= room else 1

    def complete(self, rows: list[Row], source: RowSource) -> list[Row]:
        """Return the rows that the next program takes, and give back those that are too few for a group."""
        self._tried = None
        if self._num_given_back:
            self._num_given_back -= 1
        elif len(rows) > 1:
            trial = self._trials[form_of(rows[0].batch)]
            if len(rows) < trial.length:
                # The end of the data, or a row of another form: there is no program for so many.
                source.give_back(rows[1:])
                self._num_given_back = len(rows) - 1
                return rows[:1]
            self._tried = trial if trial.phase is TrialPhase.TRY else None
        return rows

    def note_alone(
        self, row: Row, most: int, kind: Hashable, prepare: Callable[[int], Preparation | None]
    ) -> None:
        """Note that a row is about to run by itself; all processes do so at the same step.

        Args:
            most: how many such rows a program may have.
            kind: of the step.
            prepare: traces a group's program.
        """
        form = form_of(row.batch)
        if form not in self._trials:
            self._trials[form], self._kinds[form] = self._trial((form, kind), most), (form, kind)
        trial = self._trials[form]
        newest = self._run_ahead.newest
        trial.note_step(self._call, newest is None or newest.is_ready(), self._began)
        if trial.phase is TrialPhase.TOGETHER and trial.length < 2:
            # The environment has decided. A timer's calls are short at first.
            is_long = all(longest >= most for longest in trial.of_all(self._longest))
            if is_long or trial.steps >= _MOST_ALONE:
                trial.length = self._length(trial, most)
        if trial.phase in _DECIDED:
            return

        def prepared(_: int) -> Preparation | None:
            trial.length = self._length(trial, most)
            return prepare(trial.length) if trial.length > 1 else None

        trial.advance(prepared)
        self._keep(form, trial)

    def note_started(self) -> None:
        """Note that a program was started; wait for it where it is measured."""
        tried, self._tried = self._tried, None
        if tried is not None and (newest := self._run_ahead.newest) is not None:
            newest.block_until_ready()
            tried.note_group(perf_counter() - self._began)
            for form, trial in self._trials.items():
                self._keep(form, trial)

    def _trial(self, kind: Hashable, most: int) -> GroupTrial:
        """Return the trial of a kind of step; it has ended where all processes know the choice."""
        trial = GroupTrial(self._processes, 0)
        phase = first_phase()
        if most < 2:
            phase = TrialPhase.ALONE
        elif phase is TrialPhase.WARM_UP:
            name, length = self._choices.get(kind, ("", 0))
            # Hooks of an earlier loop left room for few steps.
            is_short = 2 * length <= min(self._longest, most)
            # JSON has no tuples.
            known = trial.of_all([] if is_short else [name, length])
            if known[0] and all(one == known[0] for one in known):
                phase, trial.length = TrialPhase[name], length
        trial.phase = phase
        return trial

    def _length(self, trial: GroupTrial, most: int) -> int:
        return min(trial.of_all(best_length(most, self._longest, is_exact=True)))

    def _keep(self, form: Hashable, trial: GroupTrial) -> None:
        """Keep a choice for further loops."""
        if trial.phase in _DECIDED:
            self._choices[self._kinds[form]] = trial.phase.name, trial.length
