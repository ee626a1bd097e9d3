"""Write a summary at once, or from a compiled step while it runs.

A running program sends its values from threads of its own, some time after the call of the step. The defaults
(writer, step, condition) therefore belong to the process and not to a thread. They are read when a value
arrives, and every change of them waits first until all values have arrived.

Tests: tests/unit/test_summary.py, tests/virtual/test_summary.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.typing import DTypeLike

from unisono._context import current
from unisono._errors import ContextError, InvalidArgumentError, InvalidTypeError
from unisono._mesh import AXIS
from unisono._types import ArrayLike
from unisono._values import PerReplica
from unisono.step._program import current_frame

if TYPE_CHECKING:
    # Not at run time: its packages are an extra.
    from unisono._summary._event_files import EventFile

#: A step: an integer, or an array or a variable of one.
Step: TypeAlias = "int | np.integer[Any] | jax.Array | keras.Variable"

#: True to write: a bool, a traced bool, or a function that returns one.
Condition: TypeAlias = "bool | jax.Array | Callable[[], bool | jax.Array]"

# --- writers -----------------------------------------------------------------------------------


class SummaryWriter:
    """Writes summaries to one event file; made by `create_file_writer`.

    Args:
        file: the event file; None drops all summaries.

    >>> import tempfile
    >>> import unisono
    >>> writer = unisono.summary.create_file_writer(tempfile.mkdtemp())
    >>> with writer.as_default():
    ...     unisono.summary.scalar("loss", 0.5, step=1)
    True
    >>> writer.close()
    """

    def __init__(self, file: EventFile | None) -> None:
        self._file = file
        if file is not None:
            # Events are buffered in memory, and a program may end without `close`.
            weakref.finalize(self, file.close)

    @contextlib.contextmanager
    def as_default(self, step: Step | None = None) -> Iterator[SummaryWriter]:
        """Make this the process' default writer for a block, and flush it at the end.

        Args:
            step: the default step inside the block; None keeps the present one.
        """
        changes = {"writer": self} if step is None else {"writer": self, "step": checked_step(step)}
        with changed(**changes):
            yield self
            if not is_tracing():
                self.flush()

    def write(self, kind: str, tag: str, step: int, data: ArrayLike, **options: int) -> None:
        """Write a value to this writer, regardless of the defaults.

        Args:
            kind: `"scalar"`, `"histogram"`, `"image"`, `"text"` or `"keras_model"`.
            tag: its name in TensorBoard.
            step: an integer.
            data: a NumPy array or text.
            options: `buckets` of a histogram, `max_outputs` of an image.

        Raises:
            ContextError: when the writer is closed.
        """
        if self._file is not None:
            self._file.add(kind, tag, step, data, **options)

    def flush(self) -> None:
        """Wait for the values of all steps that were started, and write them to the file."""
        settle()
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Flush and close the file; do nothing if it is closed."""
        try:
            settle()
        finally:
            if self._file is not None:
                self._file.close()


# --- the defaults ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Defaults:
    """The default writer, step and condition.

    Args:
        condition: whether to write, or a function that returns it.
        traced: the fields that were set while code was traced: they belong to its program.
    """

    writer: SummaryWriter | None = None
    step: Step | None = None
    condition: Condition = True
    traced: frozenset[str] = frozenset()


_defaults = Defaults()
#: True if any program with summaries was traced: otherwise there is nothing to wait for.
_programs_send = False
#: Errors in threads of running programs, raised by the next `settle`.
_failures: list[Exception] = []


@contextlib.contextmanager
def changed(**changes: Any) -> Iterator[None]:
    """Change defaults for a block."""
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
    """Return the current defaults."""
    return _defaults


def replace_default_step(step: Step | None) -> None:
    """Set the default step."""
    settle()
    _replace({"step": step}, _defaults.traced - {"step"})


def settle() -> None:
    """Wait until the values of running programs have arrived, and raise the first error in handling them."""
    if not _programs_send or is_tracing():
        return
    jax.effects_barrier()
    if _failures:
        error = _failures[0]
        _failures.clear()
        raise error


# --- recording -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class HostData:
    """Data that are part of a program, such as text, of which devices have no arrays."""

    value: ArrayLike


