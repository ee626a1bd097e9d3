"""What a worker does when another is silent."""

import time
from pathlib import Path

from tests.cluster._workers import Workers

PROGRAM = str(Path(__file__).parent / "programs" / "peers.py")


def test_a_stopped_worker_is_not_waited_for_longer_than_the_limit(tmp_path):
    """10 s by `CommunicationOptions(timeout_seconds=10)`; Gloo itself would wait half an hour."""
    workers = Workers(tmp_path, [PROGRAM, str(tmp_path)])
    try:
        deadline = time.monotonic() + 180
        while workers.processes[0].poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        assert workers.processes[0].poll() not in (None, 0), workers.text()
        assert workers.processes[1].poll() is None, workers.text()
    finally:
        workers.kill()
        workers.wait(10)
    assert int((tmp_path / "step-1").read_text()) == 5, workers.text()
    assert sorted(path.name for path in tmp_path.glob("trained*")) == ["trained-0-0", "trained-1-0"]
    log = workers.logs[0].read_text()
    assert "unisono._errors.ClusterError: All workers must stay until all are done" in log
