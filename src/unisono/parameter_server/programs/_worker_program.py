"""The program of a worker: from values of variables and a batch to what is pushed, and results.

What a variable's new value becomes is read from the traced program:

| the new value | is pushed as |
|---|---|
| of an optimizer's update | gradients, for the servers' own update |
| depends on the old one: metrics, moving statistics, counters | an addition: new - old |
| does not depend on it | an overwrite |
| of a random generator: the state plus a constant | nothing: the chief counts, see `RandomStream` |

Tests: tests/virtual/parameter_server/chief/test_worker_step.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import keras
import numpy as np

from unisono._errors import UnsupportedError
from unisono._types import PyTree, UserValue
from unisono.parameter_server.chief._streams import RandomStream
from unisono.parameter_server.programs._push_layout import GradientNotes, PushTrace, UpdateCall, pushing
from unisono.parameter_server.tables._lookups import RowStep, TableLookups
from unisono.step._call_signature import Result
from unisono.step._keras_internals import stored_dtype, trained_variables
from unisono.step.variables._merge_rules import kind_of
from unisono.training._jaxprs import Mask, dependencies, exported, is_argument, pruned

#: From values of the variables and arrays to a result, and by `id` the new values of what was written: an
#: array of a variable, an array or a tuple of arrays of a note.
Body = Callable[[list[jax.Array], list[jax.Array]], tuple[UserValue, Mapping[int, Any]]]

#: Whether a variable is used by rows where a step allows it; with the optimizer that gets its gradient.
MayBeTable = Callable[[keras.Variable, keras.Optimizer | None], bool]

#: States of a random generator from which its steps are measured.
_PROBES = (0, 1, 0x9E3779B9, 0xFFFFFFFF)


@dataclasses.dataclass(frozen=True, eq=False)
class WorkerProgram:
    """A step as bytes, with what it takes and gives, in this order.

    It takes `reads`, `streams`, `arrays`, then what `lookups` says; it gives `gradients`, `extras`, `adds`,
    `assigns`, then the arrays of the result. All are flat.

    Args:
        blob: the serialized `jax.export.Exported`; a function of one argument for each array.
        reads: variables whose values the worker pulls.
        streams: random generators, whose states come with the call.
        arrays: the numbers of the call's arrays that the program takes: a step may ignore some.
        gradients: for each an update of an optimizer, and a variable that it trains.
        extras: for each an update and a name; these arrays go to all servers of the optimizer's variables.
        adds: variables to whose values something is added.
        assigns: variables that are overwritten.
        result: puts the result together, of the arrays that the worker sends back.
        specs: shapes and types of all that the program takes, but for rows of tables.
        worker: which of `arrays` is the number of the worker: no call has it, and each worker its own; None
            where the program takes none.
        lookups: of the tables that are used by rows, as are their gradients; None without any.
    """

    blob: bytes
    reads: tuple[keras.Variable, ...]
    streams: tuple[RandomStream, ...]
    arrays: tuple[int, ...]
    gradients: tuple[tuple[UpdateCall, keras.Variable], ...]
    extras: tuple[tuple[UpdateCall, str], ...]
    adds: tuple[keras.Variable, ...]
    assigns: tuple[keras.Variable, ...]
    result: Result
    specs: tuple[jax.ShapeDtypeStruct, ...]
    worker: int | None = None
    lookups: TableLookups | None = None

    @property
    def tables(self) -> tuple[keras.Variable, ...]:
        """The tables that are used by rows."""
        return () if self.lookups is None else tuple(v for g in self.lookups.groups for v in g.tables)

    @property
    def optimizers(self) -> tuple[keras.Optimizer, ...]:
        """The optimizers that update after a run, each once."""
        return tuple({id(u.optimizer): u.optimizer for u, _ in self.gradients}.values())

    @property
    def updates(self) -> tuple[UpdateCall, ...]:
        """The updates after a run: those of one optimizer in the order in which the step calls it."""
        return tuple(dict.fromkeys(u for u, _ in self.gradients))

    def has_gradient(self, update: UpdateCall) -> tuple[bool, ...]:
        """Return, for each variable that an optimizer trains, whether the program pushes a gradient."""
        given = {id(v) for u, v in self.gradients if u == update}
        return tuple(id(v) in given for v in trained_variables(update.optimizer))


def no_table(variable: keras.Variable, optimizer: keras.Optimizer | None) -> bool:
    """Return False: every variable is used as a whole."""
    return False


class Destination(NamedTuple):
    """Where programs will run.

    Args:
        may_be_table: whether a variable may be used by rows.
        platforms: returns those of the workers, as `jax.export` names them.
    """

    may_be_table: MayBeTable = no_table
    platforms: Callable[[], tuple[str, ...]] = lambda: ("cpu",)


def make_program(
    body: Body,
    variables: Sequence[keras.Variable],
    notes: Sequence[GradientNotes],
    arrays: Sequence[jax.ShapeDtypeStruct],
    destination: Destination | None = None,
) -> WorkerProgram:
    """Trace a step and return its program.

    Args:
        notes: of the optimizers that it calls, from `PushLayout.notes_of`, as far as they are known.

    Raises:
        UnsupportedError: for a step that no worker can run by itself.
    """
    trace = _StepTrace(body, variables, notes, arrays)
    closed = trace.closed()
    if others := [called for called in trace.called if called not in notes]:
        # A `train_step` with several updates.
        notes = [*notes, *others]
        trace = _StepTrace(body, variables, notes, arrays)
        closed = trace.closed()
    found = _TracedProgram(trace, closed)
    if found.reads_afterwards:
        # Only here, since the update takes time to trace, and its slots time to pull.
        trace = _StepTrace(body, variables, notes, arrays, computes_updates=True)
        found = _TracedProgram(trace, trace.closed())
    return found.program(destination or Destination())


class _StepTrace:
    """One trace of a step: its arguments and results, with what each of them stands for.

    Args:
        computes_updates: whether the step's code gets weights after an update, or stand-ins for them.
    """

    def __init__(
        self,
        body: Body,
        variables: Sequence[keras.Variable],
        notes: Sequence[GradientNotes],
        arrays: Sequence[jax.ShapeDtypeStruct],
        computes_updates: bool = False,
    ) -> None:
        self._body, self.variables, self.notes = body, list(variables), list(notes)
        self._computes_updates = computes_updates
        #: The variables for whose values after an update there are stand-ins.
        updated = {} if computes_updates else {id(v): v for n in notes for v in n.updated}
        self.replaced = list(updated.values())
        self.specs = [*map(_spec, self.variables), *map(_spec, self.replaced), *arrays]
        #: By `id` of a variable that the trace has written: the number of its result.
        self.written: dict[int, int] = {}
        #: By `id` of a note: the numbers of its results.
        self.noted: dict[int, range] = {}
        #: The notes of the optimizers that the step has called.
        self.called: list[GradientNotes] = []
        self.result = Result.parse(None)[0]
        #: How many results come before those that are the step's own.
        self.first_result = 0

    def closed(self) -> jex.ClosedJaxpr:
        """Return the traced step, from all arguments to the written values and the result's arrays."""
        # The outer scope closes outside the trace, where Keras initializes the variables of new notes.
        with keras.StatelessScope():
            return jax.make_jaxpr(self._flat)(*self.specs)

    def _flat(self, *given: jax.Array) -> list[jax.Array]:
        values = list(given[: len(self.variables)])
        after = given[len(values) : len(values) + len(self.replaced)]
        arrays = list(given[len(values) + len(after) :])
        named = {id(v): x for v, x in zip(self.replaced, after, strict=True)}
        with pushing(PushTrace(None if self._computes_updates else named)) as push:
            result, new = self._body(values, arrays)
        self.called = push.notes
        notes = {id(v) for n in (*self.notes, *self.called) for v in n.variables}
        if unknown := new.keys() - notes - {id(v) for v in self.variables}:
            raise UnsupportedError(
                "A step on a parameter-server cluster must write the model's own variables, and those that "
                f"it wrote when it was first traced. Received: {len(unknown)} others. Create variables in "
                "the strategy's scope, before the first step."
            )
        outputs: list[Any] = []
        for key, value in new.items():
            first = len(outputs)
            outputs += value if isinstance(value, tuple) else [value]
            if key in notes:
                self.noted[key] = range(first, len(outputs))
            else:
                self.written[key] = first
        self.first_result = len(outputs)
        self.result, results = Result.parse(result)
        return [*map(jnp.asarray, outputs), *results]


