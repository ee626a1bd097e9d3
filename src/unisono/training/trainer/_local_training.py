"""Steps of `fit` in which each replica trains apart: `LocalUpdates`.

A replica runs Keras' own step on its rows, as one device would, and no message is sent. The program counts
the steps of a phase, and ends it after the last. `end_local_phase` ends one that has fewer: where an epoch
ends, and where a preempted task saves. Between two phases all replicas hold the same weights, moving
statistics and metrics; during one, everything outside of the steps sees those of the last end. Backups are
written between two phases, so that they do not change what is trained.

With several fragments a phase exchanges one after another, the last one and all but the weights at its end:
there, too, replicas differ in the others. `end_local_phase` exchanges all that were trained since. A backup
within an epoch has the shared values, with which all replicas continue when it is restored.

With `overlap` the programs of steps exchange nothing: `_exchange_beside_steps` sends fragments in programs of
its own, and groups of steps end where one is sent or applied.

Tests: tests/virtual/strategies/test_local_updates.py.
"""

from __future__ import annotations

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
from unisono.step._dispatch import CompiledStep
from unisono.step._engines import UNSHARDED
from unisono.step._keras_internals import store_value, stored_value, trained_variables
from unisono.step._layout import VariableLayout
from unisono.step.variables._local_layout import LocalLayout, PairLayout, Turn
from unisono.step.variables._merge_rules import Merge, merge_all
from unisono.training._model_state import release_state
from unisono.training.groups._batch_placement import BatchGroup
from unisono.training.groups._batch_policy import BatchPolicy
from unisono.training.groups._batch_source import BatchSource
from unisono.training.replica._step_reading import StepReading
from unisono.training.stateful._form import is_stateful
from unisono.training.trainer._exchange_beside_steps import ExchangeBesideSteps
from unisono.training.trainer._fit_state import FitState, PureStep
from unisono.training.trainer._protocol import State, plain_function_of
from unisono.training.trainer._trainer_function import ReadyProgram, TrainerFunction
from unisono.training.trainer._trainer_step import TrainerStep, TrainerTask, localized, variables_of

if TYPE_CHECKING:
    from unisono.strategies._replicated import ReplicatedStrategy

#: Which copies of a variable differ within a phase, and are made one at its end.
_MERGED = (Merge.MEAN, Merge.SUM, Merge.FIRST)

#: The lists of a training step's state: their places.
_TRAINABLE, _NON_TRAINABLE, _OPTIMIZER, _METRICS = range(4)


def is_in_phase(model: keras.Model) -> bool:
    """Return whether replicas of a model hold what the others have not got yet: it trains apart, in `fit`."""
    function = plain_function_of(getattr(model, "train_function", None))
    return isinstance(function, LocalTrainFunction) and function.steps_in_phase > 0


def steps_to_end_of_phase(function: Callable[..., object]) -> int:
    """Return after how many steps of a train function a phase ends; a large number without phases."""
    if not isinstance(function, LocalTrainFunction):
        return sys.maxsize
    return function.every - function.steps_in_phase


def end_local_phase(model: keras.Model) -> None:
    """Let the replicas of a model that trains apart exchange what they have learned; all workers call it."""
    function = plain_function_of(getattr(model, "train_function", None))
    if isinstance(function, LocalTrainFunction):
        function.end_phase()


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
            for rule, old, x in zip(self.rules()[_METRICS], state[_METRICS], new[_METRICS], strict=True)
        ]
        return logs, (*new[:_METRICS], metrics)


