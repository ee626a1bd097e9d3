"""`MultiStepContext`: the outputs of the steps of `experimental_run_steps_on_iterator`.

Tests: tests/virtual/strategies/test_extended.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from unisono._context import current
from unisono._errors import ContextError, InvalidArgumentError
from unisono._types import PyTree, UserValue
from unisono._values import ReduceOp

if TYPE_CHECKING:
    from unisono._system._literals import ReduceOpName
    from unisono.strategies._base import Strategy


class MultiStepContext:
    """Collects outputs of the last of several steps."""

    #: tf.distribute's operation to run in a graph; the steps are done.
    run_op = None

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._outputs: dict[str, PyTree] = {}
        self._others: dict[str, UserValue] = {}

    @property
    def last_step_outputs(self) -> dict[str, PyTree]:
        """The last step's outputs by name; reduced where a `reduce_op` was given."""
        return self._outputs

    @property
    def non_tensor_outputs(self) -> dict[str, UserValue]:
        """Other objects by name."""
        return self._others

    def set_last_step_output(
        self, name: str, output: PyTree, reduce_op: ReduceOp | ReduceOpName | None = None
    ) -> None:
        """Keep an output of a step; that of the last step stays.

        Args:
            name: the key of `last_step_outputs` or `non_tensor_outputs`.
            output: what `strategy.run` returned, or any array.
            reduce_op: how to combine the replicas' values; None keeps them apart.

        Raises:
            ContextError: inside a replica, whose values exist while it is compiled only.
        """
        self._require_cross_replica("set_last_step_output")
        self._outputs[name] = (
            output if reduce_op is None else self._strategy.reduce(reduce_op, output, axis=None)
        )

    def set_non_tensor_output(self, name: str, output: object) -> None:
        """Keep another object.

        Args:
            name: the key of `last_step_outputs` or `non_tensor_outputs`.
            output: anything.

        Raises:
            ContextError: inside a replica.
        """
        self._require_cross_replica("set_non_tensor_output")
        self._others[name] = output

    def _require_cross_replica(self, what: str) -> None:
        context = current()
        if context is not None and context.replica is not None:
            raise ContextError(
                f"`{what}` must be called outside of the replicas. Received: a call inside the function "
                "given to `strategy.run`. Return the value from it, and keep what `run` returns:\n"
                f"    context.{what}('loss', strategy.run(step, args=(batch,)), 'MEAN')"
            )


def run_steps(
    strategy: Strategy,
    fn: Callable[[MultiStepContext, PyTree], object],
    iterator: Iterator[PyTree],
    iterations: int,
    start: object,
) -> MultiStepContext:
    """Call `fn(context, batch)` for the next batches of an iterator.

    Args:
        fn: a step in cross-replica context; it calls `strategy.run`.
        start: what `last_step_outputs` holds before the first step; a dictionary or None.
    """
    if iterations < 1:
        raise InvalidArgumentError(f"`iterations` must be 1 or more. Received: iterations={iterations}.")
    if start is not None and not isinstance(start, dict):
        raise InvalidArgumentError(
            f"`initial_loop_values` must be a dictionary by output names. Received: {start!r}."
        )
    context = MultiStepContext(strategy)
    context.last_step_outputs.update(start or {})
    with strategy.scope():
        for _ in range(iterations):
            fn(context, next(iterator))
    return context
