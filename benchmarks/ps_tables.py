"""Tables on parameter servers: steps per second, bytes of a step and the memory of all tasks.

    python benchmarks/ps_tables.py [--rows 10000000 1000000] [--steps 500]

Runs `examples/wide_and_deep.py` on a chief, two workers and two servers, with tables of some sizes. What
travels and what chief and workers hold must not depend on the size; the servers' memory does.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
EPOCH = re.compile(r"steps_per_second: ([\d.]+).* pulled_mb: ([\d.]+) - pushed_mb: ([\d.]+)")


def descendants(parent):
    """Return the processes that a process has started, at any depth."""
    parents = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(process.name)] = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
    found = {parent}
    while new := {child for child, of in parents.items() if of in found} - found:
        found |= new
    return found - {parent}


def peaks(parent, ended):
    """Return the largest resident memory of each process in MB, looked at until the end."""
    largest = {}
    while not ended.wait(0.2):
        for number in descendants(parent):
            process = Path(f"/proc/{number}")
            try:
                size = re.search(r"VmHWM:\s+(\d+)", (process / "status").read_text())
            except OSError:
                continue
            if size:
                largest[number] = max(largest.get(number, 0.0), int(size[1]) / 1024)
    return largest


def measured(rows, steps, folder):
    """Run the example; return what its epochs and its processes showed."""
    command = [sys.executable, "-m", "unisono", "launch", "-n", "2", "--ps", "2", "--chief"]
    command += ["--log-dir", str(folder), str(ROOT / "examples" / "wide_and_deep.py")]
    command += ["--rows", str(rows), "--steps", str(steps)]
    begin, ended, found = time.perf_counter(), threading.Event(), {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        looking = threading.Thread(target=lambda: found.update(peaks(process.pid, ended)))
        looking.start()
        output = process.stdout.read()
    ended.set()
    looking.join()
    epochs = EPOCH.findall(output)
    if process.returncode or len(epochs) != 3:
        raise RuntimeError(f"The example has failed:\n{output[-3000:]}")
    rate, pulled, pushed = map(float, epochs[-1])
    return {
        "rows": rows,
        "steps_per_second": rate,
        "pulled_kb": 1000 * pulled / steps,
        "pushed_kb": 1000 * pushed / steps,
        # The servers are the largest; chief and workers are alike. Helpers of the launcher are left out.
        "peak_mb": sorted((round(size) for size in found.values() if size > 100), reverse=True),
        "seconds": round(time.perf_counter() - begin, 1),
        "result": re.findall(r"Log loss.*|AUC.*|Rows of a step.*", output),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000_000, 1_000_000])
    parser.add_argument("--steps", type=int, default=500)
    arguments = parser.parse_args()
    for rows in arguments.rows:
        with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
            print(json.dumps(measured(rows, arguments.steps, Path(folder)), indent=1), flush=True)
