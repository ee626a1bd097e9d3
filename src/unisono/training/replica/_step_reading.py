"""How a model's step treats the rows of a batch and its own state, read from its trace before it runs.

Replicas compute their own rows, so that a step is that of one device where each row's values depend on this
row alone, and each state on rows by a sum, a mean, or a largest value. The step is traced for two numbers of
rows, without computing, and `_row_analysis` says which of these holds. A step of which this cannot be shown
is computed over all rows together. The findings are collected for `strategy.explain`.

Tests: tests/virtual/training/test_step_reading.py.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._context import entered
from unisono._system._blocks import set_for_block
from unisono._types import ArrayLike, PyTree
from unisono.step._keras_internals import all_layers, loss_of_step, stored_dtype, takes_training
from unisono.step.variables._merge_rules import Merge, is_guess, kind_of, merge_rule
from unisono.training._jaxprs import has_groups
from unisono.training.replica._rows import (
    DiscardingScope,
    has_own,
    is_per_replica,
    is_synchronized,
    masks_of,
    rows_of,
)
from unisono.training.rows._row_analysis import traced_states
from unisono.training.rows._row_states import (
    AccumulatedSum,
    Constant,
    Extreme,
    Mixed,
    Reduced,
    RowState,
    RowWise,
)


@dataclasses.dataclass(frozen=True)
class PartTreatment:
    """One line of what was read.

    Args:
        part: a layer, a state, a loss, metrics or an output.
        treatment: how it is computed on several replicas.
        reason: why.
    """

    part: str
    treatment: str
    reason: str


#: Collects what losses and metrics decide while a step is traced; None where they are not collected.
_NOTED: ContextVar[list[PartTreatment] | None] = ContextVar("unisono_noted", default=None)


def collected_in(findings: list[PartTreatment]) -> AbstractContextManager[object]:
    """Collect what is noted in a block.

    Args:
        findings: gets each finding once.
    """
    return set_for_block(_NOTED, findings)


def note(part: str, treatment: str, reason: str) -> None:
    """Note how a part is computed, where findings are collected."""
    findings = _NOTED.get()
    if findings is not None and (found := PartTreatment(part, treatment, reason)) not in findings:
        findings.append(found)


@dataclasses.dataclass(frozen=True)
class StepReading:
    """What was read from a step.

    Args:
        mixes: why all rows must be computed together; empty where each replica may compute its own.
        rules: by `id` of a variable, how the replicas' copies of it become one.
        apart: names of layers that see one replica's rows alone although rows matter to each other there.
        draws: names of the random generators that the step uses.
        unfillable: why a batch cannot be filled up with further rows; empty where it can.
        findings: all that was read, for people.
        others: what else differs from one device, as sentences.
        results: names of a step's logs that are the results of the model's metrics; None where logs with
            their names are.
        has_groups: whether it has, or may have, a convolution of groups of channels.
    """

    mixes: str = ""
    rules: Mapping[int, Merge] = dataclasses.field(default_factory=dict)
    apart: tuple[str, ...] = ()
    draws: tuple[str, ...] = ()
    unfillable: str = "the step was not read"
    findings: tuple[PartTreatment, ...] = ()
    others: tuple[str, ...] = ()
    results: frozenset[str] | None = None
    has_groups: bool = True

    def agrees_with(self, other: StepReading) -> bool:
        """Return whether replicas run the step in the same way by another reading."""
        mine, theirs = ((x.rules, x.apart, x.draws, x.results) for x in (self, other))
        return mine == theirs


class StepReader:
    """Reads the step of a model when its first batch is there, and again for batches of other sizes.

    A layer may compute another number of rows in another way. What was read of the first batch holds then
    where both readings agree; where they do not, the rows of the other batch are computed together.

    Args:
        read: returns what is known of the step for a batch of all replicas' rows.
    """

    def __init__(self, read: Callable[[PyTree], StepReading]) -> None:
        self._read = read
        self._reading: StepReading | None = None

    @property
    def rules(self) -> Mapping[int, Merge]:
        """The merge rules that were read, by `id` of a variable; empty before the first batch."""
        return self._reading.rules if self._reading is not None else {}

    @property
    def results(self) -> frozenset[str] | None:
        """The names of logs that are the results of the model's metrics; see `StepReading`."""
        return self._reading.results if self._reading is not None else None

    def __call__(self, batch: PyTree) -> StepReading:
        """Return what is known of the step for a batch.

        Args:
            batch: pytree of arrays, as Keras' loop gives it.
        """
        # A user's layer may draw from these while it is traced: what follows must not notice.
        states = random.getstate(), np.random.get_state()
        reading = self._read(batch)
        random.setstate(states[0])
        np.random.set_state(states[1])
        if self._reading is None or self._reading.mixes:
            # How copies merge matters where replicas compute their own rows.
            self._reading = reading
        if not reading.mixes and not reading.agrees_with(self._reading):
            mixes = f"a batch of {rows_of(batch)} rows is computed in another way than others"
            reading = dataclasses.replace(reading, mixes=mixes)
        return reading


