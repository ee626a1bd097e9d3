"""An optimizer's update as programs of the servers that hold its variables.

The update of all variables is traced once. Each server gets the part of it that its own weights and slots
need. A slot lies beside the one weight whose update needs it; what belongs to no single weight, such as the
count of iterations or the learning rate, is on every server, and changes there in the same way.

Of a variable that is divided over servers each server updates its rows: the update is traced for as many rows
as a part has. That is exact where the update of a row needs this row alone, which is read from the trace for
the whole variable; any other update is refused.

Tests: tests/virtual/parameter_server/chief/test_server_update.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import keras

from unisono._context import entered
from unisono._errors import InvalidArgumentError, UnsupportedError
from unisono.parameter_server.chief._placement import Division, VariablePart
from unisono.parameter_server.programs._preparation import (
    extra_spec,
    extras_of,
    of_prepared_gradients,
    rounded_to,
)
from unisono.parameter_server.tables._row_update import RowUpdate, row_update
from unisono.parameter_server.tables._row_values import NotByRowsError
from unisono.step._keras_internals import of_shapes, stored_dtype, trained_variables
from unisono.training._jaxprs import (
    Mask,
    dependencies,
    exported,
    is_argument,
    operations,
    pruned,
)
from unisono.training.rows._row_analysis import RowUse, states_in_traces, use_of
from unisono.training.rows._row_states import Constant, RowWise

#: Shapes of weights and slots.
Shapes = tuple[tuple[int, ...], ...]

#: What kind of argument of a program, and which: the key of a piece, or a name.
ArgumentKey = tuple[str, Any]

_KINDS = _VALUE, _GRADIENT, _EXTRA = "value", "gradient", "extra"


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """What one server has of a weight or slot."""

    variable: keras.Variable
    part: VariablePart

    @property
    def key(self) -> tuple[int, VariablePart]:
        """By what pieces are compared: Keras compares variables by their values."""
        return id(self.variable), self.part

    @property
    def path(self) -> str:
        """The variable's, with the rows."""
        return f"{self.variable.path}{self.part}"

    @property
    def spec(self) -> jax.ShapeDtypeStruct:
        """Shape and type."""
        return _spec(self.variable, self.part.shape(self.variable.shape))


