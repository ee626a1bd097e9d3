"""What `benchmarks/mock_gpus.py` reads in a compiled program's text, and its words where there is no GPU."""

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


def test_a_machine_without_a_gpu_is_told_so(tmp_path):
    command = [sys.executable, str(FOLDER / "mock_gpus.py")]
    env = {"PATH": str(tmp_path)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("mock_gpus.py: it needs one NVIDIA GPU. `nvidia-smi` was not found")
    assert len(done.stderr.splitlines()) == 1
