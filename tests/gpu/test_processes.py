"""Training in processes of their own: the same bits twice, checkpoints between platforms, shared memory.

XLA_FLAGS are those of this process: on GPUs with deterministic operations, as `conftest.py` says.
"""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from tests import forked
from tests.support import PLATFORM, devices

PROGRAM = Path(__file__).parent / "programs" / "train.py"
LIMIT = 300.0
#: float32 sums in another order; Adam divides by roots near zero. On CPU devices they differ by 1e-6.
ON_MORE_DEVICES = {"rtol": 2e-4, "atol": 2e-5}
#: Between a CPU and a GPU each product may differ, too.
ON_ANOTHER_PLATFORM = {"rtol": 2e-3, "atol": 2e-4}


class Training:
    """The program of this folder, which runs until `result` is asked for."""

    def __init__(self, folder, names, epochs=2, save=None, restore=None, **variables):
        folder.mkdir(parents=True, exist_ok=True)
        self._out, self._log = folder / "found.npz", folder / "log"
        given = {"devices": names, "out": str(self._out), "epochs": epochs}
        given |= {"save": save and str(save), "restore": restore and str(restore)}
        command = [str(PROGRAM), json.dumps(given)]
        self._program = forked.Program(command, folder, self._log, env=forked.environment(**variables))

    def result(self):
        try:
            assert self._program.wait(LIMIT) == 0, self._log.read_text()[-6000:]
        finally:
            self._program.kill()
        with np.load(self._out) as found:
            return dict(found)


def trained(*args, **kwargs):
    return Training(*args, **kwargs).result()


def numbers(found, *kinds):
    return {name: value for name, value in found.items() if name.startswith(kinds or ("weight", "loss"))}


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys() != set()
    for name in ours:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


def assert_close(ours, theirs, tolerance):
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], err_msg=name, **tolerance)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one device computes, and the checkpoint that it wrote."""
    folder = tmp_path_factory.mktemp("alone")
    return trained(folder, devices(1), save=folder / "checkpoint"), folder / "checkpoint"


def test_two_runs_on_one_device_have_the_same_bits(tmp_path, alone):
    assert str(alone[0]["platform"]) == PLATFORM
    assert_same(numbers(trained(tmp_path, devices(1))), numbers(alone[0]))


def test_two_runs_on_two_devices_have_the_same_bits_and_nearly_those_of_one(tmp_path, alone):
    first, second = (trained(tmp_path / name, devices(2)) for name in ("first", "second"))
    assert_same(numbers(first), numbers(second))
    assert_close(numbers(first), numbers(alone[0]), ON_MORE_DEVICES)


def test_a_checkpoint_goes_to_a_cpu_and_back(tmp_path, alone):
    """What is restored has the saved bits; what follows is what the other platform would have computed."""
    saved, path = alone
    on_cpu = {"JAX_PLATFORMS": "cpu"}
    there = trained(tmp_path / "there", ["cpu:0"], epochs=1, restore=path, save=tmp_path / "c", **on_cpu)
    assert str(there["default"]) == "cpu"
    stayed = trained(tmp_path / "stayed", devices(1), epochs=1, restore=path)
    back = trained(tmp_path / "back", devices(1), epochs=1, restore=tmp_path / "c")
    weights = [name.removeprefix("weight ") for name in saved if name.startswith("weight")]
    for name in weights:
        np.testing.assert_array_equal(there[f"restored {name}"], saved[f"weight {name}"])
        np.testing.assert_array_equal(back[f"restored {name}"], there[f"weight {name}"])
    assert_close(numbers(there), numbers(stayed), ON_ANOTHER_PLATFORM)
    assert back["losses"][-1] < saved["losses"][0]


def test_two_processes_share_a_device(tmp_path, alone):
    """Each takes its part of the memory, and computes what one alone does."""
    memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_CLIENT_MEM_FRACTION": "0.3"}
    both = [Training(tmp_path / name, devices(1), **memory) for name in ("one", "other")]
    results = [training.result() for training in both]
    for found in results:
        assert_same(numbers(found), numbers(alone[0]))
    if PLATFORM == "gpu":
        whole = jax.local_devices(backend=PLATFORM)[0].memory_stats()["bytes_limit"] / 0.75
        assert all(0 < found["memory"][0] < 0.35 * whole for found in results)
