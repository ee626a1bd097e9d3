"""What a program for TensorFlow needs before it runs here: its lines, compared with the table of names."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from unisono._errors import InvalidArgumentError
from unisono.tf._entries import Missing, Value, object_at
from unisono.tf._gone import ARGUMENTS, ARGUMENTS_TEXT, METHODS
from unisono.tf._module import NameTable
from unisono.tf._statements import statements
from unisono.tf._table import TABLE
from unisono.tf.packages._finder import NEED_TENSORFLOW

#: The modules below which names are those of the table.
_ROOTS = re.compile(r"(tensorflow|unisono\.tf)(\.|$)")

_DEVICE = "is of a string, and `device` is JAX's object. Write: `x.device.platform`, or `str(x.device)`."


@dataclasses.dataclass(frozen=True, order=True)
class Remark:
    """A line of a program that needs a change, or that means something else here.

    Args:
        line: its number, from 1.
        name: what stands there, such as `"tf.SparseTensor"`.
        text: what to write, and why.
        is_error: whether the line fails as it stands.
    """

    line: int
    name: str
    text: str
    is_error: bool = True


def findings(source: str, file: str = "<program>", table: NameTable = TABLE) -> list[Remark]:
    """Return what a program needs, in the order of its lines.

    Raises:
        InvalidArgumentError: the text is no Python.

    >>> [f.name for f in findings("import tensorflow as tf; tf.SparseTensor")]
    ['import tensorflow as tf', 'tf.SparseTensor']
    """
    try:
        tree = ast.parse(source, file)
    except SyntaxError as error:
        raise InvalidArgumentError(
            f"A program must be Python. Received: {file}, line {error.lineno}: {error.msg}."
        ) from None
    found = set(_of_imports(tree, table))
    aliases = _aliases(tree)
    for node in _outermost_names(tree):
        path = _path_of(node, aliases)
        if path:
            found.update(_of_name(path, node.lineno, table))
        elif (
            node.attr == "endswith" and isinstance(node.value, ast.Attribute) and node.value.attr == "device"
        ):
            found.add(Remark(node.lineno, ".device.endswith", _DEVICE))
        elif node.attr in METHODS:
            found.add(Remark(node.lineno, f".{node.attr}", METHODS[node.attr]))
    found.update(_of_keras(tree, table))
    found.update(_of_arguments(tree))
    found.update(Remark(*each) for each in statements(tree, lambda node: _path_of(node, aliases)))
    return sorted(found)


def _of_imports(tree: ast.AST, table: NameTable) -> Iterator[Remark]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _of_import(alias.name, alias.asname, node)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from _of_import(node.module, None, node)
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                if name in NEED_TENSORFLOW:
                    yield Remark(node.lineno, name, f"needs TensorFlow. {NEED_TENSORFLOW[name]}")
            if node.module.split(".")[0] == "tensorflow":
                below = node.module.partition(".")[2]
                for alias in node.names:
                    path = f"{below}.{alias.name}" if below else alias.name
                    yield from _of_name(path, node.lineno, table)


def _of_import(module: str, alias: str | None, node: ast.Import | ast.ImportFrom) -> Iterator[Remark]:
    first, _, below = module.partition(".")
    if first in NEED_TENSORFLOW:
        yield Remark(node.lineno, first, f"needs TensorFlow. {NEED_TENSORFLOW[first]}")
    if first != "tensorflow":
        return
    shown = ast.unparse(node)
    if isinstance(node, ast.ImportFrom):
        write = f"from unisono.tf{'.' + below if below else ''} import {shown.partition(' import ')[2]}"
    elif below:
        write = f"import unisono.tf.{below}{' as ' + alias if alias else ''}"
    else:
        write = f"from unisono import tf{' as ' + alias if alias not in (None, 'tf') else ''}"
    yield Remark(node.lineno, shown, f"Write: {write}. Or run it by `python -m unisono.tf`, as it is.", False)


def _of_name(path: str, line: int, table: NameTable) -> Iterator[Remark]:
    shown = f"tf.{path}"
    parts = path.split(".")
    for length in range(1, len(parts) + 1):
        below = ".".join(parts[:length])
        entry = table.entry(below)
        if isinstance(entry, Missing):
            yield Remark(line, shown, f"{entry.why}. Write: {entry.write}.")
            return
        if entry is not None:
            if not isinstance(entry, Value) and entry.note:
                yield Remark(line, shown, f"{entry.note}.", False)
            return
        if not table.is_module(below):
            try:
                # A name of Keras, which the table does not list.
                table.find("tf", below)
            except AttributeError as error:
                yield _unknown(line, shown, shown, error)
            return


def _unknown(line: int, name: str, shown: str, error: AttributeError) -> Remark:
    said = str(error).removeprefix(f"`{shown}` ").removesuffix(".")
    return Remark(line, name, said if said.endswith("?") else f"{said}.")


def _of_keras(tree: ast.AST, table: NameTable) -> Iterator[Remark]:
    """Yield the names of plain `keras` that Keras 3 does not have."""
    for path, line in _keras_names(tree):
        if _exists(path):
            continue
        try:
            table.find("tf", path)
        except AttributeError as error:
            yield _unknown(line, path, f"tf.{path}", error)
        else:
            yield Remark(line, path, f"is not in Keras 3. Write: `from unisono import tf`, and `tf.{path}`.")


def _keras_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "keras":
                    aliases[alias.asname or "keras"] = alias.name if alias.asname else "keras"
                    yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "keras":
            # Not those of a module of the program's own, `from .keras import x`.
            names = [] if node.level else [alias.name for alias in node.names if alias.name != "*"]
            yield from ((f"{node.module}.{name}", node.lineno) for name in names)
    for name in _outermost_names(tree):
        path = _path_of(name, aliases)
        if path:
            yield path, name.lineno


def _exists(path: str) -> bool:
    try:
        object_at(path)
    except (AttributeError, ImportError):
        return False
    return True


def _of_arguments(tree: ast.AST) -> Iterator[Remark]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("fit", "evaluate", "predict")
        ):
            for keyword in node.keywords:
                if keyword.arg in ARGUMENTS:
                    name = f".{node.func.attr}({keyword.arg}=)"
                    yield Remark(keyword.value.lineno, name, ARGUMENTS_TEXT)


def _aliases(tree: ast.AST) -> dict[str, str]:
    """Return what the program's names stand for below `tf`: "" is TensorFlow itself."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                first, _, below = alias.name.partition(".")
                if first == "tensorflow":
                    # `import tensorflow.keras` binds `tensorflow`.
                    aliases[alias.asname or first] = below if alias.asname else ""
        elif isinstance(node, ast.ImportFrom) and node.module == "unisono":
            # The program has been changed already.
            aliases.update({a.asname or a.name: "" for a in node.names if a.name == "tf"})
        elif isinstance(node, ast.ImportFrom) and node.module and _ROOTS.match(node.module):
            below = _ROOTS.sub("", node.module)
            for alias in node.names:
                aliases[alias.asname or alias.name] = f"{below}.{alias.name}" if below else alias.name
    # `layers = tf.keras.layers`; in the order of the lines, as names of names are made.
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute):
            path = _path_of(node.value, aliases)
            # A module or a class: what is assigned again is not followed.
            if path and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                aliases.setdefault(node.targets[0].id, path)
    return aliases


