"""A model for which one process of bounded memory is too small, and two are not: its weights lie in parts,
on replicas of one device, or on the devices of one replica, which compute together.

CPUs have no memory of a device that XLA could bound: the system bounds that of each process instead.
"""

import re
import signal
from pathlib import Path

import numpy as np
import pytest

from tests.cluster._workers import Workers

SCRIPT = str(Path(__file__).with_name("limited_memory.py"))
#: Beyond what a process needs that trains a small model. Weights, gradients and two slots take 784 MiB.
LIMIT = 640 << 20
#: How a process ends whose native code is refused memory and does not say so.
CRASHES = {-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT}


def run(folder, layout, count, limit, *backups):
    """Return the workers' exit codes, their logs, and the losses that each has printed."""
    folder /= "-".join([layout, str(count), str(limit), *backups[1:]])
    folder.mkdir(parents=True)
    workers = Workers(folder, [SCRIPT, layout, str(limit), *backups], count)
    codes, text = workers.wait(480), workers.text()
    lines = re.findall(r"^losses ([-+.\de ]+)$", text, re.MULTILINE)
    return codes, text, [np.array(line.split(), float) for line in lines]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    """The losses of a process without a bound."""
    codes, text, (losses,) = run(tmp_path_factory.mktemp("unbounded"), "mirrored", 1, 0)
    assert codes == [0], text
    return losses


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [1, 2])
def test_a_copy_each_does_not_fit(tmp_path, count):
    """Neither in one process, nor in each of two that divide the rows."""
    codes, text, losses = run(tmp_path, "mirrored", count, LIMIT)
    assert all(codes)
    assert not losses
    said = re.search(r"RESOURCE_EXHAUSTED|MemoryError|bad_alloc|[Oo]ut of memory|Cannot allocate", text)
    assert said or CRASHES & set(codes), (codes, text)


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("layout", ["fully_sharded", "devices_per_replica"])
def test_two_train_what_is_too_large_for_one(tmp_path, wanted, layout):
    """And save it, and go on from there, though neither could hold the 588 MiB that lie in the file."""
    backups = tmp_path / "backups"
    codes, text, losses = run(tmp_path, layout, 2, LIMIT, str(backups), "2")
    assert codes == [0, 0], text
    (file,) = (backups / "backup-2").glob("*.safetensors")
    assert file.stat().st_size > 500 << 20
    codes, text, losses = run(tmp_path, layout, 2, LIMIT, str(backups), "4")
    assert codes == [0, 0], text
    assert [len(found) for found in losses] == [4, 4]
    for found in losses:
        np.testing.assert_allclose(found, wanted, rtol=2e-5)
