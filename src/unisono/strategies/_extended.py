"""`strategy.extended`: the less common operations of tf.distribute's `StrategyExtended`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras

from unisono._context import STRATEGY_MARK, Context, entered
from unisono._errors import InvalidArgumentError
from unisono._values import PerReplica, ReduceOp


class StrategyExtended:
    """Operations for library authors, under tf.distribute's names.

    Args:
        strategy: whose operations.
    """

    experimental_require_static_shapes = False

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy

    @property
    def worker_devices(self) -> tuple[Any, ...]:
        """The devices that compute."""
        return tuple(self._strategy.worker_devices)

    @property
    def parameter_devices(self) -> tuple[Any, ...]:
        """The devices on which variables live."""
        return tuple(self._strategy.parameter_devices)

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process writes checkpoints: of several workers the chief does."""
        return bool(self._strategy.is_chief)

    @property
    def should_save_summary(self) -> bool:
        """Whether this process writes summaries: of several workers the chief does."""
        return bool(self._strategy.is_chief)

    @property
    def experimental_should_init(self) -> bool:
        """Whether this process initializes variables: every process does."""
        return True

    @property
    def experimental_between_graph(self) -> bool:
        """Whether each worker runs the program by itself."""
        return bool(self._strategy.mesh.is_spread)

    def variable_created_in_scope(self, variable: Any) -> bool:
        """Return whether `variable` was created in this strategy's scope."""
        return getattr(variable, STRATEGY_MARK, None) is self._strategy

    @contextlib.contextmanager
    def colocate_vars_with(self, variable: Any) -> Iterator[None]:
        """Accepted for tf.distribute's signature: variables of a strategy lie together anyway.

        Raises:
            InvalidArgumentError: when `variable` is not one of this strategy.
        """
        if not self.variable_created_in_scope(variable):
            raise InvalidArgumentError(
                "`colocate_vars_with` needs a variable created in the strategy's scope. "
                f"Received: {variable!r}. Create it inside `with strategy.scope():`."
            )
        yield

    def reduce_to(self, reduce_op: ReduceOp | str, value: Any, destinations: Any, options: Any = None) -> Any:
        """Reduce element by element; the result is on all devices, so on `destinations` too."""
        if isinstance(destinations, list):
            raise InvalidArgumentError(
                "`destinations` must be a variable, a per-replica value or a device. "
                f"Received: {destinations!r}. Pass one of them, not a list."
            )
        return self._strategy.reduce(reduce_op, value, axis=None)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: Any = None,
    ) -> list[Any]:
        """`reduce_to` for each pair of a value and its destination."""
        return [self.reduce_to(reduce_op, value, where) for value, where in value_destination_pairs]

    def update(
        self,
        variable: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call `fn(variable, *args)` in update context; all copies get the same update.

        Args:
            variable: a variable of this strategy.
            fn: writes the variable.
            args: arguments; of a `PerReplica` the first replica's is taken.
            kwargs: keyword arguments, likewise.
            group: whether to return `fn`'s result, or a tuple with it for each device.
        """
        if not isinstance(variable, keras.Variable):
            raise InvalidArgumentError(
                f"`update` needs a variable. Received: {type(variable).__name__}. "
                "Pass a variable created in the strategy's scope."
            )
        own = [a.values[0] if isinstance(a, PerReplica) else a for a in args]
        own_kwargs = {k: a.values[0] if isinstance(a, PerReplica) else a for k, a in (kwargs or {}).items()}
        with entered(Context(self._strategy, is_update=True)):
            result = fn(variable, *own, **own_kwargs)
        return result if group else (result,) * len(self.worker_devices)

    def value_container(self, component: Any) -> Any:
        """Return the variable that holds `component`; here they are one object."""
        return component
