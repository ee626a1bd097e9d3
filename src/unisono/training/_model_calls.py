"""Keras' `compile`, `fit`, `evaluate`, `predict` and their like, for models that a strategy holds.

They bind the model to its strategy, enter its scope, and put the weights back when anything raises. For a
`train_step(data)` in TensorFlow's form, which `stateful` runs, Keras builds nothing and carries no state.

Tests: tests/virtual/training/test_exact.py and tests/virtual/training/test_failures.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import keras
import numpy as np

from unisono._context import Context, current, entered
from unisono._errors import ContextError, InvalidArgumentError, InvalidTypeError
from unisono._features import load
from unisono._system._blocks import set_for_block
from unisono._system._environ import process_environ
from unisono._system._interrupts import INTERRUPTS
from unisono._system._task_reports import process_events
from unisono._types import KerasWrap, PyTree, UserValue, Wrapper
from unisono.step._keras_internals import array_batches, module_of_loops, stacks_batches, training_state
from unisono.step._program import current_frame
from unisono.step._value_handle import for_shapes
from unisono.training._binding import (
    bind,
    check_no_distribution,
    check_variables,
    current_strategy,
    holder_by_scope,
    phases_of,
    sole_creator,
    strategy_of,
)
from unisono.training._fit_extension import around_fit, flat_callbacks
from unisono.training._keras_data import begins_on_host, data_needed, keras_arguments, plain_arguments
from unisono.training._scope_warnings import check_fit, strategy_used
from unisono.training._step_form import explaining_form, has_stateful_step, is_stateful, task_of_state
from unisono.training.trainer._fit_state import LISTS, on_one_device, set_attribute, taken_state, weights_kept
from unisono.training.trainer._protocol import State, StepFunction
from unisono.training.trainer._run_ahead_of_loop import (
    apart_from_outer_call,
    can_run_ahead,
    lookahead_for,
    running_ahead,
    with_lookahead,
)
from unisono.training.trainer._trainer_step import TASKS, TrainerTask

if TYPE_CHECKING:
    from unisono.strategies._base import Strategy
    from unisono.training.groups._lookahead import StepLookahead


def wraps() -> list[KerasWrap]:
    """Return what is wrapped of `keras.Model`."""
    return [
        (keras.Model, "compile", _compile),
        *((keras.Model, name, _guarded(name)) for name in TASKS),
        *((keras.Model, f"make_{task.function}", _maker(task)) for task in TrainerTask),
        (module_of_loops().JAXEpochIterator, "_get_iterator", _single_batches),
        (module_of_loops(), "_distribute_data", _left_on_host),
        (keras.Model, "__setattr__", set_attribute),
        (keras.Model, "_get_jax_state", _take_state),
        (keras.Model, "_symbolic_build", _build),
        (keras.Model, "_get_metrics_result_or_logs", _logs_of_epoch),
    ]


def _compile(original: Callable[..., None], self: keras.Model, *args: object, **kwargs: object) -> None:
    strategy = holder_by_scope(self) or strategy_of(self)
    if strategy is None or strategy._is_default:
        bind(self, None)
        original(self, *args, **kwargs)
        return
    check_variables(self, strategy)
    with _scope_of(strategy):
        original(self, *args, **kwargs)
    bind(self, strategy)


# --- calls ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class MethodCall:
    """A call of a method of Keras, which what surrounds it may change.

    Args:
        method: Keras' own.
        name: of the method.
        strategy: which runs it; None for Keras itself.
        arguments: by name.
        data: what the user gave as `x`.
    """

    method: Callable[..., Any]
    model: keras.Model
    name: str
    strategy: Strategy | None
    arguments: dict[str, UserValue]
    data: UserValue = None
    #: What its steps run ahead of Keras' loop with; None where they run one by one.
    lookahead: StepLookahead | None = None

    def run(self) -> Any:
        """Call Keras' method."""
        result = self.method(self.model, **self.arguments)
        if self.strategy is None or self.name == "fit":
            return result
        # Keras' `pythonify_logs` catches the error of a number that it cannot read, and keeps the array:
        # without this, an error of the last step would be raised where the user reads that.
        return jax.block_until_ready(result)

    def may_run_ahead(self, strategy: Strategy) -> bool:
        """Return whether no callback sees how many steps are done between two batches."""
        is_compiled = self.name == "fit" or strategy._replicated is not None
        callbacks = self.arguments.get("callbacks")
        return strategy._runs_ahead and is_compiled and can_run_ahead(self.model, callbacks, self.name)


class Surrounding(NamedTuple):
    """One thing around a call.

    Args:
        name: what it is.
        reason: why calls need it.
        enter: given the call, returns its context; what is done when that is entered may change the call.
    """

    name: str
    reason: str
    enter: Callable[[MethodCall], contextlib.AbstractContextManager[object]]


