"""Which steps are slower inside of a loop than alone.

XLA's CPU backend brings convolutions into the layout of its fast kernels (`ConvCanonicalization`) in
the entry computation of a program only. In the body of a loop, a convolution in another layout keeps
its slow form: the derivative by the kernel takes 5 to 40 times as long as alone. Matrix products,
attention, reductions, pooling, sorting, scatters, random numbers and Fourier transforms were measured
likewise, and take the same time in both places. The library's own lowering of convolutions
(`_lowering/_convolution`) brings them into the fast layout in loops, too; what it leaves to XLA, such
as grouped and depthwise convolutions, is slow there.

Tests: tests/virtual/training/test_counts.py.
"""

from __future__ import annotations

from typing import Any

from jax.extend import core

from unisono._backend import wants_own_lowering
from unisono.training._jaxprs import Trace, equations, inner_programs

#: The operations by which replicas exchange values.
_EXCHANGES = frozenset(
    {"psum", "psum_invariant", "pmin", "pmax", "ppermute", "all_to_all", "all_gather", "all_gather_invariant"}
    | {"reduce_scatter"}
)


def may_loop(platform: str) -> bool | None:
    """Return whether steps may run together in a loop: None where it depends on the steps.

    How many there are is data of the program. On GPUs XLA reads the condition of such a loop on the host, and
    waits for the device in each iteration (`WhileThunk` in XLA's sources, November 2026): the host, which is
    many steps ahead where each is a program of its own, would not be ahead at all.

    Args:
        platform: of the devices: `"cpu"`, `"gpu"` or `"tpu"`.

    >>> may_loop("gpu"), may_loop("cpu")
    (False, None)
    """
    return False if platform == "gpu" else None


def is_slow_in_loop(jaxpr: Trace, platform: str) -> bool:
    """Return whether a program's steps should run one by one instead of in a loop.

    The answer depends on the program and the platform alone, so that all workers get the same.

    >>> import jax
    >>> def convolve(x, kernel):
    ...     return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", feature_group_count=2).sum()
    >>> images, kernel = jax.numpy.ones((2, 2, 8, 8)), jax.numpy.ones((4, 1, 3, 3))
    >>> is_slow_in_loop(jax.make_jaxpr(jax.grad(convolve, 1))(images, kernel), "cpu")
    True
    >>> is_slow_in_loop(jax.make_jaxpr(jax.numpy.sin)(1.0), "cpu")
    False
    """
    if platform != "cpu":
        return False
    return any(_is_slow(e) for e in equations(jaxpr) if e.primitive.name == "conv_general_dilated")


def exchanges_in_loop(jaxpr: Trace) -> bool:
    """Return whether replicas exchange values in the body of a loop, hence at each step."""
    loops = (e for e in equations(jaxpr) if e.primitive.name in ("while", "scan"))
    bodies = (program for loop in loops for program in inner_programs(loop))
    return any(e.primitive.name in _EXCHANGES for body in bodies for e in equations(body))


def _is_slow(convolution: core.JaxprEqn) -> bool:
    """Return whether nothing brings a convolution into the layout of the fast kernels."""
    from unisono._lowering._convolution import is_canonical, is_replaced

    lhs: Any
    rhs: Any
    lhs, rhs = (v.aval for v in convolution.invars)
    is_lowered = wants_own_lowering("UNISONO_CONVOLUTIONS") and is_replaced(lhs, rhs, convolution.params)
    return not (is_canonical(convolution.params["dimension_numbers"]) or is_lowered)
