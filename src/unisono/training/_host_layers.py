"""Models whose first layers compute on the host, such as `StringLookup`: these run before each step.

Strings cannot enter a compiled program. `fit`, `evaluate` and `predict` encode the data by the part of the
model up to those layers' outputs, and the step begins there.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

import keras
import numpy as np

from unisono._errors import UnsupportedError
from unisono._reads import DataSet
from unisono._types import UserValue
from unisono.step._keras_internals import all_layers, producer


class Encoder(Protocol):
    """What encodes a model's data on the host."""

    def encode(self, features: Any, /) -> Any:
        """Return what the step begins with; what is encoded already stays."""


#: What encodes the data of a model.
_FRONTS: weakref.WeakKeyDictionary[keras.Model, Encoder] = weakref.WeakKeyDictionary()


class _Front:
    """The part of a model that computes on the host, and what is left for the step.

    Args:
        model: a functional or sequential one, built.
    """

    def __init__(self, model: keras.Model) -> None:
        ends = _ends(model)
        self._structure, self._inputs = _structures(model)[0], model.inputs
        self._encode = keras.Function(model.inputs, ends)
        self._names = [f"host_layer_{number}" for number in range(len(ends))]
        compute, names, call = keras.Function(ends, _structures(model)[1]), self._names, model.call

        def call_encoded(inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if _are_encoded(inputs, names):
                return compute([inputs[name] for name in names])
            return call(inputs, *args, **kwargs)

        model.call = call_encoded
        # What Keras compares the inputs with: those of the step are others.
        model.input_spec = None

    def encode(self, x: UserValue) -> dict[str, np.ndarray]:
        """Return the arrays that the step begins with.

        Args:
            x: a batch, or all rows, as the model takes them; what is encoded already stays.
        """
        if _are_encoded(x, self._names):
            encoded: dict[str, np.ndarray] = x
            return encoded
        if isinstance(self._structure, dict):
            # Keras has the inputs of a dict in the order of their names.
            given = keras.tree.flatten({name: np.asarray(x[name]) for name in self._structure})
        elif isinstance(x, dict):
            given = [x[tensor.name] for tensor in self._inputs]
        else:
            given = list(x) if len(self._inputs) > 1 or _is_list_of_arrays(x) else [x]
        arrays = [_fitting(*pair) for pair in zip(given, self._inputs, strict=True)]
        return dict(zip(self._names, map(np.asarray, self._encode(arrays)), strict=True))


def _structures(model: keras.Model) -> tuple[Any, Any]:
    """Return a built model's symbolic inputs and outputs, in their structures."""
    return (
        (model.inputs[0], model.outputs[0])
        if isinstance(model, keras.Sequential)
        else (model.input, model.output)
    )


def _build_for(model: keras.Model, x: UserValue) -> None:
    """Build a sequential model whose first layer says nothing of its inputs."""
    if isinstance(model, keras.Sequential) and not hasattr(model, "inputs"):
        model.build(_shape_of(x))


def call_on_host(model: keras.Model, given: UserValue) -> UserValue:
    """Return what a functional or sequential model computes of strings, which Keras would make arrays of JAX.

    Args:
        model: one whose layers take strings; elements of a data set before `batch` are a batch of one.
    """
    _build_for(model, given)
    named, output = _structures(model)
    if isinstance(given, dict) and isinstance(named, dict):
        given = {name: given[name] for name in named}
    # The same graph, whose inputs stay as they are.
    graph = keras.Function(model.inputs, model.outputs)
    inputs = keras.tree.flatten(given)
    arrays = [_fitting(*pair) for pair in zip(inputs, model.inputs, strict=True)]
    if any(a.ndim != len(i.shape) - 1 for a, i in zip(arrays, model.inputs, strict=True)):
        results = list(graph(arrays))
    else:
        results = [output[0] for output in graph([a[None] for a in arrays])]
    return keras.tree.pack_sequence_as(output, results)


def _are_encoded(x: UserValue, names: list[str]) -> bool:
    return isinstance(x, dict) and set(x) == set(names)


def _is_list_of_arrays(x: object) -> bool:
    return isinstance(x, (list, tuple)) and all(hasattr(item, "shape") for item in x)


def _fitting(value: UserValue, tensor: keras.KerasTensor) -> np.ndarray:
    """Return an array with the rank and dtype of an input, as Keras makes it; strings as they are."""
    array = np.asarray(value)
    if array.dtype.kind not in "USO":
        array = array.astype(tensor.dtype)
    if array.ndim == len(tensor.shape) - 1 and tensor.shape[-1] == 1:
        return array[..., None]
    if array.ndim == len(tensor.shape) + 1 and array.shape[-1] == 1:
        return array[..., 0]
    return array


def _computes_on_host(operation: Any) -> bool:
    """Return whether an operation is a layer of the host, or a model with one."""
    if not isinstance(operation, keras.Layer) or not any(
        getattr(layer, "computes_on_host", False) for layer in all_layers(operation)
    ):
        return False
    if operation.trainable_variables:
        raise UnsupportedError(
            "A model inside of another one that holds `StringLookup` and the like computes on the host, "
            f"where nothing is trained. Received: {operation.name!r} with trainable weights. Call its layers "
            "in the outer model."
        )
    return True


def _ends(model: keras.Model) -> list[keras.KerasTensor]:
    """Return the tensors with which the step begins: outputs of layers of the host, and other inputs."""
    ends: dict[int, keras.KerasTensor] = {}
    seen: set[int] = set()
    waiting = list(model.outputs)
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        operation, inputs = producer(tensor)
        if not inputs or _computes_on_host(operation):
            ends[id(tensor)] = tensor
        else:
            waiting += inputs
    return list(ends.values())


def _front_of(model: keras.Model, x: object) -> Encoder | None:
    if model in _FRONTS:
        return _FRONTS[model]
    first: Any = model.layers[0] if isinstance(model, keras.Sequential) and model.layers else None
    if getattr(first, "_encodes_on_host", False):
        # `DenseFeatures`: its step takes encoded features.
        encoder: Encoder = first
        _FRONTS[model] = encoder
        return encoder
    if not any(getattr(layer, "computes_on_host", False) for layer in all_layers(model, include_self=False)):
        return None
    _build_for(model, x)
    if not getattr(model, "inputs", None):
        return None
    _FRONTS[model] = front = _Front(model)
    return front


def _shape_of(x: UserValue) -> tuple[int | None, ...]:
    if isinstance(x, DataSet):
        spec: Any = getattr(x, "element_spec", None)
        x = spec[0] if isinstance(spec, tuple) else spec
    return (None, *(x.shape if hasattr(x, "shape") else np.shape(x))[1:])


def encoded_arguments(model: keras.Model, arguments: dict[str, UserValue]) -> dict[str, UserValue]:
    """Return a call's arguments, with its data encoded where the model begins on the host.

    Args:
        arguments: by name, with data.

    Raises:
        UnsupportedError: the part on the host has weights that are trained.
    """
    front = _front_of(model, arguments["x"])
    if front is None:
        return arguments
    arguments = {**arguments, "x": _encoded(front, arguments["x"])}
    validation = arguments.get("validation_data")
    if isinstance(validation, DataSet):
        arguments["validation_data"] = _encoded(front, validation)
    elif validation is not None:
        arguments["validation_data"] = (front.encode(validation[0]), *validation[1:])
    return arguments


def _encoded(front: Encoder, data: object) -> UserValue:
    if not isinstance(data, DataSet):
        # Keras' own forms of data are read by Keras, also those that `fit` has made for its validation.
        is_array = isinstance(data, (dict, list, tuple)) or hasattr(data, "__array__")
        return front.encode(data) if is_array else data
    mapped: Any = data

    def encode(x: Any, *rest: Any) -> Any:
        return (front.encode(x), *rest) if rest else front.encode(x)

    return mapped.map(encode)
