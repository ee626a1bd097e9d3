"""Exported programs by digest."""

import numpy as np
import pytest
from tests import exported_updates as exported

from unisono import InvalidArgumentError
from unisono.parameter_server.server._programs import ProgramStore, UnknownProgramError, digest_of, to_device


def test_a_program_is_kept_once_by_its_digest():
    programs, blob = ProgramStore(), exported.momentum_blob((2,))
    digest = programs.add(blob)
    assert digest == digest_of(blob)
    first = programs[digest]
    assert programs.add(blob) == digest
    assert programs[digest] is first
    assert list(programs) == [digest]
    with pytest.raises(UnknownProgramError, match="Send it with PROGRAM"):
        programs["0" * 32]


@pytest.mark.parametrize("cut", [0, 3, 100, -20])
def test_bytes_that_are_no_program(cut):
    with pytest.raises(InvalidArgumentError, match=r"what `jax.export` has written. Received: \d+ bytes"):
        ProgramStore().add(exported.momentum_blob((2,))[:cut])


def test_an_update_returns_what_it_gets():
    one, programs = [exported.spec(2)], ProgramStore()
    with pytest.raises(InvalidArgumentError, match="must return new values and slots"):
        programs.add(exported.blob(lambda v, s, g: ([v[0][:1]], s), one, one, one))
    with pytest.raises(InvalidArgumentError, match="must return new values and slots"):
        programs.add(exported.blob(lambda v, s, g: v, one, one, one))
    with pytest.raises(InvalidArgumentError, match="exported for CPUs"):
        programs.add(exported.blob(lambda x: x, one[0], platforms=["tpu"]))
    # An initializer is no update.
    assert programs[programs.add(exported.ramp_blob(2, 3))].counts is None


@pytest.mark.parametrize(("platforms", "device"), [(["cpu"], "cpu"), (["cpu", "cuda"], None)])
def test_beside_a_gpu_programs_for_cpus_run_there(monkeypatch, platforms, device):
    monkeypatch.setattr(exported.jax.export, "default_export_platform", lambda: "cuda")
    programs = ProgramStore()
    program = programs[programs.add(exported.blob(lambda x: 2 * x, exported.spec(2), platforms=platforms))]
    assert getattr(program.device, "platform", None) == device
    assert np.asarray(program(np.ones(2, "f4"))).tolist() == [2.0, 2.0]


def test_programs_of_64_bits():
    wide = [exported.spec(2, dtype="float64")]
    with exported.jax.enable_x64(True):
        blob = exported.blob(lambda v, s, g: ([v[0] + g[0] / 3], s), wide, [], wide)
    programs = ProgramStore()
    ((value,), _) = programs[programs.add(blob)]([to_device(np.zeros(2))], [], [np.ones(2)])
    assert np.asarray(value).tolist() == [1 / 3, 1 / 3]


def test_what_jax_owns_is_a_copy():
    memory = np.zeros(1 << 16, "float32")
    copied = to_device(memory)
    memory[:] = 1
    assert not np.asarray(copied).any()
