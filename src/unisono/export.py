"""Export a trained model: to StableHLO, `.keras`, TensorFlow's SavedModel or ONNX.

`export` takes a model that was trained under any strategy, or none, and writes one replica's
weights. `load` reads a StableHLO artefact back as a function, in a process that needs neither Keras
nor the code of the model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal

from unisono._backend import require_jax
from unisono._errors import InvalidArgumentError, InvalidTypeError, MissingPackageError
from unisono._export._files import MANIFEST, written_at
from unisono._export._specs import PLATFORMS, ArraySpec
from unisono._names import no_attribute
from unisono._system._object_store import Place, StorePath, given_place, local_copy
from unisono._types import PyTree

if TYPE_CHECKING:
    # Not at run time: `load` must not import Keras.
    import keras

    from unisono._export._loaded import ExportedModel

__all__ = [
    "ArraySpec",
    "ExportedModel",
    "MissingPackageError",
    "export",
    "export_saved_model",
    "load",
    "load_from_saved_model",
]


def __dir__() -> list[str]:
    return __all__


_FORMATS = ("stablehlo", "keras", "saved_model", "onnx")
#: The file by which a directory of a format is recognised.
_MARKERS = {"stablehlo": MANIFEST, "saved_model": "saved_model.pb"}
_BY_SUFFIX = {"": "stablehlo", ".stablehlo": "stablehlo", ".keras": "keras", ".onnx": "onnx"}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        # Lazily: its module imports JAX, which a program that only imports this one may not need.
        if name == "ExportedModel":
            from unisono._export._loaded import ExportedModel

            return ExportedModel
        raise no_attribute(__name__, name, __all__)


def export(
    model: keras.Model,
    path: str | os.PathLike[str] | StorePath,
    format: Literal["stablehlo", "keras", "saved_model", "onnx"] | None = None,  # noqa: A002 (the name that Keras' `export` has)
    *,
    platforms: Sequence[str] = PLATFORMS,
    batch_size: int | None = None,
    input_spec: PyTree = None,
) -> Place:
    """Write a model's inference, with one replica's weights, as a portable artefact.

    The artefact replaces what is at `path` atomically, at the end; a failure leaves `path` unchanged.
    Among several workers the first one writes, and all return when it has.

    Args:
        model: a built Keras model, of any strategy or none.
        path: a directory for `"stablehlo"` and `"saved_model"`, a file for `"keras"` and `"onnx"`; also one
            in an object store, such as `s3://bucket/model`.
        format: `"stablehlo"` (for `load`; needs neither Keras nor the model's code), `"keras"` (to
            continue training), `"saved_model"` (needs TensorFlow), `"onnx"` (needs jax2onnx). None
            chooses by the suffix: `.keras`, `.onnx`, and `.stablehlo` or none for StableHLO.
        platforms: the platforms on which a StableHLO artefact runs.
        batch_size: the fixed number of rows of a StableHLO artefact, for layers that need it; None
            allows every size.
        input_spec: the inputs of a StableHLO artefact, for a model that does not define them:
            `ArraySpec`s, or other objects with a shape and a dtype, in the structure of the inputs.

    Returns:
        The path.

    Raises:
        InvalidArgumentError: when an argument is invalid, when `path` is something else than such an
            artefact, or when the model cannot be traced for any batch size or for one of the platforms.
        InvalidTypeError: when `model` is not a Keras model.
        MissingPackageError: when the format needs a package that is not installed.

    >>> import unisono, keras, numpy as np, tempfile
    >>> with unisono.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
    ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     served = load(export(model, f"{folder}/model"))
    >>> served(np.ones((5, 3))).shape
    (5, 2)
    >>> served.input_spec.shape
    ('batch', 3)
    """
    target = given_place(path)
    chosen = _chosen_format(target, format)
    _check_model(model)
    # An argument that the format ignores is an error, because its artefact would not be what was requested.
    if chosen != "stablehlo":
        _check_unused(chosen, platforms, batch_size, input_spec)
    if _writes_files(model):
        # During `fit` the training loop holds the state: write it back to the variables, as Keras' callbacks
        # do.
        model.jax_state_sync()
        with written_at(target, _MARKERS.get(chosen)) as folder:
            _write(model, folder, chosen, platforms, batch_size, input_spec)
    _share(model, path)
    return target


def _write(
    model: keras.Model,
    path: Path,
    chosen: str,
    platforms: Sequence[str],
    batch_size: int | None,
    input_spec: PyTree,
) -> None:
    if chosen == "stablehlo":
        from unisono._export._stablehlo import write_stablehlo

        write_stablehlo(model, path, platforms, batch_size, input_spec)
        return
    from unisono._export import _through_keras

    writers = {
        "keras": _through_keras.write_keras,
        "saved_model": _through_keras.write_saved_model,
        "onnx": _through_keras.write_onnx,
    }
    writers[chosen](model, path)


def load(path: str | os.PathLike[str] | StorePath) -> ExportedModel:
    """Load a StableHLO artefact as a function of arrays, without importing Keras.

    Args:
        path: the directory that `export` wrote.

    Returns:
        An `ExportedModel`, to be called with arrays of any batch size.

    Raises:
        InvalidArgumentError: when a file is missing, truncated or changed, when a newer Unisono wrote
            the artefact, or when the installed JAX cannot read it.
        MissingPackageError: when flatbuffers is not installed.

    >>> import tempfile
    >>> import keras, numpy as np
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    >>> folder = export(model, tempfile.mkdtemp() + "/served")
    >>> load(folder)(np.ones((5, 2), "float32")).shape
    (5, 3)
    """
    from unisono._export._loaded import load_exported

    with local_copy(given_place(path)) as folder:
        return load_exported(folder)


def export_saved_model(
    model: keras.Model, path: str | os.PathLike[str], *, with_inference: bool = False
) -> None:
    """Write the whole model to a directory, as `tf.keras.experimental.export_saved_model` did.

    The directory holds a `.keras` file and its checksum; TensorFlow is not needed. For TensorFlow's
    own format write `export(model, path, format="saved_model")`.

    Args:
        model: a built Keras model, of any strategy or none.
        path: the directory; an earlier artefact of this function is replaced.
        with_inference: whether the directory holds a StableHLO artefact `inference`, too, which `load` reads
            where the model's class is not known.

    Raises:
        InvalidArgumentError: when `path` is something else than such an artefact.
        InvalidTypeError: when `model` is not a Keras model.

    >>> import tempfile
    >>> import keras
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    >>> export_saved_model(model, tempfile.mkdtemp() + "/saved")
    """
    _check_model(model)
    if _writes_files(model):
        # As in `export`: during `fit` the training loop holds the newest values.
        model.jax_state_sync()
        from unisono._export._through_keras import write_keras_folder

        with written_at(given_place(path), MANIFEST) as folder:
            write_keras_folder(model, folder, with_inference)
    _share(model, path)


def load_from_saved_model(
    path: str | os.PathLike[str], custom_objects: Mapping[str, object] | None = None
) -> keras.Model:
    """Load an artefact of `export_saved_model`, as `tf.keras.experimental.load_from_saved_model` did.

    Outside of a scope the result is a plain Keras model; inside `strategy.scope()` it belongs to the
    strategy.

    Args:
        path: the directory.
        custom_objects: the user's own classes and functions, by name.

    Returns:
        The Keras model, compiled as it was. Where a loss or metric of the user's cannot be found, the
        model is not compiled, and a warning is logged.

    Raises:
        InvalidArgumentError: when a file is missing, truncated or changed.

    >>> import keras, numpy as np, tempfile
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export_saved_model(model, f"{folder}/saved_model")
    ...     again = load_from_saved_model(f"{folder}/saved_model")
    >>> x = np.ones((4, 3), "float32")
    >>> bool(np.allclose(again(x), model(x)))
    True
    """
    require_jax()
    from unisono._export._through_keras import load_keras_folder

    with local_copy(given_place(path)) as folder:
        return load_keras_folder(folder, custom_objects)


def _chosen_format(path: Place, given: str | None) -> str:
    name = PurePath(path.name)
    if given is None and name.suffix in _BY_SUFFIX:
        return _BY_SUFFIX[name.suffix]
    if given is None:
        raise InvalidArgumentError(
            f"The suffix of `path` must be one of {sorted(_BY_SUFFIX)} where no format is given. Received: "
            f"path={str(path)!r}. Write `export(model, path, format=...)` with one of {_FORMATS}."
        )
    if given not in _FORMATS:
        raise InvalidArgumentError(
            f"`format` must be one of {_FORMATS}, or None. Received: format={given!r}. Write "
            "`format='stablehlo'` for `unisono.export.load`, or `format='keras'` to continue training."
        )
    if given == "keras" and name.suffix != ".keras":
        raise InvalidArgumentError(
            f"The path of a Keras file must end in '.keras'. Received: path={str(path)!r}. Write "
            f"{str(path.with_name(str(name.with_suffix('.keras'))))!r}."
        )
    return given


def _check_model(model: object) -> None:
    require_jax()
    import keras

    if not isinstance(model, keras.Model):
        raise InvalidTypeError(
            f"`model` must be a `keras.Model`. Received: model={model!r} of type {type(model).__name__}. "
            "Put layers into `keras.Sequential([...])`, or use `jax.export` for a JAX function."
        )


def _writes_files(model: keras.Model) -> bool:
    # Imported here, because `load` must not import Keras.
    from unisono.training._binding import writes_files

    return writes_files(model)


def _share(model: keras.Model, path: str | os.PathLike[str] | StorePath) -> None:
    """Make all workers wait until the first one has written."""
    from unisono.training._binding import holder_of

    strategy = holder_of(model)
    if strategy is not None:
        strategy.process_group.share_file(str(path))


def _check_unused(chosen: str, platforms: Sequence[str], batch_size: int | None, input_spec: object) -> None:
    given = {"platforms": tuple(platforms) != PLATFORMS, "batch_size": batch_size, "input_spec": input_spec}
    names = [name for name, value in given.items() if value is not None and value is not False]
    if names:
        raise InvalidArgumentError(
            f"`{names[0]}` belongs to the format 'stablehlo'. Received: {names} with the format {chosen!r}. "
            "Leave it out."
        )
