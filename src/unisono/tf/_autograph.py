"""Finds statements that a program's functions cannot have here: Python's control flow over tensors.

TensorFlow rewrites `if`, `while` and `for` in a `tf.function`; JAX traces them as they are.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

#: Returns the name below `tf` of an expression, or None.
PathOf = Callable[[ast.expr], str | None]

_FLOW = {
    ast.If: ("if", "`tf.where`, or `tf.cond(test, function, function)`"),
    ast.IfExp: ("if", "`tf.where`, or `tf.cond(test, function, function)`"),
    ast.While: ("while", "`tf.while_loop`"),
}

#: What is no tensor: it is known while a function is traced.
_STATIC = ("executing_eagerly", "inside_function", "is_tensor", "distribute.", "config.", "io.gfile.", "rank")


def statements(tree: ast.AST, path_of: PathOf) -> Iterator[tuple[int, str, str, bool]]:
    """Yield the line, name and text of each such statement, and whether it surely fails."""
    given = _given_to_function(tree, path_of)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (
            node.name in given or _is_traced(node, path_of)
        ):
            yield from _flow_of(node, path_of)


def _given_to_function(tree: ast.AST, path_of: PathOf) -> set[str]:
    """Return the names of functions that `tf.function` is called with."""
    calls = (n for n in ast.walk(tree) if isinstance(n, ast.Call) and path_of(n.func) == "function")
    return {n.id for call in calls for n in call.args[:1] if isinstance(n, ast.Name)}


def _is_traced(function: ast.FunctionDef | ast.AsyncFunctionDef, path_of: PathOf) -> bool:
    called = (d.func if isinstance(d, ast.Call) else d for d in function.decorator_list)
    return any(path_of(decorator) == "function" for decorator in called)


def _flow_of(
    function: ast.FunctionDef | ast.AsyncFunctionDef, path_of: PathOf
) -> Iterator[tuple[int, str, str, bool]]:
    given = {a.arg for a in (*function.args.args, *function.args.kwonlyargs)} - {"self"}
    for node in ast.walk(function):
        if isinstance(node, (ast.If, ast.IfExp, ast.While)) and _has_tensor(node.test, path_of):
            word, write = _FLOW[type(node)]
            text = f"over a tensor lets the function run as plain Python. For a compiled one write: {write}."
            yield node.test.lineno, word, text, False
        elif isinstance(node, ast.For) and _has_range_of(node.iter, given, path_of):
            text = (
                "lets the function run as plain Python where a limit is a tensor. For a compiled one write: "
                "`tf.while_loop`."
            )
            yield node.lineno, "for … in tf.range", text, False


def _has_tensor(test: ast.expr, path_of: PathOf) -> bool:
    """Return whether a test is of what an operation returns."""
    return any(
        (path := path_of(node.func)) is not None and not path.startswith(_STATIC)
        for node in ast.walk(test)
        if isinstance(node, ast.Call)
    )


def _has_range_of(values: ast.expr, given: set[str], path_of: PathOf) -> bool:
    """Return whether a loop goes over a range whose limits are arguments of the function."""
    return (
        isinstance(values, ast.Call)
        and path_of(values.func) == "range"
        and any(isinstance(n, ast.Name) and n.id in given for a in values.args for n in ast.walk(a))
    )
