"""What a launch shows: its own lines, and what the chief prints."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol, TextIO

from unisono.cli._lines import Lines, cut, plain, width_of
from unisono.cli._run_files import Tail
from unisono.cluster_resolver._spec import Task

#: Seconds between two looks at what the chief has printed.
_LOOK = 0.05
#: Columns of a terminal that does not say how many it has.
_COLUMNS = 80
#: Seconds after which a line that is not complete is shown where lines cannot be rewritten.
_PATIENCE = 30.0


class Shows(Protocol):
    """What a supervisor needs to show what happens."""

    def follow(self, task: Task, tail: Tail) -> None:
        """Show what this task prints from now on."""

    def flush(self) -> bool:
        """Show what the task has printed since."""

    def finish(self) -> None:
        """Show all that the task has printed: it has ended."""

    def say(self, text: str) -> None:
        """Show a line of the launcher's."""


class Screen:
    """Writes to the terminal, or to a notebook's cell.

    A line that the chief rewrites, such as a progress bar, is rewritten on a terminal, within one row.
    A file or a pipe gets its last state alone, without colours.

    Args:
        messages: for the launcher's own lines; None for silence.
        output: for the chief's; None where standard output is closed.
        rewrites: whether `output` can show a line again; None asks it.
    """

    def __init__(self, messages: TextIO | None, output: TextIO | None, rewrites: bool | None = None) -> None:
        self._messages, self._output = messages, output
        self._rewrites = _can_rewrite(output) if rewrites is None else rewrites
        self._tail: Tail | None = None
        self._prefix = ""
        self._lines = Lines()
        #: The part of a line that is on the terminal now, and its columns.
        self._drawn, self._width = "", 0
        self._shown_at = time.monotonic()

    def follow(self, task: Task, tail: Tail) -> None:
        """Show what this task prints from now on."""
        self.finish()
        self._tail, self._prefix = tail, f"[{task}] "

    def flush(self) -> bool:
        """Show what the task has printed since, or the next part of much; return whether there was any."""
        if self._tail is None:
            return False
        text = self._tail.read()
        lines = self._lines.feed(text)
        if not self._rewrites and time.monotonic() - self._shown_at > _PATIENCE:
            lines += self._lines.end()
        self._put(lines)
        if self._rewrites:
            self._draw(self._lines.pending)
        return bool(text)

    def finish(self) -> None:
        """Show all that the task has printed: it has ended."""
        # A process that has escaped may print on.
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
        """Show a line of the launcher's, on a line of its own."""
        self.flush()
        self._put(self._lines.end())
        if self._messages is not None:
            self._write(self._messages, text + "\n")

    def _put(self, lines: list[str]) -> None:
        """Write whole lines of the task, over what is drawn of the first."""
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
        """Show the line that is not complete, in one row: a terminal cannot rewrite two."""
        row = cut(self._prefix + pending, _columns(self._output) - 1) if pending else ""
        if row == self._drawn:
            return
        text = ("\r" if self._width else "") + row + self._rest(row)
        self._drawn, self._width = row, width_of(plain(row))
        self._write(self._output, text)

    def _rest(self, row: str) -> str:
        """Return what erases the end of a longer row."""
        return " " * (self._width - width_of(plain(row)))

    def _write(self, stream: TextIO | None, text: str) -> None:
        if stream is None:
            return
        try:
            stream.write(_writable(text, stream))
            stream.flush()
        except (OSError, ValueError):
            # The reader has ended, as `head` does, or the terminal; tasks go on, and write their logs.
            self._messages, self._output = None, None
            self._release()
            if stream is sys.stdout:
                sys.stdout = None  # or Python complains at the end


class BackgroundScreen:
    """A screen with a thread: a terminal that is held (Ctrl-S, `| less`) does not hold the launcher.

    Args:
        screen: which only the thread uses from now on.
    """

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="screen", daemon=True)
        self._thread.start()

    def follow(self, task: Task, tail: Tail) -> None:
        """Show what this task prints from now on."""
        self._calls.put(lambda: self._screen.follow(task, tail))

    def flush(self) -> bool:
        """Do nothing: the thread looks by itself."""
        return False

    def finish(self) -> None:
        """Show all that the task has printed, after what was asked for before."""
        self._calls.put(self._screen.finish)

    def say(self, text: str) -> None:
        """Show a line of the launcher's, after what was asked for before."""
        self._calls.put(lambda: self._screen.say(text))

    def close(self) -> None:
        """Wait until all is shown."""
        self._calls.put(None)
        self._thread.join()

    def _work(self) -> None:
        pause = 0.0
        while True:
            try:
                call = self._calls.get(timeout=pause)
            except queue.Empty:
                pause = 0.0 if self._screen.flush() else _LOOK
                continue
            if call is None:
                return
            call()


def _writable(text: str, stream: TextIO) -> str:
    """Return a text with question marks for what the stream's encoding does not have."""
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
