"""The strategy and the replica of the running code: one context variable.

The three contexts of `tf.distribute`: *default* (no scope: one replica), *cross-replica*
(inside `scope()` or `merge_call`) and *replica* (inside the function given to `run`). The
context belongs to a thread, so a thread started inside a scope is outside of it.
Source: https://www.tensorflow.org/api_docs/python/tf/distribute
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

from unisono._checks import takes_arguments
from unisono._errors import ContextError, InvalidTypeError, MixedStrategyError
from unisono._system._blocks import set_for_block
from unisono._types import PyTree, Tree, UserValue
from unisono._values import IndexedSlices, PerReplica, ReduceOp

if TYPE_CHECKING:
    import jax
    import keras

    from unisono._system._literals import MaybeNone, ReduceOpName
    from unisono.strategies._base import Strategy
    from unisono.strategies._replicated import ReplicatedStrategy


class ReplicaEngine(Protocol):
    """The collective operations of a replica; one implementation for each way to execute a step."""

    @property
    def num_replicas(self) -> int:
        """The number of replicas that run the step."""

    @property
    def replica_id(self) -> int | jax.Array:
        """This replica's number: an int, or a traced int32 scalar."""

    @property
    def is_empty(self) -> bool:
        """True if this replica has no rows while others have: its results must be ignored."""

    def all_reduce(self, op: ReduceOp, tree: Tree) -> Tree:
        """Combine `tree` over the replicas; every replica gets the result."""

    def total(self, size: int) -> int:
        """Return the sum over the replicas of a size that is known while tracing."""

    def all_gather(self, tree: Tree, axis: int) -> Tree:
        """Concatenate `tree` over the replicas along `axis`."""

    def exchange(self, tree: PyTree) -> PyTree:
        """Return `tree` with each array replaced by the `PerReplica` of all replicas' arrays."""


@dataclasses.dataclass(frozen=True)
class Context:
    """The strategy of the running code, and its replica if it is inside one.

    Args:
        replica: the replica that runs the code, if any.
        is_update: whether the code runs inside `strategy.extended.update`.
        means: whether gradients and losses of replicas are averaged (as in Keras' `fit`) or
            summed (in custom loops, as in tf.distribute).
        true_rows: for a batch that was padded to divide, the number of the replicas' rows that are data.
        is_of_method: whether a method of a model, such as `fit`, entered the scope, and not the user.
        merging: the replica whose program runs the code, inside `merge_call`.
    """

    strategy: Strategy
    replica: ReplicaContext | None = None
    is_update: bool = False
    means: bool = False
    true_rows: int | None = None
    is_of_method: bool = False
    merging: ReplicaContext | None = None


_CURRENT: ContextVar[Context | None] = ContextVar("unisono_context", default=None)
#: Registered by the strategies' module, which this one must not import: it is in a lower layer.
_default_strategy: Callable[[], ReplicatedStrategy] | None = None


def register_default_strategy(factory: Callable[[], ReplicatedStrategy]) -> None:
    """Register the function that returns the default strategy, which is current outside of every scope."""
    global _default_strategy
    _default_strategy = factory


def current() -> Context | None:
    """Return the context of this thread, or None in the default context."""
    return _CURRENT.get()


def entered(context: Context | None) -> AbstractContextManager[object]:
    """Make `context` current for a block."""
    return set_for_block(_CURRENT, context)


def get_strategy() -> Strategy:
    """Return the innermost strategy of this thread; the default strategy outside any scope.

    >>> get_strategy().num_replicas_in_sync
    1
    """
    context = _CURRENT.get()
    return default_strategy() if context is None else context.strategy


def default_strategy() -> ReplicatedStrategy:
    """Return the strategy of code outside of every scope, which has one replica."""
    if _default_strategy is None:
        raise ContextError(
            "The default strategy is not loaded. Write `import unisono` before `get_strategy()`."
        )
    return _default_strategy()


def has_strategy() -> bool:
    """Return whether a strategy other than the default one is current.

    >>> has_strategy()
    False
    """
    context = _CURRENT.get()
    return context is not None and not context.strategy._is_default


def get_replica_context() -> ReplicaContext | MaybeNone:
    """Return the `ReplicaContext` inside a replica, and None in cross-replica context.

    Outside of every scope it belongs to the default strategy, with one replica.

    >>> import unisono
    >>> with unisono.MirroredStrategy(["cpu:0"]).scope():
    ...     unisono.get_replica_context() is None
    True
    """
    context = _CURRENT.get()
    if context is None:
        # The same code runs unchanged without a scope: it finds one replica with number 0.
        return ReplicaContext(default_strategy(), _ONE)
    return context.replica