def _guarded(name: str) -> Wrapper:
    """Return what takes the place of a training method of `keras.Model`."""

    def method(original: Callable[..., Any], self: keras.Model, *args: object, **kwargs: object) -> Any:
        strategy = _strategy_for(self, name)
        _check_not_in_replica(self, name)
        call = MethodCall(original, self, name, strategy, _by_name(original, self, strategy, args, kwargs))
        _take_data(call)
        with contextlib.ExitStack() as around:
            for surrounding in _AROUND_KERAS[name] if strategy is None else _AROUND[name]:
                around.enter_context(surrounding.enter(call))
            return call.run()

    return method


def _strategy_for(model: keras.Model, name: str) -> Strategy | None:
    """Return the strategy that runs a method of a model; None for Keras itself."""
    if not model.compiled:
        # Keras predicts with such a model, which may return features, and raises an error for all else.
        predicts = name in ("predict", "predict_on_batch")
        bind(model, strategy_of(model) or sole_creator(model) if predicts else None)
    return strategy_of(model)


class _Parameters(NamedTuple):
    """The parameters of a method: their names, the defaults, and whether it takes others."""

    names: tuple[str, ...]
    defaults: dict[str, UserValue]
    takes_others: bool


@functools.cache
def _parameters_of(method: Callable[..., object]) -> _Parameters:
    _, *own = inspect.signature(method).parameters.values()
    named = [p for p in own if p.kind is not p.VAR_KEYWORD]
    defaults = {p.name: p.default for p in named if p.default is not p.empty}
    return _Parameters(tuple(p.name for p in named), defaults, len(named) < len(own))


