"""The Python values that a step reads by name: global variables, attributes and items of objects.

A program holds them as they were when the step was traced, and TensorFlow's `run` reads them anew at each
call. So a program is chosen by them, as by the values that a step closes over. Which ones a step reads stands
in its bytecode: `weight`, `self.weight`, `config["weight"]`, also in functions of its module that it calls.
Which variables are trainable is part of the trace in the same way.

Nothing here runs code of users: where only that could tell a value, it is not watched.

Tests: tests/unit/step/test_python_reads.py, tests/virtual/step/test_changed_values.py.
"""

from __future__ import annotations

import collections
import functools
import operator
import sys
import types
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np

from unisono.step._call_signature import Call, Kind
from unisono.step._identity import VALUES, identity_of
from unisono.step._keras_internals import all_layers, held_rate, is_trainable
from unisono.step.programs._bytecode import Path, Read, reads_of

#: Larger arrays and collections are the same where they are one object.
_MOST_BYTES, _MOST_ITEMS = 65_536, 64

#: Whose code is not searched.
_LIBRARIES = ("keras", "jax", "unisono")

#: In place of what is not there.
MISSING = object()

_NONE: Mapping[str, object] = types.MappingProxyType({})

#: Objects that are called without a look at their class.
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)

#: Collections whose items are read without running code of users.
_DICTS = (dict, collections.OrderedDict, collections.defaultdict)

#: A look-up on the way to a value, a C function, since steps call it, and what it has returned.
_Link = tuple[Callable[[], object], object]


def watch_of(fn: Callable[..., object], call: Call) -> Watch:
    """Return the watch over a step that is called with these arguments."""
    given = zip(call.kinds, call.statics, strict=True)
    leaves = [static if kind is Kind.STATIC else MISSING for kind, static in given]
    return Watch(fn, *jax.tree.unflatten(call.structure, leaves))


class Watch:
    """The values and flags with which a step was traced; where others are found, it needs another program.

    Args:
        fn: the step, before it is traced.
        args, keywords: what it is called with; `MISSING` in place of arrays.
    """

    def __init__(
        self, fn: Callable[..., object], args: Sequence[object] = (), keywords: Mapping[str, object] = _NONE
    ) -> None:
        search = _Search()
        search.visit(fn, args, keywords)
        self._places: list[tuple[object, str, str, Path]] = []
        self._places += [(root, *read) for (_, read), root in search.places.items()]
        self._places += [place for x in self._objects() for place in _settings(x)]
        self._values = self._read()
        self._flagged: list[keras.Variable | keras.Layer] = []
        self._flags: list[object] | None = []
        self._look()

    def traced(self, variables: Sequence[keras.Variable]) -> None:
        """Note that the step has been traced, and leave out what it changes itself, such as a count of calls.

        Args:
            variables: those that it uses.
        """
        new = self._read()
        kept = [i for i, (old, value) in enumerate(zip(self._values, new, strict=True)) if old == value]
        self._places, self._values = [self._places[i] for i in kept], [self._values[i] for i in kept]
        # Also layers without variables to train, and models that were frozen, but for their layers.
        self._flagged = [*variables, *(x for x in self._objects() if _is(x, keras.Layer))]
        self._flags = list(map(is_trainable, self._flagged))
        self._look()

    def holds(self) -> bool:
        """Return whether all is as it was when the step was traced."""
        # Asked at each step, so these look-ups are C functions.
        if self._flags is not None and list(map(is_trainable, self._flagged)) != self._flags:
            return False
        is_same = True
        try:
            for look_up, value in self._links:
                is_same = is_same and look_up() is value
        except (LookupError, ValueError):  # a list is shorter, or a cell empty
            is_same = False
        for array, held in self._arrays:
            is_same = is_same and array.tobytes() == held
        for collection, items in self._collections:
            is_same = is_same and len(collection) == len(items) and all(map(operator.is_, collection, items))
        return is_same or self._holds_equal()

    def leave_out_flags_like(self, other: Watch) -> None:
        """Leave out flags that the step sets itself: another program had the same after its trace."""
        if other._flags is not None and self._key() == other._key():
            self._flags = None

    def _objects(self) -> list[Any]:
        """Return Keras' objects that the step reads, and the layers in them."""
        values = [_resolved(*place) for place in self._places]
        values += [x for value in values if type(value) in (list, tuple) for x in value]  # type: ignore[attr-defined]
        values += [x for value in values if type(value) in _DICTS for x in value.values()]  # type: ignore[attr-defined]
        layers = {id(layer): layer for x in values if _is(x, keras.Layer) for layer in all_layers(x)}
        others = {id(x): x for x in values if _is(x, keras.Optimizer, keras.Loss, keras.Metric)}
        return [*layers.values(), *others.values()]

    def _key(self) -> tuple[object, ...]:
        return self._values, self._flags, list(map(id, self._flagged))

    def _read(self) -> list[Hashable]:
        return [_key(_resolved(*place)) for place in self._places]

    def _holds_equal(self) -> bool:
        if self._read() != self._values:
            return False
        # Other objects, which are equal.
        self._look()
        return True

    def _look(self) -> None:
        """Note where the values lie now, so that asking again takes no call of Python."""
        self._links: list[_Link] = []
        self._arrays: list[tuple[np.ndarray, bytes]] = []
        self._collections: list[tuple[Collection[object], tuple[object, ...]]] = []
        for place in self._places:
            value = _resolved(*place, links=self._links)
            if _is(value, np.ndarray) and value.nbytes <= _MOST_BYTES:  # type: ignore[attr-defined]
                self._arrays.append((value, value.tobytes()))  # type: ignore[arg-type, attr-defined]
            elif type(value) in (list, set, *_DICTS) and len(value) <= _MOST_ITEMS:  # type: ignore[arg-type]
                parts: Any = (value.keys(), value.values()) if isinstance(value, dict) else (value,)
                self._collections.extend((part, tuple(part)) for part in parts)


