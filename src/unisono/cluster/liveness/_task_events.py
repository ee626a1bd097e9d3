"""What a task of a launch does, for people who look at it: lines of JSON in the log folder of the launch.

A line a second at most says how many steps there were; what lasts, such as compiling or saving, has a line of
its own, which is written with them. A file beside holds the number of the last step. `unisono launch` shows
them in a terminal, `unisono timeline` in a page.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from unisono._system._environ import process_environ
from unisono._system._json import parse_json
from unisono._system._task_reports import TaskEvents
from unisono.cluster_resolver._base import whole_of

_LOG = logging.getLogger("unisono")

#: Seconds between two writes.
_PERIOD = 1.0
#: Seconds between two events of a kind that count as one, such as the programs of a step's first call.
_GAP = 0.1
#: Lines of a kind that are kept until the next write.
_MOST_NOTES = 8
_MEMORY = Path("/proc/self/statm")
_COMPILED = "/jax/core/compile/backend_compile_duration"


class TaskEventFile(TaskEvents):
    """Collects what a process does, and appends it to a file; safe to use from several threads.

    Args:
        path: the file.
    """

    is_read = True

    def __init__(self, path: Path, generation: int) -> None:
        #: None once it could not be written.
        self._path: Path | None = path
        self._generation = generation
        self._lock = threading.Lock()
        #: What lasted: name, beginning and end, in seconds since the epoch.
        self._spans: list[tuple[str, float, float]] = []
        #: The steps of the run so far, and whether it began in another process.
        self.step, self.is_resumed = 0, False
        self._count = 0
        #: Seconds of waiting for data and for values of others; None where they are not measured.
        self._data: float | None = None
        self._pulling: float | None = None
        self._computing: float | None = None
        #: Rows, tokens and operations, and the work that they are of; None where they are not counted.
        self._done: tuple[float, ...] | None = None
        self._work: Any = None
        #: The file with the number of the last step, which outlives a SIGKILL.
        self._last: int | None = None
        #: False where no launcher beside this process reads that file.
        self.notes_last = True
        #: Events since the last write.
        self._notes: list[dict[str, object]] = []
        #: The newest logs, and older ones that are read when the devices have them: before which step, arrays
        #: by name, and of how many steps.
        self._returned: tuple[int, dict[str, Any], int] | None = None
        self._waiting: tuple[int, dict[str, Any], int] | None = None
        #: Digests of texts that this task has printed; None until they are read.
        self._printed: list[str] | None = None
        self._from = time.time()
        self._next = float("-inf")

    @classmethod
    def from_environ(cls) -> TaskEventFile:
        """Return the events of this process, written to the file that the launcher has given it."""
        import jax  # the launcher uses this module without it

        environ = process_environ()
        events = cls(Path(environ["UNISONO_EVENTS"]), whole_of("UNISONO_GENERATION", environ))
        events.notes_last = bool(environ.get("UNISONO_PROGRESS"))

        def note(event: str, duration_secs: float, **kwargs: str | int) -> None:
            if event == _COMPILED:
                events.lasted("compile", duration_secs)

        jax.monitoring.register_event_duration_secs_listener(note)
        atexit.register(events.flush)
        return events

    def begin_at(self, step: int) -> None:
        """Note how many steps a run has made that this process resumes."""
        with self._lock:
            self.step, self.is_resumed = step, True

    def stepped(
        self, steps: int = 1, data: float | None = None, pulling: float | None = None, computing: float = 0.0
    ) -> None:
        """Count steps, and write what there is when that is due.

        Args:
            data: seconds of waiting for batches.
            pulling: of a worker of parameter servers, seconds of waiting for values.
            computing: of the same, seconds of computing.
        """
        if self._path is None:
            return
        with self._lock:
            self.step += steps
            self._count += steps
            self._note_last()
            self._data = _sum(self._data, data)
            if pulling is not None:
                self._pulling, self._computing = (
                    _sum(self._pulling, pulling),
                    _sum(self._computing, computing),
                )
        if time.monotonic() >= self._next:
            self.flush()

    def worked(self, work: Any, logs: Any = None, steps: int = 0) -> None:
        """Add the work and the logs of steps that are counted next.

        Args:
            logs: arrays by name, one number for each step; of a step alone also a number. Or a tuple that
                begins with them. They are read once the devices have them.
            steps: how many there are.
        """
        logs = logs[0] if isinstance(logs, tuple) and logs else logs
        if isinstance(logs, dict):
            self._returned = self.step, logs, steps
        with self._lock:
            new = work.new()
            self._work, self._done = work, tuple(map(sum, zip(self._done or (0, 0, 0.0), new, strict=True)))

    def note(self, event: str, **facts: object) -> None:
        """Note something that has happened, with facts that JSON can hold."""
        if self._path is None:
            return
        now = time.time()
        with self._lock:
            # Epochs of milliseconds: the newest of a second are enough.
            if sum(line["event"] == event for line in self._notes) >= _MOST_NOTES:
                i = max(i for i, line in enumerate(self._notes) if line["event"] == event)
                del self._notes[i]
            self._notes.append({"event": event, "from": now, "until": now, "step": self.step, **facts})
        if time.monotonic() >= self._next:
            self.flush()

    def is_new(self, text: str) -> bool:
        """Return whether no process of this task has printed a text before, in this launch."""
        if self._path is None:
            return True
        digest = hashlib.sha256(text.encode()).hexdigest()
        path, is_new = self._path.with_suffix(".printed"), True
        with self._surviving():
            if self._printed is None:
                # A launch that used the folder before has printed for other people.
                self._printed = path.read_text().split() if self._generation and path.is_file() else []
            is_new = digest not in self._printed
            if is_new:
                self._printed.append(digest)
                path.write_text("\n".join(self._printed) + "\n")
        return is_new

    def _note_last(self) -> None:
        if not self.notes_last:
            return
        with self._surviving() as path:
            if self._last is None:
                self._last = os.open(step_file(path), os.O_WRONLY | os.O_CREAT, 0o644)
            os.pwrite(self._last, b"%20d\n" % self.step, 0)

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[Path]:
        """Surround what writes; where that fails, training continues, and no more events are written."""
        path = self._path or Path(os.devnull)
        try:
            yield path
        except OSError as error:
            _LOG.warning("No events are written for `unisono timeline`: %s (%s).", error.strerror, path)
            self._path = None

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Note when a block runs, also where it raises."""
        began = time.time()
        try:
            yield
        finally:
            self.lasted(name, time.time() - began)

    def lasted(self, name: str, seconds: float) -> None:
        """Note something that ends now."""
        if self._path is None:
            return
        until = time.time()
        began = until - seconds
        with self._lock:
            i = next(
                (i for i, span in enumerate(self._spans) if span[0] == name and began - span[2] < _GAP), None
            )
            if i is None:
                self._spans.append((name, began, until))
            else:
                self._spans[i] = name, min(began, self._spans[i][1]), until

    def flush(self) -> None:
        """Write what there is."""
        with self._lock:
            if self._path is None:
                return
            now, self._next = time.time(), time.monotonic() + _PERIOD
            lines: list[dict[str, object]] = [
                {"event": name, "from": began, "until": until} for name, began, until in self._spans
            ]
            lines += [*self._notes, *self._ready_logs(now)]
            self._spans.clear()
            self._notes.clear()
            if self._count:
                lines.append(self._steps_until(now))
                self._count, self._from, self._done = 0, now, None
                self._data = self._pulling = self._computing = None
            text = "".join(json.dumps({**line, "generation": self._generation}) + "\n" for line in lines)
            with self._surviving() as path, path.open("a") as file:
                file.write(text)

    def _steps_until(self, now: float) -> dict[str, object]:
        seconds = max(now - self._from, 1e-9)
        spent = (self._data, self._pulling, self._computing)
        data, pulling, computing = (None if s is None else round(min(1.0, s / seconds), 4) for s in spent)
        exchange, compute = (self.exchange, self.compute) if pulling is None else (pulling, computing)
        return {
            "event": "steps",
            "from": self._from,
            "until": now,
            "step": self.step,
            "count": self._count,
            "data": data,
            "exchange": exchange,
            **({} if compute is None else {"compute": compute}),
            **({} if (host := host_bytes()) is None else {"host": host}),
            **self._work_done(),
        }

    def _ready_logs(self, now: float) -> Iterator[dict[str, object]]:
        """Give the logs of the newest steps of a second ago, if the devices have them: nothing waits."""
        if self._waiting is None:
            self._waiting, self._returned = self._returned, None
            return
        import numpy as np  # the launcher uses this module without it

        step, logs, steps = self._waiting
        try:
            if not all(x.is_ready() and x.is_fully_addressable for x in logs.values()):
                return
            numbers = {name: float(np.asarray(x).reshape(-1)[:steps][-1]) for name, x in logs.items()}
        except Exception:
            # Of other kinds than arrays, as a step of the user's own returns them; or the step has failed,
            # which is raised where its results are needed.
            numbers = {}
        self._waiting, self._returned = self._returned, None
        if numbers := {name: x for name, x in numbers.items() if math.isfinite(x)}:
            yield {"event": "logs", "from": now, "until": now, "step": step + steps, "logs": numbers}

    def _work_done(self) -> dict[str, object]:
        """Return the work since the last line: nothing where no step counts it, or a part is not known."""
        if self._done is None:
            return {}
        totals = (*self._done, self._work.peak, self._work.memory())
        facts = dict(zip(("rows", "tokens", "flops", "peak", "memory"), totals, strict=True))
        # NaN is no JSON.
        return {name: fact for name, fact in facts.items() if fact and math.isfinite(fact)}


def host_bytes() -> int | None:
    """Return the bytes of memory in which this process lies; None where the system does not say."""
    try:
        return int(_MEMORY.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def read_events(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Give the objects of lines of JSON; one that is none, or half written on a full disk, is passed over.

    >>> list(read_events(['{"event": "ste{"event": "save"}', '{"event": "save"}']))
    [{'event': 'save'}]
    """
    for line in lines:
        try:
            event = parse_json(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


def step_file(events: Path) -> Path:
    """Return the file with the number of the last step, beside that of the events."""
    return events.with_suffix(".step")


def _sum(total: float | None, more: float | None) -> float | None:
    return total if more is None else (total or 0.0) + more
