"""Record what a terminal shows while a worker is killed: `python -m tools.recording` writes docs/kill.svg.

A real launch of two workers. When both have trained for a while, one is sent SIGKILL; the launcher starts it
again, and training goes on behind its last backup. The picture plays without a script or another file.
"""

import argparse
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

import pyte

ROOT = Path(__file__).parents[1]
# As wide as the line that names the killed worker and its log.
COLUMNS, ROWS = 116, 22
#: Seconds between two frames, and after which the run is given up.
TICK, LIMIT = 0.4, 600.0
#: Steps of the run when the worker is killed, and seconds for which the last frame stays.
KILLED_AT, LAST = 150, 8.0
COMMAND = ["unisono", "launch", "-n", "2", "--max-restarts", "1", "--log-dir", "logs", "train.py"]
PROGRAM = """\
import os, pathlib
import keras, unisono
from sklearn.datasets import load_digits

strategy = unisono.MultiWorkerMirroredStrategy()
pathlib.Path(f"{strategy.worker_index}.pid").write_text(str(os.getpid()))
digits = load_digits()
x, y = digits.images[..., None] / 16, digits.target
with strategy.scope():
    layers = keras.layers
    model = keras.Sequential([
        keras.Input((8, 8, 1)), layers.Conv2D(32, 3, activation="relu"),
        layers.Conv2D(64, 3, activation="relu"), layers.Flatten(), layers.Dense(10),
    ])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
backup = unisono.callbacks.BackupAndRestore("backup", save_freq=20)
model.fit(x, y, batch_size=64, epochs=12, callbacks=[backup])
"""
#: Width of a character and height of a row, in a font of 14 pixels.
WIDTH, HEIGHT, MARGIN = 8.43, 18, 14
COLORS = {
    "default": "#d8dee9", "black": "#4c566a", "red": "#ff6b6b", "green": "#9ece6a", "brown": "#e0af68",
    "blue": "#7aa2f7", "magenta": "#bb9af7", "cyan": "#7dcfff", "white": "#ffffff",
}  # fmt: skip


class Run(NamedTuple):
    """Characters of one style that stand beside each other."""

    column: int
    text: str
    color: str
    is_bold: bool


class Frame(NamedTuple):
    """What the terminal showed from some second on: the runs of each row."""

    at: float
    rows: tuple[tuple[Run, ...], ...]


def runs_of(line):
    """Return the runs of a row of a `pyte` screen, without blanks at its end."""
    found = []
    for column in range(COLUMNS):
        char = line[column]
        style = (char.fg, bool(char.bold))
        if found and found[-1][2:] == style and found[-1].column + len(found[-1].text) == column:
            found[-1] = found[-1]._replace(text=found[-1].text + char.data)
        elif char.data != " ":
            found.append(Run(column, char.data, *style))
    return tuple(run._replace(text=run.text.rstrip()) for run in found)


def intervals(frames, end):
    """Return by row and runs the times during which they are shown, as pairs of seconds."""
    shown = {}
    for frame, until in zip(frames, [*(f.at for f in frames[1:]), end], strict=True):
        for number, runs in enumerate(frame.rows):
            times = shown.setdefault((number, runs), []) if runs else []
            if times and times[-1][1] == frame.at:
                times[-1] = (times[-1][0], until)
            else:
                times.append((frame.at, until))
    return shown


def svg(frames, caption):
    """Return frames as an SVG that plays them by CSS, again and again, and begins with the last one.

    The last frame shows the failure and how the run was resumed. It is also the picture for readers who have
    asked for less motion, and where nothing is animated.

    Args:
        frames: in their order, the first one at 0 s.
        caption: a line below the terminal.
    """
    end = frames[-1].at + LAST
    # A little later than the frame begins: its percentage is rounded.
    start = end - LAST + TICK / 4
    width, height = 2 * MARGIN + WIDTH * COLUMNS, 3 * MARGIN + HEIGHT * (ROWS + 2)
    rules, texts = {}, []
    for (number, runs), times in intervals(frames, end).items():
        keys = ["0%{opacity:0}"] if times[0][0] else []
        keys += [f"{100 * a / end:.2f}%{{opacity:1}}{100 * b / end:.2f}%{{opacity:0}}" for a, b in times]
        rule = rules.setdefault("".join(keys), f"k{len(rules)}")
        kind = f"{rule} z" if times[-1][1] == end else rule
        spans = "".join(map(_span, runs))
        always = times == [(0, end)]
        kind = "" if always else f' class="{kind}"'
        texts.append(f'<text y="{_baseline(number)}"{kind}>{spans}</text>')
    styles = "".join(
        f"@keyframes {name}{{{keys}}}.{name}{{animation-name:{name}}}" for keys, name in rules.items()
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" '
        f'viewBox="0 0 {width:.0f} {height}" width="{width:.0f}">'
        f"<style>text{{font:14px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;white-space:pre;"
        f"fill:{COLORS['default']}}}[class]{{opacity:0;animation:{end:.1f}s step-end -{start:.1f}s infinite}}"
        ".z{opacity:1}"
        f"{styles}@media(prefers-reduced-motion:reduce){{[class]{{animation:none}}}}</style>"
        f'<rect width="100%" height="100%" rx="8" fill="#1b1e28"/>{"".join(texts)}'
        f'<text x="{MARGIN}" y="{height - MARGIN}" style="fill:#8a93a6">{escape(caption)}</text></svg>\n'
    )


