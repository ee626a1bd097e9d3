"""What a program computes, and how fast a device may be."""

import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import unisono
from unisono._errors import InvalidArgumentError
from unisono.callbacks import _timer as timer
from unisono.training.groups import _peak_flops, _step_work
from unisono.training.groups._batch_placement import BatchGroup
from unisono.training.groups._batch_policy import Mode
from unisono.training.groups._peak_flops import peak_flops_of
from unisono.training.groups._step_work import StepWork, WorkTotals, flops_of


def flops(function, *shapes):
    return flops_of(jax.make_jaxpr(function)(*(jnp.ones(shape) for shape in shapes)))


@pytest.mark.parametrize(
    ("kind", "dtype", "tera"),
    [
        ("NVIDIA H200", "bfloat16", 989),
        ("NVIDIA H200 NVL", "bfloat16", 835),
        ("NVIDIA H100 80GB HBM3", "float32", 494),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("Tesla V100-SXM2-16GB", "float16", 125),
        ("Tesla V100-PCIE-32GB", "float16", 112),
        ("Tesla T4", "float32", 8.1),
        ("NVIDIA L4", "bfloat16", 121),
        ("NVIDIA B200", "bfloat16", 2250),
        ("TPU v4", "bfloat16", 275),
        ("TPU v5 lite", "bfloat16", 197),
        ("TPU v5", "bfloat16", 459),
        ("TPU v5p", "bfloat16", 459),
        ("TPU v6 lite", "bfloat16", 918),
    ],
)
def test_peaks_by_the_names_of_jax(kind, dtype, tera):
    assert peak_flops_of(kind, dtype) == tera * 1e12


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("cpu", "float32"),
        ("NVIDIA L40S", "bfloat16"),
        ("Tesla T4", "bfloat16"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16"),
        ("TPU v7", "bfloat16"),
    ],
)
def test_no_share_of_what_is_not_known(kind, dtype):
    assert peak_flops_of(kind, dtype) is None


def test_users_add_devices(monkeypatch):
    monkeypatch.setattr(_peak_flops, "_PEAKS", {})
    unisono.callbacks.set_peak_flops("Abacus", "bfloat16", 5)
    assert peak_flops_of("Abacus 9", "bfloat16") == 5.0
    assert peak_flops_of("Abacus 9", "float32") is None
    for wrong in (0, -1.0, "989e12", True):
        with pytest.raises(InvalidArgumentError, match="989e12 for 989"):
            unisono.callbacks.set_peak_flops("Abacus", "bfloat16", wrong)
        with pytest.raises(InvalidArgumentError, match="989e12 for 989"):
            unisono.callbacks.StepTimer(peak_flops=wrong)


def test_products_of_matrices_and_of_batches_of_them():
    assert flops(lambda a, b: a @ b, (2, 3), (3, 5)) == 2 * 2 * 3 * 5
    assert flops(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (7, 2, 3), (7, 3, 5)) == 7 * 60


def test_a_convolution_and_its_derivatives():
    def convolve(x, k):
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=layout).sum()

    shapes = (2, 8, 8, 4), (3, 3, 4, 6)
    one = 2 * (2 * 8 * 8 * 6) * (3 * 3 * 4)
    assert flops(convolve, *shapes) == one
    # The sum needs no convolution for its derivative; the derivative by image and kernel has one each.
    assert flops(jax.grad(convolve, (0, 1)), *shapes) == pytest.approx(2 * one)


def test_a_loop_of_known_length_counts_as_often_as_it_runs():
    def several(x):
        return jax.lax.scan(lambda x, _: (x @ x, None), x, None, length=5)[0]

    def as_data(n, x):
        return jax.lax.fori_loop(0, n, lambda _, x: x @ x, x)

    assert flops(several, (3, 3)) == 5 * 54
    assert flops_of(jax.make_jaxpr(as_data)(4, jnp.ones((3, 3)))) == 54


def test_a_branch_counts_as_the_larger_one():
    def either(p, x):
        return jax.lax.cond(p[0] > 0, lambda: x @ x @ x, lambda: x @ x)

    assert flops(either, (1,), (3, 3)) == 2 * 54


def test_what_nothing_needs_is_not_computed():
    def dry(x):
        jnp.sum(x @ x)
        return x + 1

    assert flops(dry, (3, 3)) == 0


def test_joined_calls_and_remat():
    assert flops(lambda x: jax.jit(lambda y: y @ y)(x), (3, 3)) == 54

    # What is computed again counts again: the device does it.
    def loss(x):
        return jnp.sum(jnp.sin(x @ x))

    assert flops(jax.value_and_grad(jax.checkpoint(loss)), (3, 3)) == 4 * 54
    assert flops(jax.value_and_grad(loss), (3, 3)) == 3 * 54


@pytest.mark.parametrize(
    ("first", "tokens"),
    [
        (np.zeros((4, 8), "int32"), 32),
        (np.zeros((4, 8), "uint16"), 32),
        (np.zeros((4, 8), "uint8"), 0),
        (np.zeros((4, 8), "float32"), 0),
        (np.zeros((4,), "int32"), 0),
        (np.zeros((4, 8, 2), "int32"), 0),
    ],
)
def test_which_data_have_tokens(first, tokens):
    assert _step_work._size_of((first, np.zeros(4))) == (4, tokens)
    assert _step_work._size_of(({"a": first}, None, None)) == (4, tokens)


def test_what_an_epoch_shows():
    work = WorkTotals(64, 0, 4e12)
    assert timer.speed_of(work, 2.0, None) == {"tflop_per_s": 2.0}
    assert timer.speed_of(work, 2.0, 8e12)["mfu"] == 0.25
    assert timer.speed_of(WorkTotals(), 0.0, 8e12) == {"tflop_per_s": 0.0, "mfu": 0.0}
    assert math.isnan(timer.speed_of(WorkTotals(1, 0, math.nan), 1.0, 1.0)["mfu"])


@pytest.mark.parametrize(("mode", "share"), [(Mode.SPLIT, 2), (Mode.JOINED, 8)])
def test_operations_are_those_of_one_device(mode, share):
    """Four replicas of two devices, which share a replica's operations."""
    mesh = types.SimpleNamespace(num_replicas=4, devices_per_replica=2, local_devices=())
    work, batch = StepWork(mesh, "float32"), np.zeros((8, 3), "float32")
    group = BatchGroup(batch, mode, 8)
    work.learn(group, 1, lambda: jax.make_jaxpr(lambda x: x @ x)(np.zeros((3, 3), "float32")))
    work.count(group)
    assert work.done.flops == 54 / share
