"""A run goes on with another number of workers: positions in the data are global."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests import forked
from tests.cluster._workers import Workers
from tests.cluster.launch_support import LIMIT, launched

PROGRAM = str(Path(__file__).parent / "programs" / "resized.py")


def alone(folder, *arguments):
    return forked.run([PROGRAM, *map(str, arguments)], folder, LIMIT)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Losses and sums of weights of one process that nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = alone(folder, folder / "backup", folder / "result", 0)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "result").read_text())


def check(path, expected):
    """Equal within rounding: sums over replicas are added in another order."""
    for found, wanted in zip(json.loads(path.read_text()), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.timeout(500)
def test_more_workers_go_on_after_one_was_killed(tmp_path, expected):
    killed = alone(tmp_path, tmp_path / "backup", tmp_path / "result", 17)
    assert killed.returncode == -9, killed.stderr
    workers = Workers(tmp_path, [PROGRAM, str(tmp_path / "backup"), str(tmp_path / "result"), "0"], 3)
    assert workers.wait(LIMIT) == [0, 0, 0], workers.text()
    check(tmp_path / "result", expected)


@pytest.mark.timeout(400)
def test_an_elastic_launch_shrinks_and_grows_and_ends_with_equal_numbers(tmp_path, expected):
    """Worker 1 is killed in a backup and its machine is gone; then there is room for it again.

    Weights lie in parts on two workers, are whole on one, and lie in parts again.
    """
    script = f"import runpy\nrunpy.run_path({PROGRAM!r}, run_name='__main__')\n"
    args = [str(tmp_path / "backup"), str(tmp_path / "result"), "elastic"]
    flags = ("--elastic", "1:2", "--spares", "0", "--cool-down", "0.1")
    with launched(tmp_path, script, *flags, args=args, forks=True) as run:
        run.wait_for("restart", count=2)
        assert run.end() == 0
        assert [e["detail"] for e in run.history("restart")] == ["1 workers in 0 s", "2 workers in 0 s"]
        # Before it, where the launcher has found one of the two alive: of the failure.
        assert run.history("ending")[-1]["detail"] == "resize"
        assert re.findall(r"^workers (\d)$", run.log("worker:0"), re.M) == ["2", "1", "2"]
        # The sixth is the one in which it was killed.
        assert re.findall(r"^backups(.*)$", run.log("worker:0"), re.M)[:2] == ["", " backup-4 backup-5"]
    check(tmp_path / "result", expected)
