"""What a checkpoint holds of each object: the variables of Keras' objects, states, plain values.

Tests: tests/virtual/checkpoint/test_checkpoint.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._errors import CheckpointMismatchError, InvalidArgumentError, UnisonoError
from unisono._types import Json, Trackable
from unisono.checkpoint._json_state import Array, HostArray, decode, encode
from unisono.checkpoint._snapshot import Copies, Facts, Snapshot, copy_of
from unisono.checkpoint._tracking import GrowthNotifier, Holder, TrackedDict, TrackedList
from unisono.checkpoint._unread_arrays import UnreadArray
from unisono.checkpoint._variable_paths import canonical_paths, slot_names, variables_by_name
from unisono.step._keras_internals import (
    initialize_with,
    store_value,
    stored_dtype,
    stored_value,
    trained_variables,
)
from unisono.step._layout import from_file
from unisono.step._value_handle import ValueHandle, in_parts
from unisono.step.variables._merge_rules import VariableAggregation
from unisono.step.variables._variable import Variable
from unisono.training._binding import strategy_of
from unisono.training._step_form import held_optimizers, is_stateful
from unisono.training.trainer._trainer_step import TrainerTask

#: Between the name of a model and the names of its variables.
WEIGHTS = "/weights"
#: The same for its optimizer.
OPTIMIZER = "/optimizer"
#: The same for those that it holds under names of its own.
OPTIMIZERS = "/optimizers"


@dataclasses.dataclass(frozen=True)
class Unit:
    """A Keras object in a checkpoint, whose variables are created together.

    Args:
        prefix: with which the names of its variables begin, without the last `/`.
    """

    prefix: str
    owner: keras.Model | keras.Layer | keras.Optimizer | keras.metrics.Metric
    is_built: bool

    def holds(self, name: str) -> bool:
        """Whether a name of a checkpoint belongs to it."""
        return name.startswith(f"{self.prefix}/")


class Parts:
    """The variables and states of named objects, by the names that a checkpoint gives them.

    Args:
        objects: Keras models, layers, optimizers, metrics, variables; anything with `get_state`
            and `set_state`; pytrees of arrays and numbers; lists and dicts of these; holders.
        deferred: whether models may lack variables, which are then absent.
        builds: whether the optimizer of a model that is built gets its slots.

    Raises:
        InvalidArgumentError: a model is not built, and must be.
    """

    def __init__(
        self, objects: Mapping[str, Trackable], *, deferred: bool = False, builds: bool = True
    ) -> None:
        self.variables: dict[str, keras.Variable] = {}
        self.stateful: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        self.units: list[Unit] = []
        self.growing: list[GrowthNotifier] = []
        self._deferred, self._builds = deferred, builds
        # An optimizer that has a name of its own is not saved a second time below its model.
        self._own = {id(o) for o in objects.values()}
        for name, value in objects.items():
            self._add(name, value)

    def _add(self, name: str, value: Trackable) -> None:
        # From the special to the general: a model is also a layer, and a holder may look like any object.
        if isinstance(value, keras.Model):
            self._add_model(name, value)
        elif isinstance(value, keras.Variable):
            self.variables[name] = value
        elif isinstance(value, keras.Optimizer):
            weights = variables_by_name(trained_variables(value))
            self._add_optimizer(name, value, weights)
        elif isinstance(value, (keras.Layer, keras.metrics.Metric)):
            # Keras' metrics have no `built`: they make their variables in the constructor.
            self.units.append(Unit(name, value, isinstance(value, keras.metrics.Metric) or value.built))
            self._add_variables(name, value.variables)
        elif isinstance(value, Holder) or holds_objects(value):
            self._add_container(name, value)
        elif hasattr(value, "get_state") and hasattr(value, "set_state"):
            self.stateful[name] = value
        else:
            self.values[name] = value

    def _add_container(self, name: str, value: Trackable) -> None:
        if isinstance(value, GrowthNotifier):
            self.growing.append(value)
        items = value.objects if isinstance(value, Holder) else value
        for key, item in items.items() if isinstance(items, Mapping) else enumerate(items):
            self._add(f"{name}/{key}", item)

    def _add_model(self, name: str, model: keras.Model) -> None:
        if not model.built and not self._deferred:
            raise InvalidArgumentError(
                "A model must have its variables to be saved. Received: "
                f"{model.name!r}, which is not built. Call `model.build(input_shape)`, or call it on a batch."
            )
        self.units.append(Unit(f"{name}{WEIGHTS}", model, model.built))
        weights = weights_by_path(model) if model.built else {}
        self.variables |= {f"{name}{WEIGHTS}/{path}": v for path, v in weights.items()}
        for path, other in held_optimizers(model).items():
            if id(other) not in self._own:
                self._add_held(f"{name}{OPTIMIZERS}/{path}", model, other, weights)
        optimizer = getattr(model, "optimizer", None)
        if optimizer is None or id(optimizer) in self._own:
            return
        # A step in TensorFlow's form builds those that it uses, for the weights that it trains.
        if is_stateful(model, TrainerTask.TRAIN):
            self._add_held(f"{name}{OPTIMIZER}", model, optimizer, weights)
            return
        if not optimizer.built and model.built and self._builds:
            strategy = strategy_of(model)
            # The slots must lie where the strategy would have put them if `fit` had made them.
            with strategy.scope() if strategy is not None else contextlib.nullcontext():
                optimizer.build(model.trainable_variables)
        self._add_optimizer(f"{name}{OPTIMIZER}", optimizer, weights)

    def _add_held(
        self, name: str, model: keras.Model, optimizer: keras.Optimizer, weights: Mapping[str, keras.Variable]
    ) -> None:
        """Add an optimizer that a step in TensorFlow's form uses."""
        if model.built:
            self._add_optimizer(name, optimizer, weights)
        else:
            # Its slots have the names of weights: a step may build it before the model is known as built.
            self.units.append(Unit(name, optimizer, False))

    def _add_optimizer(
        self, name: str, optimizer: keras.Optimizer, weights: Mapping[str, keras.Variable]
    ) -> None:
        self.units.append(Unit(name, optimizer, optimizer.built))
        references = {v.path: path for path, v in weights.items()}
        names = slot_names([v.name for v in optimizer.variables], references)
        for slot, variable in zip(names, optimizer.variables, strict=True):
            self.variables[f"{name}/{slot}"] = variable

    def _add_variables(self, name: str, variables: Sequence[keras.Variable]) -> None:
        for path, variable in variables_by_name(variables).items():
            self.variables[f"{name}/{path}"] = variable

    def snapshot(self, values: Mapping[int, Any] | None = None) -> Snapshot:
        """Copy everything.

        Args:
            values: `id` of a variable -> the array to keep instead of what the variable holds:
                while Keras trains, the variables are empty.
        """
        arrays: dict[str, Array] = {}
        facts: Facts = {"states": {}, "values": {}}
        copies: list[str] = []
        for name, variable, value in self._held(values):
            arrays[name] = copy_of(value)
            if not (values and id(variable) in values) and _keeps_copies(variable):
                copies.append(name)
        for name, owner in self.stateful.items():
            facts["states"][name] = encode(owner.get_state(), arrays, name)
        for name, value in self.values.items():
            facts["values"][name] = encode(jax.tree.map(np.asarray, value), arrays, name)
        if copies:
            facts["copies"] = copies
        return Snapshot(arrays, facts)

    def shared(self, values: Mapping[int, Any] | None = None) -> dict[str, ValueHandle]:
        """What lies in parts on several workers, by name: all read it while the first one writes."""
        return {n: x for n, _, x in self._held(values) if isinstance(x, ValueHandle) and x.needs_all}

    def _held(self, values: Mapping[int, Any] | None) -> Iterator[tuple[str, keras.Variable, Any]]:
        for name, variable in self.variables.items():
            given = values.get(id(variable)) if values else None
            yield name, variable, _logical_value(variable) if given is None else given

    def restore(
        self, snapshot: Snapshot, parts: Sequence[str] | None = None, **instead: str
    ) -> dict[str, Any]:
        """Put the contents of a snapshot into the objects, all of it or nothing.

        Args:
            instead: of the error, see `require_no`.

        Raises:
            CheckpointMismatchError: names, shapes or dtypes differ; it lists every one.
        """
        arrays = snapshot.on_host()
        theirs = wanted_names(names_in(snapshot, arrays), parts)
        ours = wanted_names((*self.variables, *self.stateful), parts)
        require_no(problems_of(self, arrays, ours, theirs), **instead)
        self.put(snapshot, arrays, ours)
        return plain_values(snapshot, arrays, parts)

    def put(self, snapshot: Snapshot, arrays: Mapping[str, HostArray], names: Set[str]) -> None:
        """Set variables and states."""
        for name in sorted(names & set(self.variables)):
            _set_logical_value(self.variables[name], arrays[name])
        for name in sorted(names & set(self.stateful)):
            state = decode(snapshot.facts["states"][name], arrays)
            try:
                self.stateful[name].set_state(state)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                if isinstance(error, UnisonoError):
                    raise
                raise CheckpointMismatchError(
                    f"The state of {name!r} must be one that its `get_state` has returned. Received: "
                    f"{repr(state)[:200]}, for which its `set_state` raises {type(error).__name__}: {error}. "
                    "Restore a checkpoint of the same class, or name what to restore: "
                    "`restore(path, parts=['model/weights'])`."
                ) from error


