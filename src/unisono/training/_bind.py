"""How a Keras model learns of its strategy. This is the only file that wraps Keras.

`install()` puts thin wrappers around a few public methods of Keras' classes. Each asks where it
is called: outside every strategy and for a model that no strategy holds, it does exactly what
Keras does. Who holds what is in `_binding`, what happens inside a replica in `_replica_patches`.

- `Variable.__init__`, `Model.__new__` note the scope in which they are created. `Variable.__new__` returns
  the variable of a `VariablesByPath`, where code runs in one.
- `Variable.value` and `assign` check that the current strategy holds the variable. What `__init__` and
  `assign` store is the variable's own: an array that something else holds is copied.
- `Model.compile` binds the model to the strategy; `fit` and the like enter its scope, and put
  the weights back when anything raises. `CallbackList.on_train_batch_end` and its sisters are skipped where
  no callback has a hook of batches, because Keras would wait for the step's logs there. `ProgbarLogger` shows
  batches in their order, and `History` has metrics alone.
- `Model.save`, `save_weights`, `export` and `keras.saving`'s functions write on the first of several workers.
- `Model.make_train_function` and its two sisters give the functions of `training/trainer`.
- For a `train_step(data)` in TensorFlow's form, which `stateful` runs, Keras builds nothing and carries no
  state; Keras' own steps take the data alone where such a step calls them.
- JAX lowers some operations on CPUs as `_lowering` does.
- Keras' initializers compute their values as `_initial_values` does; those of large variables on parameter
  servers are computed there, see `tables/_row_initial`.

Tests: tests/virtual/training/test_exact.py and test_failures.py.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

import jax
import keras

from unisono._context import Context, check_holder, current, entered
from unisono._errors import ContextError, InvalidArgumentError
from unisono._lowering._install import install_lowerings
from unisono._mesh import on_device
from unisono._types import PyTree, UserValue
from unisono.step._explain import explaining
from unisono.step._interrupts import INTERRUPTS
from unisono.step._keras_internals import check_keras, store_value, stored_value
from unisono.step._program import current_frame
from unisono.step._sharded_layout import as_read
from unisono.step._value_handle import ValueHandle
from unisono.step.eager._recording import note_read, read_as
from unisono.step.variables._variable_store import current_store
from unisono.training._binding import (
    bind,
    check_variables,
    current_strategy,
    holder_by_scope,
    mark_creation,
    strategy_of,
)
from unisono.training._chief_save import written_once
from unisono.training._fit_extension import (
    around_fit,
    check_tensorboard,
    flat_callbacks,
    has_fit_extensions,
)
from unisono.training._host_layers import encoded_arguments
from unisono.training._initial_values import initializer_patches
from unisono.training._keras_data import data_needed, keras_arguments, plain_arguments
from unisono.training._model_state import LISTS, State, taken_state, weights_kept
from unisono.training._replica_patches import replica_patches
from unisono.training._run_numbers import without_run_numbers
from unisono.training._scope_warnings import check_fit
from unisono.training.groups._batch_policy import build_sequential
from unisono.training.stateful._form import (
    STEPS,
    explaining_form,
    is_stateful,
    note_call,
    running_task,
    task_of_state,
)
from unisono.training.stateful._inherited_steps import inherited_step
from unisono.training.tables._row_initial import initialize_later
from unisono.training.trainer._nested_calls import apart_from_outer_call
from unisono.training.trainer._protocol import StepFunction
from unisono.training.trainer._run_ahead_of_loop import (
    bar_of,
    batch_end_of,
    begin_of,
    can_run_ahead,
    lookahead_for,
    running_ahead,
    with_lookahead,
)
from unisono.training.trainer._trainer_step import TrainerTask

if TYPE_CHECKING:
    from unisono.strategies._base import Strategy

#: What a method of Keras returns.
Result = TypeVar("Result")

#: What replaces a method of Keras: called with the original, the object and the arguments.
Wrapper = Callable[..., object]

_installed = False

#: By thread: whether Keras gives variables the arrays of its loop, which nothing else uses.
_PUTTING_BACK = threading.local()


def install() -> None:
    """Wrap Keras; does nothing the second time."""
    global _installed
    if _installed:
        return
    check_keras()
    _installed = True
    install_lowerings()
    _wrap(keras.Variable, "__init__", _marked)
    _wrap(keras.Variable, "assign", _assign)
    _wrap(keras.Variable, "_initialize_with_initializer", initialize_later)
    _take_from_stores()
    _read_on_devices()
    _mark_new_models()
    _wrap(keras.Sequential, "build", build_sequential)
    _wrap(keras.Model, "compile", _compile)
    for name in ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"):
        _wrap(keras.Model, name, _guarded(name))
    for name in ("save", "save_weights", "export"):
        _wrap(keras.Model, name, written_once)
    for module, name in (("saving", "save_model"), ("models", "save_model"), ("saving", "save_weights")):
        _wrap(getattr(keras, module), name, written_once)
    for name, task in (
        ("train", TrainerTask.TRAIN),
        ("test", TrainerTask.TEST),
        ("predict", TrainerTask.PREDICT),
    ):
        _wrap(keras.Model, f"make_{name}_function", _maker(f"{name}_function", task))
        _wrap(keras.Model, STEPS[task], inherited_step(task))
    _wrap(keras.Model, "_get_jax_state", _take_state)
    _wrap(keras.Model, "jax_state_sync", _put_back)
    _wrap(keras.Model, "_symbolic_build", _build)
    _wrap(keras.callbacks.TensorBoard, "set_model", check_tensorboard)
    for name in ("fit", "evaluate", "predict"):
        _wrap(keras.callbacks.CallbackList, *batch_end_of(name))
        _wrap(keras.callbacks.ProgbarLogger, *bar_of(name))
    for name in ("evaluate", "predict"):
        _wrap(keras.callbacks.CallbackList, *begin_of(name))
    _wrap(keras.callbacks.History, "on_epoch_end", without_run_numbers)
    for owner, name, wrapper in [*replica_patches(), *initializer_patches()]:
        _wrap(owner, name, wrapper)


def _wrap(owner: type | ModuleType, name: str, wrapper: Wrapper) -> None:
    """Replace a method by `wrapper(original, self, ...)`, in the class that defines it, or a function.

    Keras compares `Model.compile` with its own to find out whether a user overrides it.
    """
    owner = next(c for c in getattr(owner, "__mro__", [owner]) if name in vars(c))
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: object, *args: UserValue, **kwargs: UserValue) -> object:
        return wrapper(original, self, *args, **kwargs)

    # Keras looks at the arguments of a layer's `__init__` to save it. It copies `build` into each layer
    # with all attributes, but without `self`.
    if name != "build":
        method.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    setattr(owner, name, method)


# --- where things are created -------------------------------------------------------------


def _marked(
    original: Callable[..., None], self: keras.Variable, *args: UserValue, **kwargs: UserValue
) -> None:
    """Create a variable, marked with the current strategy; or use one that a store holds."""
    store = current_store()
    if store is not None:
        if store.is_made(self):
            store.reuse(self, (args, kwargs))
            return
        args, kwargs = store.arguments(self, (args, kwargs))
    mark_creation(self)
    original(self, *args, **kwargs)
    # The argument, or what its function returns, may be an array that something else holds, too. Two
    # references are the variable's and that of the call which counts.
    if sys.getrefcount(stored_value(self)) > 2:
        _own_array(self)
    if store is not None:
        store.made(self)
    if (strategy := current_strategy()) is not None:
        strategy.variable_created(self)


def _assign(
    original: Callable[..., jax.Array], self: keras.Variable, value: UserValue
) -> jax.Array | ValueHandle:
    check_holder(self)
    if isinstance(value, ValueHandle):
        # Where Keras' loop ends, it puts back what the last step has left.
        store_value(self, value)
        return value
    held = stored_value(self)
    result = original(self, value)
    new = stored_value(self)
    # In a stateless scope the variable holds what it held, which may be what it is assigned.
    if new is held:
        return result
    if isinstance(held, ValueHandle):
        store_value(self, held)
        store_value(self, held.assigned(new))
    elif new is (stored_value(value) if isinstance(value, keras.Variable) else value):
        _own_array(self)
    return result


def _own_array(variable: keras.Variable) -> None:
    """Store a copy of an array that another variable or the user holds, too.

    A step donates what its variables hold, and deletes it for all others that hold it, as after
    `target.assign(source)` or `keras.Variable(array)`.
    """
    stored = stored_value(variable)
    if not isinstance(stored, jax.Array) or isinstance(stored, jax.core.Tracer):
        return
    # A step's own results are new arrays; at the end of Keras' loop its state is put back.
    if current_frame() is None and not getattr(_PUTTING_BACK, "state", False):
        # A trace around this code must not make a tracer of it, which would outlive the trace.
        with jax.ensure_compile_time_eval():
            store_value(variable, jax.device_put(stored, may_alias=False))


def _put_back(original: Callable[..., None], self: keras.Model) -> None:
    _PUTTING_BACK.state = True
    try:
        original(self)
    finally:
        _PUTTING_BACK.state = False


def _take_from_stores() -> None:
    """Let code whose variables are kept in a store get them from there."""
    original = keras.Variable.__new__

    def new(cls: type, *args: UserValue, **kwargs: UserValue) -> keras.Variable:
        store = current_store()
        # A copy is made without arguments.
        if store is None or not (args or kwargs):
            return original(cls)
        return store.allocate(cls, lambda: original(cls), (args, kwargs))

    keras.Variable.__new__ = staticmethod(new)


def _read_on_devices() -> None:
    """Read on its device what rests in host memory between steps: layers cannot compute with it there."""
    original: property = keras.Variable.value
    read: Callable[[keras.Variable], jax.Array] = original.__get__

    def value(self: keras.Variable) -> jax.Array:
        check_holder(self)
        note_read(self)
        held: jax.Array = as_read(on_device(read(self)))
        return held if isinstance(stored_value(self), jax.Array) else read_as(self, held)

    keras.Variable.value = property(value, doc=original.__doc__)


def _mark_new_models() -> None:
    """Note the scope in which a model is created: its variables may be created much later."""
    original = keras.Model.__new__

    def new(cls: type, *args: UserValue, **kwargs: UserValue) -> keras.Model:
        model = original(cls, *args, **kwargs)
        mark_creation(model)
        return model

    keras.Model.__new__ = staticmethod(new)


def _compile(original: Callable[..., None], self: keras.Model, *args: UserValue, **kwargs: UserValue) -> None:
    strategy = holder_by_scope(self) or strategy_of(self)
    if strategy is None or strategy.is_default:
        bind(self, None)
        original(self, *args, **kwargs)
        return
    check_variables(self, strategy)
    with _scope_of(strategy):
        original(self, *args, **kwargs)
    bind(self, strategy)


# --- fit, evaluate, predict -----------------------------------------------------------------


def _guarded(name: str) -> Wrapper:
    """Return what runs a training method in its model's scope, and keeps the weights when it fails."""

    def method(
        original: Callable[..., Result], self: keras.Model, *args: UserValue, **kwargs: UserValue
    ) -> Result:
        args, kwargs = encoded_arguments(self, args, kwargs)
        strategy = strategy_of(self)
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
        needed = data_needed(name, self, args[0] if args else kwargs.get("x"))
        if name in ("fit", "evaluate", "predict"):
            args, kwargs = keras_arguments(strategy, name, args, kwargs)
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
    args: tuple[UserValue, ...],
    kwargs: dict[str, UserValue],
) -> Result:
    """Run Keras' `evaluate` or `predict` ahead of its loop."""
    name = original.__name__
    bound = inspect.signature(original).bind(model, *args, **kwargs)
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


