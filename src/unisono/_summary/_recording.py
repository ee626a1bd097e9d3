"""How a summary reaches its file: at once, or from a compiled step while it runs.

A running program sends its values from threads of its own, some time after the step was called.
So the defaults (writer, step, condition) are the process', they are read when a value arrives,
and whatever changes them waits first until all values sent have arrived.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._context import current
from unisono._errors import ContextError, InvalidArgumentError, InvalidTypeError
from unisono._mesh import AXIS
from unisono._values import PerReplica
from unisono.step._program import current_frame

# --- writers -----------------------------------------------------------------------------------


class Sink(Protocol):
    """Where a writer's values go: `unisono._summary._event_files.EventFile`, or nowhere."""

    def add(self, kind: str, tag: str, step: int, data: Any, **options: Any) -> None:
        """Write one value."""

    def flush(self) -> None:
        """Bring to the disk what was added."""

    def close(self) -> None:
        """Flush and end."""


class Nowhere:
    """The sink of a process that writes nothing."""

    def add(self, kind: str, tag: str, step: int, data: Any, **options: Any) -> None:
        """Drop the value."""

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing is open."""


class SummaryWriter:
    """Writes summaries to one event file; made by `create_file_writer`.

    Args:
        sink: where the values go.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        # Events wait in memory: a program may end without `close`.
        weakref.finalize(self, sink.close)

    @contextlib.contextmanager
    def as_default(self, step: Any = None) -> Iterator[SummaryWriter]:
        """Make this the process' default writer for a block, and flush it at the end.

        Args:
            step: the default step inside; None keeps the one that is.
        """
        changes = {"writer": self} if step is None else {"writer": self, "step": checked_step(step)}
        with changed(**changes):
            yield self
            if not is_tracing():
                self.flush()

    def write(self, kind: str, tag: str, step: int, data: Any, **options: Any) -> None:
        """Write a value here, whatever the defaults are.

        Args:
            kind: `"scalar"`, `"histogram"`, `"image"`, `"text"` or `"keras_model"`.
            tag: its name in TensorBoard.
            step: an integer.
            data: a NumPy array or text.
            options: `buckets` of a histogram, `max_outputs` of an image.

        Raises:
            ContextError: when the writer is closed.
        """
        self._sink.add(kind, tag, step, data, **options)

    def flush(self) -> None:
        """Wait for the values of all steps that were started, and bring them to the disk."""
        settle()
        self._sink.flush()

    def close(self) -> None:
        """Flush and close the file; does nothing the second time."""
        try:
            settle()
        finally:
            self._sink.close()


# --- the defaults ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Defaults:
    """Where summaries go, and when.

    Args:
        writer: the default writer, if any.
        step: the default step: an int, an array or a variable.
        condition: whether to write, or a function that says it.
        traced: which of these were set by code while it was traced: they belong to its program.
    """

    writer: SummaryWriter | None = None
    step: Any = None
    condition: Any = True
    traced: frozenset[str] = frozenset()


# Of the process and not of a thread, because running programs send from threads of their own.
_defaults = Defaults()
_programs_send = False
#: What went wrong in threads of running programs, for the next call that can raise.
_failures: list[Exception] = []


@contextlib.contextmanager
def changed(**changes: Any) -> Iterator[None]:
    """Have other defaults in a block."""
    settle()
    before, names = _defaults, set(changes)
    _replace(changes, before.traced | names if is_tracing() else before.traced - names)
    try:
        yield
    finally:
        try:
            settle()
        finally:
            _replace({name: getattr(before, name) for name in changes}, before.traced)


def _replace(changes: dict[str, Any], traced: frozenset[str]) -> None:
    global _defaults
    _defaults = dataclasses.replace(_defaults, **changes, traced=traced)


def get_defaults() -> Defaults:
    """The defaults as they are now."""
    return _defaults


def replace_default_step(step: Any) -> None:
    """Have another default step from now on."""
    settle()
    _replace({"step": step}, _defaults.traced - {"step"})


def settle() -> None:
    """Wait for the values that running programs send, and raise what went wrong with them."""
    if not _programs_send or is_tracing():
        return
    jax.effects_barrier()
    if _failures:
        error = _failures[0]
        _failures.clear()
        raise error


# --- recording -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Constant:
    """Data that are part of a program, because devices hold none of their kind."""

    value: Any


def record(
    kind: str,
    tag: str,
    data: Any,
    step: Any,
    check: Callable[[tuple[int, ...], Any], bool] | None,
    what: str,
    **options: Any,
) -> bool:
    """Write a summary now, or have the program that is traced send it."""
    defaults = _defaults
    if defaults.writer is None:
        return False
    if check is not None:
        data = _checked_data(kind, tag, data, check, what)
    is_traced = is_tracing() or any(isinstance(x, jax.core.Tracer) for x in (data, step))
    if not is_traced and not _holds(defaults.condition):
        return False
    own = _step_of(tag, defaults.step if step is None else step)
    if is_traced:
        # A default that an integer set outside is read when the values arrive.
        is_outside = step is None and "step" not in defaults.traced and not isinstance(own, jax.core.Tracer)
        _send(_Sent(kind, tag, options, defaults, None if is_outside else own), data)
        return True
    value = data.value if isinstance(data, Constant) else np.asarray(data)
    defaults.writer.write(kind, tag, int(own), value, **options)
    return True


