"""The terminal of a launch with a table: the output, below it the tasks, and the chief's bar in one row.

The table says what each task does, and what a restart has cost. It is read from the events that the tasks
write (`cluster/liveness/_task_events`), in the launcher alone: nothing is asked of a task.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from unisono.cluster.liveness._task_events import read_events, step_file
from unisono.cluster_resolver._spec import Task
from unisono.launcher._plan import RunPaths
from unisono.launcher._run_files import Tail
from unisono.launcher._stall_detector import read_step
from unisono.launcher.terminal._console import Console, TaskOutput, can_rewrite, terminal_size
from unisono.launcher.terminal._fit_facts import FitFacts, duration, numbers_in
from unisono.launcher.terminal._lines import fit_row, width_of
from unisono.launcher.terminal._printable import as_message, one_line, plain
from unisono.launcher.terminal._task_row import TaskRow

#: Lines that are kept, so that a failure is not shown twice.
_KEPT_LINES = 200
#: Rows of tasks at most; the others are counted below.
_MOST_ROWS = 12


@dataclasses.dataclass(frozen=True)
class Observation:
    """The launcher's view of a generation.

    Args:
        states: of each task, a word: `"runs"`, `"stopped"`, `"failed"`, ….
        failed_at: when its first failure happened, in seconds since the epoch; None without one.
    """

    generation: int
    states: Mapping[Task, str]
    failed_at: float | None = None


#: The heads of the columns, in their order. Optional columns are there where a task knows what they show.
_HEADS = (
    *("task", "state", "step", "steps/s", "rows/s", "tokens/s", "FLOP/s", "MFU %", "GB"),
    *("data %", "exchange %", "heartbeat", "gen."),
)
_OPTIONAL = {"rows/s", "tokens/s", "FLOP/s", "MFU %", "GB", "exchange %"}
#: Columns that a narrow terminal has no room for, the first one first.
_LEAST = ("gen.", "FLOP/s", "exchange %", "GB", "MFU %", "data %", "heartbeat", "tokens/s", "rows/s")
#: Spaces behind a column.
_BETWEEN = 2
#: Events about a `fit`; the numbers of its logs that come first; and how names end that `StepTimer` adds.
_OF_FIT = ("fit", "epoch", "logs")
_FIRST_LOGS = ("loss", "val_loss")
_TIMES = ("_ms", "_per_s", "mfu", "memory_gb")


def columns_for(rows: Sequence[Mapping[str, str]], width: int) -> list[str]:
    """Return the heads of the columns that a terminal has room for.

    >>> row = {"task": "worker:0", "state": "runs", "step": "12", "rows/s": "6.15k"}
    >>> columns_for([row], 80)
    ['task', 'state', 'step', 'steps/s', 'rows/s', 'data %', 'heartbeat', 'gen.']
    >>> columns_for([row], 40)
    ['task', 'state', 'step', 'steps/s', 'rows/s']
    """
    heads = [head for head in _HEADS if head not in _OPTIONAL or any(head in row for row in rows)]
    if "tokens/s" in heads:
        # They say the same.
        heads.remove("rows/s")
    widths = {head: max([len(head), *(len(row.get(head, "-")) for row in rows)]) for head in heads}
    for least in _LEAST:
        if sum(widths[head] + _BETWEEN for head in heads) - _BETWEEN <= width:
            break
        heads = [head for head in heads if head != least]
    return heads


class LiveTable:
    """The tasks of a launch, over all generations."""

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._began = time.time()
        self._rows: dict[Task, TaskRow] = {}
        self._tails: dict[Task, Tail] = {}
        self._pending: dict[Task, str] = {}
        #: When a generation failed, until the next one has made a step; which one, and its last step.
        self._failed_at: float | None = None
        self._failed_in = self._reached = 0
        self._generation = 0
        #: The words of the chief on its `fit`, and the last numbers of its logs.
        self._fit = FitFacts()
        self._logs: dict[str, float] = {}

    def observe(self, seen: Observation) -> list[str]:
        """Take over what the launcher knows and the tasks have written; return messages for people."""
        messages, rows, self._generation = [], self._rows, seen.generation
        chief = min(seen.states, key=lambda t: (t.type != "chief", t.type != "worker", t.index), default=None)
        self._rows = {task: rows.get(task) or TaskRow(task, generation=-1) for task in seen.states}
        for task, row in self._rows.items():
            for event in self._new_events(task):
                if event["event"] != "steps":
                    self._note_fit(event, is_chief=task == chief)
                    continue
                # The first step of all tasks of a generation that follows another one.
                if row.update(event) and self._failed_at is not None and row.generation > self._failed_in:
                    lost, seconds = max(0, self._reached - row.base), row.at - self._failed_at
                    messages.append(
                        f"unisono: resumed at step {row.base}, lost {lost} steps, {seconds:.1f} s after the "
                        "failure"
                    )
                    self._failed_at = None
            row.state, row.is_current = seen.states[task], row.generation == seen.generation
        if seen.failed_at is not None:
            self._failed_at, self._failed_in = seen.failed_at, seen.generation
            last = (read_step(step_file(self._paths.events(task))) for task in seen.states)
            self._reached = max(self.steps, *last)
        return messages

    def _new_events(self, task: Task) -> list[dict[str, Any]]:
        if task not in self._tails:
            self._tails[task] = Tail(self._paths.events(task), 0)
        tail = self._tails[task]
        *lines, self._pending[task] = (self._pending.get(task, "") + tail.read()).split("\n")
        events = (e for e in read_events(lines) if e.get("event") in ("steps", *_OF_FIT))
        return [event for event in events if event["until"] >= self._began]

    def _note_fit(self, event: dict[str, Any], is_chief: bool) -> None:
        if not is_chief:
            return
        if event["event"] == "fit":
            self._fit.begin(event)
        elif event["event"] == "epoch":
            self._fit.end_epoch(event)
        self._logs |= numbers_in(event.get("logs"))

    def summary(self, columns: int) -> str:
        """Return how far the training is, and its numbers, in one row; empty where nothing is known."""
        step, rates = self.steps, [row.rate for row in self._rows.values() if row.is_current and row.rate]
        parts = []
        if step and (epoch := self._fit.epoch_at(step)) is not None:
            parts.append(f"epoch {epoch} of {self._fit.epochs}")
        if rates and (left := self._fit.left(step, rates[0])) is not None:
            parts.append(f"{duration(left)} left")
        names = sorted(self._logs, key=lambda name: (name not in _FIRST_LOGS, name))
        parts += [f"{one_line(name)} {self._logs[name]:.4g}" for name in names if not name.endswith(_TIMES)]
        while len(text := ", ".join(parts)) > columns:
            parts.pop()
        return text

    @property
    def steps(self) -> int:
        """The last step of the task that is furthest."""
        return max((row.step or 0 for row in self._rows.values()), default=0)

    def closing(self) -> str:
        """Return the last line of a launch."""
        tasks, restarts = _count(len(self._rows), "task"), _count(self._generation, "restart")
        seconds = f"{time.time() - self._began:.0f} s"
        return f"unisono: {tasks}, {seconds}, {self.steps} steps, {restarts}; logs: {self._paths.root}"

    def render(self, columns: int, rows: int) -> list[str]:
        """Return the lines of the table, none wider than the terminal."""
        from rich.console import Console as RichConsole
        from rich.table import Table

        most, now = max(1, min(_MOST_ROWS, rows // 2 - 2)), time.time()
        shown = list(self._rows.values())[:most]
        cells = [{**row.cells(now), "gen.": str(self._generation)} for row in shown]
        table = Table(box=None, padding=(0, _BETWEEN, 0, 0), header_style="bold", pad_edge=False)
        heads = columns_for(cells, columns)
        for i, head in enumerate(heads):
            table.add_column(head, no_wrap=True, justify="left" if i < 2 else "right", overflow="crop")
        for row in cells:
            table.add_row(*(row.get(head, "-") for head in heads))
        file = io.StringIO()
        console = RichConsole(file=file, width=columns, force_terminal=True, color_system="standard")
        console.print(table)
        lines = [line.rstrip() for line in file.getvalue().split("\n")[:-1]]
        left = len(self._rows) - most
        lines += [f"… and {left} more"] if left > 0 else []
        summary = self.summary(columns)
        return [*lines, summary] if summary else lines

    def close(self) -> None:
        """Close the files."""
        for tail in self._tails.values():
            tail.close()


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


class ReportingConsole(Console):
    """Shows what a `Console` shows; says what restarts have cost, and at the end what was done.

    Args:
        table: of the tasks, which is not shown here.
    """

    #: In a file, the traceback stands at the end.
    _closes_first = True

    def __init__(
        self, messages: TextIO | None, output: TextIO | None, table: LiveTable, rewrites: bool | None = None
    ) -> None:
        super().__init__(messages, output, rewrites)
        self._table: LiveTable | None = table
        self._said: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)

    def show(self, seen: Observation) -> None:
        """Take over the tasks as they are now, and say what a restart has cost."""
        if self._table is not None:
            for message in self._table.observe(seen):
                self.say(message)

    def say(self, text: str) -> None:
        """Show a message of the launcher."""
        self._said.append(text)
        super().say(text)

    def end(self, report: Sequence[tuple[str, str]]) -> None:
        """Remove the table, and say how the launch ended, but for what is there already."""
        table, self._table = self._table, None
        closing = [] if table is None else [table.closing()]
        if table is not None:
            table.close()
        texts = [text for text, mark in report if not any(said.startswith(mark) for said in self._said)]
        for text in [*closing, *texts] if self._closes_first else [*texts, *closing]:
            self.say(text)


class LiveConsole(ReportingConsole):
    """Shows what a `Console` shows, and below it the tasks and the chief's incomplete line.

    These rows are erased before anything else is written, and written again behind it.
    """

    _closes_first = False

    def __init__(self, messages: TextIO | None, output: TextIO, table: LiveTable) -> None:
        super().__init__(messages, output, table, rewrites=True)
        #: The rows of the table, for the size of the terminal that they were made for.
        self._made: tuple[os.terminal_size, list[str]] | None = None
        self._bars: list[str] = []
        #: The rows that are on the terminal below the output now.
        self._painted: list[str] = []

    def show(self, seen: Observation) -> None:
        """Show the tasks as they are now."""
        if self._table is not None:
            super().show(seen)
            self._made = None
            self._paint()

    def flush(self) -> bool:
        """Show the next part of each task's new output; return whether there was any."""
        has_text = super().flush()
        if not self._followed:
            self._bars = []
        self._paint()
        return has_text

    def say(self, text: str) -> None:
        """Show a message of the launcher above the table."""
        self.flush()
        self._said.append(text)
        if self._messages is not None:
            self._erase()
            self._write(self._messages, as_message(text) + "\n")
        self._paint()

    def _put(self, task: TaskOutput, lines: list[str]) -> None:
        if not lines:
            return
        self._erase()
        self._said.extend(task.prefix + plain(line) for line in lines)
        room = terminal_size(self._output).columns - width_of(task.prefix)
        super()._put(task, [fit_row(line, room) if "━" in line else line for line in lines])

    def _draw(self, prefix: str, pending: list[str]) -> None:
        self._bars = [prefix + line for line in pending]

    def _paint(self) -> None:
        rows = self._rows_now()
        if rows != self._painted:
            self._erase()
            self._write(self._output, "\n".join(rows))
            self._painted = rows

    def _rows_now(self) -> list[str]:
        size = terminal_size(self._output)
        if self._table is not None and (self._made is None or self._made[0] != size):
            self._made = size, self._table.render(size.columns - 1, size.lines)
        table = [] if self._table is None or self._made is None else self._made[1]
        # With the table, which takes a half, fewer rows than there are: the cursor goes up to the first one.
        bars = self._bars[-max(1, size.lines // 3) :]
        return [*table, *(fit_row(bar, size.columns - 1) for bar in bars)]

    def _erase(self) -> None:
        """Put the cursor where the rows below the output begin, and remove them."""
        if not self._painted:
            return
        # A terminal that has become narrower has wrapped them.
        columns = terminal_size(self._output).columns
        height = sum(max(1, -(-width_of(plain(row)) // columns)) for row in self._painted)
        self._write(self._output, "\r" + (f"\x1b[{height - 1}A" if height > 1 else "") + "\x1b[J")
        self._painted = []


def live_console(messages: TextIO | None, output: TextIO | None, table: LiveTable) -> LiveConsole | None:
    """Return a console with a table of tasks where the output is a terminal; None elsewhere."""
    if output is None or not can_rewrite(output) or not output.isatty():
        return None
    return LiveConsole(messages, output, table)
