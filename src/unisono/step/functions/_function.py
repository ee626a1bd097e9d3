"""`unisono.function`: a whole training step, with `strategy.run` and `reduce` inside, as one program.

Tests: tests/virtual/step/test_function_data.py, tests/virtual/step/test_function_arguments.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, cast

import jax
import keras
import numpy as np

from unisono._context import current, default_strategy, get_strategy
from unisono._errors import (
    ContextError,
    InvalidTypeError,
    MixedStrategyError,
    NeedsValueError,
    OutOfRangeError,
)
from unisono._system._task_reports import process_events
from unisono._types import PyTree, UserValue
from unisono._values import PerReplica
from unisono.step._call_signature import Call, CallArray, Kind
from unisono.step._compiler import Entry
from unisono.step._explain import explain, warn_of_python
from unisono.step._functional import StatePlan, discover
from unisono.step._program import Program, Run, current_frame
from unisono.step._scope import StateScope
from unisono.step.functions._fetching import (
    DataFailure,
    DataReader,
    Sources,
    TraceStop,
    UnreadBatch,
    call_in_python,
    closes_over_iterator,
    is_traceable,
)
from unisono.step.functions._input_signature import InputSignature
from unisono.step.variables._recorders import not_recorded
from unisono.step.variables._variable import UnknownInitialValueError

if TYPE_CHECKING:
    from unisono.step._replicas import Replicas

#: Errors of JAX where code needs the value of what is traced, as `range(steps)` does.
_NEEDS_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
    NeedsValueError,
)


@dataclasses.dataclass(frozen=True, eq=False)
class _DataEnd:
    """In place of a function's result: the data ended, and the function did not expect it."""

    error: Exception

    def as_new(self) -> Exception:
        """The error for one more call: the first one holds the frames of the trace."""
        return type(self.error)(*self.error.args)