def in_cross_replica_context() -> bool:
    """Return whether this code is in a `scope()` or `merge_call`, not in a replica.

    >>> in_cross_replica_context()
    False
    """
    context = _CURRENT.get()
    # As in tf.distribute, code inside `update` is in neither of the two contexts.
    return context is not None and context.replica is None and not context.is_update


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Make `strategy` current without a `with` block, for notebooks; None ends that.

    Raises:
        ContextError: when called inside a `with strategy.scope()` block or a replica.

    >>> import unisono
    >>> unisono.experimental_set_strategy(unisono.OneDeviceStrategy("cpu:0"))
    >>> unisono.has_strategy()
    True
    >>> unisono.experimental_set_strategy(None)
    """
    context = _CURRENT.get()
    if context is not None and not isinstance(context, _SetContext):
        raise ContextError(
            "`experimental_set_strategy` must be called outside every `strategy.scope()`. "
            f"Received: a call inside the scope of {context.strategy!r}. Leave the `with` block first."
        )
    # No token is kept: there is no block at whose end it would be reset.
    _CURRENT.set(None if strategy is None else _SetContext(strategy))


class _SetContext(Context):
    """A cross-replica context that was set by `experimental_set_strategy`."""


def require_cross_replica(what: str) -> None:
    """Raise a `ContextError` when the running code is inside a replica."""
    context = _CURRENT.get()
    if context is not None and context.replica is not None and not context.strategy._is_default:
        raise ContextError(
            f"`{what}` must be called in cross-replica context. Received: a call inside the function "
            "given to `strategy.run`. Call it on what `run` returned, or use "
            "`unisono.get_replica_context()` inside."
        )


def check_same_strategy(entering: Strategy) -> None:
    """Raise when `entering.scope()` cannot be entered from here."""
    context = _CURRENT.get()
    if context is None:
        return
    if context.replica is not None:
        raise ContextError(
            "A scope must be entered in cross-replica context. Received: `scope()` inside the "
            "function given to `strategy.run`. Create variables before `run`, or inside it without a scope."
        )
    if context.strategy is not entering:
        raise MixedStrategyError(
            "Only one strategy can be current. Received: the scope of "
            f"{entering!r} inside the scope of {context.strategy!r}. Use one strategy for one model."
        )


#: The attribute of a variable or model that holds the strategy in whose scope it was created.
_CREATOR = "_unisono_strategy"


def note_creator(thing: keras.Model | keras.Variable, strategy: Strategy | None) -> None:
    """Note the strategy in whose scope a model or variable is created; None for no scope."""
    # Not through Keras' own `__setattr__`, which tracks the parts of a layer.
    object.__setattr__(thing, _CREATOR, strategy)


def creator_of(thing: keras.Model | keras.Variable) -> Strategy | None:
    """Return the strategy in whose scope a model or variable was created; None for no scope."""
    return getattr(thing, _CREATOR, None)


def check_holder(variable: keras.Variable) -> None:
    """Raise when another strategy than the current one holds a variable.

    Raises:
        MixedStrategyError: naming both strategies.
    """
    context = _CURRENT.get()
    if context is None or context.strategy._is_default:
        return
    holder = creator_of(variable)
    # Keras' global seed generator is created in the first scope that draws, but all strategies use it.
    if holder is None or holder is context.strategy or variable.name == "seed_generator_state":
        return
    raise MixedStrategyError(
        "A variable can be used only with the strategy in whose scope it was created. Received: "
        f"{variable.path!r} of {holder!r}, used with another strategy, {context.strategy!r}. Create one "
        "strategy and use it for the whole program, or copy the weights into a model of the second one."
    )


class ReplicaContext:
    """The replica that runs the code, and its collective operations.

    Returned by `get_replica_context()` inside the function given to `strategy.run`.

    >>> import unisono
    >>> strategy = unisono.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> def step():
    ...     context = unisono.get_replica_context()
    ...     return context.all_reduce("sum", 1.0 + context.replica_id_in_sync_group)
    >>> [float(total) for total in strategy.run(step).values]
    [3.0, 3.0]
    """

    def __init__(self, strategy: ReplicatedStrategy, engine: ReplicaEngine) -> None:
        self._strategy = strategy
        self._engine = engine
        #: In `fit`: the `id` of each optimizer whose loss was divided by the number of replicas, so that its
        #: gradients are summed.
        self.scaled_by: set[int] = set()

    @property
    def strategy(self) -> ReplicatedStrategy:
        """The strategy of this replica."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int | jax.Array:
        """This replica's number, from 0 to `num_replicas_in_sync - 1`; an int32 scalar or an int."""
        return self._engine.replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that run this step."""
        return self._engine.num_replicas

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The devices of the strategy, in replica order."""
        return tuple(self._strategy.worker_devices)

    def all_reduce(self, reduce_op: ReduceOp | ReduceOpName, value: Tree, options: object = None) -> Tree:
        """Combine `value` over all replicas and return the result on each; differentiable.

        Args:
            reduce_op: sum, or mean over replicas: the mean over rows only where all have equally many.
            value: a pytree of arrays with the same shapes on every replica; None leaves are kept.
            options: accepted for tf.distribute's signature; the strategy's own options apply.

        Returns:
            The pytree with every array reduced. The gradient of an all-reduce is the
            all-reduce of the gradients with the same operation.
        """
        import jax

        op = ReduceOp.parse(reduce_op)
        # `IndexedSlices` is a pytree, too: without `is_leaf` its row numbers would be summed like values.
        leaves, structure = jax.tree.flatten(value, is_leaf=lambda leaf: isinstance(leaf, IndexedSlices))
        # One call for all dense arrays, so that the engine can pack them into few collectives.
        plain = iter(self._engine.all_reduce(op, [x for x in leaves if not isinstance(x, IndexedSlices)]))
        every = [self._rows(op, x) if isinstance(x, IndexedSlices) else next(plain) for x in leaves]
        reduced: Tree = jax.tree.unflatten(structure, every)
        return reduced

    def _rows(self, op: ReduceOp, slices: IndexedSlices) -> IndexedSlices:
        """Return the sum of sparse rows: the concatenated rows of all replicas."""
        values, indices = self._engine.all_gather((slices.values, slices.indices), 0)
        # Sparse rows are concatenated, not added: the values are divided, as in TensorFlow.
        if op is ReduceOp.MEAN:
            values = values / self.num_replicas_in_sync
        return IndexedSlices(values, indices, slices.dense_shape)

    def all_gather(self, value: Tree, axis: int, options: object = None) -> Tree:
        """Concatenate `value` of all replicas along `axis`, in replica order; differentiable.

        Args:
            value: a pytree of arrays of rank 1 or more; only the sizes along `axis` may differ.
            axis: the dimension to concatenate.
            options: accepted for tf.distribute's signature.
        """
        return self._engine.all_gather(value, axis)

    def merge_call(
        self,
        merge_fn: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> UserValue:
        """Call `merge_fn(strategy, *args)` once in cross-replica context, with all replicas' args.

        Args:
            merge_fn: receives the strategy and, for each array argument, the `PerReplica` of all replicas.
            args: positional arguments of this replica.
            kwargs: keyword arguments of this replica.

        Returns:
            This replica's part of the result of `merge_fn`.

        Raises:
            InvalidTypeError: `merge_fn` does not take the strategy and the arguments.
        """
        if not takes_arguments(merge_fn, 1 + len(args), *(kwargs or {})):
            raise InvalidTypeError(
                "`merge_fn` receives the strategy, and then the arguments of `merge_call`. Received: "
                f"{getattr(merge_fn, '__qualname__', merge_fn)}, which cannot be called with the strategy "
                f"and {len(args)} arguments. Write `merge_call(lambda strategy, ...: ..., args=(...,))`."
            )
        every_args, every_kwargs = self._engine.exchange((tuple(args), dict(kwargs or {})))
        # Without a replica: `merge_fn` may call what only cross-replica context allows, such as `update`.
        with entered(Context(self._strategy, merging=self)):
            result = merge_fn(self._strategy, *every_args, **every_kwargs)
        return self._own_part(result)

    def _own_part(self, result: object) -> UserValue:
        """Return a pytree of all replicas with this replica's value in place of each `PerReplica`.

        Args:
            result: a pytree.
        """
        import jax

        def part(leaf: object) -> object:
            if not isinstance(leaf, PerReplica):
                return leaf
            index = self._engine.replica_id
            # A number that is traced can index an array, but not a tuple.
            return leaf.values[index] if leaf.stacked is None else leaf.stacked[index]

        return jax.tree.map(part, result, is_leaf=lambda leaf: isinstance(leaf, PerReplica))


class OneReplica:
    """The engine of a single replica, whose collectives return their argument."""

    num_replicas = 1
    replica_id = 0
    is_empty = False

    def all_reduce(self, op: ReduceOp, tree: Tree) -> Tree:
        """Return the value, which is its own sum and mean."""
        return tree

    def total(self, size: int) -> int:
        """Return the size."""
        return size

    def all_gather(self, tree: Tree, axis: int) -> Tree:
        """Return the value."""
        return tree

    def exchange(self, tree: Tree) -> Tree:
        """Return the value."""
        return tree


_ONE = OneReplica()
