"""What an eager tape has recorded, and the trace by which it does so.

Only operations on watched arrays, and on what was computed of them, are recorded. JAX's arrays do not change:
an array is the same value as long as it is the same object, and the recording keeps it. So that an array that
a variable holds can be told from the same array elsewhere, a variable that is read gets a new array object of
the same memory: `v.assign(2 * x)` then separates `v` from `x`, as in TensorFlow.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import keras
import numpy as np

from unisono._errors import InvalidTypeError
from unisono._types import Tree
from unisono.step._keras_internals import store_value, stored_value
from unisono.step.eager._jax_internals import CustomCall, Operand, current_trace, recording_trace, tracing_by
from unisono.step.eager._operation import Operation, is_differentiable, links_of
from unisono.step.variables._recorders import THREAD, current_recorder

#: From variables and the derivatives by outputs to the derivatives by the inputs, and by the variables.
Backward = Callable[..., Sequence[jax.Array | None]]

#: Stands for a function with a derivative that a user gave.
_CUSTOM_GRADIENT = jex.Primitive("custom_gradient")


class TapeRecording:
    """The operations that one tape has recorded."""

    def __init__(self, watches_variables: bool) -> None:
        self._watches_variables = watches_variables
        self._watched_variables: dict[int, keras.Variable] = {}
        self.operations: list[Operation] = []
        #: By id: the watched arrays, and those computed of them. They are kept, so that no id is used again.
        self.live: dict[int, jax.Array] = {}
        #: By the variable's id: the arrays that were read of it.
        self.reads: dict[int, dict[int, jax.Array]] = {}
        #: By memory: arrays of the host that are watched, and JAX's arrays that stand for them.
        self.on_host: dict[Hashable, tuple[np.ndarray, jax.Array]] = {}

    @property
    def variables(self) -> tuple[keras.Variable, ...]:
        """The variables that are watched."""
        return tuple(self._watched_variables.values())

    def watch(self, value: object) -> None:
        """Watch a variable, or an array."""
        if isinstance(value, keras.Variable):
            self._watched_variables[id(value)] = value
        elif isinstance(value, jax.Array):
            if is_differentiable(value):
                self.live[id(value)] = value
        elif isinstance(value, np.ndarray) and hasattr(value, "numpy"):
            self._watch_on_host(value)
        else:
            raise InvalidTypeError(
                f"A tape watches variables and tensors. Received: {type(value).__name__} {value!r}. Write "
                "`x = tf.convert_to_tensor(x)`, or `x = jnp.asarray(x)`, before `tape.watch(x)`."
            )

    def _watch_on_host(self, value: np.ndarray) -> None:
        if value.dtype != jax.dtypes.canonicalize_dtype(value.dtype):
            raise InvalidTypeError(
                "A tape watches arrays of types that JAX computes with. Received: an element of a dataset of "
                f"{value.dtype}. Write `x = tf.convert_to_tensor(x)` before `tape.watch(x)`."
            )
        array = jnp.array(value)
        self.on_host[_memory_of(value)] = value, array
        self.live[id(array)] = array

    def watches(self, variable: keras.Variable) -> bool:
        """Return whether a variable that is read now is watched."""
        if id(variable) in self._watched_variables:
            return True
        if not (self._watches_variables and variable.trainable):
            return False
        self._watched_variables[id(variable)] = variable
        return True

    def read(self, variable: keras.Variable, array: jax.Array) -> None:
        """Note that a watched variable was read."""
        if is_differentiable(array):
            self.live[id(array)] = array
            self.reads.setdefault(id(variable), {})[id(array)] = array

    def arrays_of(self, source: keras.Variable | jax.Array | np.ndarray) -> Sequence[jax.Array]:
        """Return the arrays that stand for a source: for a variable, all that were read of it."""
        if isinstance(source, keras.Variable):
            return list(self.reads.get(id(source), {}).values())
        if isinstance(source, (keras.Layer, str, int, float)):
            raise InvalidTypeError(
                f"A source must be a variable or a watched tensor. Received: {type(source).__name__} "
                f"{source!r:.100}. Write `model.trainable_variables`, for example."
            )
        if isinstance(source, np.ndarray):
            found = self.on_host.get(_memory_of(source))
            return [] if found is None else [found[1]]
        return [source]

    def note(self, operation: Operation) -> None:
        """Record an operation, if its outputs depend on what is watched."""
        live, is_needed = self.live, False
        for i, out in enumerate(operation.outs):
            if is_differentiable(out) and any(id(x) in live for x in operation.inputs_of(i)):
                is_needed = True
                live[id(out)] = out
        if is_needed:
            self.operations.append(operation)


class Recorder:
    """Notes the operations of a thread, for the tapes that record there."""

    def __init__(self) -> None:
        self.recordings: list[TapeRecording] = []
        self.trace = recording_trace(self)
        self._entered = contextlib.ExitStack()
        #: By the variable's id: the array object that this recorder gave it.
        self._own: dict[int, jax.Array] = {}

    def start(self, recording: TapeRecording) -> None:
        """Let a tape record."""
        if not self.recordings:
            self._entered.enter_context(tracing_by(self.trace))
            THREAD.recorders.append(self)
        # What a variable gave before does not count for this tape.
        self._own.clear()
        self.recordings.append(recording)

    def stop(self, recording: TapeRecording) -> None:
        """Let a tape record no more."""
        self.recordings.remove(recording)
        if not self.recordings:
            THREAD.recorders.remove(self)
            self._entered.close()
            self._own.clear()

    def is_live(self, value: object) -> bool:
        """Return whether a tape watches an array, or what it was computed of."""
        return any(id(value) in r.live for r in self.recordings)

    # --- what the trace tells -------------------------------------------------------------------------------

    def prepared(self, args: Sequence[Operand], params: Mapping[str, Any]) -> tuple[Sequence[Any], Any]:
        """Return the arguments and parameters with which an operation is to run."""
        if any(r.on_host for r in self.recordings):
            args = [self._on_device(x) for x in args]
        # The arrays are needed again for the derivative.
        if any(params.get("donated_invars", ())) and any(self.is_live(x) for x in args):
            params = {**params, "donated_invars": (False,) * len(params["donated_invars"])}
        return args, params

    def _on_device(self, value: Operand) -> Operand:
        found = None if isinstance(value, jax.Array) else self.watched_array(np.asarray(value))
        return value if found is None else found

    def watched_array(self, value: np.ndarray) -> jax.Array | None:
        """Return the array that stands for an array of the host; None where no tape watches that."""
        for recording in self.recordings:
            if recording.on_host and (found := recording.on_host.get(_memory_of(value))) is not None:
                return found[1]
        return None

    def operation(
        self, primitive: jex.Primitive, params: Mapping[str, Any], args: Sequence[Operand], out: Any
    ) -> Any:
        """Record an operation."""
        if not any(self.is_live(x) for x in args):
            return out
        outs = self._new_objects(args, out if primitive.multiple_results else [out])
        if params.get("compiler_options_kvs"):
            # JAX takes options for whole programs alone, and this one becomes a part of its derivative.
            params = {**params, "compiler_options_kvs": ()}
        self._note(
            Operation(primitive, params, None, _kept(args), outs, links_of(primitive, params, len(outs)))
        )
        return list(outs) if primitive.multiple_results else outs[0]

    def custom(self, primitive: jex.Primitive, call: CustomCall, args: Sequence[Operand], out: Tree) -> Tree:
        """Record a call of a function with a derivative of its own."""
        if not any(self.is_live(x) for x in args):
            return out
        leaves, structure = jax.tree.flatten(out)
        outs = self._new_objects(args, leaves)
        self._note(Operation(primitive, {}, call, _kept(args), outs))
        result: Tree = jax.tree.unflatten(structure, outs)
        return result

    def call(self, function: Callable[[], tuple[Tree, Backward]], args: Sequence[jax.Array]) -> Tree:
        """Call a function that gives its result and its derivative; record the call as one operation.

        Args:
            function: returns the outputs, and a function that gets the variables that were read and the
                derivatives by the outputs, and returns those by the arguments and by the variables.
        """
        seen = TapeRecording(True)
        self.recordings.append(seen)
        try:
            with tracing_by(self.trace.parent):
                out, backward = function()
        finally:
            self.recordings.remove(seen)
        read = [(v, array) for v in seen.variables for array in seen.arrays_of(v)]
        inputs = [*args, *(array for _, array in read)]
        if not any(self.is_live(x) for x in inputs):
            return out
        leaves, structure = jax.tree.flatten(out)
        outs = self._new_objects(inputs, [jnp.asarray(x) for x in leaves])
        given = functools.partial(backward, [v for v, _ in read])
        self._note(Operation(_CUSTOM_GRADIENT, {}, None, _kept(inputs), outs, None, given))
        result: Tree = jax.tree.unflatten(structure, outs)
        return result

    def _note(self, operation: Operation) -> None:
        for recording in self.recordings:
            recording.note(operation)

    def _new_objects(self, args: Sequence[Operand], outs: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Return outputs none of which is an input: an array object stands for one value."""
        given = {id(x) for x in args}
        return tuple(self._alias(x) if id(x) in given else x for x in outs)

    def _alias(self, array: jax.Array) -> jax.Array:
        with tracing_by(self.trace.parent):
            return new_object(array)

    def read(self, variable: keras.Variable) -> None:
        """Note that a variable is read, and give it an array object of its own."""
        stored = stored_value(variable)
        if not isinstance(stored, jax.Array):
            return
        watching = [r for r in self.recordings if r.watches(variable)]
        if not watching and not self.is_live(stored):
            return
        if self._own.get(id(variable)) is not stored:
            stored = self._own[id(variable)] = self._alias(stored)
            store_value(variable, stored)
        for recording in watching:
            recording.read(variable, stored)

    def read_as(self, variable: keras.Variable, value: jax.Array) -> None:
        """Note that a variable is read whose value was computed while no tape recorded."""
        for recording in self.recordings if self.is_current else ():
            if recording.watches(variable):
                recording.read(variable, value)

    @property
    def is_current(self) -> bool:
        """Whether this recorder gets the operations of this thread, and not JAX, which traces."""
        return self.trace is current_trace()

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Return a block in which no tape records."""
        return tracing_by(self.trace.parent) if self.is_current else contextlib.nullcontext()


def recorder_here() -> Recorder:
    """Return the recorder that gets this thread's operations, or a new one."""
    return recording_here() or Recorder()


def recording_here() -> Recorder | None:
    """Return the recorder that gets this thread's operations; None while JAX traces, or no tape records."""
    recorder = current_recorder()
    return recorder if isinstance(recorder, Recorder) and recorder.is_current else None


def watched_array(value: np.ndarray) -> jax.Array | None:
    """Return the array that stands for an array of the host, where a tape watches that."""
    recorder = recording_here()
    return None if recorder is None else recorder.watched_array(value)


def new_object(array: jax.Array) -> jax.Array:
    """Return another array object of the same memory; for a tracer, a copy."""
    if isinstance(array, jax.core.Tracer) or array.weak_type or not array.is_fully_addressable:
        return jnp.array(array, copy=True)
    if len(array.sharding.device_set) == 1:
        return array.addressable_data(0)
    parts = [s.data for s in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def _kept(args: Sequence[Operand]) -> tuple[Operand, ...]:
    """Return inputs as they are now: NumPy's arrays may change."""
    return tuple(
        x if isinstance(x, (jax.Array, bool, int, float, complex)) else np.array(np.asarray(x)) for x in args
    )


def _memory_of(array: np.ndarray) -> Hashable:
    place = array.__array_interface__
    return place["data"][0], array.shape, array.strides, array.dtype.str
