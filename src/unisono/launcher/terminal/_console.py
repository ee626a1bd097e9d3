"""The terminal output of a launch: its own messages, and the output of the chief or of several tasks."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import TextIO

from unisono.cluster_resolver._spec import Task
from unisono.launcher._run_files import Tail
from unisono.launcher.terminal._lines import Lines, truncate, width_of
from unisono.launcher.terminal._printable import as_message, plain

#: Seconds between two reads of the chief's log: 20 a second are as smooth as a progress bar's own updates.
_POLL = 0.05
#: The columns and rows of a terminal that does not report any, such as a notebook's cell.
_COLUMNS, _ROWS = 80, 24
#: Seconds after which an incomplete line is shown where lines cannot be rewritten: a prompt or a step that
#: takes minutes must not stay invisible, and a progress bar must not fill a CI log.
_PARTIAL_LINE_AFTER = 30.0


class TaskOutput:
    """The output of a task, and its part that is no complete line yet."""

    def __init__(self, task: Task, tail: Tail) -> None:
        self.prefix, self.tail = f"[{task}] ", tail
        self.lines = Lines()
        self.shown_at = time.monotonic()


class Console:
    """Writes to the terminal, or to a notebook's cell.

    A line that the chief rewrites, such as a progress bar, is rewritten in one row of the terminal. A file or
    a pipe receives only its final state, without colours. Of further tasks complete lines are shown.

    Args:
        messages: the stream for the launcher's messages; None drops them.
        output: the stream for the chief's output; None where standard output is closed.
        rewrites: whether `output` can rewrite a line; None detects it.
    """

    def __init__(self, messages: TextIO | None, output: TextIO | None, rewrites: bool | None = None) -> None:
        self._messages, self._output = messages, output
        self._rewrites = can_rewrite(output) if rewrites is None else rewrites
        #: The tasks that are shown; the row that is rewritten is the first one's.
        self._followed: list[TaskOutput] = []
        #: The incomplete rows that are on the terminal now.
        self._drawn: list[str] = []

    def follow(self, task: Task, tail: Tail) -> None:
        """Show the output of this task, too, from now on."""
        self._followed.append(TaskOutput(task, tail))

    def flush(self) -> bool:
        """Show the next part of each task's new output, at most one chunk; return whether there was any."""
        has_text = False
        for each in list(self._followed):
            text = each.tail.read()
            has_text = has_text or bool(text)
            lines = each.lines.feed(text)
            if not self._rewrites and time.monotonic() - each.shown_at > _PARTIAL_LINE_AFTER:
                lines += each.lines.end()
            self._put(each, lines)
        if self._rewrites and self._followed:
            self._draw(self._followed[0].prefix, self._followed[0].lines.pending)
        return has_text

    def finish(self) -> None:
        """Show the rest of the output of the tasks, which have ended."""
        # Bounded by today's size of the logs: a daemon that outlives a task may append to its log for ever.
        parts = max((each.tail.parts_left() for each in self._followed), default=0)
        while parts > 0 and self.flush():
            parts -= 1
        for each in list(self._followed):
            self._put(each, each.lines.end())
        self._release()

    def _release(self) -> None:
        for each in self._followed:
            each.tail.close()
        self._followed = []

    def say(self, text: str) -> None:
        """Show a message of the launcher, on a line of its own."""
        self.flush()
        for each in self._followed[:1]:
            self._put(each, each.lines.end())
        if self._messages is not None:
            self._write(self._messages, as_message(text) + "\n")

    def _put(self, task: TaskOutput, lines: list[str]) -> None:
        """Write complete lines of a task; the first overwrites the row that is drawn."""
        if not lines:
            return
        task.shown_at = time.monotonic()
        texts = [task.prefix + (line if self._rewrites else plain(line)) for line in lines]
        text = "\n".join(texts) + "\n"
        text = self._home() + texts[0] + self._rest(texts[0]) + text[len(texts[0]) :]
        self._drawn = []
        self._write(self._output, text)

    def _draw(self, prefix: str, pending: list[str]) -> None:
        """Show the incomplete lines, each cut to one row: a carriage return does not reach the row above."""
        size = terminal_size(self._output)
        # A notebook's cell does not go up.
        most = size.lines - 1 if self._output is not None and self._output.isatty() else 1
        rows = [truncate(prefix + line, size.columns - 1) for line in pending[-most:]]
        if rows == self._drawn:
            return
        first = rows[0] if rows else ""
        text = self._home() + "\n".join([first + self._rest(first), *rows[1:]])
        self._drawn = rows
        self._write(self._output, text)

    def _home(self) -> str:
        """Return the moves to the first row that is drawn; of several rows all are erased."""
        above = len(self._drawn) - 1
        return ("\r" if self._drawn else "") + (f"\x1b[{above}A\x1b[J" if above > 0 else "")

    def _rest(self, row: str) -> str:
        """Return the spaces that erase the end of a longer row, where one is drawn."""
        drawn = self._drawn[0] if len(self._drawn) == 1 else ""
        return " " * (width_of(plain(drawn)) - width_of(plain(row)))

    def _write(self, stream: TextIO | None, text: str) -> None:
        if stream is None:
            return
        try:
            stream.write(_writable(text, stream))
            stream.flush()
        except (OSError, ValueError):
            # The reader (such as `head`) or the terminal is gone. The tasks continue, and write their logs;
            # the other stream still shows why they fail.
            if stream is self._messages:
                self._messages = None
            if stream is self._output:
                self._output = None
                self._release()
            if stream is sys.stdout:
                sys.stdout = None  # otherwise Python's final flush prints a BrokenPipeError


