"""What the library uses of Keras that is not public: each private name of Keras occurs here alone.

Keras keeps these names from one release to the next, but promises nothing. Each function says what it
relies on, and since which release Keras has it. `check_keras` finds out, once, whether the installed
Keras still has all of them.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import keras

from unisono._errors import BackendError
from unisono._system._signatures import fits, parameters_of, unmet
from unisono._types import KerasWrap, PyTree
from unisono.step._value_handle import VariableValue

#: Every name, by the class whose code must have it, with parameters of methods. `training/_bind` wraps some.
RELIED_ON = {
    "Variable": ("_value", "_dtype", "_initializer", "_initialize_with_initializer", "_shape", "_ndim",
                 "_trainable"),
    "Layer": ("_flatten_layers(include_self)", "_trainable", "_call_has_training_arg", "_losses_override"),
    "Model": (
        "_jax_state", "_jax_state_synced", "_get_jax_state", "_initial_epoch", "_use_cached_eval_dataset",
        "_purge_model_variables(trainable_variables, non_trainable_variables, optimizer_variables, "
        "metrics_variables)",
        "batch_outputs", "_compile_config", "_compute_loss(x, y, y_pred, sample_weight, training)",
        "_symbolic_build(iterator, data_batch)", "CompileMetrics", "_get_metrics_result_or_logs",
    ),
    "Operation": ("_inbound_nodes",),
    "Sequential": ("_layers", "_keras_history"),
    "Optimizer": (
        "_trainable_variables", "_learning_rate", "_clip_gradients(grads)",
        "_backend_apply_gradients(grads, trainable_variables)",
    ),
    "optimizers.LossScaleOptimizer": ("check_finite(grads)",),
    "callbacks.Callback": ("_model",),
    "layers.BatchNormalization": ("_moments(inputs, mask)", "_reduction_axes"),
    "losses.MeanSquaredError": ("_fn_kwargs",),
    "metrics.MeanSquaredError": ("_fn_kwargs",),
    "name_scope": ("name_scope_stack", "override_parent"),
}  # fmt: skip

T = TypeVar("T")

#: What a model's training step keeps between batches, by the names of its lists of variables.
TrainingState = Mapping[str, Sequence[jax.Array]]

# --- variables: the lists below are read at each step, so these are C functions, and not `def` -------------

#: Return the array that a variable holds itself, whatever scope runs: None before Keras has made it.
#: `Variable.value` would look the variable up in a stateless scope, and cast it. `Variable._value`, 3.0.
stored_value: Callable[[keras.Variable], Any] = operator.attrgetter("_value")

#: Return the type in which a variable is stored, as a string. In a scope of mixed precision
#: `Variable.dtype` is the type to which a read casts. `Variable._dtype`, 3.0.
stored_dtype: Callable[[keras.Variable], str] = operator.attrgetter("_dtype")

#: Return whether a variable or layer is trainable. `Variable._trainable`, `Layer._trainable`, 3.0.
is_trainable: Callable[[keras.Variable | keras.Layer], bool] = operator.attrgetter("_trainable")


def store_value(variable: keras.Variable, value: VariableValue) -> None:
    """Let a variable hold a value, without the checks of `assign`. `Variable._value`, 3.0."""
    variable._value = value


def store_values(variables: Iterable[keras.Variable], values: Iterable[VariableValue]) -> None:
    """Let variables hold values, as `store_value` does."""
    for variable, value in zip(variables, values, strict=True):
        variable._value = value


def initialize_with(variable: keras.Variable, initializer: Callable[..., jax.Array]) -> None:
    """Replace what makes the first value of a variable that has none yet.

    Keras calls it where the stateless scope ends in which the variable was made, and forgets it.
    `Variable._initializer`, 3.0.
    """
    variable._initializer = initializer


@contextlib.contextmanager
def of_shapes(pairs: Sequence[tuple[keras.Variable, tuple[int, ...]]]) -> Iterator[None]:
    """Give variables other shapes in a block, in which code is traced for such values.

    Keras compares the shape of a variable with that of what is assigned. `Variable._shape`, 3.0,
    and `Variable._ndim`, 3.0.
    """
    before = [(variable, variable._shape) for variable, _ in pairs]
    try:
        for variable, shape in pairs:
            set_shape(variable, shape)
        yield
    finally:
        for variable, shape in before:
            set_shape(variable, shape)


def set_shape(variable: keras.Variable, shape: tuple[int, ...]) -> None:
    """Give a variable another shape for good. `Variable._shape`, 3.0, and `Variable._ndim`, 3.0."""
    variable._shape, variable._ndim = shape, len(shape)


def in_stateless_scope() -> bool:
    """Return whether variables are assigned in a scope, and keep what they hold. `stateless_scope`, 3.0."""
    return _global_state().get_global_attribute("stateless_scope") is not None


# --- names ------------------------------------------------------------------------------------------------


def current_path() -> str:
    """Return the path of the name scopes around the code. `name_scope_stack`, `override_parent`, 3.4."""
    stack = _global_state().get_global_attribute("name_scope_stack") or ()
    parts: list[str] = []
    for scope in stack:
        if scope.override_parent is not None:
            parts = [part for part in scope.override_parent.split("/") if part]
        parts.append(scope.name)
    return "/".join(parts)


@contextlib.contextmanager
def names_from_zero() -> Iterator[None]:
    """Let automatic names count from zero in a block, outside of all name scopes. `object_name_uids`, 3.0."""
    state = _global_state()
    before = {n: state.get_global_attribute(n) for n in ("object_name_uids", "name_scope_stack")}
    for name in before:
        state.set_global_attribute(name, None)
    try:
        yield
    finally:
        for name, value in before.items():
            state.set_global_attribute(name, value)


def _global_state() -> Any:
    """Return the module with Keras' state of a thread. `keras.src.backend.common.global_state`, 3.0."""
    return keras.name_scope.__enter__.__globals__["global_state"]