class _TracedProgram:
    """What a traced step reads and writes, sorted by how it is pulled and pushed.

    Raises:
        UnsupportedError: for a step that no worker can run by itself.
    """

    def __init__(self, trace: _StepTrace, closed: jex.ClosedJaxpr) -> None:
        self._trace, self._closed = trace, closed
        self._argument = {id(v): i for i, v in enumerate(trace.variables)}
        self._first_array = len(trace.variables) + len(trace.replaced)
        self.streams: list[RandomStream] = []
        self.adds: list[tuple[int, keras.Variable]] = []
        self.assigns: list[tuple[int, keras.Variable]] = []
        updated = self._updated()
        masks = dependencies(closed)
        for variable in trace.variables:
            number = trace.written.get(id(variable))
            if number is None:
                continue
            if id(variable) in updated:
                if closed.jaxpr.outvars[number] is not updated[id(variable)]:
                    raise _beside_update(variable, self._trace.notes)
            elif not is_argument(closed, number, self._argument[id(variable)]):
                self._sort(number, variable, masks[number])
        noted = trace.noted
        self.gradients = [
            (noted[id(note)][0], notes.update, variable)
            for notes in trace.notes
            for note, variable in zip(notes.gradients, trained_variables(notes.update.optimizer), strict=True)
            if id(note) in noted
        ]
        self.extras = [
            (noted[id(note)][0], notes.update, name)
            for notes in trace.notes
            for name, note in notes.extras.items()
            if id(note) in noted
        ]

    def _updated(self) -> dict[int, Any]:
        """Return, by `id` of what an optimizer has updated, the value that the update gave."""
        inputs, outputs = self._closed.jaxpr.invars, self._closed.jaxpr.outvars
        stand_ins = inputs[len(self._trace.variables) : self._first_array]
        replaced = {id(v): x for v, x in zip(self._trace.replaced, stand_ins, strict=True)}
        found: dict[int, Any] = {}
        for notes in self._trace.notes:
            before = self._trace.noted.get(id(notes.before), ())
            after = self._trace.noted.get(id(notes.after))
            for i, (number, variable) in enumerate(zip(before, notes.updated, strict=False)):
                own = self._argument.get(id(variable))
                # The servers' update begins with the values that they hold, or have just computed.
                first = None if own is None else inputs[own]
                begins_with = found.get(id(variable), first) if notes.update.call else first
                if begins_with is None or outputs[number] is not begins_with:
                    raise _beside_update(variable, self._trace.notes)
                found[id(variable)] = replaced[id(variable)] if after is None else outputs[after[i]]
        return found

    def _sort(self, number: int, variable: keras.Variable, mask: Mask) -> None:
        own = 1 << self._argument[id(variable)]
        if kind_of(variable).is_seed:
            self.streams.append(self._stream(number, variable, mask == own))
        elif mask & own and not jnp.issubdtype(stored_dtype(variable), jnp.bool_):
            self.adds.append((number, variable))
        else:
            self.assigns.append((number, variable))

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
    def _outputs(self) -> list[int]:
        """The numbers of what the program gives, in its order."""
        pushed = [number for number, *_ in (*self.gradients, *self.extras, *self.adds, *self.assigns)]
        return [*pushed, *range(self._trace.first_result, len(self._closed.jaxpr.outvars))]

    @functools.cached_property
    def _needed(self) -> tuple[jex.ClosedJaxpr, list[int]]:
        """The part of the trace that a worker computes, and its arguments."""
        outputs = set(self._outputs)
        return pruned(self._closed, [i in outputs for i in range(len(self._closed.jaxpr.outvars))])

    @property
    def reads_afterwards(self) -> bool:
        """Whether the step reads a weight or slot after its update, where there is a stand-in."""
        return any(len(self._trace.variables) <= i < self._first_array for i in self._needed[1])

    def program(self, destination: Destination) -> WorkerProgram:
        """Return the program of what was found."""
        closed, used = self._needed
        rows = self._by_rows(destination.may_be_table)
        platforms = destination.platforms()
        of_tables = set() if rows is None else {used[i] for i in rows.arguments}
        reads = {i for i in used if i < len(self._trace.variables)} - of_tables
        # What is added to a variable is the difference to its value.
        reads |= {self._argument[id(v)] for _, v in self.adds}
        # `evaluate` and `predict` may draw what they do not use: the state goes on all the same, as in Keras.
        reads |= {self._argument[id(s.variable)] for s in self.streams}
        given, streams, arrays = self._inputs(reads, used)
        taken = [*given, *(self._argument[id(s.variable)] for s in streams), *arrays]
        specs = tuple(self._trace.specs[i] for i in taken)
        place = {at: taken.index(i) for at, i in enumerate(used) if i not in of_tables}
        step = self._step(_whole(closed, place) if rows is None else rows.runner(place, len(taken)), taken)
        lookups = None if rows is None else rows.lookups(place, specs, platforms)
        return WorkerProgram(
            exported(step, [*specs, *([] if rows is None else rows.specs())], platforms),
            tuple(self._trace.variables[i] for i in given),
            tuple(streams),
            tuple(i - self._first_array for i in arrays),
            tuple((update, variable) for _, update, variable in self.gradients),
            tuple((update, name) for _, update, name in self.extras),
            tuple(variable for _, variable in self.adds),
            tuple(variable for _, variable in self.assigns),
            self._trace.result,
            specs,
            lookups=lookups,
        )

    def _by_rows(self, tables: MayBeTable) -> RowStep | None:
        closed, used = self._needed
        every = self._trace.variables
        variables = {at: every[i] for at, i in enumerate(used) if i < len(every)}
        trained = {id(v): update.optimizer for _, update, v in self.gradients}
        # After an update all rows may have changed.
        again = {id(v) for _, update, v in self.gradients if update.call}
        candidates = {
            at: v
            for at, v in variables.items()
            if not kind_of(v).is_seed and v.shape and id(v) not in again and tables(v, trained.get(id(v)))
        }
        place = self._place_of_output
        return RowStep.of(closed, candidates, {place[n]: v for n, _, v in self.gradients})

    @functools.cached_property
    def _place_of_output(self) -> dict[int, int]:
        """The number of a result among those that are needed: results may share an array."""
        return {number: at for at, number in enumerate(sorted(set(self._outputs)))}

    def _step(
        self, compute: Callable[[Sequence[Any]], Sequence[Any]], taken: Sequence[int]
    ) -> Callable[..., list[jax.Array]]:
        of_output = self._place_of_output
        old_of = {number: taken.index(self._argument[id(v)]) for number, v in self.adds}

        def step(*values: jax.Array) -> list[jax.Array]:
            found = compute(values)
            return [
                _change(found[of_output[n]], values[old_of[n]]) if n in old_of else found[of_output[n]]
                for n in self._outputs
            ]

        return step

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


