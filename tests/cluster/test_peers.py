"""What a worker does when another is silent, and how all end together when they are asked to."""

import time
from pathlib import Path

import pytest

from tests.cluster._workers import Workers

PROGRAM = str(Path(__file__).parent / "programs" / "peers.py")

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two workers have trained there, `weights-*-plain`, and once more until worker 1 was stopped."""
    folder = tmp_path_factory.mktemp("peers")
    workers = Workers(folder, [PROGRAM, str(folder), "stop"])
    try:
        deadline = time.monotonic() + 180
        while workers.processes[0].poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert workers.processes[0].poll() not in (None, 0), workers.text()
        assert workers.processes[1].poll() is None, workers.text()
    finally:
        workers.kill()
        workers.wait(10)
    return folder


def test_a_stopped_worker_is_not_waited_for_longer_than_the_limit(folder):
    """10 s by `CommunicationOptions(timeout_seconds=10)`; Gloo itself would wait half an hour."""
    assert int((folder / "step-1").read_text()) == 5
    assert not (folder / "weights-0-stop").exists()
    log = (folder / "worker-0.log").read_text()
    assert "unisono._errors.ClusterError: All workers must stay until all are done" in log


def test_sigterm_ends_all_workers_after_the_same_step_and_the_same_command_goes_on(folder, tmp_path):
    ended = Workers(tmp_path, [PROGRAM, str(tmp_path), "end"])
    assert ended.wait(150) == [42, 42], ended.text()
    steps = [(tmp_path / f"step-{i}").read_text() for i in range(2)]
    assert steps[0] == steps[1]
    assert int(steps[0]) < 63
    again = Workers(tmp_path, [PROGRAM, str(tmp_path), "again"])
    assert again.wait(150) == [0, 0], again.text()
    weights = {path.read_text() for path in (*folder.glob("*-plain"), *tmp_path.glob("*-again"))}
    assert len(weights) == 1
    assert len([*folder.glob("*-plain"), *tmp_path.glob("*-again")]) == 4
