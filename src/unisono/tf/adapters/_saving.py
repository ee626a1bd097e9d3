"""Checkpoints and saved models with TensorFlow's names and arguments.

Tests: tests/unit/tf/test_saving.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import keras

from unisono._errors import InvalidArgumentError, UnsupportedError
from unisono._export._through_keras import INFERENCE
from unisono._types import PyTree
from unisono.checkpoint._checkpoint import Checkpoint
from unisono.checkpoint._manager import CheckpointManager
from unisono.checkpoint._reader import latest_checkpoint as newest_commit
from unisono.checkpoint._tracking import Holder
from unisono.export import export_saved_model, load, load_from_saved_model
from unisono.tf.adapters._tensors import Module
from unisono.tf.adapters.saved._concrete import spec_of
from unisono.tf.adapters.saved._reader import by_name, is_module, read_module
from unisono.tf.adapters.saved._writer import write_module

#: The name under which a saved model's inference is found.
SERVING = "serving_default"

#: Endings of Keras' own files; all other paths are directories, as in TensorFlow 2.
_FILES = (".keras", ".h5", ".hdf5")

#: Where the signatures of a Keras model lie that a program gives, in its directory.
_SIGNATURES = "signatures"


class CheckpointManagerV2(CheckpointManager):
    """Numbered checkpoints in a directory, as `tf.train.CheckpointManager` keeps them.

    `save` returns when the checkpoint is complete. Of several workers the first writes; the directory is
    there on each of them afterwards, for programs that delete what the others have written.

    Args:
        checkpoint: what to save.
        directory: where.
        max_to_keep: how many are kept; None for all.
        keep_checkpoint_every_n_hours: is not used: nothing more is kept.
        checkpoint_name: of the files.
        step_counter: a variable with the number of the step, for `checkpoint_interval`.
        checkpoint_interval: how many steps lie between two checkpoints; `save` does nothing before.
        init_fn: called by `restore_or_initialize` where there is no checkpoint.

    Raises:
        InvalidArgumentError: an interval without a counter of steps.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: Any = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], Any] | None = None,
    ) -> None:
        if checkpoint_interval is not None and step_counter is None:
            raise InvalidArgumentError(
                "`checkpoint_interval` counts the steps of `step_counter`. Received: "
                f"checkpoint_interval={checkpoint_interval}, step_counter=None."
            )
        super().__init__(
            checkpoint,
            directory,
            max_to_keep,
            checkpoint_name=checkpoint_name,
            asynchronous=False,
            init_fn=init_fn,
        )
        self.checkpoint_interval, self._counter = checkpoint_interval, step_counter
        self._last_step: int | None = None

    def save(  # type: ignore[override]  # None between two intervals, as in TensorFlow
        self,
        checkpoint_number: Any = None,
        check_interval: bool = True,
        options: object = None,
    ) -> str | None:
        """Save everything as it is now.

        Args:
            checkpoint_number: such as the step; the next number if None.
            check_interval: whether nothing is saved before `checkpoint_interval` steps have passed.
            options: is not used.

        Returns:
            The path, or None where nothing was saved.
        """
        if self.checkpoint_interval is not None:
            step = int(self._counter)
            last = self._last_step
            if check_interval and last is not None and step - last < self.checkpoint_interval:
                return None
            self._last_step = step
        path = super().save(None if checkpoint_number is None else int(checkpoint_number))
        os.makedirs(self.directory, exist_ok=True)
        return path


def latest_checkpoint(
    checkpoint_dir: str | os.PathLike[str], latest_filename: str | None = None
) -> str | None:
    """Return the newest checkpoint of a directory, or the newest of Keras' files there, or None.

    Args:
        checkpoint_dir: the directory.
        latest_filename: is not used.
    """
    found = newest_commit(checkpoint_dir)
    if found is not None or not os.path.isdir(checkpoint_dir):
        return found
    # What `ModelCheckpoint` writes.
    files = [path for path in Path(checkpoint_dir).iterdir() if path.name.endswith(_FILES)]
    return str(max(files, key=lambda path: (path.stat().st_mtime_ns, path.name))) if files else None


