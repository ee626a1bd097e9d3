"""Collections of a run of a model_fn beside its `EstimatorSpec`: losses, layers, summaries, named values.

TensorFlow 1 keeps these in collections of the graph. Here they belong to a `ModelCall`, one for each trace.
What is exposed has names that are equal in all runs, so that a hook that was made in one run finds its values
in the results of another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import keras
import numpy as np

from unisono._errors import InvalidArgumentError
from unisono._types import ArrayLike, PyTree
from unisono.estimator._train_op import ModelCall, current_call, expose, made_in_order, require_call

#: The collections of TensorFlow 1 that have members here.
LOSSES = "losses"
REGULARIZATION_LOSSES = "regularization_losses"
SUMMARIES = "summaries"

#: Under which a run keeps its `Collections`.
_EXTRA = "collections"


@dataclasses.dataclass(frozen=True)
class RecordedSummary:
    """One summary of a model_fn, as `SummarySaverHook` takes it.

    Args:
        key: the name of its data among what the run exposed; "" for text, which is part of the program.
    """

    kind: str
    tag: str
    key: str
    text: ArrayLike = None
    options: Mapping[str, int] = dataclasses.field(default_factory=dict)


class Collections:
    """The collections of a run of a model_fn."""

    def __init__(self) -> None:
        #: Members of TensorFlow 1's collections, by name.
        self.members: dict[str, list[Any]] = {}
        #: Layers and variables that may be used again, by their names.
        self.named: dict[str, Any] = {}
        #: All layers of `unisono.estimator.layers`, whose regularizers count.
        self.made: list[keras.Layer] = []
        self._taken: dict[tuple[str, str], int] = {}

    def unique(self, name: str, kind: str = "") -> str:
        """Return a name that no earlier call in this run has returned, such as `x`, `x_1`."""
        count = self._taken.get((kind, name), 0)
        self._taken[kind, name] = count + 1
        return name if count == 0 else self.unique(f"{name}_{count}", kind)

    def add(self, collection: str, value: object) -> None:
        """Add a value to a collection of TensorFlow 1."""
        self.members.setdefault(collection, []).append(value)

    def regularization_losses(self) -> list[jax.Array]:
        """Return the losses of the regularizers of layers that were made by `unisono.estimator.layers`."""
        own = {id(layer): layer for layer in self.made}
        return [loss for layer in own.values() for loss in layer.losses]


def current_collections() -> Collections | None:
    """Return the collections of the model_fn that runs; None outside of one."""
    call = current_call()
    return None if call is None else _of(call)


def required_collections(what: str) -> Collections:
    """Return the collections of the model_fn that runs.

    Raises:
        ContextError: outside of a model_fn.
    """
    return _of(require_call(what))


def _of(call: ModelCall) -> Collections:
    collections: Collections = call.extras.setdefault(_EXTRA, Collections())
    return collections


def summaries_of(call: ModelCall) -> list[RecordedSummary]:
    """Return the summaries that a run of a model_fn has recorded."""
    return list(_of(call).members.get(SUMMARIES, []))


def unique_name(name: str) -> str:
    """Return a name that is new in the model_fn that runs; outside of one, the name."""
    collections = current_collections()
    return name if collections is None else collections.unique(name)


# --- named values ------------------------------------------------------------------------------------------


def key_of(exposed: Mapping[str, Any], thing: object) -> str | None:
    """Return the name under which an object was exposed; None for another object."""
    return next((key for key, value in exposed.items() if value is thing), None)


def fetch_in_all_runs(thing: object, prefix: str) -> Any:
    """Return the key by which a hook asks for a value in all runs of a model_fn.

    An array is another object in each run. It is exposed, if it is not yet, and the hook asks for its name.
    """
    call = current_call()
    if call is None or not isinstance(thing, (jax.Array, np.ndarray, np.generic)):
        return thing
    key = key_of(call.exposed, thing)
    if key is None:
        expose(f"_{prefix}", thing)
        key = key_of(call.exposed, thing)
    return key


def identity(
    input: PyTree,  # noqa: A002 (TensorFlow's name)
    name: str | None = None,
) -> PyTree:
    """Return a tensor, which hooks can ask for by name.

    Args:
        input: array, or pytree of arrays.
        name: in a model_fn, its name; None for none.

    Raises:
        InvalidArgumentError: another value of the model_fn has this name.

    >>> float(identity(2.0, name="two"))
    2.0
    """
    value = made_in_order(jax.tree.map(_as_array, input))
    call = current_call()
    if name is not None and call is not None:
        if name in call.exposed:
            raise InvalidArgumentError(
                f"A name must stand for one value of a model_fn. Received: name={name!r} for a second one. "
                "Choose another name."
            )
        expose(name, value)
    return value


def _as_array(value: ArrayLike) -> jax.Array:
    array: jax.Array = keras.ops.convert_to_tensor(value)
    # Another object than a value that is exposed already under its own name.
    return array + 0 if array is value and jax.numpy.issubdtype(array.dtype, jax.numpy.number) else array