class Function:
    """A function that is compiled, once per signature, when it is called.

    Batches that it takes with `next` from iterators among its arguments are arguments of its program,
    fetched at each call. The body of a function that loops over data, or reads them in another way
    that no program can, runs as plain Python: `strategy.run` and other functions in it are compiled. So does
    one that has data among its arguments and needs a value, as in `for _ in range(steps)`.

    Args:
        fn: may read and write Keras variables, create them in its first call, use `GradientTape`,
            call `strategy.run` and `strategy.reduce`, and read data.
        signature: what its arguments must be.

    >>> double = Function(lambda x: 2 * x)
    >>> float(double(3.0))
    6.0
    """

    def __init__(self, fn: Callable[..., Any], signature: InputSignature | None = None) -> None:
        self._fn = fn
        self._signature = signature
        #: Whether a body that needs a value of what is traced runs as plain Python: that of a `tf.function`,
        #: whose `if` and `for` TensorFlow compiles.
        self.may_need_values = False
        #: By signature: the program, or from which iterator one more batch must be fetched first.
        self._steps: dict[Hashable, _SignatureProgram | _DataEnd | int] = {}
        #: The kinds of data among the arguments with which the body runs as plain Python.
        self._in_python: set[Hashable] = set()
        #: Calls for which the function is to be saved, beside those that were made; each in its variants.
        self.requested: list[list[Call]] = []
        self.__name__ = str(getattr(fn, "__name__", type(fn).__name__))
        functools.update_wrapper(self, fn)

    @property
    def python_function(self) -> Callable[..., Any]:
        """The function as it was written."""
        return self._fn

    @property
    def num_programs(self) -> int:
        """How many programs were compiled."""
        return sum(isinstance(step, _SignatureProgram) for step in self._steps.values())

    @property
    def calls(self) -> list[Call]:
        """For each compiled program, the call that it was made for."""
        return [step.call for step in self._steps.values() if isinstance(step, _SignatureProgram)]

    @property
    def input_specs(self) -> PyTree:
        """The specs of `input_signature`, or None."""
        return None if self._signature is None else self._signature.specs

    def stateless(self, call: Call) -> tuple[StatePlan, Callable[..., tuple[Any, list[Any]]]]:
        """Return the variables of a call, and a function of their values and the call's arrays.

        Args:
            call: whose arrays may be stand-ins with a shape and a type.

        Returns:
            The plan; the function, which returns the result and the new values of what it writes.

        Raises:
            ContextError: when the function reads data.
        """
        step = self._build(call, None)
        if not isinstance(step, _SignatureProgram):
            raise ContextError(
                "A function without data among its arguments must read none. Received: "
                f"{self._fn!r}. Pass the iterator as an argument."
            )
        return step.plan, step.traced

    def __call__(self, *args: UserValue, **kwargs: UserValue) -> Any:
        """Run the compiled function; inside another one it becomes a part of that."""
        if self._signature is not None:
            args, kwargs = self._signature.apply(args, kwargs), {}
        if current_frame() is not None:
            self._note(Call.parse(args, kwargs))
            return self._fn(*args, **kwargs)
        call = Call.parse(args, kwargs)
        sources = Sources.of(call)
        kinds = sources.key if sources else ()
        batches: list[tuple[object, object]] = []
        # Strings stay on the host.
        has_strings = any(isinstance(x, np.ndarray) and x.dtype.kind == "O" for x in call.arrays)
        must_loop = has_strings or bool(sources and sources.must_loop) or closes_over_iterator(self._fn)
        if kinds not in self._in_python and not must_loop:
            try:
                return self._run((args, kwargs), call, sources, batches)
            except TraceStop as stopped:
                # Where the data failed, plain Python does what comes before that batch, and raises the error.
                if not isinstance(stopped, DataFailure):
                    self._in_python.add(kinds)
            except Exception as error:
                explain(error, self._fn, "`unisono.function`")
                raise
        if sources and batches:
            args, kwargs = sources.passed((args, kwargs))
        return call_in_python(lambda: self._fn(*args, **kwargs), batches)

    def _note(self, call: Call) -> None:
        """Remember a call in a step, which has no program of its own, for a saved model."""
        noted = call.without_values()
        if noted is not None and all(noted.signature != other[0].signature for other in self.requested):
            self.requested.append([noted])

    def __get__(self, instance: object, owner: type) -> Any:
        """Bind to an object when used as a method."""
        return self if instance is None else BoundFunction(self, instance)

    def _run(
        self, arguments: PyTree, call: Call, sources: Sources | None, batches: list[tuple[object, object]]
    ) -> PyTree:
        """Fetch the batches that the program takes, and run it.

        Raises:
            TraceStop: when the function reads data as no program can.
            DataFailure: when the data raised an error.
        """
        if sources:
            call = sources.call_with(arguments, batches)
        step = self._step(call, sources)
        # How many batches are read is learnt by tracing: a trace that needs one more names its iterator.
        while sources and isinstance(step, int):
            batch = sources.fetch(step)
            batches.append((sources.iterators[step], batch))
            if isinstance(batch, UnreadBatch):
                raise DataFailure
            # Strings and dates stay on the host, where plain Python reads them.
            if not is_traceable(batch):
                raise TraceStop
            call = sources.call_with(arguments, batches)
            step = self._step(call, sources)
        result = step(call, sources) if isinstance(step, _SignatureProgram) else step
        if isinstance(result, _DataEnd):
            raise result.as_new()
        return result

    def _step(self, call: Call, sources: Sources | None) -> _SignatureProgram | _DataEnd | int:
        """What a call needs next: another batch, or a program."""
        context = current()
        key = (call.signature, context.strategy if context else None)
        if key not in self._steps:
            self._steps[key] = self._build(call, sources)
        return self._steps[key]

    def _build(self, call: Call, sources: Sources | None) -> _SignatureProgram | _DataEnd | int:
        trace = _Trace(self._fn, call, sources)
        try:
            _discover(lambda arrays: trace(None, [], arrays), call.arrays)
        except _NEEDS_VALUE as error:
            # With data among the arguments plain Python can do it.
            if sources is None and not self.may_need_values:
                raise
            if sources is None:
                warn_of_python(error, self._fn)
            raise TraceStop from None
        except (Exception, TraceStop):
            if not trace.fetched.is_interrupted:
                raise
        # Asked again here: a bare `except` in the function may have swallowed the interruption.
        if trace.fetched.must_loop:
            raise TraceStop
        if trace.fetched.needs is not None:
            return trace.fetched.needs
        replicas = _sole_replicas(trace.scope.replicas)
        plan = StatePlan.from_cross_replica(trace.scope, replicas.state_layout)
        # Nothing happened before the end of the data: there is no program to run.
        if isinstance(trace.result, _DataEnd) and not any(slot.written for slot in plan.slots):
            return trace.result
        return _SignatureProgram(trace, plan, replicas)


