"""How a Keras model learns of its strategy. This is the only file that wraps Keras.

`install()` puts thin wrappers around a few public methods of Keras' classes. Each asks where it
is called: outside every strategy and for a model that no strategy holds, it does exactly what
Keras does.

- `Variable.__init__`, `Model.__new__` note the scope in which they are created.
- `Model.compile` binds the model to the strategy; `fit` and the like enter its scope, and put
  the weights back when anything raises. `CallbackList.on_train_batch_end` asks whether anybody listens.
- `Model.save`, `save_weights`, `export` and `keras.saving`'s functions write on the first of several workers.
- `Model.make_train_function` and its two sisters give the functions of `training/trainer`.
- `Model.compute_loss`, `compute_metrics` see the true rows of all replicas of a padded batch.
- `Metric.stateless_result`, `Mean.update_state`, `Loss.__call__`, `Optimizer.apply`,
  `stateless_apply` work on the values of all replicas.
- `BatchNormalization._moments` makes `synchronized=True` work on JAX.
- JAX lowers the derivative of max-pooling on CPUs as `_pooling` does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import keras

from unisono._backend import wants_fast_pooling
from unisono._context import STRATEGY_MARK, Context, OneReplica, check_holder, current, entered
from unisono._errors import InvalidArgumentError
from unisono._mesh import on_device
from unisono._pooling import install_fast_pooling
from unisono.step._explain import explaining
from unisono.step._interrupts import INTERRUPTS
from unisono.step._program import current_frame
from unisono.step.variables._merge_rules import kind_of, merge_all, merge_rule
from unisono.training._binding import (
    assign_here,
    check_variables,
    current_strategy,
    holder_by_scope,
    note_creation,
)
from unisono.training._chief_save import written_once
from unisono.training._fit_extension import around_fit, has_fit_extensions
from unisono.training._keras_data import data_needed, keras_arguments
from unisono.training._model_state import taken_state, weights_kept
from unisono.training._scope_warnings import check_fit
from unisono.training.replica._added_losses import added_losses, check_own_loss
from unisono.training.replica._losses import aggregate_gradients, replica_loss, synchronized_moments
from unisono.training.replica._metrics import compiled_metrics, metrics_add_up, update_with_all_rows
from unisono.training.replica._rows import first_rows, gather_rows, sequential_built
from unisono.training.trainer._lookahead import batch_ended, can_run_ahead, with_lookahead
from unisono.training.trainer._trainer_function import TrainerFunction
from unisono.training.trainer._trainer_step import TrainerTask

_BOUND: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_installed = False
#: Whether the gradients that an optimizer is given are those of all replicas already.
_AGGREGATED: ContextVar[bool] = ContextVar("unisono_aggregated", default=False)


def strategy_of(model: Any) -> Any | None:
    """Return the strategy that a compiled model is bound to, or None."""
    return _BOUND.get(model)


def install() -> None:
    """Wrap Keras; does nothing the second time."""
    global _installed
    if _installed:
        return
    _installed = True
    if wants_fast_pooling():
        install_fast_pooling()
    _wrap(keras.Variable, "__init__", note_creation)
    _wrap(keras.Variable, "assign", assign_here)
    _read_on_devices()
    _mark_new_models()
    _wrap(keras.Sequential, "build", sequential_built)
    _wrap(keras.Model, "compile", _compile)
    for name in ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"):
        _wrap(keras.Model, name, _guarded(name))
    for name in ("save", "save_weights", "export"):
        _wrap(keras.Model, name, written_once(holder_of))
    for module, name in (("saving", "save_model"), ("models", "save_model"), ("saving", "save_weights")):
        _wrap(getattr(keras, module), name, written_once(holder_of))
    for name, task in (
        ("train", TrainerTask.TRAIN),
        ("test", TrainerTask.TEST),
        ("predict", TrainerTask.PREDICT),
    ):
        _wrap(keras.Model, f"make_{name}_function", _maker(f"{name}_function", task))
    _wrap(keras.Model, "_get_jax_state", _get_jax_state)
    _wrap(keras.callbacks.CallbackList, "on_train_batch_end", batch_ended)
    _wrap(keras.Model, "compute_loss", _compute_loss)
    _wrap(keras.Model, "_compute_loss", _own_loss)
    _wrap(keras.Model, "compute_metrics", _compute_metrics)
    _wrap(keras.metrics.Metric, "stateless_result", _stateless_result)
    _wrap(keras.metrics.Mean, "update_state", _mean_update_state)
    _wrap(keras.Loss, "__call__", _loss_call)
    _wrap(keras.Optimizer, "apply_gradients", _apply_gradients)
    for optimizer in (keras.Optimizer, keras.optimizers.LossScaleOptimizer):
        _wrap(optimizer, "stateless_apply", _stateless_apply)
        _wrap(optimizer, "scale_loss", _scale_loss)
    _wrap(keras.Optimizer, "apply", _apply)
    _wrap(keras.optimizers.LossScaleOptimizer, "apply", _apply_loss_scale)
    _wrap(keras.layers.BatchNormalization, "__init__", _batch_normalization_init)
    _wrap(keras.layers.BatchNormalization, "_moments", _moments)


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method by `wrapper(original, self, ...)`, in the class that defines it, or a function.

    Keras compares `Model.compile` with its own to find out whether a user overrides it.
    """
    owner = next(c for c in getattr(owner, "__mro__", [owner]) if name in vars(c))
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, self, *args, **kwargs)

    # Keras looks at the arguments of a layer's `__init__` to save it. It copies `build` into each layer
    # with all attributes, but without `self`.
    if name != "build":
        method.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    setattr(owner, name, method)


