"""The state of replicas that train apart between two exchanges, and how a phase of such steps ends.

What a replica's steps change lies in a program as a pair: the shared value, which is that of the end of the
last phase and what everything outside of the steps sees; and a row of its own for each replica. Variables of
the inner optimizer stay apart also beyond a phase: they have a row for each replica, and lie in parts.
The optimizer gets further variables: the number of steps since a fragment of the weights was exchanged, and
those of its outer optimizer.

Sources: Douillard et al., "DiLoCo: Distributed low-communication training of language models", 2023
(https://arxiv.org/abs/2311.08105); "Streaming DiLoCo with overlapping communication", 2025
(https://arxiv.org/abs/2501.18512); Shen et al., "Computation and communication decoupled stochastic gradient
descent", 2019 (https://arxiv.org/abs/1906.12043), of which is `with_changes`.

Tests: tests/virtual/strategies/test_local_updates.py.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._context import ReplicaEngine, current, entered
from unisono._errors import BackendError, ContextError, InvalidArgumentError
from unisono._mesh import AXIS, ReplicaMesh, exchange_devices
from unisono._values import ReduceOp
from unisono.collectives._cross_device import own_ops
from unisono.collectives._process_group import ProcessGroup
from unisono.sharding._sharded_layout import PartsLayout, updated_parts
from unisono.sharding._shards import ShardedVariableLayout, Shards
from unisono.step._engines import SHARDED, UNSHARDED, SpmdEngine
from unisono.step._keras_internals import set_shape, store_value, stored_value
from unisono.step._layout import (
    FittedLayout,
    GradientReducer,
    Gradients,
    Phases,
    PureUpdate,
    StateLayout,
    VariableLayout,
    lie_as,
    mark_added,
)
from unisono.step.variables._merge_rules import Merge, localize
from unisono.step.variables._weights_of_slots import note_weight, noting_weights, weight_of

if TYPE_CHECKING:
    from unisono.local_updates._local_updates import LocalUpdates

#: A variable in a program: its shared value, and rows, of which a replica has its own.
Pair: TypeAlias = tuple[jax.Array, jax.Array]

#: What an exchange takes of a state: weights, what is joined with them, and values of the outer optimizer.
Taken: TypeAlias = tuple[list[Pair], list[Pair], list[jax.Array]]


class RowsLayout(ShardedVariableLayout):
    """How an inner optimizer's variable lies: a row on each replica."""

    # The first of several workers, which writes the file, has the row for it.
    is_gathered_for_file = False

    def to_file(self, variable: keras.Variable) -> np.ndarray:
        """Return the row of the first replica."""
        held = stored_value(variable)
        own = held.parts.addressable_data(0) if isinstance(held, Shards) else held[0]
        return np.asarray(own).reshape(self.shape[1:])

    def from_file(self, saved: np.ndarray) -> np.ndarray:
        """Return rows for this number of replicas."""
        return fitted_rows(self.shape, saved)


def fitted_rows(shape: tuple[int, ...], saved: np.ndarray) -> np.ndarray:
    """Return rows of a shape, of those for another number of replicas or of a file's only one."""
    if saved.shape == shape[1:]:
        return np.broadcast_to(saved, shape)
    is_other = saved.shape[1:] == shape[1:] and saved.shape != shape
    return saved[np.arange(shape[0]) % len(saved)] if is_other else saved


def first_row(shape: tuple[int, ...], saved: np.ndarray) -> np.ndarray:
    """Return the first of saved rows; any other value as it is."""
    row: np.ndarray = saved[0] if saved.shape[1:] == shape and saved.shape != shape else saved
    return row


def _no_steps(shape: tuple[int, ...], saved: np.ndarray) -> np.ndarray:
    """Return that no step was taken: a phase begins with what is restored, whenever it was saved."""
    return np.zeros(shape, saved.dtype)