def _discover(step: Callable[[Sequence[CallArray]], object], arrays: list[CallArray]) -> None:
    """Find out what a function touches; create the variables whose initial values it computes."""
    try:
        discover(step, arrays)
    except UnknownInitialValueError:
        # Stand-ins for arrays have no values.
        if any(isinstance(x, (jax.core.Tracer, jax.ShapeDtypeStruct)) for x in arrays):
            raise
        # With values, and without a trace: of all that it does only the variables stay.
        with not_recorded(), keras.StatelessScope():
            step(arrays)
        discover(step, arrays)


class BoundFunction(functools.partial[Any]):
    """A function as a method of an object, with what functions have."""

    def __new__(cls, function: Function, instance: object) -> BoundFunction:
        return super().__new__(cls, function, instance)

    @property
    def function(self) -> Function:
        """The function of all objects of the class."""
        function: Any = self.func
        return cast("Function", function)

    def __getattr__(self, name: str) -> Any:
        """Return what the function has; not `__wrapped__`, which `inspect` would read."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.func, name)


class _Trace:
    """Traces a function's body."""

    def __init__(self, fn: Callable[..., object], call: Call, sources: Sources | None) -> None:
        self._fn, self.call = fn, call
        #: Set for each call, so that the iterators of a past epoch are not kept.
        self.sources = sources
        self.fetched = DataReader(None, [])
        self.scope = StateScope()
        self.result: object = None

    def __call__(
        self, plan: StatePlan | None, values: list[jax.Array], arrays: Sequence[CallArray]
    ) -> object:
        """Return the function's result, or `_DataEnd`; keeps the state at its end."""
        args, kwargs = self.call.rebuild(arrays, _per_replica)
        batches: list[object] = []
        if self.sources is not None:
            args, kwargs, batches = self.sources.restored(args)
        self.fetched = DataReader(self.sources, batches)
        pairs = list(zip(plan.slots, values, strict=True)) if plan else []
        plain = [(s.variable, s.layout.enter(v, in_replica=False)) for s, v in pairs if not s.is_stacked]
        stacked = [(s.variable, v) for s, v in pairs if s.is_stacked]

        def body() -> object:
            try:
                return self._fn(*args, **kwargs)
            except (StopIteration, OutOfRangeError) as error:
                if not self.fetched.has_ended:
                    raise
                # What the function did before counts, so that its program must be run.
                return _DataEnd(error)

        program = Program([body], [lambda: StateScope(plain, stacked)], [lambda _: None], self.fetched)
        self.result, frame = Run(program).complete(0)
        self.scope = frame.scope
        if plan is not None:
            plan.check_known(frame.scope)
        return self.result

    def forget_data(self) -> None:
        """Drop the data of a call: a program outlives them."""
        self.sources, self.fetched = None, DataReader(None, [])


