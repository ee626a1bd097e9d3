"""Make the stubs of `unisono.tf` from its table of names: `python -m tools.stubs` writes them.

Editors and type checkers read stubs, and the table is looked up at run time. A name that is another object
is imported from there, so that its signature and documentation are those of that object; a function whose
arguments have TensorFlow's names gets a definition; names without a counterpart stand in no stub.
"""

import inspect
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import keras

from unisono.tf._entries import At, Missing, Operator, Value, object_at
from unisono.tf._module import VERSIONS
from unisono.tf._table import TABLE

ROOT = Path(__file__).parents[1] / "src" / "unisono" / "tf"
HEAD = '"""{title}, for editors and type checkers; `python -m tools.stubs` makes this file."""\n'
#: Keras' names belong to a version.
KERAS = ".".join(keras.__version__.split(".")[:2])

#: Packages with types, all of whose names a stub takes: which they are depends on the version.
TYPED = ("jax.numpy",)

#: Annotations of targets that a stub repeats; others need imports, and are `Any`.
_PLAIN = re.compile(r"(int|float|bool|str|bytes|None)( \| (int|float|bool|str|bytes|None))*")
_WORDS = re.compile(r"\b(int|float|bool|str|bytes)\b")


def stubs() -> dict[str, str]:
    """Return the text of each stub by its path below `unisono/tf`."""
    found = {}
    for module in modules(""):
        children = [m for m in modules(module) if m != module]
        parts = module.split(".") if module else []
        path = "/".join([*parts, "__init__.pyi"]) if children or not parts else "/".join(parts) + ".pyi"
        found[path] = text_of(module)
    return found


def modules(path: str) -> Iterator[str]:
    """Yield a module and those below it that have a stub."""
    yield path
    for name in names(path):
        inner = f"{path}.{name}".lstrip(".")
        if is_module(inner):
            yield from modules(inner)


def names(path: str) -> list[str]:
    """Return the names of a module that have a counterpart, also those that are Keras' own."""
    version = next((v for v in VERSIONS if path == v or path.startswith(f"{v}.")), None)
    if version is not None:
        # All others are those of the module without the version.
        return sorted({n for n in _own(path) if _entry_of_version(f"{path}.{n}", version)})
    return sorted({*_own(path), *_others(path)})


def is_module(path: str) -> bool:
    """Return whether a name is a module's that has a stub of its own."""
    if path in TABLE._members or path in VERSIONS:
        return True
    if path in TABLE.entries:
        return False
    return path.startswith("keras.") and TABLE.is_module(path)


def _own(path: str) -> list[str]:
    own = TABLE._members.get(path, set())
    return [n for n in own if not isinstance(TABLE.entries.get(f"{path}.{n}".lstrip(".")), Missing)]


def _entry_of_version(path: str, version: str) -> bool:
    return path in TABLE.entries or any(e.startswith(f"{path}.") for e in TABLE.entries)


def _others(path: str) -> Iterator[str]:
    for home in TABLE.falls_to(path):
        if home in TYPED:
            continue
        try:
            module = object_at(home)
        except (AttributeError, ModuleNotFoundError):
            continue
        for name in dir(module):
            inner = f"{path}.{name}"
            known = TABLE.entry(inner) is not None or inner in TABLE._members
            if not (name.startswith("_") or name == "src" or known):
                yield name


def text_of(module: str) -> str:
    """Return the stub of a module."""
    shown = f"tf.{module}".rstrip(".")
    version = next((v for v in VERSIONS if module == v or module.startswith(f"{v}.")), None)
    parts = Parts()
    for name in names(module):
        path = f"{module}.{name}".lstrip(".")
        if is_module(path):
            parts.take(f"unisono.tf.{module}".rstrip("."), name, name)
        else:
            parts.add(name, path)
    title = f"Names of `{shown}`" + (
        f" with Keras {KERAS}" if any(h.startswith("keras") for h in TABLE.falls_to(module)) else ""
    )
    if version is not None:
        plain = module.removeprefix(version).lstrip(".")
        for name in sorted({*names(plain), *names(module)} - {*names(module)}):
            parts.take(f"unisono.tf.{plain}".rstrip("."), name, name)
    star = [f"from {home} import *\n" for home in TABLE.falls_to(module) if home in TYPED]
    return HEAD.format(title=title) + "".join(["\n", *star, *parts.lines()])