@dataclasses.dataclass(frozen=True)
class PairLayout(VariableLayout):
    """How a variable lies that replicas change apart: in a program as a `Pair`.

    Args:
        rule: how the rows become one at the end of a phase; `KEEP` for weights.
    """

    rule: Merge

    @property
    def spec(self) -> Any:
        """The shared value on each replica, and its own row."""
        return UNSHARDED, SHARDED

    @property
    def sharding(self) -> Any:
        """The shared value on each device, and a row."""
        return self.mesh.replicated, self.mesh.sharded

    def begun(self, value: Any) -> jax.Array:
        """Return the shared value where a program has it, for what a variable holds."""
        shared: jax.Array = self.mesh.put(value, self.mesh.replicated)
        return shared

    def hold(self, array: Any) -> Any:
        """Return the shared value."""
        return self.mesh.local(array[0])

    def enter(self, array: Any, in_replica: bool) -> Any:
        """Return the replica's own value."""
        return array[1][0]


class Fragment(NamedTuple):
    """Weights that are exchanged together.

    Args:
        weights: their places among those of the inner optimizer.
        outer: the outer optimizer, built for these; its variables' values are the inner one's.
        values: the places of its variables among the inner optimizer's.
    """

    weights: list[int]
    outer: keras.Optimizer | None
    values: list[int]


