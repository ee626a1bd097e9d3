"""`GradientTape` and `value_and_grad`: derivatives of stateful steps, by re-execution.

In a step, `tape.gradient(target, sources)` runs the step once more up to that call, with the sources as
arguments, and differentiates that function with JAX. The second forward pass is removed by
XLA, so that the compiled step does the work of `jax.value_and_grad` (a test counts its flops).

In eager code a tape records what is computed, see `eager/_recording`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, ParamSpec, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import keras

from unisono._context import Context, ReplicaContext, current
from unisono._errors import InvalidArgumentError, InvalidTypeError, TapeError
from unisono._features import load
from unisono._types import PyTree
from unisono.step._differentiate import Gradients, gradient_of, total_of
from unisono.step._engines import TurnEngine
from unisono.step._program import Program, ReplicaFrame, Run, Substitution, current_frame
from unisono.step._scope import StateScope
from unisono.step._value_handle import VariableValue, as_read
from unisono.step.variables._recorders import require_recording

Params = ParamSpec("Params")
Value = TypeVar("Value")

if TYPE_CHECKING:
    from unisono.step.eager._recording import Recorder, TapeRecording


@dataclasses.dataclass(frozen=True)
class _Request:
    """What a replica brings to a `tape.gradient`: its target, and its variables' values."""

    target: PyTree
    weights: PyTree
    values: tuple[jax.Array, ...]
    #: How many weights there are for each element of `target`, each of which gives a derivative; 0 for one.
    count: int = 0


