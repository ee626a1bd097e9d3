"""The program of a worker: from values of variables and a batch to what is pushed, and results.

What a variable's new value becomes is read from the traced program:

| the new value | is pushed as |
|---|---|
| of an optimizer's update | gradients, for the servers' own update |
| depends on the old one: metrics, moving statistics, counters | an addition: new - old |
| does not depend on it | an overwrite |
| of a random generator: the state plus a constant | nothing: the chief counts, see `RandomStream` |

Tests: tests/virtual/training/pushed/test_worker_step.py.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import keras
import numpy as np

from unisono._errors import UnsupportedError
from unisono._types import PyTree, UserValue
from unisono.step._call_signature import Result
from unisono.step._keras_internals import stored_dtype, trained_variables
from unisono.step.variables._merge_rules import kind_of
from unisono.training.pushed._jaxprs import Mask, dependencies, exported, is_argument, pruned
from unisono.training.pushed._push_layout import GradientNotes, PushLayout, PushTrace, pushing
from unisono.training.pushed._server_update import slots_that_stay

#: From values of the variables and arrays to a result, and by `id` the new values of what was written.
Body = Callable[[list[jax.Array], list[jax.Array]], tuple[UserValue, Mapping[int, jax.Array]]]

#: States of a random generator from which its steps are measured.
_PROBES = (0, 1, 0x9E3779B9, 0xFFFFFFFF)


@dataclasses.dataclass(frozen=True)
class RandomStream:
    """A random generator of a program, whose state the chief holds and gives to each run.

    No two runs get the same state, and a run that is repeated gets the same again. With one worker the
    states are those that one device would have.

    Args:
        variable: the generator's state.
        increment: what one run adds to it, modulo 2**32.
    """

    variable: keras.Variable
    increment: np.ndarray

    def advanced(self, state: np.ndarray) -> np.ndarray:
        """Return the state for the run after the one that was given `state`."""
        advanced: np.ndarray = np.add(state, self.increment)
        return advanced


#: The same; a shorter name.
Stream = RandomStream


@dataclasses.dataclass(frozen=True, eq=False)
class WorkerProgram:
    """A step as bytes, with what it takes and gives, in this order.

    It takes `reads`, `streams`, then `arrays`; it gives `gradients`, `extras`, `adds`, `assigns`, then the
    arrays of the result. All are flat.

    Args:
        blob: the serialized `jax.export.Exported`; a function of one argument for each array.
        reads: variables whose values the worker pulls.
        streams: random generators, whose states come with the call.
        arrays: the numbers of the call's arrays that the program takes: a step may ignore some.
        gradients: pairs of an optimizer and a variable that it trains.
        extras: pairs of an optimizer and a name; these arrays go to all servers of its variables.
        adds: variables to whose values something is added.
        assigns: variables that are overwritten.
        result: puts the result together, of the arrays that the worker sends back.
        specs: shapes and types of all that the program takes.
    """

    blob: bytes
    reads: tuple[keras.Variable, ...]
    streams: tuple[RandomStream, ...]
    arrays: tuple[int, ...]
    gradients: tuple[tuple[keras.Optimizer, keras.Variable], ...]
    extras: tuple[tuple[keras.Optimizer, str], ...]
    adds: tuple[keras.Variable, ...]
    assigns: tuple[keras.Variable, ...]
    result: Result
    specs: tuple[jax.ShapeDtypeStruct, ...]

    @property
    def digest(self) -> str:
        """The name of the program: a hash of its bytes."""
        return hashlib.sha256(self.blob).hexdigest()

    @property
    def optimizers(self) -> tuple[keras.Optimizer, ...]:
        """The optimizers that update after a run, each once."""
        return tuple({id(o): o for o, _ in self.gradients}.values())

    def has_gradient(self, optimizer: keras.Optimizer) -> tuple[bool, ...]:
        """Return, for each variable that an optimizer trains, whether the program pushes a gradient.

        Args:
            optimizer: one of `optimizers`.
        """
        given = {id(v) for o, v in self.gradients if o is optimizer}
        return tuple(id(v) in given for v in trained_variables(optimizer))

    def split(self, outputs: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any], list[Any], list[Any]]:
        """Return what a run gave as gradients, extras, additions, overwrites and arrays of the result.

        Args:
            outputs: of the program.
        """
        parts, at = [], 0
        for group in (self.gradients, self.extras, self.adds, self.assigns):
            parts.append(list(outputs[at : at + len(group)]))
            at += len(group)
        gradients, extras, adds, assigns = parts
        return gradients, extras, adds, assigns, list(outputs[at:])


def make_program(
    body: Body,
    variables: Sequence[keras.Variable],
    notes: Sequence[GradientNotes],
    arrays: Sequence[jax.ShapeDtypeStruct],
    platforms: Sequence[str],
) -> WorkerProgram:
    """Trace a step and return its program.

    Args:
        body: the step.
        variables: all that it may read or write.
        notes: of the optimizers that it may call, from `PushLayout.notes_of`.
        arrays: shapes and types of the call's arrays.
        platforms: on which the program may run.

    Raises:
        UnsupportedError: for a step that no worker can run by itself.
    """
    trace = _StepTrace(body, variables, notes, arrays)
    found = _Programmed(trace, trace.closed())
    if found.read_afterwards:
        # Only here, since it takes a trace of the update: what it does not change can be read after it.
        trace.leave([slot for n in notes for slot in slots_that_stay(n.optimizer)])
        found = _Programmed(trace, trace.closed())
    return found.program(platforms)


class _StepTrace:
    """One trace of a step: its arguments and results, with what each of them stands for."""

    def __init__(
        self,
        body: Body,
        variables: Sequence[keras.Variable],
        notes: Sequence[GradientNotes],
        arrays: Sequence[jax.ShapeDtypeStruct],
    ) -> None:
        self._body, self.variables, self.notes = body, list(variables), list(notes)
        self.updated = [v for n in notes for v in (*trained_variables(n.optimizer), *n.optimizer.variables)]
        self._arrays = list(arrays)
        #: What the trace has written: variables, and places of gradients.
        self.written: list[keras.Variable] = []
        self.result = Result.parse(None)[0]

    @property
    def specs(self) -> list[jax.ShapeDtypeStruct]:
        """Shapes and types of all arguments."""
        return [*map(_spec, self.variables), *map(_spec, self.updated), *self._arrays]

    def leave(self, variables: Sequence[keras.Variable]) -> None:
        """Let variables keep their values in updates.

        Args:
            variables: that no update changes.
        """
        kept = {id(v) for v in variables}
        self.updated = [v for v in self.updated if id(v) not in kept]

    def closed(self) -> jex.ClosedJaxpr:
        """Return the traced step, from all arguments to the written values and the result's arrays."""
        return jax.make_jaxpr(self._flat)(*self.specs)

    def _flat(self, *given: jax.Array) -> list[jax.Array]:
        values = list(given[: len(self.variables)])
        after = given[len(values) : len(values) + len(self.updated)]
        arrays = list(given[len(values) + len(after) :])
        named = {id(v): x for v, x in zip(self.updated, after, strict=True)}
        with pushing(PushTrace(named)):
            result, new = self._body(values, arrays)
        known = {id(v): v for v in [*self.variables, *(v for n in self.notes for v in n.variables)]}
        if unknown := [key for key in new if key not in known]:
            raise UnsupportedError(
                "A step on a parameter-server cluster must write the model's own variables, and those that "
                f"it wrote when it was first traced. Received: {len(unknown)} others. Create variables in "
                "the strategy's scope, before the first step."
            )
        self.written = [known[key] for key in new]
        self.result, outputs = Result.parse(result)
        return [*(jnp.asarray(x) for x in new.values()), *outputs]


