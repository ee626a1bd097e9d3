"""The arguments of a step: what is split over the replicas, what is static; its results.

Tests: tests/virtual/step/test_compiler.py.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono._types import PyTree
from unisono._values import Mirrored, PerReplica


class Kind(enum.Enum):
    """How an argument reaches the replicas."""

    SPLIT = "an array of shape (replicas, ...): each replica gets its row"
    RAGGED = "one value per replica, of unequal shapes"
    SAME = "an array that every replica gets whole"
    MIRRORED = "a pytree of arrays that every replica gets whole, wrapped in Mirrored"
    STATIC = "a Python object, part of the program"


#: The spec of Python's float, whose value is no part of a program.
NUMBER = jax.ShapeDtypeStruct((), np.dtype("float32"), weak_type=True)


#: An array among the arguments of a call, or the spec that stands for one.
CallArray: TypeAlias = jax.Array | np.ndarray | np.generic | float | jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class Call:
    """A step's arguments, taken apart.

    Args:
        structure: the pytree of `(args, kwargs)`.
        parts: for each leaf, its arrays; empty for a static leaf.
        statics: for each leaf, its object if static, its inner pytree if mirrored, else None.
    """

    structure: jax.tree_util.PyTreeDef
    kinds: tuple[Kind, ...]
    parts: tuple[tuple[Any, ...], ...]
    statics: tuple[Any, ...]

    @classmethod
    def parse(cls, args: Sequence[object], kwargs: Mapping[str, object]) -> Call:
        """Take arguments apart."""
        if not isinstance(args, (list, tuple)):
            raise InvalidTypeError(
                "`args` must be a list or tuple with the positional arguments of the step. "
                f"Received: {type(args).__name__}. Write `strategy.run(fn, args=(x,))`, with the comma."
            )
        # `PerReplica` and `Mirrored` stay whole here: how they reach the replicas depends on the wrapper.
        leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs)), is_leaf=_is_value)
        entries = [_classify(leaf) for leaf in leaves]
        kinds, parts, statics = zip(*entries, strict=True) if entries else ((), (), ())
        return cls(structure, kinds, parts, statics)

    @property
    def is_ragged(self) -> bool:
        """Whether the replicas get values of unequal shapes."""
        return Kind.RAGGED in self.kinds

    def is_empty(self, replica: int) -> bool:
        """Whether a replica gets arrays without rows where others get some."""
        ragged = [part for kind, part in zip(self.kinds, self.parts, strict=True) if kind is Kind.RAGGED]
        shapes = [part[replica].shape for part in ragged if len(part) > replica]
        return bool(shapes) and all(shape[:1] == (0,) for shape in shapes)

    @property
    def signature(self) -> Hashable:
        """What a compiled step depends on: structure, shapes, types and static objects."""
        shapes = tuple(tuple(_aval(x) for x in part) for part in self.parts)
        statics = tuple(_hashable(s) for s in self.statics)
        return (self.structure, self.kinds, shapes, statics)

    @property
    def arrays(self) -> list[Any]:
        """All arrays, in the order in which the program takes them."""
        return [x for part in self.parts for x in part]

    @property
    def split(self) -> list[bool]:
        """For each of `arrays`, whether it has a leading replica axis."""
        return [k is Kind.SPLIT for k, part in zip(self.kinds, self.parts, strict=True) for _ in part]

    def without_values(self) -> Call | None:
        """Return the call with specs in place of its arrays; None for one with a value for each replica."""
        if any(kind not in (Kind.SAME, Kind.STATIC) for kind in self.kinds):
            return None
        parts = (
            tuple(NUMBER if isinstance(x, float) else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in part)
            for part in self.parts
        )
        return dataclasses.replace(self, parts=tuple(parts))

    def rebuild(self, arrays: Sequence[object], pick: Callable[[Kind, tuple[Any, ...]], Any]) -> PyTree:
        """Put `(args, kwargs)` together again around other arrays.

        Args:
            arrays: in the order of `Call.arrays`.
            pick: gives the argument for a split or ragged leaf from its arrays.
        """
        leaves, at = [], 0
        for kind, part, static in zip(self.kinds, self.parts, self.statics, strict=True):
            own = tuple(arrays[at : at + len(part)])
            at += len(part)
            if kind is Kind.STATIC:
                leaves.append(static)
            elif kind is Kind.SAME:
                leaves.append(own[0])
            elif kind is Kind.MIRRORED:
                leaves.append(jax.tree.unflatten(static, own))
            else:
                leaves.append(pick(kind, own or static))
        return jax.tree.unflatten(self.structure, leaves)


def _is_value(leaf: object) -> bool:
    return isinstance(leaf, (PerReplica, Mirrored))


def is_array(leaf: object) -> TypeGuard[jax.Array | np.ndarray | np.generic]:
    """Whether JAX can trace `leaf`; Python's own numbers are not arrays."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic))


