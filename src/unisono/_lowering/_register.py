"""Register a replacement of an operation on CPUs, beside the rule that JAX has for it.

Tests: tests/virtual/test_products.py, tests/virtual/test_convolution.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import mlir


def register(primitive: Primitive, is_replaced: Callable[..., bool], replacement: Callable[..., Any]) -> None:
    """Lower an operation of two operands by a function where it applies, and else by JAX's own rule.

    Args:
        is_replaced: whether the function applies, from the shapes of the operands and the parameters by name.
        replacement: from the operands and the parameters by name to the result; traced.
    """
    # There is no public way to the rule that JAX has.
    own = mlir._platform_specific_lowerings["cpu"][primitive].rule

    def lower(ctx: mlir.LoweringRuleContext, *operands: object, **parameters: Any) -> Any:
        if _is_partitioned(ctx) or not is_replaced(*ctx.avals_in, parameters):
            return own(ctx, *operands, **parameters)
        return mlir.lower_fun(replacement, multiple_results=False)(ctx, *operands, **parameters)

    mlir.register_lowering(primitive, lower, platform="cpu")


def _is_partitioned(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether XLA distributes the operands: merging a dimension that it divides could make it gather them."""
    context = ctx.module_context.axis_context
    if isinstance(context, mlir.SPMDAxisContext):
        return context.manual_axes != frozenset(context.mesh.axis_names)
    return isinstance(context, mlir.ShardingContext) and context.num_devices != 1
