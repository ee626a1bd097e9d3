"""The variables of a job: on which server each lies, under which name, and what the chief's object holds.

Tests: tests/virtual/strategies/test_parameter_server.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np

from unisono.ps._client import Key, ServerClient
from unisono.ps._placement import Placement
from unisono.step._keras_internals import store_value, stored_dtype, stored_value, trained_variables
from unisono.step.variables._merge_rules import kind_of
from unisono.training.pushed._held import OnServers
from unisono.training.pushed._server_update import OptimizerUpdates


@dataclasses.dataclass(frozen=True, eq=False)
class Placed:
    """A variable on servers.

    Args:
        variable: the chief's object.
        numbers: by server, its number there; on several for what belongs to all variables of an optimizer.
        held: what the variable holds.
    """

    variable: keras.Variable
    numbers: dict[int, int]
    held: OnServers

    @property
    def homes(self) -> tuple[int, ...]:
        """The servers."""
        return tuple(self.numbers)

    @property
    def key(self) -> Key:
        """From where it is pulled."""
        return next(iter(self.numbers.items()))


class PlacedVariables:
    """The variables that lie on servers.

    A variable goes to the servers when it is first used in a step: what was assigned or loaded before is its
    first value there. Slots of an optimizer lie beside their variable. The state of a random generator stays
    on the chief, which gives each run its own.

    Args:
        client: of the servers.
        before_read: is called before the chief reads or writes a value.
    """

    def __init__(self, client: ServerClient, before_read: Callable[[], None]) -> None:
        self._client, self._before_read = client, before_read
        self._placement = Placement(client.num_servers)
        #: By `id`: Keras compares variables by their values.
        self._placed: dict[int, Placed] = {}
        self._order: dict[int, int] = {}
        self._updates: dict[int, OptimizerUpdates] = {}

    def __getitem__(self, variable: keras.Variable) -> Placed:
        return self._placed[id(variable)]

    def updates_of(self, optimizer: keras.Optimizer) -> tuple[OptimizerUpdates, list[int]]:
        """Return the updates of an optimizer, and the servers of the variables that it trains.

        Args:
            optimizer: whose variables are placed.
        """
        return self._updates[id(optimizer)], [self[v].homes[0] for v in trained_variables(optimizer)]

    def place(
        self, variables: Sequence[tuple[keras.Variable, Any]], optimizers: Sequence[keras.Optimizer] = ()
    ) -> None:
        """Put variables on servers that are not there yet.

        Args:
            variables: of a step, each with its value, which Keras' loop may have taken from it.
            optimizers: that update some of them; built.
        """
        values = {id(v): value for v, value in variables}
        slots = {id(v) for optimizer in optimizers for v in optimizer.variables}
        trained = [(v, None) for optimizer in optimizers for v in trained_variables(optimizer)]
        new: list[Placed] = []
        for variable, _ in [*variables, *trained]:
            if id(variable) not in slots and not kind_of(variable).is_seed:
                self._add(new, variable, None)
        for optimizer in optimizers:
            self._place_slots(new, optimizer)
        for server in range(self._client.num_servers):
            own = [p for p in new if server in p.numbers]
            # By place and path: two models may have variables of one path.
            named = [
                (f"{self._order[id(p.variable)]}:{p.variable.path}", _value(p.variable, values)) for p in own
            ]
            for placed, number in zip(own, self._client.create(server, named) if own else [], strict=True):
                placed.numbers[server] = number
        for placed in new:
            store_value(placed.variable, placed.held)

    def _place_slots(self, new: list[Placed], optimizer: keras.Optimizer) -> None:
        updates = self._updates.get(id(optimizer))
        trained = tuple(trained_variables(optimizer))
        if updates is None or list(map(id, updates.trained)) != list(map(id, trained)):
            updates = self._updates[id(optimizer)] = OptimizerUpdates(optimizer)
        homes = updates.homes([self[v].homes[0] for v in trained])
        for slot, servers in zip(optimizer.variables, homes, strict=True):
            self._add(new, slot, servers)

    def _add(self, new: list[Placed], variable: keras.Variable, servers: Iterable[int] | None) -> None:
        """Place a variable that is not placed yet: on servers that are given, or on the emptiest one."""
        if id(variable) in self._placed:
            return
        homes = [self._placement.place(_nbytes(variable))] if servers is None else sorted(servers)
        held = OnServers(variable, self._read, self._write)
        self._order[id(variable)] = len(self._placed)
        self._placed[id(variable)] = placed = Placed(variable, dict.fromkeys(homes, -1), held)
        new.append(placed)

    def _read(self, variable: keras.Variable) -> np.ndarray:
        self._before_read()
        return self._client.read(self[variable].key)

    def _write(self, variable: keras.Variable, value: np.ndarray) -> None:
        self._before_read()
        for key in self[variable].numbers.items():
            self._client.write(key, value)


def _value(variable: keras.Variable, values: Mapping[int, Any]) -> Any:
    value = values.get(id(variable))
    return stored_value(variable) if value is None else value


def _nbytes(variable: keras.Variable) -> int:
    return int(math.prod(variable.shape) * jnp.dtype(stored_dtype(variable)).itemsize)
