"""What the eager `GradientTape` uses of JAX that is not public: the private names by which JAX traces.

JAX hands each operation to the *current trace*. A trace of our own, which hands it on to the trace around it
and notes what was computed, is how a tape records. `check_jax` finds out, at the first tape, whether the
installed JAX still works in this way: with the names below (JAX 0.10.2) and by recording one operation.

Tests: tests/unit/step/eager/test_eager_jax_internals.py.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol, TypeAlias

import jax
import numpy as np
from jax.extend.core import Primitive

from unisono._errors import BackendError
from unisono._types import Tree

#: The names in `jax._src.core`, with the parameters with which they are called or overridden.
RELIED_ON: Mapping[str, Sequence[str]] = {
    "set_current_trace": ("trace",),
    "Trace.process_primitive": ("self", "primitive", "tracers", "params"),
    "Trace.process_custom_jvp_call": ("self", "primitive", "fun", "jvp", "tracers", "symbolic_zeros"),
    "Trace.process_custom_vjp_call": (
        "self", "primitive", "fun", "fwd", "bwd", "tracers", "out_trees", "symbolic_zeros",
    ),
    "Trace.stage_value": ("self", "val"),
    "trace_ctx": (),
}  # fmt: skip


#: What an operation computes with: an array, or a number that is constant.
Operand: TypeAlias = jax.Array | np.ndarray | np.generic | complex
Operands: TypeAlias = Sequence[Operand]


class Callee(Protocol):
    """A function as JAX hands it on, with what notes the structure of its result."""

    f: Callable[..., object]
    stores: Sequence[_StructureNote | None]


class _StructureNote(Protocol):
    def reset(self) -> None: ...


class Listener(Protocol):
    """What a recording trace reports of each operation that it has handed on."""

    def prepared(self, args: Operands, params: Mapping[str, Any]) -> tuple[Sequence[Any], Any]:
        """Return the arguments and parameters with which an operation is to run."""

    def operation(self, primitive: Primitive, params: Mapping[str, Any], args: Operands, out: Any) -> Any:
        """Note an operation; return its result, or copies of it."""

    def custom(self, primitive: Primitive, call: CustomCall, args: Operands, out: Tree) -> Tree:
        """Note a function with a derivative of its own; return its result, or copies of it."""


class CustomCall:
    """A call of a function with a derivative of its own, or of one that JAX calls without having traced it.

    Args:
        call: from the primitive and the arguments to the outputs.
        functions: JAX' wrapped functions: the function first, then its rules.
    """

    def __init__(self, call: Callable[..., Any], functions: Sequence[Callee]) -> None:
        self._call, self.functions = call, tuple(functions)

    def __call__(self, *args: Operand) -> Any:
        """Call the function once more, also with tracers."""
        # A wrapped function notes the structure of what it returns, once; this is another call.
        for function in self.functions:
            for store in function.stores:
                if store is not None:
                    store.reset()
        return self._call(*args)

    @property
    def key(self) -> Hashable | None:
        """What is equal for calls of the same function; None where it may depend on more than its arguments.

        That is so for users' functions, but not for those of JAX and Keras.
        """
        if not self.functions:
            return None
        modules = [getattr(f.f, "__module__", None) or "" for f in self.functions]
        if not all(m.partition(".")[0] in ("jax", "keras", "optax") for m in modules):
            return None
        # The rules' own wrappers are new at each call; what these do follows from those of the function.
        key = self.functions[0], tuple(rule.f for rule in self.functions[1:])
        try:
            hash(key)
        except TypeError:
            return None
        return key


def current_trace() -> Any:
    """Return the trace that gets the operations of this thread."""
    return _core().trace_ctx.trace


def recording_trace(listener: Listener) -> Any:
    """Return a trace that hands all operations on to the current one, and then to a listener."""
    return _trace_class()(listener, current_trace())


def tracing_by(trace: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context in which a trace gets the operations of this thread."""
    context: contextlib.AbstractContextManager[None] = _core().set_current_trace(trace)
    return context


