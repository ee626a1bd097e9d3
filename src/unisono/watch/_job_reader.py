"""Reads the log folder of a launch as it grows, and says what is known of the job.

Read are the launcher's `launch.json` and `history.jsonl`, and each task's file in `events/` and `progress/`.
`refresh` reads what is new, and nothing twice: a job of days with fifty tasks is followed as a short one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from unisono._system._json import parse_json
from unisono._system._signals import RESTART_WANTED
from unisono.cluster.liveness._task_events import read_events
from unisono.launcher._restart_policy import FailureReason
from unisono.launcher.terminal._fit_facts import count_in, is_time, pairs_in
from unisono.watch._curves import thinned
from unisono.watch._job import WatchedCurve, WatchedFault, WatchedJob, WatchedTask
from unisono.watch._log_folder import LogFolder, NewLines
from unisono.watch._task_record import TaskRecord, is_event

_TASK = re.compile("(chief|worker|ps|evaluator):[0-9]{1,6}")
_FAULTS = {"failed": "failure", "stalled": "stall"}
#: How a launch ends whose end was asked for: its tasks have saved, or people have ended it.
_ASKED = {RESTART_WANTED, 128 + 1, 128 + 2, 128 + 15}
#: Why a generation ends that has not failed.
_PREEMPTED = {
    FailureReason.STOPPED.value: "asked to end; the tasks save",
    FailureReason.WANTED.value: "a task asked for a restart; the others save",
    FailureReason.RESIZE.value: "another number of workers; the tasks save",
}
#: Bytes of `launch.json` at most; faults that are kept.
_LAUNCH_BYTES, _MOST_FAULTS = 1 << 20, 1000
#: Seconds after which a task that writes nothing any more counts as ended, where no launcher says it.
_SILENT = 60.0


def job_order(name: str) -> tuple[int, int]:
    """Return where a task stands among the others.

    >>> sorted(["ps:0", "worker:10", "worker:2", "chief:0"], key=job_order)
    ['chief:0', 'worker:2', 'worker:10', 'ps:0']
    """
    job, _, index = name.partition(":")
    return ["chief", "worker", "ps", "evaluator"].index(job), int(index)


@dataclasses.dataclass
class LaunchRecord:
    """The launcher's words on the launch as a whole.

    Args:
        facts: of `launch.json`.
        restarts: when all tasks, or one, started again after a failure, in seconds since the epoch.
    """

    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    started: float | None = None
    pid: int | None = None
    exit_code: int | None = None
    quit_at: float | None = None
    generation: int = 0
    restarts: int = 0
    failed_restarts: list[float] = dataclasses.field(default_factory=list)
    faults: list[WatchedFault] = dataclasses.field(default_factory=list)
    #: True if the running generation has failed.
    has_failed: bool = False

    def text(self, name: str) -> str:
        """Return a text of `launch.json`, an empty one where there is none."""
        value = self.facts.get(name)
        return value if isinstance(value, str) else ""


class JobReader:
    """Follows one log folder.

    Args:
        folder: in which a launch writes, or has written.
        clock: seconds since the epoch.
    """

    def __init__(self, folder: LogFolder, clock: Any = time.time) -> None:
        self._folder, self._clock = folder, clock
        self._launch = LaunchRecord()
        self._tasks: dict[str, TaskRecord] = {}
        self._history = NewLines(folder, "history.jsonl")
        self._events: dict[str, NewLines] = {}
        #: Bytes that were read in all, and whether the last call has left some.
        self.bytes_read, self.is_behind = 0, False

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self._folder.name

    @property
    def folder(self) -> LogFolder:
        """The folder that is followed."""
        return self._folder

    def refresh(self, most_bytes: int | None = None) -> WatchedJob:
        """Read what is new, and return the job as it is now.

        Args:
            most_bytes: of the tasks' files, more or less; the next call goes on there, so that a job of
                days is shown while its past is read. None reads all.
        """
        if not self._launch.facts:
            self._launch.facts = self._launch_facts()
        for record in _records(self._history.read()):
            self._take_history(record)
        names = self._names()
        share = None if most_bytes is None else most_bytes // max(1, len(names))
        for task in names:
            known = self._tasks.setdefault(task, TaskRecord(task))
            lines = self._events.setdefault(task, NewLines(self._folder, f"events/{_file(task)}.jsonl"))
            for event in filter(is_event, read_events(lines.read(share))):
                if event["until"] >= (self._launch.started or 0.0):
                    self._take_event(known, event)
        self.is_behind = any(each.has_more for each in self._events.values())
        self.bytes_read = self._history.bytes_read + sum(each.bytes_read for each in self._events.values())
        return self._job(self._clock())

    def _names(self) -> list[str]:
        """Return the tasks of the history, or where there is none all tasks that have written events."""
        tasks = set(self._tasks)
        if self._launch.started is None:
            names = (name.removesuffix(".jsonl").rpartition("-") for name in self._folder.names("events"))
            tasks |= {f"{job}:{index}" for job, _, index in names if _TASK.fullmatch(f"{job}:{index}")}
        return sorted(tasks, key=job_order)

    def _launch_facts(self) -> dict[str, Any]:
        with contextlib.suppress(ValueError):
            facts = parse_json(self._folder.read("launch.json", 0, _LAUNCH_BYTES))
            return facts if isinstance(facts, dict) else {}
        return {}

    # --- what the launcher wrote ----------------------------------------------------------------

    def _take_history(self, event: dict[str, Any]) -> None:
        launch, name, at = self._launch, event["event"], event["time"]
        if name == "launched":
            self._tasks, self._events = {}, {}
            self._launch = LaunchRecord(self._launch_facts(), started=at, pid=event["pid"])
            return
        launch.started = launch.started or at
        launch.generation = max(launch.generation, event["generation"])
        task = (
            None
            if event["task"] is None
            else self._tasks.setdefault(event["task"], TaskRecord(event["task"]))
        )
        if task is not None:
            self._take_task_history(task, event)
        if name in _FAULTS and task is not None:
            self._take_fault(task, event)
        elif name == "ending" and event["detail"] in _PREEMPTED:
            self._fault(at, None, "preemption", None, _PREEMPTED[event["detail"]])
        elif name in ("restart", "restart task"):
            launch.restarts += 1
            if launch.has_failed or task is not None:
                launch.failed_restarts.append(at)
            launch.has_failed = False
            failed = next((f for f in reversed(launch.faults) if f.kind in ("failure", "stall")), None)
            step = None if failed is None else failed.step
            self._fault(at, step, "restart", event["task"], f"starts again: {event['detail']}")
            for each in self._tasks.values() if task is None else [task]:
                each.state, each.state_since = "restarts", at
        elif name == "found" and task is not None:
            launch.has_failed = False
            self._fault(at, None, "recovery", task.name, f"{task.name} answers again")
        elif name == "quit":
            launch.exit_code, launch.quit_at = event["exit_code"], at

    def _take_task_history(self, task: TaskRecord, event: dict[str, Any]) -> None:
        name, at = event["event"], event["time"]
        if name == "started":
            task.pid, task.generation = event["pid"], event["generation"]
            task.state, task.state_since = "runs", at
            host = event.get("host")
            task.host = host if isinstance(host, str) else task.host
        elif name == "found":
            task.state = "runs"
        elif name == "unreachable":
            task.state = "no answer"
        elif name == "stopped":
            task.state, task.state_since = "stopped", at
        elif name == "failed":
            task.state = "failed"
        elif name == "ended" and task.state != "failed":
            code = event["exit_code"]
            task.state = "ended" if not code else f"ended ({code})"

    def _take_fault(self, task: TaskRecord, event: dict[str, Any]) -> None:
        launch, at = self._launch, event["time"]
        step = count_in(event, "step")
        # All tasks fail where one does: the first one is the cause, most of the time.
        if not launch.has_failed or event["event"] == "stalled":
            kind, reached = _FAULTS[event["event"]], count_in(event, "reached")
            self._fault(at, step, kind, task.name, event["detail"], reached)
        launch.has_failed = True

    def _fault(
        self, at: float, step: int | None, kind: str, task: str | None, text: str, reached: int | None = None
    ) -> None:
        self._launch.faults.append(WatchedFault(at, step, kind, task, text[:300], reached))
        del self._launch.faults[:-_MOST_FAULTS]

    # --- what the tasks wrote -------------------------------------------------------------------

    def _take_event(self, task: TaskRecord, event: dict[str, Any]) -> None:
        if event["event"] == "steps" and task.state == "stopped" and event["until"] > task.state_since:
            task.state = "runs"
        if self._launch.started is None:
            # Without a launcher's history: the events are all there is.
            task.state = "runs"
            task.generation = int(event["generation"])
            self._launch.generation = max(self._launch.generation, task.generation)
        if task.update(event):
            self._note_recovery(task, event)

    def _note_recovery(self, task: TaskRecord, event: dict[str, Any]) -> None:
        """Note the first step after a failure."""
        fault = self._open_fault(task.name, event)
        if fault is None:
            return
        base = task.row.base
        reached = fault.step if fault.reached is None else fault.reached
        if reached is None:
            reached = max((each.step_at(fault.time) or 0 for each in self._tasks.values()), default=0)
        lost = max(0, reached - base)
        seconds = max(0.0, event["until"] - fault.time)
        text = f"resumed at step {base}, lost {lost} steps, {seconds:.1f} s after the failure"
        faults = self._launch.faults
        position = next((i for i, each in enumerate(faults) if each.time > event["until"]), len(faults))
        faults.insert(position, WatchedFault(event["until"], base, "recovery", task.name, text))

    def _open_fault(self, task: str, event: dict[str, Any]) -> WatchedFault | None:
        """Return the failure that the first steps of a process follow, if no recovery has followed it yet."""
        open_fault = None
        for fault in self._launch.faults:
            if fault.kind == "recovery":
                open_fault = None
            elif fault.kind in ("failure", "stall") and fault.time <= event["until"]:
                # With parameter servers, a task alone starts again.
                of_all = event["generation"] > 0 or fault.task == task
                open_fault = (open_fault or fault) if of_all else open_fault
        return open_fault

    # --- the job --------------------------------------------------------------------------------

    def _job(self, now: float) -> WatchedJob:
        launch = self._launch
        now = now if launch.quit_at is None else max(launch.quit_at, self._last_sign())
        # Those of an elastic launch that later generations lack are gone.
        names = sorted(
            (n for n, r in self._tasks.items() if r.generation == launch.generation), key=job_order
        )
        tasks = [self._shown(self._tasks[name], now) for name in names]
        chief = self._chief(names)
        fit = None if chief is None else chief.fit
        step = max((task.step or 0 for task in tasks), default=0)
        state = self._state(tasks, now)
        backups = [b for record in self._tasks.values() if (b := record.last_backup(now)) is not None]
        return WatchedJob(
            title=launch.text("title") or self._folder.name.rstrip("/").rpartition("/")[2],
            command=launch.text("command"),
            started=launch.started or self._first_sign(),
            now=now,
            state=state,
            exit_code=launch.exit_code,
            generation=launch.generation,
            restarts=launch.restarts,
            restarts_left=self._restarts_left(now),
            config=self._config(chief),
            epoch=None if fit is None or chief is None or chief.row.step is None else fit.epoch_at(step),
            epochs=None if fit is None else fit.epochs,
            step=step,
            steps=None if fit is None else fit.steps,
            left_s=None if state != "runs" else self._left(chief, step),
            backup=max(backups, key=lambda b: b.step, default=None),
            tasks=tasks,
            curves=self._curves(chief),
            faults=[self._with_step(fault) for fault in launch.faults],
            timeline=[span for name in names for span in self._tasks[name].spans],
        )

    def _shown(self, record: TaskRecord, now: float) -> WatchedTask:
        beat = self._folder.changed_at(f"progress/g{record.generation}-{_file(record.name)}")
        task = record.shown(now, beat)
        host = task.host or self._launch.text("host")
        if task.has_ended or self._launch.started is not None:
            return dataclasses.replace(task, host=host)
        silent = task.heartbeat_s is not None and task.heartbeat_s > _SILENT
        return dataclasses.replace(task, host=host, state="ended" if silent else task.state)

    def _chief(self, names: Sequence[str]) -> TaskRecord | None:
        """Return the task whose numbers stand for all: the first that has a `fit`, else that makes steps."""
        records = [self._tasks[name] for name in names]
        with_fit = (record for record in records if record.fit.epochs is not None)
        with_steps = (record for record in records if record.row.step is not None)
        return next(with_fit, None) or next(with_steps, None)

    def _state(self, tasks: list[WatchedTask], now: float) -> str:
        launch = self._launch
        if launch.quit_at is not None:
            return "ended" if not launch.exit_code or launch.exit_code in _ASKED else "failed"
        if launch.started is None:
            have_ended = bool(tasks) and all(task.has_ended for task in tasks)
            return "ended" if have_ended else "runs" if tasks else "starts"
        if self._is_abandoned():
            return "failed"
        if any(task.state == "runs" for task in tasks) and not launch.has_failed:
            return "runs"
        return "restarts" if launch.generation or launch.has_failed or launch.restarts else "starts"

    def _is_abandoned(self) -> bool:
        """Return whether the launcher was killed, and has said nothing; False where that is unknown."""
        launch = self._launch
        if launch.pid is None or launch.text("host") != socket.gethostname():
            return False
        try:
            os.kill(launch.pid, 0)
        except ProcessLookupError:
            return True
        except OSError:
            return False
        return False

    def _restarts_left(self, now: float) -> int | None:
        most = count_in(self._launch.facts, "max_restarts")
        window: Any = self._launch.facts.get("restart_window_s")
        if most is None or not is_time(window):
            return None
        recent = [at for at in self._launch.failed_restarts if at >= now - window]
        return max(0, most - len(recent))

    def _config(self, chief: TaskRecord | None) -> list[tuple[str, str]]:
        config = pairs_in(self._launch.facts.get("config"))
        if chief is not None:
            config += chief.fit.config
            rows = chief.row.work.get("rows")
            if rows is not None and all(name != "global batch size" for name, _ in config):
                config.append(("global batch size", f"{rows:.0f}"))
        return config

    def _left(self, chief: TaskRecord | None, step: int) -> float | None:
        return None if chief is None else chief.fit.left(step, chief.row.rate)

    def _curves(self, chief: TaskRecord | None) -> list[WatchedCurve]:
        if chief is None:
            return []
        return [WatchedCurve(name, thinned(curve.points)) for name, curve in chief.curves.items()]

    def _with_step(self, fault: WatchedFault) -> WatchedFault:
        if fault.step is not None:
            return fault
        records = [self._tasks[fault.task]] if fault.task in self._tasks else self._tasks.values()
        steps = [step for record in records if (step := record.step_at(fault.time)) is not None]
        return dataclasses.replace(fault, step=max(steps, default=None))

    def _last_sign(self) -> float:
        return max((record.row.at for record in self._tasks.values()), default=0.0)

    def _first_sign(self) -> float:
        spans = (record.spans[0].begin for record in self._tasks.values() if record.spans)
        return min(spans, default=0.0)


def _file(task: str) -> str:
    return task.replace(":", "-")


def _records(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Give the records of the launcher's history; other lines are passed over."""
    for event in read_events(lines):
        task, at, generation = event.get("task"), event.get("time"), count_in(event, "generation")
        texts = isinstance(event.get("event"), str) and isinstance(event.get("detail"), str)
        named = task is None or (isinstance(task, str) and _TASK.fullmatch(task) is not None)
        numbers = all(event.get(n) is None or count_in(event, n) is not None for n in ("pid", "exit_code"))
        if texts and named and numbers and generation is not None and is_time(at):
            yield {"pid": None, "exit_code": None, **event, "task": task}
