"""Workers that disappear, or do something else, in loops outside of the scope."""

import json
from pathlib import Path

import pytest

from tests.cluster._workers import Workers

PROGRAM = str(Path(__file__).parent / "programs" / "absent.py")
pytestmark = pytest.mark.timeout(600)


def codes_of(workers):
    """The exit codes, also of those that end long after another."""
    try:
        return [process.wait(250) for process in workers.processes]
    finally:
        workers.kill()


@pytest.mark.parametrize("victim", [0, 1])
def test_every_way_to_the_others_names_the_one_that_was_killed(tmp_path, victim):
    """Also worker 0, with which JAX' own service dies: without a relay JAX ends the others in C++."""
    workers = Workers(tmp_path, [PROGRAM, str(tmp_path), str(victim)])
    codes = codes_of(workers)
    assert (codes[victim], codes[1 - victim]) == (-9, 1), workers.text()
    # A custom loop begins with the first worker's values.
    assert (tmp_path / "weights-0").read_text() == (tmp_path / "weights-1").read_text()
    found = json.loads((tmp_path / "found.json").read_text())
    named = f"worker {1 - victim} of 2 lost worker {victim} at 127.0.0.1:"
    assert set(found) == {"function", "run", "reduce", "gather", "iteration", "scope", "evaluate"}
    for kind, text in found.values():
        assert kind == "ClusterError"
        assert text.startswith(
            "All workers must run until the last collective has finished. Received: " + named
        )
        assert "its process has ended" in text
    log = workers.logs[1 - victim].read_text().splitlines()
    last = [line for line in log if line.startswith("unisono.ClusterError: ")][-1]
    assert "All workers must run until the last collective has finished." in last
    assert named in last


def test_rows_that_differ_are_an_error_on_all_workers(tmp_path):
    """In `train_on_batch`, of which no call is a message of its own between hosts."""
    workers = Workers(tmp_path, [PROGRAM, str(tmp_path), "1", "unequal"])
    assert codes_of(workers) == [1, 1], workers.text()
    for log in workers.logs:
        assert (
            "ClusterError: All workers must take the same steps, on batches of the same shapes. Received: "
            "step 4 is 'train on (8, 6), (8, 1)' on process 0, but 'train on (6, 6), (6, 1)' on process 1."
        ) in log.read_text()
    assert [(tmp_path / f"collectives-{i}").read_text() for i in range(2)] == ["0", "0"]
