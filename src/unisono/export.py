"""Trained weights as a portable model: StableHLO, `.keras`, TensorFlow's SavedModel, ONNX.

`export` takes a model that was trained under any strategy, or none, and writes one replica's
weights. `load` reads the StableHLO artefact back as a function, in a process without Keras and
without the code of the model.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unisono._backend import require_jax
from unisono._errors import InvalidArgumentError, InvalidTypeError, MissingPackageError
from unisono._export._specs import ArraySpec

if TYPE_CHECKING:
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

_FORMATS = ("stablehlo", "keras", "saved_model", "onnx")
_BY_SUFFIX = {"": "stablehlo", ".stablehlo": "stablehlo", ".keras": "keras", ".onnx": "onnx"}
_EVERYWHERE = ("cpu", "cuda", "tpu", "rocm")


def __getattr__(name: str) -> Any:
    # Its file starts JAX, which a program that only imports this module need not do.
    if name == "ExportedModel":
        from unisono._export._loaded import ExportedModel

        return ExportedModel
    raise AttributeError(f"module 'unisono.export' has no attribute {name!r}")


def export(
    model: Any,
    path: str | os.PathLike[str],
    format: str | None = None,  # noqa: A002 (the name that Keras' `export` has)
    *,
    platforms: Sequence[str] = _EVERYWHERE,
    batch_size: int | None = None,
    input_spec: Any = None,
) -> Path:
    """Write a model's inference, with one replica's weights, as a portable artefact.

    What is at `path` is replaced at the end and at once; a failure leaves it as it was. Of several
    workers, the first writes, and the others return at once.

    Args:
        model: a built Keras model, of any strategy or none.
        path: a directory for `"stablehlo"` and `"saved_model"`, a file for `"keras"` and `"onnx"`.
        format: `"stablehlo"` (for `load`; needs neither Keras nor the model's code), `"keras"` (to
            train on), `"saved_model"` (needs TensorFlow), `"onnx"` (needs jax2onnx). None goes by the
            suffix: `.keras`, `.onnx`, and `.stablehlo` or none for StableHLO.
        platforms: where a StableHLO artefact shall run.
        batch_size: fix the number of rows of a StableHLO artefact, for a layer that needs it; None
            allows every size.
        input_spec: for a StableHLO artefact of a model that does not say what it takes: `ArraySpec`s,
            or anything else with shape and dtype, in the structure of the model's inputs.

    Returns:
        The path.

    Raises:
        InvalidArgumentError: when an argument cannot be used, when `path` holds something else, or
            when the model cannot be traced for any batch size or for one of the platforms.
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
    target = Path(path)
    chosen = _chosen_format(target, format)
    _check_model(model)
    if chosen != "stablehlo":
        _check_unused(chosen, platforms, batch_size, input_spec)
    if _writes_files(model):
        # In `fit`, the state is in the training loop's hands; Keras' callbacks ask for it in this way.
        model.jax_state_sync()
        _write(model, target, chosen, platforms, batch_size, input_spec)
    _share(model, path)
    return target


def _write(
    model: Any, path: Path, chosen: str, platforms: Sequence[str], batch_size: int | None, input_spec: Any
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


def load(path: str | os.PathLike[str]) -> ExportedModel:
    """Load a StableHLO artefact as a function of arrays; imports no Keras.

    Args:
        path: the directory that `export` wrote.

    Returns:
        An `ExportedModel`: call it with arrays of any batch size.

    Raises:
        InvalidArgumentError: when a file is missing, cut off or changed, when a newer Unisono wrote
            the artefact, or when the installed JAX cannot read it.
        MissingPackageError: when flatbuffers is not installed.
    """
    from unisono._export._loaded import load_exported

    return load_exported(Path(path))


def export_saved_model(model: Any, path: str | os.PathLike[str]) -> None:
    """Write the whole model to a directory, as `tf.keras.experimental.export_saved_model` did.

    The directory holds a `.keras` file and its checksum: no TensorFlow is needed. For
    TensorFlow's own format write `export(model, path, format="saved_model")`.

    Args:
        model: a built Keras model, of any strategy or none.
        path: the directory; an artefact that this function wrote there before is replaced.

    Raises:
        InvalidArgumentError: when `path` holds something else.
        InvalidTypeError: when `model` is not a Keras model.
    """
    _check_model(model)
    if _writes_files(model):
        model.jax_state_sync()
        from unisono._export._through_keras import write_keras_folder

        write_keras_folder(model, Path(path))
    _share(model, path)


def load_from_saved_model(
    path: str | os.PathLike[str], custom_objects: Mapping[str, Any] | None = None
) -> Any:
    """Load what `export_saved_model` wrote, as `tf.keras.experimental.load_from_saved_model` did.

    Outside every scope the model is plain Keras; in `strategy.scope()` it is the strategy's.

    Args:
        path: the directory.
        custom_objects: the user's own classes and functions, by name.

    Returns:
        The Keras model, compiled as it was. Where its own loss or metric cannot be found, it is
        not compiled, and a warning is logged.

    Raises:
        InvalidArgumentError: when a file is missing, cut off or changed.

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

    return load_keras_folder(Path(path), custom_objects)


def _chosen_format(path: Path, given: str | None) -> str:
    if given is None and path.suffix in _BY_SUFFIX:
        return _BY_SUFFIX[path.suffix]
    if given is None:
        raise InvalidArgumentError(
            f"The suffix of `path` must be one of {sorted(_BY_SUFFIX)} where no format is given. Received: "
            f"path={str(path)!r}. Write `export(model, path, format=...)` with one of {_FORMATS}."
        )
    if given not in _FORMATS:
        raise InvalidArgumentError(
            f"`format` must be one of {_FORMATS}, or None. Received: format={given!r}. Write "
            "`format='stablehlo'` for `unisono.export.load`, or `format='keras'` to train on."
        )
    if given == "keras" and path.suffix != ".keras":
        raise InvalidArgumentError(
            f"The path of a Keras file must end in '.keras'. Received: path={str(path)!r}. Write "
            f"{str(path.with_suffix('.keras'))!r}."
        )
    return given


def _check_model(model: Any) -> None:
    require_jax()
    import keras

    if not isinstance(model, keras.Model):
        raise InvalidTypeError(
            f"`model` must be a `keras.Model`. Received: model={model!r} of the type {type(model).__name__}. "
            "Put layers into `keras.Sequential([...])`, or use `jax.export` for a JAX function."
        )


def _writes_files(model: Any) -> bool:
    # Here, because `load` imports no Keras.
    from unisono.training._binding import writes_files

    return writes_files(model)


def _share(model: Any, path: str | os.PathLike[str]) -> None:
    """Among several workers: all wait until the first has written."""
    from unisono.training._binding import holder_of

    strategy = holder_of(model)
    if strategy is not None:
        strategy.share_file(str(path))


def _check_unused(chosen: str, platforms: Sequence[str], batch_size: int | None, input_spec: Any) -> None:
    given = {"platforms": tuple(platforms) != _EVERYWHERE, "batch_size": batch_size, "input_spec": input_spec}
    names = [name for name, value in given.items() if value is not None and value is not False]
    if names:
        raise InvalidArgumentError(
            f"`{names[0]}` belongs to the format 'stablehlo'. Received: {names} with the format {chosen!r}. "
            "Leave it out."
        )