@dataclasses.dataclass(frozen=True, eq=False)
class ServerUpdate:
    """The update of one server as bytes, with what it takes and gives, in this order.

    Args:
        blob: serialized; a function of lists (values, no slots, gradients and extras) that returns the new
            values and no slots.
        values: weights and slots of the server that it reads or writes.
        gradients: weights whose gradients it takes.
        extras: names of arrays that go to every server.
        writes: those of `values` that it changes.
    """

    blob: bytes
    values: tuple[Piece, ...]
    gradients: tuple[Piece, ...]
    extras: tuple[str, ...]
    writes: tuple[Piece, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class _PartsUpdate:
    """The update of at most one part of each weight and slot."""

    closed: jex.ClosedJaxpr
    arguments: dict[ArgumentKey, tuple[Any, jax.ShapeDtypeStruct]]
    writes: list[Piece]


class OptimizerUpdates:
    """The updates of one optimizer, for any placement of its variables.

    Args:
        optimizer: built.
        push_dtype: the type in which large gradients are pushed; None for that of their variables.
    """

    def __init__(self, optimizer: keras.Optimizer, push_dtype: str | None = None) -> None:
        if not optimizer.built:
            raise InvalidArgumentError(
                f"An optimizer must be built before its update is divided. Received: {optimizer.name!r}. "
                "Call `optimizer.build(model.trainable_variables)`."
            )
        self._optimizer = optimizer
        self.trained: tuple[keras.Variable, ...] = tuple(trained_variables(optimizer))
        self.slots: tuple[keras.Variable, ...] = tuple(optimizer.variables)
        self._pushed = [rounded_to(v, push_dtype) or stored_dtype(v) for v in self.trained]
        #: By which gradients are there, and the shapes of weights and slots.
        self._full: dict[tuple[tuple[bool, ...], Shapes], _FullUpdate] = {}
        #: By which weights are divided: whether each weight and slot is.
        self._divided: dict[tuple[bool, ...], list[bool]] = {}

    def divisions(self, trained: Sequence[Division]) -> list[Division]:
        """Return where each slot lies.

        Raises:
            UnsupportedError: for a slot that belongs to variables on several servers, or an update that
                mixes the rows of a divided variable.
        """
        everywhere = Division.copies(sorted({s for division in trained for s in division.servers}))
        has_rows = self._rows_of(tuple(division.is_divided for division in trained))[len(trained) :]
        found = []
        for slot, owners, is_divided in zip(self.slots, self._owners, has_rows, strict=True):
            servers = sorted({s for i in owners for s in trained[i].servers})
            if len(owners) > 1 and len(servers) > 1:
                raise self._mixed(slot.path, [self.trained[i].path for i in owners])
            if is_divided:
                found.append(trained[owners[0]])
            else:
                found.append(Division.copies(servers) if servers else everywhere)
        return found

    def program(
        self,
        server: int,
        trained: Sequence[Division],
        present: Sequence[bool] | None = None,
        by_rows: frozenset[int] = frozenset(),
    ) -> ServerUpdate:
        """Return the update of one server.

        Args:
            trained: where each variable lies that the optimizer trains.
            present: for each of them, whether there is a gradient; all by default.
            by_rows: the numbers of those that are left out, since they are updated by rows.

        Raises:
            UnsupportedError: when the update needs what lies on another server, or mixes the rows of a
                divided variable.
        """
        given = tuple(present) if present is not None else (True,) * len(self.trained)
        divisions = [*trained, *self.divisions(trained)]
        # A server may have several parts of a variable: there is one update for the first part of each, one
        # for the second, and so on. What is not divided changes in the first alone.
        count = max(1, *(len(division.on(server)) for division in divisions))
        left_out = {i for v in by_rows for i in (v, *self._slots_of(v))}
        updates = [self._of_parts(server, divisions, number, given, left_out) for number in range(count)]
        arguments = {key: argument for update in updates for key, argument in update.arguments.items()}
        keys = sorted(arguments, key=lambda key: _KINDS.index(key[0]))
        kinds = {kind: [arguments[key][0] for key in keys if key[0] == kind] for kind in _KINDS}
        pushed = keys[len(kinds[_VALUE]) :]
        writes = tuple(piece for update in updates for piece in update.writes)
        held = {piece.key: piece for piece in (*kinds[_VALUE], *writes)}

        def compute(
            values: list[jax.Array], slots: list[jax.Array], gradients: list[jax.Array]
        ) -> tuple[list[jax.Array], list[jax.Array]]:
            new = dict(zip(held, values, strict=True))
            named: dict[ArgumentKey, jax.Array] = {(_VALUE, key): value for key, value in new.items()}
            named.update(zip(pushed, gradients, strict=True))
            results = (
                result
                for update in updates
                for result in jex.jaxpr_as_fun(update.closed)(*(named[key] for key in update.arguments))
            )
            new.update(zip((piece.key for piece in writes), results, strict=True))
            return list(new.values()), []

        specs = [[piece.spec for piece in held.values()], [], [arguments[key][1] for key in pushed]]
        return ServerUpdate(
            exported(compute, specs),
            tuple(held.values()),
            tuple(kinds[_GRADIENT]),
            tuple(kinds[_EXTRA]),
            writes,
        )

    def _of_parts(
        self,
        server: int,
        divisions: Sequence[Division],
        number: int,
        present: tuple[bool, ...],
        left_out: set[int],
    ) -> _PartsUpdate:
        """Return the update of a server's first, second, ... part of each weight and slot."""
        own = [
            [] if i in left_out else division.on(server)[number : number + 1]
            for i, division in enumerate(divisions)
        ]
        pieces = [
            Piece(v, (parts or division.on(server) or division.parts)[0])
            for v, parts, division in zip([*self.trained, *self.slots], own, divisions, strict=True)
        ]
        full = self._traced(present, tuple(piece.part.shape(piece.variable.shape) for piece in pieces))
        self._check_operations(full, present, divisions)
        writes = [i for i in range(len(pieces)) if own[i] and not is_argument(full.closed, i, i)]
        closed, used = pruned(full.closed, [i in set(writes) for i in range(len(pieces))])
        arguments = {}
        for i in used:
            kind, argument = full.argument(i, pieces)
            if isinstance(argument, Piece) and argument.part.server != server:
                raise self._mixed(pieces[writes[0]].path, [argument.path])
            key = kind, argument.key if isinstance(argument, Piece) else argument
            arguments[key] = argument, full.specs[i]
        return _PartsUpdate(closed, arguments, [pieces[i] for i in writes])

    def _check_operations(
        self, full: _FullUpdate, present: tuple[bool, ...], divisions: Sequence[Division]
    ) -> None:
        """Raise an error where the update does something else for a part than for the whole."""
        whole = self._traced(present)
        if full is not whole and operations(full.closed) != operations(whole.closed):
            raise self._mixes_rows(next(i for i, division in enumerate(divisions) if division.is_divided))

    def row_update(self, number: int) -> RowUpdate:
        """Return the update of one variable for some of its rows.

        Raises:
            NotByRowsError: when rows cannot be updated by themselves.
        """
        if self._optimizer.gradient_accumulation_steps or self._optimizer.use_ema:
            raise NotByRowsError("its optimizer adds up gradients, or averages weights, over several steps")
        full = self._traced((True,) * len(self.trained))
        variables = len(self.trained) + len(self.slots)
        return row_update(
            full.closed,
            full.specs,
            number,
            self._slots_of(number),
            variables + number,
            variables,
        )

    def slots_of(self, number: int) -> list[keras.Variable]:
        """Return the slots that belong to one variable alone."""
        return [self.slots[i - len(self.trained)] for i in self._slots_of(number)]

    def _slots_of(self, number: int) -> list[int]:
        return [len(self.trained) + i for i, owners in enumerate(self._owners) if owners == (number,)]

    # --- what belongs to what --------------------------------------------------------------------

    @functools.cached_property
    def _owners(self) -> list[tuple[int, ...]]:
        """For each slot, the numbers of the variables that it belongs to."""
        full = self._traced((True,) * len(self.trained))
        masks = dependencies(full.closed)
        count, first = len(self.trained), len(self.trained) + len(self.slots)
        of_weights = (1 << count) - 1

        def trained_in(mask: Mask) -> Mask:
            """The weights and gradients among arguments, as numbers of variables."""
            return mask & of_weights | mask >> first & of_weights

        owners = [trained_in(mask) for mask in masks[count:]]
        # One that stays as it is, or changes by itself, belongs to the variable whose update alone reads it.
        for slot in range(len(self.slots)):
            if owners[slot]:
                continue
            readers = [i for i in range(count) if masks[i] >> (count + slot) & 1]
            is_fixed = is_argument(full.closed, count + slot, count + slot)
            if is_fixed and len(readers) == 1 and self.slots[slot].shape:
                owners[slot] = 1 << readers[0]
        return [tuple(i for i in range(count) if mask >> i & 1) for mask in owners]

    def _rows_of(self, divided: tuple[bool, ...]) -> list[bool]:
        """Return for each weight and slot whether it is divided.

        Raises:
            UnsupportedError: when the update of a row needs other rows, or the number of rows.
        """
        if divided not in self._divided:
            slots = [
                len(owners) == 1
                and divided[owners[0]]
                and slot.shape[:1] == self.trained[owners[0]].shape[:1]
                for slot, owners in zip(self.slots, self._owners, strict=True)
            ]
            rows = self._divided[divided] = [*divided, *slots]
            if any(rows):
                self._check_rows(rows)
        return self._divided[divided]

    def _check_rows(self, rows: Sequence[bool]) -> None:
        """Raise an error unless each row of what is divided is updated by itself."""
        present = (True,) * len(self.trained)
        full = self._traced(present)
        shapes = [tuple(v.shape) for v in (*self.trained, *self.slots)]
        twice = [(2 * s[0], *s[1:]) if has else s for s, has in zip(shapes, rows, strict=True)]
        counts = [*rows, *(rows[i] for i in full.gradients), *(False for _ in full.extras)]
        other = self._traced(present, tuple(twice))
        known = [RowWise(0) if has_rows else Constant() for has_rows in counts]
        uses = map(use_of, states_in_traces(full.closed, other.closed, Fraction(2), known))
        # Numbers that the update draws are others for other shapes.
        draws = any(name.startswith(("random_", "threefry")) for name in operations(full.closed))
        for i, (use, mask) in enumerate(zip(uses, dependencies(full.closed), strict=True)):
            needed = {self._owner(a) for a, counted in enumerate(counts) if counted and mask >> a & 1}
            apart = rows[i] and use is RowUse.APART and needed <= {self._owner(i)}
            if draws or not (apart or use is RowUse.NONE or not (needed or rows[i])):
                raise self._mixes_rows(rows.index(True) if draws else min(needed, default=i))

    def _owner(self, argument: int) -> int:
        """Return the number of the weight to which an argument of the whole update belongs; -1 for none."""
        first_slot, first_gradient = len(self.trained), len(self.trained) + len(self.slots)
        if argument < first_slot:
            return argument
        if argument < first_gradient:
            return next(iter(self._owners[argument - first_slot]), -1)
        return argument - first_gradient

    def _traced(self, present: tuple[bool, ...], shapes: Shapes | None = None) -> _FullUpdate:
        """Return the update of all variables, of the shapes that they have or others."""
        own = tuple(tuple(v.shape) for v in (*self.trained, *self.slots))
        key = present, shapes or own
        if key not in self._full:
            variables = zip((*self.trained, *self.slots), key[1], strict=True)
            with of_shapes([(v, shape) for v, shape in variables if tuple(v.shape) != shape]):
                self._full[key] = _FullUpdate.of(
                    self._optimizer, self.trained, self.slots, present, self._pushed
                )
        return self._full[key]

    def _mixes_rows(self, number: int) -> UnsupportedError:
        variable = (*self.trained, *self.slots)[number]
        return UnsupportedError(
            "An optimizer must update each row of a divided variable by this row's gradient. Received: "
            f"{type(self._optimizer).__name__} ({self._optimizer.name!r}), whose update of {variable.path!r} "
            f"(shape {tuple(variable.shape)}) needs several rows, by a norm, a mean, a product or a "
            "constraint. Use an optimizer that treats elements alike, such as Adam, or a "
            "`variable_partitioner` that returns 1 for this variable."
        )

    def _mixed(self, path: str, others: Sequence[str]) -> UnsupportedError:
        name = type(self._optimizer).__name__
        return UnsupportedError(
            "An optimizer on several parameter servers must update each variable by its own gradient. "
            f"Received: {name} ({self._optimizer.name!r}), whose update of {path!r} needs "
            f"{', '.join(map(repr, list(others)[:3]))}. Use one parameter server, or an optimizer without "
            "such an update (with `gradient_accumulation_steps`, `clipnorm` instead of `global_clipnorm`)."
        )


@dataclasses.dataclass(frozen=True, eq=False)
class _FullUpdate:
    """The traced update of all variables: weights, slots, gradients and extras to weights and slots.

    Args:
        gradients: numbers of the variables that have a gradient.
    """

    closed: jex.ClosedJaxpr
    specs: list[jax.ShapeDtypeStruct]
    gradients: list[int]
    extras: tuple[str, ...]
    first_extra: int

    @classmethod
    def of(
        cls,
        optimizer: keras.Optimizer,
        trained: Sequence[keras.Variable],
        slots: Sequence[keras.Variable],
        present: Sequence[bool],
        pushed: Sequence[str],
    ) -> _FullUpdate:
        """Trace the update, with Keras' warning about variables without a gradient."""
        gradients = [i for i, there in enumerate(present) if there]
        extras = extras_of(optimizer)
        variables = [*trained, *slots]
        specs = [
            *map(_spec, variables),
            *(jax.ShapeDtypeStruct(trained[i].shape, pushed[i]) for i in gradients),
            *map(extra_spec, extras),
        ]
        first_extra = len(variables) + len(gradients)

        def update(*given: jax.Array) -> list[jax.Array]:
            found = dict(zip(gradients, given[len(variables) : first_extra], strict=True))
            grads = [found[i].astype(stored_dtype(v)) if i in found else None for i, v in enumerate(trained)]
            named = dict(zip(extras, given[first_extra:], strict=True))
            with entered(None), of_prepared_gradients(optimizer, grads, named):
                weights, values = optimizer.stateless_apply(
                    list(given[len(trained) : len(variables)]), grads, list(given[: len(trained)])
                )
            return [*weights, *values]

        return cls(jax.make_jaxpr(update)(*specs), specs, gradients, extras, first_extra)

    def argument(self, number: int, pieces: Sequence[Piece]) -> tuple[str, Piece | str]:
        """Return what an argument of the program is: its kind, and the piece or name."""
        if number < len(pieces):
            return _VALUE, pieces[number]
        if number < self.first_extra:
            return _GRADIENT, pieces[self.gradients[number - len(pieces)]]
        return _EXTRA, self.extras[number - self.first_extra]


def _spec(variable: keras.Variable, shape: tuple[int, ...] | None = None) -> jax.ShapeDtypeStruct:
    shape = tuple(variable.shape) if shape is None else shape
    return jax.ShapeDtypeStruct(shape, jnp.dtype(stored_dtype(variable)))
