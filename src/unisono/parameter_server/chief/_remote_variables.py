"""The variables of a job: on which server each lies, under which name, and what the chief's object holds.

Tests: tests/virtual/strategies/test_parameter_server.py,
tests/virtual/strategies/test_parameter_server_tables.py.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import jax.numpy as jnp
import keras
import numpy as np

from unisono.parameter_server.chief._placement import Division, Placement, VariablePart
from unisono.parameter_server.chief._remote_array import RemoteArray
from unisono.parameter_server.programs._server_update import OptimizerUpdates
from unisono.parameter_server.server._client import ServerClient
from unisono.parameter_server.state._create import NewVariable
from unisono.parameter_server.state._variables import DENSE, TABLE, StoredSpec
from unisono.parameter_server.tables._row_program import rows_of
from unisono.parameter_server.tables._row_update import RowUpdate
from unisono.parameter_server.tables._row_values import NotByRowsError
from unisono.parameter_server.tables._sharded_variable import bounds_of
from unisono.rpc._ops import Op
from unisono.step._keras_internals import store_value, stored_dtype, stored_value, trained_variables
from unisono.step._value_handle import DeferredValue
from unisono.step.variables._merge_rules import kind_of

if TYPE_CHECKING:
    from unisono.step._value_handle import VariableValue


_LOG = logging.getLogger("unisono")

#: A variable of more bytes is used by rows where a step only looks rows up.
TABLE_BYTES = 64 << 20

#: Of a smaller one all rows travel: that takes fewer messages.
SMALL_TABLE_BYTES = 1 << 20


class FirstValue:
    """The first value of a variable.

    Args:
        value: an array; or what stands for one that was not made yet.
    """

    def __init__(self, value: VariableValue | np.ndarray, is_table: bool) -> None:
        self._kind = TABLE if is_table else DENSE
        self._fill = value.fill if isinstance(value, DeferredValue) else None
        self._rows = rows_of(value) if isinstance(value, DeferredValue) and self._fill is None else None
        self._size, self._type = tuple(value.shape), np.dtype(value.dtype)
        self._whole = None if self._rows is not None or self._fill is not None else np.asarray(value)

    def on_server(self, name: str, part: VariablePart, client: ServerClient) -> NewVariable:
        """Return what a server gets of its part; it has the program then that makes it."""
        spec = StoredSpec(name, part.shape(self._size), self._type.name, self._kind)
        if self._fill is not None:
            return NewVariable(spec, fill=self._fill)
        if self._rows is None:
            return NewVariable(spec, np.asarray(part.of(self._whole)))
        program = self._rows(0 if part.rows is None else part.rows[0])
        return NewVariable(spec, initializer=client.add_program(part.server, program))


class RemoteVariables:
    """The variables that lie on servers.

    A variable goes to the servers when it is first used in a step: what was assigned or loaded before is its
    first value there. Slots of an optimizer lie beside their variable. The state of a random generator stays
    on the chief, which gives each run its own.

    Args:
        before_read: is called before the chief reads or writes a value.
        push_dtype: the type in which large gradients are pushed; None for that of their variables.
        pull_dtype: likewise of the weights that steps train.
    """

    def __init__(
        self,
        client: ServerClient,
        before_read: Callable[[], None],
        push_dtype: str | None = None,
        pull_dtype: str | None = None,
    ) -> None:
        self._client, self._before_read = client, before_read
        self._push_dtype, self.pull_dtype = push_dtype, pull_dtype
        self._placement = Placement(client.num_servers)
        #: By `id`: Keras compares variables by their values.
        self._placed: dict[int, RemoteArray] = {}
        #: Numbers in the order of placement, part of the names on servers.
        self._order: dict[int, int] = {}
        self._numbers = itertools.count()
        #: The `id`s of variables that lie beside another one.
        self._beside: set[int] = set()
        self._updates: dict[int, OptimizerUpdates] = {}
        self._row_updates: dict[tuple[int, int], RowUpdate | None] = {}
        #: The `id`s of variables that are used by rows, and of their slots.
        self._tables: set[int] = set()

    def __getitem__(self, variable: keras.Variable) -> RemoteArray:
        return self._placed[id(variable)]

    def may_be_table(self, variable: keras.Variable, optimizer: keras.Optimizer | None) -> bool:
        """Return whether a variable is used by rows where a step looks up rows of it and nothing else.

        One of more than `TABLE_BYTES` is; of smaller ones those whose rows stay as they are where they have
        no gradient, as with SGD.
        """
        placed, nbytes = self._placed.get(id(variable)), _nbytes(variable)
        if (placed is not None and not placed.is_table) or nbytes <= SMALL_TABLE_BYTES:
            return False
        if optimizer is None:
            return placed is not None or nbytes > TABLE_BYTES or not variable.trainable
        update = self.row_update(optimizer, variable)
        return update is not None and (update.is_whole or nbytes > TABLE_BYTES)

    def row_update(self, optimizer: keras.Optimizer, variable: keras.Variable) -> RowUpdate | None:
        """Return the update of rows of a variable; None where its rows need each other."""
        key = id(optimizer), id(variable)
        if key not in self._row_updates:
            updates = self._updates_of(optimizer)
            number = next(i for i, v in enumerate(updates.trained) if v is variable)
            try:
                self._row_updates[key] = updates.row_update(number)
            except NotByRowsError as error:
                self._row_updates[key] = None
                _LOG.info("%s is updated as a whole: %s.", variable.path, error)
        return self._row_updates[key]

    def _updates_of(self, optimizer: keras.Optimizer) -> OptimizerUpdates:
        updates = self._updates.get(id(optimizer))
        trained = tuple(trained_variables(optimizer))
        if updates is None or list(map(id, updates.trained)) != list(map(id, trained)):
            updates = self._updates[id(optimizer)] = OptimizerUpdates(optimizer, self._push_dtype)
        return updates

    def updates_of(self, optimizer: keras.Optimizer) -> tuple[OptimizerUpdates, list[Division]]:
        """Return the updates of an optimizer, and where the variables lie that it trains."""
        return self._updates[id(optimizer)], [self[v].division for v in trained_variables(optimizer)]

    def place(
        self,
        variables: Sequence[tuple[keras.Variable, VariableValue | None]],
        optimizers: Sequence[keras.Optimizer] = (),
        tables: Sequence[keras.Variable] = (),
    ) -> None:
        """Put variables on servers that are not there yet."""
        self._tables |= {id(v) for v in tables}
        values = {id(v): value for v, value in variables}
        slots = {id(v) for optimizer in optimizers for v in optimizer.variables}
        trained = [(v, None) for optimizer in optimizers for v in trained_variables(optimizer)]
        new: list[RemoteArray] = []
        with self._all_or_none(new):
            for variable, _ in [*variables, *trained]:
                if id(variable) not in slots and not kind_of(variable).is_seed:
                    self._add(new, variable, None)
            for optimizer in optimizers:
                self._place_slots(new, optimizer)
            self._create(new, values)
        for placed in new:
            store_value(placed.variable, placed)

    @contextlib.contextmanager
    def _all_or_none(self, new: Sequence[RemoteArray]) -> Iterator[None]:
        """Place nothing where a block fails: an optimizer that cannot be used may be replaced."""
        nbytes = self._placement.nbytes
        try:
            yield
        except BaseException:
            self._placement.restore(nbytes)
            for placed in new:
                del self._placed[id(placed.variable)], self._order[id(placed.variable)]
                self._beside.discard(id(placed.variable))
            raise

    def _create(self, new: Sequence[RemoteArray], values: Mapping[int, VariableValue | None]) -> None:
        """Bring variables to their servers, all of one server in one request."""
        firsts = {id(p): FirstValue(_value(p.variable, values), p.is_table) for p in new}
        for server in range(self._client.num_servers):
            own = [(p, part) for p in new for part in p.division.on(server)]
            # By place and path: two models may have variables of one path.
            made = [
                firsts[id(p)].on_server(
                    f"{self._order[id(p.variable)]}:{p.variable.path}{part}", part, self._client
                )
                for p, part in own
            ]
            numbers = self._client.create_variables(server, made) if own else []
            for (placed, part), number in zip(own, numbers, strict=True):
                placed.numbers[part] = number

    def _place_slots(self, new: list[RemoteArray], optimizer: keras.Optimizer) -> None:
        updates = self._updates_of(optimizer)
        for i, variable in enumerate(updates.trained):
            if self[variable].is_table:
                self._tables |= {id(s) for s in updates.slots_of(i) if s.shape[:1] == variable.shape[:1]}
        divisions = updates.divisions([self[v].division for v in updates.trained])
        for slot, division in zip(optimizer.variables, divisions, strict=True):
            self._add(new, slot, division)

    def _add(self, new: list[RemoteArray], variable: keras.Variable, division: Division | None) -> None:
        """Place a variable that is not placed yet: where it is said, or on the emptiest servers."""
        if id(variable) in self._placed:
            return
        shape = tuple(variable.shape)
        if division is None:
            division = self._placement.divide(shape, _nbytes(variable), len(bounds_of(variable)) or 1)
        else:
            self._beside.add(id(variable))
        self._order[id(variable)] = next(self._numbers)
        placed = RemoteArray(
            variable, division, self._client, self._before_read, id(variable) in self._tables
        )
        self._placed[id(variable)] = placed
        new.append(placed)

    def release(self, variables: Sequence[keras.Variable]) -> None:
        """Bring variables home, and drop them on servers: a later step places them again.

        Very large ones stay, which the chief may have no room for.
        """
        self._before_read()
        placed = [
            self._placed[i]
            for i in dict.fromkeys(map(id, variables))
            if i in self._placed and _nbytes(self._placed[i].variable) <= TABLE_BYTES
        ]
        for each in placed:
            store_value(each.variable, each.whole())
        for server in range(self._client.num_servers):
            own = [n for each in placed for part, n in each.numbers.items() if part.server == server]
            if own:
                self._client.call(server, Op.DROP, {"ids": own})
        gone = {id(each.variable) for each in placed}
        for each in placed:
            number, variable = id(each.variable), each.variable
            if number not in self._beside:
                self._placement.remove(each.division, tuple(variable.shape), _nbytes(variable))
            del self._placed[number], self._order[number]
        self._beside -= gone
        self._tables -= gone
        self._updates = {
            number: updates
            for number, updates in self._updates.items()
            if gone.isdisjoint(map(id, (*updates.trained, *updates.slots)))
        }
        self._row_updates = {k: update for k, update in self._row_updates.items() if k[0] in self._updates}


def _value(variable: keras.Variable, values: Mapping[int, VariableValue | None]) -> VariableValue:
    value = values.get(id(variable))
    return stored_value(variable) if value is None else value


def _nbytes(variable: keras.Variable) -> int:
    return int(math.prod(variable.shape) * jnp.dtype(stored_dtype(variable)).itemsize)