def _checked_data(
    kind: str, tag: str, data: Any, check: Callable[[tuple[int, ...], Any], bool], what: str
) -> Any:
    if isinstance(data, PerReplica):
        raise InvalidTypeError(
            f"The data of {kind} {tag!r} must be one value. Received: a PerReplica with one value for each "
            "replica. Write `strategy.reduce('mean', value, axis=None)` first, or write the summary in "
            "the replica."
        )
    if isinstance(data, keras.Variable):
        data = data.value
    if not isinstance(data, jax.Array):
        data = np.asarray(data)
    if not check(data.shape, data.dtype):
        raise InvalidArgumentError(
            f"The data of {kind} {tag!r} must be {what}. Received: shape {data.shape} of {data.dtype}. "
            "Reshape it, or write another kind of summary."
        )
    return data


def checked_step(step: Any) -> Any:
    """A Python int where the value is known, else the array or variable.

    Raises:
        InvalidArgumentError: for what is not an integer.
    """
    if isinstance(step, int) and not isinstance(step, bool):
        return step
    shape, dtype = getattr(step, "shape", None), getattr(step, "dtype", None)
    if shape is None or dtype is None or tuple(shape) != () or not jnp.issubdtype(dtype, jnp.integer):
        raise InvalidArgumentError(
            f"A step must be an integer. Received: step={step!r}. Write `step=int(...)`, or count in an "
            "integer variable."
        )
    if isinstance(step, (keras.Variable, jax.core.Tracer)):
        return step
    return int(step)


def _step_of(tag: str, step: Any) -> Any:
    """The value of a step: an int or a traced one.

    Raises:
        InvalidArgumentError: when there is none.
        ContextError: for a variable that the traced program does not carry.
    """
    if step is None:
        raise InvalidArgumentError(
            f"A summary must have a step. Received: step=None for {tag!r}, and no default step. Write "
            "`step=...`, or `with writer.as_default(step=...):`, or `summary.set_step(...)`."
        )
    step = checked_step(step)
    if not isinstance(step, keras.Variable):
        return step
    value = step.value
    if isinstance(value, jax.core.Tracer):
        return value
    if is_tracing():
        raise ContextError(
            "A variable that is a step must be part of the compiled step. Received: variable "
            f"{step.path!r} for {tag!r}, whose value would never change. Call `summary.set_step(n)` "
            "with an integer before each step."
        )
    return int(value)


def _holds(condition: Any) -> bool:
    return bool(condition() if callable(condition) else condition)


# --- from running programs ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Sent:
    """What is known of a summary while its program is traced.

    Args:
        kind: as for `SummaryWriter.write`.
        tag: likewise.
        options: likewise.
        defaults: those of that moment.
        step: an int, a traced one, or None for the default when the value arrives.
        constant: data that are part of the program.
        is_decided: whether the program itself decides if it sends.
    """

    kind: str
    tag: str
    options: dict[str, Any]
    defaults: Defaults
    step: Any
    constant: Any = None
    is_decided: bool = False


def is_tracing() -> bool:
    """Whether JAX records what this code does, for a program that runs later."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def _send(sent: _Sent, data: Any) -> None:
    """Have the traced program send a value, from its first replica."""
    global _programs_send
    frame = current_frame()
    if frame is not None and frame.stop is not None:
        return  # Executed again for a derivative: the first execution sends.
    is_first = _is_first_replica()
    if is_first is False:
        return
    _programs_send = True
    decision = sent.defaults.condition
    decision = decision() if callable(decision) else decision
    conditions = [c for c in (is_first, decision) if isinstance(c, jax.core.Tracer)]
    arrays: dict[str, Any] = {}
    if isinstance(data, Constant):
        sent = dataclasses.replace(sent, constant=data.value)
    else:
        arrays["data"] = jax.lax.stop_gradient(jnp.asarray(data))
    if isinstance(sent.step, jax.core.Tracer):
        arrays["step"] = sent.step
        sent = dataclasses.replace(sent, step=None)
    sent = dataclasses.replace(sent, is_decided=isinstance(decision, jax.core.Tracer))

    def send() -> None:
        jax.debug.callback(functools.partial(_deliver, sent), arrays)

    if conditions:
        jax.lax.cond(jnp.all(jnp.stack(conditions)), send, lambda: None)
    else:
        send()


def _is_first_replica() -> Any:
    """Whether this replica sends: a bool, or a traced one."""
    # Asked of the mesh, because one batch may run whole on every device, as the only replica.
    if AXIS in jax.sharding.get_abstract_mesh().manual_axes:
        return jax.lax.axis_index(AXIS) == 0
    context = current()
    if context is None or context.replica is None:
        return True
    return context.replica.replica_id_in_sync_group == 0


def _deliver(sent: _Sent, arrays: dict[str, Any]) -> None:
    """Write what a running program sent. JAX calls it in its own thread, where JAX must not be used."""
    try:
        own = {name: getattr(sent.defaults, name) for name in sent.defaults.traced}
        defaults = dataclasses.replace(_defaults, **own)
        if defaults.writer is None or not (sent.is_decided or _holds(defaults.condition)):
            return
        step = int(arrays["step"]) if "step" in arrays else sent.step
        step = _default_on_arrival(sent.tag, defaults.step) if step is None else step
        data = np.asarray(arrays["data"]) if "data" in arrays else sent.constant
        defaults.writer.write(sent.kind, sent.tag, step, data, **sent.options)
    except Exception as error:  # Here it would end the program that runs: `settle` raises it.
        _failures.append(error)


def _default_on_arrival(tag: str, step: Any) -> int:
    if not isinstance(step, int):
        raise InvalidArgumentError(
            "The default step of a compiled step must be an integer, or the variable that it was when the "
            f"step was compiled. Received: default step {step!r} for {tag!r}. Write `summary.set_step(n)`."
        )
    return step