def _classify(leaf: object) -> tuple[Kind, tuple[CallArray, ...], object]:
    if isinstance(leaf, PerReplica):
        return _classify_per_replica(leaf)
    if isinstance(leaf, Mirrored):
        arrays, inner = jax.tree.flatten(leaf.value)
        return Kind.MIRRORED, tuple(arrays), inner
    # Static, although it holds an array: which variable it is counts, and its value is the step's state.
    if isinstance(leaf, keras.Variable):
        return Kind.STATIC, (), leaf
    # A float is traced, so that other values need no other program. Ints and bools are not: code makes
    # shapes, loops and branches of them.
    if is_array(leaf) or isinstance(leaf, float):
        return Kind.SAME, (leaf,), None
    return Kind.STATIC, (), leaf


def _classify_per_replica(leaf: PerReplica) -> tuple[Kind, tuple[CallArray, ...], object]:
    if leaf.stacked is not None:
        return Kind.SPLIT, (leaf.stacked,), None
    values = leaf.values
    if not all(is_array(v) or isinstance(v, (bool, int, float)) for v in values):
        return Kind.RAGGED, (), values
    arrays = tuple(v if isinstance(v, jax.Array) else jnp.asarray(v) for v in values)
    if len({(a.shape, a.dtype) for a in arrays}) == 1:
        return Kind.SPLIT, (_stack(arrays),), None
    return Kind.RAGGED, arrays, None


def _stack(arrays: tuple[jax.Array, ...]) -> jax.Array | np.ndarray:
    """One array of values that may lie on several devices."""
    if any(isinstance(a, jax.core.Tracer) for a in arrays):
        return jnp.stack(arrays)
    # Through the host: JAX stacks no arrays that lie on different devices.
    return np.stack([np.asarray(a) for a in arrays])


def _aval(x: CallArray) -> Hashable:
    # The value of a float is not part of the program.
    if isinstance(x, float):
        return "float"
    # Weakly typed arrays promote by other rules, so they need another program.
    return (x.shape, x.dtype, getattr(x, "weak_type", False))


def _hashable(value: object) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return ("by identity", id(value))
    # With the type: 1, 1.0 and True are equal as keys, and make different programs.
    return (type(value), value)


@dataclasses.dataclass(frozen=True)
class Output:
    """What a step returned, taken apart: arrays per replica, mirrored arrays, Python objects."""

    structure: jax.tree_util.PyTreeDef
    entries: tuple[tuple[str, Any], ...]

    @classmethod
    def parse(cls, result: object) -> tuple[Output, list[jax.Array], list[CallArray]]:
        """Return the description, the arrays of this replica and the mirrored arrays."""
        leaves, structure = jax.tree.flatten(result, is_leaf=_is_value)
        own: list[jax.Array] = []
        mirrored: list[Any] = []
        entries: list[tuple[str, Any]] = []
        for leaf in leaves:
            value = leaf.value if isinstance(leaf, keras.Variable) else leaf
            if isinstance(value, Mirrored):
                arrays, inner = jax.tree.flatten(value.value)
                entries.append(("mirrored", (inner, len(arrays))))
                mirrored.extend(arrays)
            elif isinstance(value, jax.Array):
                entries.append(("own", None))
                own.append(value)
            else:
                entries.append(("static", value))
        return cls(structure, tuple(entries)), own, mirrored

    def rebuild(self, own: Sequence[object], mirrored: Sequence[object]) -> PyTree:
        """Put the result together from the values that stand for the replicas' arrays."""
        of_own, of_mirrored = iter(own), iter(mirrored)
        leaves = []
        for kind, detail in self.entries:
            if kind == "own":
                leaves.append(next(of_own))
            elif kind == "mirrored":
                inner, count = detail
                leaves.append(Mirrored(jax.tree.unflatten(inner, [next(of_mirrored) for _ in range(count)])))
            else:
                leaves.append(detail)
        return jax.tree.unflatten(self.structure, leaves)

    def shown(self) -> str:
        """The structure with a word for each leaf, for messages."""
        names = {"own": "array", "mirrored": "Mirrored"}
        words = [_Word(names.get(kind, repr(value))) for kind, value in self.entries]
        return str(jax.tree.unflatten(self.structure, words))


