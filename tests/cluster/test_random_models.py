"""Random models and steps on two processes: the numbers of one device, or a line that says what differs."""

from pathlib import Path

import pytest

from tests.cluster._workers import Workers

PROGRAM = Path(__file__).parent / "programs" / "random_models.py"


@pytest.mark.parametrize(
    "seeds",
    [range(300, 304), pytest.param(range(304, 314), marks=pytest.mark.exhaustive)],
    ids=["few", "many"],
)
def test_plans_on_two_processes(tmp_path, seeds):
    workers = Workers(tmp_path, [str(PROGRAM), *map(str, seeds)])
    assert workers.wait(500) == [0, 0], workers.text()
