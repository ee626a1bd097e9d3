"""A task as a row of a table, by its events.

Tests: tests/unit/launcher/terminal/test_live_console.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from unisono._checks import is_number
from unisono.cluster_resolver._spec import Task

#: Seconds over which the speed is a mean: a line comes each second.
_SPEED_OVER = 5.0
#: Seconds between two marks of the speed, and their number: half an hour at most counts for the time left.
_MARK_SECONDS, _MARKS = 5.0, 360
#: The letters behind large numbers.
_SCALES = {1e12: "T", 1e9: "G", 1e6: "M", 1e3: "k"}


@dataclasses.dataclass
class TaskRow:
    """A row of the table, for one task.

    Args:
        state: a word, such as `"training"`.
        generation: of its events.
        step: of the run; None before its first event.
        base: the step at which its process began.
        at: when its last event was written, in seconds since the epoch.
        data: the share of the time in which it waited for data; None where it is not known.
        exchange: likewise for values of other processes.
        work: `rows`, `tokens` and `flops` of a step, `peak` and `memory`; of these, the known ones.
    """

    task: Task | str
    state: str = "starts"
    generation: int = 0
    step: int | None = None
    base: int = 0
    at: float = 0.0
    data: float | None = None
    exchange: float | None = None
    work: Mapping[str, float] = dataclasses.field(default_factory=dict)
    #: When, and at which step, the last events were written.
    seen: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    #: Where the speed of the last minutes is counted from: times and steps of this process.
    marks: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    #: True if the running generation has written events.
    is_current: bool = False

    def update(self, event: Mapping[str, Any]) -> bool:
        """Take an event over; return whether it is the first one of a process."""
        base = event["step"] - event["count"]
        is_first = bool(event["generation"] != self.generation or base != self.step)
        if is_first:
            self.generation, self.base = event["generation"], base
            self.seen, self.marks = [(event["from"], self.base)], []
        self.step, self.at, self.data, self.exchange = (
            event[k] for k in ("step", "until", "data", "exchange")
        )
        self.work = work_in(event)
        self.seen.append((event["until"], event["step"]))
        if not self.marks or self.at - self.marks[-1][0] >= _MARK_SECONDS:
            self.marks.append((event["until"], event["step"]))
            del self.marks[:-_MARKS]
        while len(self.seen) > 2 and self.seen[1][0] < event["until"] - _SPEED_OVER:
            del self.seen[0]
        return is_first

    @property
    def speed(self) -> float | None:
        """Steps per second, in the last seconds; None before the second event."""
        # The first steps of a generation wait for the compiler.
        known = self.seen[1:] if len(self.seen) > 2 and self.seen[0][1] == self.base else self.seen
        if len(self.seen) < 3 or known[-1][0] <= known[0][0]:
            return None
        return (known[-1][1] - known[0][1]) / (known[-1][0] - known[0][0])

    @property
    def rate(self) -> float | None:
        """Steps per second over the last minutes, with all between them; None where it is not known yet."""
        if not self.marks or self.step is None or self.at <= self.marks[0][0]:
            return None
        return (self.step - self.marks[0][1]) / (self.at - self.marks[0][0])

    def cells(self, now: float) -> dict[str, str]:
        """Return the texts of its row, by the heads of the table; of the others nothing is known."""
        if not self.is_current:
            return {"task": str(self.task), "state": "starts" if self.state == "runs" else self.state}
        cells = {"task": str(self.task), "state": self.state, "step": str(self.step)}
        if self.state.startswith(("ended", "failed")):
            return cells
        cells["heartbeat"] = f"{max(0.0, now - self.at):.0f} s ago"
        shares = {"data %": self.data, "exchange %": self.exchange}
        cells |= {head: f"{100 * share:.0f}" for head, share in shares.items() if share is not None}
        if "memory" in self.work:
            cells["GB"] = f"{self.work['memory'] / 1e9:.1f}"
        return cells if self.speed is None else cells | self._speeds(self.speed)

    def _speeds(self, speed: float) -> dict[str, str]:
        cells = {"steps/s": f"{speed:.3g}"}
        for name in ("rows", "tokens"):
            if name in self.work:
                cells[f"{name}/s"] = short_number(speed * self.work[name])
        if "flops" in self.work:
            flops = speed * self.work["flops"]
            cells["FLOP/s"] = short_number(flops)
            if "peak" in self.work:
                cells["MFU %"] = f"{100 * flops / self.work['peak']:.0f}"
        return cells


def work_in(event: Mapping[str, Any]) -> dict[str, float]:
    """Return the work of a step, by what an event says of several; see `TaskEventFile`.

    >>> work_in({"count": 10, "rows": 640, "peak": 1e12, "tokens": "many"})
    {'rows': 64.0, 'peak': 1000000000000.0}
    """
    names = [name for name in ("rows", "tokens", "flops") if _is_in(event, name)]
    sums = {name: event[name] / max(event["count"], 1) for name in names}
    return sums | {name: float(event[name]) for name in ("peak", "memory") if _is_in(event, name)}


def _is_in(event: Mapping[str, Any], name: str) -> bool:
    value = event.get(name)
    return is_number(value) and value > 0


def short_number(number: float) -> str:
    """Return a number with three digits.

    >>> short_number(7.5), short_number(6150.2), short_number(385_000), short_number(1.25e9)
    ('7.5', '6.15k', '385k', '1.25G')
    """
    scale = next((s for s in _SCALES if number >= 0.9995 * s), 1.0)
    return f"{number / scale:.3g}{_SCALES.get(scale, '')}"