def _fit(
    original: Callable[..., Result],
    model: keras.Model,
    args: tuple[UserValue, ...],
    kwargs: dict[str, UserValue],
) -> Result:
    """Run Keras' `fit` inside the contexts of the strategy, the extensions and the lookahead."""
    strategy = strategy_of(model)
    check_fit(model, strategy)
    if strategy is None and not has_fit_extensions(args, kwargs):
        return original(model, *args, **kwargs)
    bound = inspect.signature(original).bind(model, *args, **kwargs)
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


def _take_state(original: Callable[..., State], self: keras.Model, **wanted: bool) -> State:
    if strategy_of(self) is None:
        return original(self, **wanted)
    if is_stateful(self, task_of_state(wanted)):
        # The variables keep their values: a step in TensorFlow's form takes them from there.
        return tuple([] for name, is_wanted in wanted.items() if is_wanted and name in LISTS)
    return taken_state(original, self, wanted)


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
    name = f"{task.name.lower()}_function"
    getattr(model, f"make_{name}")()
    return getattr(getattr(model, name), "prepare", None)


def _maker(attribute: str, task: TrainerTask) -> Wrapper:
    """Return what stands for `make_train_function`, or for one of its two sisters."""

    def make(original: Callable[..., StepFunction], self: keras.Model, force: bool = False) -> StepFunction:
        strategy = strategy_of(self)
        if strategy is None:
            return original(self, force)
        if getattr(self, attribute) is None or force:
            setattr(self, attribute, strategy.make_trainer_function(self, task))
        function: StepFunction = getattr(self, attribute)
        return function

    return make