# --- layers and models ------------------------------------------------------------------------------------


def with_names(function: Callable[..., T], **change: Callable[[object], object]) -> Callable[..., T]:
    """Return a function of Keras that uses other things under some names of its module.

    Initializers take random numbers from a module of Keras under the name `random` (since 3.0).

    Args:
        function: any; one that uses none of the names, or is not Python code, is returned as it is.
        change: by name, what returns the other thing for Keras' own.
    """
    known = getattr(getattr(function, "__code__", None), "co_names", ())
    others = {name: make(function.__globals__[name]) for name, make in change.items() if name in known}
    if not others:
        return function
    given = {**function.__globals__, **others}
    twin = types.FunctionType(
        function.__code__, given, function.__name__, function.__defaults__, function.__closure__
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def all_layers(layer: keras.Layer, include_self: bool = True) -> Iterator[keras.Layer]:
    """Return a layer or model and all layers inside of it, at any depth. `Layer._flatten_layers`, 3.0."""
    found: Iterator[keras.Layer] = layer._flatten_layers(include_self=include_self)
    return found


def layers_with_input(model: keras.Sequential) -> Sequence[keras.Layer]:
    """Return a sequential model's layers with its `InputLayer`. `Sequential._layers`, 3.0."""
    found: Sequence[keras.Layer] = model._layers
    return found


def producer(tensor: keras.KerasTensor) -> tuple[keras.Operation, list[keras.KerasTensor]]:
    """Return the operation whose output a symbolic tensor is, and that operation's inputs.

    `KerasTensor._keras_history` and `Operation._inbound_nodes`, 3.0.
    """
    operation, node, _ = tensor._keras_history
    return operation, list(operation._inbound_nodes[node].input_tensors)


def takes_training(layer: keras.Layer) -> bool:
    """Return whether `call` has the argument `training`. `Layer._call_has_training_arg`, 3.0."""
    return bool(layer._call_has_training_arg)


def replaced_losses(model: keras.Model) -> list[jax.Array]:
    """Return what `model.losses` gives instead of the losses of the layers; empty for those.

    `Layer._losses_override`, 3.2.
    """
    found: list[jax.Array] = model._losses_override
    return found


def replace_losses(model: keras.Model, losses: list[jax.Array]) -> None:
    """Let `model.losses` give these, or those of the layers for an empty list.

    Keras does so with the losses of its stateless call. `Layer._losses_override`, 3.2.
    """
    model._losses_override = losses


def reduced_axes(layer: keras.layers.BatchNormalization) -> list[int]:
    """Return the axes over which a built layer averages. `BatchNormalization._reduction_axes`, 3.0."""
    found: list[int] = layer._reduction_axes
    return found


# --- what `compile` keeps ----------------------------------------------------------------------------------


def loss_of_step(model: keras.Model, *arguments: PyTree, training: bool) -> jax.Array:
    """Return the loss as Keras' own training step gets it from `compute_loss`, which a user may override.

    It passes `training` to those that take it. `Trainer._compute_loss`, 3.4.

    Args:
        arguments: `x`, `y`, `y_pred`, `sample_weight`.
    """
    found: jax.Array = model._compute_loss(*arguments, training=training)
    return found


def compile_arguments(model: keras.Model) -> Mapping[str, object]:
    """Return the arguments that `compile` was given, by name; the loss alone where Keras has not kept them.

    `Trainer._compile_config`, 3.0.
    """
    kept = getattr(model, "_compile_config", None)
    arguments: Mapping[str, object] = getattr(kept, "config", {"loss": model.loss})
    return arguments


def compiled_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """Return the metrics given to `compile`, once Keras has made them a private `CompileMetrics`, 3.0."""
    own = [m for m in model.metrics if type(m).__name__ == "CompileMetrics"]
    return [metric for m in own if m.built for metric in m.metrics]


def build_for_batch(model: keras.Model, batch: PyTree) -> None:
    """Build what is not built of a model, its metrics and its optimizer. `Trainer._symbolic_build`, 3.0."""
    model._symbolic_build(data_batch=batch)


def function_arguments(wrapper: object) -> Mapping[str, object]:
    """Return the arguments with which a loss or metric calls the function that it was made of, if any.

    Its configuration omits them. `LossFunctionWrapper._fn_kwargs` and `MeanMetricWrapper._fn_kwargs`, 3.0.
    """
    return getattr(wrapper, "_fn_kwargs", None) or {}


def trained_variables(optimizer: keras.Optimizer) -> list[keras.Variable]:
    """Return the variables for which an optimizer was built. `Optimizer._trainable_variables`, 3.0."""
    return list(getattr(optimizer, "_trainable_variables", ()))


def held_rate(optimizer: keras.Optimizer | None) -> object:
    """Return the variable, schedule or function of the learning rate. `Optimizer._learning_rate`, 3.0."""
    return getattr(optimizer, "_learning_rate", None)


def clips_as_keras(optimizer: keras.Optimizer) -> bool:
    """Return whether an optimizer clips gradients by Keras' own method. `Optimizer._clip_gradients`, 3.0."""
    return type(optimizer)._clip_gradients is keras.Optimizer._clip_gradients


def applies_as_keras(optimizer: keras.Optimizer) -> bool:
    """Return whether an optimizer does before its update what Keras' own do: it unscales and clips gradients.

    `Optimizer._backend_apply_gradients`, 3.0.
    """
    own, known = type(optimizer), keras.Optimizer
    return own._backend_apply_gradients is known._backend_apply_gradients and own.apply is known.apply


def clip_gradients(optimizer: keras.Optimizer, grads: list[jax.Array]) -> list[jax.Array]:
    """Return gradients, of all variables, clipped as an optimizer does. `Optimizer._clip_gradients`, 3.0."""
    return list(optimizer._clip_gradients(grads))


@contextlib.contextmanager
def _replaced(
    optimizer: keras.Optimizer, name: str, replace: Callable[[Callable[..., T]], Callable[..., T]]
) -> Iterator[None]:
    """Replace a method of one optimizer in a block, by what `replace` makes of Keras' own."""
    vars(optimizer)[name] = replace(getattr(optimizer, name))
    try:
        yield
    finally:
        del vars(optimizer)[name]


def clipped_by(
    optimizer: keras.Optimizer, clip: Callable[[Callable[..., T]], Callable[..., T]]
) -> contextlib.AbstractContextManager[None]:
    """Let an optimizer whose `clips_as_keras` clip in another way. `Optimizer._clip_gradients`, 3.0."""
    return _replaced(optimizer, "_clip_gradients", clip)


def are_finite(optimizer: keras.optimizers.LossScaleOptimizer, grads: list[jax.Array]) -> jax.Array:
    """Return whether all gradients are finite. `LossScaleOptimizer.check_finite`, 3.0."""
    found: jax.Array = optimizer.check_finite(grads)
    return found


def finite_by(
    optimizer: keras.optimizers.LossScaleOptimizer, check: Callable[[Callable[..., T]], Callable[..., T]]
) -> contextlib.AbstractContextManager[None]:
    """Let an optimizer look for infinities in another way in a block. `LossScaleOptimizer.check_finite`, 3.0.

    Args:
        check: gets Keras' method, and returns what is called instead.
    """
    return _replaced(optimizer, "check_finite", check)


# --- Keras' loops ------------------------------------------------------------------------------------------


def training_state(model: keras.Model) -> TrainingState | None:
    """Return the state that a model holds while Keras' loop runs, whose variables are empty then.

    `Trainer._jax_state`, 3.0.
    """
    return getattr(model, "_jax_state", None)


def set_training_state(model: keras.Model, state: TrainingState | None) -> None:
    """Note the newest state, where Keras looks for it when its loop ends. `Trainer._jax_state`, 3.0."""
    # Not as an attribute, which Keras' `__setattr__` would look into, array by array, at each step.
    vars(model)["_jax_state"] = state


def sync_methods() -> list[str]:
    """Return the names of the method that gives the variables a loop's newest state.

    `Trainer.jax_state_sync`, 3.0; in the sources of September 2026 `Trainer.state_sync`.
    """
    return [name for name in ("jax_state_sync", "state_sync") if hasattr(keras.Model, name)]


def module_of_loops() -> Any:
    """Return the module with Keras' loops on JAX: `JAXEpochIterator` and `_distribute_data`, 3.0."""
    return sys.modules[inspect.unwrap(keras.Model.fit).__module__]


def stacks_batches(iterator: Any) -> bool:
    """Return whether Keras' loop takes the batches of several steps at once: in sources of September 2026."""
    return "super_batch" in parameters_of(iterator.data_adapter.get_jax_iterator)


def arrays_of(iterator: Any) -> PyTree:
    """Return the arrays of which Keras' loop takes batches; None for other data. `_inputs`, 3.0."""
    return getattr(iterator.data_adapter, "_inputs", None)


def standard_batch(iterator: Any, batch: PyTree) -> PyTree:
    """Return the batch that Keras' loop gives for a `PyDataset`'s. `PyDatasetAdapter._standardize_batch`."""
    return iterator.data_adapter._standardize_batch(batch)


def array_batches(iterator: Any, arrays: PyTree = None, whole: bool = False) -> Iterator[PyTree]:
    """Return the batches of an epoch, one by one and on the host. `DataAdapter.get_jax_iterator`, 3.0.

    Args:
        arrays: with as many rows as the data have; None for the data.
        whole: whether all rows are one batch, in their order: `_size`, `_batch_size`, `_shuffle`, 3.0.
    """
    adapter = iterator.data_adapter
    if arrays is not None:
        adapter, given = object.__new__(type(adapter)), vars(adapter)
        one_batch = {"_size": 1, "_batch_size": given["_num_samples"], "_shuffle": False} if whole else {}
        vars(adapter).update(given, _inputs=arrays, **one_batch)
    found: Iterator[PyTree] = adapter.get_jax_iterator()
    return found


@contextlib.contextmanager
def epochs_before(model: keras.Model, count: int) -> Iterator[None]:
    """Let the data of the `fit` in a block count epochs as if some were done: Keras shuffles by that number.

    `Trainer._symbolic_build`, 3.0, which `fit` calls with its iterator, and `_epoch` of data adapters, 3.16.
    """
    build = model._symbolic_build

    def build_and_count(iterator: Any = None, data_batch: PyTree = None) -> None:
        build(iterator=iterator, data_batch=data_batch)
        is_first = iterator is not None and vars(model).pop("_symbolic_build", None) is not None
        if is_first and hasattr(iterator.data_adapter, "_epoch"):
            iterator.data_adapter._epoch += count

    vars(model)["_symbolic_build"] = build_and_count
    try:
        yield
    finally:
        vars(model).pop("_symbolic_build", None)


def is_synced(model: keras.Model) -> bool:
    """Return whether the variables hold the newest state. `Trainer._jax_state_synced`, 3.0.5."""
    return bool(getattr(model, "_jax_state_synced", True))


def mark_synced(model: keras.Model, is_synced: bool) -> None:
    """Note whether the variables hold the newest state, which Keras else moves there. `_jax_state_synced`."""
    vars(model)["_jax_state_synced"] = is_synced  # as `set_training_state` does


def empty_variables(model: keras.Model, lists: Mapping[str, bool]) -> None:
    """Take the arrays from some lists of variables, so that a step may reuse the memory. `Trainer`, 3.0."""
    model._purge_model_variables(**lists)


#: The attributes that every callback has from Keras. `Callback._model`, 3.0.
CALLBACK_ATTRIBUTES = frozenset({"_model", "model", "params"})


def restored_epoch(model: keras.Model) -> int | None:
    """Return the epoch that a callback has restored, with which `fit` begins; None for its argument.

    `Trainer._initial_epoch`, 3.1.
    """
    return getattr(model, "_initial_epoch", None)


def set_restored_epoch(model: keras.Model, epoch: int | None) -> None:
    """Let `fit` begin with an epoch; None for its argument. `Trainer._initial_epoch`, 3.1."""
    model._initial_epoch = epoch


def is_validation(kwargs: Mapping[str, object]) -> bool:
    """Return whether `fit`, and no user, has called `evaluate`: it gives `_use_cached_eval_dataset`, 3.0."""
    return bool(kwargs.get("_use_cached_eval_dataset"))


def has_had_model(callback: keras.callbacks.Callback) -> bool:
    """Return whether a loop has given a callback its model. `Callback._model`, 3.0."""
    return vars(callback).get("_model") is not None


def is_of_no_batch(error: UnboundLocalError) -> bool:
    """Return whether Keras' loop has failed because its data had no batch.

    Variables that the first batch sets are read after the loop: `batch_outputs` by `predict`, 3.0, and `logs`
    by `fit` and `evaluate` of a model that is built, 3.0.
    """
    return any(f"'{name}'" in str(error) for name in ("batch_outputs", "logs"))


# --- the check ---------------------------------------------------------------------------------------------


def check_keras() -> None:
    """Check that the installed Keras has all the names on which this file relies, with their parameters.

    Raises:
        BackendError: naming those that are missing, or have other parameters.
    """
    _require(
        f"{path}.{entry}"
        for path, entries in RELIED_ON.items()
        for entry in unmet(operator.attrgetter(path)(keras), entries)
    )


def check_wraps(wraps: Sequence[KerasWrap]) -> None:
    """Check that what is to be wrapped is there, and takes what `wrapper(original, self, ...)` does.

    Raises:
        BackendError: naming what is missing, or has other parameters.
    """
    _require(
        f"{owner.__name__}.{name}({', '.join(parameters_of(wrapper)[2:])})"
        for owner, name, wrapper in wraps
        if not fits(wrapper, getattr(owner, name, None))
    )


def _require(missing: Iterable[str]) -> None:
    if names := ", ".join(missing):
        raise BackendError(
            f"This release of Unisono needs a Keras with {names}, which are private. "
            f"Received: Keras {keras.__version__}. Install another: pip install 'keras>=3.15,<3.17'"
        )