def read_step(
    model: keras.Model, training: bool, batch: PyTree, replicas: int, has_loss: bool = True
) -> StepReading:
    """Return what is known of a step of Keras' own.

    Args:
        training: whether the model's layers train.
        has_loss: whether the step computes a loss, as `fit` and `evaluate` do.
        batch: `(x, y, sample_weight)`, or a shorter tuple; only shapes and types count.
        replicas: at least 2.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    rows = rows_of(batch) or 0
    own = max(2, -(-rows // replicas))
    every = rows if rows > own else own * replicas
    step = _Forward(model, training, has_loss)
    arrays = shapes_of((x, y, sample_weight))
    try:
        trace, states = traced_states(step, arrays, step.kept, own, every, step.seeds, training)
    except Exception as error:  # a user's layer may do anything with another number of rows
        from unisono.training.rows._row_words import unreadable

        tried = lambda n: jax.eval_shape(step, *with_rows(arrays, n), *step.kept)  # noqa: E731
        reason, apart = unreadable(error, tried, own, rows)
        return StepReading("" if apart else reason, apart=apart, unfillable=reason)
    if rows == replicas:
        from unisono.training.rows._other_sizes import runs_with

        if not runs_with(1, step, arrays, step.kept, trace):
            reason = "one row is computed in another way than several"
            return StepReading(mixes=reason, unfillable=reason)
    return dataclasses.replace(_summary(step, states), has_groups=has_groups(trace))


def shapes_of(tree: PyTree) -> PyTree:
    """Return the shapes and types of arrays, none of which is moved."""

    def shape(x: ArrayLike) -> jax.ShapeDtypeStruct:
        x = x if hasattr(x, "dtype") else np.asarray(x)
        return jax.ShapeDtypeStruct(tuple(x.shape), jax.dtypes.canonicalize_dtype(x.dtype))

    return jax.tree.map(shape, tree)


def with_rows(tree: PyTree, rows: int) -> PyTree:
    """Return the shapes of arrays with another number of rows; scalars keep theirs."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]) if x.ndim else (), x.dtype), tree)


def calls_apart(model: keras.Model, found: dict[int, keras.Layer]) -> AbstractContextManager[None]:
    """Replace layers that are meant to see one replica's rows for a block; see `replaced_calls`."""
    if not any(map(is_per_replica, all_layers(model))):
        return nullcontext()
    from unisono.training.replica._per_replica_layers import replaced_calls

    return replaced_calls(model, found)


