"""A killed run goes on with another number of workers: positions in the data are global."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.cluster._workers import Workers

PROGRAM = str(Path(__file__).parent / "programs" / "resized.py")


def alone(*arguments):
    env = dict(os.environ, KERAS_BACKEND="jax")
    env.pop("PJRT_NPROC", None)
    command = [sys.executable, PROGRAM, *map(str, arguments)]
    return subprocess.run(command, env=env, check=False, timeout=150, capture_output=True, text=True)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 3)])
def test_another_number_of_workers_goes_on_with_equal_numbers(tmp_path, before, after):
    """Equal within rounding: sums over replicas are added in another order."""

    def run(count, folder, result, kill_at):
        if count == 1:
            done = alone(tmp_path / folder, tmp_path / result, kill_at)
            return done.returncode, done.stderr
        command = [PROGRAM, str(tmp_path / folder), str(tmp_path / result), str(kill_at)]
        workers = Workers(tmp_path, command, count)
        return workers.wait(150)[0], workers.text()

    assert run(1, "a", "expected", 0)[0] == 0
    assert run(before, "b", "none", 17)[0] == -9
    code, text = run(after, "b", "found", 0)
    assert code == 0, text
    expected, found = (json.loads((tmp_path / name).read_text()) for name in ("expected", "found"))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
