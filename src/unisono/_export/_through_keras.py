"""Formats that Keras writes itself: `.keras`, TensorFlow's SavedModel, ONNX.

Keras writes to a temporary path, which is renamed when it is complete.

Tests: tests/virtual/test_export.py.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import keras
import numpy as np

from unisono._errors import InvalidArgumentError
from unisono._export._files import (
    MANIFEST,
    describe_files,
    read_as_written,
    read_file,
    read_manifest,
    replace_atomically,
    seal,
)
from unisono._export._signature import input_specs
from unisono._export._specs import PLATFORMS, ArraySpec, leaves, map_leaves
from unisono._export._stablehlo import one_replica, write_stablehlo
from unisono._system._packages import require_packages

_log = logging.getLogger("unisono")

#: The artefact of `export_saved_model`: one `.keras` file and its checksum.
KIND = "unisono-keras"
VERSION = 1
MODEL = "model.keras"
#: Beside it, where it was asked for: the inference, which needs no class of the user's.
INFERENCE = "inference"


def write_keras(model: keras.Model, path: Path) -> None:
    """Write a `.keras` file: architecture, weights, the arguments of `compile`, the optimizer's state."""
    with replace_atomically(path) as aside:
        model.save(aside)


def write_saved_model(model: keras.Model, path: Path) -> None:
    """Write TensorFlow's SavedModel, whose function `serve` takes batches of any size."""
    require_packages("TensorFlow's SavedModel", "saved-model", "tensorflow")
    with replace_atomically(path, marker="saved_model.pb") as aside, _one_copy(model):
        model.export(aside, format="tf_saved_model", verbose=False)


def write_onnx(model: keras.Model, path: Path) -> None:
    """Write an ONNX file, and run it once.

    The converter does not support every layer, and does not report that: with jax2onnx 0.17 `MaxPooling2D`
    gives a file that onnxruntime refuses.
    """
    require_packages("An ONNX file", "onnx", "jax2onnx", "onnx", "onnxruntime")
    inputs = map_leaves(_sample, input_specs(model, None, batch_size=2))
    with replace_atomically(path) as aside:
        with _one_copy(model):
            model(inputs, training=False)  # Keras exports only models that have been called
            model.export(aside, format="onnx", verbose=False)
        # Before the rename: a file that does not run never receives its name.
        try_onnx(aside, leaves(inputs), model.name)


def _sample(spec: ArraySpec) -> np.ndarray:
    return np.zeros([size if isinstance(size, int) else 2 for size in spec.shape], jnp.dtype(spec.dtype))


def try_onnx(file: Path, inputs: Sequence[np.ndarray], name: str) -> None:
    """Run an ONNX file once."""
    onnxruntime = importlib.import_module("onnxruntime")
    try:
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        session.run(None, {i.name: x for i, x in zip(session.get_inputs(), inputs, strict=True)})
    except Exception as error:
        raise InvalidArgumentError(
            "The ONNX file that jax2onnx writes must run in onnxruntime. Received: a file for "
            f"{name!r} that fails: {str(error).strip()} Replace the layer that the error names "
            "(`MaxPooling2D` fails; `AveragePooling2D` and strides run), or export StableHLO."
        ) from error


@contextlib.contextmanager
def _one_copy(model: keras.Model) -> Iterator[None]:
    """Give the model's variables one replica's values, on one device, for a block."""
    values = [(v, jnp.asarray(one_replica(v.value))) for v in model.variables]
    # Inside, reads return these values; the variables keep theirs, and their shardings.
    with keras.StatelessScope(state_mapping=values):
        yield


def write_keras_folder(model: keras.Model, path: Path, with_inference: bool = False) -> None:
    """Write the directory of `export_saved_model`, and a StableHLO artefact in it on request."""
    with replace_atomically(path, marker=MANIFEST) as aside:
        aside.mkdir()
        model.save(aside / MODEL)
        if with_inference:
            write_stablehlo(model, aside / INFERENCE, PLATFORMS, None, None)
        body = {"name": model.name, "files": describe_files(aside, [MODEL])}
        (aside / MANIFEST).write_text(seal(KIND, VERSION, body), encoding="utf-8")


def load_keras_folder(path: Path, custom_objects: Mapping[str, object] | None) -> keras.Model:
    """Load the directory of `write_keras_folder`; compile the model if its losses and metrics are found."""
    manifest = read_manifest(path, KIND, VERSION)
    with read_as_written(path / MANIFEST):
        # Only to verify the checksum: Keras reads the file itself.
        read_file(path, MODEL, manifest["files"])
    file = path / MODEL
    try:
        return keras.saving.load_model(file, custom_objects=custom_objects)
    except (TypeError, ValueError) as error:
        # Probably a loss of the user's, which is not needed by a program that compiles the model again.
        model = keras.saving.load_model(file, custom_objects=custom_objects, compile=False)
        _log.warning("The model of %s was loaded without its `compile`: %s", path, error)
        return model
