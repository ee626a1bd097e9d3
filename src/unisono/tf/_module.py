"""Modules whose names are looked up in a table: `unisono.tf` and what is below it."""

from __future__ import annotations

import difflib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

from unisono._names import missing_name
from unisono.tf._entries import Entry, Missing, object_at, taking_variables

#: Modules of TensorFlow that are other packages' as wholes: names that the table lacks are looked up there.
FALLS_TO = {
    # The second has Keras' names of TensorFlow 2, such as `losses.MSE` and `preprocessing.text`.
    "keras": ("keras", "keras._tf_keras.keras"),
    "initializers": ("keras.initializers",),
    "losses": ("keras.losses",),
    "metrics": ("keras.metrics",),
    "optimizers": ("keras.optimizers",),
    "experimental.numpy": ("jax.numpy",),
}

#: What Keras' names of TensorFlow 2 compute with TensorFlow itself.
_COMPUTES_WITH_TENSORFLOW = "keras._tf_keras.keras.backend"

#: Modules that have the names of `tf` itself, below their own.
VERSIONS = ("compat.v1", "compat.v2")


class NameTable:
    """The names below `tf`, and the modules that they lie in.

    >>> table = NameTable({"math.sqrt": Missing("is gone", "x ** 0.5")})
    >>> table.is_module("math"), table.names_in("math")
    (True, ['sqrt'])
    """

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self.entries = dict(entries)
        self._members: dict[str, set[str]] = {}
        for path in [*entries, *VERSIONS]:
            parts = path.split(".")
            for i, part in enumerate(parts):
                self._members.setdefault(".".join(parts[:i]), set()).add(part)

    def is_module(self, path: str) -> bool:
        """Return whether a name is a module's."""
        if _once(path) in self._members or plain(path) in self._members:
            return True
        return any(map(_is_module, self.falls_to(path)))

    def names_in(self, path: str) -> list[str]:
        """Return what the table has in a module."""
        return sorted({*self._members.get(_once(path), ()), *self._members.get(plain(path), ())})

    def entry(self, path: str) -> Entry | None:
        """Return what the table says of a name, or None."""
        return self.entries.get(_once(path)) or self.entries.get(plain(path))

    def falls_to(self, path: str) -> list[str]:
        """Return where names are looked up that the table does not have."""
        path = plain(path)
        first = next((name for name in FALLS_TO if path == name or path.startswith(f"{name}.")), None)
        if first is None:
            return []
        others = [other + path.removeprefix(first) for other in FALLS_TO[first]]
        return [other for other in others if not other.startswith(_COMPUTES_WITH_TENSORFLOW)]

    def find(self, shown: str, path: str) -> Any:
        """Return the object of a name.

        Args:
            shown: the name of the root for errors: `"tf"`.

        Raises:
            AttributeError: there is none.
        """
        entry = self.entry(path)
        if isinstance(entry, Missing):
            raise missing_name(f"`{shown}.{path}` {entry.why}. Write: {entry.write}", path)
        if entry is not None:
            return entry.load()
        for other in self.falls_to(path):
            try:
                found = object_at(other)
                return taking_variables(found) if other.startswith("jax.numpy.") else found
            except (AttributeError, ModuleNotFoundError):
                continue
        raise missing_name(self._unknown(shown, path), path)

    def _unknown(self, shown: str, path: str) -> str:
        module, _, name = path.rpartition(".")
        known = self.names_in(module)
        for other in self.falls_to(module):
            if _is_module(other):
                known = [*known, *(n for n in dir(object_at(other)) if not n.startswith("_"))]
        text = f"`{shown}.{path}` is not among the names that `unisono.tf` has"
        alike = difflib.get_close_matches(name, known, n=1)
        if not alike:
            # The same name in another module.
            elsewhere = [e for e in self.entries if e.rpartition(".")[2] == name]
            module = min(elsewhere, key=len, default="").rpartition(".")[0]
            alike = [name] * bool(elsewhere)
        if alike:
            return f"{text}. Did you mean `{'.'.join(p for p in (shown, module, alike[0]) if p)}`?"
        return f"{text}. docs/migrating_names.md lists them"


def plain(path: str) -> str:
    """Return a name without `compat.v1` or `compat.v2`, which have the names of `tf` itself.

    >>> plain("compat.v1.train.Saver"), plain("train.Saver"), plain("compat.v1.compat.v1")
    ('train.Saver', 'train.Saver', '')
    """
    for version in VERSIONS:
        if path == version or path.startswith(f"{version}."):
            return plain(path.removeprefix(version).lstrip("."))
    return path


def _once(path: str) -> str:
    """Return a name with `compat.v1` once: that module has itself below it, as in TensorFlow."""
    for version in VERSIONS:
        if path.startswith(tuple(f"{version}.{other}" for other in VERSIONS)):
            return _once(path.removeprefix(f"{version}."))
    return path


class NameModule(types.ModuleType):
    """A module whose attributes are what the table says."""

    _table: NameTable
    _path: str

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            # For `import *`, which would take what was looked up by then.
            found = {n: self._table.entry(f"{self._path}.{n}".lstrip(".")) for n in dir(self)}
            return [n for n, entry in found.items() if n[0] != "_" and not isinstance(entry, Missing)]
        if name.startswith("__") and name.endswith("__") and name not in self._table.entries:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        path = f"{self._path}.{name}" if self._path else name
        if self._table.entry(path) is None and self._table.is_module(path):
            return importlib.import_module(f"{self.__name__}.{name}")
        value = self._table.find("tf", path)
        self.__dict__[name] = value
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        # A function that uses `tf` is sent to other processes, which need not provide `tensorflow`.
        return importlib.import_module, (f"unisono.tf.{self._path}".rstrip("."),)

    def __dir__(self) -> list[str]:
        names = {*self.__dict__, *self._table.names_in(self._path)}
        others = filter(_is_module, self._table.falls_to(self._path))
        return sorted(names.union(*(dir(object_at(other)) for other in others)))


class NameFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules below a root, such as `unisono.tf` or `tensorflow`."""

    def __init__(self, root: str, table: NameTable, with_root: bool = False) -> None:
        self.root, self.table, self._with_root = root, table, with_root

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the specification of a module of the table, or None; see `importlib`."""
        if fullname == self.root:
            below = ""
            if not self._with_root:
                return None
        elif fullname.startswith(f"{self.root}."):
            below = fullname.removeprefix(f"{self.root}.")
            entry = self.table.entry(below)
            if isinstance(entry, Missing):
                said = f"`tf.{below}` {entry.why}. Write: {entry.write}"
                # By another name than the one that is looked for: `from tensorflow import x` would replace
                # this error by its own.
                raise ModuleNotFoundError(said, name=f"tf.{below}")
            if below.startswith("_") or not self.table.is_module(below):
                return None
        else:
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """Return the module; see `importlib`."""
        return as_names(NameModule(spec.name), self.table, spec.name.removeprefix(self.root).lstrip("."))

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: a module of names is complete when it is made."""


def as_names(module: types.ModuleType, table: NameTable, path: str) -> types.ModuleType:
    """Let a module look its names up in a table; return it."""
    module.__class__ = NameModule
    module.__dict__.update(_table=table, _path=path)
    return module


def add_finder(finder: NameFinder) -> None:
    """Let `import` find the modules of a root."""
    sys.meta_path.insert(0, finder)


def _is_module(path: str) -> bool:
    try:
        return isinstance(object_at(path), types.ModuleType)
    except (AttributeError, ModuleNotFoundError):
        return False
