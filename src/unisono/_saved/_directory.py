"""A directory of a Keras model, or of a module with functions and variables: `save` and `load`.

Tests: tests/unit/tf/test_saving.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import keras

from unisono import export
from unisono._errors import InvalidArgumentError, UnsupportedError
from unisono._export._files import MANIFEST
from unisono._export._through_keras import INFERENCE
from unisono._saved._concrete import spec_of
from unisono._saved._module import Module
from unisono._saved._reader import by_name, is_module, read_module
from unisono._saved._writer import write_module
from unisono._system._object_store import given_place, local_copy, store_path
from unisono._types import PyTree
from unisono.checkpoint._tracking import Holder

#: The name under which a saved model's inference is found.
SERVING = "serving_default"

#: Where the signatures of a Keras model lie that a program gives, in its directory.
_SIGNATURES = "signatures"


def is_saved(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a directory that Unisono has written."""
    return ((store_path(path) or Path(path)) / MANIFEST).is_file()


def save(obj: object, path: str | os.PathLike[str], signatures: Mapping[str, Any] | None = None) -> None:
    """Write a model or module to a directory.

    Args:
        obj: a model of Keras; a `Module`, whose functions are saved for the calls that were made of them.
        signatures: functions for given shapes, by name.

    Raises:
        InvalidArgumentError: a signature is no function for given shapes.
        UnsupportedError: the object is none of these.
    """
    if isinstance(obj, keras.Model):
        # Keras finds a class of the user's only where it is imported: the inference needs none.
        is_user_code = not type(obj).__module__.startswith("keras.")
        export.export_saved_model(obj, path, with_inference=is_user_code and obj.built)
        if signatures:
            write_module(Module(), given_place(path) / _SIGNATURES, signatures)
    elif isinstance(obj, Holder):
        write_module(obj, given_place(path), signatures or {})
    else:
        raise UnsupportedError(
            "`tf.saved_model.save` writes Keras models and `tf.Module`s. Received: "
            f"{type(obj).__name__}. Make the object an attribute of a `tf.Module`."
        )


def load(path: str | os.PathLike[str]) -> Any:
    """Load what `save` wrote.

    Returns:
        For a module, an object with its functions and variables. Of a model, the Keras model, with functions
        that return dicts in `signatures`; of a class that is not known here the inference alone.
    """
    with local_copy(given_place(path)) as folder:
        return _load(folder)


def _load(folder: Path) -> Any:
    if is_module(folder):
        return read_module(folder)
    try:
        model = export.load_from_saved_model(folder)
    except TypeError as error:
        if "Could not locate class" not in str(error):
            raise
        inference = folder / INFERENCE
        return SavedInference(export.load(inference) if inference.is_dir() else None)
    # Not by `setattr`, which Keras would track.
    vars(model)["signatures"] = {SERVING: ModelSignature(model)} if model.built else {}
    if (folder / _SIGNATURES).is_dir():
        vars(model)["signatures"] |= read_module(folder / _SIGNATURES).signatures
    return model


class SavedInference:
    """The inference of a loaded model whose class is not known here.

    Args:
        function: of the inputs; None where the model had never been called.
    """

    def __init__(self, function: Callable[[PyTree], PyTree] | None) -> None:
        self.signatures = {} if function is None else {SERVING: ModelSignature(function)}
        self._function = function

    def __call__(self, inputs: PyTree, training: bool = False) -> PyTree:
        """Return the outputs."""
        if training or self._function is None:
            raise UnsupportedError(
                "A model is trained where its class is known. Received: a model that was loaded without it. "
                "Import the class, decorated with `@keras.saving.register_keras_serializable()`, before."
            )
        return self._function(inputs)


class ModelSignature:
    """A saved model's inference, which takes its inputs by their names, and returns a dict."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> dict[str, Any]:
        """Return the outputs by name."""
        return self._named(self._function(_inputs(args, kwargs)))

    @property
    def structured_outputs(self) -> dict[str, Any]:
        """The specs of the outputs, by name."""
        model = self._function
        # What was exported has specs; a model of Keras has outputs.
        specs = model.output_spec if hasattr(model, "output_spec") else getattr(model, "output", None)
        # A Sequential model that was loaded has no `output` before its first call.
        specs = model.outputs if specs is None else specs
        return self._named(keras.tree.map_structure(spec_of, specs))

    def _named(self, outputs: PyTree) -> dict[str, Any]:
        return NamedOutputs(by_name(outputs), getattr(self._function, "output_names", ()))


class NamedOutputs(dict[str, Any]):
    """Outputs by name; a model of Keras 2 has the names of its layers, which find them, too."""

    def __init__(self, outputs: dict[str, Any], names: Sequence[str]) -> None:
        super().__init__(outputs)
        self._names = list(names)

    def __missing__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        return list(self.values())[self._names.index(name)]

    def parts(self) -> tuple[list[Any], tuple[tuple[str, ...], tuple[str, ...]]]:
        """Return the values, and the names: JAX knows no classes of dicts."""
        return list(self.values()), (tuple(self), tuple(self._names))


jax.tree_util.register_pytree_node(
    NamedOutputs,
    NamedOutputs.parts,
    lambda names, values: NamedOutputs(dict(zip(names[0], values, strict=True)), names[1]),
)


def _inputs(args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]) -> PyTree:
    """Return a model's inputs: one argument, or several by name."""
    if len(args) == 1 and not kwargs:
        return args[0]
    if args or not kwargs:
        raise InvalidArgumentError(
            "A signature takes its inputs as one argument, or by their names. Received: "
            f"{len(args)} arguments and {sorted(kwargs)}."
        )
    return next(iter(kwargs.values())) if len(kwargs) == 1 and set(kwargs) == {"inputs"} else dict(kwargs)