class _Search:
    """Finds the places that a function and the functions that it calls read."""

    def __init__(self) -> None:
        #: By an object's number and what is read of it: the object.
        self.places: dict[tuple[int, Read], object] = {}
        self._seen: set[tuple[object, ...]] = set()
        self._module: dict[str, object] | None = None

    def visit(self, fn: object, args: Sequence[object] = (), keywords: Mapping[str, object] = _NONE) -> None:
        """Add what a function reads.

        Args:
            args, keywords: what it is called with, as far as that is known.
        """
        if isinstance(fn, functools.partial):
            self.visit(fn.func, (*fn.args, *args), {**fn.keywords, **keywords})
        elif isinstance(fn, types.MethodType):
            self.visit(fn.__func__, (fn.__self__, *args), keywords)
        elif isinstance(fn, types.FunctionType):
            self._visit_function(fn, args, keywords)
        elif self._module is None and type(fn).__module__ in sys.modules:
            # A step that is an object which can be called.
            self._begin(vars(sys.modules[type(fn).__module__]))
            self._follow(fn)

    def _begin(self, module: dict[str, object]) -> None:
        # A method of a library's object, such as a metric's `update_state`, is not searched.
        is_library = str(module.get("__name__")).partition(".")[0] in _LIBRARIES
        self._module = {} if is_library else module

    def _visit_function(
        self, fn: types.FunctionType, args: Sequence[object], keywords: Mapping[str, object]
    ) -> None:
        if self._module is None:
            self._begin(fn.__globals__)
        given = dict(zip(fn.__code__.co_varnames[: fn.__code__.co_argcount], args, strict=False)) | {
            **keywords
        }
        # With its cells: one code can be several functions.
        seen = (fn.__code__, *map(id, fn.__closure__ or ()), *map(id, given.values()))
        if fn.__globals__ is not self._module or seen in self._seen:
            return
        self._seen.add(seen)
        for function in (x for x in given.values() if _is(x, *_FUNCTIONS)):
            self.visit(function)
        cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
        for read in reads_of(fn.__code__):
            where, name, _ = read
            if where == "global":
                self._add(fn.__globals__, read)
            elif where == "cell":
                self._add(cells[name], read)
            elif given.get(name, MISSING) is not MISSING:
                self._add(given[name], read)

    def _add(self, root: object, read: Read) -> None:
        value = _resolved(root, *read, follow=self.visit)
        self._follow(value)
        # What libraries and classes have under a name stays there.
        is_named = _is(value, types.ModuleType, types.BuiltinFunctionType, type)
        is_foreign = isinstance(value, types.FunctionType) and value.__globals__ is not self._module
        if value is not MISSING and not is_named and not is_foreign:
            self.places[id(root), read] = root

    def _follow(self, value: object) -> None:
        """Visit what calling a value runs."""
        if _is(value, *_FUNCTIONS):
            self.visit(value)
        elif self._module is not None and type(value).__module__ == self._module.get("__name__"):
            for name in ("call", "__call__"):
                self.visit(vars(type(value)).get(name), (value,))


def _is(value: object, *kinds: type) -> bool:
    # Not `isinstance`, which asks objects for their `__class__`.
    return issubclass(type(value), kinds)


