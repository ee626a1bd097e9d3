"""The events of one task so far: its speed and work, the curves of its numbers, and its spans.

Its lines come from files, which may be damaged: what is not as a task writes it is passed over.

Tests: tests/unit/watch/test_job_reader.py.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Mapping
from typing import Any

from unisono.launcher.terminal._fit_facts import (
    MOST_NAMES,
    MOST_TEXT,
    FitFacts,
    count_in,
    is_time,
    numbers_in,
)
from unisono.launcher.terminal._task_row import TaskRow
from unisono.watch._curves import GrowingCurve
from unisono.watch._job import WatchedBackup, WatchedSpan, WatchedTask

#: Seconds between two spans of a kind that are shown as one.
_GAP = 2.0
#: Spans of a task, and marks of its steps, at most.
_MOST_SPANS, _MOST_MARKS = 400, 4096
#: Kinds of events that take time, and their names on a timeline.
_SPANS = {"steps": "train", "compile": "compile", "save": "save", "restore": "restore"}


def is_event(event: Mapping[str, Any]) -> bool:
    """Return whether a task wrote this line of its events."""
    numbers = ("from", "until", "generation")
    if not isinstance(event.get("event"), str) or not all(is_time(event.get(name)) for name in numbers):
        return False
    if event["event"] != "steps":
        return True
    shares = [event.get(share) for share in ("data", "exchange", "compute")]
    counts = all(count_in(event, name) is not None for name in ("step", "count"))
    return counts and all(share is None or is_time(share) for share in shares)


class TaskRecord:
    """A task, by the launcher's history and the task's own events."""

    def __init__(self, name: str) -> None:
        self.name = name
        #: As the launcher's history says it: a word of `WatchedTask.state`.
        self.state = "starts"
        self.state_since = 0.0
        self.pid: int | None = None
        self.host = ""
        #: Of its process.
        self.generation = 0
        self.row = TaskRow(name, generation=-1)
        self.fit, self._fit_at = FitFacts(), float("-inf")
        #: The step of the last backup, and when it was complete; and whether it is one of `fit`.
        self.backup: tuple[int, float] | None = None
        self._has_backups = False
        self.curves: dict[str, GrowingCurve] = {}
        self.spans: list[WatchedSpan] = []
        self._gap = _GAP
        self._times: list[float] = []
        self._steps: list[int] = []
        self._host_bytes: float | None = None
        self._compute: float | None = None
        #: When a parameter server wrote last.
        self._served_at = float("-inf")

    def update(self, event: dict[str, Any]) -> bool:
        """Take over an event; return whether it is the first of a process that has made steps."""
        name = event["event"]
        if name == "save" and not self._has_backups:
            # Of a loop of its own, whose checkpoints stand for backups.
            self.backup = self.step_at(event["from"]) or 0, event["until"]
        if name in _SPANS:
            self._note_span(_SPANS[name], event)
        if name == "steps":
            return self._take_steps(event)
        if name == "fit":
            self.fit.begin(event)
            self._fit_at = event["until"]
            host = event.get("host")
            self.host = host[:MOST_TEXT] if isinstance(host, str) else self.host
        elif name in ("epoch", "logs"):
            if name == "epoch":
                self.fit.end_epoch(event)
            if (step := count_in(event, "step")) is not None:
                for each, value in numbers_in(event.get("logs")).items():
                    self._add(each, step, value)
        elif name == "backup":
            step, self._has_backups = count_in(event, "step"), True
            self.backup = None if step is None else (step, event["until"])
        elif name == "serves":
            self._served_at = event["until"]
            self._host_bytes = float(event["memory"]) if is_time(event.get("memory")) else None
        return False

    def _take_steps(self, event: dict[str, Any]) -> bool:
        facts = {name: event.get(name) for name in ("data", "exchange")}
        is_first = self.row.update({**event, **facts})
        at, step = event["until"], event["step"]
        if is_first:
            if (
                self._has_backups
                and self.backup is not None
                and self.row.base > self.backup[0]
                and self._times
            ):
                # Its process has ended before it could write that the last backup is complete.
                self.backup = self.row.base, self._times[-1]
            for curve in self.curves.values():
                curve.rewind(self.row.base)
        self._times.append(at)
        self._steps.append(step)
        if len(self._times) > _MOST_MARKS:
            del self._times[1:-1:2], self._steps[1:-1:2]
        self._host_bytes = float(event["host"]) if is_time(event.get("host")) else None
        self._compute = event.get("compute")
        if (speed := self.row.speed) is not None:
            for unit in ("rows", "tokens"):
                if unit in self.row.work:
                    self._add(f"{unit}_per_s", step, speed * self.row.work[unit])
        if self._host_bytes is not None:
            self._add("host_bytes", step, self._host_bytes)
        return is_first

    def _add(self, name: str, step: int, value: float) -> None:
        if name not in self.curves and len(self.curves) >= MOST_NAMES:
            return
        self.curves.setdefault(name, GrowingCurve()).add(step, value)

    def _note_span(self, name: str, event: Mapping[str, Any]) -> None:
        begin, end, generation = event["from"], event["until"], int(event["generation"])
        last = next((i for i in range(len(self.spans) - 1, -1, -1) if self.spans[i].name == name), None)
        if last is not None and self._continues(self.spans[last], begin, generation):
            self.spans[last] = dataclasses.replace(self.spans[last], end=max(end, self.spans[last].end))
            return
        self.spans.append(WatchedSpan(self.name, name, begin, end, generation))
        while len(self.spans) > _MOST_SPANS:
            self._gap *= 2
            self._join_spans()

    def _continues(self, span: WatchedSpan, begin: float, generation: int) -> bool:
        return span.generation == generation and begin - span.end <= self._gap

    def _join_spans(self) -> None:
        joined: list[WatchedSpan] = []
        newest: dict[str, int] = {}
        for span in self.spans:
            i = newest.get(span.name)
            if i is not None and self._continues(joined[i], span.begin, span.generation):
                joined[i] = dataclasses.replace(joined[i], end=max(span.end, joined[i].end))
                continue
            newest[span.name] = len(joined)
            joined.append(span)
        self.spans = joined

    def step_at(self, time: float) -> int | None:
        """Return the last step that was written before a time; None before the first."""
        i = bisect.bisect_right(self._times, time)
        return self._steps[i - 1] if i else None

    @property
    def is_current(self) -> bool:
        """True if the process of now has made steps."""
        row = self.row
        return row.step is not None and row.generation >= self.generation and row.at >= self.state_since

    def shown(self, now: float, heartbeat: float | None) -> WatchedTask:
        """Return the task as it is shown.

        Args:
            heartbeat: when its file of progress was written; None where there is none.
        """
        facts: dict[str, Any] = {
            "host": self.host, "pid": self.pid, "generation": self.generation,
            "log": f"{self.name.replace(':', '-')}.log", "step": self.row.step,
        }  # fmt: skip
        state = self.state
        if state == "runs" and not self.is_current:
            begun = "compiles" if self._fit_at >= self.state_since else "starts"
            state = "serves" if self.name.startswith("ps:") else begun
        task = WatchedTask(self.name, state=state, **facts)
        if state == "serves" and self._served_at >= self.state_since:
            beat = max(0.0, now - self._served_at)
            return dataclasses.replace(task, host_bytes=self._host_bytes, heartbeat_s=beat)
        if task.has_ended or not self.is_current:
            return task
        row, speed = self.row, self.row.speed
        beat = max(row.at, heartbeat or 0.0)
        flops = None if speed is None or "flops" not in row.work else speed * row.work["flops"]
        peak = row.work.get("peak")
        return dataclasses.replace(
            task,
            epoch=self.fit.epoch_at(row.step or 0),
            epochs=self.fit.epochs,
            steps_per_s=speed,
            rows_per_s=None if speed is None or "rows" not in row.work else speed * row.work["rows"],
            tokens_per_s=None if speed is None or "tokens" not in row.work else speed * row.work["tokens"],
            data=row.data,
            compute=self._compute,
            exchange=row.exchange,
            flops_per_s=flops,
            mfu=None if flops is None or peak is None else flops / peak,
            host_bytes=self._host_bytes,
            device_bytes=row.work.get("memory"),
            heartbeat_s=max(0.0, now - beat),
        )

    def last_backup(self, now: float) -> WatchedBackup | None:
        """Return the last backup that the task has completed."""
        return None if self.backup is None else WatchedBackup(self.backup[0], max(0.0, now - self.backup[1]))
