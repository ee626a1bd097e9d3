"""Workers that train apart are preempted within a phase, and continue from it."""

import json
import shutil
from pathlib import Path

import pytest

from tests.cluster._workers import Workers

PROGRAM = Path(__file__).parent / "programs" / "local_phase.py"


@pytest.mark.exhaustive
def test_workers_resume_while_something_is_sent(tmp_path):
    """Two with the same bits; three from what the two had learned."""
    found = {}
    for name, count in (("whole", 2), ("preempted", 2), ("resumed", 2), ("more", 3)):
        # Another number begins with the same backup, which is deleted at the end.
        folder = tmp_path / ("others" if name == "more" else "backup")
        if name == "resumed":
            shutil.copytree(tmp_path / "backup", tmp_path / "others")
        result = tmp_path / f"{name}.json"
        (tmp_path / name).mkdir()
        workers = Workers(tmp_path / name, [str(PROGRAM), str(folder), name, str(result)], count)
        codes = workers.wait(200)
        assert codes == [42 if name == "preempted" else 0] * count, workers.text()
        if name != "preempted":
            found[name] = json.loads(result.read_text())
    assert found["resumed"] == found["whole"]
    assert found["more"][0]["loss"] == pytest.approx(found["whole"][0]["loss"], rel=0.1)
