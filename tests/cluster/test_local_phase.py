"""Workers that train apart are preempted within a phase, and continue from it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.cluster._workers import Workers

PROGRAM = Path(__file__).parent / "programs" / "local_phase.py"


#: What runs one after another: a name, how many workers, and how many devices a replica has.
RUNS = [
    ("whole", 2, 1),
    ("preempted", 2, 1),
    ("resumed", 2, 1),
    ("resumed by three", 3, 1),
    ("resumed across four", 4, 2),
    ("preempted across four", 4, 2),
    ("resumed by two", 2, 1),
]


@pytest.mark.exhaustive
def test_workers_resume_while_something_is_sent(tmp_path):
    """Two with the same bits; three from what the two had learned.

    Two replicas with two workers each continue as two workers do, and these as they do.
    """
    found, backup = {}, None
    for name, count, size in RUNS:
        folder = tmp_path / name
        folder.mkdir()
        how = name.split()[0]
        if how == "resumed":
            # A copy: a backup is deleted at the end.
            shutil.copytree(backup, folder / "backup")
        result = folder / "result.json"
        command = [str(PROGRAM), str(folder / "backup"), how, str(result), str(size)]
        workers = Workers(folder, command, count)
        assert workers.wait(200) == [42 if how == "preempted" else 0] * count, workers.text()
        if how == "preempted":
            backup = folder / "backup"
        else:
            found[name] = json.loads(result.read_text())
    whole = found["whole"]
    assert found["resumed"] == whole
    assert found["resumed by three"][0]["loss"] == pytest.approx(whole[0]["loss"], rel=0.1)
    for name in ("resumed across four", "resumed by two"):
        assert found[name][0]["loss"] == pytest.approx(whole[0]["loss"], rel=1e-5)
        for ours, theirs in zip(found[name][1], whole[1], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
