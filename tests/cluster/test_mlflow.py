"""MLflow's own package writes the chief's run alone, into a real store."""

import importlib.util
from pathlib import Path

import pytest

from tests.cluster._workers import Workers
from tests.support import LIMIT

PROGRAM = str(Path(__file__).parent / "programs" / "mlflow_store.py")

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="needs mlflow or mlflow-skinny"),
]


def test_the_chief_alone_has_a_run(tmp_path):
    workers = Workers(tmp_path, [PROGRAM, str(tmp_path)])
    assert workers.wait(LIMIT) == [0, 0], workers.text()
    assert workers.text().count("same losses True") == 2
    for name in ("callback", "autolog"):
        (losses,) = tmp_path.glob(f"{name}-0/*/*/metrics/loss")
        assert len(losses.read_text().splitlines()) == 2
        assert not [*tmp_path.glob(f"{name}-1/*/*/metrics/*")]
        assert not [*tmp_path.glob(f"{name}-1/*/*/meta.yaml")]
