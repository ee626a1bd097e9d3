"""The times of a launch's tasks, for the command `unisono timeline` and as a trace for Perfetto.

Read from the log folder alone, while the launch runs or later: the launcher's `history.jsonl` and the events
that each task writes (`cluster/liveness/_task_events`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono._checks import is_number, whole_number
from unisono._errors import InvalidArgumentError
from unisono.cluster.liveness._task_events import read_events
from unisono.cluster_resolver._spec import Task
from unisono.launcher._restart_policy import Failure, root_cause
from unisono.launcher.terminal._task_row import short_number, work_in

#: The row of what the launcher did.
LAUNCHER = "launcher"
_FAULTS = ("failed", "stalled")
_TASK = re.compile("[a-z_]{1,40}:[0-9]{1,9}")
#: Of numbers in files; seconds since the epoch are fewer.
_LARGEST = 1e15
#: Kinds of spans, in the order in which a picture draws them, and their colours.
KINDS = {
    "process": "#e4e4e7",
    "start": "#a1a1aa",
    "steps": "#3b82f6",
    "compile": "#a855f7",
    "save": "#22c55e",
    "restore": "#14b8a6",
    "detection": "#b91c1c",
    "recovery": "#f97316",
}


@dataclasses.dataclass(frozen=True)
class Span:
    """Something that took time.

    Args:
        began: seconds since the launch.
        shares: of `steps`: of the time for data, and of that for exchange; None where it is not known.
    """

    row: str
    name: str
    began: float
    ended: float
    generation: int
    text: str = ""
    shares: tuple[float | None, float | None] = (None, None)

    @property
    def duration(self) -> float:
        """How long it took, in seconds."""
        return max(0.0, self.ended - self.began)


@dataclasses.dataclass(frozen=True)
class Outage:
    """A failure that another generation followed; times in seconds since the launch.

    Args:
        task: whose failure caused the others'.
        noticed: when the launcher began to end the others.
        first_step: when the next generation had begun its first step; None where it made none.
    """

    generation: int
    task: str
    text: str
    fault: float
    noticed: float
    first_step: float | None


@dataclasses.dataclass(frozen=True)
class Timeline:
    """The events of a launch.

    Args:
        began: in seconds since the epoch.
        seconds: until the last thing that is known.
    """

    began: float
    seconds: float
    rows: Sequence[str]
    spans: Sequence[Span]
    outages: Sequence[Outage]


def read(folder: Path) -> Timeline:
    """Read the log folder of a launch: the last one, where several have used it."""
    path = folder / "history.jsonl"
    if not path.is_file():
        raise InvalidArgumentError(
            f"A log folder must hold the history.jsonl of a launch. Received: {str(folder)!r}. Write "
            "`unisono launch --log-dir logs …`, then `unisono timeline logs`."
        )
    history = list(filter(is_record, read_events(_lines(path))))
    first = max((i for i, e in enumerate(history) if e["event"] == "launched"), default=0)
    history = history[first:]
    if not history:
        raise InvalidArgumentError(f"A launch must have begun. Received: {path}, which is empty.")
    began = history[0]["time"]
    tasks = tasks_in(history)
    events = {task: _events_of(folder, task, began) for task in tasks}
    known = [e["time"] for e in history] + [e["until"] for own in events.values() for e in own]
    seconds = max(known) - began
    spans: list[Span] = []
    for task, own in events.items():
        spans += process_spans(task, history, [e["from"] for e in own], seconds)
        spans += [span_of(task, event, began) for event in own]
    outages = outages_in(history, first_steps(event for own in events.values() for event in own))
    spans += launcher_spans(outages, seconds)
    return Timeline(began, seconds, [LAUNCHER, *tasks], spans, outages)


def tasks_in(history: Sequence[dict[str, Any]]) -> list[str]:
    """Return the tasks that a launch has started, in the order in which they started."""
    return list(dict.fromkeys(e["task"] for e in history if e["event"] == "started"))


def launcher_spans(outages: Sequence[Outage], seconds: float) -> Iterator[Span]:
    """Give what failures have cost, until the last thing that is known."""
    for each in outages:
        until = seconds if each.first_step is None else each.first_step
        text = f"{each.task} {each.text}"
        yield Span(LAUNCHER, "detection", each.fault, each.noticed, each.generation, text)
        yield Span(LAUNCHER, "recovery", each.noticed, until, each.generation, text)


def is_record(event: dict[str, Any]) -> bool:
    """Return whether the launcher wrote a line of its history; others are passed over."""
    names = ("task", "time", "event", "generation", "pid", "exit_code", "detail")
    if not event.keys() >= {*names}:
        return False
    task, time, name, generation, pid, code, detail = (event[each] for each in names)
    # A task's name is part of a file's.
    is_task = isinstance(task, str) and _TASK.fullmatch(task) is not None
    fits = is_task or (task is None and name not in ("started", "ended", *_FAULTS))
    numbers = all(number is None or _is_number(number) for number in (pid, code))
    texts = isinstance(name, str) and isinstance(detail, str)
    return fits and numbers and texts and _is_number(time) and whole_number(generation, 0) is not None


def is_event(event: dict[str, Any]) -> bool:
    """Return whether a task wrote a line of its events; others are passed over."""
    name, wanted = event.get("event"), ["from", "until", "generation"]
    wanted += ["step", "count"] if name == "steps" else []
    shares = [event.get(share) for share in ("data", "exchange")]
    fits = all(_is_number(event.get(field)) for field in wanted)
    return (
        fits and isinstance(name, str) and name in KINDS and all(s is None or _is_number(s) for s in shares)
    )


def _is_number(value: object) -> bool:
    return is_number(value) and abs(value) < _LARGEST


def _lines(path: Path) -> list[str]:
    """Return the lines of a file; the last one may be half written."""
    return path.read_text(errors="replace").split("\n")[:-1] if path.is_file() else []


def _events_of(folder: Path, task: str, began: float) -> list[dict[str, Any]]:
    path = folder / "events" / f"{task.replace(':', '-')}.jsonl"
    return [event for event in filter(is_event, read_events(_lines(path))) if event["from"] >= began]


def process_spans(
    task: str, history: Sequence[dict[str, Any]], begins: Sequence[float], seconds: float
) -> Iterator[Span]:
    """Give the processes of a task, and of each its start.

    Args:
        begins: of the task's events, in seconds since the epoch.
        seconds: of the launch, until the last thing that is known.
    """
    began = history[0]["time"]
    own = [e for e in history if e["task"] == task]
    starts = [e for e in own if e["event"] == "started"]
    for start, following in zip(starts, [*starts[1:], None], strict=True):
        until = seconds if following is None else following["time"] - began
        ends = [e for e in own if e["event"] == "ended" and e["pid"] == start["pid"]]
        ended = ends[-1]["time"] - began if ends else until
        code = f", exit code {ends[-1]['exit_code']}" if ends else ""
        text, at = f"process {start['pid']}, {start['detail']}{code}", start["time"] - began
        yield Span(task, "process", at, ended, start["generation"], text)
        first = next((begin for begin in begins if begin - began >= at), None)
        if first is not None and first - began <= ended:
            yield Span(task, "start", at, first - began, start["generation"])


def span_of(task: str, event: dict[str, Any], began: float) -> Span:
    """Return the span of a task's event."""
    text, shares = "", (None, None)
    if event["event"] == "steps":
        speed = event["count"] / max(event["until"] - event["from"], 1e-9)
        text = ", ".join([f"to step {event['step']}, {speed:.3g} steps/s", *_work_of(event, speed)])
        shares = event.get("data"), event.get("exchange")
    at, until = event["from"] - began, event["until"] - began
    return Span(task, event["event"], at, until, event["generation"], text, shares)


