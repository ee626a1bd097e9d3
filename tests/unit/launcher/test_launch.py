"""What the launcher does with its signals, and in a task of another cluster."""

import json
import os
import signal

import pytest

from unisono import InvalidArgumentError
from unisono.launcher._launch import run_program, stop_signals
from unisono.launcher._options import LaunchOptions, UserProgram


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM])
def test_signals_are_noted_unless_they_are_ignored(number):
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with stop_signals() as stop_requests:
            os.kill(os.getpid(), number)
            assert stop_requests == [number]
        assert signal.getsignal(number) == signal.SIG_DFL
        # As `nohup`, or a shell for a job in its background.
        signal.signal(number, signal.SIG_IGN)
        with stop_signals() as stop_requests:
            os.kill(os.getpid(), number)
            assert stop_requests == []
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_task_of_a_cluster_over_hosts_launches_none(monkeypatch, tmp_path):
    """Each host would train a model of its own."""
    script = tmp_path / "train.py"
    script.touch()
    cluster = {"cluster": {"worker": ["a:1", "b:1"], "ps": ["c:1"]}, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    monkeypatch.delenv("UNISONO_LAUNCH", raising=False)
    with pytest.raises(InvalidArgumentError, match=r"in which it is worker:1 of 3 tasks. Start the program"):
        run_program(LaunchOptions(), UserProgram(str(script)), tmp_path / "logs")
    assert not (tmp_path / "logs").exists()
