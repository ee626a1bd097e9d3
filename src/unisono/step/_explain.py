"""Notes on JAX's errors about traced values: where in the user's code, which value, and what to write.

A step is compiled: its code runs once, with stand-ins for its arrays. What needs a value then fails
inside JAX, with an error that knows nothing of the user's step.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import linecache
import logging
import warnings
from collections.abc import Callable, Iterator, MutableSequence
from types import FrameType, TracebackType

import jax
import jax.numpy as jnp

from unisono._context import ReplicaContext
from unisono._features import load
from unisono._tracebacks import add_advice, frames_of, is_explained, is_program
from unisono._types import PyTree

_LOG = logging.getLogger("unisono")

#: For each error of JAX, what code must not do, and what to write. A subclass before its base.
_ADVICE: tuple[tuple[type[BaseException], str, str], ...] = (
    (
        jax.errors.TracerBoolConversionError,
        "`if`, `while`, `assert`, `and`, `or` and `not` cannot look at it",
        "`keras.ops.where(condition, a, b)` or `keras.ops.cond(condition, lambda: a, lambda: b)`; or return "
        "it from the step and decide outside, `if float(loss) > 0:`",
    ),
    (
        jax.errors.NonConcreteBooleanIndexError,
        "an index of booleans cannot choose as many elements as it likes",
        "`keras.ops.where(mask, x, 0)`, which keeps the shape",
    ),
    (
        jax.errors.TracerArrayConversionError,
        "NumPy cannot read it",
        "`keras.ops` or `jax.numpy` in place of `numpy`; or return it from the step and use NumPy outside",
    ),
    (
        jax.errors.TracerIntegerConversionError,
        "`range`, `int` and indices of lists cannot use it",
        "`keras.ops.take`, `keras.ops.fori_loop`, or pass a Python int to the step",
    ),
    (
        jax.errors.ConcretizationTypeError,
        "`float`, `int`, `bool`, `print` with a format, and shapes cannot use it",
        "`keras.ops.cast(x, 'float32')` to keep an array; or return it from the step and convert it outside, "
        "`float(strategy.reduce('SUM', loss, axis=None))`",
    ),
    (
        jax.errors.UnexpectedTracerError,
        "it was kept from another step, in a list, an attribute or a global variable",
        "`return` it from the step; or keep it in a `unisono.Variable` with `assign`",
    ),
)

_OF_TRACED = tuple(kind for kind, _, _ in _ADVICE)

_NUMPY = (
    "`.numpy()` cannot read it",
    "`return` it from the step, and `np.asarray(value)` outside",
)

_VARIABLE_METHODS = tuple(
    f"DynamicJaxprTracer has no attribute {name}" for name in ("assign", "assign_add", "assign_sub")
)
_NO_VARIABLE = (
    "it cannot be assigned: only a variable can",
    "`apply_gradients(zip(gradients, variables))` in this order, or `unisono.Variable` for what is assigned",
)


@dataclasses.dataclass(frozen=True)
class _Place:
    """A place in the user's code: the frame, and the part of its text that was executed."""

    frame: FrameType
    line: int
    text: str


def warn_of_python(error: Exception, function: Callable[..., object]) -> None:
    """Warn that a function runs as plain Python because it needs a value of what is traced."""
    place = _place_of(error.__traceback__)
    where = "" if place is None else f', line {place.line}, "{place.text}",'
    warnings.warn(
        f"{getattr(function, '__qualname__', function)!r}{where} needs the value of a tensor, so that the "
        "function runs as plain Python, one operation after the other. For one compiled program write "
        "`tf.cond`, `tf.where` or `tf.while_loop`.",
        stacklevel=2,
    )


def explain(error: BaseException, step: Callable[..., object], called_by: str) -> None:
    """Add a note to an error that a traced step made JAX or Keras raise; others stay as they are."""
    if is_explained(error):
        return
    for cause in _causes(error):
        note = _note_on(cause, error, step, called_by)
        if note is not None:
            # Once: of a function in a function each has an edge.
            add_advice(error, note)
            return


def explain_at_end(error: BaseException) -> None:
    """Add a note to an error that ends the program, where it is about a value of a step or of `reduce`."""
    note = None if is_explained(error) else _note_at_end(error)
    if note is not None:
        add_advice(error, note)


def _note_at_end(error: BaseException) -> str | None:
    text = str(error)
    if isinstance(error, AttributeError) and error.name == "numpy" and isinstance(error.obj, jax.Array):
        return (
            "It is an array of JAX. Write `float(value)` or `np.asarray(value)`; arrays that "
            "`from unisono import tf` makes have `numpy()`."
        )
    if (
        isinstance(error, AttributeError)
        and "'NoneType'" in text
        and hasattr(ReplicaContext, error.name or "")
    ):
        return (
            "Between `strategy.scope()` and `strategy.run`, `unisono.get_replica_context()` is None. Call "
            f"`{error.name}` in the function that `strategy.run` is given."
        )
    if isinstance(error, ValueError) and text.startswith("`compiler_options` can only be passed"):
        return (
            "`strategy.run` compiles the step itself, and cannot be called in a function of `jax.jit`. Write "
            "`@unisono.function` in place of `@jax.jit`."
        )
    is_none = isinstance(error, ValueError) and text.startswith("None is not a valid value for jnp.array")
    if is_none or (isinstance(error, AttributeError) and _has_no_targets(error.__traceback__)):
        return (
            "Something that is None was used as an array, as targets are in `model.fit(x)`. Write "
            "`model.fit(x, y)`, or give each batch its targets; a model_fn has no labels in mode PREDICT."
        )
    if isinstance(error, _OF_TRACED):
        return (
            "A value of a step has no number outside of its trace: it was kept in a list, an attribute or a "
            "global variable.\nWrite `return value` in the step, and read what `strategy.run` returns; or "
            "keep it in a `unisono.Variable` with `assign`."
        )
    note: str | None = load("note on a last error")(error)
    return note


