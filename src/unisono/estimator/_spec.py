"""`EstimatorSpec`: what a `model_fn` returns, and `ModeKeys`.

Source: https://github.com/tensorflow/estimator (tensorflow_estimator/python/estimator/model_fn.py)

Tests: tests/virtual/estimator/test_estimator_spec.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import keras

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono._types import ArrayLike, PyTree, UserValue
from unisono.estimator._train_op import is_train_op

if TYPE_CHECKING:
    from unisono.estimator.hooks._checkpoints import CheckpointSaverListener
    from unisono.estimator.hooks._hook import SessionRunHook


class ModeKeys:
    """The modes in which a `model_fn` is called.

    >>> ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT
    ('train', 'eval', 'infer')
    """

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


#: In the order in which messages name them.
MODES = (ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT)

_HOOK_METHODS = ("begin", "before_run", "after_run", "end")
_LISTENER_METHODS = ("begin", "before_save", "after_save", "end")


@dataclasses.dataclass(frozen=True, eq=False)
class EstimatorSpec:
    """The result of a `model_fn`: the model's outputs, its loss, and how it is trained.

    Args:
        mode: one of `ModeKeys`.
        predictions: array or dict of arrays; needed to predict.
        loss: scalar; needed to train and to evaluate.
        train_op: what `minimize` or `apply_gradients` returned, or a group of these; needed to train.
        eval_metric_ops: metrics by name: Keras metrics that model_fn has updated, or what
            `unisono.estimator.metrics` returns.
        export_outputs: signatures of an exported model, by name.
        training_chief_hooks: hooks for the first worker.
        training_hooks: hooks for every worker.
        scaffold: a `Scaffold`, or None.
        evaluation_hooks: hooks of `evaluate`.
        prediction_hooks: hooks of `predict`.

    Raises:
        InvalidArgumentError: for a missing or impossible argument.
        InvalidTypeError: for an argument of another type.

    >>> spec = EstimatorSpec(ModeKeys.PREDICT, predictions={"logits": jnp.zeros(2)})
    >>> sorted(spec.predictions)
    ['logits']
    """

    mode: str
    predictions: PyTree = None
    loss: Any = None
    train_op: Any = None
    eval_metric_ops: Mapping[str, Any] | None = None
    export_outputs: Mapping[str, Any] | None = None
    training_chief_hooks: Sequence[SessionRunHook] | None = None
    training_hooks: Sequence[SessionRunHook] | None = None
    scaffold: Any = None
    evaluation_hooks: Sequence[SessionRunHook] | None = None
    prediction_hooks: Sequence[SessionRunHook] | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InvalidArgumentError(
                f"`mode` of an EstimatorSpec must be one of {MODES}. Received: mode={self.mode!r}. Pass on "
                "the `mode` that model_fn got."
            )
        self._set("loss", _checked_loss(self.mode, self.loss))
        self._set("train_op", _checked_train_op(self.mode, self.train_op))
        self._set("predictions", _checked_predictions(self.mode, self.predictions))
        self._set("eval_metric_ops", _checked_metrics(self.eval_metric_ops))
        if self.export_outputs is not None and not isinstance(self.export_outputs, Mapping):
            raise InvalidTypeError(
                "`export_outputs` must be a dict of signatures by name. Received: "
                f"{type(self.export_outputs).__name__}. Write `{{'serving_default': PredictOutput(...)}}`."
            )
        for name in ("training_chief_hooks", "training_hooks", "evaluation_hooks", "prediction_hooks"):
            self._set(name, checked_hooks(getattr(self, name), name))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def replace(self, **changes: UserValue) -> EstimatorSpec:
        """Return a spec with other values for some arguments.

        Args:
            changes: by name.
        """
        return dataclasses.replace(self, **changes)

    # TensorFlow's spec is a named tuple.
    _replace = replace


def _checked_loss(mode: str, loss: ArrayLike) -> ArrayLike:
    if loss is None:
        if mode == ModeKeys.PREDICT:
            return None
        raise InvalidArgumentError(
            f"An EstimatorSpec in mode {mode!r} needs a loss. Received: loss=None. Missing loss: write "
            "`EstimatorSpec(mode, loss=loss, ...)`."
        )
    value = keras.ops.convert_to_tensor(loss)
    if value.size != 1:
        raise InvalidArgumentError(
            f"`loss` must be a scalar. Received: an array of shape {tuple(value.shape)}. Write "
            "`keras.ops.mean(loss)`, or give the loss a reduction."
        )
    # As it was given, where it may be: hooks name the tensor itself.
    return loss if value is loss and value.ndim == 0 else jnp.reshape(value, ())


def _checked_train_op(mode: str, train_op: object) -> UserValue:
    if train_op is None:
        if mode != ModeKeys.TRAIN:
            return None
        raise InvalidArgumentError(
            "An EstimatorSpec in mode 'train' needs a train_op. Received: train_op=None. Missing train_op: "
            "write `train_op=optimizer.minimize(loss, global_step)`."
        )
    if not is_train_op(train_op):
        raise InvalidTypeError(
            "`train_op` must be what `minimize` or `apply_gradients` returned, or `group` of several. "
            f"Received: {type(train_op).__name__} {train_op!r}. Write `train_op=optimizer.minimize(loss)`."
        )
    return train_op


def _checked_predictions(mode: str, predictions: PyTree) -> PyTree:
    if predictions is None:
        if mode == ModeKeys.PREDICT:
            raise InvalidArgumentError(
                "An EstimatorSpec in mode 'infer' needs predictions. Received: predictions=None. Missing "
                "predictions: write `EstimatorSpec(mode, predictions={'logits': logits})`."
            )
        return {}
    every = predictions.values() if isinstance(predictions, Mapping) else [predictions]
    for value in every:
        if not hasattr(value, "shape"):
            raise InvalidTypeError(
                "`predictions` must be an array, or a dict of arrays. Received: a value of type "
                f"{type(value).__name__}. Write `predictions={{'classes': classes}}`."
            )
    return predictions


def _checked_metrics(metrics: Mapping[str, object] | None) -> Mapping[str, Any]:
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise InvalidTypeError(
            "`eval_metric_ops` must be a dict of metrics by name. Received: "
            f"{type(metrics).__name__}. Write `{{'accuracy': metric}}`."
        )
    for name, value in metrics.items():
        # `evaluate` adds it itself.
        if name == "global_step":
            raise InvalidArgumentError(
                "A metric may not have the name 'global_step', under which `evaluate` returns the step. "
                f"Received: `eval_metric_ops` with {sorted(metrics)}. Give it another name."
            )
        if metric_of(value) is None:
            raise InvalidTypeError(
                "Values of `eval_metric_ops` must be Keras metrics that model_fn has updated, or what "
                f"`unisono.estimator.metrics` returns. Received: {type(value).__name__} for {name!r}. "
                "Write `metric = keras.metrics.Mean(); metric.update_state(values)`."
            )
    return dict(metrics)


def metric_of(value: object) -> keras.metrics.Metric | None:
    """Return the Keras metric of a value of `eval_metric_ops`; None for another object."""
    metric = getattr(value, "metric", value)
    return metric if isinstance(metric, keras.metrics.Metric) else None


def checked_hooks(hooks: Sequence[SessionRunHook] | None, name: str) -> tuple[Any, ...]:
    """Return hooks as a tuple."""
    if hooks is None:
        return ()
    if not isinstance(hooks, (list, tuple)):
        raise InvalidTypeError(
            f"`{name}` must be a list of hooks. Received: {type(hooks).__name__}. Write `{name}=[hook]`."
        )
    for hook in hooks:
        if isinstance(hook, type) or not all(callable(getattr(hook, m, None)) for m in _HOOK_METHODS):
            raise InvalidTypeError(
                f"All hooks must be `SessionRunHook` instances. Received: {hook!r} in `{name}`. Derive its "
                "class from `unisono.estimator.SessionRunHook`."
            )
    return tuple(hooks)


def checked_listeners(listeners: Sequence[CheckpointSaverListener] | None) -> tuple[Any, ...]:
    """Return saving listeners as a tuple."""
    for listener in listeners or ():
        if isinstance(listener, type) or not all(
            callable(getattr(listener, m, None)) for m in _LISTENER_METHODS
        ):
            raise InvalidTypeError(
                f"`saving_listeners` must be `CheckpointSaverListener` instances. Received: {listener!r}. "
                "Derive its class from `unisono.estimator.CheckpointSaverListener`."
            )
    return tuple(listeners or ())


def checked_call(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a function that a user gave."""
    if not callable(function):
        raise InvalidTypeError(
            f"`{name}` must be callable. Received: {type(function).__name__} {function!r:.200}. Pass the "
            "function itself, not what it returns."
        )
    return function
