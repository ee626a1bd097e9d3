"""What a launch shows: its own lines, and what the chief prints."""

from __future__ import annotations

import sys
from typing import TextIO

from unisono.cli._files import Tail, prefixed
from unisono.cluster._spec import Task


class Screen:
    """Writes to the terminal, or to a notebook's cell.

    Args:
        messages: for the launcher's own lines; None for silence.
        output: for the chief's.
    """

    def __init__(self, messages: TextIO | None, output: TextIO) -> None:
        self._messages, self._output = messages, output
        self._at_start = True
        self._tail: tuple[Task, Tail] | None = None

    def follow(self, task: Task, tail: Tail) -> None:
        """Show what this task prints from now on."""
        self._tail = (task, tail)

    def flush(self) -> None:
        """Show what the task has printed since."""
        if self._tail is None:
            return
        task, tail = self._tail
        text, self._at_start = prefixed(tail.read(), f"[{task}] ", self._at_start)
        if text:
            self._write(self._output, text)

    def say(self, text: str) -> None:
        """Show a line of the launcher's, on a line of its own."""
        self.flush()
        if self._messages is None:
            return
        if not self._at_start:
            self._write(self._output, "\n")
            self._at_start = True
        self._write(self._messages, text + "\n")

    def _write(self, stream: TextIO, text: str) -> None:
        try:
            stream.write(text)
            stream.flush()
        except BrokenPipeError:
            # Whoever read has gone, as `head` does; the tasks go on, and their logs are there.
            self._messages, self._tail = None, None
            if stream is sys.stdout:
                sys.stdout = None  # or Python complains at the end
