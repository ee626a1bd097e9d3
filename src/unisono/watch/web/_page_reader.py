"""A log folder as the page shows it: the job, its timeline, and the end of each log."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from unisono.watch._job_reader import JobReader
from unisono.watch.web._page_timeline import PageTimeline, costs_of, rows_of

#: Bytes of a log that a page shows; of one log in a file, and of all.
_SHOWN, _KEPT, _ALL_KEPT = 1 << 16, 1 << 13, 1 << 19
#: Bytes of events that one look reads, so that a long past is shown as it is read: a second's work.
_LOOK = 4 << 20
#: Points after which a curve is sent anew at intervals: so long a curve has other points each time.
_LONG = 500
#: Seconds of these intervals.
_INTERVAL = 3.0
#: Seconds between the two times that a failure has: the launcher's, and its process' end.
_NEAR = 60.0


class PageReader:
    """Reads a log folder for pages; its methods may be called by several threads."""

    def __init__(self, job: JobReader) -> None:
        self._job, self._folder = job, job.folder
        self._timeline = PageTimeline(job.folder)
        self._lock = threading.Lock()
        self._names: frozenset[str] = frozenset()
        #: The curves that were returned last, and when.
        self._curves: dict[str, tuple[float, list[object]]] = {}
        self.is_over = False

    def read(self, last: bool = False) -> dict[str, object]:
        """Return the job as it is now, as JSON has it.

        Like `WatchedJob.to_json`, but `curves` has the points by name, and `timeline` the bars by row.

        Args:
            last: whether all is read at once, and long curves are up to date, too.
        """
        with self._lock:
            most = None if last else _LOOK
            job = self._job.refresh(most)
            rows = self._timeline.read(most)
            # Servers show the events of their tasks, and no launcher's history; pods give each byte once.
            for task, row in rows_of(job.timeline, job.started).items():
                own = rows.setdefault(task, {})
                if not own.keys() & row.keys():
                    own |= row
            facts = job.to_json()
            self._names = frozenset(task.name for task in job.tasks) | (rows.keys() - {"launcher"})
            self.is_over = job.is_over
            facts["curves"] = self._curves_of(facts["curves"], job.now, last or job.is_over)
            facts["timeline"] = rows
            self._add_costs(facts["faults"], job.started)
            return facts

    @property
    def is_behind(self) -> bool:
        """True if the last look has left something that was written before it."""
        return self._job.is_behind or self._timeline.is_behind

    def _curves_of(
        self, curves: Sequence[Mapping[str, Any]], now: float, all_now: bool
    ) -> dict[str, list[object]]:
        shown: dict[str, list[object]] = {}
        for curve in curves:
            name, points = curve["name"], curve["points"]
            at, before = self._curves.get(name, (0.0, []))
            if all_now or len(points) < _LONG or now - at >= _INTERVAL:
                self._curves[name] = now, points
                before = points
            shown[name] = before
        return shown

    def _add_costs(self, faults: Sequence[dict[str, Any]], started: float) -> None:
        """Add to each failure what it has cost."""
        for task, at, text in costs_of(self._timeline.outages):
            own = [f for f in faults if f["task"] == task and f["kind"] in ("failure", "stall")]
            near = min(own, key=lambda fault: abs(fault["time"] - started - at), default=None)
            if near is not None and abs(near["time"] - started - at) < _NEAR:
                near["cost"] = text

    def log_of(self, task: str) -> bytes | None:
        """Return the end of a task's log; None for a name that is no task's."""
        return self._end_of(task, _SHOWN) if task in self._names else None

    def _end_of(self, task: str, most: int) -> bytes:
        name = f"{task.replace(':', '-')}.log"
        start = max(0, self._folder.size(name) - most)
        text = self._folder.read(name, start, most)
        # The first line is half a line where the log is longer.
        return text.partition(b"\n")[2] if start and b"\n" in text else text

    def last(self) -> dict[str, object]:
        """Return the data of a page that is a file: the job, and the end of each log."""
        job = self.read(last=True)
        names = sorted(self._names)
        most = min(_KEPT, _ALL_KEPT // max(1, len(names)))
        return {
            "job": job,
            "logs": {name: self._end_of(name, most).decode(errors="replace") for name in names},
        }
