"""An optimizer's update as programs of the servers that hold its variables.

The update of all variables is traced once. Each server gets the part of it that its own weights and slots
need. A slot lies beside the one weight whose update needs it; what belongs to no single weight, such as the
count of iterations or the learning rate, is on every server, and changes there in the same way.

Tests: tests/virtual/training/pushed/test_server_update.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import keras

from unisono._context import entered
from unisono._errors import InvalidArgumentError, UnsupportedError
from unisono.step._keras_internals import stored_dtype, trained_variables
from unisono.training.pushed._jaxprs import Mask, dependencies, exported, is_argument, pruned
from unisono.training.pushed._preparation import extras_of, of_prepared_gradients


@dataclasses.dataclass(frozen=True, eq=False)
class ServerUpdate:
    """The update of one server as bytes, with what it takes and gives, in this order.

    It takes the values of `reads`, the `gradients`, then the `extras`; it gives the new values of `writes`.

    Args:
        blob: the serialized `jax.export.Exported`; a function of one argument for each array.
        reads: weights and slots of the server.
        gradients: weights whose gradients it takes.
        extras: names of arrays that go to every server.
        writes: weights and slots of the server; each is among `reads`, or is overwritten unseen.
        specs: shapes and types of all that the program takes.
    """

    blob: bytes
    reads: tuple[keras.Variable, ...]
    gradients: tuple[keras.Variable, ...]
    extras: tuple[str, ...]
    writes: tuple[keras.Variable, ...]
    specs: tuple[jax.ShapeDtypeStruct, ...]


class OptimizerUpdates:
    """The updates of one optimizer, for any placement of its variables.

    Args:
        optimizer: built.
        platforms: on which servers compute, by JAX's names.
    """

    def __init__(self, optimizer: keras.Optimizer, platforms: Sequence[str] = ("cpu",)) -> None:
        if not optimizer.built:
            raise InvalidArgumentError(
                f"An optimizer must be built before its update is divided. Received: {optimizer.name!r}. "
                "Call `optimizer.build(model.trainable_variables)`."
            )
        self._optimizer, self._platforms = optimizer, tuple(platforms)
        self.trained: tuple[keras.Variable, ...] = tuple(trained_variables(optimizer))
        self.slots: tuple[keras.Variable, ...] = tuple(optimizer.variables)

    def homes(self, servers: Sequence[int]) -> list[frozenset[int]]:
        """Return the servers of each slot.

        Args:
            servers: of each variable that the optimizer trains.

        Raises:
            UnsupportedError: for a slot that belongs to variables on several servers.
        """
        everywhere = frozenset(servers)
        found = []
        for slot, owners in zip(self.slots, self._owners, strict=True):
            homes = frozenset(servers[i] for i in owners)
            if len(homes) > 1:
                raise self._mixed(slot.path, [self.trained[i].path for i in owners])
            found.append(homes or everywhere)
        return found

    def program(
        self, server: int, servers: Sequence[int], present: Sequence[bool] | None = None
    ) -> ServerUpdate:
        """Return the update of one server.

        Args:
            server: its number.
            servers: of each variable that the optimizer trains.
            present: for each of them, whether there is a gradient; all by default.

        Raises:
            UnsupportedError: when the update needs what lies on another server.
        """
        full = self._traced(tuple(present) if present is not None else (True,) * len(self.trained))
        homes = [frozenset([s]) for s in servers] + self.homes(servers)
        variables = [*self.trained, *self.slots]
        writes = [
            i for i in range(len(variables)) if server in homes[i] and not is_argument(full.closed, i, i)
        ]
        closed, used = pruned(full.closed, [i in set(writes) for i in range(len(variables))])
        reads = [i for i in used if i < len(variables)]
        gradients = [full.gradients[i - len(variables)] for i in used if full.is_gradient(i)]
        extras = [full.extras[i - full.first_extra] for i in used if i >= full.first_extra]
        foreign = [variables[i].path for i in reads if server not in homes[i]]
        foreign += [self.trained[i].path for i in gradients if servers[i] != server]
        if foreign:
            raise self._mixed(variables[writes[0]].path, foreign)
        specs = tuple(full.specs[i] for i in used)
        return ServerUpdate(
            exported(jex.jaxpr_as_fun(closed), specs, self._platforms),
            tuple(variables[i] for i in reads),
            tuple(self.trained[i] for i in gradients),
            tuple(extras),
            tuple(variables[i] for i in writes),
            specs,
        )

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

    def _traced(self, present: tuple[bool, ...]) -> _FullUpdate:
        if present not in self._full:
            self._full[present] = _FullUpdate.of(self._optimizer, self.trained, self.slots, present)
        return self._full[present]

    @functools.cached_property
    def _full(self) -> dict[tuple[bool, ...], _FullUpdate]:
        return {}

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
        closed: the program.
        specs: of its arguments.
        gradients: numbers of the variables that have a gradient.
        extras: names.
        first_extra: the number of the first argument that is neither.
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
    ) -> _FullUpdate:
        """Trace the update, with Keras' warning about variables without a gradient."""
        gradients = [i for i, there in enumerate(present) if there]
        extras = extras_of(optimizer)
        variables = [*trained, *slots]
        specs = [
            *map(_spec, variables),
            *(_spec(trained[i]) for i in gradients),
            *(jax.ShapeDtypeStruct((), jnp.bool_) for _ in extras),
        ]
        first_extra = len(variables) + len(gradients)

        def update(*given: jax.Array) -> list[jax.Array]:
            found = dict(zip(gradients, given[len(variables) : first_extra], strict=True))
            grads = [found.get(i) for i in range(len(trained))]
            named = dict(zip(extras, given[first_extra:], strict=True))
            with entered(None), of_prepared_gradients(optimizer, grads, named):
                weights, values = optimizer.stateless_apply(
                    list(given[len(trained) : len(variables)]), grads, list(given[: len(trained)])
                )
            return [*weights, *values]

        return cls(jax.make_jaxpr(update)(*specs), specs, gradients, extras, first_extra)

    def is_gradient(self, argument: int) -> bool:
        """Return whether an argument is a gradient."""
        return self.first_extra - len(self.gradients) <= argument < self.first_extra


def _spec(variable: keras.Variable) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(variable.shape), jnp.dtype(stored_dtype(variable)))
