"""Finds gradient tapes that a program enters in eager code.

A step is differentiated by running it again: a tape belongs into a compiled function or a replica's step.

Tests: tests/unit/tf/test_migrate.py.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

#: Methods that are called in a step.
_OF_STEPS = frozenset({"train_step", "test_step", "predict_step", "call"})

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def tapes(tree: ast.AST, path_of: Callable[[ast.expr], str | None]) -> Iterator[tuple[int, bool]]:
    """Yield the lines of tapes outside of steps, and whether they are surely there.

    Args:
        tree: the program.
        path_of: returns the name below `tf` of an expression, or None.
    """
    enclosing = dict(_with_enclosing(tree, ()))
    functions = [node for node in enclosing if isinstance(node, _Function)]
    known = {function.name for function in functions}
    methods = {
        n for c in enclosing if isinstance(c, ast.ClassDef) for n in c.body if isinstance(n, _Function)
    }
    in_steps = (_named_in_steps(tree, functions, path_of) & known) | {
        # A plain function of such a name may be called anywhere.
        f.name
        for f in functions
        if f.name == "model_fn" or (f in methods and f.name in _OF_STEPS)
    }
    while True:
        inside = [f for f in functions if {g.name for g in (*enclosing[f], f)} & in_steps]
        found = in_steps | {f.name for f in inside}.union(*(_names_in(f) & known for f in inside))
        if found == in_steps:
            break
        in_steps = found
    used = _names_in(tree)
    for node, functions_around in enclosing.items():
        if isinstance(node, ast.With) and any(_is_tape(item.context_expr, path_of) for item in node.items):
            around = {f.name for f in functions_around}
            if not around & in_steps:
                # Another file may call a function that this one does not.
                yield node.lineno, not around or bool(around & used)


def _with_enclosing(
    node: ast.AST, around: tuple[_Function, ...]
) -> Iterator[tuple[ast.AST, tuple[_Function, ...]]]:
    """Yield each node with the functions in which it lies."""
    yield node, around
    inner = (*around, node) if isinstance(node, _Function) else around
    for child in ast.iter_child_nodes(node):
        # A decorator does not lie in the function.
        yield from _with_enclosing(child, inner)


def _named_in_steps(
    tree: ast.AST, functions: list[_Function], path_of: Callable[[ast.expr], str | None]
) -> set[str]:
    """Return functions that are decorated by `tf.function`, or that something else is given."""
    names: set[str] = set()
    for function in functions:
        for decorator in function.decorator_list:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            if path_of(called) == "function":
                names.add(function.name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            # `strategy.run(step, …)`, `tf.function(step)`, `coordinator.schedule(step)`.
            names |= {_last(a) for a in (*node.args, *(k.value for k in node.keywords))} - {""}
    return names


def _names_in(node: ast.AST) -> set[str]:
    """Return the functions that code names: `f`, `self.f`."""
    return {_last(n) for n in ast.walk(node) if isinstance(n, (ast.Name, ast.Attribute))}


def _last(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_tape(node: ast.expr, path_of: Callable[[ast.expr], str | None]) -> bool:
    return isinstance(node, ast.Call) and path_of(node.func) == "GradientTape"