class Parts:
    """The parts of a stub: imports, plain values, functions."""

    def __init__(self) -> None:
        self._imports: dict[str, set[tuple[str, str]]] = {}
        self._values: list[str] = []
        self._functions: list[str] = []

    def take(self, home: str, own: str, name: str, *inside: str) -> None:
        """Take a name of another module, or something inside of it."""
        # A stub exports what it imports under the same name alone.
        taken = name if own == name and not inside else f"_{home}.{own}".replace(".", "_")
        self._imports.setdefault(home, set()).add((own, taken))
        if taken != name:
            self._values.append(f"{name} = {'.'.join([taken, *inside])}\n")

    def add(self, name: str, path: str) -> None:
        """Add a name of the table, or of the module that stands in for it."""
        entry = TABLE.entries.get(path)
        if entry is None:
            self._refer(name, self._fallback(path))
        elif isinstance(entry, At):
            self._refer(name, entry.path)
        elif isinstance(entry, Value):
            self._values.append(f"{name}: {_type_of(entry.value)}\n")
        elif isinstance(entry, Operator):
            self._functions.append(definition(name, entry))

    def _fallback(self, path: str) -> str:
        module, _, name = path.rpartition(".")
        for other in (f"{home}.{name}" for home in TABLE.falls_to(module)):
            try:
                object_at(other)
            except (AttributeError, ModuleNotFoundError):
                continue
            return other
        raise AttributeError(f"No module has `tf.{path}`.")

    def _refer(self, name: str, path: str) -> None:
        home, (own, *inside) = _split(path)
        self.take(home, own, name, *inside)

    def lines(self) -> Iterator[str]:
        """Yield the text of the stub."""
        body = "".join([*self._values, *self._functions])
        for module, short in (("builtins", "_b"), ("numpy", "_np")):
            if f"{short}." in body:
                yield f"import {module} as {short}\n"
        if "_Any" in body:
            yield "from typing import Any as _Any\n"
        for home in sorted(self._imports):
            taken = sorted(self._imports[home], key=lambda pair: pair[1])
            shown = [f"    {own} as {name},\n" for own, name in taken]
            yield f"from {home} import (\n{''.join(shown)})\n"
        yield "".join(["\n" * bool(body), *self._values, *self._functions])


def _split(path: str) -> tuple[str, list[str]]:
    """Return the module of an object, and the names that lead to it from there."""
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        home = ".".join(parts[:length])
        try:
            if isinstance(object_at(home), types.ModuleType):
                return home, parts[length:]
        except (AttributeError, ModuleNotFoundError):
            continue
    raise ModuleNotFoundError(path)


def _type_of(value: object) -> str:
    if value is None:
        return "None"
    kind = type(value)
    if kind.__module__ == "builtins":
        return f"_b.{kind.__name__}" if kind in (int, float, str, bool) else "_Any"
    return "_np.dtype[_Any]" if kind.__module__.startswith("numpy") else "_Any"


def definition(name: str, entry: Operator) -> str:
    """Return the definition of a function whose arguments have TensorFlow's names.

    The table says which names an argument may have, and not which one this function has in TensorFlow, so
    that an argument with several names can be given by each of them.
    """
    function = object_at(entry.path)
    every = list(inspect.signature(function).parameters.values())
    aliases: dict[str, list[str]] = {}
    for other, own in entry.names.items():
        aliases.setdefault(own, []).append(other)
    if entry.order:
        place = {own: i for i, own in enumerate(entry.order)}
        every.sort(key=lambda p: place.get(p.name, len(place)))
    # What TensorFlow calls otherwise follows what it calls the same, by keyword.
    positional, keywords, rest = [], [], ""
    has_default = False
    for parameter in every:
        kind = parameter.kind
        if kind is parameter.VAR_KEYWORD:
            rest = f"**{parameter.name}: _Any"
            continue
        if kind is parameter.VAR_POSITIONAL:
            positional.append(f"*{parameter.name}: _Any")
            continue
        has_default |= parameter.default is not parameter.empty or parameter.name in aliases
        has_default |= parameter.name in entry.defaults
        shown = f"{parameter.name}: {_annotation(parameter)}{' = ...' if has_default else ''}"
        (keywords if kind is parameter.KEYWORD_ONLY else positional).append(shown)
        own = {p.name for p in every}
        keywords += [
            f"{a}: {_annotation(parameter)} = ..." for a in aliases.get(parameter.name, []) if a not in own
        ]
    takes_any = any(p.startswith("*") for p in positional)
    if all(p.name != "name" for p in every):
        (keywords if takes_any else positional).append("name: _b.str | None = ...")
    if keywords and not takes_any:
        positional.append("*")
    arguments = ", ".join([*positional, *keywords, *filter(None, [rest])])
    doc = (inspect.getdoc(function) or "").partition("\n\n")[0]
    doc = re.sub(r"\s+", " ", doc).replace("\\", "\\\\").replace('"""', "'''").strip()
    body = f'    """{doc}"""\n' if doc else "    ...\n"
    return f"def {name}({arguments}) -> _Any:\n{body}"


def _annotation(parameter: inspect.Parameter) -> str:
    annotation = parameter.annotation
    if isinstance(annotation, str) and _PLAIN.fullmatch(annotation):
        return _WORDS.sub(r"_b.\1", annotation)
    if isinstance(parameter.default, bool):
        return "_b.bool"
    return "_Any"


def main() -> None:
    for old in ROOT.rglob("*.pyi"):
        old.unlink()
    for path, text in stubs().items():
        file = ROOT / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


if __name__ == "__main__":
    sys.exit(main())