class _SignatureProgram:
    """The program of a function for one signature."""

    def __init__(self, trace: _Trace, plan: StatePlan, replicas: Replicas) -> None:
        self._trace, self.plan = trace, plan
        # Without `run` inside, no other worker needs to take part.
        self._is_step = bool(trace.scope.replicas)
        self._entry = Entry(self.traced, plan, replicas, is_shared=self._is_step)
        # The result holds tracers, which must not outlive their trace.
        trace.result = None

    def __call__(self, call: Call, sources: Sources | None) -> Any:
        """Run the program."""
        # This call's iterators: the program is kept for others of the same types.
        self._trace.sources = sources
        if self._is_step:
            process_events().stepped()
        try:
            return self._entry(call)
        finally:
            self._trace.forget_data()

    @property
    def call(self) -> Call:
        """The call that the program was made for."""
        return self._trace.call

    def traced(self, values: list[jax.Array], arrays: list[jax.Array]) -> tuple[object, list[jax.Array]]:
        """Return the function's result, and the new values of what it writes."""
        try:
            result = self._trace(self.plan, values, arrays)
        except TraceStop:
            raise ContextError(
                "A function must take the same batches each time it is traced. Received: one that took "
                "others the second time. Do not let random numbers or the clock decide about `next`."
            ) from None
        finally:
            self._trace.result = None
        scope = self._trace.scope
        written = [s for s in self.plan.slots if s.written]
        new = [
            scope.copies[id(s.variable)]
            if s.is_stacked
            else s.layout.leave(scope.state_mapping[id(s.variable)], in_replica=False)
            for s in written
        ]
        return result, new


def _per_replica(kind: Kind, part: tuple[object, ...]) -> PerReplica:
    return PerReplica.from_stacked(part[0]) if kind is Kind.SPLIT else PerReplica(part)


def _sole_replicas(used: set[Replicas]) -> Replicas:
    if len(used) > 1:
        raise MixedStrategyError(
            "A function may call `run` of one strategy only. Received: "
            f"{sorted(map(repr, used))}. Write one `@unisono.function` for each."
        )
    if used:
        return next(iter(used))
    # Without `run` in it the function asks for no replicas: any mesh will do.
    return (get_strategy()._replicated or default_strategy())._replicas


def function(
    func: Callable[..., object] | None = None,
    input_signature: Sequence[object] | None = None,
    autograph: bool = True,
    jit_compile: bool | None = None,
    reduce_retracing: bool = False,
    *,
    experimental_autograph_options: object = None,
    experimental_relax_shapes: bool | None = None,
    experimental_compile: bool | None = None,
) -> Any:
    """Compile a function with all its `strategy.run` and `reduce` calls into one program.

    Like `tf.function`: a program is made for each signature (shapes and types of arrays, values
    of Python objects), variables may be created in the first call, and Python side effects
    happen while tracing only. Data are read again at each call; see `Function`.

    Args:
        func: the function; without it, a decorator is returned.
        input_signature: a structure of `unisono.data.TensorSpec`, or of a dataset's `element_spec`, for
            each positional argument. Numbers and lists become arrays of these types, so that other
            numbers need no other program; arrays of other shapes and types are errors.
        autograph: accepted for tf.function's signature, as are all that follow. Python's `if`, `for` and
            `while` are followed while tracing; on the values of arrays use `keras.ops.cond`, `while_loop`.
        jit_compile: every function is compiled by XLA.
        reduce_retracing: a program is made for each shape.
        experimental_autograph_options: as `autograph`.
        experimental_relax_shapes: the old name of `reduce_retracing`.
        experimental_compile: the old name of `jit_compile`.

    Returns:
        A `Function`.

    Raises:
        InvalidTypeError: when `func` is not callable, or `input_signature` not a list of specs.

    >>> import numpy as np
    >>> @function
    ... def double(x):
    ...     return x * 2
    >>> float(double(np.float32(3)))
    6.0
    """
    if func is None:
        return functools.partial(function, input_signature=input_signature)
    if not callable(func):
        raise InvalidTypeError(
            f"`function` needs a function. Received: {func!r}. Write `@unisono.function` or "
            "`@unisono.function(input_signature=...)`."
        )
    return Function(func, None if input_signature is None else InputSignature(func, input_signature))
