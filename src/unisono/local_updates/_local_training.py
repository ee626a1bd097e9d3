"""Steps of `fit` in which each replica trains apart: `LocalUpdates`.

A replica runs Keras' own step on its rows, as one device would, and no message is sent. The program counts
the steps of a phase, and ends it after the last. `LocalPhases.end` ends one that has fewer: where an epoch
ends. Between two phases all replicas hold the same weights, moving
statistics and metrics; during one, everything outside of the steps sees those of the last end. Backups are
written between two phases, where there is the least to write; that of a preempted task in one.

With several fragments a phase exchanges one after another, the last one and all but the weights at its end:
there, too, replicas differ in the others. `LocalPhases.end` exchanges all that were trained since. A backup
within an epoch has the rows of all replicas, and what is being sent: `_local_phase`.

With `overlap` the programs of steps exchange nothing: `_exchange_beside_steps` sends fragments in programs of
its own, and groups of steps end where one is sent or applied.

Tests: tests/virtual/strategies/test_local_updates.py.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._context import ReplicaEngine
from unisono._errors import InvalidArgumentError
from unisono._types import PyTree
from unisono.local_updates._exchange_beside_steps import ExchangeBesideSteps
from unisono.local_updates._local_layout import LocalLayout, PairLayout, Turn
from unisono.local_updates._local_phase import (
    METRICS,
    NON_TRAINABLE,
    OPTIMIZER,
    TRAINABLE,
    LocalPhase,
    PhaseEnd,
    Place,
    rows_in_parts,
    turn_of,
    when_exchanged,
)
from unisono.step._dispatch import CompiledStep
from unisono.step._engines import UNSHARDED
from unisono.step._keras_internals import is_synced, store_value, stored_value
from unisono.step._layout import Phases, VariableLayout
from unisono.step.variables._merge_rules import Merge, merge_all
from unisono.training._binding import strategy_of
from unisono.training._step_form import is_stateful
from unisono.training.groups._batch_placement import BatchGroup
from unisono.training.groups._batch_policy import BatchPolicy
from unisono.training.groups._batch_source import BatchSource
from unisono.training.replica._step_reading import StepReading
from unisono.training.trainer._fit_state import FitState, HeldState, PureStep, release_state
from unisono.training.trainer._protocol import State, StepFunction, plain_function_of
from unisono.training.trainer._trainer_function import ReadyProgram, TrainerFunction
from unisono.training.trainer._trainer_step import TrainerStep, TrainerTask, localized, variables_of

if TYPE_CHECKING:
    from unisono.step._replicas import Replicas

_LOG = logging.getLogger("unisono")

#: Which copies of a variable differ within a phase, and are made one at its end.
_MERGED = (Merge.MEAN, Merge.SUM, Merge.FIRST)


class LocalStep(TrainerStep):
    """A training step of a replica that does not ask the others."""

    def split(self, state: State, batch: PyTree) -> tuple[PyTree, State]:
        """Run Keras' own step on this replica's rows, with random numbers of its own."""
        engine = self.engine()
        # Random streams are merged without a message.
        rules = tuple([r if r is Merge.SEED else Merge.KEEP for r in rs] for rs in self.rules())
        logs, new = super().whole(localized(rules, state, engine), batch)
        return logs, tuple(merge_all(rs, list(xs), engine) for rs, xs in zip(rules, new, strict=True))

    def whole(self, state: State, batch: PyTree) -> tuple[PyTree, State]:
        """Run the step on rows that all replicas have: they count once in the metrics."""
        logs, new = super().whole(state, batch)
        is_first = jnp.equal(self.engine().replica_id, 0)
        metrics = [
            jnp.where(is_first, x, old) if rule is Merge.SUM else x
            for rule, old, x in zip(self.rules()[METRICS], state[METRICS], new[METRICS], strict=True)
        ]
        return logs, (*new[:METRICS], metrics)


class LocalState(FitState):
    """The state between steps of replicas that train apart."""

    #: The places in the list of non-trainable variables that the step changes; known when it was traced.
    _changed: Sequence[int] = ()

    @property
    def local(self) -> LocalLayout:
        """The layout, which is the one that this class is made for."""
        return self._layout  # type: ignore[return-value]

    def newest(self) -> State:
        """Return the state between two steps, as Keras carries it or as its variables hold it."""
        if self._returned is not None and not is_synced(self._model):
            return self._returned
        return tuple([stored_value(v) for v in part] for part in variables_of(self._model, self._task))

    def _layouts_of_state(self) -> tuple[list[VariableLayout], ...]:
        super()._layouts_of_state()
        rules = LocalStep(self._model, self._replicas, self._task).rules()
        layouts: list[list[VariableLayout]] = []
        for number, part in enumerate(variables_of(self._model, self._task)):
            layouts.append(
                [
                    self.local.pair(variable, rule)
                    if number == TRAINABLE or (rule in _MERGED and number != OPTIMIZER)
                    else self._layout.of(variable)
                    for variable, rule in zip(part, rules[number], strict=True)
                ]
            )
        return tuple(layouts)

    def in_step(self, step: PureStep, is_joined: bool = False) -> PureStep:
        """Return a step for the arrays of a program, which exchanges the fragments that are due."""
        layouts, ends = self._layouts, np.array(self.local.sync._ends)

        def program(state: State, batch: PyTree) -> tuple[PyTree, State]:
            own = tuple(
                [one.enter(x, True) for one, x in zip(part, xs, strict=True)]
                for part, xs in zip(layouts, state, strict=True)
            )
            logs, new = step(own, batch)
            before, after = own[NON_TRAINABLE], new[NON_TRAINABLE]
            # What a step did not change is the same object.
            self._changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a is not b]
            left = tuple(
                [_left(one, old, x) for one, old, x in zip(part, olds, xs, strict=True)]
                for part, olds, xs in zip(layouts, state, new, strict=True)
            )
            if self.local.sync.overlap:
                return logs, left
            # The last fragment's steps are those of the phase.
            return logs, self._exchanged_if(left, lambda steps: steps + 1, lambda steps: steps[-1] == ends)

        return program

    def end_program(self) -> CompiledStep[State, PyTree, PyTree]:
        """Return the program that ends a phase of fewer steps, and leaves a state without one as it is.

        With `overlap` it is given which fragments are exchanged.
        """

        def program(state: State, due: PyTree) -> tuple[PyTree, State]:
            is_given = self.local.sync.overlap > 0
            return (), self._exchanged_if(
                state, lambda steps: steps, lambda steps: due if is_given else steps > 0
            )

        return self.compiled(program, UNSHARDED)

    def compiled(self, program: PureStep, given: PyTree) -> CompiledStep[State, PyTree, PyTree]:
        """Return a program that changes the state between two steps, and gives nothing else.

        Args:
            given: how what it gets besides lies on the replicas.
        """
        replicas = self._replicas
        return CompiledStep(
            program,
            replicas.mesh,
            state_shardings=self.shardings,
            in_specs=(self.specs, given),
            out_specs=((), self.specs),
            process_group=replicas.process_group,
        )

    @property
    def engine(self) -> ReplicaEngine:
        """How a replica exchanges values with the others inside of a program."""
        return LocalStep(self._model, self._replicas, self._task).engine()

    def turn(self, number: int) -> Turn:
        """Return what the exchange of a fragment changes: the last one's that of all but weights, too."""
        fragments = self.local.added(self._model.optimizer).fragments
        is_last = number == len(fragments) - 1
        return turn_of(self._model, fragments[number], self.joined() if is_last else [])

    def _exchanged_if(
        self,
        state: State,
        count: Callable[[jax.Array], jax.Array],
        is_due: Callable[[jax.Array], jax.Array],
    ) -> State:
        """Return the state after the exchange of the fragments that are due; in the trace of a replica.

        Args:
            count: from the numbers of steps since the exchange of each fragment to the new ones.
            is_due: from the new numbers to which fragments are due.
        """
        parts = [list(part) for part in state]
        added = self.local.added(self._model.optimizer)
        held = parts[OPTIMIZER][added.steps]
        steps = count(jnp.atleast_1d(held))
        due = is_due(steps)
        for number in range(len(added.fragments)):
            self._exchange_if(due[number], parts, self.turn(number))
        parts[OPTIMIZER][added.steps] = jnp.where(due, 0, steps).astype(jnp.int32).reshape(held.shape)
        return tuple(parts)

    def joined(self) -> list[tuple[Place, Merge]]:
        """Return the places of all but weights that the end of a phase joins, and how each becomes one."""
        changed = [(NON_TRAINABLE, i) for i in self._changed]
        changed += [(METRICS, i) for i in range(len(self._layouts[METRICS]))]
        layouts = [((p, i), self._layouts[p][i]) for p, i in changed]
        return [(place, one.rule) for place, one in layouts if isinstance(one, PairLayout)]

    def _exchange_if(self, is_due: jax.Array, parts: list[list[Any]], turn: Turn) -> None:
        """Exchange a fragment, and what is joined with it, if it is due."""
        engine = self.engine

        def exchange(given: Any) -> Any:
            found = turn.exchanged(given, engine)
            # Both branches must give the same types, weak ones included.
            return jax.tree.map(lambda old, new: jnp.asarray(new, old.dtype), given, found)

        turn.put(parts, jax.lax.cond(is_due, exchange, lambda same: same, turn.of(parts)))

    def rows_of(self, state: State) -> dict[Place, jax.Array]:
        """Return the replicas' rows of what a state has as the last step left it."""
        last: Iterator[Any] = iter(self._last(state))
        held = {(p, i): next(last) for p, part in enumerate(state) for i in range(len(part))}
        return {place: x[1] for place, x in held.items() if isinstance(x, tuple)}

    def resume(self, phase: LocalPhase) -> None:
        """Let the next step begin with the rows of a phase, as if a step had left them."""
        mesh, parts = self._replicas.mesh, variables_of(self._model, self._task)
        self._lay_out(parts)
        self._changed = [i for (p, i), _ in phase.others if p == NON_TRAINABLE]
        values: list[list[Any]] = [[None] * len(part) for part in parts]
        self._returned = returned = self._parts()
        self.held = HeldState(tuple(values))
        for (p, i), rows in phase.rows.items():
            held = stored_value(parts[p][i])
            layout: Any = self._layouts[p][i]
            values[p][i] = layout.begun(held), mesh.put(np.asarray(rows), layout.sharding[1])
            returned[p].see(i, held)

    def _compared(self) -> tuple[list[str], list[jax.Array]]:
        """Return names and arrays of what must be equal on all workers: what the replicas share."""
        pairs = [
            (v.path, x[0] if isinstance(one, PairLayout) else x)
            for vs, ones, xs in zip(
                variables_of(self._model, self._task), self._layouts, self._returned or (), strict=True
            )
            for v, one, x in zip(vs, ones, xs.values, strict=True)
        ]
        pairs = [(name, x) for name, x in pairs if x.is_fully_replicated]
        return [name for name, _ in pairs], [x for _, x in pairs]


