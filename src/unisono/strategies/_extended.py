"""`strategy.extended`: the less common operations of tf.distribute's `StrategyExtended`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._context import Context, creator_of, current, entered
from unisono._errors import ClusterError, InvalidArgumentError
from unisono._types import ArrayLike, PyTree, UserValue
from unisono._values import DistributedValues, Mirrored, PerReplica, ReduceOp
from unisono.collectives._cross_device import CommunicationOptions, Destinations, check_destinations
from unisono.collectives._process_group import ProcessGroup
from unisono.step.variables._merge_rules import Merge, kind_of, merge_rule
from unisono.strategies._steps import MultiStepContext, run_steps

if TYPE_CHECKING:
    from unisono._system._literals import ReduceOpName
    from unisono.strategies._base import Strategy

T = TypeVar("T")


class StrategyExtended:
    """Operations for library authors, under tf.distribute's names.

    `experimental_require_static_shapes` is False: a step is compiled for each shape that it meets.

    Args:
        strategy: whose operations.

    >>> import unisono
    >>> strategy = unisono.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> len(strategy.extended.worker_devices)
    2
    """

    experimental_require_static_shapes = False

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    @property
    def worker_devices(self) -> tuple[jax.Device, ...]:
        """The devices that compute."""
        return self._strategy.worker_devices

    @property
    def parameter_devices(self) -> tuple[jax.Device, ...]:
        """The devices on which variables live."""
        return self._strategy.parameter_devices

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process writes checkpoints: of several workers the chief does."""
        return self._strategy.is_chief

    @property
    def should_save_summary(self) -> bool:
        """Whether this process writes summaries: of several workers the chief does."""
        return self._strategy.is_chief

    @property
    def experimental_should_init(self) -> bool:
        """Whether this process initializes variables: every process does."""
        return True

    @property
    def experimental_between_graph(self) -> bool:
        """Whether each worker runs the program by itself."""
        return self._strategy.process_group.size > 1

    def variable_created_in_scope(self, variable: keras.Variable) -> bool:
        """Return whether `variable` was created in this strategy's scope."""
        return creator_of(variable) is self._strategy

    @contextlib.contextmanager
    def colocate_vars_with(self, variable: keras.Variable) -> Iterator[None]:
        """Accepted for tf.distribute's signature: variables of a strategy lie together anyway.

        Raises:
            InvalidArgumentError: when `variable` is not one of this strategy.
        """
        # A part of a divided variable names the whole one.
        if not self.variable_created_in_scope(getattr(variable, "whole", variable)):
            raise InvalidArgumentError(
                "`colocate_vars_with` needs a variable created in the strategy's scope. "
                f"Received: {variable!r}. Create it inside `with strategy.scope():`."
            )
        yield

    def reduce_to(
        self,
        reduce_op: ReduceOp | ReduceOpName,
        value: PyTree,
        destinations: Destinations,
        options: CommunicationOptions | None = None,
    ) -> PyTree:
        """Reduce element by element; the result is on all devices, so on `destinations` too.

        Args:
            reduce_op: sum or mean.
            value: a `PerReplica`. Between several workers another array counts once for each worker.
            destinations: a variable, a value or a device.
            options: accepted for tf.distribute's signature.

        Raises:
            InvalidArgumentError: for a list of destinations, or the sum of a value of one worker.
        """
        check_destinations(destinations)
        group = self._strategy.process_group
        # `reduce` takes a plain array for the same on all replicas; here each worker has its own.
        if group.size > 1 and not isinstance(value, DistributedValues):
            return _reduce_over_workers(ReduceOp.parse(reduce_op), value, group)
        return self._strategy.reduce(reduce_op, value, axis=None)

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | ReduceOpName,
        value_destination_pairs: Sequence[tuple[PyTree, Destinations]],
        options: CommunicationOptions | None = None,
    ) -> list[PyTree]:
        """`reduce_to` for each pair of a value and its destination."""
        return [self.reduce_to(reduce_op, value, where) for value, where in value_destination_pairs]

    def update(
        self,
        variable: keras.Variable,
        fn: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        group: bool = True,
    ) -> UserValue:
        """Call `fn(variable, *args)` in update context: once, as all copies get the same update.

        A `unisono.Variable` whose copies may differ (ON_READ, or aggregation NONE) is updated copy by copy,
        as by `strategy.run`.

        Args:
            variable: a variable of this strategy.
            fn: writes the variable.
            args: arguments; of a `PerReplica` the first replica's is taken, or each copy's own.
            kwargs: keyword arguments, likewise.
            group: whether to return `fn`'s result, or a tuple with it for each device.
        """
        if not isinstance(variable, keras.Variable):
            raise InvalidArgumentError(
                f"`update` needs a variable. Received: {type(variable).__name__}. "
                "Pass a variable created in the strategy's scope."
            )
        if self._strategy.num_replicas_in_sync > 1 and merge_rule(kind_of(variable)) is Merge.STACK:
            results = self._update_copies(variable, fn, args, kwargs)
            replicas = range(self._strategy.num_replicas_in_sync)
            return results if group else tuple(_of_replica(results, i) for i in replicas)
        own, own_kwargs = _of_first(args, kwargs)
        with entered(Context(self._strategy, is_update=True)):
            result = fn(variable, *own, **own_kwargs)
        # The copies of a variable get one update: there is one result.
        return result if group else (result,) * len(self.worker_devices)

    def _update_copies(
        self,
        variable: keras.Variable,
        fn: Callable[..., object],
        args: Sequence[object],
        kwargs: Mapping[str, object] | None,
    ) -> UserValue:
        """Call `fn` for the copy of each replica, with that replica's arguments."""
        context = current()
        replica = None if context is None else context.merging
        if replica is None:
            return self._strategy.run(fn, (variable, *args), kwargs)
        # In `merge_call` each replica's program runs this code, and has its own copy.
        own, own_kwargs = replica._own_part((tuple(args), dict(kwargs or {})))
        with entered(Context(self._strategy, replica, is_update=True)):
            return replica._engine.exchange(fn(variable, *own, **own_kwargs))

    def broadcast_to(self, tensor: ArrayLike, destinations: Destinations = None) -> ArrayLike:
        """Return a value that is the same on all replicas; Python numbers as they are.

        Args:
            tensor: array or number.
            destinations: a variable, a value or a device; all devices have it.
        """
        if isinstance(tensor, (int, float)):
            return tensor
        strategy = self._strategy._replicated
        if strategy is None:
            raise self._strategy._unsupported("extended.broadcast_to")
        made: ArrayLike = strategy.cross_device_ops.broadcast(tensor, destinations)
        if not isinstance(made, Mirrored):
            return made
        mesh = strategy.mesh
        # A copy on each device: a replica that reads it later needs no transfer.
        return Mirrored(mesh.local(mesh.put(made.value, mesh.replicated)))

    def read_var(self, variable: keras.Variable) -> ArrayLike:
        """Return a variable's value; of an ON_READ variable, its copies aggregated.

        Args:
            variable: any Keras variable.
        """
        return variable.value

    def non_slot_devices(self, var_list: object) -> tuple[jax.Device, ...]:
        """Return the devices for state that belongs to no variable.

        Args:
            var_list: accepted for tf.distribute's signature.
        """
        return self.parameter_devices

    def update_non_slot(
        self,
        colocate_with: Iterable[jax.Device],
        fn: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        group: bool = True,
    ) -> UserValue:
        """Call `fn(*args)` once in update context: state that belongs to no variable is one here.

        Args:
            colocate_with: devices, as `non_slot_devices` returns them.
            fn: writes state.
            args: arguments; of a `PerReplica` the first replica's is taken.
            kwargs: keyword arguments, likewise.
            group: whether to return `fn`'s result, or a tuple with it for each device.
        """
        own, own_kwargs = _of_first(args, kwargs)
        with entered(Context(self._strategy, is_update=True)):
            result = fn(*own, **own_kwargs)
        return result if group else (result,) * len(tuple(colocate_with))

    def call_for_each_replica(
        self,
        fn: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> UserValue:
        """Call `fn` once per replica: the old name of `strategy.run`.

        Args:
            fn: the step of one replica.
            args: positional arguments.
            kwargs: keyword arguments.
        """
        return self._strategy.run(fn, args, kwargs)

    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[[MultiStepContext, PyTree], object],
        iterator: Iterator[PyTree],
        iterations: int = 1,
        initial_loop_values: dict[str, PyTree] | None = None,
    ) -> MultiStepContext:
        """Call `fn(context, batch)` for each of the next batches.

        Args:
            fn: a step in cross-replica context: it calls `strategy.run`, and keeps outputs with
                `context.set_last_step_output`.
            iterator: of a distributed dataset.
            iterations: how many steps.
            initial_loop_values: outputs before the first step, by name.

        Returns:
            The context, with the last step's outputs.
        """
        return run_steps(self._strategy, fn, iterator, iterations, initial_loop_values)

    def value_container(self, component: T) -> T:
        """Return the variable that holds `component`; here they are one object."""
        return component