def _baseline(number):
    # The note below the terminal keeps a distance.
    return MARGIN + HEIGHT * (number + 1) - 4 + (MARGIN // 2) * (number == ROWS)


def _span(run):
    color = "" if run.color == "default" else f' fill="{COLORS.get(run.color, "#" + run.color)}"'
    weight = ' font-weight="bold"' if run.is_bold else ""
    # The width is said, so that rows are as wide in each font.
    length = f"{WIDTH * len(run.text):.1f}"
    place = f'x="{MARGIN + WIDTH * run.column:.1f}" textLength="{length}"'
    return f"<tspan {place}{color}{weight}>{escape(run.text)}</tspan>"


class Recorder:
    """A terminal in which a command runs, and the frames of what it has shown."""

    def __init__(self, command, folder):
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self._screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self._screen)
        self._stream.feed(f"$ {' '.join(command)}\r\n".encode())
        environ = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"} | {"TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=folder,
            env=environ,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        self._began = time.monotonic()
        self.frames = []
        #: What stands below the terminal from now on.
        self.note = ()
        self._keep()

    def _keep(self):
        rows = (*(runs_of(self._screen.buffer[number]) for number in range(ROWS)), self.note)
        if not self.frames or rows != self.frames[-1].rows:
            at = time.monotonic() - self._began if self.frames else 0.0
            self.frames.append(Frame(at, rows))

    def read(self):
        """Read what the terminal shows for a moment; return whether the command still runs."""
        until = time.monotonic() + TICK
        while (left := until - time.monotonic()) > 0:
            if not select.select([self._ours], [], [], left)[0]:
                continue
            try:
                self._stream.feed(os.read(self._ours, 1 << 16))
            except OSError:  # the command has closed its end
                self._keep()
                return False
        self._keep()
        return self.process.poll() is None

    @property
    def text(self):
        """The rows that are shown now."""
        return "\n".join(self._screen.display)


def record(folder):
    """Run the program, kill a worker in the middle, and return the frames."""
    (folder / "train.py").write_text(PROGRAM)
    recorder, killed, deadline = Recorder(COMMAND, folder), None, time.monotonic() + LIMIT
    while recorder.read():
        if time.monotonic() > deadline:
            recorder.process.terminate()
            raise TimeoutError(f"The launch must end within {LIMIT:.0f} s. It showed:\n{recorder.text}")
        found = re.search(r"worker:1 .*?\b(\d+)\b", recorder.text)
        if killed is None and found and int(found[1]) >= KILLED_AT:
            killed = int((folder / "1.pid").read_text())
            os.kill(killed, signal.SIGKILL)
            recorder.note = (Run(0, f"in another shell: kill -9 {killed}", "red", True),)
    code = recorder.process.wait()
    shown = (run.text for frame in recorder.frames for row in frame.rows for run in row)
    if code or killed is None or not any("resumed at step" in text for text in shown):
        raise RuntimeError(f"The run must resume and end. It ended with {code} and showed:\n{recorder.text}")
    return recorder.frames


def faster(frames, seconds):
    """Return frames that take some seconds, and how many times as fast as they were recorded."""
    factor = max(1.0, frames[-1].at / seconds)
    return [frame._replace(at=round(frame.at / factor, 2)) for frame in frames], factor


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long the recording plays at most")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "kill.svg")
    options = parser.parse_args()
    # Without a prefix: the terminal shows the path.
    with tempfile.TemporaryDirectory(prefix="") as folder:
        frames = record(Path(folder))
    frames, factor = faster(frames, options.seconds)
    options.out.write_text(svg(frames, f"a real run, played {factor:.1f} times as fast"))
    print(f"{options.out}: {len(frames)} frames, {options.out.stat().st_size // 1024} kB")


if __name__ == "__main__":
    main()
