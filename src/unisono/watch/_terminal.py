"""`unisono watch` in a terminal: the whole screen, until `q`; elsewhere it is printed once.

Tests: tests/unit/watch/test_terminal.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import time
from collections.abc import Iterator
from typing import Protocol, TextIO

from rich.console import Console, ConsoleDimensions, RenderableType
from rich.live import Live

from unisono._system._environ import process_environ
from unisono.launcher.terminal._console import can_rewrite, terminal_size
from unisono.watch._job import WatchedJob
from unisono.watch._screen import screen_of

#: Seconds between two looks at the files.
_PERIOD = 0.5
#: Bytes that one look reads, so that keys are answered while a long past is read: half a second's work.
_MOST_BYTES = 4 << 20
#: Tasks that a page key moves by.
_PAGE = 10
#: Keys, as terminals send them, and by how many tasks they scroll.
_MOVES = {
    b"\x1b[A": -1, b"\x1bOA": -1, b"k": -1, b"\x1b[B": 1, b"\x1bOB": 1, b"j": 1,
    b"\x1b[5~": -_PAGE, b"\x1b[6~": _PAGE, b" ": _PAGE, b"\x1b[H": -1_000_000, b"\x1b[F": 1_000_000,
}  # fmt: skip
_KEY = re.compile(rb"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
_QUITS = (b"q", b"Q", b"\x03", b"\x04")
#: Columns where nothing says how many there are.
_COLUMNS = 100


class JobSource(Protocol):
    """Where a job is read from."""

    @property
    def name(self) -> str:
        """Its name for people."""

    def refresh(self, most_bytes: int | None = None) -> WatchedJob:
        """Read what is new, and return the job as it is now."""


def can_fill(output: TextIO) -> bool:
    """Return whether an output is a terminal with a screen of its own."""
    return output.isatty() and can_rewrite(output)


def print_once(source: JobSource, output: TextIO) -> None:
    """Print the job as it is now."""
    width = terminal_size(output).columns if output.isatty() else _width()
    console = Console(file=output, width=width, highlight=False)
    console.print(screen_of(source.refresh(), console.width))


def _width() -> int:
    text = process_environ().get("COLUMNS", "")
    return int(text) if text.isascii() and text.isdigit() and 20 <= int(text) <= 1000 else _COLUMNS


class Screen:
    """A screen that shows a job, and obeys keys.

    Args:
        keys: the descriptor of the terminal's keyboard; None for none.
    """

    def __init__(self, source: JobSource, output: TextIO, keys: int | None) -> None:
        self._source, self._output, self._keys = source, output, keys
        self._console = Console(file=output, highlight=False)
        self._scroll = 0

    def run(self) -> None:
        """Show the job until `q` or Ctrl-C."""
        job = self._source.refresh(_MOST_BYTES)
        with (
            _single_keys(self._keys),
            Live(
                self._shown(job),
                console=self._console,
                screen=True,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            ) as live,
            contextlib.suppress(KeyboardInterrupt),
        ):
            while self._obey(_PERIOD):
                job = self._source.refresh(_MOST_BYTES)
                live.update(self._shown(job), refresh=True)

    def _shown(self, job: WatchedJob) -> RenderableType:
        size = terminal_size(self._output)
        # Rich asks standard streams alone for it.
        self._console.size = ConsoleDimensions(size.columns, size.lines)
        foot = f"q quits, arrows and page keys scroll; {self._source.name}"
        self._scroll = max(0, min(self._scroll, len(job.tasks) - 1))
        return screen_of(job, size.columns, size.lines, self._scroll, foot)

    def _obey(self, seconds: float) -> bool:
        """Wait for a key, or for the next look; return False where the key ends all."""
        if self._keys is None:
            time.sleep(seconds)
            return True
        if not select.select([self._keys], [], [], seconds)[0]:
            return True
        pressed = os.read(self._keys, 64)
        if not pressed:  # the terminal is gone
            return False
        # Several at once, where they are pressed quickly.
        for key in _KEY.findall(pressed):
            self._scroll = max(0, self._scroll + _MOVES.get(key, 0))
            if key in _QUITS:
                return False
        return True


@contextlib.contextmanager
def _single_keys(keys: int | None) -> Iterator[None]:
    """Give keys at once and without an echo, as long as the block runs."""
    if keys is None:
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(keys)
    try:
        tty.setcbreak(keys)
        yield
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


def watch(source: JobSource, once: bool, output: TextIO | None = None) -> None:
    """Show a job in this terminal.

    Args:
        once: whether to print it and return, as is done where the output is no terminal.
    """
    output = output or sys.stdout
    if once or not can_fill(output):
        print_once(source, output)
        return
    keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    Screen(source, output, keys).run()
