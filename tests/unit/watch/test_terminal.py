"""The whole screen of a terminal, which keys scroll and end, and what a pipe gets."""

import contextlib
import dataclasses
import fcntl
import io
import os
import pty
import struct
import termios
import threading
import time

import pyte
import pytest
from tests.unit.watch.test_screen import JOB, RUNS

from unisono.watch import _terminal
from unisono.watch._terminal import Screen, watch

SECONDS = 30


class Source:
    name = "/tmp/logs"

    def __init__(self):
        self.job, self.reads = JOB, 0

    def refresh(self, most_bytes=None):
        self.reads += 1
        return self.job


class Terminal:
    """A terminal of a size in which a screen runs, in a thread."""

    def __init__(self, source, columns, rows):
        self.ours, theirs = pty.openpty()
        self.resize(columns, rows)
        self.before = termios.tcgetattr(theirs)
        self.output = os.fdopen(theirs, "w", encoding="utf-8")
        self.screen = Screen(source, self.output, theirs)
        self.reader = threading.Thread(target=self.read)
        self.runner = threading.Thread(target=self.screen.run)
        self.reader.start()
        self.runner.start()

    def resize(self, columns, rows):
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.emulated = pyte.Screen(columns, rows)
        self.stream = pyte.ByteStream(self.emulated)

    def read(self):
        with contextlib.suppress(OSError):
            while data := os.read(self.ours, 1 << 16):
                self.stream.feed(data)

    def press(self, keys):
        os.write(self.ours, keys)

    def wait_for(self, text):
        deadline = time.monotonic() + SECONDS
        while not any(text in row for row in list(self.emulated.display)):
            assert time.monotonic() < deadline, "\n".join(self.emulated.display)
            time.sleep(0.01)
        return [row.rstrip() for row in self.emulated.display]

    def end(self):
        self.press(b"q")
        self.runner.join(SECONDS)
        assert not self.runner.is_alive()
        assert termios.tcgetattr(self.output.fileno()) == self.before
        self.output.close()
        self.reader.join(SECONDS)
        os.close(self.ours)


@pytest.fixture
def source(tuned, monkeypatch):
    tuned(_terminal, _PERIOD=0.02)
    monkeypatch.setenv("TERM", "xterm")
    return Source()


def test_the_screen_follows_the_job_its_size_and_keys(source):
    terminal = Terminal(source, 80, 24)
    try:
        terminal.wait_for("14 min left")
        terminal.wait_for("q quits")
        source.job = dataclasses.replace(
            JOB, step=5000, tasks=[dataclasses.replace(RUNS, name=f"worker:{i}") for i in range(50)]
        )
        terminal.wait_for("step 5000")
        terminal.wait_for("worker:0 ")
        terminal.press(b"\x1b[6~")
        terminal.wait_for("rows 11 to")
        # Quickly one behind the other.
        terminal.press(b"k\x1b[A\x1b[B")
        terminal.wait_for("rows 10 to")
        terminal.press(b"x")
        terminal.resize(100, 30)
        rows = terminal.wait_for("comp%")
        assert max(map(len, rows)) > 80
    finally:
        terminal.end()


def test_without_a_terminal_it_is_printed_once(source, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    output = io.StringIO()
    watch(source, once=False, output=output)
    assert source.reads == 1
    assert "\x1b" not in output.getvalue()
    assert max(map(len, output.getvalue().splitlines())) == 90
