"""Writes a module to a directory: functions, for the calls that were made or asked for, and variables.

Tests: tests/unit/tf/test_saved_modules.py.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Mapping
from typing import Any

import jax
import jax.export
import keras
import numpy as np

from unisono._context import creator_of
from unisono._errors import InvalidArgumentError, UnsupportedError
from unisono._export._files import MANIFEST, describe_files, replace_atomically, seal, written_at
from unisono._export._loaded import WEIGHTS, key_of
from unisono._export._specs import PLATFORMS, ArraySpec, encode, plain
from unisono._export._stablehlo import array_spec, one_replica
from unisono._saved._concrete import (
    ConcreteFunction,
    arrays_of,
    by_position,
    calls_for,
    parts_of,
    with_common_rows,
    with_sizes,
)
from unisono._system._object_store import Place
from unisono._system._packages import require_packages
from unisono._types import PyTree
from unisono.checkpoint._tracking import Holder
from unisono.step._call_signature import Call
from unisono.step.functions._function import BoundFunction, Function

_log = logging.getLogger("unisono")

KIND = "unisono-module"
VERSION = 1

#: How far an open size may lie from variables' sizes: columns that a function adds, or leaves out.
_NEAR = 8

#: A record of JSON.
Record = dict[str, Any]


def write_module(obj: object, path: Place, signatures: Mapping[str, Any]) -> None:
    """Write an object with functions and variables to a directory.

    Raises:
        InvalidArgumentError: a signature has no given shapes, or a function cannot be traced for open sizes.
        MissingPackageError: a package is not installed.
        UnsupportedError: a signature needs something else than tensors.
    """
    require_packages("A saved module", "export", "flatbuffers")
    contents = _Contents()
    root = contents.record(obj)
    named = {name: contents.signature(name, function) for name, function in signatures.items()}
    strategies = [s for s in map(creator_of, contents.variables) if s is not None]
    group = strategies[0].process_group if strategies else None
    if group is None or group.is_chief:
        _write(contents, path, {"root": root, "objects": contents.objects, "signatures": named})
    if group is not None:
        group.share_file(str(path))


def _write(contents: _Contents, path: Place, body: Record) -> None:
    with written_at(path, MANIFEST) as target, replace_atomically(target, marker=MANIFEST) as aside:
        aside.mkdir()
        arrays = {key_of(i): one_replica(v.value) for i, v in enumerate(contents.variables)}
        # No object arrays, which would need pickle: loading must not run code.
        np.savez(aside / WEIGHTS, allow_pickle=False, **arrays)
        for i, program in enumerate(contents.programs):
            (aside / file_of(i)).write_bytes(program)
        files = [WEIGHTS, *map(file_of, range(len(contents.programs)))]
        body["variables"] = [_variable(v) for v in contents.variables]
        (aside / MANIFEST).write_text(
            seal(KIND, VERSION, {**body, "files": describe_files(aside, files)}), encoding="utf-8"
        )


def file_of(index: int) -> str:
    """Return the name of a program's file."""
    return f"function{index}.stablehlo"


def _variable(variable: Any) -> Record:
    spec = ArraySpec(tuple(variable.shape), str(jax.numpy.dtype(variable.dtype)), variable.name)
    return {"spec": encode(spec), "trainable": bool(variable.trainable)}


