"""Finds lines of a program that fail here, or compute otherwise, for what they do with objects and tensors.

A shape, a gradient, a saved function; and control flow over tensors: TensorFlow rewrites `if`, `while` and
`for` in a `tf.function`, JAX traces them as they are.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

#: Returns the name below `tf` of an expression, or None.
PathOf = Callable[[ast.expr], str | None]

#: A line, the name on it, what to write instead, and whether the line fails as it stands.
Found = tuple[int, str, str, bool]

_FLOW = {
    ast.If: ("if", "`tf.where`, or `tf.cond(test, function, function)`"),
    ast.IfExp: ("if", "`tf.where`, or `tf.cond(test, function, function)`"),
    ast.While: ("while", "`tf.while_loop`"),
}

#: What is no tensor: it is known while a function is traced.
_STATIC = ("executing_eagerly", "inside_function", "is_tensor", "distribute.", "config.", "io.gfile.", "rank")


_AS_LIST = (
    "belongs to `tf.TensorShape`; shapes are tuples. Write: `list(x.shape)`, or `x.get_shape().as_list()`."
)
_LOOKUP = "is of an operation without a gradient: here each has one. Write: the gradient's use."
_SIZES = (
    "saves a function whose `input_signature` leaves sizes open. Write: those that it needs, such as "
    "`tf.TensorSpec([None, 28, 28, 1])`."
)
_STRINGS = (
    "of strings has no form of its own: such a function is Python's. Write: the function's call, or a form "
    "of numbers."
)
_WHOLE = (
    "counts a table that a partitioner divides once: it is one array for a layer's code. Write: "
    "`len(layer.weights[0].variables)`; its parts are `layer.weights[0].variables`."
)
_STANDS_FOR = (
    "reads what was saved of such checkpoints: the variables of a model have Keras' names there. Write: the "
    "objects that were saved, and `restore(path, parts=[…])` for some of them."
)
_OF_ESTIMATOR = (
    "reads what an Estimator saved under names of its own, also with `Scaffold(saver=…)`. Write: "
    "`estimator.get_variable_value(name)`, or `tf.train.load_checkpoint(path)`."
)
_INDEX = "in an index of an array of JAX is an array. Write: `np.array(…)` around it."


def statements(tree: ast.AST, path_of: PathOf) -> Iterator[Found]:
    """Yield each such line."""
    given = _given_to_function(tree, path_of)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (
            node.name in given or _is_traced(node, path_of)
        ):
            yield from _flow_of(node, path_of)
    yield from ((*found, True) for found in _objects(tree, path_of))


def _given_to_function(tree: ast.AST, path_of: PathOf) -> set[str]:
    """Return the names of functions that `tf.function` is called with."""
    calls = (n for n in ast.walk(tree) if isinstance(n, ast.Call) and path_of(n.func) == "function")
    return {n.id for call in calls for n in call.args[:1] if isinstance(n, ast.Name)}


def _is_traced(function: ast.FunctionDef | ast.AsyncFunctionDef, path_of: PathOf) -> bool:
    called = (d.func if isinstance(d, ast.Call) else d for d in function.decorator_list)
    return any(path_of(decorator) == "function" for decorator in called)


def _flow_of(function: ast.FunctionDef | ast.AsyncFunctionDef, path_of: PathOf) -> Iterator[Found]:
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


def _objects(tree: ast.AST, path_of: PathOf) -> Iterator[tuple[int, str, str]]:
    nested = _nested_checkpoints(tree, path_of)
    saves = any(isinstance(n, ast.Call) and _saves_an_estimator(n, path_of) for n in ast.walk(tree))
    is_numpy = any(_imports_numpy(node) for node in ast.walk(tree))
    has_open_sizes = any(_leaves_sizes_open(node) for node in ast.walk(tree))
    divides = any(isinstance(n, ast.keyword) and n.arg == "variable_partitioner" for n in ast.walk(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "as_list" and _is_shape(node.value):
            yield node.lineno, ".shape.as_list", _AS_LIST
        elif isinstance(node, ast.Call) and _is_form_of_strings(node, path_of):
            yield node.lineno, ".get_concrete_function", _STRINGS
        elif divides and isinstance(node, ast.Call) and _counts_weights(node):
            yield node.lineno, ".weights", _WHOLE
        elif isinstance(node, ast.Try):
            yield from _of_gradients(node)
        elif has_open_sizes and isinstance(node, ast.Call) and path_of(node.func) == "saved_model.save":
            yield node.lineno, "tf.saved_model.save", _SIZES
        elif is_numpy and isinstance(node, ast.Subscript) and _has_tuple(node.slice):
            yield node.lineno, "tuple", _INDEX
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if node.func.attr == "restore" and isinstance(owner, ast.Name) and (owner.id in nested or saves):
                text = _STANDS_FOR if owner.id in nested else _OF_ESTIMATOR
                yield node.lineno, "tf.train.Checkpoint.restore", text


def _nested_checkpoints(tree: ast.AST, path_of: PathOf) -> set[str]:
    """Return the names of checkpoints that hold checkpoints, which stand for other objects."""
    made = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets
        if isinstance(target, ast.Name) and path_of(node.value.func) == "train.Checkpoint"
    }
    held = {
        name: [k.value.id for k in c.keywords if isinstance(k.value, ast.Name)] for name, c in made.items()
    }
    return {name for name, others in held.items() if any(other in made for other in others)}


def _saves_an_estimator(node: ast.Call, path_of: PathOf) -> bool:
    is_scaffold = (path_of(node.func) or "").endswith("train.Scaffold")
    return is_scaffold and any(keyword.arg == "saver" for keyword in node.keywords)


def _imports_numpy(node: ast.AST) -> bool:
    return isinstance(node, ast.Import) and any(
        alias.name == "tensorflow.experimental.numpy" for alias in node.names
    )


def _has_tuple(index: ast.expr) -> bool:
    """Return whether an index of several dimensions has a tuple of values in it."""
    parts = index.elts if isinstance(index, ast.Tuple) else ()
    return any(isinstance(part, ast.Tuple) for part in parts)


def _is_form_of_strings(node: ast.Call, path_of: PathOf) -> bool:
    """Return whether code is `f.get_concrete_function(tf.TensorSpec([], tf.string))`."""
    if not (isinstance(node.func, ast.Attribute) and node.func.attr == "get_concrete_function"):
        return False
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    specs = [spec for spec in given if isinstance(spec, ast.Call) and path_of(spec.func) == "TensorSpec"]
    kinds = [kind for spec in specs for kind in (*spec.args, *(k.value for k in spec.keywords))]
    return any(path_of(kind) in ("string", "dtypes.string") for kind in kinds)


def _counts_weights(node: ast.Call) -> bool:
    """Return whether code is `len(layer.weights)`."""
    if not (_is_name(node.func, "len") and node.args):
        return False
    return isinstance(node.args[0], ast.Attribute) and node.args[0].attr == "weights"


def _of_gradients(node: ast.Try) -> Iterator[tuple[int, str, str]]:
    """Yield the lines that expect an operation without a gradient."""
    calls = [n.func for b in node.body for n in ast.walk(b) if isinstance(n, ast.Call)]
    if any(isinstance(called, ast.Attribute) and called.attr == "gradient" for called in calls):
        for handler in node.handlers:
            if isinstance(handler.type, ast.Name) and handler.type.id == "LookupError":
                yield handler.lineno, "LookupError", _LOOKUP


def _leaves_sizes_open(node: ast.AST) -> bool:
    """Return whether a signature leaves more sizes open than the rows and one more, which saving finds."""
    if not (isinstance(node, ast.keyword) and node.arg == "input_signature"):
        return False
    shapes = (n for n in ast.walk(node.value) if isinstance(n, (ast.List, ast.Tuple)))
    return any(sum(isinstance(n, ast.Constant) and n.value is None for n in s.elts[1:]) > 1 for s in shapes)


def _is_shape(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "shape"


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