def names_in(snapshot: Snapshot, arrays: Mapping[str, Any]) -> set[str]:
    """Names of the variables and states in a snapshot."""
    return {*(set(arrays) - _inside(snapshot.facts)), *snapshot.facts["states"]}


def wanted_names(names: Iterable[str], parts: Sequence[str] | None) -> set[str]:
    """The names that begin with one of some parts; all for None.

    >>> sorted(wanted_names(["model/weights/a", "model/optimizer/b"], ["model/weights"]))
    ['model/weights/a']
    """
    # With the slash: the part `model` must not select `model_2`.
    return {
        n for n in names if parts is None or any(n == p or n.startswith(p.rstrip("/") + "/") for p in parts)
    }


def problems_of(parts: Parts, arrays: Mapping[str, HostArray], ours: Set[str], theirs: Set[str]) -> list[str]:
    """In what objects differ from a checkpoint."""
    problems = [f"missing in the checkpoint: {n}" for n in sorted(ours - theirs)]
    problems += [f"only in the checkpoint: {n}" for n in sorted(theirs - ours)]
    for name in sorted(ours & theirs & set(parts.variables)):
        if name in arrays:
            problems += _difference(name, parts.variables[name], arrays[name])
        else:
            problems.append(f"{name} is a variable, in the checkpoint a state")
    states = sorted(ours & theirs & set(parts.stateful) & set(arrays))
    return problems + [f"{n} is a state, in the checkpoint an array" for n in states]


