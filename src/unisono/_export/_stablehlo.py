"""Write a Keras model as a StableHLO artefact, with `jax.export`.

Source: https://docs.jax.dev/en/latest/export/export.html

Tests: tests/virtual/test_export.py.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import keras
import numpy as np

from unisono._context import entered
from unisono._errors import InvalidArgumentError
from unisono._export._files import MANIFEST, describe_files, replace_atomically, seal
from unisono._export._loaded import FUNCTION, KIND, VERSION, WEIGHTS, key_of
from unisono._export._signature import input_specs
from unisono._export._specs import PLATFORMS, ArraySpec, encode, leaves, map_leaves, plain, rebuild
from unisono._system._packages import require_packages
from unisono._types import PyTree

_PACKAGES = ("unisono", "jax", "jaxlib", "keras", "numpy")


@dataclasses.dataclass
class _Serve:
    """The model's inference as a function of (weights, inputs), two flat lists of arrays."""

    model: keras.Model
    inputs: PyTree
    outputs: PyTree = None

    def __call__(self, weights: Sequence[jax.Array], arrays: Sequence[jax.Array]) -> list[jax.Array]:
        count = len(self.model.trainable_variables)
        inputs = rebuild(self.inputs, arrays)
        with entered(None):  # as one replica, also where the caller is inside a scope
            outputs, _ = self.model.stateless_call(
                weights[:count], weights[count:], inputs, **_inference(self.model)
            )
        # Noted while JAX traces: the exported function has a flat list of outputs.
        self.outputs = plain(outputs)
        return [jnp.asarray(leaf) for leaf in leaves(self.outputs)]


def _inference(model: keras.Model) -> dict[str, bool]:
    """Return `training=False` where the model's `call` accepts it: a subclass need not."""
    parameters = inspect.signature(model.call).parameters.values()
    takes = any(p.name == "training" or p.kind is p.VAR_KEYWORD for p in parameters)
    return {"training": False} if takes else {}


def write_stablehlo(
    model: keras.Model, path: Path, platforms: Sequence[str], batch_size: int | None, input_spec: PyTree
) -> None:
    """Write an artefact for `load_exported`; for the arguments see `unisono.export.export`."""
    require_packages("A StableHLO artefact", "export", "flatbuffers")
    platforms = _checked_platforms(platforms)
    inputs = input_specs(model, input_spec, batch_size)
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    weights = [one_replica(v.value) for v in variables]
    serve = _Serve(model, inputs)
    exported = _export(serve, weights, leaves(inputs), platforms)
    specs = [array_spec(aval) for aval in exported.out_avals]
    with replace_atomically(path, marker=MANIFEST) as aside:
        aside.mkdir()
        (aside / FUNCTION).write_bytes(exported.serialize())
        # No object arrays, which would need pickle: loading an artefact must not run code of it.
        np.savez(aside / WEIGHTS, allow_pickle=False, **{key_of(i): w for i, w in enumerate(weights)})
        # Without times and paths: the same model gives the same files.
        body = {
            "name": model.name,
            "inputs": encode(inputs),
            "outputs": encode(rebuild(serve.outputs, specs)),
            "weights": [
                encode(ArraySpec(w.shape, str(w.dtype), v.path))
                for w, v in zip(weights, variables, strict=True)
            ],
            "platforms": list(exported.platforms),
            "calling_convention": exported.calling_convention_version,
            "versions": {package: importlib.metadata.version(package) for package in _PACKAGES},
            "files": describe_files(aside, [FUNCTION, WEIGHTS]),
        }
        (aside / MANIFEST).write_text(seal(KIND, VERSION, body), encoding="utf-8")


def one_replica(value: jax.Array | np.ndarray) -> np.ndarray:
    """Return one replica's copy of a variable's value."""
    if isinstance(value, jax.Array) and value.is_fully_replicated:
        # `np.asarray` fails for an array that belongs to several processes.
        value = value.addressable_data(0)
    return np.asarray(value)