class _Programmed:
    """What a traced step reads and writes, sorted by how it is pulled and pushed."""

    def __init__(self, trace: _StepTrace, closed: jex.ClosedJaxpr) -> None:
        self._trace, self._closed = trace, closed
        count = len(trace.variables)
        self._argument = {id(v): i for i, v in enumerate(trace.variables)}
        #: By variable: the argument that stands for its value after an update.
        self._after = {id(v): count + i for i, v in enumerate(trace.updated)}
        self._first_array = count + len(trace.updated)
        masks = dependencies(closed)
        self.streams: list[RandomStream] = []
        self.adds: list[int] = []
        self.assigns: list[int] = []
        noted = {id(v) for n in trace.notes for v in n.variables}
        for number, variable in enumerate(trace.written):
            if id(variable) not in noted and not self._stays(number, variable):
                self._sort(number, variable, masks[number])
        of_note = {id(v): i for i, v in enumerate(trace.written)}
        self.gradients = [
            (of_note[id(note)], notes.optimizer, variable)
            for notes in trace.notes
            for note, variable in zip(notes.gradients, trained_variables(notes.optimizer), strict=True)
            if id(note) in of_note
        ]
        self.extras = [
            (of_note[id(note)], notes.optimizer, name)
            for notes in trace.notes
            for name, note in notes.extras.items()
            if id(note) in of_note
        ]

    def _stays(self, number: int, variable: keras.Variable) -> bool:
        """Whether a written variable has its old value, or that of the servers' update."""
        places = (self._argument[id(variable)], self._after.get(id(variable)))
        return any(place is not None and is_argument(self._closed, number, place) for place in places)

    def _sort(self, number: int, variable: keras.Variable, mask: Mask) -> None:
        own = 1 << self._argument[id(variable)]
        if kind_of(variable).is_seed:
            self.streams.append(self._stream(number, variable, mask == own))
        elif mask & own and not jnp.issubdtype(stored_dtype(variable), jnp.bool_):
            self.adds.append(number)
        else:
            self.assigns.append(number)

    def _stream(self, number: int, variable: keras.Variable, is_alone: bool) -> RandomStream:
        """Return by how much a run changes the state of a random generator.

        Raises:
            UnsupportedError: where that depends on anything else.
        """
        increments = self._increments(number, variable) if is_alone else []
        if not increments or any(not np.array_equal(i, increments[0]) for i in increments):
            raise UnsupportedError(
                "A step on a parameter-server cluster must draw the same number of random values in each "
                f"run, since workers draw at the same time. Received: {variable.path!r}, whose next state "
                "depends on the data. Draw outside of `keras.ops.cond`, and use the value inside."
            )
        return RandomStream(variable, increments[0])

    def _increments(self, number: int, variable: keras.Variable) -> list[np.ndarray]:
        wanted = [i == number for i in range(len(self._closed.jaxpr.outvars))]
        advance = jex.jaxpr_as_fun(pruned(self._closed, wanted)[0])
        dtype = np.dtype(stored_dtype(variable))
        states = [np.full(variable.shape, probe, np.uint32).astype(dtype) for probe in _PROBES]
        return [np.asarray(advance(state)[0]) - state for state in states]

    @functools.cached_property
    def _pushed(self) -> list[int]:
        return [i for i, *_ in self.gradients] + [i for i, *_ in self.extras]

    @functools.cached_property
    def _results(self) -> list[int]:
        return list(range(len(self._trace.written), len(self._closed.jaxpr.outvars)))

    @functools.cached_property
    def _needed(self) -> tuple[jex.ClosedJaxpr, list[int], dict[int, int]]:
        """The part of the trace that a worker computes, its arguments, and the place of each output in it."""
        # Results may share an array.
        outputs = {*self._pushed, *self.adds, *self.assigns, *self._results}
        count = len(self._closed.jaxpr.outvars)
        closed, used = pruned(self._closed, [i in outputs for i in range(count)])
        return closed, used, {number: at for at, number in enumerate(sorted(outputs))}

    @property
    def read_afterwards(self) -> list[keras.Variable]:
        """What the step reads after an optimizer's update of it."""
        first = len(self._trace.variables)
        return [self._trace.updated[i - first] for i in self._needed[1] if first <= i < self._first_array]

    def program(self, platforms: Sequence[str]) -> WorkerProgram:
        """Return the program of what was found."""
        self._check_reads()
        closed, used, place = self._needed
        pushed, results = self._pushed, self._results
        # What is added to a variable is the difference to its value: also where the trace does not need it.
        reads = {i for i in used if i < len(self._trace.variables)}
        reads |= {self._argument[id(self._trace.written[number])] for number in self.adds}
        given, streams, arrays = self._inputs(reads, used)
        taken = [*given, *(self._argument[id(s.variable)] for s in streams), *arrays]
        compute = jex.jaxpr_as_fun(closed)
        of_old = [taken.index(self._argument[id(self._trace.written[number])]) for number in self.adds]
        of_used = [taken.index(i) for i in used]

        def step(*values: jax.Array) -> list[jax.Array]:
            found = compute(*(values[i] for i in of_used))
            changed = [
                found[place[number]] - values[old] for number, old in zip(self.adds, of_old, strict=True)
            ]
            first = [found[place[number]] for number in pushed]
            return [*first, *changed, *(found[place[number]] for number in [*self.assigns, *results])]

        specs = tuple(self._trace.specs[i] for i in taken)
        written = self._trace.written
        return WorkerProgram(
            exported(step, specs, platforms),
            tuple(self._trace.variables[i] for i in given),
            tuple(streams),
            tuple(i - self._first_array for i in arrays),
            tuple((optimizer, variable) for _, optimizer, variable in self.gradients),
            tuple((optimizer, name) for _, optimizer, name in self.extras),
            tuple(written[number] for number in self.adds),
            tuple(written[number] for number in self.assigns),
            self._trace.result,
            specs,
        )

    def _inputs(
        self, reads: set[int], used: Sequence[int]
    ) -> tuple[list[int], list[RandomStream], list[int]]:
        """Return the arguments that are pulled, the generators whose state is given, and the arrays."""
        variables = self._trace.variables
        changed = {id(s.variable): s for s in self.streams}
        streams, given = [], []
        for i in sorted(reads):
            if not kind_of(variables[i]).is_seed:
                given.append(i)
                continue
            still = RandomStream(variables[i], np.zeros(variables[i].shape, stored_dtype(variables[i])))
            streams.append(changed.get(id(variables[i]), still))
        return given, streams, [i for i in used if i >= self._first_array]

    def _check_reads(self) -> None:
        if paths := sorted(v.path for v in self.read_afterwards):
            raise UnsupportedError(
                "The servers update weights when a step is done: the step cannot read them after the "
                f"optimizer's update. Received: a step that reads {', '.join(paths[:3])} afterwards. Read "
                "them before the update, in a step of their own, or in a callback."
            )


def _spec(variable: keras.Variable) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(variable.shape), jnp.dtype(stored_dtype(variable)))


def array_specs(tree: PyTree) -> list[jax.ShapeDtypeStruct]:
    """Return shapes and types of the arrays of a structure, as a program takes them.

    Args:
        tree: pytree of arrays and numbers.
    """
    return [
        jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.canonicalize_dtype(jnp.result_type(x)))
        for x in jax.tree.leaves(tree)
    ]


def push_layout_of(strategy: Any) -> PushLayout:
    """Return the layout of a strategy whose variables lie on servers.

    Args:
        strategy: a `ReplicatedStrategy` of one device.

    Raises:
        UnsupportedError: for another strategy.
    """
    layout = strategy.state_layout
    if not isinstance(layout, PushLayout) or strategy.num_replicas_in_sync != 1:
        raise UnsupportedError(
            "Programs for workers need a strategy of one replica whose variables lie on servers. "
            f"Received: {strategy!r}."
        )
    return layout