class GradientTape:
    """Record a computation and differentiate it, as `tf.GradientTape` does.

    Works in functions given to `strategy.run` or decorated with `unisono.function`, and in eager code.
    Trainable variables are watched by themselves; other tensors after `tape.watch(tensor)`.

    Args:
        persistent: allow more than one `gradient` call.
        watch_accessed_variables: when False, `gradient` gives None for variables that were not
            given to `watch`.

    Raises:
        TapeError: when a tape that is not persistent is used twice.

    >>> import jax.numpy as jnp
    >>> x = jnp.asarray(3.0)
    >>> with GradientTape() as tape:
    ...     tape.watch(x)
    ...     y = x * x
    >>> float(tape.gradient(y, x))
    6.0
    """

    def __init__(self, persistent: bool = False, watch_accessed_variables: bool = True) -> None:
        self._persistent = persistent
        self._watch_variables = watch_accessed_variables
        self._frame: ReplicaFrame | None = None
        self._number = 0
        self._entered_at = 0
        self._values: dict[int, Any] = {}
        self._watched: list[jax.Array] = []
        self._watched_variables: dict[int, keras.Variable] = {}
        self._used = False
        #: In eager code: what was recorded, until a tape that is not persistent was used; where it records.
        self._recording: TapeRecording | None = None
        self._read: tuple[keras.Variable, ...] = ()
        self._recorder: Recorder | None = None

    def __enter__(self) -> GradientTape:
        self._frame = current_frame()
        if self._frame is None:
            self._record()
        else:
            self._enter_step(self._frame)
        return self

    def _record(self) -> None:
        if self._recorder is not None:
            raise TapeError(
                "A tape is entered once at a time. Received: a tape that is recording. Write another "
                "`with unisono.GradientTape() as inner:`."
            )
        self._recording = self._recording or load("recording of eager code")(self._watch_variables)
        recorder = self._recorder = load("recorder of eager code")()
        recorder.start(self._recording)

    def _stop(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None and self._recording is not None:
            recorder.stop(self._recording)

    def _enter_step(self, frame: ReplicaFrame) -> None:
        # By number, because a re-execution makes another tape object at the same place.
        self._number = frame.enter_tape()
        self._entered_at = frame.meetings
        # The derivative is taken at these values, also by variables that the step assigns later.
        self._values = dict(frame.scope.state_mapping)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def watch(self, tensor: PyTree) -> None:
        """Make `tensor` (a pytree of arrays or variables) a possible source of `gradient`."""
        frame = self._frame
        if frame is None:
            for leaf in jax.tree.leaves(tensor):
                require_recording(self._recording).watch(leaf)
            return
        for leaf in jax.tree.leaves(tensor):
            if isinstance(leaf, keras.Variable):
                self._watched_variables[id(leaf)] = leaf
                continue
            frame.watched[self._number, len(self._watched)] = leaf
            self._watched.append(leaf)

    def gradient(
        self,
        target: PyTree,
        sources: PyTree,
        output_gradients: PyTree = None,
        unconnected_gradients: Literal["none", "zero"] | enum.StrEnum = "none",
    ) -> PyTree:
        """Return the derivative of the sum of `target` by each of `sources`.

        Args:
            target: array, or pytree of arrays, computed since the tape was entered.
            sources: variables and watched tensors; a list, or any pytree of them.
            output_gradients: weights for `target`, of the same structure; default ones.
            unconnected_gradients: `"none"` gives None, and `"zero"` zeros, for a source that
                `target` does not depend on.

        Returns:
            Arrays of the sources' shapes, in the structure of `sources`.
        """
        leaves, structure = jax.tree.flatten(sources)
        grads = self._gradients(target, leaves, output_gradients)
        if unconnected_gradients == "zero":
            grads = [
                jnp.zeros(s.shape, s.dtype) if g is None else g for s, g in zip(leaves, grads, strict=True)
            ]
        return jax.tree.unflatten(structure, grads)

    def jacobian(
        self,
        target: jax.Array,
        sources: PyTree,
        unconnected_gradients: Literal["none", "zero"] | enum.StrEnum = "none",
        parallel_iterations: int | None = None,
        experimental_use_pfor: bool = True,
    ) -> PyTree:
        """Return the derivative of each element of `target` by each of `sources`.

        Args:
            target: array, computed since the tape was entered.
            sources: as for `gradient`.
            unconnected_gradients: as for `gradient`.
            parallel_iterations: has no effect: one program computes all elements.
            experimental_use_pfor: likewise.

        Returns:
            Arrays of shape `(*target.shape, *source.shape)`, in the structure of `sources`.
        """
        size = math.prod(target.shape)
        weights = jnp.eye(size, dtype=target.dtype).reshape(size, *target.shape)
        leaves, structure = jax.tree.flatten(sources)
        grads = self._gradients(target, leaves, weights, size)
        if unconnected_gradients == "zero":
            pairs = zip(leaves, grads, strict=True)
            grads = [jnp.zeros((size, *s.shape), s.dtype) if g is None else g for s, g in pairs]
        grads = [None if g is None else g.reshape(*target.shape, *g.shape[1:]) for g in grads]
        return jax.tree.unflatten(structure, grads)

    def batch_jacobian(
        self,
        target: jax.Array,
        source: jax.Array,
        unconnected_gradients: Literal["none", "zero"] | enum.StrEnum = "none",
        parallel_iterations: int | None = None,
        experimental_use_pfor: bool = True,
    ) -> jax.Array | None:
        """Return the derivative of each row of `target` by the same row of `source`.

        Args:
            target: array, of which each row depends on one row of `source`.
            source: a tensor given to `watch`.
            unconnected_gradients: as for `gradient`.
            parallel_iterations: has no effect: one program computes all elements.
            experimental_use_pfor: likewise.

        Returns:
            An array of shape `(rows, *target.shape[1:], *source.shape[1:])`.
        """
        rows, *inner = target.shape
        size = math.prod(inner)
        each = jnp.eye(size, dtype=target.dtype).reshape(size, 1, *inner)
        # The sum over the rows: a row's derivative is this row's alone.
        (grad,) = self._gradients(target, [source], jnp.broadcast_to(each, (size, rows, *inner)), size)
        shape = (rows, *inner, *source.shape[1:])
        if grad is None:
            return jnp.zeros(shape, source.dtype) if unconnected_gradients == "zero" else None
        return jnp.moveaxis(grad, 0, 1).reshape(shape)

    def stop_recording(self) -> contextlib.AbstractContextManager[None]:
        """Record nothing in a block, in eager code.

        Raises:
            TapeError: in a step, which is differentiated as a whole, or where the tape does not record.
        """
        if self._frame is not None:
            raise TapeError(
                "A GradientTape differentiates a step by executing it again, and records nothing. Received: "
                "`stop_recording()`. Write `keras.ops.stop_gradient(value)` around what is not to be "
                "differentiated."
            )
        if self._recorder is None:
            raise TapeError(
                "`stop_recording` is for a tape that records. Received: one that does not. Call it inside "
                "`with unisono.GradientTape(persistent=True) as tape:`."
            )
        return self._stopped()

    @contextlib.contextmanager
    def _stopped(self) -> Iterator[None]:
        self._stop()
        try:
            yield
        finally:
            # A gradient within the block may have used the tape.
            self._record()

    def reset(self) -> None:
        """Forget what was recorded and watched; record anew."""
        self._watched.clear()
        self._watched_variables.clear()
        if self._frame is not None:
            self._enter_step(self._frame)
            return
        require_recording(self._recording)
        self._stop()
        self._recording = None
        self._record()

    def watched_variables(self) -> tuple[keras.Variable, ...]:
        """Return the variables that were watched, in the order in which they were read.

        Raises:
            TapeError: in a step, which knows them only at its end.
        """
        if self._frame is not None:
            raise TapeError(
                "A step knows its variables at its end. Received: `watched_variables()` in a step. Write "
                "`model.trainable_variables`."
            )
        # A recording ends with the gradient.
        return (
            self._read
            if self._recording is None and self._read
            else require_recording(self._recording).variables
        )

    def _gradients(
        self, target: PyTree, sources: Sequence[keras.Variable | jax.Array], weights: PyTree, count: int = 0
    ) -> list[jax.Array | None]:
        """Return the gradients by a list of sources; with a `count`, stacked ones for as many weights."""
        frame = self._frame
        if frame is None:
            return self._recorded_gradients(target, sources, weights, each=bool(count))
        if self._used and not self._persistent:
            raise TapeError(
                "A tape that is not persistent gives one gradient. Received: a second call. "
                "Write `GradientTape(persistent=True)`."
            )
        self._used = True
        variables = [s for s in sources if isinstance(s, keras.Variable)]
        positions = tuple(self._position(s) for s in sources if not isinstance(s, keras.Variable))
        values = tuple(self._value_of(frame, v) for v in variables)
        request = _Request(target, weights, values, count)
        plan = _GradientPlan(self._number, self._entered_at, tuple(variables), positions)
        found = frame.meet(request, lambda number, requests: plan.solve(frame.run, number, requests))
        of_variables, of_tensors = iter(found[0]), iter(found[1])
        grads = [next(of_variables) if isinstance(s, keras.Variable) else next(of_tensors) for s in sources]
        if not self._watch_variables:
            grads = [self._if_watched(s, g) for s, g in zip(sources, grads, strict=True)]
        return grads

    def _recorded_gradients(
        self, target: PyTree, sources: Sequence[keras.Variable | jax.Array], weights: PyTree, each: bool
    ) -> list[jax.Array | None]:
        recording = require_recording(self._recording)
        targets = [t.value if isinstance(t, keras.Variable) else t for t in jax.tree.leaves(target)]
        if not targets or not all(hasattr(t, "dtype") for t in targets):
            raise InvalidTypeError(
                f"A target is a tensor, or a structure of tensors. Received: {target!r:.200}. Give "
                "`tape.gradient` what was computed inside its `with` block."
            )
        if not self._persistent:
            self._stop()
            # What was recorded ends with this call.
            self._read, self._recording = recording.variables, None
        arrays = [recording.arrays_of(s) for s in sources]
        differentiate = load("derivative of eager code")
        return differentiate(recording, targets, arrays, weights, each)  # type: ignore[no-any-return]

    def _if_watched(self, source: keras.Variable | jax.Array, grad: jax.Array | None) -> jax.Array | None:
        unwatched = isinstance(source, keras.Variable) and id(source) not in self._watched_variables
        return None if unwatched else grad

    def _value_of(self, frame: ReplicaFrame, variable: keras.Variable) -> Any:
        value = self._values.get(id(variable))
        return as_read(frame.scope.get_current_value(variable) if value is None else value)

    def _position(self, source: keras.Variable | jax.Array) -> int:
        for position, tensor in enumerate(self._watched):
            if tensor is source:
                return position
        raise InvalidArgumentError(
            "A source must be a variable, or a tensor given to `tape.watch` on this tape. "
            f"Received: {type(source).__name__} {source!r}. Call `tape.watch(source)` inside the `with` "
            "block, before it is used."
        )


@dataclasses.dataclass(frozen=True)
class _GradientPlan:
    """Which derivative to take: of which tape, by which variables and watched tensors."""

    tape: int
    entered_at: int
    variables: tuple[keras.Variable, ...]
    positions: tuple[int, ...]

    def solve(self, run: Run, number: int, requests: Sequence[_Request]) -> list[tuple[Gradients, Gradients]]:
        """Return, for each body, its gradients by variables and by watched tensors."""
        # What met before the tape was entered does not depend on the substituted values.
        known = {k: v for k, v in run.known.items() if k < self.entered_at}

        def replay(
            values: list[tuple[jax.Array, ...]], which: jax.Array | None = None
        ) -> tuple[jax.Array, list[list[jax.Array]]]:
            nested = Run(run.program, [self._with(run, i, v) for i, v in enumerate(values)], dict(known))
            totals, watched = [], []
            for i in range(len(requests)):
                request, frame = nested.operand_at(i, number)
                weights = request.weights if which is None else request.weights[which]
                totals.append(total_of(request.target, weights))
                watched.append([frame.watched[self.tape, p] for p in self.positions])
            # Of all bodies: through a collective, one replica's target depends on the others' sources.
            return sum(totals[1:], totals[0]), watched

        values, count = [request.values for request in requests], requests[0].count
        if not count:
            return gradient_of(replay, values)

        def each(which: jax.Array) -> list[tuple[Gradients, Gradients]]:
            return gradient_of(functools.partial(replay, which=which), values)

        found: list[tuple[Gradients, Gradients]] = jax.vmap(each)(jnp.arange(count))
        return found

    def _with(self, run: Run, index: int, values: tuple[jax.Array, ...]) -> tuple[Substitution, ...]:
        own = Substitution(self.tape, tuple(zip(self.variables, values, strict=True)))
        return (*run.substitutions[index], own)


#: What a function returned, its gradients, and the new values of what it wrote.
_Derivative: TypeAlias = tuple[Value, list[jax.Array], list[tuple[keras.Variable, VariableValue]]]


@dataclasses.dataclass(frozen=True)
class _Closure(Generic[Value]):
    """What a replica brings to a `value_and_grad`: its function, and the state around it."""

    fn: Callable[[], Value]
    scope: StateScope
    values: tuple[jax.Array, ...]


def value_and_grad(
    fn: Callable[Params, Value], variables: Sequence[keras.Variable], has_aux: bool = False
) -> Callable[Params, tuple[Value, list[jax.Array]]]:
    """Return a function that gives `fn`'s value and its derivative by `variables`.

    The JAX way to write what a `GradientTape` records, for functions that read and write Keras
    variables. Works in a replica, in `unisono.function` and, op by op, outside of both.

    Args:
        fn: returns a scalar, or `(scalar, aux)` with `has_aux`.
        variables: `keras.Variable`s; state that `fn` writes to others is kept.
        has_aux: whether `fn` returns a pair.

    Returns:
        A function of `fn`'s arguments that returns `(value, gradients)`, where `value` is what
        `fn` returns and `gradients` a list of arrays, one for each variable.

    >>> x = keras.Variable(3.0)
    >>> [float(part) for part in jax.tree.leaves(value_and_grad(lambda: x * x, [x])())]
    [9.0, 6.0]
    """
    wanted = list(variables)

    def differentiated(*args: Params.args, **kwargs: Params.kwargs) -> tuple[Value, list[jax.Array]]:
        frame = current_frame()
        scope = frame.scope if frame else StateScope()
        values = tuple(as_read(scope.get_current_value(v)) for v in wanted)
        closure = _Closure(lambda: fn(*args, **kwargs), scope, values)
        solve = _value_and_grad_solver(wanted, has_aux, current())
        if frame:
            out, grads, updates = frame.meet(closure, solve)
        else:
            out, grads, updates = solve(0, [closure])[0]
        # Only here: within the derivative the new values are tracers of it.
        for variable, value in updates:
            variable.assign(value)
        return out, grads

    return differentiated


def _value_and_grad_solver(
    variables: list[keras.Variable], has_aux: bool, context: Context | None
) -> Callable[[int, list[_Closure[Value]]], list[_Derivative[Value]]]:
    """The combine function of a `value_and_grad` meeting point."""

    def solve(_: int, closures: list[_Closure[Value]]) -> list[_Derivative[Value]]:
        def total(
            values: list[tuple[jax.Array, ...]],
        ) -> tuple[jax.Array, list[tuple[Value, list[VariableValue]]]]:
            run = Run(_closures_program(closures, variables, values, context))
            outcomes = [run.complete(i) for i in range(len(closures))]
            losses = [out[0] if has_aux else out for out, _ in outcomes]
            scopes = [frame.scope for _, frame in outcomes]
            updates = [[(v, s.state_mapping[k]) for k, v in s.written.items()] for s in scopes]
            # Variables are no pytrees: carry their new values through JAX and pair them after.
            names.extend([v for v, _ in u] for u in updates)
            carried = [(out, [x for _, x in u]) for (out, _), u in zip(outcomes, updates, strict=True)]
            return sum(losses[1:], losses[0]), carried

        names: list[list[keras.Variable]] = []
        (_, carried), grads = jax.value_and_grad(total, has_aux=True)([c.values for c in closures])
        return [
            (out, list(grad), list(zip(named, new, strict=True)))
            for (out, new), grad, named in zip(carried, grads, names, strict=True)
        ]

    return solve


def _closures_program(
    closures: Sequence[_Closure[Value]],
    variables: list[keras.Variable],
    values: list[tuple[jax.Array, ...]],
    context: Context | None,
) -> Program:
    """A program whose bodies are the closures, inside the state around each."""

    def scope_of(i: int) -> Callable[[], StateScope]:
        return lambda: StateScope(zip(variables, values[i], strict=True), parent=closures[i].scope)

    def context_of(frame: ReplicaFrame) -> Context | None:
        if context is None or context.replica is None:
            return None
        return dataclasses.replace(context, replica=_rebound(context.replica, frame))

    indices = range(len(closures))
    return Program([c.fn for c in closures], [scope_of(i) for i in indices], [context_of for _ in indices])


def _rebound(replica: ReplicaContext, frame: ReplicaFrame) -> ReplicaContext:
    """The same replica, for the frame of a nested program."""
    # Replicas in one `shard_map` body meet inside JAX's own collectives, and need no frame.
    if not isinstance(replica._engine, TurnEngine):
        return replica
    engine = TurnEngine(frame, replica.strategy.cross_device_ops, replica._engine.is_empty)
    return ReplicaContext(replica.strategy, engine)
