"""Starts the launcher as its users do, bounded in time; shows every log when a test fails."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import forked

#: Seconds for anything that a test waits for; the machine may be busy.
LIMIT = 240.0

#: What scripts begin with: who am I, without JAX.
WHO = """\
import json, os, signal, sys, time
task = json.loads(os.environ["TF_CONFIG"])["task"]
me, generation = task["type"] + ":" + str(task["index"]), int(os.environ["UNISONO_GENERATION"])
def progress(step):
    with open(os.environ["UNISONO_PROGRESS"], "w") as file:
        file.write(f"{step} {time.time()}\\n")
"""


def until(condition, what):
    """Wait until a condition holds, and return its value."""
    deadline = time.monotonic() + LIMIT
    while not (value := condition()):
        assert time.monotonic() < deadline, f"timed out waiting for {what}"
        time.sleep(0.02)
    return value


def is_alive(pid):
    """Whether a process is there and no zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


class Launched:
    """A launcher that runs."""

    def __init__(self, process, root):
        self.process, self.root = process, root
        self.logs = root / "logs"

    @property
    def pid(self):
        return self.process.pid

    @property
    def out(self):
        return (self.root / "out").read_text()

    @property
    def err(self):
        return (self.root / "err").read_text()

    def log(self, task):
        path = self.logs / f"{task.replace(':', '-')}.log"
        return path.read_text() if path.exists() else ""

    def history(self, event=None, **fields):
        path = self.logs / "history.jsonl"
        # The last line may be half written.
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        events = map(json.loads, lines)
        wanted = fields if event is None else {"event": event, **fields}
        return [e for e in events if all(e[k] == v for k, v in wanted.items())]

    def wait_for(self, event, count=1, **fields):
        found = until(
            lambda: (e := self.history(event, **fields)) and len(e) >= count and e, f"{event} {fields}"
        )
        return found[-1]

    def wait_for_log(self, task, pattern):
        """Wait for a whole line, and return its match: Python writes the parts of a line one by one."""
        line = re.compile(pattern + r".*\n")
        return until(lambda: line.search(self.log(task)), f"{pattern!r} in the log of {task}")

    def send(self, number):
        os.kill(self.pid, number)

    def end(self):
        return self.process.wait(LIMIT)

    def everyone(self):
        """The numbers of all processes that it started."""
        return {e["pid"] for e in self.history() if e["event"] in ("started", "spare")}


def check_evaluated(logs):
    """The evaluator of `programs/evaluated.py` has found the loss of the last weights."""
    texts = {name: (logs / f"{name}-0.log").read_text() for name in ("worker", "evaluator")}
    (trained,) = re.findall(r"^trained (\S+)$", texts["worker"], re.MULTILINE)
    (evaluated,) = re.findall(r"^evaluated (\S+)$", texts["evaluator"], re.MULTILINE)
    # A strategy adds in another order.
    assert float(evaluated) == pytest.approx(float(trained), rel=1e-6)


@contextlib.contextmanager
def launched(root, script, *flags, args=(), forks=False):
    """Run `unisono launch` on a script that begins with `WHO`; with `forks` its tasks have imported all."""
    (root / "train.py").write_text(WHO + script)
    command = ["-m", "unisono", "launch", "--log-dir", str(root / "logs"), *flags]
    command += [str(root / "train.py"), *args]
    if forks:
        process = forked.Program(command, Path.cwd(), root / "out", root / "err")
    else:
        process = _started(command, root)
    run = Launched(process, root)
    try:
        yield run
    except BaseException:
        show(run)
        raise
    finally:
        end(run)


def _started(command, root):
    with (root / "out").open("w") as out, (root / "err").open("w") as err:
        # In the background of a shell it is ignored, and the launcher would leave it so.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        process = subprocess.Popen([sys.executable, *command], stdout=out, stderr=err, start_new_session=True)
        signal.signal(signal.SIGINT, before)
    return process


def end(run):
    """End the launcher; it ends its tasks."""
    if run.process.poll() is None:
        run.send(signal.SIGKILL)
    run.process.wait(LIMIT)


def show(run):
    """Print what everyone wrote."""
    print(f"--- launcher, exit code {run.process.poll()} ---\n{run.out}\n{run.err}")
    for path in sorted(run.logs.glob("*.*")):
        print(f"--- {path.name} ---\n{path.read_text(errors='replace')}")
