"""State that differs between replicas is found, and named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from unisono import ClusterError
from unisono._mesh import ReplicaMesh, resolve_devices
from unisono.cluster import _state_check
from unisono.cluster._state_check import StateCheck
from unisono.cluster.liveness._status import InFlight

REPLICAS = 3


@pytest.fixture(scope="module")
def mesh():
    return ReplicaMesh(resolve_devices([f"cpu:{i}" for i in range(REPLICAS)]))


def copies(mesh, values):
    """An array of all devices, of which each has its own values."""
    parts = [jax.device_put(v, d) for v, d in zip(values, mesh.devices, strict=True)]
    return jax.make_array_from_single_device_arrays(parts[0].shape, mesh.replicated, parts)


def same(mesh, value):
    return copies(mesh, [value] * REPLICAS)


STATE = [
    np.float32(0.1),
    np.arange(6, dtype=np.int32).reshape(2, 3),
    np.array([True, False]),
    np.linspace(-1, 1, 1000, dtype=np.float32),
    jnp.ones((3, 2), jnp.bfloat16),
    jnp.ones((2, 2), jnp.float8_e4m3fn),
    np.array([1 + 2j], np.complex64),
    np.array([np.nan, np.inf], np.float32),
    np.zeros((0, 3), np.float32),
    np.array([1, 2], np.uint32),
    np.array([1, 2**31 - 1], np.int32),
]
NAMES = [f"v{i}" for i in range(len(STATE))]


def test_what_is_equal_passes_and_one_element_is_enough_to_fail(mesh):
    check = StateCheck(mesh, InFlight())
    arrays = [same(mesh, value) for value in STATE]
    check.compare(NAMES, arrays)
    for number, value in enumerate(STATE):
        if not value.size:
            continue
        other = np.array(value)
        last = (np.array(other.shape) - 1).tolist()
        other[tuple(last)] = not other.flat[-1] if other.dtype == bool else other.flat[-1] - 1
        if value is STATE[7]:
            other[-1] = 0
        changed = [*arrays]
        changed[number] = copies(mesh, [value, value, jnp.asarray(other, value.dtype)])
        with pytest.raises(ClusterError, match=f"variable 'v{number}' of process 0 differs"):
            check.compare(NAMES, changed)
    # Elements that have changed their places are others.
    swapped = copies(mesh, [STATE[3], STATE[3][::-1].copy(), STATE[3]])
    with pytest.raises(ClusterError, match=r"by up to 2\. Set weights"):
        check.compare(["weights"], [swapped])
    check.compare(NAMES, arrays)


def test_a_number_is_named_before_the_weights_that_it_changes(mesh):
    weights = copies(mesh, [STATE[3], STATE[3] * 2, STATE[3]])
    rate = copies(mesh, [np.float32(0.1), np.float32(0.2), np.float32(0.1)])
    with pytest.raises(ClusterError, match=r"'learning_rate' .* up to 0.1, and so do 1 others"):
        StateCheck(mesh, InFlight()).compare(["kernel", "learning_rate"], [weights, rate])


def test_rounding_is_a_warning_once(mesh, caplog):
    check = StateCheck(mesh, InFlight())
    rounded = copies(mesh, [STATE[3], np.nextafter(STATE[3], np.float32(2)), STATE[3]])
    for _ in range(2):
        check.compare(["kernel"], [rounded])
    assert [r.message for r in caplog.records] == [
        "The workers' weights differ in rounding: their devices compute in different ways."
    ]


def test_checks_start_after_fixed_steps_and_are_read_where_the_next_one_starts(mesh, monkeypatch):
    monkeypatch.setattr(_state_check, "_EVERY", 8)
    check, seen = StateCheck(mesh, InFlight()), []
    good, bad = same(mesh, STATE[3]), copies(mesh, [STATE[3], STATE[3] + 1, STATE[3]])

    def state():
        seen.append(steps)
        return ["kernel"], [bad if steps >= 24 else good]

    for steps in range(1, 32):
        check.note_steps(steps, state)
    assert seen == [1, 2, 4, 8, 16, 24]
    steps = 32
    with pytest.raises(ClusterError, match="after about 24 steps, variable 'kernel'"):
        check.note_steps(steps, state)


def test_arrays_that_lie_on_one_device(mesh):
    alone = jax.device_put(STATE[3], mesh.devices[1])
    StateCheck(mesh, InFlight()).compare(["kernel"], [alone])


def test_nothing_to_compare(mesh):
    StateCheck(mesh, InFlight()).note_steps(1, lambda: ([], []))