def _work_of(event: dict[str, Any], speed: float) -> Iterator[str]:
    """Give the work of an event's steps, of what is known."""
    work = work_in(event)
    for name in ("rows", "tokens"):
        if name in work:
            yield f"{short_number(speed * work[name])} {name}/s"
    if "flops" in work:
        flops = speed * work["flops"]
        share = f" ({100 * flops / work['peak']:.0f} % of the peak)" if "peak" in work else ""
        yield f"{short_number(flops)} FLOP/s{share}"
    if "memory" in work:
        yield f"{work['memory'] / 1e9:.1f} GB"


def first_steps(events: Iterable[dict[str, Any]]) -> dict[float, float]:
    """Return when each generation had begun its first step, in seconds since the epoch."""
    first: dict[float, float] = {}
    for event in events:
        if event["event"] == "steps":
            generation = event["generation"]
            first[generation] = min(event["until"], first.get(generation, event["until"]))
    return first


def outages_in(history: Sequence[dict[str, Any]], first: Mapping[float, float]) -> list[Outage]:
    """Return the failure that caused the others, of each generation; a lost peer may be noticed before it.

    Args:
        first: see `first_steps`.
    """
    return list(_outages(history, first))


def _outages(history: Sequence[dict[str, Any]], first: Mapping[float, float]) -> Iterator[Outage]:
    began = history[0]["time"]
    for generation in dict.fromkeys(e["generation"] for e in history):
        own = [e for e in history if e["generation"] == generation]
        faults = {_failure(e): e for e in own if e["event"] in _FAULTS}
        if not faults:
            continue
        fault = faults[root_cause(faults)]
        # The end of the process comes before the launcher counts it as a failure; and the cause before all
        # that followed from it.
        pids = {e["pid"] for e in faults.values()}
        ends = [e["time"] for e in own if e["event"] == "ended" and e["pid"] in pids]
        at = min([e["time"] for e in faults.values()] + ends)
        noticed = next((e["time"] for e in own if e["event"] in ("ending", "restart task")), fault["time"])
        later = [at for other, at in first.items() if other > generation]
        resumed = min(later) - began if later else None
        yield Outage(generation, fault["task"], fault["detail"], at - began, noticed - began, resumed)


def _failure(event: dict[str, Any]) -> Failure:
    job, _, index = event["task"].partition(":")
    return Failure(Task(job, int(index)), event["time"], event["exit_code"] or 0, event["detail"])


def trace_of(timeline: Timeline) -> dict[str, Any]:
    """Return a trace in Chrome's format, which Perfetto opens: a process for each row."""
    trace: list[dict[str, Any]] = []
    for i, row in enumerate(timeline.rows):
        trace.append({"ph": "M", "name": "process_name", "pid": i, "tid": 0, "args": {"name": row}})
    for span in timeline.spans:
        pid = timeline.rows.index(span.row)
        args = {"generation": span.generation, "text": span.text}
        # Spans of one thread must lie within each other: saving and stepping overlap.
        at = {"pid": pid, "tid": [*KINDS].index(span.name), "ts": round(span.began * 1e6)}
        trace.append({"ph": "X", "name": span.name, **at, "dur": round(span.duration * 1e6), "args": args})
        for name, share in zip(("data %", "exchange %"), span.shares, strict=True):
            if share is not None:
                trace.append({"ph": "C", "name": name, **at, "args": {"share": 100 * share}})
    for each in timeline.outages:
        mark = {"pid": 0, "tid": 0, "ts": round(each.fault * 1e6), "s": "g"}
        trace.append({"ph": "i", "name": f"{each.task} {each.text}", **mark})
    return {"traceEvents": trace, "displayTimeUnit": "ms"}
