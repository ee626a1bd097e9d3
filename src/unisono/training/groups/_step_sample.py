"""Where the devices' time goes in a sampled step, by XLA's own profile.

Devices compute while the host goes on, so that no clock of the host can tell computing from exchanging. A
sample waits for the devices once before a program and once behind it, and reads when its operations ran.

Tests: tests/virtual/callbacks/test_timer.py.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import jax

from unisono.training.groups._step_profile import Result

#: The name of an operation, and when it began and ended.
Operation = tuple[str, float, float]

#: Seconds between two samples, which drain what runs ahead. One took 0.17 s for a program of 32 steps on two
#: virtual devices (two busy cores, jaxlib 0.10.2, 2026-11-24), 3 ms for one step.
_PERIOD = 10.0
#: Operations that wait for other devices, by JAX's names and by XLA's.
_EXCHANGE = re.compile(
    r"p(sum|max|min|permute|broadcast|gather)|(ragged[-_])?all[-_](reduce|gather|to[-_]all)|"
    r"reduce[-_]scatter|collective[-_]|send|recv"
)
#: Operations that consist of others.
_CONTAINERS = re.compile(r"while|call|conditional|cond|async")
#: Where a profile has operations without a note of the program that they are of.
_OPERATIONS = "XLA Ops"


class StepParts(NamedTuple):
    """Where the time of sampled steps went, in seconds.

    Args:
        wall: from the host's first action to the end of the last operation.
        compute: in which at least one device of this process computed.
        exchange: in which its devices only exchanged values, or waited for other devices to.
    """

    wall: float
    compute: float
    exchange: float
    steps: int

    @property
    def exchange_share(self) -> float:
        """The share of the time in which devices only exchanged."""
        return round(self.exchange / self.wall, 4) if self.wall > 0 else 0.0

    @property
    def compute_share(self) -> float:
        """The share of the time in which devices computed."""
        return round(self.compute / self.wall, 4) if self.wall > 0 else 0.0

    def per_step(self) -> dict[str, float]:
        """Return the parts of a step in milliseconds; what is neither of the two is the host's.

        >>> StepParts(wall=0.5, compute=0.25, exchange=0.125, steps=2).per_step()
        {'host_ms': 62.5, 'compute_ms': 125.0, 'exchange_ms': 62.5}
        """
        host = max(0.0, self.wall - self.compute - self.exchange)
        names = {"host_ms": host, "compute_ms": self.compute, "exchange_ms": self.exchange}
        return {name: 1000 * seconds / self.steps for name, seconds in names.items()}


def split(operations: Iterable[Operation]) -> tuple[float, float]:
    """Return how long devices computed, and how long they exchanged and did not compute meanwhile.

    >>> split([("dot.1", 0, 4), ("psum.2", 3, 7), ("while.9", 0, 20), ("tanh", 6, 8), ("all-gather", 9, 10)])
    (6.0, 3.0)
    """
    plain = [op for op in operations if not _CONTAINERS.match(op[0])]
    compute = _covered(op for op in plain if not _EXCHANGE.match(op[0]))
    return compute, _covered(plain) - compute


def _covered(operations: Iterable[Operation]) -> float:
    """Return how long at least one of the operations ran."""
    covered, until = 0.0, float("-inf")
    for _, began, ended in sorted(operations, key=lambda op: op[1]):
        covered += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return covered


def _operations(folder: str) -> list[Operation]:
    """Return the operations of a profile, in seconds."""
    return [
        (str(dict(event.stats).get("hlo_op", event.name)), event.start_ns / 1e9, event.end_ns / 1e9)
        for path in Path(folder).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes
        for line in plane.lines
        for event in line.events
        if line.name == _OPERATIONS or "hlo_op" in dict(event.stats)
    ]


class StepSampler:
    """Samples a program of training steps where it is asked to, in ten seconds one at most."""

    def __init__(self) -> None:
        #: The last sample; None before the first.
        self.parts: StepParts | None = None
        #: Seconds that samples took in all, besides the steps themselves.
        self.seconds = 0.0
        self._is_due = False
        self._next = float("-inf")
        self._known: set[Hashable] = set()
        self._last: object = None

    def ask(self) -> None:
        """Let the next program be sampled that has run before, which is one that is not compiled now."""
        self._is_due = perf_counter() >= self._next

    def run(self, program: Hashable, steps: int, start: Callable[[], Result]) -> Result:
        """Start a program, and return what it returns.

        Args:
            program: what distinguishes it from others.
            start: returns arrays; all devices are done when these are there.
        """
        if self._is_due and program in self._known:
            self._is_due = False
            began, before = perf_counter(), self.parts
            result = self._sample(steps, start)
            if self.parts is not before and self.parts is not None:
                self._next = perf_counter() + _PERIOD
                self.seconds += perf_counter() - began - self.parts.wall
        else:
            result = start()
        self._known.add(program)
        self._last = result
        return result

    def _sample(self, steps: int, start: Callable[[], Result]) -> Result:
        jax.block_until_ready(self._last)
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with tempfile.TemporaryDirectory(prefix="unisono-step-") as folder:
            try:
                jax.profiler.start_trace(folder, profiler_options=options)
            except RuntimeError:  # a profile of the user's runs: there can be only one
                return start()
            began = perf_counter()
            try:
                result = start()
                jax.block_until_ready(result)
            finally:
                wall = perf_counter() - began
                jax.profiler.stop_trace()
            self.parts = StepParts(wall, *split(_operations(folder)), steps)
            return result