class LocalState(FitState):
    """The state between steps of replicas that train apart."""

    #: The places in the list of non-trainable variables that the step changes; known when it was traced.
    _changed: Sequence[int] = ()

    @property
    def _local(self) -> LocalLayout:
        # What this class is made for.
        return self._layout  # type: ignore[return-value]

    def _layouts_of_state(self) -> tuple[list[VariableLayout], ...]:
        super()._layouts_of_state()
        mesh = self._strategy.mesh
        rules = LocalStep(self._model, self._strategy, self._task).rules()
        layouts: list[list[VariableLayout]] = []
        for number, part in enumerate(variables_of(self._model, self._task)):
            layouts.append(
                [
                    PairLayout(mesh, rule)
                    if number == _TRAINABLE or (rule in _MERGED and number != _OPTIMIZER)
                    else self._layout.of(variable)
                    for variable, rule in zip(part, rules[number], strict=True)
                ]
            )
        return tuple(layouts)

    def in_step(self, step: PureStep) -> PureStep:
        """Return a step for the arrays of a program, which exchanges the fragments that are due."""
        layouts, ends = self._layouts, np.array(self._local.sync.ends)

        def program(state: State, batch: PyTree) -> tuple[PyTree, State]:
            own = tuple(
                [one.enter(x, True) for one, x in zip(part, xs, strict=True)]
                for part, xs in zip(layouts, state, strict=True)
            )
            logs, new = step(own, batch)
            before, after = own[_NON_TRAINABLE], new[_NON_TRAINABLE]
            # What a step did not change is the same object.
            self._changed = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a is not b]
            left = tuple(
                [_left(one, old, x) for one, old, x in zip(part, olds, xs, strict=True)]
                for part, olds, xs in zip(layouts, state, new, strict=True)
            )
            if self._local.sync.overlap:
                return logs, left
            # The last fragment's steps are those of the phase.
            return logs, self._exchanged_if(left, lambda steps: steps + 1, lambda steps: steps[-1] == ends)

        return program

    def end_program(self) -> CompiledStep[State, PyTree, PyTree]:
        """Return the program that ends a phase of fewer steps, and leaves a state without one as it is.

        With `overlap` it is given which fragments are exchanged.
        """

        def program(state: State, due: PyTree) -> tuple[PyTree, State]:
            is_given = self._local.sync.overlap > 0
            return (), self._exchanged_if(
                state, lambda steps: steps, lambda steps: due if is_given else steps > 0
            )

        return self.compiled(program, UNSHARDED)

    def compiled(self, program: PureStep, given: PyTree) -> CompiledStep[State, PyTree, PyTree]:
        """Return a program that changes the state between two steps, and gives nothing else.

        Args:
            given: how what it gets besides lies on the replicas.
        """
        strategy = self._strategy
        return CompiledStep(
            program,
            strategy.mesh,
            state_shardings=self.shardings,
            in_specs=(self.specs, given),
            out_specs=((), self.specs),
            process_group=strategy.process_group,
        )

    @property
    def engine(self) -> ReplicaEngine:
        """How a replica exchanges values with the others inside of a program."""
        return LocalStep(self._model, self._strategy, self._task).engine()

    def turn(self, number: int) -> Turn:
        """Return what the exchange of a fragment changes: the last one's that of all but weights, too."""
        fragments = self._local.added(self._model.optimizer).fragments
        fragment, others = fragments[number], self._joined() if number == len(fragments) - 1 else []
        numbers = {id(v): i for i, v in enumerate(self._model.trainable_variables)}
        trained = trained_variables(self._model.optimizer)
        return Turn(
            fragment.outer,
            [(_TRAINABLE, numbers[id(trained[i])]) for i in fragment.weights],
            others,
            [self._layouts[p][i].rule for p, i in others],  # type: ignore[attr-defined]
            [(_OPTIMIZER, i) for i in fragment.values],
        )

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
        added = self._local.added(self._model.optimizer)
        held = parts[_OPTIMIZER][added.steps]
        steps = count(jnp.atleast_1d(held))
        due = is_due(steps)
        for number in range(len(added.fragments)):
            self._exchange_if(due[number], parts, self.turn(number))
        parts[_OPTIMIZER][added.steps] = jnp.where(due, 0, steps).astype(jnp.int32).reshape(held.shape)
        return tuple(parts)

    def _joined(self) -> list[tuple[int, int]]:
        """Return the places of all but weights that replicas change apart: the end of a phase joins it."""
        changed = [(_NON_TRAINABLE, i) for i in self._changed]
        changed += [(_METRICS, i) for i in range(len(self._layouts[_METRICS]))]
        return [(p, i) for p, i in changed if isinstance(self._layouts[p][i], PairLayout)]

    def _exchange_if(self, is_due: jax.Array, parts: list[list[Any]], turn: Turn) -> None:
        """Exchange a fragment, and what is joined with it, if it is due."""
        engine = self.engine

        def exchange(given: Any) -> Any:
            found = turn.exchanged(given, engine)
            # Both branches must give the same types, weak ones included.
            return jax.tree.map(lambda old, new: jnp.asarray(new, old.dtype), given, found)

        turn.put(parts, jax.lax.cond(is_due, exchange, lambda same: same, turn.of(parts)))

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

    def __init__(self, model: keras.Model, replicas: int, read: object, joins: bool = False) -> None:
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
    carried: LocalState

    def __init__(self, model: keras.Model, strategy: ReplicatedStrategy, task: TrainerTask) -> None:
        super().__init__(model, strategy, task)
        self._model = model
        layout = strategy.state_layout
        #: How many steps a phase has, and how many of the running one are done, where steps do not run again.
        self.every = layout.sync.every if isinstance(layout, LocalLayout) else 1
        self.steps_in_phase = 0
        #: What is sent while the next steps run; None where steps wait for it.
        self._beside: ExchangeBesideSteps | None = None
        if isinstance(layout, LocalLayout) and layout.sync.overlap:
            self._beside = beside = ExchangeBesideSteps(strategy, layout, self.carried)
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
        return super().prepare(group)

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


def _why_not(model: keras.Model) -> str | None:
    """Return why a model cannot train apart; None where it can."""
    if is_stateful(model, TrainerTask.TRAIN):
        return (
            "a `train_step(self, data)` in TensorFlow's form: write one of Keras 3, `train_step(state, data)`"
        )
    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        return 'a `LossScaleOptimizer`, whose scale belongs to all replicas: use `"mixed_bfloat16"`'
    return None
