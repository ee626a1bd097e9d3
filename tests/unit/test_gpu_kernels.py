"""What `benchmarks/gpu_kernels.py` counts in a compiled program's text."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import gpu_kernels

TEXT = """\
HloModule jit_step, is_scheduled=true

%fused (p: f32[8]) -> f32[8] {
  ROOT %inside = f32[8]{0} add(%p, %p), metadata={op_name="jit(step)/adam/add"}
}

%tokens (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p.1 = (s32[], f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%p.1), index=1
  %gates = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/jvp(lstm)/add"}
  ROOT %t.1 = (s32[], f32[8]{0}) tuple(%x, %gates)
}

%steps (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p.2 = (s32[], f32[8]{0}) parameter(0)
  %data = f32[64]{0} get-tuple-element(%p.2), index=0
  %gather.1 = f32[8]{0} fusion(%data), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/gather"}
  %while.1 = (s32[], f32[8]{0}) while(%p.2), condition=%c, body=%tokens, backend_config={"known_trip_count":{"n":"3"}}
  %dot.2 = (f32[8]{0}, s8[4]{0}) custom-call(%gather.1), metadata={op_name="jit(step)/transpose(jvp(dense))/dot"}
  %update = f32[8]{0} fusion(%dot.2), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/adam/sub"}
  %copy.7 = f32[8]{0} copy(%update)
  ROOT %t.2 = (s32[], f32[8]{0}) tuple(%copy.7, %update)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p.3 = f32[8]{0} parameter(0)
  %once = f32[8]{0} negate(%p.3), metadata={op_name="jit(step)/neg"}
  %while.2 = (s32[], f32[8]{0}) while(%once), condition=%c, body=%steps, backend_config={"known_trip_count":{"n":"29"}}
  ROOT %result = f32[8]{0} get-tuple-element(%while.2), index=1
}
"""  # noqa: E501


def test_a_step_in_the_loop():
    counts = gpu_kernels.summary(TEXT, is_loop=True)
    assert counts["kernels"] == 1 + 3 + 1 + 1 + 1
    assert counts["parts"] == {"forward": 4, "backward": 1, "optimizer": 1, "copies": 1}
    # Rows are picked of 64 numbers; a product's room to compute in does not count.
    assert counts["bytes"] == 64 + 3 * 64 + 3 * 64


def test_a_whole_program_counts_each_loop_as_often_as_it_runs():
    counts = gpu_kernels.summary(TEXT, is_loop=False)
    assert counts["kernels"] == 1 + 29 * 7
    line = gpu_kernels.table([counts | {"model": "lstm", "program": "by hand"}]).splitlines()[2]
    assert [cell.strip() for cell in line.strip("|").split("|")][:3] == ["lstm", "by hand", "204"]
