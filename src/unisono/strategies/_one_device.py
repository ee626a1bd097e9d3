"""`OneDeviceStrategy` and the default strategy: one replica, the specification of all others.

Tests: tests/virtual/strategies/test_contract.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import jax
import keras

from unisono._context import check_same_strategy, register_default_strategy
from unisono._mesh import ReplicaMesh, resolve_devices
from unisono._types import UserValue
from unisono.data._sharding import InputOptions
from unisono.strategies._base import hold
from unisono.strategies._replicated import ReplicatedStrategy
from unisono.training._binding import current_strategy, strategy_of
from unisono.training._step_form import has_stateful_step


class OneDeviceStrategy(ReplicatedStrategy):
    """Train on one device; results and dataset elements are plain arrays.

    Args:
        device: such as `"/gpu:0"`, `"cpu:0"`, or a `jax.Device`.

    >>> OneDeviceStrategy("cpu:0").num_replicas_in_sync
    1
    """

    def __init__(self, device: str | jax.Device) -> None:
        super().__init__(ReplicaMesh(resolve_devices([device])))


class DefaultStrategy(OneDeviceStrategy):
    """The strategy of code outside every scope: the same program, on JAX's first device."""

    _is_default = True

    def __init__(self) -> None:
        super().__init__(resolve_devices(None)[0])

    @contextlib.contextmanager
    def scope(self) -> Iterator[DefaultStrategy]:
        """Stay in the default context.

        Raises:
            ContextError: inside the scope of another strategy.
        """
        check_same_strategy(self)
        yield self

    def distribute_dataset(self, dataset: object, options: InputOptions | None = None) -> UserValue:
        """Return the dataset as it is."""
        return dataset

    # The base's alias would call the base's method.
    experimental_distribute_dataset = distribute_dataset


@functools.cache
def default_strategy() -> DefaultStrategy:
    """Return the one default strategy, which is created where it is first asked for."""
    return DefaultStrategy()


def hold_by_default(model: keras.Model) -> None:
    """Let the default strategy run a compiled model with a step in TensorFlow's form that no other one holds.

    Keras on JAX cannot run `train_step(self, data)`. In a strategy's scope, that strategy does.

    Args:
        model: any.

    >>> import keras
    >>> hold_by_default(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
    """
    if current_strategy() is None and strategy_of(model) is None and has_stateful_step(model):
        hold(model, default_strategy())


register_default_strategy(default_strategy)