#: Advice for objects that differ from a checkpoint.
_PARTS = "name what to restore: `restore(path, parts=['model/weights'])`"


def require_no(problems: Sequence[str], instead: str = _PARTS) -> None:
    """Raise where there are problems; `instead` says what to do but build the same model."""
    if problems:
        raise CheckpointMismatchError(
            "A checkpoint must hold exactly what is restored. Received:\n  "
            + "\n  ".join(problems)
            + f"\nNothing was restored. Build the same model, or {instead}."
        )


def plain_values(
    snapshot: Snapshot, arrays: Mapping[str, HostArray], parts: Sequence[str] | None
) -> dict[str, Any]:
    """Return the plain values of a snapshot, by name."""
    values = snapshot.facts["values"]
    return {n: decode(values[n], arrays) for n in values if n in wanted_names(values, parts)}


def weights_by_path(model: keras.Model) -> dict[str, keras.Variable]:
    """A model's variables by names in which the model's own name does not occur."""
    paths = canonical_paths([v.path.removeprefix(f"{model.name}/") for v in model.variables])
    return dict(zip(paths, model.variables, strict=True))


def holds_objects(value: Trackable) -> bool:
    """Whether a container has Keras' objects or iterators in it, and not only arrays."""
    if isinstance(value, (TrackedList, TrackedDict)):
        return True
    if not isinstance(value, (list, tuple, dict)):
        return False
    items = value.values() if isinstance(value, dict) else value
    kinds = (keras.Variable, keras.Optimizer, keras.Layer, keras.metrics.Metric, Holder)
    return any(isinstance(v, kinds) or hasattr(v, "get_state") or holds_objects(v) for v in items)


