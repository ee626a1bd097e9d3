"""How a user says along which axes variables are cut over the devices of a replica.

Tests: tests/unit/model_parallel/test_layout_rules.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import keras

from unisono._checks import whole_number
from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono.model_parallel._replica_grid import MODEL_AXIS

#: For each axis of a variable the name of a mesh axis along which it is cut, or None.
Axes: TypeAlias = Sequence[str | None]

#: The kinds of `layout_map`: Keras' own, a dict like it, a function of a variable, or `"auto"`.
LayoutMap: TypeAlias = Mapping[str, Any] | Callable[[keras.Variable], Axes | None] | Literal["auto"]


class LayoutRule(Protocol):
    """From a variable to its axes; None for a whole variable."""

    def __call__(self, variable: keras.Variable) -> tuple[str | None, ...] | None: ...

    def unused(self) -> list[str]:
        """Return the patterns that no variable has matched so far."""


class FunctionRule:
    """The answers of a user's function."""

    def __init__(self, function: Callable[[keras.Variable], Axes | None]) -> None:
        self._function = function

    def __call__(self, variable: keras.Variable) -> tuple[str | None, ...] | None:
        axes = self._function(variable)
        return None if axes is None else _axes_of(axes, variable.path)

    def unused(self) -> list[str]:
        return []


class PatternRule:
    """The patterns of a `keras.distribution.LayoutMap`, or of a dict like it.

    As in Keras, a variable's path may be a key itself, or matches one pattern as a whole.

    Args:
        patterns: from regular expressions to tuples of names of axes, or `TensorLayout`s.
        names: of mesh axes that are a replica's devices.
        others: names of the other axes of the map's own mesh, along which batches lie: an axis of a variable
            with such a name stays whole.
    """

    def __init__(self, patterns: Mapping[str, Any], names: Sequence[str], others: Sequence[str]) -> None:
        self._patterns = dict(patterns.items())
        self._names, self._others = names, others
        self._used: set[str] = set()

    def __call__(self, variable: keras.Variable) -> tuple[str | None, ...] | None:
        path = variable.path
        keys = [path] if path in self._patterns else [p for p in self._patterns if re.fullmatch(p, path)]
        if len(keys) > 1:
            raise InvalidArgumentError(
                f"A variable must match at most one pattern of `layout_map`. Received: {path!r}, which "
                f"matches {keys}. Make the patterns narrower."
            )
        if not keys:
            return None
        self._used.add(keys[0])
        axes = _axes_of(self._patterns[keys[0]], path)
        unknown = next((a for a in axes if a is not None and a not in (*self._names, *self._others)), None)
        if unknown is not None:
            raise InvalidArgumentError(
                f"`layout_map` must name the axis {self._names[0]!r}, along which the devices of a replica "
                f"lie. Received: {axes} for {path!r}. Write {self._names[0]!r} or None for {unknown!r}."
            )
        return tuple(MODEL_AXIS if a in self._names else None for a in axes)

    def unused(self) -> list[str]:
        return [pattern for pattern in self._patterns if pattern not in self._used]


def rule_of(layout_map: object, size: int) -> LayoutRule:
    """Return the rule that a `layout_map` stands for.

    Args:
        layout_map: as in the strategies.
        size: how many devices a replica has.

    Raises:
        InvalidTypeError: it is neither a map nor a function.
        InvalidArgumentError: its mesh has no axis of the replica's devices.

    >>> rule_of({".*kernel": (None, "model")}, 2).unused()
    ['.*kernel']
    """
    if isinstance(layout_map, keras.distribution.LayoutMap):
        names, others = _axes_of_mesh(layout_map.device_mesh, size)
        return PatternRule(layout_map, names, others)
    if isinstance(layout_map, Mapping):
        return PatternRule(layout_map, [MODEL_AXIS], [])
    if callable(layout_map):
        return FunctionRule(layout_map)
    raise InvalidTypeError(
        "`layout_map` must be a `keras.distribution.LayoutMap`, a dict of patterns, a function of a "
        f'variable, or "auto". Received: layout_map={layout_map!r}. Leave it out to follow the model\'s '
        'program, or write `{".*dense.*kernel": (None, "model")}`, for example.'
    )


