"""The terminal output of a launch: its own messages and the chief's output."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from unisono.cluster_resolver._spec import Task
from unisono.launcher._lines import Lines, plain, truncate, width_of
from unisono.launcher._run_files import Tail

#: Seconds between two reads of the chief's log: 20 a second are as smooth as a progress bar's own updates.
_POLL = 0.05
#: The width of a terminal that does not report one, such as a notebook's cell.
_COLUMNS = 80
#: Seconds after which an incomplete line is shown where lines cannot be rewritten: a prompt or a step that
#: takes minutes must not stay invisible, and a progress bar must not fill a CI log.
_PARTIAL_LINE_AFTER = 30.0


class Display(Protocol):
    """What a supervisor needs of a console."""

    def follow(self, task: Task, tail: Tail) -> None:
        """Show the output of this task from now on."""

    def flush(self) -> bool:
        """Show the task's new output."""

    def finish(self) -> None:
        """Show the rest of the output of a task that has ended."""

    def say(self, text: str) -> None:
        """Show a message of the launcher."""


class Console:
    """Writes to the terminal, or to a notebook's cell.

    A line that the chief rewrites, such as a progress bar, is rewritten in one row of the terminal. A file or
    a pipe receives only its final state, without colours.

    Args:
        messages: the stream for the launcher's messages; None drops them.
        output: the stream for the chief's output; None where standard output is closed.
        rewrites: whether `output` can rewrite a line; None detects it.
    """

    def __init__(self, messages: TextIO | None, output: TextIO | None, rewrites: bool | None = None) -> None:
        self._messages, self._output = messages, output
        self._rewrites = _can_rewrite(output) if rewrites is None else rewrites
        self._tail: Tail | None = None
        self._prefix = ""
        self._lines = Lines()
        #: The incomplete line that is on the terminal now, and its columns.
        self._drawn, self._width = "", 0
        self._shown_at = time.monotonic()

    def follow(self, task: Task, tail: Tail) -> None:
        """Show the output of this task from now on."""
        self.finish()
        self._tail, self._prefix = tail, f"[{task}] "

    def flush(self) -> bool:
        """Show the next part of the task's new output, at most one chunk; return whether there was any."""
        if self._tail is None:
            return False
        text = self._tail.read()
        lines = self._lines.feed(text)
        if not self._rewrites and time.monotonic() - self._shown_at > _PARTIAL_LINE_AFTER:
            lines += self._lines.end()
        self._put(lines)
        if self._rewrites:
            self._draw(self._lines.pending)
        return bool(text)

    def finish(self) -> None:
        """Show the rest of the output of a task that has ended."""
        # Bounded by today's size of the log: a daemon that outlives the task may append to it for ever.
        parts = 0 if self._tail is None else self._tail.parts_left()
        while parts > 0 and self.flush():
            parts -= 1
        self._put(self._lines.end())
        self._release()

    def _release(self) -> None:
        if self._tail is not None:
            self._tail.close()
            self._tail = None

    def say(self, text: str) -> None:
        """Show a message of the launcher, on a line of its own."""
        self.flush()
        self._put(self._lines.end())
        if self._messages is not None:
            self._write(self._messages, text + "\n")

    def _put(self, lines: list[str]) -> None:
        """Write complete lines of the task; the first overwrites its part that is already drawn."""
        if not lines:
            return
        self._shown_at = time.monotonic()
        texts = [self._prefix + (line if self._rewrites else plain(line)) for line in lines]
        text = "\n".join(texts) + "\n"
        if self._width:
            text = "\r" + texts[0] + self._rest(texts[0]) + text[len(texts[0]) :]
        self._drawn, self._width = "", 0
        self._write(self._output, text)

    def _draw(self, pending: str) -> None:
        """Show the incomplete line, cut to one row: a carriage return does not reach the row above."""
        row = truncate(self._prefix + pending, _columns(self._output) - 1) if pending else ""
        if row == self._drawn:
            return
        text = ("\r" if self._width else "") + row + self._rest(row)
        self._drawn, self._width = row, width_of(plain(row))
        self._write(self._output, text)

    def _rest(self, row: str) -> str:
        """Return the spaces that erase the end of a longer row."""
        return " " * (self._width - width_of(plain(row)))

    def _write(self, stream: TextIO | None, text: str) -> None:
        if stream is None:
            return
        try:
            stream.write(_writable(text, stream))
            stream.flush()
        except (OSError, ValueError):
            # The reader (such as `head`) or the terminal is gone. The tasks continue, and write their logs.
            self._messages, self._output = None, None
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
        self._tail: Tail | None = None
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="screen", daemon=True)
        self._thread.start()

    def follow(self, task: Task, tail: Tail) -> None:
        """Show the output of this task from now on."""
        self._tail = tail
        self._calls.put(lambda: self._screen.follow(task, tail))

    def flush(self) -> bool:
        """Do nothing: the thread flushes by itself."""
        return False

    def finish(self) -> None:
        """Show the rest of the task's output, after everything requested before."""
        # Now, not when a held terminal accepts output again: the next start of the task appends to this log.
        if self._tail is not None:
            self._tail.stop()
        self._calls.put(self._screen.finish)

    def say(self, text: str) -> None:
        """Show a message of the launcher, after everything requested before."""
        self._calls.put(lambda: self._screen.say(text))

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


def _can_rewrite(output: TextIO | None) -> bool:
    if output is None:
        return False
    return "ipykernel" in sys.modules or (output.isatty() and os.environ.get("TERM") != "dumb")


def _columns(output: TextIO | None) -> int:
    try:
        columns = os.get_terminal_size(output.fileno()).columns if output is not None else 0
    except (OSError, ValueError):  # a notebook's cell
        columns = 0
    return columns or _COLUMNS
