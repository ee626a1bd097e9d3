"""Which task holds the others up."""

import os
import subprocess
import sys

import pytest

from unisono.cluster_resolver._spec import Task
from unisono.launcher._stall_detector import (
    ProgressMonitor,
    TaskProgress,
    find_stall,
    is_stopped,
    read_step,
)

W0, W1, W2 = (Task("worker", i) for i in range(3))


@pytest.mark.parametrize(
    ("progress", "task"),
    [
        # Nobody has written yet: the first step compiles.
        ([TaskProgress(W0), TaskProgress(W1)], None),
        ([TaskProgress(W0, 5, 95.0), TaskProgress(W1, 5, 95.0)], None),
        # All wait for the one that is behind.
        ([TaskProgress(W0, 5, 60.0), TaskProgress(W1, 4, 61.0)], W1),
        # The same step: the first that was silent.
        ([TaskProgress(W0, 5, 61.0), TaskProgress(W1, 5, 60.0)], W1),
        # The others go on: the silent one.
        ([TaskProgress(W0, 9, 99.0), TaskProgress(W1, 5, 60.0), TaskProgress(W2, 2, 99.0)], W1),
        # The one that is stopped, though it wrote more.
        ([TaskProgress(W0, 5, 60.0), TaskProgress(W1, 6, 60.0, stopped_at=95.0)], W1),
        ([TaskProgress(W0, 5, 60.0), TaskProgress(W1, stopped_at=95.0)], W1),
        # Stopped for too long, before any step.
        ([TaskProgress(W0), TaskProgress(W1, stopped_at=60.0)], W1),
        ([TaskProgress(W0), TaskProgress(W1, stopped_at=95.0)], None),
    ],
)
def test_who_is_to_blame(progress, task):
    stall = find_stall(progress, timeout=30.0, now=100.0)
    assert (stall and stall.task) == task
    assert find_stall(progress, timeout=0.0, now=100.0) is None


def test_the_stopped_one_cannot_answer():
    stall = find_stall([TaskProgress(W0, 5, 60.0), TaskProgress(W1, 5, 60.0, stopped_at=90.0)], 30.0, 100.0)
    assert stall.stopped
    assert "is stopped" in stall.detail


@pytest.mark.parametrize(
    ("text", "step"), [("7 12.5\n", 7), ("1 1\n2 2\n", 2), ("", -1), ("junk", -1), ("3", 3)]
)
def test_the_last_step(tmp_path, text, step):
    path = tmp_path / "progress"
    path.write_text(text)
    assert read_step(path) == step


def test_no_file_is_no_step(tmp_path):
    assert read_step(tmp_path / "none") == -1


def test_a_change_is_noticed_when_it_is_seen(tmp_path):
    path = tmp_path / "p"
    monitor = ProgressMonitor({W0: path})
    pids = {W0: os.getpid()}
    assert monitor.poll(pids, 1.0) == (TaskProgress(W0),)
    path.write_text("1 99\n")
    assert monitor.poll(pids, 2.0) == (TaskProgress(W0, 1, 2.0),)
    assert monitor.poll(pids, 3.0) == (TaskProgress(W0, 1, 2.0),)
    path.write_text("10 99\n")
    assert monitor.poll(pids, 4.0) == (TaskProgress(W0, 10, 4.0),)
    assert monitor.poll({}, 5.0) == ()


def test_a_task_that_does_not_write_its_file_again_stalls(tmp_path):
    path = tmp_path / "p"
    monitor, pids = ProgressMonitor({W0: path}), {W0: os.getpid()}
    path.write_text("3 99\n")
    monitor.poll(pids, 1.0)
    path.unlink()
    # From then on it has the same time as after a step.
    assert monitor.poll(pids, 9.0) == (TaskProgress(W0, 3, 9.0),)
    assert find_stall(monitor.poll(pids, 18.0), 10.0, 18.0) is None
    assert find_stall(monitor.poll(pids, 20.0), 10.0, 20.0).task == W0
    path.write_text("4 99\n")
    assert find_stall(monitor.poll(pids, 21.0), 10.0, 21.0) is None


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_process_that_is_not_stopped():
    assert not is_stopped(os.getpid())
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    assert not is_stopped(ended.pid)
