"""Install the lowerings of this package in JAX, for the whole process.

Each is loaded by the first program that has its operation.

Tests: tests/virtual/test_pooling.py, tests/virtual/test_products.py, tests/virtual/test_convolution.py.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from jax.extend.core import Primitive, primitives
from jax.interpreters import mlir

from unisono._backend import wants_own_lowering

#: Variables of the environment, which keep XLA's own code where they are `xla`; the operation of each, and
#: the module with its `replacement`, and with `is_replaced` where that does not always apply.
_SWITCHES: dict[str, tuple[Primitive, str]] = {
    "UNISONO_CONVOLUTIONS": (primitives.conv_general_dilated_p, "_convolution"),
    "UNISONO_MAX_POOLING": (primitives.select_and_scatter_add_p, "_pooling"),
    "UNISONO_PRODUCTS": (primitives.dot_general_p, "_products"),
}


@functools.cache
def install_lowerings() -> None:
    """Install all lowerings that the environment does not forbid, once per process."""
    for switch, (primitive, module) in _SWITCHES.items():
        if wants_own_lowering(switch):
            _register(primitive, module)


def _register(primitive: Primitive, module: str) -> None:
    """Lower an operation on CPUs by a module's function where it applies, and else by JAX's own rule."""
    # There is no public way to the rule that JAX has.
    own = mlir._platform_specific_lowerings["cpu"].get(primitive)

    def lower(ctx: mlir.LoweringRuleContext, *operands: object, **parameters: Any) -> Any:
        ours = importlib.import_module(f"unisono._lowering.{module}")
        applies = getattr(ours, "is_replaced", None)
        if own and applies and (_is_partitioned(ctx) or not applies(*ctx.avals_in, parameters)):
            return own.rule(ctx, *operands, **parameters)
        return mlir.lower_fun(ours.replacement, multiple_results=False)(ctx, *operands, **parameters)

    mlir.register_lowering(primitive, lower, platform="cpu")


def _is_partitioned(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether XLA distributes the operands: merging a dimension that it divides could make it gather them."""
    context = ctx.module_context.axis_context
    if isinstance(context, mlir.SPMDAxisContext):
        return context.manual_axes != frozenset(context.mesh.axis_names)
    return isinstance(context, mlir.ShardingContext) and context.num_devices != 1
