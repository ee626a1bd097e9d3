import os
import subprocess
import sys
from typing import NamedTuple

import jax
import numpy as np
import pytest
from tests import forked

import unisono
from unisono import _mesh
from unisono._lowering import _xla_flags
from unisono._mesh import AXIS, ReplicaMesh, resolve_devices

CPU = jax.devices("cpu")


@pytest.mark.parametrize(
    "name",
    [
        "cpu:1", "CPU:1", "/cpu:1", "/CPU:1", "/device:CPU:1", "device:cpu:1",
        "/job:localhost/replica:0/task:0/device:CPU:1",
    ],
)  # fmt: skip
def test_names_of_the_seeds(name):
    assert resolve_devices([name]) == (CPU[1],)


def test_order_is_kept_and_devices_pass():
    assert resolve_devices(["cpu:2", CPU[0]]) == (CPU[2], CPU[0])
    assert resolve_devices(None) == tuple(CPU)
    assert resolve_devices(None, num=3) == tuple(CPU[:3])


@pytest.mark.parametrize(
    ("devices", "num", "message"),
    [
        (["/gpu:0"], None, r"Received: 'gpu:0'. There are: cpu:0, .*cpu:7"),
        (["cpu:99"], None, r"Received: 'cpu:99'.*jax_num_cpu_devices"),
        (["cpu:0", "/CPU:0"], None, "twice"),
        ([], None, r"Received: devices=\[\]"),
        (["gpu0"], None, "named like"),
        ("cpu:0", None, "must be a list"),
        (None, 9, "num_gpus=9"),
        (["cpu:0"], 1, "either"),
        (2, None, r"Received: devices=2. For 2 devices write .*num_gpus=2"),
        (0, None, "must be a list of names"),
        ({"cpu:0", "cpu:1"}, None, "in replica order"),
        (CPU[0], None, "must be a list"),
        ([0, 1], None, r"Received: 0 in devices=\[0, 1\]"),
    ],
)
def test_errors_name_the_first_offender(devices, num, message):
    with pytest.raises(ValueError, match=message):
        resolve_devices(devices, num)


def test_mesh():
    mesh = ReplicaMesh(tuple(CPU[:2]))
    assert (mesh.num_replicas, mesh.platform, mesh.mesh.axis_names) == (2, "cpu", (AXIS,))
    assert mesh == ReplicaMesh(tuple(CPU[:2]))
    assert hash(mesh) == hash(ReplicaMesh(tuple(CPU[:2])))


