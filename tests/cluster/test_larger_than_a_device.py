"""A model for which one process of bounded memory is too small, and two are not, with weights in parts.

CPUs have no memory of a device that XLA could bound: the system bounds that of each process instead.
"""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.cluster._workers import Workers

SCRIPT = str(Path(__file__).with_name("limited_memory.py"))
#: Beyond what a process needs that trains a small model. Weights, gradients and two slots take 784 MiB.
LIMIT = 640 << 20


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
def test_two_train_what_is_too_large_for_one(tmp_path):
    """And save it, and go on from there, though neither could hold the 588 MiB that lie in the file."""

    def run(layout, count, limit, *backups):
        folder = tmp_path / "-".join([layout, str(count), str(limit), *backups[1:]])
        folder.mkdir()
        workers = Workers(folder, [SCRIPT, layout, str(limit), *backups], count)
        codes, text = workers.wait(480), workers.text()
        lines = re.findall(r"^losses ([-+.\de ]+)$", text, re.MULTILINE)
        return codes, text, [np.array(line.split(), float) for line in lines]

    codes, text, (wanted,) = run("mirrored", 1, 0)
    assert codes == [0], text
    codes, text, losses = run("mirrored", 1, LIMIT)
    assert codes != [0]
    assert not losses
    assert re.search(r"RESOURCE_EXHAUSTED|MemoryError|bad_alloc|[Oo]ut of memory|Cannot allocate", text), text
    backups = tmp_path / "backups"
    codes, text, losses = run("fully_sharded", 2, LIMIT, str(backups), "2")
    assert codes == [0, 0], text
    (file,) = (backups / "backup-2").glob("*.safetensors")
    assert file.stat().st_size > 500 << 20
    codes, text, losses = run("fully_sharded", 2, LIMIT, str(backups), "4")
    assert codes == [0, 0], text
    assert [len(found) for found in losses] == [4, 4]
    for found in losses:
        np.testing.assert_allclose(found, wanted, rtol=2e-5)