def record(
    kind: str,
    tag: str,
    data: HostData | ArrayLike,
    step: Step | None,
    check: Callable[[tuple[int, ...], DTypeLike], bool] | None,
    what: str,
    **options: int,
) -> bool:
    """Write a summary now, or make the program that is traced send it."""
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
        # A default step that was set outside of the traced code may change between runs: it is read on
        # arrival.
        is_outside = step is None and "step" not in defaults.traced and not isinstance(own, jax.core.Tracer)
        _send(_TracedSummary(kind, tag, options, defaults, None if is_outside else own), data)
        return True
    value = data.value if isinstance(data, HostData) else np.asarray(data)
    defaults.writer.write(kind, tag, int(own), value, **options)
    return True


def _checked_data(
    kind: str, tag: str, data: ArrayLike, check: Callable[[tuple[int, ...], DTypeLike], bool], what: str
) -> ArrayLike:
    if isinstance(data, PerReplica):
        raise InvalidTypeError(
            f"The data of {kind} {tag!r} must be one value. Received: a PerReplica with one value for each "
            "replica. Write `strategy.reduce('mean', value, axis=None)` first, or write the summary inside "
            "the function given to `strategy.run`."
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


def checked_step(step: Step) -> Step:
    """Return a step as a Python int where its value is known, else as the array or variable that it is."""
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


def _step_of(tag: str, step: Step | None) -> Step:
    """Return the value of a step: an int, or a traced integer.

    Raises:
        InvalidArgumentError: when there is none.
        ContextError: for a variable that is not part of the traced program.
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


def _holds(condition: Condition) -> bool:
    return bool(condition() if callable(condition) else condition)


# --- from running programs ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _TracedSummary:
    """The part of a summary that is known while its program is traced."""

    kind: str
    tag: str
    options: dict[str, int]
    defaults: Defaults
    step: Step | None
    constant: ArrayLike = None
    is_decided: bool = False


def is_tracing() -> bool:
    """Return whether JAX is tracing this code."""
    # JAX has no public predicate. Under a trace even a constant operation gives a tracer.
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def _send(sent: _TracedSummary, data: HostData | ArrayLike) -> None:
    """Make the first replica of the traced program send a value."""
    global _programs_send
    frame = current_frame()
    if frame is not None and frame.stop is not None:
        return  # executed again for a derivative; the first execution sends
    is_first = _is_first_replica()
    if is_first is False:
        return
    _programs_send = True
    decision = sent.defaults.condition
    decision = decision() if callable(decision) else decision
    conditions = [c for c in (is_first, decision) if isinstance(c, jax.core.Tracer)]
    arrays: dict[str, jax.Array] = {}
    if isinstance(data, HostData):
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


def _is_first_replica() -> bool | jax.Array:
    """Return whether this replica sends: a bool, or a traced one."""
    # From the mesh, not from the context: a batch that is not divided runs on every device as its only
    # replica.
    if AXIS in jax.sharding.get_abstract_mesh().manual_axes:
        is_first: jax.Array = jax.lax.axis_index(AXIS) == 0
        return is_first
    context = current()
    if context is None or context.replica is None:
        return True
    replica_id: int | jax.Array = context.replica.replica_id_in_sync_group
    return replica_id == 0


def _deliver(sent: _TracedSummary, arrays: dict[str, jax.Array]) -> None:
    """Write the values of a running program. Called in a thread of JAX, in which JAX must not be used."""
    try:
        own = {name: getattr(sent.defaults, name) for name in sent.defaults.traced}
        defaults = dataclasses.replace(_defaults, **own)
        if defaults.writer is None or not (sent.is_decided or _holds(defaults.condition)):
            return
        given = arrays.get("step", sent.step)
        step = _default_on_arrival(sent.tag, defaults.step) if given is None else int(given)
        data = np.asarray(arrays["data"]) if "data" in arrays else sent.constant
        defaults.writer.write(sent.kind, sent.tag, step, data, **sent.options)
    except Exception as error:  # raised here it would abort the running program; `settle` raises it
        _failures.append(error)


def _default_on_arrival(tag: str, step: Step | None) -> int:
    if not isinstance(step, int):
        raise InvalidArgumentError(
            "The default step of a compiled step must be an integer, or the variable that it was when the "
            f"step was compiled. Received: default step {step!r} for {tag!r}. Write `summary.set_step(n)`."
        )
    return step
