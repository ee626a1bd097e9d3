"""The terminal of a launch with a table: the output, below it the tasks, and the chief's bar in one row."""

from __future__ import annotations

import collections
import os
from collections.abc import Sequence
from typing import TextIO

from unisono.launcher._plan import RunPaths
from unisono.launcher.terminal._console import Console, TaskOutput, can_rewrite, columns_of
from unisono.launcher.terminal._lines import fit_row, plain, width_of
from unisono.launcher.terminal._live_table import LiveTable, Observation

#: Lines that are kept, so that a failure is not shown twice.
_KEPT_LINES = 200
#: The rows of a terminal that does not report any.
_ROWS = 24


class LiveConsole(Console):
    """Shows what a `Console` shows, and below it the tasks and the chief's incomplete line.

    These rows are erased before anything else is written, and written again behind it.
    """

    def __init__(self, messages: TextIO | None, output: TextIO, table: LiveTable) -> None:
        super().__init__(messages, output, rewrites=True)
        self._table: LiveTable | None = table
        #: The rows of the table, for the size of the terminal that they were made for.
        self._made: tuple[os.terminal_size, list[str]] | None = None
        self._bar = ""
        #: The rows that are on the terminal below the output now.
        self._painted: list[str] = []
        self._said: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)

    def show(self, seen: Observation) -> None:
        """Show the tasks as they are now."""
        if self._table is None:
            return
        for message in self._table.observe(seen):
            self.say(message)
        self._made = None
        self._paint()

    def flush(self) -> bool:
        """Show the next part of each task's new output; return whether there was any."""
        found = super().flush()
        if not self._followed:
            self._bar = ""
        self._paint()
        return found

    def say(self, text: str) -> None:
        """Show a message of the launcher above the table."""
        self.flush()
        self._said.append(text)
        if self._messages is not None:
            self._erase()
            self._write(self._messages, text + "\n")
        self._paint()

    def end(self, report: Sequence[tuple[str, str]]) -> None:
        """Remove the table, and say how the launch ended, but for what is there already.

        Args:
            report: texts, and of each what shows that it is there.
        """
        table, self._table = self._table, None
        for text, mark in report:
            if not any(mark in said for said in self._said):
                self.say(text)
        if table is not None:
            self.say(table.closing())
            table.close()

    def _put(self, task: TaskOutput, lines: list[str]) -> None:
        if not lines:
            return
        self._erase()
        self._said.extend(map(plain, lines))
        room = columns_of(self._output) - width_of(task.prefix)
        super()._put(task, [fit_row(line, room) if "━" in line else line for line in lines])

    def _draw(self, prefix: str, pending: str) -> None:
        self._bar = prefix + pending if pending else ""

    def _paint(self) -> None:
        rows = self._rows_now()
        if rows != self._painted:
            self._erase()
            self._write(self._output, "\n".join(rows))
            self._painted = rows

    def _rows_now(self) -> list[str]:
        size = _size_of(self._output)
        if self._table is not None and (self._made is None or self._made[0] != size):
            self._made = size, self._table.render(size.columns - 1, size.lines)
        table = [] if self._table is None or self._made is None else self._made[1]
        return [*table, *([fit_row(self._bar, size.columns - 1)] if self._bar else [])]

    def _erase(self) -> None:
        """Put the cursor where the rows below the output begin, and remove them."""
        if not self._painted:
            return
        # A terminal that has become narrower has wrapped them.
        columns = columns_of(self._output)
        height = sum(max(1, -(-width_of(plain(row)) // columns)) for row in self._painted)
        self._write(self._output, "\r" + (f"\x1b[{height - 1}A" if height > 1 else "") + "\x1b[J")
        self._painted = []


def live_console(messages: TextIO | None, output: TextIO | None, paths: RunPaths) -> LiveConsole | None:
    """Return a console with a table of tasks where the output is a terminal; None elsewhere."""
    if output is None or not can_rewrite(output) or not output.isatty():
        return None
    return LiveConsole(messages, output, LiveTable(paths))


def _size_of(output: TextIO | None) -> os.terminal_size:
    try:
        rows = os.get_terminal_size(output.fileno()).lines if output is not None else 0
    except (OSError, ValueError):
        rows = 0
    return os.terminal_size((columns_of(output), rows or _ROWS))