def _inside(facts: Json) -> set[str]:
    """Names of the arrays that belong to states and values."""
    if isinstance(facts, dict):
        own = {facts["name"]} if facts.get("__kind__") in ("array", "scalar") else set()
        return own.union(*(_inside(v) for v in facts.values()))
    return set().union(*(_inside(v) for v in facts)) if isinstance(facts, list) else set()


def _keeps_copies(variable: keras.Variable) -> bool:
    """Whether a variable's copies have no common value that could stand for them."""
    return (
        isinstance(variable, Variable)
        and variable.stored_copies is not None
        and variable._kind.aggregation is VariableAggregation.NONE
    )


def _logical_value(variable: keras.Variable) -> Any:
    """The one value of a variable, whatever the number of replicas: sums are summed, and so on."""
    # The host joins what lies in parts: it is whole on no device.
    with in_parts():
        return variable.stored_copies if _keeps_copies(variable) else variable.value


def _fitted(variable: keras.Variable, saved: HostArray) -> HostArray:
    """Return what a variable gets of a saved value, where one has copies and the other has none.

    As in TensorFlow, a variable without copies gets the first, and each copy gets a value that is for all.
    """
    if isinstance(saved, UnreadArray):
        if saved.shape == tuple(variable.shape) and not _keeps_copies(variable):
            return saved
        saved = np.asarray(saved)
    saved = from_file(variable, saved)
    may_have_copies = (
        isinstance(variable, Variable)
        and variable.num_copies > 1
        and variable._kind.aggregation is VariableAggregation.NONE
    )
    if isinstance(saved, Copies):
        return saved if may_have_copies else np.asarray(saved)[0]
    if _keeps_copies(variable):
        # Not marked in checkpoints of earlier versions.
        is_one = saved.shape == tuple(variable.shape)
        return (np.broadcast_to(saved, variable.stored_copies.shape) if is_one else saved).view(Copies)
    return saved


def _set_logical_value(variable: keras.Variable, saved: HostArray) -> None:
    value = _fitted(variable, saved)
    if isinstance(value, UnreadArray):
        value = np.asarray(value)
    if isinstance(value, Copies):
        with jax.ensure_compile_time_eval():
            variable.stored_copies = jnp.asarray(np.asarray(value))
    elif stored_value(variable) is None:
        # Keras creates the value when the scope around ends in which the variable was made.
        initialize_with(variable, lambda shape, dtype: jnp.asarray(value, dtype))
    elif isinstance(variable, Variable) and variable.stored_copies is not None:
        variable.assign(value)
    else:
        # Not `assign`: a stateless scope around, in which a model is built, would get the value instead.
        # Also inside a trace, where a model may be built: the variable must not keep a tracer.
        held = stored_value(variable)
        with jax.ensure_compile_time_eval():
            new = jnp.asarray(value, stored_dtype(variable))
            # A value on parameter servers stays there.
            store_value(variable, held.assigned(new) if isinstance(held, ValueHandle) else new)


def _difference(name: str, variable: keras.Variable, saved: HostArray) -> list[str]:
    saved, shape = _fitted(variable, saved), tuple(variable.shape)
    found: list[str] = []
    if isinstance(saved, Copies):
        shape = (variable.num_copies, *shape)
    if shape != saved.shape:
        found.append(f"{name} has shape {shape}, in the checkpoint {saved.shape}")
    dtype = jnp.dtype(stored_dtype(variable))
    if dtype != saved.dtype:
        found.append(f"{name} has dtype {dtype}, in the checkpoint {saved.dtype}")
    return found
