"""Processes that die or are replaced while they upload a backup, to a real server."""

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from tests import forked
from tests.cluster._workers import Workers
from tests.object_stores import object_store, objects
from tests.support import LIMIT

PROGRAM = str(Path(__file__).parent / "programs" / "object_store.py")


@pytest.fixture(scope="module")
def bucket():
    with object_store("s3") as address:
        yield address


def started(folder, *arguments):
    env = forked.environment(KERAS_BACKEND="jax")
    log = folder / f"{len(list(folder.iterdir()))}.log"
    return forked.Program([PROGRAM, *map(str, arguments)], folder, log, env=env)


@pytest.fixture(scope="module")
def undisturbed(bucket, tmp_path_factory):
    """What one process computes that nothing disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert started(folder, f"{bucket}/undisturbed", folder / "result").wait(LIMIT) == 0
    return json.loads((folder / "result").read_text())


def test_workers_that_are_killed_during_an_upload_resume_from_the_one_before(bucket, undisturbed, tmp_path):
    run = f"{bucket}/killed"
    arguments = [PROGRAM, run, str(tmp_path / "{worker}")]
    killed = Workers(tmp_path, [*arguments, "SIGKILL"])
    codes = killed.wait(LIMIT)
    assert codes[0] == -signal.SIGKILL
    assert codes[1]
    left = objects(f"{run}/backup")
    assert [name for name in left if "MANIFEST" in name] == [f"backup-{n}/MANIFEST.json" for n in (1, 2)]
    half = {name for name in left if name.startswith("backup-3/")}
    assert len(half) == 3
    again = Workers(tmp_path, arguments)
    assert again.wait(LIMIT) == [0, 0], again.text()
    assert not half & set(objects(f"{run}/backup"))
    results = [json.loads((tmp_path / str(worker)).read_text()) for worker in range(2)]
    # Of 15 batches 4 were in the backup.
    assert [result["saved"] for result in results] == [undisturbed["saved"] - 2, 0]
    for result in results:
        for one, other in zip(result["weights"], undisturbed["weights"], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def is_stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_process_that_was_replaced_during_an_upload_changes_nothing_when_it_goes_on(
    bucket, undisturbed, tmp_path
):
    run = f"{bucket}/stopped"
    old = started(tmp_path, run, tmp_path / "old", "SIGSTOP")
    deadline = time.monotonic() + LIMIT
    while not is_stopped(old.pid):
        assert old.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    try:
        assert started(tmp_path, run, tmp_path / "new").wait(LIMIT) == 0
        found = objects(f"{run}/backup")
    finally:
        os.kill(old.pid, signal.SIGCONT)
    # It says so, and trains to its end.
    assert old.wait(LIMIT) == 0
    log = (tmp_path / "0.log").read_text()
    assert "has begun to write after this one" in log
    assert objects(f"{run}/backup") == found
    assert json.loads((tmp_path / "new").read_text())["weights"] == undisturbed["weights"]