def _change(new: jax.Array, old: jax.Array) -> jax.Array:
    """Return what to add to an old value, also where both are infinite: their difference is NaN."""
    return jnp.where(new == old, jnp.zeros_like(new), new - old)


def _whole(closed: jex.ClosedJaxpr, place: Mapping[int, int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Return a program as a function of what is taken, of which `place` has the number for each argument."""
    compute = jex.jaxpr_as_fun(closed)
    return lambda values: compute(*(values[place[at]] for at in range(len(place))))


def _beside_update(variable: keras.Variable, notes: Sequence[GradientNotes]) -> UnsupportedError:
    updating = [n.update.optimizer for n in notes if any(v is variable for v in n.updated)]
    names = {id(optimizer): repr(optimizer.name) for optimizer in updating}
    if len(names) > 1:
        received = f"a step in which {' and '.join(names.values())} update {variable.path!r}"
        write = (
            "Let one optimizer update a variable: call each with values and gradients of its own variables"
        )
    else:
        received = f"a step that also writes {variable.path!r}"
        write = "Use `constraint` or `weight_decay`, or write the variable in a step of its own"
    return UnsupportedError(
        "A step on a parameter-server cluster must change what an optimizer updates by that update alone, "
        f"which the servers compute. Received: {received}. {write}."
    )


def _spec(variable: keras.Variable) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(variable.shape), jnp.dtype(stored_dtype(variable)))


def array_specs(tree: PyTree) -> list[jax.ShapeDtypeStruct]:
    """Return shapes and types of the arrays of a structure, as a program takes them."""
    return [
        jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.canonicalize_dtype(jnp.result_type(x)))
        for x in jax.tree.leaves(tree)
    ]
