"""Which compiled program a call of a user's function runs, and which programs are kept.

Tests: tests/virtual/step/test_compiler.py, tests/virtual/step/test_changed_values.py.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from unisono._features import load
from unisono.step._identity import identity_of

if TYPE_CHECKING:
    from types import CodeType

    from unisono.step._call_signature import Call
    from unisono.step._compiler import Entry
    from unisono.step._replicas import Replicas
    from unisono.step.programs._python_reads import Watch

_LOG = logging.getLogger("unisono")

#: Programs kept for each strategy; the oldest is dropped, with the functions it holds.
_CACHE_SIZE = 256

#: After so many programs for one function the log says why.
_MANY_PROGRAMS = 8


@dataclasses.dataclass(frozen=True, eq=False)
class _WatchedEntry:
    """A compiled step, and what it needs to find as it was when it was traced."""

    entry: Entry
    watch: Watch | None


class ProgramsOfSteps:
    """The programs of a strategy's steps.

    Args:
        replicas: that run the steps.
        is_run: whether these are steps of `strategy.run`, for which Python values are read anew at each
            call, and for which the log says when there are many programs.
    """

    def __init__(self, replicas: Replicas, is_run: bool) -> None:
        self._replicas, self._is_run = replicas, is_run
        #: By function and signature: its programs, the last that ran before the others.
        self._kept: collections.OrderedDict[Hashable, list[_WatchedEntry]] = collections.OrderedDict()
        #: Code of functions that change what they close over: each function is a step of its own.
        self._changing: set[CodeType | None] = set()
        self._built_of: collections.Counter[object] = collections.Counter()

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def entry(self, fn: Callable[..., object], call: Call, build: Callable[..., Entry]) -> Entry:
        """Return the compiled step for a function and a call's signature.

        Args:
            build: makes the step of `fn` and `call` if there is none.
        """
        code, same = getattr(fn, "__code__", None), identity_of(fn)
        layout = self._replicas.state_layout
        key = (fn if code in self._changing else same, call.signature, layout.version)
        programs = self._kept.get(key, [])
        for i, program in enumerate(programs):
            if program.watch is None or program.watch.holds():
                if i:
                    programs.insert(0, programs.pop(i))
                return program.entry
        watch = load("values of a step")(fn, call) if self._is_run else None
        entry = build(fn, call)
        if identity_of(fn) != same:
            # It changes what it closes over, as one does that makes its model in the first call.
            self._changing.add(code)
        # The step may have been the first that updates weights.
        self._keep((fn if code in self._changing else same, call.signature, layout.version), entry, watch)
        self._note_program(fn)
        return entry

    def _keep(self, key: Hashable, entry: Entry, watch: Watch | None) -> None:
        programs = self._kept.setdefault(key, [])
        if watch is not None:
            watch.traced([slot.variable for slot in entry.plan.slots])
            for other in programs:
                if other.watch is not None:
                    watch.leave_out_flags_like(other.watch)
        programs.insert(0, _WatchedEntry(entry, watch))
        if len(self) > _CACHE_SIZE:
            oldest, of_oldest = next(iter(self._kept.items()))
            of_oldest.pop()
            if not of_oldest:
                del self._kept[oldest]

    def _note_program(self, fn: Callable[..., object]) -> None:
        name = getattr(fn, "__qualname__", repr(fn))
        code = getattr(fn, "__code__", name)  # other lambdas have the same name
        self._built_of[code] += 1
        if self._is_run and self._built_of[code] == _MANY_PROGRAMS:
            _LOG.warning(
                "%s was compiled %d times: a program depends on the shapes of arrays, on Python ints, bools "
                "and strings among the arguments, on all Python values that it closes over or reads by name, "
                "such as globals and attributes, and on which variables are trainable. Pass what changes as "
                "an argument, as a numpy array, or keep it in a `keras.Variable`.",
                name,
                _MANY_PROGRAMS,
            )
