"""What a worker does when another is silent."""

import time
from pathlib import Path

import pytest

from tests.cluster._workers import Workers

PROGRAMS = Path(__file__).parent / "programs"
PROGRAM = str(PROGRAMS / "peers.py")


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """Both clusters, started together, as each mostly waits."""
    folders = {mode: tmp_path_factory.mktemp(f"peers-{mode}") for mode in ("", "gone")}
    workers = {mode: Workers(place, [PROGRAM, str(place), *mode.split()]) for mode, place in folders.items()}
    yield {mode: (place, workers[mode]) for mode, place in folders.items()}
    for each in workers.values():
        each.kill()
        each.wait(10)


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        # After the 10 s of `CommunicationOptions(timeout_seconds=10)`; Gloo itself would wait half an hour.
        ("", "unisono.ClusterError: All workers must run until the last collective has finished"),
        # Long before the 600 s of a collective: after some heartbeats, of 1 s here.
        (
            "gone",
            "This process ends with code 1. All workers must run until the last collective has finished",
        ),
    ],
)
def test_a_silent_worker_is_not_waited_for_for_ever(launched, mode, words):
    folder, workers = launched[mode]
    try:
        deadline = time.monotonic() + 400
        while workers.processes[0].poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert workers.processes[0].poll() not in (None, 0), workers.text()
        assert workers.processes[1].poll() is None, workers.text()
    finally:
        workers.kill()
        workers.wait(10)
    assert int((folder / "step-1").read_text()) == 5, workers.text()
    assert sorted(path.name for path in folder.glob("trained*")) == ["trained-0-0", "trained-1-0"]
    log = workers.logs[0].read_text()
    assert words in log
    assert ("its machine cannot be reached" in log) is bool(mode), log


def test_saving_parts_on_one_worker_is_an_error(tmp_path):
    file = tmp_path / "m.keras"
    workers = Workers(tmp_path, [str(PROGRAMS / "saves_alone.py"), str(file)])
    assert workers.wait(120) == [1, 1], workers.text()
    assert "unisono.ClusterError: All workers must read variables that lie in parts together. Received: " in (
        workers.logs[0].read_text()
    )
    assert not file.exists()