class Turn(NamedTuple):
    """What an exchange changes of a step's state. A place is the number of a list, and one in it.

    Args:
        outer: the outer optimizer of the fragment.
        weights: places of the fragment.
        others: places of what is joined with it.
        rules: how each of the others becomes one.
        values: places of the outer optimizer's variables.
        cuts: how weights and others lie on the devices of each replica; None for replicas of one device.
    """

    outer: keras.Optimizer | None
    weights: list[tuple[int, int]]
    others: list[tuple[int, int]]
    rules: list[Merge]
    values: list[tuple[int, int]]
    cuts: tuple[list[Any], list[Any]] | None = None

    def of(self, state: Sequence[Sequence[Any]]) -> Taken:
        """Return weights, others and values of a state."""
        weights, others, values = (
            [state[p][i] for p, i in places] for places in (self.weights, self.others, self.values)
        )
        return weights, others, values

    def put(self, state: Sequence[list[Any]], new: Taken) -> None:
        """Put new weights, others and values into a state."""
        places = [*self.weights, *self.others, *self.values]
        for (p, i), value in zip(places, itertools.chain(*new), strict=True):
            state[p][i] = value

    def exchanged(self, taken: Taken, engine: ReplicaEngine) -> Taken:
        """Return what all replicas continue from, in the trace of one of them; one message."""
        sums = functools.partial(engine.all_reduce, ReduceOp.SUM)
        if self.cuts is not None:
            # Part by part: to pack whole arrays, XLA would gather them.
            axes = {*jax.sharding.get_abstract_mesh().axis_names} - {AXIS}
            sums = jax.shard_map(
                sums, in_specs=(self.cuts,), out_specs=self.cuts, axis_names=axes, check_vma=False
            )
        return self.joined(taken, sums(self.to_send(taken, engine)), engine)

    def to_send(self, taken: Taken, engine: ReplicaEngine) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return what a replica adds to the sums over all, of weights and of the others."""
        weights, others, _ = taken
        own = [rows[0] if self.outer is None else shared - rows[0] for shared, rows in weights]
        return own, [_part(rule, rows[0], engine) for rule, (_, rows) in zip(self.rules, others, strict=True)]

    def joined(
        self, taken: Taken, totals: tuple[list[jax.Array], list[jax.Array]], engine: ReplicaEngine
    ) -> Taken:
        """Return what all replicas continue from.

        Args:
            totals: the sums of what all replicas had `to_send`.
        """
        weights, others, values = taken
        replicas, (sums, other_sums) = engine.num_replicas, totals
        means, new = [(s / replicas).astype(s.dtype) for s in sums], list(values)
        if self.outer is not None:
            means, new = self.outer.stateless_apply(new, means, [shared for shared, _ in weights])
        merged = [
            (t / replicas if rule is Merge.MEAN else t).astype(shared.dtype)
            for t, rule, (shared, _) in zip(other_sums, self.rules, others, strict=True)
        ]
        begun = [(m, localize(r, m, engine)[None]) for m, r in zip(merged, self.rules, strict=True)]
        return [(m, m[None]) for m in means], begun, list(new)


class _OuterState(NamedTuple):
    """What `LocalLayout` knows of an inner optimizer.

    Args:
        steps: the place among its variables of the steps since each fragment was exchanged.
        fragments: in the order in which a phase exchanges them.
    """

    steps: int
    fragments: list[Fragment]


class LocalLayout(PartsLayout):
    """Replicas train apart, and exchange what they have learned where a phase ends.

    Args:
        sync: what the strategy was given.
        phases: of the strategy's models.

    Raises:
        BackendError: where workers have no device for exchanges beside the steps.
    """

    def __init__(self, mesh: ReplicaMesh, group: ProcessGroup, sync: LocalUpdates, phases: Phases) -> None:
        super().__init__(mesh, group)
        self.sync, self.phases = sync, phases
        #: A device of each process, where exchanges beside the steps are computed.
        is_one_process = mesh.local_devices == mesh.devices
        self.exchange_mesh = ReplicaMesh(mesh.devices[:1] if is_one_process else exchange_devices())
        if sync.overlap and not self.exchange_mesh.devices:
            raise BackendError(
                "With `overlap` each worker must have a CPU device for exchanges, which the first strategy "
                f"of a program makes. Received: {sync!r} for a later one. Make this strategy first."
            )
        self._added: weakref.WeakKeyDictionary[keras.Optimizer, _OuterState] = weakref.WeakKeyDictionary()

    @property
    def meshes_beside(self) -> Sequence[ReplicaMesh]:
        """The devices that exchange fragments beside the steps."""
        return [self.exchange_mesh] * bool(self.sync.overlap)

    @property
    def can_repeat(self) -> bool:
        """Whether nothing is sent beside the steps."""
        return not self.sync.overlap

    def added(self, optimizer: keras.Optimizer) -> _OuterState:
        """Return what `extend` has added to an optimizer."""
        return self._added[optimizer]

    def pair(self, variable: keras.Variable, rule: Merge) -> PairLayout:
        """Return how a variable lies that replicas change apart."""
        return PairLayout(self._mesh, rule)

    def extend(self, optimizer: keras.Optimizer, weights: Sequence[keras.Variable]) -> None:
        """Give an optimizer a row for each replica, and the outer optimizer's variables.

        Raises:
            InvalidArgumentError: for an optimizer that cannot train apart, or fewer weights than fragments.
            ContextError: in a function given to `run`.
        """
        _check(optimizer, weights)
        if self.sync.fragments > len(weights):
            raise InvalidArgumentError(
                "`fragments` must be at most the number of weights that are trained. Received: "
                f"{self.sync!r} for {len(weights)} weights. Write fewer fragments."
            )
        self._added[optimizer] = _with_outer(self.sync, self._mesh, optimizer, weights)

    def note_slot(self, variable: keras.Variable) -> None:
        """Give a variable of the inner optimizer a row for each replica."""
        rows = (self._mesh.num_replicas, *variable.shape)
        held = stored_value(variable)
        set_shape(variable, rows)
        store_value(variable, jnp.broadcast_to(held, rows))
        lie_as(variable, RowsLayout(self._mesh, rows, self._group))

    def prepare(self, optimizer: keras.Optimizer | None, variables: Sequence[keras.Variable] = ()) -> bool:
        """Return whether an optimizer has rows for the replicas; raise in a function given to `run`.

        Raises:
            ContextError: there.
        """
        if optimizer is None or optimizer not in self._added:
            return False
        _check_in_fit(optimizer)
        return True

    def place(self, layouts: Sequence[VariableLayout], values: Sequence[Any]) -> list[Any]:
        """Return what a program takes: a phase begins where a value is not a pair yet."""
        pairs = [i for i, layout in enumerate(layouts) if isinstance(layout, PairLayout)]
        new = [i for i in pairs if not isinstance(values[i], tuple)]
        others = [i for i in range(len(layouts)) if not isinstance(layouts[i], PairLayout)]
        placed = dict(enumerate(values))
        found = super().place([layouts[i] for i in others], [values[i] for i in others])
        placed |= zip(others, found, strict=True)
        if new:
            shared = list(self._mesh.put([values[i] for i in new], self._mesh.replicated))
            rules = tuple(layouts[i].rule for i in new)  # type: ignore[attr-defined]
            with self._group.dispatch():
                rows = _spread(self._mesh, rules)(shared)
            placed |= {i: (s, r) for i, s, r in zip(new, shared, rows, strict=True)}
        return [placed[i] for i in range(len(layouts))]

    def update(
        self,
        optimizer: keras.Optimizer,
        values: Sequence[Any],
        weights: Sequence[jax.Array],
        aggregate: Callable[[GradientReducer | None], Gradients],
        apply: PureUpdate,
    ) -> tuple[list[jax.Array], list[jax.Array]] | None:
        """Update this replica's own weights by its own gradients; see `StateLayout.update`."""
        if not self.prepare(optimizer):
            return None
        return updated_parts(
            apply, optimizer, values, aggregate(None), weights, lambda variable, _: tuple(variable.shape)[1:]
        )


