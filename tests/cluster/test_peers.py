"""What a worker does when another is silent, and how all end together when they are asked to."""

import time
from pathlib import Path

import pytest

from tests.cluster._workers import Workers

PROGRAM = str(Path(__file__).parent / "programs" / "peers.py")


@pytest.mark.timeout(150)
def test_a_stopped_worker_is_not_waited_for_longer_than_the_limit(tmp_path):
    """4 s by `CommunicationOptions(timeout_seconds=4)`; Gloo itself would wait half an hour."""
    workers = Workers(tmp_path, [PROGRAM, str(tmp_path), "stop"])
    try:
        deadline = time.monotonic() + 120
        while workers.processes[0].poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert workers.processes[0].poll() not in (None, 0), workers.text()
        assert workers.processes[1].poll() is None, workers.text()
    finally:
        workers.kill()
        workers.wait(10)
    assert int((tmp_path / "step-1").read_text()) == 5
    assert (
        "unisono._errors.ClusterError: All workers must stay until all are done"
        in workers.logs[0].read_text()
    )


@pytest.mark.timeout(200)
def test_sigterm_ends_all_workers_after_the_same_step_and_the_same_command_goes_on(tmp_path):
    plain = Workers(tmp_path, [PROGRAM, str(tmp_path), "plain"])
    assert plain.wait(90) == [0, 0], plain.text()
    ended = Workers(tmp_path, [PROGRAM, str(tmp_path), "end"])
    assert ended.wait(90) == [42, 42], ended.text()
    steps = [(tmp_path / f"step-{i}").read_text() for i in range(2)]
    assert steps[0] == steps[1]
    assert int(steps[0]) < 63
    again = Workers(tmp_path, [PROGRAM, str(tmp_path), "again"])
    assert again.wait(90) == [0, 0], again.text()
    weights = {
        (tmp_path / f"weights-{i}-{mode}").read_text() for i in range(2) for mode in ("plain", "again")
    }
    assert len(weights) == 1
