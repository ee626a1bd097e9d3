"""The timeline of a page: the launch's history and its tasks' events, read as they grow, in bounded memory.

What is shorter than the picture can show is joined: a job of days has as many bars as a short one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from unisono.cli._timeline import (
    LAUNCHER,
    Outage,
    Span,
    is_event,
    is_record,
    launcher_spans,
    outages_in,
    process_spans,
    span_of,
    tasks_in,
)
from unisono.cluster.liveness._task_events import read_events
from unisono.watch._job import WatchedSpan
from unisono.watch._log_folder import LogFolder, NewLines

#: Bars of a kind that all tasks have together, about; that each one has at least, and at most.
_BARS, _LEAST, _MOST = 4000, 80, 800
#: Of the steps of two bars, what is added up when they are joined.
_SUMS = ("count", "rows", "tokens", "flops")

#: The kinds of bars that a job's own spans name differently.
_KINDS = {"train": "steps"}

#: A bar as the page gets it: begin and end in seconds since the launch, generation, text, and the shares of
#: data and exchange.
Bar = list[object]
#: The bars of a row, by kind: each list grows at its end alone, so that changes are short.
Row = dict[str, list[Bar]]


class PageTimeline:
    """Follows the events in one log folder."""

    def __init__(self, folder: LogFolder) -> None:
        self._folder = folder
        self._history_lines = NewLines(folder, "history.jsonl")
        self._begin([])

    def _begin(self, history: list[dict[str, Any]]) -> None:
        self._history = history
        self._lines: dict[str, NewLines] = {}
        self._tasks: dict[str, TaskBars] = {}
        self._first_steps: dict[float, float] = {}
        self._until = 0.0
        self.outages: list[Outage] = []

    @property
    def is_behind(self) -> bool:
        """True if the last call of `read` has left something."""
        return any(lines.has_more for lines in self._lines.values())

    def read(self, most_bytes: int | None = None) -> dict[str, Row]:
        """Read what is new; return the bars of each row, the launcher's row first.

        Args:
            most_bytes: of all events, more or less; the next call goes on there. None reads all.
        """
        for record in filter(is_record, read_events(self._history_lines.read())):
            if record["event"] == "launched":
                self._begin([])
            self._history.append(record)
            self._until = max(self._until, record["time"])
        if not self._history:
            return {}
        began, tasks = self._history[0]["time"], tasks_in(self._history)
        share = None if most_bytes is None else most_bytes // max(1, len(tasks))
        for task in tasks:
            self._read_events(task, began, min(_MOST, max(_LEAST, _BARS // len(tasks))), share)
        seconds = self._until - began
        self.outages = outages_in(self._history, self._first_steps)
        rows = {LAUNCHER: _by_kind(launcher_spans(self.outages, seconds))}
        for task in tasks:
            bars = self._tasks[task]
            rows[task] = _by_kind(process_spans(task, self._history, bars.begins, seconds)) | bars.by_kind()
        return rows

    def _read_events(self, task: str, began: float, most: int, most_bytes: int | None) -> None:
        name = f"events/{task.replace(':', '-')}.jsonl"
        lines = self._lines.setdefault(task, NewLines(self._folder, name))
        bars = self._tasks.setdefault(task, TaskBars(task, began))
        for event in filter(is_event, read_events(lines.read(most_bytes))):
            if event["from"] >= began:
                bars.add(event, most)
                self._until = max(self._until, event["until"])
                if event["event"] == "steps":
                    at = self._first_steps.setdefault(event["generation"], event["until"])
                    self._first_steps[event["generation"]] = min(at, event["until"])


class TaskBars:
    """The bars of a task's events, by kind.

    Args:
        began: when the launch began, in seconds since the epoch.
    """

    def __init__(self, task: str, began: float) -> None:
        self._task, self._began = task, began
        self._events: dict[str, list[dict[str, Any]]] = {}
        self._bars: dict[str, list[Bar]] = {}
        #: Events of a kind that take no longer together are joined; in seconds.
        self._widths: dict[str, float] = {}
        #: When the first event of each process began, in seconds since the epoch.
        self.begins: list[float] = []
        self._generations: set[float] = set()

    def by_kind(self) -> Row:
        """Return the bars."""
        for kind, events in self._events.items():
            bars = self._bars[kind]
            bars += [bar_of(span_of(self._task, event, self._began)) for event in events[len(bars) :]]
        return {kind: list(bars) for kind, bars in self._bars.items()}

    def add(self, event: dict[str, Any], most: int) -> None:
        """Add an event.

        Args:
            most: bars of its kind.
        """
        if event["generation"] not in self._generations:
            self._generations.add(event["generation"])
            self.begins.append(event["from"])
        kind = event["event"]
        events, bars = self._events.setdefault(kind, []), self._bars.setdefault(kind, [])
        if events and _fits(events[-1], event, self._widths.get(kind, 0.0)):
            events[-1] = joined(events[-1], event)
            del bars[len(events) - 1 :]  # made anew when the bars are asked for
            return
        events.append(event)
        while len(events) > most:
            # Wide enough for half as many, were they equally long.
            width = self._widths[kind] = max(
                2 * self._widths.get(kind, 0.0), 2 * (events[-1]["until"] - events[0]["from"]) / most
            )
            events[:] = _all_joined(events, width)
            if len(events) > most:  # generations, which are not joined
                del events[0]
            bars.clear()


def _fits(event: dict[str, Any], following: dict[str, Any], width: float) -> bool:
    is_same = event["generation"] == following["generation"]
    return is_same and bool(following["until"] - event["from"] <= width)


def _all_joined(events: Iterable[dict[str, Any]], width: float) -> list[dict[str, Any]]:
    wide: list[dict[str, Any]] = []
    for event in events:
        if wide and _fits(wide[-1], event, width):
            wide[-1] = joined(wide[-1], event)
        else:
            wide.append(event)
    return wide


def joined(event: dict[str, Any], following: dict[str, Any]) -> dict[str, Any]:
    """Return two events of a kind as one.

    >>> a = {"event": "steps", "from": 0.0, "until": 1.0, "step": 5, "count": 5, "data": 0.1, "generation": 0}
    >>> b = a | {"from": 1.0, "until": 2.0, "step": 15, "count": 10, "data": 0.3}
    >>> both = joined(a, b)
    >>> both["until"], both["step"], both["count"], round(both["data"], 2)
    (2.0, 15, 15, 0.2)
    """
    both = {**following, "from": event["from"], "until": max(event["until"], following["until"])}
    if event["event"] != "steps":
        return both
    for name in _SUMS:
        if name in both:
            both[name] = _number(event, name) + _number(following, name)
    spans = [(max(0.0, each["until"] - each["from"]), each) for each in (event, following)]
    total = sum(seconds for seconds, _ in spans) or 1.0
    for name in ("data", "exchange"):
        shares = [(seconds, each.get(name)) for seconds, each in spans]
        known = [seconds * share for seconds, share in shares if share is not None]
        both[name] = sum(known) / total if len(known) == len(shares) else None
    return both


def _number(event: dict[str, Any], name: str) -> float:
    value = event.get(name, 0)
    return value if isinstance(value, (int, float)) else 0


def rows_of(spans: Iterable[WatchedSpan], began: float) -> dict[str, Row]:
    """Return the bars of a job's own spans, of which no more is known.

    Args:
        began: in seconds since the epoch.
    """
    rows: dict[str, Row] = {}
    for span in spans:
        kind = _KINDS.get(span.name, span.name)
        bar = bar_of(Span(span.task, kind, span.begin - began, span.end - began, span.generation))
        rows.setdefault(span.task, {}).setdefault(kind, []).append(bar)
    return rows


def _by_kind(spans: Iterable[Span]) -> Row:
    row: Row = {}
    for span in spans:
        row.setdefault(span.name, []).append(bar_of(span))
    return row


def bar_of(span: Span) -> Bar:
    """Return a span as the page gets it."""
    times = (round(span.began, 3), round(max(span.began, span.ended), 3))
    shares = (None if share is None else round(min(1.0, max(0.0, share)), 3) for share in span.shares)
    return [*times, span.generation, span.text, *shares]


def costs_of(outages: Sequence[Outage]) -> Iterator[tuple[str, float, str]]:
    """Give of each failure whose it was, when, in seconds since the launch, and what it has cost."""
    for each in outages:
        text = f"noticed after {each.noticed - each.fault:.2f} s"
        if each.first_step is not None:
            text += f", next step after {each.first_step - each.fault:.2f} s"
        yield each.task, each.fault, text
