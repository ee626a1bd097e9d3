"""Keras' `compile`, `fit`, `evaluate`, `predict` and their like, for models that a strategy holds.

They bind the model to its strategy, enter its scope, and put the weights back when anything raises. For a
`train_step(data)` in TensorFlow's form, which `stateful` runs, Keras builds nothing and carries no state.

Tests: tests/virtual/training/test_exact.py and tests/virtual/training/test_failures.py.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import jax
import keras

from unisono._context import Context, current, entered
from unisono._errors import ContextError, InvalidArgumentError, InvalidTypeError
from unisono._system._interrupts import INTERRUPTS
from unisono._types import KerasWrap, PyTree, UserValue, Wrapper
from unisono.local_updates._local_training import end_local_phase
from unisono.step._explain import explaining
from unisono.step._keras_internals import epoch_iterator, host_batches, stacks_batches, training_state
from unisono.step._program import current_frame
from unisono.training._binding import (
    bind,
    check_no_distribution,
    check_variables,
    current_strategy,
    holder_by_scope,
    sole_creator,
    strategy_of,
)
from unisono.training._fit_extension import around_fit, flat_callbacks, has_fit_extensions
from unisono.training._host_layers import encoded_arguments
from unisono.training._keras_data import data_needed, keras_arguments, plain_arguments
from unisono.training._model_state import LISTS, State, taken_state, weights_kept
from unisono.training._scope_warnings import check_fit, strategy_used
from unisono.training.stateful._form import (
    explaining_form,
    is_stateful,
    note_call,
    running_task,
    task_of_state,
)
from unisono.training.trainer._protocol import StepFunction
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

#: What a method of Keras returns.
Result = TypeVar("Result")


def wraps() -> list[KerasWrap]:
    """Return what is wrapped of `keras.Model`."""
    return [
        (keras.Model, "compile", _compile),
        *((keras.Model, name, _guarded(name)) for name in TASKS),
        *((keras.Model, f"make_{task.function}", _maker(task)) for task in TrainerTask),
        (epoch_iterator(), "_get_iterator", _single_batches),
        (keras.Model, "_get_jax_state", _take_state),
        (keras.Model, "_symbolic_build", _build),
        (keras.Model, "_get_metrics_result_or_logs", _logs_of_epoch),
    ]


def _compile(original: Callable[..., None], self: keras.Model, *args: object, **kwargs: object) -> None:
    strategy = holder_by_scope(self) or strategy_of(self)
    if strategy is None or strategy.is_default:
        bind(self, None)
        original(self, *args, **kwargs)
        return
    check_variables(self, strategy)
    with _scope_of(strategy):
        original(self, *args, **kwargs)
    bind(self, strategy)


def _guarded(name: str) -> Wrapper:
    """Return what runs a training method in its model's scope, and keeps the weights when it fails."""

    def method(original: Callable[..., Result], self: keras.Model, *args: object, **kwargs: object) -> Result:
        args, kwargs = encoded_arguments(self, args, kwargs)
        strategy = _strategy_for(self, name)
        _check_not_in_replica(self, name)
        if strategy is None:
            if name in ("fit", "evaluate", "predict"):
                args, kwargs = plain_arguments(name, args, kwargs)
            # Inside a callback of another model's `fit` there is the scope that `fit` entered, and the user's
            # own code is in none.
            context = current()
            outside = (
                entered(None) if context is not None and context.is_of_method else contextlib.nullcontext()
            )
            with outside, apart_from_outer_call(self, name):
                _check_not_in_scope(self, name)
                with explaining_form(self, name):
                    if name == "fit":
                        return _fit(original, self, args, kwargs)
                    return original(self, *args, **kwargs)
        check_no_distribution()
        strategy_used(strategy)
        needed = data_needed(name, self, args[0] if args else kwargs.get("x"))
        if name in ("fit", "evaluate", "predict"):
            args, kwargs = keras_arguments(strategy, self, name, args, kwargs)
        note_call(self, name, args[0] if args else kwargs.get("x"))
        putting_off, allowed = INTERRUPTS.put_off(), INTERRUPTS.allowed()
        explained = explaining(type(self), f"`{name}`")
        apart, around = apart_from_outer_call(self, name), strategy.around_method()
        with explained, putting_off, needed, _scope_of(strategy), weights_kept(self), around, apart, allowed:
            if name == "fit":
                return _fit(original, self, args, kwargs)
            if name in ("evaluate", "predict"):
                return _run_through(strategy, original, self, args, kwargs)
            return _with_errors(original(self, *args, **kwargs))

    return method


def _strategy_for(model: keras.Model, name: str) -> Strategy | None:
    """Return the strategy that runs a method of a model; None for Keras itself."""
    if not model.compiled:
        # Keras predicts with such a model, which may return features, and raises an error for all else.
        predicts = name in ("predict", "predict_on_batch")
        bind(model, strategy_of(model) or sole_creator(model) if predicts else None)
    return strategy_of(model)


