"""Parameter servers in processes: one script for all tasks, started by the launcher and by hand."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.cluster.launch_support import LIMIT, launched, until
from unisono.ps._transport._local import free_port

SCRIPT = Path(__file__).parent / "programs" / "parameter_server.py"


def check(output):
    """The chief's output: no step is lost, and the accuracy is that of one device (0.97)."""
    (steps,) = re.findall(r"steps (\d+)", output)
    (accuracy,) = re.findall(r"accuracy (0\.\d+)", output)
    (counted,) = re.findall(r"counted (\d+)", output)
    assert int(steps) == 8 * 30
    assert float(accuracy) > 0.94
    assert int(counted) == 200


def test_the_launcher_starts_all_tasks_and_all_end_well(tmp_path):
    with launched(tmp_path, SCRIPT.read_text(), "-n", "2", "--ps", "1", "--chief", "--grace", "20") as run:
        assert run.end() == 0
        assert "the chief is {'type': 'chief', 'index': 0}" in run.out
        check(run.out)
        assert [run.log(task) for task in ("worker:0", "worker:1", "ps:0")] == ["", "", ""]


class ByHand:
    """Tasks that are started one by one with a TF_CONFIG."""

    def __init__(self, root):
        self.root, self.processes = root, {}
        self.cluster = {"worker": self._addresses(2), "ps": self._addresses(2)}

    def _addresses(self, count):
        return [f"localhost:{free_port()}" for _ in range(count)]

    def start(self, job, index):
        config = json.dumps({"cluster": self.cluster, "task": {"type": job, "index": index}})
        with self.log(job, index).open("a") as log:
            self.processes[job, index] = subprocess.Popen(
                [sys.executable, SCRIPT], env={**os.environ, "TF_CONFIG": config}, stdout=log, stderr=log
            )

    def log(self, job, index):
        return self.root / f"{job}-{index}.log"

    def end(self):
        for process in self.processes.values():
            process.kill()
            process.wait(LIMIT)


def test_without_a_chief_the_first_worker_is_it_and_a_killed_worker_comes_again(tmp_path):
    tasks = ByHand(tmp_path)
    with contextlib.ExitStack() as stack:
        stack.callback(tasks.end)
        for job, addresses in tasks.cluster.items():
            for index in range(len(addresses)):
                tasks.start(job, index)
        chief = tasks.log("worker", 0)
        until(lambda: "epoch 2" in chief.read_text(), f"epochs in {chief}")
        tasks.processes["worker", 1].send_signal(signal.SIGKILL)
        tasks.processes["worker", 1].wait(LIMIT)
        tasks.start("worker", 1)
        deadline = time.monotonic() + LIMIT
        codes = {}
        for task, process in tasks.processes.items():
            codes[task] = process.wait(max(1.0, deadline - time.monotonic()))
        assert codes == dict.fromkeys(tasks.processes, 0), "\n".join(
            path.read_text() for path in sorted(tmp_path.glob("*.log"))
        )
        assert "the chief is {'type': 'worker', 'index': 0}" in chief.read_text()
        check(chief.read_text())