def of_evaluator(devices: int, size: int, layout_map: object) -> tuple[int, object]:
    """Return how many devices a replica of an evaluator has, and how they share variables.

    An evaluator runs the program of the workers, and is alone: it may have fewer devices than a replica of
    theirs.

    Args:
        devices: how many it has.
        size: how many a replica of the workers has.
        layout_map: of the workers.

    >>> of_evaluator(1, 2, {".*kernel": (None, "model")})
    (1, None)
    """
    fitted = size if whole_number(size, 1) is None else math.gcd(devices, size)
    if fitted == size or layout_map is None or layout_map == "auto":
        return fitted, None if fitted == 1 else layout_map
    # A map of Keras has a mesh of as many devices as a replica of the workers.
    return fitted, None if fitted == 1 else rule_of(layout_map, size)


def _axes_of_mesh(mesh: Any, size: int) -> tuple[list[str], list[str]]:
    """Return the names of the axis of a replica's devices, and of the others, of a map's own mesh."""
    if mesh is None:
        return [MODEL_AXIS], []
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    name = (
        MODEL_AXIS
        if MODEL_AXIS in sizes
        else next((n for n, k in reversed(sizes.items()) if k == size), None)
    )
    if name is None or sizes[name] != size:
        raise InvalidArgumentError(
            f"The mesh of `layout_map` must have an axis of {size} devices, as `devices_per_replica` says. "
            f"Received: a mesh of {sizes}. Write `devices_per_replica={sizes.get(MODEL_AXIS, 1)}`, or "
            "another mesh."
        )
    return [name], [n for n in sizes if n != name]


def _axes_of(layout: Any, path: str) -> tuple[str | None, ...]:
    """Return the axes of a `TensorLayout`, a `PartitionSpec`, or a tuple."""
    axes = layout.axes if isinstance(layout, keras.distribution.TensorLayout) else layout
    if isinstance(axes, str) or not isinstance(axes, Sequence):
        raise InvalidTypeError(
            "A variable's layout must be a tuple with a name or None for each of its axes. Received: "
            f'{layout!r} for {path!r}. Write `(None, "model")`, for example.'
        )
    return tuple(axes)


def check_axes(axes: Sequence[str | None], variable: keras.Variable, size: int) -> None:
    """Check that a variable can be cut so.

    Args:
        axes: with a name or None for each of its axes.
        size: how many devices a replica has.

    Raises:
        InvalidArgumentError: the number of axes is another, one does not divide, or two are cut.
    """
    shape, path = tuple(variable.shape), variable.path
    if len(axes) != len(shape):
        raise InvalidArgumentError(
            f"A variable's layout must have an entry for each of its axes. Received: {tuple(axes)} for "
            f"{path!r} of shape {shape}. Write {len(shape)} entries, with None for an axis that is not cut."
        )
    cut = [i for i, name in enumerate(axes) if name is not None]
    if any(axes[i] != MODEL_AXIS for i in cut) or len(cut) > 1:
        raise InvalidArgumentError(
            f"One axis of a variable can be cut, along {MODEL_AXIS!r}. Received: {tuple(axes)} for {path!r}. "
            f"Write {MODEL_AXIS!r} for one axis and None for the others."
        )
    if cut and shape[cut[0]] % size:
        raise InvalidArgumentError(
            f"An axis that is cut must divide over the {size} devices of a replica. Received: {tuple(axes)} "
            f"for {path!r} of shape {shape}, whose axis {cut[0]} has {shape[cut[0]]} elements. Cut another "
            "axis, leave the variable whole, or choose another `devices_per_replica`."
        )
