"""A step of `strategy.run`, or in TensorFlow's form, read from its trace before it runs.

Such a step is each replica's own. Where neither Keras nor the user has said how the replicas' copies of a
state become one, the library takes the mean, or the first; the trace says whether this is right.

Tests: tests/virtual/training/test_step_reading.py.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import keras

from unisono.step._call_signature import CallArray
from unisono.step._functional import ReplicatedStep, Slot, StatePlan
from unisono.step._keras_internals import stored_dtype
from unisono.step.variables._merge_rules import Merge, is_guess
from unisono.training.replica._own_step_reading import REDUCIBLE, ReadingEngine
from unisono.training.replica._step_reading import cause_of, meaning_of, rule_of
from unisono.training.rows._row_analysis import traced_states
from unisono.training.rows._row_states import RowState

_LOG = logging.getLogger("unisono")

#: Of the variables whose copies are summed up in one call, in the order of the plan.
_SUMMED = (Merge.SUM, Merge.FIRST, Merge.TOTAL)


class GuessedState(NamedTuple):
    """A variable whose copies merge by a guess, and what the trace says.

    Args:
        rule: by which the copies would become the value of one device; None where there is none.
    """

    variable: keras.Variable
    rule: Merge | None
    meaning: str


class ReplicatedReading(NamedTuple):
    """What was read from a step.

    Args:
        mixes: why what the replicas reduce is not that of one device; empty where it is.
    """

    mixes: str
    guessed: list[GuessedState]


def read_replicated(step: ReplicatedStep) -> ReplicatedReading | None:
    """Return what is known of a step; None where it cannot be read.

    Args:
        step: with its plan, and a call whose arrays all have as many rows.
    """
    if step.plan is None or step.call.is_ragged or not step.replicas.state_layout.is_whole:
        return None
    arrays, split = step.call.arrays, step.call.split
    rows = {x.shape[1] if x.ndim > 1 else 0 for x, is_split in zip(arrays, split, strict=True) if is_split}
    slots = step.plan.slots
    if len(rows) != 1 or 0 in rows or any(slot.is_stacked for slot in slots):
        return None
    trace = _ReducedValues(step, max(2, rows.pop()))
    try:
        states = trace.states()
    except Exception:  # a user's step may do anything with another number of rows, or need the other replicas
        return None
    return trace.reading(states)


def warn_of_guesses(step: ReplicatedStep) -> None:
    """Warn where the copies of a state merge in another way than its step computes it.

    Args:
        step: given to `strategy.run`.
    """
    if step.plan is None or not any(_is_guessed(slot) for slot in step.plan.slots):
        return
    reading = read_replicated(step)
    for variable, rule, meaning in reading.guessed if reading is not None else ():
        found = next(slot.rule for slot in step.plan.slots if slot.variable is variable)
        if rule not in (found, Merge.KEEP):
            _LOG.warning(
                "After `strategy.run` %r is %s, and not what one device computes of all rows: %s. Say what "
                'it is where it is made: `self.add_weight(..., aggregation="sum")`, "mean" or '
                '"only_first_replica"; or reduce it in the step.',
                variable.path, found.value, meaning,
            )  # fmt: skip


def _is_guessed(slot: Slot) -> bool:
    return slot.written and slot.rule in (Merge.MEAN, Merge.FIRST) and is_guess(slot.variable)


class _ReducedValues:
    """A step as a function of rows, and of what is the same for any rows: to what replicas would reduce."""

    def __init__(self, step: ReplicatedStep, rows: int) -> None:
        self._rows, self._total = rows, 2 * rows * step.replicas.num_replicas_in_sync
        plan = step.plan or StatePlan()
        # Merged as sums, so that the engine is given the copies themselves.
        self._slots = [dataclasses.replace(s, rule=Merge.TOTAL) if _is_guessed(s) else s for s in plan.slots]
        self._guessed = {id(s.variable) for s in plan.slots if _is_guessed(s)}
        self._step = dataclasses.replace(step, plan=StatePlan(tuple(self._slots)), scopes=[])
        self._split = step.call.split
        self._engine: ReadingEngine | None = None

    def states(self) -> list[RowState]:
        """Return what is known of each array that is reduced."""
        arrays = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in self._step.call.arrays]
        given = [
            jax.ShapeDtypeStruct((self._rows, *x.shape[2:]), x.dtype)
            for x, is_split in zip(arrays, self._split, strict=True)
            if is_split
        ]
        same = [x for x, is_split in zip(arrays, self._split, strict=True) if not is_split]
        values = [
            jax.ShapeDtypeStruct(tuple(s.variable.shape), stored_dtype(s.variable)) for s in self._slots
        ]
        unknown = jax.ShapeDtypeStruct((), jnp.float32)
        kept = values, same, unknown
        return traced_states(self._reduced, (given,), kept, self._rows, 2 * self._rows)[1]

    def _reduced(
        self,
        given: Sequence[jax.Array],
        values: list[jax.Array],
        same: Sequence[jax.Array],
        unknown: jax.Array,
    ) -> list[jax.Array]:
        self._engine = engine = ReadingEngine(self._total // given[0].shape[0], unknown, ())
        of_split, of_same = iter(given), iter(same)
        arrays: list[CallArray] = [next(of_split)[None] if s else next(of_same) for s in self._split]
        self._step.one_replica(engine, values, arrays)
        return [x for _, x in engine.reduced]

    def reading(self, states: Sequence[RowState]) -> ReplicatedReading:
        """Return what the states mean."""
        ops = [op for op, _ in self._engine.reduced] if self._engine is not None else []
        written = [(i, s) for i, s in enumerate(self._slots) if s.written]
        summed = [(i, s.variable) for i, s in written if s.rule in _SUMMED]
        # At the end of a step sums travel in one call, and then means.
        first = len(states) - len(summed) - sum(s.rule is Merge.MEAN for _, s in written)
        mixes = ""
        for op, state in zip(ops[:first], states[:first], strict=True):
            if state not in REDUCIBLE[op]:
                mixes = f"what replicas would reduce is no {op.name.lower()} over rows ({cause_of(state)})"
                break
        copies = zip(summed, states[first : first + len(summed)], strict=True)
        guessed = [
            GuessedState(variable, rule_of(state, i, variable), _why(state))
            for (i, variable), state in copies
            if id(variable) in self._guessed
        ]
        return ReplicatedReading(mixes, guessed)


def _why(state: RowState) -> str:
    meaning, cause = meaning_of(state), cause_of(state)
    return meaning if cause == meaning else f"{meaning} ({cause})"