class _Forward:
    """The part of a step that relates rows: from a batch to outputs, losses and new states. Pure."""

    def __init__(self, model: keras.Model, training: bool, has_loss: bool) -> None:
        self.model, self.training = model, training
        self.trained = list(model.trainable_variables)
        self.states = list(model.non_trainable_variables)
        #: The values of both, whose shapes alone count.
        self.kept = tuple(
            [jax.ShapeDtypeStruct(tuple(v.shape), stored_dtype(v)) for v in part]
            for part in (self.trained, self.states)
        )
        #: Which of them are states of random generators.
        self.seeds = [len(self.trained) + i for i, v in enumerate(self.states) if kind_of(v).is_seed]
        #: Layers that saw one replica's rows alone, and whether an output had a mask, in the last trace.
        self.apart: dict[int, keras.Layer] = {}
        self.has_masks = False
        #: Paths of outputs, and how many losses layers have added.
        self.outputs: list[str] = []
        self.num_losses = 0
        #: Outputs that have not one entry for each row, and those that have no number of them for each.
        self.uneven: set[str] = set()
        self.rowless: set[str] = set()
        self.has_loss = has_loss
        self.replaces_loss = has_loss and has_own(model, "compute_loss")

    def __call__(
        self, x: PyTree, y: PyTree, sample_weight: PyTree, trained: list[jax.Array], states: list[jax.Array]
    ) -> tuple[PyTree, list[jax.Array], list[jax.Array]]:
        """Return outputs, losses, and the states after the step."""
        pairs = [*zip(self.trained, trained, strict=True), *zip(self.states, states, strict=True)]
        # In `fit` metrics have no values of their own. A loss of several outputs has a metric for each.
        pairs += [(v, jnp.zeros(tuple(v.shape), stored_dtype(v))) for v in self.model.metrics_variables]
        kwargs = {"training": self.training} if takes_training(self.model) else {}
        with entered(None), DiscardingScope(pairs, collect_losses=True) as scope:
            with calls_apart(self.model, self.apart):
                outputs = self.model(x, **kwargs)
            losses = [jnp.sum(x) if jnp.ndim(x) else jnp.asarray(x) for x in self.model.losses]
            self.num_losses = len(losses)
            if self.replaces_loss:
                losses.append(loss_of_step(self.model, x, y, outputs, sample_weight, training=self.training))
        self.has_masks = bool(masks_of(outputs))
        paths = jax.tree_util.tree_leaves_with_path(outputs)
        self.outputs = [f"output{jax.tree_util.keystr(path)}" for path, _ in paths]
        rows = rows_of(x) or 1
        lengths = {n: v.shape[0] if jnp.ndim(v) else 0 for n, (_, v) in zip(self.outputs, paths, strict=True)}
        self.uneven = {name for name, length in lengths.items() if length != rows}
        self.rowless = {name for name, length in lengths.items() if length % rows or not length}
        return (
            outputs,
            losses,
            [_value_after(scope, v, old) for v, old in zip(self.states, states, strict=True)],
        )


def _value_after(scope: keras.StatelessScope, variable: keras.Variable, before: jax.Array) -> jax.Array:
    value = scope.get_current_value(variable)
    return before if value is None else value


class StateRules:
    """How the replicas' copies of a step's states become one, one state after the other.

    Args:
        apart: layers that see one replica's rows alone.
    """

    def __init__(self, apart: Iterable[keras.Layer]) -> None:
        layers = list(apart)
        self.names = tuple(layer.name for layer in layers if not is_synchronized(layer))
        self._of_apart = {id(v) for layer in layers for v in layer.variables}
        self.rules: dict[int, Merge] = {}
        #: Paths of random generators that the step uses, and of states that depend on rows.
        self.drawn: list[str] = []
        self.changed: list[str] = []
        #: Why rows must be computed together, as far as states are concerned.
        self.mixes: list[str] = []
        self.findings: list[PartTreatment] = []

    @property
    def draws(self) -> tuple[str, ...]:
        """The paths of random generators that the step uses."""
        return tuple(self.drawn)

    def add(self, variable: keras.Variable, state: RowState, number: int) -> None:
        """Note what is known of a state after the step.

        Args:
            number: of the state before the step, among the arguments that are the same for any rows.
        """
        declared = merge_rule(kind_of(variable))
        if id(variable) in self._of_apart:
            self.changed.append(variable.path)
            self._note(variable, declared, "its layer sees the rows of one replica")
        elif isinstance(state, Constant) and state.origin == number:
            self.rules[id(variable)] = Merge.KEEP
        elif kind_of(variable).is_seed:
            self._add_seed(variable, state)
        elif not is_guess(variable):
            self.changed.append(variable.path)
            self._note(variable, declared, "as it is declared")
        elif (rule := rule_of(state, number, variable)) is not None:
            self.rules[id(variable)] = rule
            self.changed += [variable.path] * (rule is not Merge.KEEP)
            self._note(variable, rule, meaning_of(state))
        else:
            self.mixes.append(f"{variable.path} relates rows to each other ({cause_of(state)})")
            self.findings.append(PartTreatment(variable.path, TOGETHER, cause_of(state)))

    def _add_seed(self, variable: keras.Variable, state: RowState) -> None:
        if state == Constant():
            self.drawn.append(variable.path)
            self._note(variable, Merge.SEED, "each replica draws for its own rows")
        else:
            self.mixes.append(f"{variable.path} depends on the rows ({cause_of(state)})")

    def _note(self, variable: keras.Variable, rule: Merge, reason: str) -> None:
        self.findings.append(PartTreatment(variable.path, rule.value, reason))


