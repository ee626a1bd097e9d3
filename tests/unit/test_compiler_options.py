"""Which options programs are compiled with, and what they change."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from unisono._lowering import _compiler_options
from unisono._lowering._compiler_options import compiler_options


def test_convolutions_are_not_handed_to_a_library():
    def convolve(x, kernel):
        return lax.conv_general_dilated(
            x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    lowered = jax.jit(convolve).lower(jnp.ones((8, 26, 26, 32)), jnp.ones((3, 3, 32, 32)))
    text = lowered.compile(compiler_options=compiler_options("cpu")).as_text()
    assert " convolution(" in text
    assert "ynn_fusion" not in text


def test_options_that_xla_does_not_know_are_left_out(monkeypatch):
    monkeypatch.setattr(_compiler_options, "_OPTIONS", {"xla_cpu_no_such_option": "1"})
    assert compiler_options("cpu") == {}


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_other_platforms_have_none(platform):
    assert compiler_options(platform) == {}


def test_reductions_and_products_are():
    x = jnp.ones((512, 256))
    for compute in (lambda x: (x * x).sum(0), lambda x: x @ x.T):
        text = jax.jit(compute).lower(x).compile(compiler_options=compiler_options("cpu")).as_text()
        assert "ynn_fusion" in text