def with_changes(begun: Pair, now: jax.Array, sent: jax.Array) -> Pair:
    """Return what a replica continues from after an exchange beside which it has taken steps.

    Args:
        begun: what the exchange gives.
        now: the replica's row.
        sent: its row when the exchange began.
    """
    shared, rows = begun
    if rows.dtype == jnp.bool_:
        return shared, jnp.where(now == sent, rows, now)
    # Without a change since then exactly what the exchange gives.
    return shared, rows + (now - sent)


def _value_of(variable: keras.Variable, shape: Sequence[int], dtype: Any = None) -> jax.Array:
    return jnp.array(variable.value, dtype)


def _part(rule: Merge, value: jax.Array, engine: ReplicaEngine) -> jax.Array:
    """Return what a replica adds to a sum over all."""
    if rule is Merge.FIRST:
        value = jnp.where(jnp.equal(engine.replica_id, 0), value, jnp.zeros_like(value))
    return value.astype(jnp.int32) if value.dtype == jnp.bool_ else value


@functools.lru_cache(maxsize=64)
def _spread(mesh: ReplicaMesh, rules: tuple[Merge, ...]) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """Return what makes rows of shared values."""
    engine = SpmdEngine(mesh.num_replicas, own_ops(mesh.platform))

    def rows(shared: list[jax.Array]) -> list[jax.Array]:
        return [localize(r, x, engine)[None] for r, x in zip(rules, shared, strict=True)]

    return jax.jit(
        jax.shard_map(rows, mesh=mesh.mesh, in_specs=UNSHARDED, out_specs=SHARDED, check_vma=False)
    )


def _check_in_fit(optimizer: keras.Optimizer) -> None:
    context = current()
    if context is not None and context.replica is not None and not context.means:
        raise ContextError(
            "With `LocalUpdates` a model must be trained by `fit`, which knows where a phase ends. Received: "
            f"gradients for {optimizer.name!r} in a function given to `strategy.run`. Override "
            "`train_step` of the model and call `fit`, or make the strategy without `sync`."
        )


def _check(optimizer: keras.Optimizer, weights: Sequence[keras.Variable]) -> None:
    """Raise for an optimizer that cannot train apart, or not here."""
    _check_in_fit(optimizer)
    reason = _why_not_apart(optimizer, weights)
    if reason is not None:
        raise InvalidArgumentError(
            f"With `LocalUpdates` a replica must be able to train alone. Received: {optimizer.name!r} with "
            f"{reason}."
        )


