"""Reads the files of `_writer`: an object with the functions and variables of the saved one.

Tests: tests/unit/tf/test_saved_modules.py.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono._export._files import MANIFEST, read_as_written, read_file, read_manifest
from unisono._export._loaded import WEIGHTS, read_function, read_weights
from unisono._export._specs import ArraySpec, bind_sizes, decode, leaves, map_leaves, matched, rebuild
from unisono._saved._concrete import calls_for, spec_of
from unisono._saved._module import Module
from unisono._saved._writer import KIND, VERSION, Record, file_of
from unisono._system._packages import require_packages
from unisono._types import PyTree
from unisono.data._pipeline._structure import TensorSpec
from unisono.step.functions._function import Function
from unisono.step.variables._variable import Variable


class LoadedModule(Module):
    """A loaded module: its variables, functions and modules, by their names."""

    def __init__(self) -> None:
        super().__init__()
        #: Functions by name, which return dicts.
        self.signatures: dict[str, Signature] = {}

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Any:
        """Call the saved `__call__`."""
        if "__call__" not in vars(self):
            raise InvalidTypeError(
                "A loaded module is called if its `__call__` was a `tf.function`. Received: one that has "
                f"{sorted(vars(self))}. Decorate `__call__` with `@tf.function`, call it, and save again."
            )
        return vars(self)["__call__"](*args, **kwargs)


def is_module(path: Path) -> bool:
    """Return whether `write_module` wrote a directory."""
    file = path / MANIFEST
    return file.is_file() and f'"{KIND}"' in file.read_text(encoding="utf-8", errors="replace")[:200]


def read_module(path: Path) -> Any:
    """Return the object of a directory.

    Raises:
        InvalidArgumentError: a file is missing or changed.
        MissingPackageError: a package is not installed.
    """
    require_packages("Loading a saved module", "export", "flatbuffers")
    manifest = read_manifest(path, KIND, VERSION)
    with read_as_written(path / MANIFEST):
        return _read_objects(path, manifest)


def _read_objects(path: Path, manifest: Record) -> Any:
    specs = [decode(record["spec"]) for record in manifest["variables"]]
    arrays = read_weights(read_file(path, WEIGHTS, manifest["files"]), specs, path / WEIGHTS)
    variables = [
        Variable(array, trainable=record["trainable"], name=spec.name, dtype=spec.dtype)
        for array, spec, record in zip(arrays, specs, manifest["variables"], strict=True)
    ]

    def program(record: Record) -> _SavedProgram:
        blob = read_file(path, file_of(record["program"]), manifest["files"])
        exported = read_function(blob, path / file_of(record["program"]), manifest.get("versions"))
        own = [variables[i] for i in record["variables"]]
        inputs, outputs = decode(record["inputs"]), decode(record["outputs"])
        of_call = record["name"], record["parameters"], inputs, outputs
        return _SavedProgram(*of_call, own, record["written"], exported)

    objects: list[LoadedModule] = [LoadedModule() for _ in manifest["objects"]]

    def value(record: Record | None) -> Any:
        if not record:
            return None
        kind, item = next(iter(record.items()))
        if kind == "variable":
            return variables[item]
        if kind == "object":
            return objects[item]
        if kind == "function":
            return _function([program(one) for one in item])
        if kind == "list":
            return [value(one) for one in item]
        return {key: value(one) for key, one in item}

    for loaded, record in zip(objects, manifest["objects"], strict=True):
        for name, held in record.items():
            # Not by `setattr`: a property of the class may have the name.
            vars(loaded)[name] = value(held)
    root = value(manifest["root"])
    for name, records in manifest["signatures"].items():
        root.signatures[name] = Signature(name, [program(record) for record in records])
    return root


@dataclasses.dataclass(frozen=True)
class _SavedProgram:
    """A function for arguments of certain shapes.

    Args:
        inputs: `(args, kwargs)` as specs.
        outputs: specs.
        variables: that it reads.
        written: the positions of those that it writes.
        exported: from values and arrays to arrays and new values.
    """

    name: str
    parameters: Sequence[str]
    inputs: PyTree
    outputs: PyTree
    variables: Sequence[Variable]
    written: Sequence[int]
    exported: jax.export.Exported

    def arrays(self, args: Sequence[Any], kwargs: Mapping[str, Any], exact: bool) -> list[Any]:
        """Return the arrays of a call.

        Raises:
            InvalidArgumentError: the call has other shapes, types or values.
        """
        arrays: list[Any] = []
        sizes: dict[str, int] = {}
        for where, spec, value in matched(self.inputs, (args, kwargs), "arguments"):
            if not isinstance(spec, ArraySpec):
                if type(value) is not type(spec) or value != spec:
                    raise InvalidArgumentError(f"`{where}` must be {spec!r}. Received: {value!r}.")
                continue
            array = jnp.asarray(getattr(value, "value", value))
            bind_sizes(spec, array.shape, where, sizes)
            dtype = jnp.dtype(spec.dtype)
            narrows = jnp.issubdtype(array.dtype, jnp.inexact) and not jnp.issubdtype(dtype, jnp.inexact)
            if narrows or (exact and array.dtype != dtype):
                raise InvalidArgumentError(f"`{where}` must be of {dtype}. Received: {array.dtype}.")
            arrays.append(array.astype(dtype))
        return arrays

    def __call__(self, arrays: list[Any]) -> PyTree:
        """Return the results, and assign what the function assigns."""
        results, new = self.exported.call([v.value for v in self.variables], arrays)
        for i, value in zip(self.written, new, strict=True):
            self.variables[i].assign(value)
        return rebuild(self.outputs, results)


class _LoadedFunction:
    """A loaded function: the first of its programs that fits the arguments."""

    def __init__(self, programs: Sequence[_SavedProgram]) -> None:
        self.programs = programs
        self.__name__ = self.__qualname__ = programs[0].name if programs else "function"
        names = programs[0].parameters if programs else ()
        kind = inspect.Parameter
        # Each may be left out, as it may have had a default.
        own = [kind(name, kind.POSITIONAL_OR_KEYWORD, default=None) for name in names]
        rest = [kind("_args", kind.VAR_POSITIONAL), kind("_kwargs", kind.VAR_KEYWORD)]
        self.__signature__ = inspect.Signature([*own, *rest])

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Any:
        bound = self.__signature__.bind(*args, **kwargs)
        args, kwargs = bound.args, bound.kwargs
        reasons: list[str] = []
        # Of the types as they are, before one to which they are converted.
        for exact in (True, False):
            for program in self.programs:
                try:
                    arrays = program.arrays(args, kwargs, exact)
                except InvalidArgumentError as error:
                    reasons.append(str(error))
                    continue
                return program(arrays)
        saved = [leaves(program.inputs) for program in self.programs]
        raise InvalidArgumentError(
            "A loaded function takes what it was called with before it was saved, or what "
            f"`get_concrete_function` was given. Received: arguments that fit none of {saved}. "
            f"{reasons[-1] if reasons else 'Call the function, or give it an `input_signature`, before.'}"
        )


def _function(programs: Sequence[_SavedProgram]) -> Function:
    function = Function(_LoadedFunction(programs))
    for program in programs:
        args, kwargs = map_leaves(lambda x: spec_of(x) if isinstance(x, ArraySpec) else x, program.inputs)
        function.requested.append(calls_for(function, args, kwargs))
    return function


class Signature:
    """A function of a saved model, which takes tensors by their names, and returns a dict."""

    def __init__(self, name: str, programs: Sequence[_SavedProgram]) -> None:
        self.name, self._programs = name, programs
        self._function = _function(programs)

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> dict[str, Any]:
        """Return the results by name."""
        return by_name(self._function(*args, **kwargs))

    @property
    def structured_outputs(self) -> dict[str, TensorSpec]:
        """The specs of the results, by name."""
        return by_name(map_leaves(spec_of, self._programs[0].outputs))


def by_name(outputs: PyTree) -> dict[str, Any]:
    """Return results as a signature does: a dict, also where the function has none."""
    if isinstance(outputs, Mapping):
        return dict(outputs)
    every: Sequence[Any] = outputs if isinstance(outputs, (list, tuple)) else [outputs]
    return {f"output_{i}": value for i, value in enumerate(every)}