def _has_no_targets(trace: TracebackType | None) -> bool:
    """Return whether Keras computes a loss or metrics of targets that are None."""
    frames = [part.tb_frame for part in frames_of(trace)]
    of_keras = [f for f in frames if f.f_code.co_name.strip("_") in ("compute_loss", "compute_metrics")]
    return any(f.f_locals.get("y", f) is None for f in of_keras)


@contextlib.contextmanager
def explaining(step: Callable[..., object], called_by: str) -> Iterator[None]:
    """Add a note to an error that leaves a block; see `explain`."""
    try:
        yield
    except Exception as error:
        explain(error, step, called_by)
        raise


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and those behind it: Keras raises new ones with the text of JAX's."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or at.__context__


def _note_on(cause: BaseException, error: BaseException, step: Callable[..., object], by: str) -> str | None:
    name = getattr(step, "__qualname__", type(step).__name__)
    place = _place_of(cause.__traceback__) or _place_of(error.__traceback__)
    where = f"In {name!r}, which {by} compiles"
    if place is not None:
        where += f', file "{place.frame.f_code.co_filename}", line {place.line}:\n    {place.text}'
    if isinstance(cause, ValueError) and "create a variable while in a stateless scope" in str(cause):
        return (
            f"{where}\nA variable with a ready value, such as those of a new optimizer, cannot be created "
            "while a step is traced. Create it before the step."
        )
    advice = _advice_on(cause)
    if advice is None:
        return None
    forbidden, write = advice
    what = _traced_in(place) if place is not None else "A value"
    return f"{where}\n{what} has no value while the step is traced, so {forbidden}.\nWrite {write}."


def _advice_on(error: BaseException) -> tuple[str, str] | None:
    if isinstance(error, AttributeError) and error.name == "numpy" and isinstance(error.obj, jax.core.Tracer):
        return _NUMPY
    if isinstance(error, AttributeError) and str(error) in _VARIABLE_METHODS:
        return _NO_VARIABLE
    return next(((why, write) for kind, why, write in _ADVICE if isinstance(error, kind)), None)


def _place_of(trace: TracebackType | None) -> _Place | None:
    """The innermost place of a traceback in the user's code."""
    of_user = [part for part in frames_of(trace) if is_program(part.tb_frame.f_code.co_filename)]
    if not of_user:
        return None
    found = of_user[-1]
    code = found.tb_frame.f_code
    first, last, start, end = list(code.co_positions())[found.tb_lasti // 2]
    lines = [linecache.getline(code.co_filename, n) for n in range(first or 1, (last or first or 1) + 1)]
    if not any(lines) or first is None or first != last or start is None or end is None:
        text = linecache.getline(code.co_filename, found.tb_lineno).strip()
    else:
        # Positions count bytes.
        text = lines[0].encode()[start:end].decode()
    return _Place(found.tb_frame, found.tb_lineno, text)


def _traced_in(place: _Place) -> str:
    """The names of the traced values in a piece of code, with their types."""
    try:
        names = [n.id for n in ast.walk(ast.parse(place.text)) if isinstance(n, ast.Name)]
    except SyntaxError:
        names = []
    code = place.frame.f_code
    arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    described = []
    for name in dict.fromkeys(names):
        value = place.frame.f_locals.get(name)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
            kind = "the argument " if name in arguments else ""
            shape = f" ({value.aval.str_short()})" if isinstance(value, jax.core.Tracer) else ""
            described.append(f"{kind}`{name}`{shape}")
    text = " and ".join(described) if described else f"`{place.text}`"
    return text[:1].upper() + text[1:]


def require_numbers(results: PyTree, looks_for_infs: bool) -> None:
    """Raise where arrays of a step, `(outputs, state)`, hold NaN, or what is not finite.

    Raises:
        FloatingPointError: it names the first one.
    """
    for path, value in jax.tree_util.tree_leaves_with_path(results):
        if not jnp.issubdtype(value.dtype, jnp.inexact):
            continue
        bad = ~jnp.isfinite(value) if looks_for_infs else jnp.isnan(value)
        if bool(bad.any()):
            raise FloatingPointError(
                "A step must compute numbers only. Received: NaN in (outputs, state)"
                f"{jax.tree_util.keystr(path)}, shape {value.shape}. State is as it was before. "
                "Compile the model with `run_eagerly=True` to see the first operation."
            )


def raise_unless_past(error: Exception, tokens: MutableSequence[jax.Array]) -> None:
    """Raise a step's error, unless it belongs to code that has ended by it: then warn of it.

    Steps that follow from a failed step fail, too. Where the newest is well, it is of other code.

    Args:
        tokens: of the steps that were started since; they are forgotten.
    """
    newest = tokens[-1]
    tokens.clear()
    try:
        newest.block_until_ready()
    except Exception:  # the same one, or a consequence
        raise error from None
    _LOG.warning("A step of earlier code has failed: %s", str(error).strip())
