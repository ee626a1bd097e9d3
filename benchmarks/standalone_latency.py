"""What lies between a client and the servers that train for it: two servers on this machine.

    python benchmarks/standalone_latency.py

- Start: from `unisono.launch(fn, cluster=...)` until the function runs in both tasks, with spare processes
  ready and without; the same of `unisono.launch(fn)`, whose processes start cold.
- A line: from `print` in a task until the client shows it.
- A step: the time of a step of `fit` with its progress bar, on the servers and by `unisono.launch`, in turn;
  and how many messages the client has exchanged with each server.
- Results: an array of 80 MB, from the end of the function until the client has it.
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))

import numpy as np

import unisono
from unisono.launcher._launch import cores
from tests.cluster.standalone_support import KEY, Served

STEPS = 2000


def begin():
    """Return when the function began."""
    import time

    return time.time()


def lines(count):
    """Print the time, now and then."""
    import time

    for _ in range(count):
        print("at", time.time(), flush=True)
        time.sleep(0.2)


def fit(steps):
    """Return seconds for each step of a second epoch."""
    import time

    import keras
    import numpy as np

    import unisono

    strategy = unisono.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(256, activation="relu"), keras.layers.Dense(10)])
        model.compile("sgd", "mse")
    x, y = np.ones((32 * steps, 64), "float32"), np.ones((32 * steps, 10), "float32")
    model.fit(x, y, batch_size=32, verbose=1)
    began = time.perf_counter()
    model.fit(x, y, batch_size=32, verbose=1)
    return (time.perf_counter() - began) / steps


def large():
    """Return an array, and when."""
    import time

    import numpy as np

    return np.ones(10_000_000), time.time()


class Clock(io.StringIO):
    """Standard output that notes when each line arrives."""

    def __init__(self):
        super().__init__()
        self.delays = []

    def write(self, text):
        """Note the delay of each line that says when it was printed."""
        now = time.time()
        self.delays += [now - float(line.split()[-1]) for line in text.splitlines() if " at " in line]
        return len(text)


def quietly(call):
    """Call a function without its output."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return call()


def measure(servers, repeats):
    """Return the rows."""
    cluster = {"worker": [each.reached_at for each in servers]}
    rows = {}
    for name, pause in (("start, spare", 8.0), ("start, cold", 0.0)):
        found = []
        for _ in range(repeats):
            time.sleep(pause)
            began = time.time()
            found.append(max(quietly(lambda: unisono.launch(begin, cluster=cluster))) - began)
        rows[name] = statistics.median(found)
    began = time.time()
    rows["start, unisono.launch"] = max(quietly(lambda: unisono.launch(begin))) - began
    clock = Clock()
    with contextlib.redirect_stdout(clock), contextlib.redirect_stderr(io.StringIO()):
        unisono.launch(lines, args=(25,), cluster=cluster)
    rows["line, median"], rows["line, largest"] = statistics.median(clock.delays), max(clock.delays)
    [(array, at)] = quietly(lambda: unisono.launch(large, cluster={"worker": cluster["worker"][:1]}))
    rows["80 MB of results"] = time.time() - at
    return rows if np.all(array == 1) else {}


def measure_steps(servers, repeats):
    """Return the rows about steps."""
    cluster = {"worker": [each.reached_at for each in servers]}
    rows = {}
    remote, local, messages = [], [], []
    for _ in range(repeats):
        before = servers[0].status()["counts"].get("POLL", 0)
        remote.append(quietly(lambda: unisono.launch(fit, args=(STEPS,), cluster=cluster))[0])
        messages.append(servers[0].status()["counts"]["POLL"] - before)
        local.append(quietly(lambda: unisono.launch(fit, args=(STEPS,)))[0])
    rows["step, on servers"], rows["step, unisono.launch"] = min(remote), min(local)
    rows["messages for 1000 steps"] = statistics.median(messages) / (2 * STEPS) * 1000
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps-only", action="store_true")
    options = parser.parse_args()
    os.environ["UNISONO_CLUSTER_KEY"] = KEY
    # Two servers share this machine, which neither knows: the tasks get the threads of `unisono.launch`.
    os.environ["OMP_NUM_THREADS"] = str(max(1, cores() // 2))
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        servers = [Served(root / "a", "--address", "localhost:0"), Served(root / "b", "--port", "0")]
        try:
            rows = {} if options.steps_only else measure(servers, options.repeats)
            rows |= measure_steps(servers, options.repeats)
        finally:
            for each in servers:
                each.close()
    print(json.dumps({name: round(value, 5) for name, value in rows.items()}, indent=1))


if __name__ == "__main__":
    main()