def _checked_platforms(platforms: Sequence[str]) -> tuple[str, ...]:
    # A string is also a sequence, of letters.
    chosen = (platforms,) if isinstance(platforms, str) else tuple(platforms)
    unknown = [p for p in chosen if p not in PLATFORMS]
    if unknown or not chosen:
        raise InvalidArgumentError(
            f"`platforms` must be a subset of {PLATFORMS}. Received: platforms={chosen!r}. Write "
            "`platforms=('cpu', 'cuda')` for CPUs and NVIDIA's GPUs, `'rocm'` for AMD's."
        )
    return chosen


def array_spec(aval: jax.core.ShapedArray | jax.ShapeDtypeStruct) -> ArraySpec:
    """Return the spec of a traced array, with the names of its open sizes."""
    shape = tuple(d if isinstance(d, int) else str(d) for d in aval.shape)
    return ArraySpec(shape, str(aval.dtype))


def _export(
    serve: _Serve, weights: list[np.ndarray], inputs: list[ArraySpec], platforms: Sequence[str]
) -> jax.export.Exported:
    """Trace and lower the model; where that fails, find out whether open sizes or a platform cause it."""
    shapes = [jax.ShapeDtypeStruct(w.shape, w.dtype) for w in weights]

    def attempt(specs: list[ArraySpec], on: Sequence[str]) -> jax.export.Exported:
        # A new function for each attempt, because JAX caches traces by function.
        function = jax.jit(lambda w, x: serve(w, x))  # noqa: PLW0108
        sizes = with_symbols([spec.shape for spec in specs])
        given = [jax.ShapeDtypeStruct(n, jnp.dtype(s.dtype)) for n, s in zip(sizes, specs, strict=True)]
        return jax.export.export(function, platforms=tuple(on))(shapes, given)

    try:
        return attempt(inputs, platforms)
    except Exception as error:
        # Tracing runs the user's layers, so any error is possible. One that remains with fixed sizes and on a
        # single platform is the model's own, and is raised as it is.
        fixed = [map_leaves(_fixed, spec) for spec in inputs]
        if fixed != inputs and _works(attempt, fixed, platforms):
            raise InvalidArgumentError(
                "Each layer must allow a batch size, and other open sizes, that each call chooses. "
                f"Received: {serve.model.name!r}, whose tracing raises {_first_line(error)} Write "
                "`export(..., batch_size=32)` for an artefact that takes batches of 32, or "
                "`input_spec=unisono.export.ArraySpec((32, ...), dtype)` to fix other sizes too."
            ) from error
        able = [p for p in platforms if len(platforms) > 1 and _works(attempt, inputs, [p])]
        if able:
            raise InvalidArgumentError(
                f"The model must lower for each of `platforms`. Received: platforms={tuple(platforms)}, of "
                f"which {serve.model.name!r} lowers for {able} only: {_first_line(error)} Write "
                f"`export(..., platforms={tuple(able)!r})`."
            ) from error
        raise


def _works(attempt: Callable[..., object], specs: list[ArraySpec], platforms: Sequence[str]) -> bool:
    try:
        attempt(specs, platforms)
    except Exception:
        return False
    return True


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or ["nothing."]
    return f"{type(error).__name__}: {lines[0].strip().rstrip('.')}."


def _fixed(spec: ArraySpec) -> ArraySpec:
    """Return the spec with all open sizes fixed to 2."""
    return dataclasses.replace(spec, shape=tuple(2 if isinstance(d, str) else d for d in spec.shape))


def with_symbols(shapes: Sequence[Sequence[int | str | None]]) -> list[tuple[Any, ...]]:
    """Return shapes for JAX, with the same symbol for the same name."""
    names = sorted({size for shape in shapes for size in shape if isinstance(size, str)})
    # In one call: JAX does not mix symbols of different scopes.
    symbols = jax.export.symbolic_shape(", ".join(names)) if names else ()
    sizes: dict[Any, Any] = dict(zip(names, symbols, strict=True))
    return [tuple(sizes.get(size, size) for size in shape) for shape in shapes]
