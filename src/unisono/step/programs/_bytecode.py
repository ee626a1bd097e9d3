"""The names that a function reads, by its bytecode: of globals, and of attributes and items of objects.

Tests: tests/unit/step/test_python_reads.py.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterator

#: The attributes and constant items that are taken of a value.
Path = tuple[tuple[str, object], ...]

#: A place that code reads: "global", "cell" or "argument", the name, and the path from there.
Read = tuple[str, str, Path]

#: In the names of instructions that load a variable.
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_FAST")


@functools.lru_cache(maxsize=1024)
def reads_of(code: types.CodeType) -> tuple[Read, ...]:
    """Return the places that code reads, in global variables, in what it closes over and in its arguments.

    >>> def step(self, x):
    ...     return x * self.weight + BIAS["x"]
    >>> reads_of(step.__code__)[1:]
    (('argument', 'self', (('attribute', 'weight'),)), ('global', 'BIAS', (('item', 'x'),)))
    """
    try:
        reads = dict.fromkeys(_own_reads(code))
    except (LookupError, TypeError, AttributeError):
        # Bytecode of another kind of Python: what this code reads is not watched.
        reads = {}
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            outside = [_outside(code, read) for read in reads_of(inner)]
            reads.update((read, None) for read in outside if read)
    return tuple(reads)


def _outside(code: types.CodeType, read: Read) -> Read | None:
    """Return the place that a function within `code` reads as `code` would; None for a variable of `code`."""
    where, name, path = read
    if where == "argument":
        return None
    if where == "global" or name in code.co_freevars:
        return read
    return ("argument", name, path) if name in _parameters(code) else None


def _parameters(code: types.CodeType) -> tuple[str, ...]:
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _own_reads(code: types.CodeType) -> Iterator[Read]:
    instructions = [i for i in dis.get_instructions(code) if i.opname not in ("EXTENDED_ARG", "PUSH_NULL")]
    # Variables to which what was read is given: `config = self.config`.
    aliases: dict[object, Read] = {}
    for at, instruction in enumerate(instructions):
        if not any(kind in instruction.opname for kind in _LOADS):
            continue
        # Python 3.13 loads or stores two variables in one instruction; what follows is of the second one.
        name = instruction.argval[-1] if isinstance(instruction.argval, tuple) else instruction.argval
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            start: Read = ("global", name, ())
        elif name in code.co_freevars:
            start = ("cell", name, ())
        elif name in aliases:
            start = aliases[name]
        elif name in _parameters(code):
            start = ("argument", name, ())
        else:
            # A variable of its own; inside of a nested function, `_outside` looks again.
            continue
        path, end = _path(instructions, at)
        read = (start[0], start[1], start[2] + path)
        after = instructions[end]
        if after.opname.startswith(("STORE_FAST", "STORE_DEREF")):
            aliases[after.argval[0] if isinstance(after.argval, tuple) else after.argval] = read
        yield read


def _path(instructions: list[dis.Instruction], at: int) -> tuple[Path, int]:
    """Return the path from the value that an instruction loads, and the number of the one after it."""
    path: list[tuple[str, object]] = []
    if at and instructions[at - 1].opname == "LOAD_GLOBAL" and instructions[at - 1].argval == "getattr":
        named = instructions[at + 1]
        if named.opname == "LOAD_CONST" and isinstance(named.argval, str):
            return (("attribute", named.argval),), at + 2
    at += 1
    while at + 1 < len(instructions):
        here, following = instructions[at : at + 2]
        if here.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            path.append(("attribute", here.argval))
            at += 1
        elif here.opname in ("LOAD_CONST", "LOAD_SMALL_INT") and _takes_item(following):
            path.append(("item", here.argval))
            at += 2
        else:
            break
    return tuple(path), at


def _takes_item(instruction: dis.Instruction) -> bool:
    return instruction.opname == "BINARY_SUBSCR" or (
        instruction.opname == "BINARY_OP" and instruction.argrepr == "[]"
    )
