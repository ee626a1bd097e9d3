"""Load a StableHLO artefact as a function, without importing Keras.

The artefact consists of `serve.stablehlo`, a function of (weights, inputs), two flat lists of arrays,
serialized by `jax.export`; `weights.npz`, the weights in that order; and the manifest, with the structures of
inputs and outputs.
Source: https://docs.jax.dev/en/latest/export/export.html

Tests: tests/virtual/test_export.py.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from unisono._errors import InvalidArgumentError
from unisono._export._files import MANIFEST, damaged, read_as_written, read_file, read_manifest
from unisono._export._specs import ArraySpec, bind_sizes, decode, matched, rebuild
from unisono._system._packages import require_packages
from unisono._types import PyTree

KIND = "unisono-stablehlo"
VERSION = 1
FUNCTION = "serve.stablehlo"
WEIGHTS = "weights.npz"


class ExportedModel:
    """A model's inference, loaded from an artefact; call it with arrays.

    Created by `unisono.export.load`. Calls work inside `jax.jit` and `jax.vmap`, too; there are no
    gradients, because only inference was exported.

    Args:
        exported: the function of (weights, inputs).
        weights: the arrays of its first argument.

    >>> import tempfile
    >>> import keras, unisono
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    >>> folder = unisono.export.export(model, tempfile.mkdtemp() + "/served")
    >>> unisono.export.load(folder)(np.ones((5, 2), "float32")).shape
    (5, 3)
    """

    def __init__(
        self,
        exported: jax.export.Exported,
        weights: list[np.ndarray],
        manifest: dict[str, Any],
    ) -> None:
        self._exported = exported
        self._function = jax.jit(exported.call)
        # Once: NumPy arrays would be copied to the device at every call.
        self._weights = jax.device_put(weights)
        self._name, self._versions = str(manifest["name"]), dict(manifest["versions"])
        self._inputs = decode(manifest["inputs"])
        self._outputs = decode(manifest["outputs"])

    @property
    def name(self) -> str:
        """The name of the model that was exported."""
        return self._name

    @property
    def input_spec(self) -> PyTree:
        """The `ArraySpec`s of the inputs, in the model's structure; each call chooses the named sizes."""
        return self._inputs

    @property
    def output_spec(self) -> PyTree:
        """The `ArraySpec`s of the outputs, in the model's structure."""
        return self._outputs

    @property
    def platforms(self) -> tuple[str, ...]:
        """The platforms for which the function was lowered: `"cpu"`, `"cuda"`, `"tpu"`, `"rocm"`."""
        return tuple(self._exported.platforms)

    @property
    def versions(self) -> dict[str, str]:
        """The versions of the packages that wrote the artefact."""
        return dict(self._versions)

    def __call__(self, inputs: PyTree) -> PyTree:
        """Return the model's outputs, as `model(inputs, training=False)` does.

        Args:
            inputs: NumPy or JAX arrays in the structure and of the shapes of `input_spec`; other
                number types are converted as in Keras.

        Returns:
            JAX arrays in the structure of `output_spec`.

        Raises:
            InvalidArgumentError: when the structure, a shape or a type does not match.
        """
        sizes: dict[str, int] = {}
        arrays = []
        for where, spec, value in matched(self._inputs, inputs, "inputs"):
            array = _as_array(spec, value, where)
            bind_sizes(spec, array.shape, where, sizes)
            arrays.append(array)
        return rebuild(self._outputs, self._function(self._weights, arrays))

    def __repr__(self) -> str:
        """Return the name, the inputs and the outputs."""
        return f"<ExportedModel {self.name!r}: {self._inputs} -> {self._outputs}>"


def _as_array(spec: ArraySpec, value: object, where: str) -> jax.Array:
    """Convert as Keras does: integers to floats, and between precisions, but never floats to integers."""
    dtype = jnp.dtype(spec.dtype)
    array = value if isinstance(value, jax.Array) else np.asarray(value)
    # `jnp.issubdtype`, because NumPy's does not count bfloat16 as a number.
    number = jnp.issubdtype(array.dtype, jnp.number) or array.dtype == bool
    if not number or (jnp.issubdtype(array.dtype, jnp.inexact) and not jnp.issubdtype(dtype, jnp.inexact)):
        raise InvalidArgumentError(
            f"`{where}` must be of type {spec.dtype}, or of one that converts to it: not floats to integers. "
            f"Received: dtype={array.dtype}. Write `x.astype({spec.dtype!r})`."
        )
    return jnp.asarray(array, dtype)


def load_exported(folder: Path) -> ExportedModel:
    """Load the artefact in `folder`, with all checksums verified."""
    require_packages("Loading a StableHLO artefact", "export", "flatbuffers")
    manifest = read_manifest(folder, KIND, VERSION)
    with read_as_written(folder / MANIFEST):
        blob = read_file(folder, FUNCTION, manifest["files"])
        specs = [decode(w) for w in manifest["weights"]]
        weights = read_weights(read_file(folder, WEIGHTS, manifest["files"]), specs, folder / WEIGHTS)
        exported = read_function(blob, folder / FUNCTION, manifest["versions"])
        return ExportedModel(exported, weights, manifest)


def read_function(blob: bytes, file: Path, versions: object) -> jax.export.Exported:
    """Return the function that `jax.export` has written.

    Raises:
        InvalidArgumentError: the installed JAX cannot read it.
    """
    try:
        return jax.export.deserialize(bytearray(blob))
    except Exception as error:
        # The checksum matches, so the file is intact: this JAX does not support the version of JAX's format.
        raise InvalidArgumentError(
            f"The installed JAX must be able to read {str(file)!r}, which JAX guarantees for "
            f"six months after it was written. Received: jax {jax.__version__}, and a file written by "
            f"{versions}. Install a JAX close to that version, or export the model again."
        ) from error


def read_weights(data: bytes, specs: list[ArraySpec], file: Path) -> list[np.ndarray]:
    try:
        # From the bytes whose checksum was verified. Without pickle: to load an artefact must not run code of
        # it.
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            chosen = [arrays[key_of(index)] for index in range(len(specs))]
    # Of zip files, their compression, NumPy's headers and sizes that no memory holds.
    except (
        KeyError, ValueError, TypeError, OSError, EOFError, MemoryError, NotImplementedError, RuntimeError,
        SyntaxError, ArithmeticError, zipfile.BadZipFile, zlib.error, struct.error,
    ) as error:  # fmt: skip
        raise damaged(file, f"{type(error).__name__}: {error}") from error
    # NumPy's format stores bfloat16 and similar types as raw bytes.
    # See https://github.com/jax-ml/ml_dtypes/issues/41.
    return [
        array.view(jnp.dtype(spec.dtype)) if array.dtype.kind == "V" else array
        for array, spec in zip(chosen, specs, strict=True)
    ]


def key_of(index: int) -> str:
    """Return the name of a weight in the file: its number, because Keras' paths need not be unique."""
    return f"{index:05d}"
