"""A job as rows of a terminal, for any width and height; pure, but for Rich, which draws.

From the top: what runs and how far it is, a row for each task, small curves, and the last faults.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from unisono.launcher.terminal._fit_facts import duration
from unisono.launcher.terminal._printable import one_line
from unisono.launcher.terminal._task_row import short_number
from unisono.watch._job import WatchedJob, WatchedTask
from unisono.watch._plot import braille

_STYLES = {
    "runs": "green", "serves": "green", "starts": "yellow", "compiles": "yellow", "restarts": "yellow",
    "no answer": "magenta", "stopped": "magenta",
}  # fmt: skip
_KINDS = {"failure": "red", "stall": "red", "restart": "yellow", "preemption": "yellow", "recovery": "green"}
#: Curves that people want first, and how they are called.
_CURVES = {"loss": "loss", "val_loss": "val_loss", "rows_per_s": "rows/s", "tokens_per_s": "tokens/s"}
#: The columns of names, values and ranges before a curve; rows of a curve, and of a fault.
_LEGEND, _CURVE_ROWS, _MOST_FAULTS = 24, 2, 4
_MOST_CURVES = 8
#: Rows of tasks that have room before curves and faults get any.
_LEAST_TASKS = 4
#: Spaces behind a column.
_BETWEEN = 2


@dataclasses.dataclass(frozen=True)
class TaskColumn:
    """A column of the table of tasks.

    Args:
        head: above it.
        text: returns its text for a task, an empty one where nothing is known.
        rank: a narrow terminal leaves out the column with the largest first; 0 always has room.
    """

    head: str
    text: Callable[[WatchedTask], str]
    rank: int = 0


def _number(value: float | None, scale: float = 1.0, form: str = ".3g") -> str:
    return "" if value is None else f"{scale * value:{form}}"


def _short(value: float | None) -> str:
    return "" if value is None else short_number(value)


def _epoch(task: WatchedTask) -> str:
    return "" if task.epoch is None else f"{task.epoch}/{task.epochs}"


_COLUMNS = (
    TaskColumn("task", lambda t: t.name),
    TaskColumn("host", lambda t: t.host, 8),
    TaskColumn("state", lambda t: t.state),
    TaskColumn("epoch", _epoch, 8),
    TaskColumn("step", lambda t: "" if t.step is None else str(t.step)),
    TaskColumn("steps/s", lambda t: _number(t.steps_per_s)),
    TaskColumn("rows/s", lambda t: _short(t.rows_per_s), 1),
    TaskColumn("tokens/s", lambda t: _short(t.tokens_per_s), 1),
    TaskColumn("data%", lambda t: _number(t.data, 100, ".0f"), 3),
    TaskColumn("comp%", lambda t: _number(t.compute, 100, ".0f"), 7),
    TaskColumn("exch%", lambda t: _number(t.exchange, 100, ".0f"), 5),
    TaskColumn("FLOP/s", lambda t: _short(t.flops_per_s), 6),
    TaskColumn("MFU%", lambda t: _number(t.mfu, 100, ".0f"), 4),
    TaskColumn("RAM", lambda t: _short(t.host_bytes), 3),
    TaskColumn("HBM", lambda t: _short(t.device_bytes), 4),
    TaskColumn("beat", lambda t: "" if t.heartbeat_s is None else f"{duration(t.heartbeat_s)} ago", 2),
    TaskColumn("gen.", lambda t: str(t.generation), 9),
)


def columns_that_fit(tasks: Sequence[WatchedTask], width: int) -> list[TaskColumn]:
    """Return the columns that know something, and have room.

    >>> tasks = [WatchedTask("worker:0", host="a", step=12, rows_per_s=100.0)]
    >>> [column.head for column in columns_that_fit(tasks, 40)]
    ['task', 'state', 'step', 'rows/s', 'gen.']
    """
    one_host = len({task.host for task in tasks}) < 2
    texts = {column.head: [column.text(task) for task in tasks] for column in _COLUMNS}
    columns = [c for c in _COLUMNS if any(texts[c.head]) and not (c.head == "host" and one_host)]
    if any(column.head == "tokens/s" for column in columns):
        # They say the same.
        columns = [column for column in columns if column.head != "rows/s"]
    widths = {c.head: max([len(c.head), *map(len, texts[c.head])]) + _BETWEEN for c in columns}
    while sum(widths[c.head] for c in columns) - _BETWEEN > width:
        worst = max(columns, key=lambda c: c.rank)
        if not worst.rank:
            break
        columns.remove(worst)
    return columns


def _style(state: str) -> str:
    return _STYLES.get(state, "red" if state.startswith("failed") else "dim")


def _joined(parts: Sequence[tuple[str, str]], width: int) -> list[Text]:
    """Return texts one behind the other, in rows of a width."""
    rows: list[Text] = []
    for text, style in parts:
        piece = Text(one_line(text), style=style)
        if rows and rows[-1].cell_len + 3 + piece.cell_len <= width:
            rows[-1].append(" · ", style="dim").append_text(piece)
        else:
            rows.append(piece)
    for row in rows:
        row.no_wrap, row.overflow = True, "ellipsis"
    return rows


def head_of(job: WatchedJob, width: int) -> list[RenderableType]:
    """Return the rows that say what runs, and how far it is."""
    job_style = {"runs": "bold green", "failed": "bold red", "ended": "bold"}.get(job.state, "bold yellow")
    code = "" if not job.exit_code else f" (exit code {job.exit_code})"
    parts = [(job.title, "bold"), (job.state + code, job_style)]
    if job.epoch is not None:
        parts.append((f"epoch {job.epoch} of {job.epochs}", ""))
    if job.step or job.steps:
        parts.append((f"step {job.step}" + (f" of {job.steps}" if job.steps else ""), ""))
    if job.left_s is not None:
        parts.append((f"{duration(job.left_s)} left", "bold"))
    if job.started:
        took = duration(max(0.0, job.now - job.started))
        # The newest log folder may be of last week.
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(job.now))
        parts.append((f"took {took} until {until}" if job.is_over else f"since {took}", "dim"))
    if job.generation or job.restarts:
        parts.append((f"restarts: {job.restarts}", "yellow"))
    if job.restarts_left is not None and not job.is_over:
        parts.append((f"restarts left: {job.restarts_left}", "" if job.restarts_left else "dim"))
    if job.backup is not None:
        age = "" if job.is_over else f", {duration(job.backup.age_s)} ago"
        parts.append((f"backup of step {job.backup.step}{age}", ""))
    rows: list[RenderableType] = list(_joined(parts, width))
    if job.steps:
        rows.append(bar_of(job.step / job.steps, width))
    return rows


def bar_of(share: float, width: int) -> Text:
    """Return a bar that also shows without colours how far something is.

    >>> bar_of(0.25, 13).plain
    '━━┄┄┄┄┄  25 %'
    """
    share = max(0.0, min(1.0, share))
    number = f" {100 * share:3.0f} %"
    done = round(share * max(1, width - len(number)))
    bar = Text("━" * done, style="green", no_wrap=True, overflow="crop")
    return bar.append("┄" * max(0, width - len(number) - done), style="dim").append(number)


def _in_order(tasks: Sequence[WatchedTask], room: int) -> list[WatchedTask]:
    """Return the tasks as they are; where not all have room, those in trouble first."""
    if len(tasks) <= room:
        return list(tasks)
    return sorted(tasks, key=lambda t: t.state in ("runs", "serves", "ended"))


def table_of(tasks: Sequence[WatchedTask], every: Sequence[WatchedTask], width: int) -> Table:
    """Return the table of some tasks; the columns suit every task, and stay where the table is scrolled."""
    table = Table(box=None, padding=(0, _BETWEEN, 0, 0), header_style="bold", pad_edge=False)
    columns = columns_that_fit(every, width)
    for column in columns:
        is_text = column.head in ("task", "host", "state")
        table.add_column(column.head, no_wrap=True, justify="left" if is_text else "right", overflow="crop")
    for task in tasks:
        cells = [Text(one_line(column.text(task)) or "-") for column in columns]
        for column, cell in zip(columns, cells, strict=True):
            if column.head == "state":
                cell.stylize(_style(task.state))
        table.add_row(*cells)
    return table


def counts_of(tasks: Sequence[WatchedTask]) -> str:
    """Return how many tasks are in which state.

    >>> counts_of([WatchedTask("a", state="runs"), WatchedTask("b", state="runs"), WatchedTask("c")])
    '3 tasks: 2 runs, 1 starts'
    """
    states: dict[str, int] = {}
    for task in tasks:
        states[task.state] = states.get(task.state, 0) + 1
    return f"{len(tasks)} tasks: " + ", ".join(f"{count} {state}" for state, count in states.items())


def curve_names(job: WatchedJob) -> list[str]:
    """Return the names of the curves that people want: the losses, the speed, and then the metrics.

    >>> from unisono.watch._job import WatchedCurve
    >>> curve_names(WatchedJob(curves=[WatchedCurve("step_ms", []), WatchedCurve("mae", [])]))
    ['loss', 'val_loss', 'rows_per_s', 'tokens_per_s', 'mae']
    """
    # `StepTimer` adds numbers that stand in the table.
    others = [c.name for c in job.curves if c.name not in (*_CURVES, "host_bytes", "mfu", "memory_gb")]
    metrics = [name for name in others if not name.endswith(("_ms", "_per_s"))]
    return [*_CURVES, *metrics][:_MOST_CURVES]


def curves_of(job: WatchedJob, width: int, rows: int) -> list[Text]:
    """Return small curves in some rows."""
    lines: list[Text] = []
    for name in curve_names(job):
        title = _CURVES.get(name, name)
        points = job.curve(name)
        if len(points) < 2 or len(lines) + _CURVE_ROWS > rows:
            continue
        values = [value for _, value in points]
        graph = braille(points, max(1, width - _LEGEND), _CURVE_ROWS)
        last = f"{one_line(title)[:12]:12} {_value(values[-1]):>9}"
        ends = f"{_value(min(values))} to {_value(max(values))}"
        for legend, style, row in ((last, "bold", graph[0]), (ends, "dim", graph[1])):
            text = Text(legend[: _LEGEND - 1].ljust(_LEGEND), style=style, no_wrap=True, overflow="crop")
            lines.append(text.append(row, style="cyan"))
    return lines


def _value(value: float) -> str:
    return short_number(value) if abs(value) >= 1000 else f"{value:.4g}"


def faults_of(job: WatchedJob, rows: int) -> list[Text]:
    """Return the last faults, the newest below."""
    lines = []
    for fault in job.faults[len(job.faults) - min(rows, len(job.faults)) :]:
        at = time.strftime("%H:%M:%S", time.localtime(fault.time))
        who = f"{fault.task or 'all tasks'}{'' if fault.step is None else f' (step {fault.step})'}: "
        text = Text(f"{at}  ", no_wrap=True, overflow="ellipsis")
        text.append(f"{fault.kind:9} ", style=_KINDS.get(fault.kind, ""))
        # The text of a recovery has its step, which is the same for all tasks.
        who = "" if fault.kind == "recovery" else who
        lines.append(text.append(one_line(who + fault.text)))
    return lines


@dataclasses.dataclass(frozen=True)
class ScreenLayout:
    """How the rows of a screen are divided.

    Args:
        tasks: rows of tasks; `curves` and `faults` are rows, too.
    """

    tasks: int
    curves: int
    faults: int

    @classmethod
    def of(cls, job: WatchedJob, head: int, height: int | None) -> ScreenLayout:
        """Divide a height; None has room for all."""
        curves = _CURVE_ROWS * sum(len(job.curve(name)) > 1 for name in curve_names(job))
        faults = min(_MOST_FAULTS, len(job.faults))
        if height is None:
            return cls(len(job.tasks), curves, len(job.faults))
        # The head of the table, its foot, and the screen's last row.
        room = max(1, height - head - 3)
        tasks = min(len(job.tasks), max(_LEAST_TASKS, room - curves - faults), room)
        faults = max(0, min(faults, room - tasks))
        return cls(tasks, max(0, room - tasks - faults), faults)


def screen_of(
    job: WatchedJob, width: int, height: int | None = None, scroll: int = 0, foot: str = ""
) -> RenderableType:
    """Return the rows of a terminal.

    Args:
        height: in rows; None for no limit.
        scroll: how many tasks are above the first that is shown.
        foot: the last row.
    """
    head = head_of(job, width)
    layout = ScreenLayout.of(job, len(head), height)
    tasks = _in_order(job.tasks, layout.tasks)
    first = max(0, min(scroll, len(tasks) - layout.tasks))
    shown = tasks[first : first + layout.tasks]
    rows: list[RenderableType] = [*head, table_of(shown, job.tasks, width)]
    if len(shown) < len(tasks):
        where = f"rows {first + 1} to {first + len(shown)}; {counts_of(tasks)}"
        rows.append(Text(where, style="dim", no_wrap=True, overflow="ellipsis"))
    rows += curves_of(job, width, layout.curves)
    rows += faults_of(job, layout.faults)
    if foot:
        rows.append(Text(one_line(foot), style="dim", no_wrap=True, overflow="ellipsis"))
    return Group(*rows)
