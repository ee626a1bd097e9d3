"""A job as it is shown, at one moment: in a terminal, on a page, as numbers for Prometheus. Pure.

`WatchedJob.to_json` is what the page gets. Times are in seconds since the epoch; what is not known is None.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

#: A point of a curve: the step, and the value there.
Point = tuple[int, float]


def _finite(value: Any) -> Any:
    """Return a value as JSON may hold it: NaN and infinities are not known."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(record: Any) -> dict[str, Any]:
    return {field.name: _finite(getattr(record, field.name)) for field in dataclasses.fields(record)}


@dataclasses.dataclass(frozen=True)
class WatchedTask:
    """A task of the job.

    Args:
        state: `"starts"` until `fit`, `"compiles"` until its first step, `"runs"`, `"serves"`, `"stopped"`,
            `"restarts"`, `"failed"`, `"no answer"`, `"ended"`, or `"ended (3)"` with an exit code.
        epoch: of its `fit`, from 1, of so many `epochs`.
        step: of the run, as it was written last.
        rows_per_s: of all replicas, as are the tokens.
        data: the share of the last second in which it waited for data, from 0 to 1; `compute` and `exchange`
            likewise, where they are measured.
        flops_per_s: of one device; `mfu` is its share of the device's peak.
        host_bytes: the memory of its process; `device_bytes` is the most on one of its devices.
        heartbeat_s: how long ago it wrote its last progress.
        generation: of its process, from 0.
        log: the name of its log in the log folder.
    """

    name: str
    host: str = ""
    pid: int | None = None
    state: str = "starts"
    epoch: int | None = None
    epochs: int | None = None
    step: int | None = None
    steps_per_s: float | None = None
    rows_per_s: float | None = None
    tokens_per_s: float | None = None
    data: float | None = None
    compute: float | None = None
    exchange: float | None = None
    flops_per_s: float | None = None
    mfu: float | None = None
    host_bytes: float | None = None
    device_bytes: float | None = None
    heartbeat_s: float | None = None
    generation: int = 0
    log: str = ""

    @property
    def has_ended(self) -> bool:
        """True if its process is gone."""
        return self.state.startswith(("ended", "failed"))


@dataclasses.dataclass(frozen=True)
class WatchedCurve:
    """The values of a number over the steps.

    Args:
        name: a key of Keras' logs, such as `"val_loss"`, or `"rows_per_s"`, `"tokens_per_s"`, `"host_bytes"`.
        points: in the order of their steps.
    """

    name: str
    points: Sequence[Point]


@dataclasses.dataclass(frozen=True)
class WatchedFault:
    """Something that disturbed the job, or its end.

    Args:
        kind: `"failure"`, `"stall"`, `"restart"`, `"recovery"` or `"preemption"`.
        step: of the run, at that time.
        task: None where it was all of them.
        reached: the last step of any task then, where the launcher has read it.
    """

    time: float
    step: int | None
    kind: str
    task: str | None
    text: str
    reached: int | None = None


@dataclasses.dataclass(frozen=True)
class WatchedSpan:
    """Something of a task that took time.

    Args:
        name: `"start"`, `"train"`, `"compile"`, `"save"` or `"restore"`.
        end: None while it lasts.
    """

    task: str
    name: str
    begin: float
    end: float
    generation: int


@dataclasses.dataclass(frozen=True)
class WatchedBackup:
    """The last backup that is complete.

    Args:
        step: whose state it holds.
        age_s: how long ago it was complete.
    """

    step: int
    age_s: float


@dataclasses.dataclass(frozen=True)
class WatchedJob:
    """A job at one moment.

    Args:
        title: what runs, in short; `command` is the whole line.
        now: when this was read.
        state: `"starts"`, `"runs"`, `"restarts"`, `"ended"` or `"failed"`.
        generation: the number of times that all tasks were started again; from 0.
        restarts: of all tasks, or of single ones.
        restarts_left: how many more are allowed at this moment.
        config: what was launched, and what `fit` trains: names and values.
        epoch: the running one, from 1.
        steps: of the whole training.
        left_s: until its end, at the speed of the last minutes.
    """

    title: str = ""
    command: str = ""
    started: float = 0.0
    now: float = 0.0
    state: str = "starts"
    exit_code: int | None = None
    generation: int = 0
    restarts: int = 0
    restarts_left: int | None = None
    config: Sequence[tuple[str, str]] = ()
    epoch: int | None = None
    epochs: int | None = None
    step: int = 0
    steps: int | None = None
    left_s: float | None = None
    backup: WatchedBackup | None = None
    tasks: Sequence[WatchedTask] = ()
    curves: Sequence[WatchedCurve] = ()
    faults: Sequence[WatchedFault] = ()
    timeline: Sequence[WatchedSpan] = ()

    @property
    def is_over(self) -> bool:
        """True if nothing of it runs any more."""
        return self.state in ("ended", "failed")

    def curve(self, name: str) -> Sequence[Point]:
        """Return the points of a curve; none where there is no such curve."""
        return next((curve.points for curve in self.curves if curve.name == name), ())

    def to_json(self) -> dict[str, Any]:
        """Return the job as JSON has it.

        >>> WatchedJob(title="train.py", backup=WatchedBackup(40, 1.5)).to_json()["backup"]
        {'step': 40, 'age_s': 1.5}
        """
        facts = _plain(self)
        facts["config"] = [list(pair) for pair in self.config]
        facts["backup"] = None if self.backup is None else _plain(self.backup)
        for name in ("tasks", "faults", "timeline"):
            facts[name] = [_plain(each) for each in getattr(self, name)]
        facts["curves"] = [
            {"name": curve.name, "points": [[step, _finite(value)] for step, value in curve.points]}
            for curve in self.curves
        ]
        return facts