@functools.cache
def _trace_class() -> type[Any]:
    core = _core()

    class RecordingTrace(core.Trace):  # type: ignore[name-defined]
        """Hands operations on to another trace, and notes them."""

        __slots__ = ("listener", "parent")

        def __init__(self, listener: Listener, parent: Any) -> None:
            super().__init__()
            self.listener, self.parent = listener, parent

        def stage_value(self, val: object) -> Any:
            return self.parent.stage_value(val)

        def cur_qdd(self, x: object) -> Any:
            return self.parent.cur_qdd(x)

        def process_primitive(self, primitive: Primitive, tracers: Operands, params: Any, /) -> Any:
            tracers, params = self.listener.prepared(tracers, params)
            # JAX' transformations leave this trace current: what computes an operation would be noted, too.
            with core.set_current_trace(self.parent):
                out = self.parent.process_primitive(primitive, tracers, params)
            return self.listener.operation(primitive, params, tracers, out)

        def process_call(self, primitive: Primitive, f: Callee, tracers: Operands, params: Any, /) -> Any:
            with core.set_current_trace(self.parent):
                out = self.parent.process_call(primitive, f, tracers, params)
            call = CustomCall(lambda *args: primitive.bind(f, *args, **params), [f])
            return self.listener.custom(primitive, call, tracers, out)

        def process_custom_jvp_call(
            self, primitive: Primitive, fun: Callee, jvp: Callee, tracers: Any, /, *, symbolic_zeros: bool
        ) -> Any:
            with core.set_current_trace(self.parent):
                out = self.parent.process_custom_jvp_call(
                    primitive, fun, jvp, tracers, symbolic_zeros=symbolic_zeros
                )
            bind = functools.partial(primitive.bind, subfuns=(fun, jvp), symbolic_zeros=symbolic_zeros)
            return self.listener.custom(primitive, CustomCall(bind, (fun, jvp)), tracers, out)

        def process_custom_vjp_call(
            self, primitive: Primitive, fun: Callee, fwd: Callee, bwd: Callee,
            tracers: Operands, /, *, out_trees: object, symbolic_zeros: bool,
        ) -> Any:  # fmt: skip
            with core.set_current_trace(self.parent):
                out = self.parent.process_custom_vjp_call(
                    primitive, fun, fwd, bwd, tracers, out_trees=out_trees, symbolic_zeros=symbolic_zeros
                )
            params = {"subfuns": (fun, fwd, bwd), "out_trees": out_trees, "symbolic_zeros": symbolic_zeros}
            call = CustomCall(lambda *args: primitive.bind(*args, **params), (fun, fwd, bwd))
            return self.listener.custom(primitive, call, tracers, out)

        def process_shard_map(self, primitive: Primitive, fun: Any, tracers: Any, /, **params: Any) -> Any:
            with core.set_current_trace(self.parent):
                out = self.parent.process_shard_map(primitive, fun, tracers, **params)
            call = CustomCall(lambda *args: primitive.bind(fun, *args, **params), [])
            return self.listener.custom(primitive, call, tracers, out)

    return RecordingTrace


@functools.cache
def _core() -> ModuleType:
    """Return JAX' module of traces, checked."""
    try:
        core = importlib.import_module("jax._src.core")
    except ImportError as error:
        raise _unsupported("jax._src.core") from error
    check_jax(core)
    return core


def check_jax(core: Any) -> None:
    """Check that the installed JAX has the private names on which this file relies.

    Raises:
        BackendError: naming the first that is missing, or has other parameters.
    """
    for path, parameters in RELIED_ON.items():
        found = core
        for name in path.split("."):
            found = getattr(found, name, None)
        if found is None:
            raise _unsupported(f"jax._src.core.{path}")
        if parameters:
            given = inspect.signature(found).parameters
            if not set(parameters) <= set(given):
                raise _unsupported(f"jax._src.core.{path}({', '.join(parameters)})")


def _unsupported(name: str) -> BackendError:
    return BackendError(
        f"A GradientTape in eager code needs a JAX with `{name}`, which is private. Received: JAX "
        f"{jax.__version__}. Put the step into a function decorated with `@unisono.function`, or into the "
        "one given to `strategy.run`, where a tape needs public names alone; or install another JAX: "
        "pip install 'jax==0.10.2'"
    )