def _replica_context() -> Context | None:
    context = current()
    return context if context is not None and context.replica is not None else None


# --- where things are created -------------------------------------------------------------


def _read_on_devices() -> None:
    """What rests in host memory between steps is read on its device: layers cannot compute with it."""
    original: Any = keras.Variable.value

    def value(self: Any) -> Any:
        check_holder(self)
        return on_device(original.fget(self))

    keras.Variable.value = property(value, doc=original.__doc__)


def _mark_new_models() -> None:
    """Note the scope in which a model is made: its variables may come much later."""
    original = keras.Model.__new__

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        model = original(cls, *args, **kwargs)
        object.__setattr__(model, STRATEGY_MARK, current_strategy())
        return model

    keras.Model.__new__ = staticmethod(new)


def _compile(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    strategy = holder_by_scope(self) or _BOUND.get(self)
    if strategy is None:
        _BOUND.pop(self, None)
        original(self, *args, **kwargs)
        return
    check_variables(self, strategy)
    with _scope_of(strategy):
        original(self, *args, **kwargs)
    _BOUND[self] = strategy


# --- fit, evaluate, predict -----------------------------------------------------------------


def _guarded(name: str) -> Callable[..., Any]:
    """A training method inside its model's scope, whose failure never costs the weights."""

    def method(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        strategy = _BOUND.get(self)
        if strategy is None:
            # In a callback of another model's `fit` the user has entered no scope.
            context = current()
            with entered(None) if context is not None and context.is_of_method else contextlib.nullcontext():
                _check_not_in_scope(self, name)
                return (
                    _fit(original, self, args, kwargs) if name == "fit" else original(self, *args, **kwargs)
                )
        needed = data_needed(name, self, args[0] if args else kwargs.get("x"))
        if name in ("fit", "evaluate", "predict"):
            args, kwargs = keras_arguments(strategy, name, args, kwargs)
        putting_off, allowed = INTERRUPTS.put_off(), INTERRUPTS.allowed()
        explained = explaining(type(self), f"`{name}`")
        with explained, putting_off, needed, _scope_of(strategy), weights_kept(self), allowed:
            if name == "fit":
                return _fit(original, self, args, kwargs)
            if name in ("evaluate", "predict") and strategy.mesh.is_spread:
                args, kwargs = (), strategy.alike(original, self, args, kwargs)
            # Keras passes over the error of a number that it cannot read.
            return jax.block_until_ready(original(self, *args, **kwargs))

    return method


def _fit(original: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Keras' `fit`, with the callbacks that take part in it, and what several workers need."""
    strategy = _BOUND.get(model)
    check_fit(model, strategy)
    spread = strategy if strategy is not None and strategy.mesh.is_spread else None
    if strategy is None and not has_fit_extensions(args, kwargs):
        return original(model, *args, **kwargs)
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    bound.apply_defaults()
    arguments = {name: value for name, value in bound.arguments.items() if name != "self"}
    ahead = strategy is not None and strategy.runs_ahead and can_run_ahead(model, arguments["callbacks"])
    with contextlib.ExitStack() as around:
        if spread is not None:
            arguments, ahead = around.enter_context(spread.together(model, arguments, ahead))
        arguments = around.enter_context(around_fit(model, arguments))
        return original(model, **around.enter_context(with_lookahead(model, arguments, ahead)))


def _check_not_in_scope(model: Any, name: str) -> None:
    strategy = current_strategy()
    if strategy is not None and model.compiled and _replica_context() is None:
        raise InvalidArgumentError(
            f"`{name}` in the scope of a strategy needs a model that was compiled in it. Received: "
            f"{model.name!r}, created and compiled outside of the scope of {strategy!r}. Create and "
            "compile the model inside `with strategy.scope():`."
        )


@contextlib.contextmanager
def _scope_of(strategy: Any) -> Iterator[None]:
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


def _get_jax_state(original: Callable[..., Any], self: Any, **wanted: bool) -> Any:
    return original(self, **wanted) if _BOUND.get(self) is None else taken_state(original, self, wanted)


def holder_of(thing: Any) -> Any | None:
    """The strategy that a model belongs to, compiled or not, or a variable."""
    return (_BOUND.get(thing) if isinstance(thing, keras.Model) else None) or getattr(
        thing, STRATEGY_MARK, None
    )


def writes_files(model: Any) -> bool:
    """Whether this process writes the files of a model: the first of several workers does, for all."""
    return bool(getattr(holder_of(model), "is_chief", True))


def _maker(attribute: str, task: TrainerTask) -> Callable[..., Any]:
    """`make_train_function` and its sisters."""

    def make(original: Callable[..., Any], self: Any, force: bool = False) -> Any:
        strategy = _BOUND.get(self)
        if strategy is None:
            return original(self, force)
        if getattr(self, attribute) is None or force:
            setattr(self, attribute, TrainerFunction(self, strategy, task))
        return getattr(self, attribute)

    return make


# --- losses, metrics, optimizers inside a replica -------------------------------------------


def _all_rows(context: Context | None, *trees: Any) -> list[Any] | None:
    """The true rows of all replicas, for a padded batch."""
    if context is None or context.true_rows is None or context.replica is None:
        return None
    engine = context.replica.engine
    return [first_rows(gather_rows(tree, engine), context.true_rows) for tree in trees]


def _compute_loss(
    original: Callable[..., Any],
    self: Any,
    x: Any = None,
    y: Any = None,
    y_pred: Any = None,
    sample_weight: Any = None,
    training: bool = True,
) -> Any:
    context = _replica_context()
    rows = _all_rows(context, y, y_pred, sample_weight)
    if context is not None and rows is None and context.means and self.losses:
        self._losses_override = added_losses(self, x, training, context) or self._losses_override
    if rows is None or context is None:
        return original(self, x, y, y_pred, sample_weight, training)
    with entered(None):
        return original(self, x, *rows, training)


def _own_loss(
    original: Callable[..., Any],
    self: Any,
    x: Any = None,
    y: Any = None,
    y_pred: Any = None,
    sample_weight: Any = None,
    training: bool = True,
) -> Any:
    context = _replica_context()
    if context is not None and context.means and type(self).compute_loss is not keras.Model.compute_loss:
        check_own_loss(self, (x, y, y_pred, sample_weight, training), context)
    return original(self, x, y, y_pred, sample_weight, training)


def _compute_metrics(
    original: Callable[..., Any], self: Any, x: Any, y: Any, y_pred: Any, sample_weight: Any = None
) -> Any:
    context = _replica_context()
    if (rows := _all_rows(context, y, y_pred, sample_weight)) is not None:
        with entered(None):
            return original(self, x, *rows)
    if context is None or not context.means or context.replica is None or _is_alone(context):
        return original(self, x, y, y_pred, sample_weight)
    metrics, given = compiled_metrics(self), (y, y_pred, sample_weight)
    update = functools.partial(original, self, x)
    if metrics_add_up(update, metrics, given, context):
        return update(*given)
    return update_with_all_rows(update, metrics, given, context.replica)


def _is_alone(context: Context) -> bool:
    return context.replica is None or context.replica.num_replicas_in_sync == 1


def _stateless_result(original: Callable[..., Any], self: Any, metric_variables: Any) -> Any:
    """The result over all replicas, for a user's `train_step` in `fit` that returns it as a log.

    Between the ends of two steps a replica's copies are its part of a sum.
    """
    context = _replica_context()
    if context is None or context.replica is None or not context.means or context.true_rows is not None:
        return original(self, metric_variables)
    rules = [merge_rule(kind_of(v)) for v in self.variables]
    return original(self, merge_all(rules, list(metric_variables), context.replica.engine))


def _mean_update_state(
    original: Callable[..., Any], self: Any, values: Any, sample_weight: Any = None
) -> Any:
    """A lone number that a replica adds in `fit`, such as its loss, is a part of one: it counts 1/n.

    So the mean over steps gives a step that was split the weight of one that ran whole.
    """
    context = _replica_context()
    replica = context.replica if context is not None and context.means else None
    is_part = replica is not None and not isinstance(replica.engine, OneReplica) and sample_weight is None
    if is_part and replica is not None and keras.ops.ndim(values) == 0:
        sample_weight = 1 / replica.num_replicas_in_sync
    return original(self, values, sample_weight)


def _loss_call(
    original: Callable[..., Any], self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None
) -> Any:
    context = _replica_context()
    if context is None or context.replica is None or context.replica.num_replicas_in_sync == 1:
        return original(self, y_true, y_pred, sample_weight)
    return replica_loss(original, self, y_true, y_pred, sample_weight, context)


@contextlib.contextmanager
def _aggregated(synced: bool = True) -> Iterator[None]:
    """Mark gradients as aggregated: an optimizer may call another, or itself in other ways.

    Args:
        synced: whether what is written inside is equal on all replicas.
    """
    token = _AGGREGATED.set(True)
    frame = current_frame()
    try:
        with frame.scope.synced() if frame is not None and synced else contextlib.nullcontext():
            yield
    finally:
        _AGGREGATED.reset(token)


def _must_aggregate() -> Context | None:
    """The context of a replica whose gradients are not aggregated yet."""
    return None if _AGGREGATED.get() else _replica_context()


def _stateless_apply(
    original: Callable[..., Any], self: Any, optimizer_variables: Any, grads: Any, trainable_variables: Any
) -> Any:
    context = _must_aggregate()
    if context is None:
        return original(self, optimizer_variables, grads, trainable_variables)
    if isinstance(self, keras.optimizers.LossScaleOptimizer) or (context.replica and context.replica.is_part):
        context = dataclasses.replace(context, means=False)
    grads = aggregate_gradients(list(grads), self._trainable_variables, context)
    with _aggregated():
        return original(self, optimizer_variables, grads, trainable_variables)


def _scale_loss(original: Callable[..., Any], self: Any, loss: Any) -> Any:
    """Scale a replica's loss so that its gradients are summed, also in `fit`.

    A mean of losses would make half-precision gradients larger by the number of replicas than on
    one device, so that they overflow at a smaller scale, and float8 would note larger values.
    """
    context = _replica_context()
    scaled = original(self, loss)
    if context is None or context.replica is None or not context.means:
        return scaled
    if not isinstance(self, keras.optimizers.LossScaleOptimizer):
        if not any(v.overwrite_with_gradient for v in self._trainable_variables):
            return scaled
        context.replica.is_part = True
    return scaled / context.replica.num_replicas_in_sync


def _apply(original: Callable[..., Any], self: Any, grads: Any, trainable_variables: Any = None) -> Any:
    context = _must_aggregate()
    if context is None:
        return original(self, grads, trainable_variables)
    variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
    grads = aggregate_gradients(list(grads), variables, context)
    with _aggregated():
        return original(self, grads, trainable_variables)


def _apply_loss_scale(
    original: Callable[..., Any], self: Any, grads: Any, trainable_variables: Any = None
) -> Any:
    """`LossScaleOptimizer.apply`, whose own code writes variables inside `lax.cond`."""
    if current_frame() is None:
        return original(self, grads, trainable_variables)
    context = _must_aggregate()
    variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
    grads = list(grads) if context is None else aggregate_gradients(list(grads), variables, context)
    if not self.built:
        self.build(variables)
    wanted = list(self._trainable_variables)
    given = {id(v): g for v, g in zip(trainable_variables or wanted, grads, strict=True)}
    with _aggregated(synced=context is not None):
        trained, own = self.stateless_apply(
            [v.value for v in self.variables], [given.get(id(v)) for v in wanted], [v.value for v in wanted]
        )
        for variable, value in zip([*wanted, *self.variables], [*trained, *own], strict=True):
            variable.assign(value)
    return None


def _apply_gradients(
    original: Callable[..., Any],
    self: Any,
    grads_and_vars: Any,
    skip_gradients_aggregation: bool = False,
    experimental_aggregate_gradients: bool = True,
) -> Any:
    """tf.keras' `apply_gradients`, with its two ways to say that gradients are aggregated already."""
    pairs = list(grads_and_vars)
    if skip_gradients_aggregation or not experimental_aggregate_gradients:
        with _aggregated(synced=False):
            return original(self, pairs)
    return original(self, pairs)


def _batch_normalization_init(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    """Take `synchronized=True` from Keras, which refuses it on JAX, and keep it."""
    synchronized = kwargs.pop("synchronized", False)
    original(self, *args, **kwargs)
    self.synchronized = synchronized


def _moments(original: Callable[..., Any], self: Any, inputs: Any, mask: Any) -> Any:
    if not self.synchronized:
        return original(self, inputs, mask)
    context = _replica_context()
    if context is not None and context.replica is not None:
        return synchronized_moments(inputs, self._reduction_axes, mask, context.replica)
    self.synchronized = False
    try:
        return original(self, inputs, mask)
    finally:
        self.synchronized = True