def _resolved(
    root: object,
    where: str,
    name: str,
    path: Path,
    follow: Callable[[object, Sequence[object]], object] = lambda fn, args: None,
    links: list[_Link] | None = None,
) -> object:
    """Return the value at the end of a path, or before the first part that only running code could tell.

    Args:
        links: gets the look-ups on the way.
    """
    links = [] if links is None else links
    value = _first_of(root, where, name, links)
    for kind, part in path:
        inner = _attribute(value, str(part), links) if kind == "attribute" else _item(value, part, links)
        if isinstance(inner, property):
            follow(inner.fget, (value,))
            break
        if isinstance(inner, types.MethodType) and inner.__self__ is value:
            follow(inner, ())
            break
        if inner is MISSING:
            break
        value = inner
    return value


def _settings(x: object) -> Iterator[tuple[object, str, str, Path]]:
    """The places of numbers that an object of Keras keeps: a rate, a limit of gradients; and its schedule."""
    is_optimizer = _is(x, keras.Optimizer)
    if is_optimizer:
        yield (x, "rate", "", ())
    if type(x).__module__.partition(".")[0] == "keras":
        for name, value in vars(x).items():
            if not name.startswith("_") and (type(value) is float or (is_optimizer and value is None)):
                yield (vars(x), "global", name, ())


def _first_of(root: object, where: str, name: str, links: list[_Link]) -> object:
    if where == "rate":
        return _looked_up(links, held_rate, root)
    if where == "global" and isinstance(root, dict):
        return _looked_up(links, root.get, name, MISSING)
    if isinstance(root, types.CellType):
        try:
            return _looked_up(links, getattr, root, "cell_contents", MISSING)
        except ValueError:  # it is empty
            return MISSING
    return root


def _looked_up(links: list[_Link], function: Callable[..., object], *args: object) -> object:
    look_up = functools.partial(function, *args)
    value = look_up()
    links.append((look_up, value))
    return value


def _item(value: object, part: object, links: list[_Link]) -> object:
    if type(value) in _DICTS:
        return _looked_up(links, value.get, part, MISSING)  # type: ignore[attr-defined]
    if type(value) not in (list, tuple):
        return MISSING
    try:
        return _looked_up(links, operator.getitem, value, part)
    except (LookupError, TypeError):
        return MISSING


def _attribute(value: object, name: str, links: list[_Link]) -> object:
    """Return an attribute without running code of its class: a property is returned as such."""
    if _is(value, type):
        own = _of_class(value, name, links)  # type: ignore[arg-type]
        return MISSING if isinstance(own, property) else own
    of_links: list[_Link] = []
    of_class = _of_class(type(value), name, of_links)
    if isinstance(of_class, property):
        return of_class
    if isinstance(of_class, types.MemberDescriptorType):
        # A slot. A class with code of its own would be asked for one without a value.
        own_code = any(
            k in vars(c) for c in type(value).__mro__[:-1] for k in ("__getattr__", "__getattribute__")
        )
        return MISSING if own_code else _looked_up(links, getattr, value, name, MISSING)
    own = _looked_up(links, _own_attributes(value).get, name, MISSING)
    if own is not MISSING:
        return own
    if isinstance(of_class, types.FunctionType):
        return types.MethodType(of_class, value)
    links.extend(of_links)
    return of_class if _is_plain(of_class) else MISSING


def _of_class(cls: type, name: str, links: list[_Link]) -> object:
    """Return the attribute of a class or of its nearest parent."""
    for parent in cls.__mro__:
        value = _looked_up(links, vars(parent).get, name, MISSING)
        if value is not MISSING:
            return value
    return MISSING


def _is_plain(value: object) -> bool:
    return _is(value, *VALUES)


def _own_attributes(value: object) -> dict[str, object]:
    # Not `value.__dict__`, for which a class may have a method.
    try:
        own: dict[str, object] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return own


def _key(value: object) -> Hashable:
    """Return a key of a value: small arrays and collections by what they hold."""
    if isinstance(value, np.ndarray) and value.nbytes <= _MOST_BYTES and value.dtype != object:
        return ("array", value.shape, value.dtype, value.tobytes())
    if type(value) in (list, set, *_DICTS) and len(value) <= _MOST_ITEMS:  # type: ignore[arg-type]
        items = value.items() if isinstance(value, dict) else [(None, item) for item in value]  # type: ignore[attr-defined]
        return (type(value), tuple((identity_of(n), identity_of(x)) for n, x in items))
    return identity_of(value)
