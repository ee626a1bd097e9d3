"""The running phase of replicas that train apart, as a backup holds it.

Between two exchanges replicas have weights, moving statistics and metrics of their own, which are rows of
`PairLayout`; with `overlap` a fragment may have been sent and not applied. On as many replicas, with the same
`LocalUpdates`, a run continues from all of it, with the same bits. On another number the phase ends when it
is restored: its exchange is computed from the rows that were saved.

Tests: tests/virtual/strategies/test_local_resume.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._context import OneReplica, entered
from unisono._mesh import ReplicaMesh
from unisono.collectives._packing import PackingPlan, plan, unpack
from unisono.collectives._process_group import ProcessGroup
from unisono.local_updates._local_layout import Fragment, Pair, Turn, with_changes
from unisono.sharding._shards import ShardedVariableLayout
from unisono.step._keras_internals import store_value, stored_value, trained_variables
from unisono.step._value_handle import ValueHandle
from unisono.step.variables._merge_rules import Merge

if TYPE_CHECKING:
    from unisono.local_updates._local_updates import LocalUpdates

#: A variable's place in a state: the number of a list, and one in it.
Place = tuple[int, int]

#: The lists of a training step's state: their places.
TRAINABLE, NON_TRAINABLE, OPTIMIZER, METRICS = range(4)


@dataclasses.dataclass(frozen=True)
class SentMessage:
    """A fragment that was sent, and is not applied yet.

    Args:
        number: of the fragment.
        trained: after how many steps since its exchange before.
        ago: how many steps have been taken since.
        sums: of all replicas.
        rows: the replicas' own, when it was sent.
    """

    number: int
    trained: int
    ago: int
    sums: Sequence[Any]
    rows: Sequence[Any]


@dataclasses.dataclass(frozen=True)
class LocalPhase:
    """What replicas that train apart hold besides what they share.

    Args:
        sync: what of `LocalUpdates` decides when something is exchanged, and the number of replicas.
        done: how many steps of the phase are done.
        steps: the steps since each fragment was exchanged, as the optimizer counts them.
        rows: what each replica has of a variable, along the first dimension.
        others: places of all but weights that the end of the phase joins, and how each becomes one.
        trained: with `overlap`, how many steps each fragment was trained since it was sent.
        sent: with `overlap`, in order.
    """

    sync: Sequence[int]
    done: int
    steps: Any
    rows: Mapping[Place, Any]
    others: Sequence[tuple[Place, Merge]]
    trained: Sequence[int] = ()
    sent: Sequence[SentMessage] = ()

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return self.sync[-1]

    @property
    def fragments(self) -> int:
        """Into how many fragments weights are divided."""
        return self.sync[1]

    @property
    def most_steps(self) -> int:
        """After how many steps at most a fragment was exchanged last."""
        since = [*self.trained, *(m.trained + m.ago for m in self.sent), *np.asarray(self.steps).reshape(-1)]
        return int(max(since))

    def to_parts(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what JSON can hold, and arrays by name; see `from_parts`."""
        arrays = {"steps": self.steps} | {f"rows/{p}/{i}": x for (p, i), x in self.rows.items()}
        for k, message in enumerate(self.sent):
            arrays |= {f"sent/{k}/sums/{j}": x for j, x in enumerate(message.sums)}
            arrays |= {f"sent/{k}/rows/{j}": x for j, x in enumerate(message.rows)}
        sent = [[m.number, m.trained, m.ago, len(m.sums), len(m.rows)] for m in self.sent]
        others = [[*place, rule.name] for place, rule in self.others]
        facts = {"sync": [*self.sync], "done": self.done, "others": others}
        return {**facts, "trained": [*self.trained], "sent": sent}, arrays

    @classmethod
    def from_parts(cls, facts: Mapping[str, Any], arrays: Mapping[str, Any]) -> LocalPhase:
        """Return the phase of which `to_parts` has made facts and arrays."""
        rows = {
            (int(name.split("/")[1]), int(name.split("/")[2])): x
            for name, x in arrays.items()
            if name.startswith("rows/")
        }
        sent = [
            SentMessage(
                number, trained, ago,
                [arrays[f"sent/{k}/sums/{j}"] for j in range(sums)],
                [arrays[f"sent/{k}/rows/{j}"] for j in range(own)],
            )
            for k, (number, trained, ago, sums, own) in enumerate(facts["sent"])
        ]  # fmt: skip
        others = [((p, i), Merge[rule]) for p, i, rule in facts["others"]]
        return cls(facts["sync"], facts["done"], arrays["steps"], rows, others, facts["trained"], sent)


def when_exchanged(sync: LocalUpdates, replicas: int) -> list[int]:
    """Return what decides when something is exchanged, and with how many others."""
    return [sync.every, sync.fragments, sync.overlap, replicas]


def rows_in_parts(mesh: ReplicaMesh, group: ProcessGroup, rows: Sequence[jax.Array]) -> list[Any]:
    """Return rows of replicas as values in parts, which workers read together."""
    if mesh.devices_per_replica > 1:
        from unisono.local_updates._local_cut_layout import rows_of_grid

        return rows_of_grid(mesh, group, rows)
    with group.dispatch():
        flat = _flatten(mesh)(list(rows))
    return [
        ShardedVariableLayout(mesh, x.shape, group).hold(parts) for x, parts in zip(rows, flat, strict=True)
    ]


@functools.lru_cache(maxsize=16)
def _flatten(mesh: ReplicaMesh) -> Callable[[list[jax.Array]], list[jax.Array]]:
    return jax.jit(lambda rows: [x.reshape(-1) for x in rows], out_shardings=mesh.sharded)