def _outermost_names(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Yield each chain of attributes once: of `a.b.c` the whole."""
    inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            yield node


def _path_of(node: ast.expr, aliases: dict[str, str]) -> str | None:
    parts: list[str] = []
    value: ast.expr = node
    while isinstance(value, ast.Attribute):
        parts.insert(0, value.attr)
        value = value.value
    if not isinstance(value, ast.Name) or value.id not in aliases:
        return None
    start = aliases[value.id]
    return ".".join([start, *parts] if start else parts)


@dataclasses.dataclass(frozen=True)
class ExaminedProgram:
    """What `unisono migrate` found in a program.

    Args:
        file: where it is.
        remarks: its lines that need a change, or that mean something else here.
        unreadable: why it could not be read as Python; None if it could.
        uses_tensorflow: whether it imports TensorFlow, or `tf` of this library.
        names: of TensorFlow and Keras that it uses, each once, such as `tf.keras.Model`.
    """

    file: Path
    remarks: tuple[Remark, ...] = ()
    unreadable: str | None = None
    uses_tensorflow: bool = True
    names: frozenset[str] = frozenset()

    @property
    def changed_names(self) -> frozenset[str]:
        """The names that do not run as they are."""
        return self.names & {remark.name for remark in self.remarks if remark.is_error}

    @property
    def errors(self) -> int:
        """The number of lines that need a change."""
        return sum(remark.is_error for remark in self.remarks) + (self.unreadable is not None)


def examine(paths: Sequence[Path]) -> list[ExaminedProgram]:
    """Return what is found in programs, and in those below folders.

    Raises:
        InvalidArgumentError: a program cannot be read, or is no Python; a folder holds none.
    """
    programs = [program for path in paths for program in _programs(path)]
    return [_examine(program, len(programs) > 1) for program in programs]


def as_text(programs: Sequence[ExaminedProgram]) -> str:
    """Return what `unisono migrate` prints for people."""
    texts = [_text_of(program) for program in programs]
    if len(programs) > 1:
        errors = [program.errors for program in programs if program.errors]
        texts.append(
            f"{len(programs)} programs: {len(programs) - len(errors)} run as far as their names tell, "
            f"{len(errors)} need a change, in {sum(errors)} {'line' if sum(errors) == 1 else 'lines'}. "
            + _counted(
                frozenset[str]().union(*(program.names for program in programs)),
                frozenset[str]().union(*(program.changed_names for program in programs)),
            )
        )
    return "\n".join(texts)


def as_json(programs: Sequence[ExaminedProgram]) -> str:
    """Return what `unisono migrate --json` prints for other tools: a list with an object for each program."""
    return json.dumps(
        [
            {
                "file": str(program.file),
                "needs_change": program.errors > 0,
                "uses_tensorflow": program.uses_tensorflow,
                "unreadable": program.unreadable,
                "names": len(program.names),
                "names_that_run": len(program.names - program.changed_names),
                "remarks": [dataclasses.asdict(remark) for remark in program.remarks],
            }
            for program in programs
        ],
        indent=2,
    )


def _programs(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    below = (program for program in path.rglob("*.py") if program.is_file())
    # Not those of packages that are installed there.
    hidden = (".", "__pycache__", "site-packages")
    found = sorted(p for p in below if not any(part.startswith(hidden) for part in p.relative_to(path).parts))
    if not found:
        raise InvalidArgumentError(
            f"A folder must hold programs. Received: {path}, without a file that ends in .py. Write another."
        )
    return found


def _examine(path: Path, is_one_of_several: bool) -> ExaminedProgram:
    if path.suffix == ".ipynb":
        raise InvalidArgumentError(
            f"A program must be a file of Python. Received: {path}, a notebook. Write its code into one by "
            f"`jupyter nbconvert --to script {path}`."
        )
    try:
        source = path.read_text(encoding="utf-8")
        found = tuple(findings(source, str(path)))
        tree = ast.parse(source)
        aliases = _aliases(tree)
        return ExaminedProgram(
            path, found, uses_tensorflow=bool(aliases), names=frozenset(_names(tree, aliases))
        )
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(
            f"A program is a text file. Received: {path} ({error}). Write the path of a Python "
            "program, or of a folder of them."
        ) from None
    except InvalidArgumentError as error:
        # One of Python 2 in a folder.
        if not is_one_of_several:
            raise
        return ExaminedProgram(path, unreadable=str(error))


def _text_of(program: ExaminedProgram) -> str:
    path, errors = program.file, program.errors
    if program.unreadable is not None:
        return f"{path}: error: {program.unreadable}"
    lines = [
        f"{path}:{r.line}: {'error' if r.is_error else 'note'}: `{r.name}` {r.text.replace('?.', '?')}"
        for r in program.remarks
    ]
    if not errors and not program.uses_tensorflow:
        lines.append(f"{path}: does not import TensorFlow; nothing was found to change.")
    elif not errors:
        lines.append(f"{path}: runs by `python -m unisono.tf {path}` as far as its names tell.")
    else:
        lines.append(f"{path}: {errors} {'line needs' if errors == 1 else 'lines need'} a change.")
    if program.names:
        lines[-1] += f" {_counted(program.names, program.changed_names)}"
    return "\n".join(lines)


def _counted(names: Collection[str], changed: Collection[str]) -> str:
    kind = "name" if len(names) == 1 else "names"
    return f"{len(names) - len(changed)} of {len(names)} {kind} of TensorFlow and Keras run as they are."


def _names(tree: ast.AST, aliases: dict[str, str]) -> Iterator[str]:
    """Yield the names of TensorFlow and Keras that a program uses, as remarks name them."""
    for name in _outermost_names(tree):
        if path := _path_of(name, aliases):
            yield f"tf.{path}"
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _ROOTS.match(node.module or "") and not node.level:
            below = _ROOTS.sub("", node.module or "")
            for alias in node.names:
                yield f"tf.{below}.{alias.name}" if below else f"tf.{alias.name}"
    yield from (path for path, _ in _keras_names(tree) if path != "keras")
