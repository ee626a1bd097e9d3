"""Parameter servers in processes: one script for all tasks, started by hand.

By the launcher: `test_examples.py`.
"""

import re
import signal
from pathlib import Path

from tests.cluster.launch_support import LIMIT, until
from tests.cluster.tasks_by_hand import TasksByHand

SCRIPT = Path(__file__).parent / "programs" / "parameter_server.py"


def check(output):
    """The chief's output: no step is lost, and without a bound of staleness the accuracy is nearly that of
    one device (0.976; 0.966 to 0.98 with five seeds, 2026-11-22)."""
    (steps,) = re.findall(r"steps (\d+)", output)
    (accuracy,) = re.findall(r"accuracy (0\.\d+)", output)
    (counted,) = re.findall(r"counted (\d+)", output)
    assert int(steps) == 12 * 30
    assert float(accuracy) > 0.95
    assert int(counted) == 200
    # The kernel's rows lie on both servers.
    assert "divided True 2" in output


def test_without_a_chief_the_first_worker_is_it_and_a_killed_worker_comes_again(tmp_path):
    with TasksByHand(tmp_path, SCRIPT) as tasks:
        chief = tasks.log("worker", 0)
        until(lambda: "epoch 2" in chief.read_text(), f"epochs in {chief}")
        tasks.processes["worker", 1].send_signal(signal.SIGKILL)
        tasks.processes["worker", 1].wait(LIMIT)
        tasks.start("worker", 1)
        assert set(tasks.wait().values()) == {0}, tasks.text()
        assert "the chief is {'type': 'worker', 'index': 0}" in chief.read_text()
        check(chief.read_text())