def _by_name(
    method: Callable[..., object],
    model: keras.Model,
    strategy: Strategy | None,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> dict[str, UserValue]:
    """Return the arguments of a call by their names."""
    names, _, takes_others = _parameters_of(method)
    unknown = sorted(kwargs.keys() - names) if kwargs and not takes_others else ()
    if unknown and strategy is not None:
        raise InvalidTypeError(
            f"`{method.__name__}` must be called with its arguments alone. Received: {unknown[0]!r}. Keras "
            f"{keras.__version__} has: {', '.join(names)}. What loads data, as `workers` did, belongs to the "
            "`keras.utils.PyDataset`."
        )
    if unknown or len(args) > len(names) or not kwargs.keys().isdisjoint(names[: len(args)]):
        # Python's own error.
        method(model, *args, **kwargs)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _take_data(call: MethodCall) -> None:
    """Give a call's data the form that Keras reads."""
    model, name, strategy = call.model, call.name, call.strategy
    if "polars" in sys.modules:
        call.arguments = load("arrays of frames")(call.arguments)
    if call.arguments.get("x") is not None and begins_on_host(model):
        call.arguments = load("strings on the host")(model, call.arguments)
    call.data = call.arguments.get("x")
    has_loop = not name.endswith("_on_batch")
    if strategy is None:
        if has_loop:
            call.arguments = plain_arguments(name, call.arguments)
    else:
        check_no_distribution()
        strategy_used(strategy)
        if has_loop:
            call.arguments = keras_arguments(strategy, model, name, call.arguments)
        if has_stateful_step(model):
            load("call of a step in TensorFlow's form")(model, name, call.arguments.get("x"))
    if name == "fit":
        call.arguments = {**_parameters_of(call.method).defaults, **call.arguments}


def _check_not_in_replica(model: keras.Model, name: str) -> None:
    context = current()
    if context is not None and context.replica is not None and not context.strategy._is_default:
        raise ContextError(
            f"`{name}` divides rows between the replicas itself. Received: a call of {model.name!r} inside "
            f"of `run`. Write `model.{name}(...)` outside, or a tape and `apply_gradients` in `run`."
        )


def _check_not_in_scope(model: keras.Model, name: str) -> None:
    strategy, context = current_strategy(), current()
    if strategy is not None and model.compiled and (context is None or context.replica is None):
        raise InvalidArgumentError(
            f"`{name}` in the scope of a strategy needs a model that was compiled in it. Received: "
            f"{model.name!r}, created and compiled outside of the scope of {strategy!r}. Create and "
            "compile the model inside `with strategy.scope():`."
        )


@contextlib.contextmanager
def _scope_of(strategy: Strategy) -> Iterator[None]:
    """Enter the scope of a model's strategy, unless the code is there already.

    Raises:
        MixedStrategyError: in the scope of another strategy.
    """
    context = current()
    if context is not None and context.strategy is strategy:
        yield
        return
    # Of the class: an object's `scope` is made anew each time, to say what to write where it is not called.
    with type(strategy).scope(strategy), entered(Context(strategy, is_of_method=True)):
        yield


# --- what surrounds them ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _errors_explained(call: MethodCall) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        load("explanation of an error")(error, type(call.model), f"`{call.name}`")
        raise


@contextlib.contextmanager
def _outside_of_scopes(call: MethodCall) -> Iterator[None]:
    context = current()
    with entered(None) if context is not None and context.is_of_method else contextlib.nullcontext():
        _check_not_in_scope(call.model, call.name)
        yield


def _checked(call: MethodCall) -> contextlib.AbstractContextManager[None]:
    if call.model.compiled:
        check_fit(call.model, call.strategy)
    return contextlib.nullcontext()


@contextlib.contextmanager
def _on_all_processes(call: MethodCall) -> Iterator[None]:
    model, arguments, strategy = call.model, call.arguments, _known(call)
    ahead = call.may_run_ahead(strategy)
    if call.name == "fit":
        around = strategy._around_fit(model, arguments, ahead)
    else:
        around = strategy._around_test(model, call.name, arguments, ahead)
    with around as (call.arguments, ahead):
        call.lookahead = lookahead_for(strategy, model, call.arguments, call.name, ahead)
        yield


@contextlib.contextmanager
def _extended(call: MethodCall) -> Iterator[None]:
    with around_fit(call.model, call.arguments) as call.arguments:
        yield


@contextlib.contextmanager
def _ahead_of_loop(call: MethodCall) -> Iterator[None]:
    if call.name != "fit":
        with running_ahead(call.model, call.name, call.arguments.get("steps"), call.lookahead):
            yield
        return
    with with_lookahead(call.model, call.arguments, call.lookahead) as call.arguments:
        yield


def _with_own_callbacks(call: MethodCall) -> contextlib.AbstractContextManager[None]:
    own, callbacks = _known(call)._own_callbacks, call.arguments["callbacks"]
    events = process_events()
    reports = [load("report of a fit")(call, events)] if events.is_read else []
    # A user's own list calls what is in it.
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        # Those that add numbers to the logs come before those that write the logs.
        given = sorted(flat_callbacks(callbacks), key=lambda c: not getattr(c, "_adds_to_logs", False))
        call.arguments = {**call.arguments, "callbacks": [*own, *given, *reports]}
    return contextlib.nullcontext()


def _known(call: MethodCall) -> Strategy:
    """Return the strategy of a call that has one."""
    return cast("Strategy", call.strategy)


def _nothing_kept(iterator: UserValue) -> Iterator[PyTree] | None:
    """Return None: batches are placed one by one."""


#: Gives the batches of a loop whose arrays stay on the devices.
_RESIDENT: ContextVar[Callable[[Any], Iterator[PyTree] | None]] = ContextVar("batches", default=_nothing_kept)


def keeps_data(platform: str) -> bool:
    """Return whether arrays may stay on devices: by default on all that have memory of their own."""
    return (process_environ().get("UNISONO_RESIDENT_DATA") or str(int(platform != "cpu"))) != "0"


def _data_kept(call: MethodCall) -> contextlib.AbstractContextManager[object]:
    replicated = _known(call)._replicated
    if replicated is None or not keeps_data(replicated.mesh.platform):
        return set_for_block(_RESIDENT, _nothing_kept)
    keep: Callable[..., contextlib.AbstractContextManager[object]] = load("data on the devices")
    return keep(replicated, call.arguments, _RESIDENT)


_APART = Surrounding(
    "apart from an outer call",
    "a call may come from a callback of another one, whose function and steps ahead it must not use",
    lambda call: apart_from_outer_call(call.model, call.name),
)
_CHECKED = Surrounding("check", "the strategy, or the other workers, may have been forgotten", _checked)
_EXTENDED = Surrounding("extensions", "a callback such as `BackupAndRestore` changes the call", _extended)

#: What surrounds a call of any method on a strategy, from the outside to the inside.
_AROUND_ALL = (
    Surrounding(
        "explanation", "JAX knows nothing of the user's step, of which its errors are", _errors_explained
    ),
    Surrounding(
        "interrupts put off", "none comes while what follows is entered", lambda _: INTERRUPTS.put_off()
    ),
    Surrounding(
        "data needed",
        "Keras' errors do not say that there was no batch",
        lambda call: data_needed(call.name, call.model, call.data),
    ),
    Surrounding(
        "scope", "variables that Keras creates are the strategy's", lambda call: _scope_of(_known(call))
    ),
    Surrounding(
        "weights kept", "Keras empties the variables while it trains", lambda call: weights_kept(call.model)
    ),
    Surrounding("method", "a strategy keeps its own calls apart", lambda call: _known(call)._around_method()),
    _APART,
    Surrounding("interrupts allowed", "training is long", lambda _: INTERRUPTS.allowed()),
)
_PROCESSES = Surrounding("processes", "they compare their calls and share decisions", _on_all_processes)
_AHEAD = Surrounding("lookahead", "several steps run in one program", _ahead_of_loop)
_OWN_CALLBACKS = Surrounding("own callbacks", "a strategy adds to the logs", _with_own_callbacks)
_DATA_KEPT = Surrounding("data kept", "on devices with their own memory arrays are placed once", _data_kept)
_AROUND_TEST = (*_AROUND_ALL, _PROCESSES, _AHEAD, _DATA_KEPT)

#: What surrounds the calls on a strategy, by method.
_AROUND = dict.fromkeys(TASKS, _AROUND_ALL) | {
    "fit": (*_AROUND_ALL, _CHECKED, _PROCESSES, _EXTENDED, _AHEAD, _DATA_KEPT, _OWN_CALLBACKS),
    "evaluate": _AROUND_TEST,
    "predict": _AROUND_TEST,
}

#: What surrounds the calls of a model without a strategy, from the outside to the inside.
_AROUND_PLAIN = (
    Surrounding(
        "outside of scopes",
        "inside a callback of another model's `fit` there is the scope that this `fit` entered",
        _outside_of_scopes,
    ),
    _APART,
    Surrounding(
        "TensorFlow's form",
        "Keras itself cannot call such a step",
        lambda call: explaining_form(call.model, call.name),
    ),
)
_AROUND_KERAS = dict.fromkeys(TASKS, _AROUND_PLAIN) | {"fit": (*_AROUND_PLAIN, _CHECKED, _EXTENDED)}


# --- what Keras' methods call ------------------------------------------------------------------------------


def _single_batches(original: Callable[[UserValue], Iterator[PyTree]], self: UserValue) -> Iterator[PyTree]:
    """Give a strategy's steps batches one by one from the host, where Keras' loop would take stacks of them.

    https://github.com/keras-team/keras/pull/23527 stacks those of `steps_per_execution` on one device.
    """
    context = current()
    if context is None or context.strategy._is_default:
        return original(self)
    return _RESIDENT.get()(self) or (array_batches(self) if stacks_batches(self) else original(self))


def _left_on_host(original: Callable[..., PyTree], data: PyTree, layouts: PyTree = None) -> PyTree:
    """Leave the batch of a single step where a program on CPU devices takes it from.

    Keras puts each of its arrays onto a device, twice, which takes longer than the rest of a small step.
    """
    strategy = current_strategy()
    replicated = None if strategy is None else strategy._replicated
    if replicated is None or replicated.mesh.platform != "cpu":
        return original(data, layouts)
    is_plain = all(isinstance(x, (np.ndarray, jax.Array)) for x in jax.tree.leaves(data))
    return data if is_plain else original(data, layouts)


def _take_state(original: Callable[..., State], self: keras.Model, **wanted: bool) -> State:
    if strategy_of(self) is None:
        return original(self, **wanted)
    if is_stateful(self, task_of_state(wanted)):
        # The variables keep their values: a step in TensorFlow's form takes them from there.
        return tuple([] for name, is_wanted in wanted.items() if is_wanted and name in LISTS)
    return taken_state(original, self, wanted)


def _logs_of_epoch(original: Callable[..., PyTree], self: keras.Model, logs: PyTree) -> PyTree:
    """Return the logs where an epoch of `fit` has ended, before validation and callbacks see the state."""
    # Also where `evaluate` ends, whose state has no optimizer.
    if LISTS[2] in (training_state(self) or ()):
        phases_of(self).end(self)
    with contextlib.nullcontext() if strategy_of(self) is None else on_one_device(self):
        return original(self, logs)


def _build(
    original: Callable[..., None], self: keras.Model, iterator: UserValue = None, data_batch: PyTree = None
) -> None:
    """Create what is missing before the first step, of a model whose step alone knows what it creates."""
    prepare = None
    # Inside of a step that calls Keras' own, Keras builds.
    if strategy_of(self) is not None and current_frame() is None and has_stateful_step(self):
        prepare = load("variables of a step in TensorFlow's form")(self)
    if prepare is None:
        with for_shapes():
            original(self, iterator=iterator, data_batch=data_batch)
        return
    prepare(next(next(iter(iterator))[2]) if data_batch is None else data_batch)


def _maker(task: TrainerTask) -> Wrapper:
    """Return what stands for `make_train_function`, or for one of its two sisters."""

    def make(original: Callable[..., StepFunction], self: keras.Model, force: bool = False) -> StepFunction:
        strategy = strategy_of(self)
        if strategy is None:
            return original(self, force)
        if getattr(self, task.function) is None or force:
            setattr(self, task.function, strategy.make_trainer_function(self, task))
        function: StepFunction = getattr(self, task.function)
        return function

    return make