def save_model(obj: object, export_dir: str, signatures: object = None, options: object = None) -> None:
    """Write a model or module to a directory, as `tf.saved_model.save` does.

    Args:
        obj: a model of Keras; a `tf.Module`, whose functions are saved for the calls that were made of them.
        export_dir: the directory.
        signatures: functions for given shapes, by name, or one of them.
        options: are not used.

    Raises:
        InvalidArgumentError: a signature is no function for given shapes.
        UnsupportedError: the object is none of these.
    """
    named = signatures if isinstance(signatures, Mapping) else {SERVING: signatures}
    named = {} if signatures is None else named
    if isinstance(obj, keras.Model):
        _write(obj, export_dir)
        if named:
            write_module(Module(), Path(export_dir) / _SIGNATURES, named)
    elif isinstance(obj, Holder):
        write_module(obj, Path(export_dir), named)
    else:
        raise UnsupportedError(
            "`tf.saved_model.save` writes Keras models and `tf.Module`s. Received: "
            f"{type(obj).__name__}. Make the object an attribute of a `tf.Module`."
        )


def _write(model: keras.Model, path: str | os.PathLike[str]) -> None:
    # Keras finds a class of the user's only where it is imported: the inference needs none.
    is_user_code = not type(model).__module__.startswith("keras.")
    export_saved_model(model, path, with_inference=is_user_code and model.built)


class SavedInference:
    """What is loaded of a model whose class is not known here: its inference.

    Args:
        function: of the inputs; None where the model had never been called.
    """

    def __init__(self, function: Callable[[PyTree], PyTree] | None) -> None:
        self.signatures = {} if function is None else {SERVING: ModelSignature(function)}
        self._function = function

    def __call__(self, inputs: PyTree, training: bool = False) -> PyTree:
        """Return the outputs.

        Args:
            inputs: of the model.
            training: False.

        Raises:
            UnsupportedError: in training, or where nothing was saved but the class.
        """
        if training or self._function is None:
            raise UnsupportedError(
                "A model is trained where its class is known. Received: a model that was loaded without it. "
                "Import the class, decorated with `@keras.saving.register_keras_serializable()`, before."
            )
        return self._function(inputs)


def load_model(export_dir: str, tags: object = None, options: object = None) -> Any:
    """Load what `save_model` or `Model.save` wrote to a directory.

    Args:
        export_dir: the directory.
        tags: are not used.
        options: are not used.

    Returns:
        For a module, an object with its functions and variables. Of a model, the Keras model, with
        `signatures["serving_default"]`, a function that returns a dict; of a class that is not known here the
        inference alone.
    """
    if is_module(Path(export_dir)):
        return read_module(Path(export_dir))
    try:
        model = load_from_saved_model(export_dir)
    except TypeError as error:
        if "Could not locate class" not in str(error):
            raise
        folder = Path(export_dir) / INFERENCE
        return SavedInference(load(folder) if folder.is_dir() else None)
    # Not by `setattr`, which Keras would track.
    vars(model)["signatures"] = {SERVING: ModelSignature(model)} if model.built else {}
    folder = Path(export_dir) / _SIGNATURES
    if folder.is_dir():
        vars(model)["signatures"] |= read_module(folder).signatures
    return model


class ModelSignature:
    """A saved model's inference, which takes its inputs by their names, and returns a dict.

    Args:
        function: of the inputs: a Keras model, or what is known of one.
    """

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
    """Outputs by name; those of a model of Keras 2 have the names of its layers, which find them, too."""

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
    """Return what a model is called with: one argument, or several by name."""
    if len(args) == 1 and not kwargs:
        return args[0]
    if args or not kwargs:
        raise InvalidArgumentError(
            "A signature takes its inputs as one argument, or by their names. Received: "
            f"{len(args)} arguments and {sorted(kwargs)}."
        )
    return next(iter(kwargs.values())) if len(kwargs) == 1 and set(kwargs) == {"inputs"} else dict(kwargs)


def save_to_directory(model: keras.Model, filepath: Any) -> bool:
    """Write a model to a path without an ending, as TensorFlow 2 does; return whether it is such a path."""
    path = os.fspath(filepath) if isinstance(filepath, (str, os.PathLike)) else ""
    if not path or "://" in path or path.endswith(_FILES):
        return False
    if not model.built:
        raise InvalidArgumentError(
            f"A model is saved when it has its variables. Received: {model.name!r}, which was never called. "
            "Call it, or `fit` it, first."
        )
    _write(model, path)
    return True


def weights_file(filepath: Any) -> Any:
    """Return the path of a file of weights, with the ending that Keras 3 demands.

    >>> weights_file("checkpoints/best")
    'checkpoints/best.weights.h5'
    """
    path = os.fspath(filepath) if isinstance(filepath, (str, os.PathLike)) else ""
    # What is there is read as it is; `.json` describes several files.
    if not path or path.endswith((".weights.h5", ".keras", ".json")) or os.path.exists(path):
        return filepath
    return f"{path.removesuffix('.h5')}.weights.h5"