def _left(layout: VariableLayout, old: Any, value: Any) -> Any:
    """Return what a program keeps of a variable, for the value that a step has left."""
    if not isinstance(layout, PairLayout):
        return layout.leave(value, True)
    return old[0], jnp.asarray(value, old[1].dtype)[None]


class LocalPolicy(BatchPolicy):
    """Rows of a replica are its own. Batches are not filled up, which would need a message in each step."""

    def __init__(
        self,
        model: keras.Model,
        replicas: int,
        read: object,
        joins: bool = False,
        joins_groups: bool = True,
    ) -> None:
        super().__init__(model, replicas, lambda _: StepReading())

    def _can_fill(self, rows: int, reading: StepReading) -> bool:
        size = -(-rows // self._replicas) * self._replicas
        self.warn(
            "rows",
            f"A batch of {rows} rows does not divide over {self._replicas} replicas, which train apart "
            f"(`LocalUpdates`): every replica computes all rows. Use a batch size of {size}.",
        )
        return False


class LocalTrainFunction(TrainerFunction):
    """Keras' `train_function` on replicas that train apart between exchanges."""

    step_type, state_type, policy_type = LocalStep, LocalState, LocalPolicy
    exchange_type = ExchangeBesideSteps
    carried: LocalState

    def __init__(self, model: keras.Model, replicas: Replicas, task: TrainerTask) -> None:
        super().__init__(model, replicas, task)
        self._model = model
        layout = replicas.state_layout
        #: How many steps a phase has, and how many of the running one are done, where steps do not run again.
        self.every = layout.sync.every if isinstance(layout, LocalLayout) else 1
        self.steps_in_phase = 0
        #: What is sent while the next steps run; None where steps wait for it.
        self._beside: ExchangeBesideSteps | None = None
        if isinstance(layout, LocalLayout) and layout.sync.overlap:
            self._beside = beside = self.exchange_type(replicas, layout, self.carried)
            self.loop.limit = lambda: beside.room(self.steps_in_phase)
            # Without a message in a step: with the fragments.
            self._programs.agree = False
        #: How many steps were done when the last phase was ended by `end_phase`.
        self._ended_at = 0
        self._end: CompiledStep[State, PyTree, PyTree] | None = None
        self._end_sizes: tuple[int, ...] = ()
        reason = _why_not(model)
        if reason is not None:
            raise InvalidArgumentError(
                f"With `LocalUpdates` a replica must be able to train alone. Received: {model.name!r} with "
                f"{reason}, or make the strategy without `sync`."
            )

    def run(self, source: BatchSource, state: State, iterator: Iterator[PyTree]) -> tuple[PyTree, State]:
        """Run the groups of one call; see `TrainerFunction.run`.

        Raises:
            InvalidArgumentError: where the steps run op by op.
        """
        if self.loop.is_eager:
            raise InvalidArgumentError(
                "With `LocalUpdates` steps must be compiled. Received: a model with `run_eagerly=True` or "
                "`jit_compile=False`. Leave that out, or make the strategy without `sync` meanwhile."
            )
        return super().run(source, state, iterator)

    def prepare(self, group: BatchGroup) -> ReadyProgram:
        """Return a group's program; see `TrainerFunction.prepare`."""
        if not self._is_placed:
            self._drop_unless_continued(self._state)
        ready = super().prepare(group)
        # Programs beside the steps have returned parts of the state, too.
        self._is_result = self._is_result and self._beside is None
        return ready

    def start(self, group: BatchGroup) -> tuple[PyTree, jax.Array | None]:
        """Start a group's program; see `TrainerFunction.start`."""
        results, agreed = super().start(group)
        self.steps_in_phase = (self.steps_in_phase + group.count) % self.every
        if self._beside is not None:
            wish = self.loop.group_size.wish
            self._state = self._beside.advance(
                self._state, group.count, self.steps_in_phase, wish, self.carried.done
            )
            agreed = self._beside.agreed
        return results, agreed

    def phase(self) -> LocalPhase | None:
        """Return what replicas hold apart; None where they hold the same; all workers must call it."""
        layout, replicas = self.carried.local, self._replicas
        if layout.sync.fragments == 1 and self._beside is None and not self.steps_in_phase:
            return None
        state: Any = self.carried.newest()
        self._drop_unless_continued(state)
        rows = self.carried.rows_of(state)
        sent, trained = ([], []) if self._beside is None else self._beside.sent()
        all_rows = [*rows.values(), *(x for message in sent for x in message.rows)]
        spread = iter(rows_in_parts(replicas.mesh, replicas.process_group, all_rows))
        own = {place: next(spread) for place in rows}
        sent = [dataclasses.replace(m, rows=[next(spread) for _ in m.rows]) for m in sent]
        steps = state[OPTIMIZER][layout.added(self._model.optimizer).steps]
        when = when_exchanged(layout.sync, replicas.num_replicas_in_sync)
        return LocalPhase(when, self.steps_in_phase, steps, own, self.carried.joined(), trained, sent)

    def begin_phase(self) -> None:
        """Forget the phase of an earlier call; see `Phases.begin`."""
        self.steps_in_phase = 0
        if self._beside is not None:
            self._beside.resume([], [0] * self.carried.local.sync.fragments)

    def resume(self, phase: LocalPhase) -> bool:
        """Let the next step continue from a phase of as many replicas, with the same `LocalUpdates`.

        Returns:
            Whether it is such a phase.
        """
        layout = self.carried.local
        if when_exchanged(layout.sync, self._replicas.num_replicas_in_sync) != [*phase.sync]:
            return False
        steps = self._model.optimizer.variables[layout.added(self._model.optimizer).steps]
        store_value(steps, jnp.asarray(np.asarray(phase.steps)))
        self.carried.resume(phase)
        # Also where no step follows, as at the end of data of unknown size.
        self.steps_in_phase, self._ended_at = phase.done, -1
        if self._beside is not None:
            self._beside.resume(phase.sent, phase.trained)
        return True

    def end_phase(self) -> None:
        """End a phase that has fewer steps than others, between two steps; all workers must call it."""
        if self.num_steps == self._ended_at:
            return
        self._ended_at, self.steps_in_phase = self.num_steps, 0
        self._model.jax_state_sync()
        parts = variables_of(self._model, TrainerTask.TRAIN)
        held: Any = tuple([stored_value(v) for v in part] for part in parts)
        self._drop_unless_continued(held)
        due: PyTree = ()
        state = self.carried.place(held, None)
        if self._beside is not None:
            state, due = self._beside.finish(state)
        if self._end is None or self._end_sizes != self.carried.sizes:
            self._end, self._end_sizes = self.carried.end_program(), self.carried.sizes
        _, new = self._end(state, due)
        kept = self.carried.keep(new, self.num_steps)
        for part, values in zip(parts, kept, strict=True):
            for variable, value in zip(part, values, strict=True):
                store_value(variable, value)
        release_state(self._model)

    def _drop_unless_continued(self, state: State) -> None:
        """Forget what was sent where a state has other values of what the replicas change apart."""
        if self._beside is not None and not self.carried.is_unchanged(state, PairLayout):
            self._beside.drop()


class LocalPhases(Phases):
    """The phases of a strategy's models, by their train functions."""

    function_type = LocalTrainFunction

    def make_train_function(self, model: keras.Model, replicas: Replicas) -> StepFunction | None:
        is_local = isinstance(replicas.state_layout, LocalLayout)
        return self.function_type(model, replicas, TrainerTask.TRAIN) if is_local else None

    def is_in_phase(self, model: keras.Model) -> bool:
        function = _function_of(model)
        return function is not None and function.steps_in_phase > 0

    def steps_to_end(self, function: Callable[..., object]) -> int:
        if not isinstance(function, LocalTrainFunction):
            return sys.maxsize
        return function.every - function.steps_in_phase

    def begin(self, model: keras.Model) -> None:
        if (function := _function_of(model)) is not None:
            function.begin_phase()

    def end(self, model: keras.Model) -> None:
        if (function := _function_of(model)) is not None:
            function.end_phase()

    def to_parts(self, model: keras.Model) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        function = _function_of(model)
        phase = None if function is None else function.phase()
        return (None, {}) if phase is None else phase.to_parts()

    def resume(self, model: keras.Model, facts: dict[str, Any], arrays: dict[str, Any]) -> None:
        """Let the next step continue from a phase, which ends here if it is of another number of replicas.

        With another number of fragments training continues from what was shared.
        """
        phase, function = LocalPhase.from_parts(facts, arrays), _function_of(model)
        if function is not None and function.resume(phase):
            return
        # A layout has these phases: `LocalLayout` or `LoneLayout`.
        layout: Any = strategy_of(model)._replicated.state_layout  # type: ignore[union-attr]
        fragments = layout.added(model.optimizer).fragments
        if len(fragments) == phase.fragments:
            turns = [turn_of(model, f, phase.others if f is fragments[-1] else []) for f in fragments]
            PhaseEnd(phase, turns, variables_of(model, TrainerTask.TRAIN)).run()
            return
        _LOG.warning(
            "This backup was made between two exchanges of replicas that trained apart, with another "
            "number of fragments than `LocalUpdates` has now. Training continues from the values of the "
            "last exchange: up to %d steps of each replica are lost.", phase.most_steps,
        )  # fmt: skip


def _function_of(model: keras.Model) -> LocalTrainFunction | None:
    """Return the train function of a model whose replicas train apart; None of another."""
    function = plain_function_of(getattr(model, "train_function", None))
    return function if isinstance(function, LocalTrainFunction) else None


def _why_not(model: keras.Model) -> str | None:
    """Return why a model cannot train apart; None where it can."""
    if is_stateful(model, TrainerTask.TRAIN):
        return (
            "a `train_step(self, data)` in TensorFlow's form: write one of Keras 3, `train_step(state, data)`"
        )
    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        return 'a `LossScaleOptimizer`, whose scale belongs to all replicas: use `"mixed_bfloat16"`'
    return None
