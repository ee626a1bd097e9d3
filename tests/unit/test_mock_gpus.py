"""What `benchmarks/mock_gpus.py` reads in a compiled program's text, and what it lowers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(FOLDER))

import mock_gpus  # noqa: E402

TEXT = """\
HloModule jit_step, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%x, %y)
}

ENTRY %main (p: f32[16,4]) -> (f32[16,4], f32[2,4]) {
  %p = f32[16,4]{1,0} parameter(0)
  %all-gather-start = (f32[2,4]{1,0}, f32[16,4]{1,0}) all-gather-start(%p), channel_id=1, dimensions={0}
  %fusion.1 = bf16[8]{0} fusion(%p), kind=kLoop, calls=%fused
  %all-gather-done = f32[16,4]{1,0:T(8)} all-gather-done(%all-gather-start)
  %all-reduce-start.2 = (f32[16,4]{1,0}, f32[]) all-reduce-start(%p, %c), channel_id=2, to_apply=%add
  %get = f32[2,4]{1,0} get-tuple-element(%t), index=0
  %all-reduce-done.2 = (f32[16,4]{1,0}, f32[]) all-reduce-done((f32[16,4]{1,0}, f32[]) %all-reduce-start.2)
  %reduce-scatter.3 = f32[2,4]{1,0} reduce-scatter(%all-gather-done), channel_id=3, to_apply=%add
  %named-all-reduce = f32[3]{0} custom-call(%get), custom_call_target="all-reduce"
  ROOT %tuple = (f32[16,4]{1,0}, f32[2,4]{1,0}) tuple(%all-gather-done, %reduce-scatter.3)
}
"""


def test_collectives_of_a_program():
    found = mock_gpus.Collectives.of(TEXT)
    assert found.counts == {"all-gather": 1, "all-reduce": 1, "reduce-scatter": 1}
    assert found.result_bytes == 4 * (64 + 65 + 8)
    assert (found.pairs, found.hidden) == (2, 1)
    values = {"gpus": 8, "layout": "sharded", "arguments": 2**20, "temporary": 2**21}
    line = mock_gpus.table([vars(found) | values]).splitlines()[2]
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        "8", "sharded", "1 all-gather, 1 all-reduce, 1 reduce-scatter", "0.0", "2, 1", "1.0", "2.0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "size"),
    [("f32[]", 4), ("(bf16[2,3]{1,0}, s8[5])", 17), ("pred[7]{0}", 7), ("f8e4m3fn[4]", 4), ("token[]", 0)],
)
def test_bytes_of_types(shape, size):
    assert mock_gpus.size_of(shape) == size


def test_without_the_compiler_for_cuda_it_says_what_to_install(monkeypatch):
    def fails(count):
        raise RuntimeError("unknown platform cuda\nand more")

    monkeypatch.setattr(mock_gpus, "topology_of", fails)
    with pytest.raises(SystemExit) as end:
        mock_gpus.check_plugin()
    text = str(end.value)
    assert "\n" not in text
    assert "unknown platform cuda Install what belongs to this JAX" in text


def test_a_program_is_lowered_for_cuda_with_virtual_devices(tmp_path):
    """As far as it goes without the compiler for CUDA; in a process that takes its devices for GPUs."""
    program = (
        "import mock_gpus, jax\n"
        "devices = mock_gpus.start(2)\n"
        "lowered = mock_gpus.lowered_for('mlp', 'mirrored', devices, 'cuda')\n"
        "text = lowered.as_text()\n"
        "print(text.count('stablehlo.all_reduce'), text.count('collective_permute'))\n"
        "text = mock_gpus.lowered_for('mlp', 'mirrored', devices, 'cuda', 2).as_text()\n"
        "print(text.count('{\\\"model\\\"}'))\n"
    )
    env = os.environ | {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "PJRT_NPROC": "8"}
    env["PYTHONPATH"] = os.pathsep.join([str(FOLDER), env.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    reduces, permutes, parts = map(int, done.stdout.split())
    # Not the exchange of partners that is faster on CPUs.
    assert reduces >= 1
    assert permutes == 0
    # Weights in parts on the devices of a replica.
    assert parts > 0