class _Contents:
    """The contents: objects as records that name each other, variables and programs by their numbers."""

    def __init__(self) -> None:
        self.variables: list[Any] = []
        self.programs: list[bytes] = []
        self.objects: list[Record] = []
        self._of_objects: dict[int, int] = {}

    def record(self, value: object) -> Record | None:
        """Return the record of a value, or None for an unsaved one, such as a number of Python."""
        if isinstance(value, keras.Variable):
            return {"variable": self.variable(value)}
        if isinstance(value, (Function, BoundFunction)):
            return {"function": self._function(value)}
        if isinstance(value, (list, tuple)):
            items = [self.record(item) for item in value]
            return {"list": items} if any(items) else None
        if isinstance(value, dict):
            pairs = [[key, self.record(item)] for key, item in value.items() if isinstance(key, str)]
            return {"dict": [pair for pair in pairs if pair[1]]} if any(pair[1] for pair in pairs) else None
        held = _attributes(value)
        if held is None:
            return None
        if id(value) not in self._of_objects:
            self._of_objects[id(value)] = len(self.objects)
            self.objects.append({})
            records = {name: self.record(item) for name, item in held.items()}
            number = self._of_objects[id(value)]
            self.objects[number] = {name: record for name, record in records.items() if record}
        return {"object": self._of_objects[id(value)]}

    def variable(self, variable: Any) -> int:
        """Return the number of a variable."""
        for i, known in enumerate(self.variables):
            if known is variable:
                return i
        self.variables.append(variable)
        return len(self.variables) - 1

    def signature(self, name: str, function: object) -> list[Record]:
        """Return the programs of a named signature."""
        if isinstance(function, (Function, BoundFunction)) and parts_of(function)[0].input_specs is not None:
            function = ConcreteFunction(function, (), {})
        if not isinstance(function, ConcreteFunction):
            raise InvalidArgumentError(
                "A signature is a function for given shapes. Received: "
                f"{name}={function!r}. Write `f.get_concrete_function(tf.TensorSpec(…))`, or give "
                "`tf.function` an `input_signature`."
            )
        return self._programs(function.function, [function.calls], function.number_of_first)

    def _function(self, function: Function | BoundFunction) -> list[Record]:
        inner, first = parts_of(function)
        if inner.input_specs is not None:
            return self._programs(inner, [calls_for(inner, (*first, *inner.input_specs), {})], len(first))
        made = [[call] for call in (c.without_values() for c in inner.calls) if call is not None]
        calls = [variants for variants in (*made, *inner.requested) if _is_of(variants[0], first)]
        return self._programs(inner, calls, len(first))

    def _programs(self, function: Function, calls: list[list[Call]], number_of_first: int) -> list[Record]:
        """Export a function for calls: for each of them in at least one of its variants, its ranks."""
        records_by_signature: dict[Any, list[Record]] = {}
        for variants in calls:
            failures: list[Exception] = []
            for call in variants:
                try:
                    if call.signature not in records_by_signature:
                        records_by_signature[call.signature] = self._of_call(function, call, number_of_first)
                except Exception as error:  # whatever the user's function raises for such arguments
                    failures.append(error)
            if len(failures) == len(variants):
                raise failures[-1]
        return [record for records in records_by_signature.values() for record in records]

    def _of_call(self, function: Function, call: Call, number_of_first: int) -> list[Record]:
        """Export a function for a call with open sizes; if it must be, for the sizes that the function takes.

        Raises:
            InvalidArgumentError: the function needs sizes that the call leaves open.
        """
        try:
            return [self._program(function, call, number_of_first)]
        except Exception as error:  # whatever the user's function raises for a size without a value
            if all(isinstance(size, int) for x in call.arrays for size in x.shape):
                raise
            # Two tensors may have to agree in the number of rows, or one in a size with a variable.
            near = {n + i for v in self.variables for n in v.shape for i in range(-_NEAR, _NEAR + 1)}
            for others in (with_common_rows(call), with_sizes(function, call, sorted(near))):
                with contextlib.suppress(Exception):
                    if others:
                        return [self._program(function, other, number_of_first) for other in others]
            shapes = [tuple(map(str, x.shape)) for x in call.arrays]
            raise InvalidArgumentError(
                "A function is saved for open sizes if it can be traced without their values. Received: "
                f"{function.__name__} of {shapes}, which raises {type(error).__name__}: {error} Write the "
                "sizes that it needs, such as `tf.TensorSpec([None, 28, 28, 1])`."
            ) from error

    def _program(self, function: Function, call: Call, number_of_first: int) -> Record:
        args, kwargs = by_position(
            function, *call.rebuild([array_spec(x) for x in call.arrays], lambda *_: None)
        )
        inputs = plain((args[number_of_first:], kwargs))
        if not all(isinstance(leaf, (ArraySpec, bool, int, float, str)) for leaf in jax.tree.leaves(inputs)):
            raise UnsupportedError(
                "A saved function takes tensors, numbers and strings of Python, in tuples, lists and dicts. "
                f"Received: {function.__name__} with {inputs}."
            )
        exported, plan, outputs = _exported(function, call)
        self.programs.append(_serialized(exported))
        every = inspect.signature(function.python_function).parameters.values()
        names = [p.name for p in every if p.kind is p.POSITIONAL_OR_KEYWORD][number_of_first:]
        return {
            "name": function.__name__,
            "parameters": names,
            "inputs": encode(inputs),
            "outputs": encode(outputs),
            "variables": [self.variable(v) for v in plan.variables],
            "written": [i for i, slot in enumerate(plan.slots) if slot.written],
            "program": len(self.programs) - 1,
        }


def _attributes(value: object) -> dict[str, Any] | None:
    """Return an object's attributes by name; None if none can be saved."""
    if isinstance(value, (keras.Layer, keras.Optimizer, keras.metrics.Metric)):
        return {"weights": list(value.variables)}
    if not isinstance(value, Holder):
        return None
    held = {name: item for name, item in vars(value).items() if name != "_objects"}
    kind = type(value)
    for name in dir(kind):
        if isinstance(inspect.getattr_static(kind, name), Function):
            held[name] = getattr(value, name)
    return held


def _is_of(call: Call, first: tuple[Any, ...]) -> bool:
    """Return whether a call was made of a method of this object."""
    if not first:
        return True
    args, _ = call.rebuild([None] * len(call.arrays), lambda *_: None)
    return bool(args) and args[0] is first[0]


def _exported(function: Function, call: Call) -> tuple[jax.export.Exported, Any, PyTree]:
    """Return the program of a call, its variables, and the specs of its results."""
    plan, traced = function.stateless(call)
    outputs: list[Any] = []

    def pure(values: list[Any], arrays: list[Any]) -> tuple[list[Any], list[Any]]:
        result, new = traced(values, arrays)
        outputs.append(plain(arrays_of(result)))
        return jax.tree.leaves(outputs[-1]), new

    values = [jax.ShapeDtypeStruct(v.shape, jax.numpy.dtype(v.dtype)) for v in plan.variables]
    exported = jax.export.export(jax.jit(pure), platforms=PLATFORMS)(values, call.arrays)
    if exported.nr_devices > 1:
        raise UnsupportedError(
            "A saved function belongs to one replica. Received: "
            f"{function.__name__}, which calls `strategy.run`. Save the function that `run` calls."
        )
    made = iter(exported.out_avals)
    specs = jax.tree.map(lambda _: array_spec(next(made)), outputs[-1])
    return exported, plan, specs


def _serialized(exported: jax.export.Exported) -> bytes:
    try:
        return bytes(exported.serialize(vjp_order=1))
    except Exception as error:  # the derivative of what the user wrote
        _log.info("%s was saved without its gradient: %s", exported.fun_name, error)
        return bytes(exported.serialize())