def _why_not_apart(optimizer: keras.Optimizer, weights: Sequence[keras.Variable]) -> str | None:
    """Return why replicas with such an optimizer cannot train apart; None where they can."""
    if getattr(optimizer, "use_ema", False):
        return "`use_ema=True`, whose averages `fit` would store as weights: use `outer_optimizer`"
    if any(getattr(v, "overwrite_with_gradient", False) for v in weights):
        return "float8, whose histories of largest values belong to all replicas: use bfloat16"
    return None


def _with_outer(
    sync: LocalUpdates, mesh: ReplicaMesh, optimizer: keras.Optimizer, weights: Sequence[keras.Variable]
) -> _OuterState:
    """Give an optimizer that is being built the number of steps and the outer optimizers' variables."""
    steps = len(optimizer.variables)
    # Outside of the scope, where variables stay as they are made.
    with entered(None):
        shape = () if sync.fragments == 1 else (sync.fragments,)
        variable = optimizer.add_variable(shape, "zeros", "int32", name="local_steps")
        sizes = [math.prod(w.shape) * jnp.dtype(w.dtype).itemsize for w in weights]
        parts = [_fragment(sync, optimizer, places, weights, steps) for places in sync._split(sizes)]
    lie_as(variable, FittedLayout(mesh, functools.partial(_no_steps, shape)))
    for variable in optimizer.variables[steps:]:
        mark_added(variable)
    return _OuterState(steps, parts)


def _fragment(
    sync: LocalUpdates,
    optimizer: keras.Optimizer,
    places: list[int],
    weights: Sequence[keras.Variable],
    steps: int,
) -> Fragment:
    """Return a fragment, whose outer optimizer's variables are now the inner one's, too."""
    outer, first = sync._new_outer(), len(optimizer.variables)
    if outer is not None:
        with noting_weights(outer):
            outer.build([weights[i] for i in places])
    for number, variable in enumerate([] if outer is None else outer.variables, first - steps - 1):
        initial = functools.partial(_value_of, variable)
        # Not by a name in which Keras counts the models of the program.
        added = optimizer.add_variable(variable.shape, initial, variable.dtype, name=f"outer_{number}")
        note_weight(added, weight_of(variable))
    return Fragment(places, outer, list(range(first, len(optimizer.variables))))


class LoneLayout(StateLayout):
    """One replica that trains as without `LocalUpdates`, and holds what several need to continue from it.

    Their outer optimizers' variables stay as they are, so that a checkpoint has the same names whatever the
    number of replicas is.

    Args:
        sync: what the strategy was given.
        phases: of the strategy's models.
    """

    def __init__(self, mesh: ReplicaMesh, sync: LocalUpdates, phases: Phases) -> None:
        super().__init__(mesh)
        self._sync, self.phases = sync, phases
        self._added: weakref.WeakKeyDictionary[keras.Optimizer, _OuterState] = weakref.WeakKeyDictionary()

    def added(self, optimizer: keras.Optimizer) -> _OuterState:
        """Return what `extend` has added to an optimizer."""
        return self._added[optimizer]

    def extend(self, optimizer: keras.Optimizer, weights: Sequence[keras.Variable]) -> None:
        """Give an optimizer the variables that it has with several replicas; see `LocalLayout.extend`."""
        # An optimizer of which several replicas have none is used as it is.
        if _why_not_apart(optimizer, weights) is None and self._sync.fragments <= len(weights):
            self._added[optimizer] = _with_outer(self._sync, self._mesh, optimizer, weights)

    def note_slot(self, variable: keras.Variable) -> None:
        """Note that the variable has a row for each of several replicas."""
        lie_as(variable, FittedLayout(self._mesh, functools.partial(first_row, tuple(variable.shape))))