def rows_on_replicas(mesh: ReplicaMesh, rows: Any) -> jax.Array:
    """Return rows that were saved where a program has them: each on its replica."""
    placed: jax.Array = mesh.put(np.asarray(rows), mesh.sharded)
    return placed


def turn_of(model: keras.Model, fragment: Fragment, others: Sequence[tuple[Place, Merge]]) -> Turn:
    """Return what the exchange of a fragment changes.

    Args:
        others: what is joined with it, and how.
    """
    numbers = {id(v): i for i, v in enumerate(model.trainable_variables)}
    trained = trained_variables(model.optimizer)
    return Turn(
        fragment.outer,
        [(TRAINABLE, numbers[id(trained[i])]) for i in fragment.weights],
        [place for place, _ in others],
        [rule for _, rule in others],
        [(OPTIMIZER, i) for i in fragment.values],
    )


def sending_plan(own: tuple[Sequence[Any], Sequence[Any]]) -> PackingPlan:
    """Return how what is sent becomes one array for each type."""
    return plan([(x.shape, x.dtype) for x in (*own[0], *own[1])], num_packs=1)


def _rules_of(turn: Turn) -> list[tuple[Place, Merge | None]]:
    """Return the places of weights and others of a turn, and how the others become one."""
    return [*((place, None) for place in turn.weights), *zip(turn.others, turn.rules, strict=True)]


class PhaseEnd:
    """Ends a phase whose replicas are gone, by what they had: on the host, once.

    Args:
        phase: of which nothing is left behind.
        turns: what the exchange of each fragment changes.
        variables: of the model, in the lists of a step's state; they have what the replicas shared.
    """

    def __init__(
        self, phase: LocalPhase, turns: Sequence[Turn], variables: Sequence[Sequence[keras.Variable]]
    ) -> None:
        self._phase, self._turns, self._variables = phase, turns, variables
        self._rows = {place: jnp.asarray(np.asarray(x)) for place, x in phase.rows.items()}
        for turn in turns:
            self._rows |= {
                place: self._begun(self._held(place), rule)
                for place, rule in _rules_of(turn)
                # Set after the last step, by a callback: all replicas would have begun the next one with it.
                if place not in self._rows
            }

    def run(self) -> None:
        """Put what all replicas would have continued from into the variables."""
        # Outside of the strategy: the outer optimizers' updates are plain ones.
        with entered(None):
            for message in self._phase.sent:
                self._apply(message)
            since = self._phase.trained or np.asarray(self._phase.steps).reshape(-1)
            for turn, steps in zip(self._turns, since, strict=True):
                if steps > 0:
                    own = self._sent_by_all(turn)
                    self._join(turn, ([x.sum(0) for x in own[0]], [x.sum(0) for x in own[1]]))

    def _taken(self, turn: Turn) -> tuple[list[Pair], list[Pair], list[jax.Array]]:
        """Return weights, others and values of a turn, as of one replica."""
        weights, others = (
            [(self._held(p), self._held(p)[None]) for p in places] for places in (turn.weights, turn.others)
        )
        return weights, others, [self._held(p) for p in turn.values]

    def _held(self, place: Place) -> jax.Array:
        value: jax.Array = jnp.asarray(stored_value(self._variables[place[0]][place[1]]))
        return value

    def _begun(self, shared: jax.Array, rule: Merge | None) -> jax.Array:
        """Return the rows with which all replicas begin."""
        begun = jnp.broadcast_to(shared, (self._phase.replicas, *shared.shape))
        return begun.at[1:].set(0) if rule is Merge.SUM else begun

    def _sent_by_all(self, turn: Turn) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return what each replica adds to the sums, along the first dimension; see `Turn.to_send`."""
        own = [
            self._rows[place] if turn.outer is None else shared - self._rows[place]
            for place, (shared, _) in zip(turn.weights, self._taken(turn)[0], strict=True)
        ]
        others = [self._rows[place] for place in turn.others]
        others = [x.astype(jnp.int32) if x.dtype == jnp.bool_ else x for x in others]
        return own, [x[:1] if r is Merge.FIRST else x for x, r in zip(others, turn.rules, strict=True)]

    def _apply(self, message: SentMessage) -> None:
        """Apply what was sent, and add what each replica has changed since then."""
        turn = self._turns[message.number]
        own = self._sent_by_all(turn)
        sizes = [x[0] for x in own[0]], [x[0] for x in own[1]]
        flat = unpack([jnp.asarray(np.asarray(x)) for x in message.sums], sending_plan(sizes))
        self._join(turn, (flat[: len(own[0])], flat[len(own[0]) :]))
        weights, others, _ = self._taken(turn)
        for (place, rule), (shared, _), sent in zip(
            _rules_of(turn), (*weights, *others), message.rows, strict=True
        ):
            begun = self._begun(shared, rule)
            _, self._rows[place] = with_changes(
                (shared, begun), self._rows[place], jnp.asarray(np.asarray(sent))
            )

    def _join(self, turn: Turn, totals: tuple[list[jax.Array], list[jax.Array]]) -> None:
        """Put what all continue from into the variables."""
        # One replica that has the mean of all.
        means = [x / self._phase.replicas for x in totals[0]]
        others = [
            x / self._phase.replicas if r is Merge.MEAN else x
            for x, r in zip(totals[1], turn.rules, strict=True)
        ]
        found = turn.joined(self._taken(turn), (means, others), OneReplica())
        places = (*turn.weights, *turn.others, *turn.values)
        values = [*(shared for shared, _ in (*found[0], *found[1])), *found[2]]
        for (p, i), value in zip(places, values, strict=True):
            variable = self._variables[p][i]
            held, new = stored_value(variable), jnp.asarray(value, variable.dtype)
            # Of a replica on several processes each keeps its parts.
            store_value(variable, held.assigned(new) if isinstance(held, ValueHandle) else new)