def _summary(step: _Forward, states: Sequence[RowState]) -> StepReading:
    """Return what the states of a step's results mean for it."""
    count, losses = len(step.outputs), step.num_losses + step.replaces_loss
    findings: list[PartTreatment] = []
    mixes: list[str] = []

    def note(part: str, state: RowState, is_right: bool, treatment: str) -> None:
        reason = meaning_of(state) if is_right else cause_of(state)
        findings.append(PartTreatment(part, treatment if is_right else TOGETHER, reason))
        if not is_right:
            mixes.append(f"{part} relates rows to each other ({reason})")

    for name, state in zip(step.outputs, states, strict=False):
        if name in (step.rowless if step.has_loss else step.uneven):
            mixes.append(f"{name} has not one entry for each row")
        note(name, state, state in (RowWise(0), Constant()), APART)
    added = states[count : count + losses]
    for i, state in enumerate(added):
        # `compute_loss` returns the loss of the batch, of which replicas take the mean.
        is_own = i == step.num_losses
        right = {Reduced(-1), Constant()} if is_own else {Reduced(-1), Constant(), Reduced(0)}
        name = "compute_loss" if is_own else f"added loss {i}"
        note(name, state, state in right, "added up over the replicas")
    found = StateRules(step.apart.values())
    for i, (variable, state) in enumerate(zip(step.states, states[count + losses :], strict=True)):
        found.add(variable, state, len(step.trained) + i)
    mixes += found.mixes
    reasons = (
        f"the layer {found.names[0]!r} sees the rows of one replica" if found.names else "",
        "an output has a mask" if step.has_masks else "",
        "an output has not one entry for each row" if step.uneven else "",
        "the model adds losses of its rows" if any(s != Constant() for s in added) else "",
        "the model has a `compute_loss` of its own" if step.replaces_loss else "",
        f"the state {found.changed[0]!r} depends on the rows" if found.changed else "",
    )
    return StepReading(
        mixes[0] if mixes else "",
        found.rules,
        found.names,
        found.draws,
        next(filter(None, reasons), ""),
        (*findings, *found.findings),
    )


#: How outputs are computed: their rows are apart, or not.
APART, TOGETHER = "by each replica for its rows", "over all rows together"


def cause_of(state: RowState) -> str:
    """Return which operation relates rows to each other, in words."""
    if not isinstance(state, Mixed) or not state.cause:
        return meaning_of(state)
    from unisono.training.rows._row_words import in_words

    return in_words(state.cause)


def rule_of(state: RowState, number: int, variable: keras.Variable) -> Merge | None:
    """Return how copies of a state become one; None where all rows are needed."""
    match state:
        case Constant(power=0, is_own=False):
            return Merge.KEEP
        case Constant(power=1) | Reduced(power=0):
            return Merge.TOTAL
        case Reduced(power=-1) if kind_of(variable).is_float:
            return Merge.MEAN
        case AccumulatedSum(origin=origin) if origin == number:
            return Merge.CHANGE
        case Extreme(is_largest=is_largest):
            return Merge.LARGEST if is_largest else Merge.SMALLEST
    return None


def meaning_of(state: RowState) -> str:
    """Return what a state is of the rows, in words."""
    match state:
        case RowWise(axis=0, power=0):
            return "each row depends on itself"
        case Constant(power=0):
            return "it does not depend on the rows"
        case Constant() | Reduced(power=0):
            return "it is a sum over the rows"
        case Reduced():
            return "it is a mean over the rows"
        case AccumulatedSum():
            return "a sum over the rows is added to it"
        case Extreme(is_largest=is_largest):
            return f"it is the {'largest' if is_largest else 'smallest'} value over the rows"
    return "it depends on several rows"