class _Word(str):
    """Text whose `repr` has no quotes."""

    def __repr__(self) -> str:
        return str(self)


def regroup(outputs: Sequence[tuple[Output, list[jax.Array], list[CallArray]]]) -> PyTree:
    """Join what each replica returned, where replicas were traced in turn.

    Arrays become a `PerReplica`; equal Python objects are returned as they are.
    """
    first, _, mirrored = outputs[0]
    for number, (out, _, _) in enumerate(outputs):
        if out.structure != first.structure:
            raise InvalidArgumentError(
                "Every replica must return the same structure. Received: from replica 0 "
                f"{first.shown()}, from replica {number} {out.shown()}. Return the same keys, lengths and "
                "`None`s from each branch of the step, for example zeros where a replica has no rows."
            )
    own = [iter(arrays) for _, arrays, _ in outputs]
    joined: list[Any] = []
    entries: list[tuple[str, Any]] = []
    for row in zip(*(out.entries for out, _, _ in outputs), strict=True):
        kinds = {kind for kind, _ in row}
        if kinds == {"own"}:
            entries.append(row[0])
            joined.append(per_replica([next(arrays) for arrays in own]))
        elif len({repr(entry) for entry in row}) == 1:
            entries.append(row[0])
        elif "mirrored" in kinds:
            raise InvalidArgumentError(
                "A `Mirrored` value must be returned by all replicas alike. Received: in the place of one, "
                f"{sorted(kinds)}. Return `unisono.Mirrored` of the same structure from each replica."
            )
        else:
            values = [next(o) if kind == "own" else v for o, (kind, v) in zip(own, row, strict=True)]
            entries.append(("static", PerReplica(values)))
    return Output(first.structure, tuple(entries)).rebuild(joined, mirrored)


def per_replica(arrays: Sequence[jax.Array]) -> PerReplica:
    """One array for each replica, stacked where their shapes are equal."""
    if len({array.shape for array in arrays}) == 1:
        # One array is one leaf of the program's result, and the form that `strategy.reduce` takes at once.
        return PerReplica.from_stacked(jnp.stack(arrays))
    return PerReplica(arrays)


@dataclasses.dataclass(frozen=True)
class Result:
    """What a compiled program returned: its arrays, and how to put them together."""

    structure: jax.tree_util.PyTreeDef
    statics: tuple[Any, ...]

    @classmethod
    def parse(cls, result: object) -> tuple[Result, list[jax.Array]]:
        """Take a pytree apart into its arrays and the rest."""
        leaves, structure = jax.tree.flatten(result)
        leaves = [leaf.value if isinstance(leaf, keras.Variable) else leaf for leaf in leaves]
        statics = tuple(_ARRAY if isinstance(leaf, jax.Array) else leaf for leaf in leaves)
        return cls(structure, statics), [leaf for leaf in leaves if isinstance(leaf, jax.Array)]

    def rebuild(self, arrays: Sequence[object]) -> PyTree:
        """Inverse of `parse`."""
        following = iter(arrays)
        leaves = [next(following) if s is _ARRAY else s for s in self.statics]
        return jax.tree.unflatten(self.structure, leaves)


_ARRAY = object()