class BackgroundConsole:
    """A console with a thread of its own: a paused terminal (Ctrl-S, `| less`) does not block the launcher.

    Args:
        screen: the console; from now on only the thread uses it.
    """

    def __init__(self, screen: Console) -> None:
        self._screen = screen
        self._tails: list[Tail] = []
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="screen", daemon=True)
        self._thread.start()

    def follow(self, task: Task, tail: Tail) -> None:
        """Show the output of this task, too, from now on."""
        self._tails.append(tail)
        self.call(lambda: self._screen.follow(task, tail))

    def flush(self) -> bool:
        """Do nothing: the thread flushes by itself."""
        return False

    def finish(self) -> None:
        """Show the rest of the tasks' output, after everything requested before."""
        # Now, not when a held terminal accepts output again: the next start of a task appends to its log.
        for tail in self._tails:
            tail.stop()
        self._tails = []
        self.call(self._screen.finish)

    def say(self, text: str) -> None:
        """Show a message of the launcher, after everything requested before."""
        self.call(lambda: self._screen.say(text))

    def call(self, call: Callable[[], object]) -> None:
        """Call a function where the console is used, after everything requested before."""
        self._calls.put(call)

    def close(self) -> None:
        """Wait until everything is shown."""
        self._calls.put(None)
        self._thread.join()

    def _work(self) -> None:
        pause = 0.0
        while True:
            try:
                call = self._calls.get(timeout=pause)
            except queue.Empty:
                pause = 0.0 if self._screen.flush() else _POLL
                continue
            if call is None:
                return
            call()


def _writable(text: str, stream: TextIO) -> str:
    """Return a text with question marks for characters that the stream's encoding lacks."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def can_rewrite(output: TextIO | None) -> bool:
    """Return whether a stream can rewrite a line."""
    if output is None:
        return False
    return "ipykernel" in sys.modules or (output.isatty() and os.environ.get("TERM") != "dumb")


def terminal_size(output: TextIO | None) -> os.terminal_size:
    """Return how wide and how high a terminal is."""
    columns = rows = 0
    if output is not None:
        with contextlib.suppress(OSError, ValueError):  # a notebook's cell
            columns, rows = os.get_terminal_size(output.fileno())
    return os.terminal_size((columns or _COLUMNS, rows or _ROWS))