def _with_errors(result: Result) -> Result:
    """Return a result when the steps behind it are done, so that their errors are raised here.

    Keras' `pythonify_logs` catches the error of a number that it cannot read, and keeps the array: without
    this, an error of the last step would be raised where the user reads that.
    """
    done: Result = jax.block_until_ready(result)
    return done


def _run_through(
    strategy: Strategy,
    original: Callable[..., Result],
    model: keras.Model,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> Result:
    """Run Keras' `evaluate` or `predict` ahead of its loop."""
    name = original.__name__
    bound = _bound(original, model, args, kwargs)
    ahead = strategy.runs_ahead and strategy.replicated is not None
    ahead = ahead and can_run_ahead(model, bound.arguments.get("callbacks"), name)
    args, kwargs, ahead = strategy.prepare_call(original, model, args, kwargs, ahead)
    lookahead = lookahead_for(strategy, model, bound.arguments, name, ahead)
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    arguments = {name: value for name, value in bound.arguments.items() if name not in ("self", "kwargs")}
    arguments.update(bound.arguments.get("kwargs", {}))
    with (
        strategy.around_test(name, arguments) as given,
        running_ahead(model, name, bound.arguments.get("steps"), lookahead),
    ):
        return _with_errors(original(model, **given))


def _bound(
    original: Callable[..., Result],
    model: keras.Model,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> inspect.BoundArguments:
    """Return the arguments of a call by their names."""
    signature = inspect.signature(original)
    unknown = sorted(set(kwargs) - set(signature.parameters))
    if unknown and all(p.kind is not p.VAR_KEYWORD for p in signature.parameters.values()):
        known = ", ".join(list(signature.parameters)[1:])
        raise InvalidTypeError(
            f"`{original.__name__}` must be called with its arguments alone. Received: {unknown[0]!r}. Keras "
            f"{keras.__version__} has: {known}. What loads data, as `workers` did, belongs to the "
            "`keras.utils.PyDataset`."
        )
    return signature.bind(model, *args, **kwargs)


def _fit(
    original: Callable[..., Result],
    model: keras.Model,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> Result:
    """Run Keras' `fit` inside the contexts of the strategy, the extensions and the lookahead."""
    strategy = strategy_of(model)
    if model.compiled:
        check_fit(model, strategy)
    if strategy is None and not has_fit_extensions(args, kwargs):
        return original(model, *args, **kwargs)
    bound = _bound(original, model, args, kwargs)
    bound.apply_defaults()
    arguments = {name: value for name, value in bound.arguments.items() if name != "self"}
    ahead = strategy is not None and strategy.runs_ahead and can_run_ahead(model, arguments["callbacks"])
    with contextlib.ExitStack() as around:
        if strategy is not None:
            arguments, ahead = around.enter_context(strategy.around_fit(model, arguments, ahead))
        lookahead = None if strategy is None else lookahead_for(strategy, model, arguments, "fit", ahead)
        arguments = around.enter_context(around_fit(model, arguments))
        arguments = around.enter_context(with_lookahead(model, arguments, lookahead))
        own = [] if strategy is None else strategy.own_callbacks
        callbacks = arguments["callbacks"]
        # A user's own list calls what is in it.
        if own and not isinstance(callbacks, keras.callbacks.CallbackList):
            arguments = {**arguments, "callbacks": [*own, *flat_callbacks(callbacks)]}
        return original(model, **arguments)


def _check_not_in_replica(model: keras.Model, name: str) -> None:
    context = current()
    if context is not None and context.replica is not None and not context.strategy.is_default:
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
    with strategy.scope(), entered(Context(strategy, is_of_method=True)):
        yield


def _single_batches(original: Callable[[UserValue], Iterator[PyTree]], self: UserValue) -> Iterator[PyTree]:
    """Give a strategy's steps batches one by one from the host, where Keras' loop would take stacks of them.

    https://github.com/keras-team/keras/pull/23527 stacks those of `steps_per_execution` on one device.
    """
    context = current()
    is_plain = context is None or context.strategy.is_default
    return original(self) if is_plain or not stacks_batches(self) else host_batches(self)


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
        end_local_phase(self)
    return original(self, logs)


def _build(
    original: Callable[..., None], self: keras.Model, iterator: UserValue = None, data_batch: PyTree = None
) -> None:
    """Create what is missing before the first step, of a model whose step alone knows what it creates."""
    # Inside of a step that calls Keras' own, Keras builds.
    prepare = None if strategy_of(self) is None or current_frame() is not None else _prepare_of(self)
    if prepare is None:
        original(self, iterator=iterator, data_batch=data_batch)
        return
    prepare(next(next(iter(iterator))[2]) if data_batch is None else data_batch)


def _prepare_of(model: keras.Model) -> Callable[[PyTree], None] | None:
    """Return what creates the variables of the step that is about to run; None where Keras does."""
    task = running_task(model)
    if task is None or not is_stateful(model, task):
        return None
    getattr(model, f"make_{task.function}")()
    return getattr(getattr(model, task.function), "prepare", None)


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