def _reduce_over_workers(op: ReduceOp, value: ArrayLike, group: ProcessGroup) -> jax.Array:
    """Combine a host value that each worker has; every worker must call it."""
    own = np.asarray(value)
    head = json.dumps([own.dtype.str, own.shape]).encode()
    # Type and shape travel with the numbers: one message, and the error is the same on all workers.
    parts = [data.split(b"\n", 1) for data in group.gather(head + b"\n" + own.tobytes())]
    if len({head for head, _ in parts}) > 1:
        raise ClusterError(
            "All workers must reduce values of one type and shape. Received, by worker: "
            f"{[head.decode() for head, _ in parts]}. Call `reduce_to` alike on each worker."
        )
    every = np.stack([np.frombuffer(data, own.dtype).reshape(own.shape) for _, data in parts])
    return jnp.asarray(every.sum(0) if op is ReduceOp.SUM else every.mean(0))


def _of_replica(results: PyTree, i: int) -> PyTree:
    """Return a replica's results."""
    return jax.tree.map(
        lambda leaf: leaf.values[i] if isinstance(leaf, PerReplica) else leaf,
        results,
        is_leaf=lambda leaf: isinstance(leaf, PerReplica),
    )


def _of_first(
    args: Sequence[object], kwargs: Mapping[str, object] | None
) -> tuple[list[UserValue], dict[str, UserValue]]:
    """Return the arguments, of a `PerReplica` the first replica's."""
    own = [a.values[0] if isinstance(a, PerReplica) else a for a in args]
    return own, {k: a.values[0] if isinstance(a, PerReplica) else a for k, a in (kwargs or {}).items()}