#: Each runs in its own process, where JAX has not started; it is imported but for the one about imports.
SCRIPTS = {
    "creates virtual devices": (
        "import unisono; s = unisono.MirroredStrategy(['cpu:0', 'cpu:2'])\n"
        "import os, jax; print(s.num_replicas_in_sync, len(jax.devices()), os.environ['PJRT_NPROC'])",
        "2 3 6",
    ),
    "keeps a larger number": (
        "import jax; jax.config.update('jax_num_cpu_devices', 4); import unisono\n"
        "unisono.MirroredStrategy(['cpu:0', 'cpu:1']); print(len(jax.devices()))",
        "4",
    ),
    "creates a device that is no replica's": (
        "import unisono, os, jax; from unisono import _mesh; _mesh.make_cpu_devices(2, with_spare=True)\n"
        "try: unisono.MirroredStrategy(['cpu:2'])\n"
        "except ValueError as e: print(e)\n"
        "print(unisono.MirroredStrategy().num_replicas_in_sync, len(_mesh.devices_of_all()),\n"
        "  _mesh.exchange_devices() == (jax.devices()[2],), _mesh.list_devices(), os.environ['PJRT_NPROC'])",
        "2 2 True cpu:0, cpu:1 6",
    ),
    "says what to do when JAX runs": (
        "import jax; jax.devices(); import unisono\n"
        "try: unisono.MirroredStrategy(['cpu:0', 'cpu:1'])\n"
        "except ValueError as e: print(e)",
        "Create the strategy before JAX computes anything",
    ),
    "reserves threads where it is imported before JAX starts": (
        "import os; os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=64'\n"
        "import jax, unisono; jax.devices(); print(unisono.MirroredStrategy().num_replicas_in_sync)\n",
        "64",
    ),
    "refuses a thread pool that would hang": (
        "import jax; jax.config.update('jax_num_cpu_devices', 64); jax.devices(); import unisono\n"
        "try: unisono.MirroredStrategy()\n"
        "except RuntimeError as e: print(e)",
        "set PJRT_NPROC=128",
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_before_and_after_jax_starts(name, tmp_path):
    code, expected = SCRIPTS[name]
    (tmp_path / "program.py").write_text(code)
    env = {k: v for k, v in forked.environment().items() if k != "XLA_FLAGS"}
    if "where it is imported" in name:
        command = [sys.executable, "program.py"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env)
    else:
        done = forked.run(["program.py"], tmp_path, env=env)
    assert expected in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("runs", "before", "after"),
    [
        (False, None, "--xla_backend_extra_options=xla_cpu_use_multi_output_fusion"),
        (False, "--a=1", "--a=1 --xla_backend_extra_options=xla_cpu_use_multi_output_fusion"),
        (False, "--xla_backend_extra_options=b", "--xla_backend_extra_options=b"),
        (True, None, None),
    ],
)
def test_results_are_fused_unless_jax_runs_or_the_user_has_other_options(monkeypatch, runs, before, after):
    monkeypatch.setattr(_xla_flags, "jax_runs", lambda: runs)
    # So that it is as before afterwards.
    monkeypatch.setenv("XLA_FLAGS", before or "")
    if before is None:
        monkeypatch.delenv("XLA_FLAGS")
    _xla_flags.fuse_results()
    assert os.environ.get("XLA_FLAGS") == after


class Device(NamedTuple):
    """A stand-in for a device that is not here."""

    platform: str
    device_kind: str


def test_replicas_are_on_devices_of_one_platform():
    gpu, other = Device("gpu", "NVIDIA A100"), Device("cpu", "cpu")
    with pytest.raises(unisono.DeviceError, match=r"one platform.*Received: Device.*\(gpu\) and .*\(cpu\)"):
        _mesh.check_alike([gpu, gpu, other])


def test_gpus_of_several_kinds_are_named(caplog):
    small, large = Device("gpu", "NVIDIA T4"), Device("gpu", "NVIDIA A100")
    _mesh.check_alike([small, small])
    assert not caplog.records
    _mesh.check_alike([small, large, large])
    assert "1 x NVIDIA T4, 2 x NVIDIA A100" in caplog.text


def test_xla_has_the_option_that_fuses_results():
    code = (
        "from unisono._lowering import _xla_flags; _xla_flags.fuse_results(); import jax; "
        "compiled = jax.jit(lambda x, y: (x * 2 + y, x - y)).lower(1.0, 2.0).compile(); "
        "print(compiled.as_text().count(' fusion('))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("kind", ["float32", "int8", "bool", "float16"])
def test_arrays_of_the_host_are_placed_without_a_call_of_device_put(count, kind, monkeypatch):
    """`jax.device_put` takes three times as long for the same arrays; it is left for all other values."""
    mesh = ReplicaMesh(tuple(CPU[:count]))
    given = np.arange(24).reshape(8, 3).astype(kind)
    expected = [jax.device_put(given, s) for s in (mesh.sharded, mesh.replicated)]
    called, put = [], jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda *args: called.append(args) or put(*args))
    for sharding, like in zip((mesh.sharded, mesh.replicated), expected, strict=True):
        placed = mesh.put(given, sharding)
        assert (placed.aval, placed.sharding, placed.committed) == (like.aval, like.sharding, like.committed)
        np.testing.assert_array_equal(placed, given)
    assert not called
    assert mesh.put(np.float64([1.5, 2.5, 3.5, 4.5]), mesh.sharded).dtype == "float32"
    assert mesh.put({"a": given}, mesh.replicated)["a"].shape == (8, 3)
    assert len(called) == 2


def test_rows_that_do_not_divide_are_not_placed():
    mesh = ReplicaMesh(tuple(CPU[:2]))
    with pytest.raises(ValueError, match="divid"):
        mesh.put(np.zeros((3, 2), "float32"), mesh.sharded)
