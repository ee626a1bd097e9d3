"""Hooks that end training where an evaluation's metric is good enough, or gets no better.

The metrics are read from the event files that `Estimator.evaluate` writes, so that an evaluation in another
process counts, too.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, TypedDict, Unpack

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono.estimator._docstrings import Texts
from unisono.estimator.hooks._hook import SessionRunContext, SessionRunHook
from unisono.estimator.hooks._timer import IntervalHook

if TYPE_CHECKING:
    from unisono.estimator._estimator import Estimator

_LOG = logging.getLogger("unisono")


def read_eval_metrics(eval_dir: str) -> dict[int, Mapping[str, float]]:
    """Return the metrics of all evaluations, by step.

    Args:
        eval_dir: the directory of their event files, such as `estimator.eval_dir()`; it may be missing.

    >>> read_eval_metrics("/missing")
    {}
    """
    from unisono._summary._event_files import read_scalars

    return dict(read_scalars(eval_dir))


class StopOnPredicateHook(IntervalHook):
    """End the loop when a function returns True."""

    def __init__(
        self,
        should_stop_fn: Callable[[], bool],
        run_every_secs: float | None = 60,
        run_every_steps: int | None = None,
    ) -> None:
        if not callable(should_stop_fn):
            raise InvalidTypeError(
                f"`should_stop_fn` must be a function without arguments. Received: {should_stop_fn!r}."
            )
        super().__init__(run_every_secs, run_every_steps)
        self._should_stop = should_stop_fn

    def _act(self, run_context: SessionRunContext, step: int) -> None:
        self._timer.update_last_triggered_step(step)
        if self._should_stop():
            _LOG.info("Requesting early stopping at global step %d.", step)
            run_context.request_stop()


def make_early_stopping_hook(
    estimator: Estimator,
    should_stop_fn: Callable[[], bool],
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """Return a hook that ends the training when a function returns True.

    Args:
        estimator: whose training; for TensorFlow's signature.
        should_stop_fn: takes no arguments.
        run_every_secs: the number of seconds between two calls.
        run_every_steps: the number of steps between two calls; then `run_every_secs` is None.

    Raises:
        InvalidArgumentError: both or none of seconds and steps are given.
        InvalidTypeError: the function cannot be called, or `estimator` is none.

    >>> from unisono import estimator
    >>> hook = make_early_stopping_hook(estimator.BaselineRegressor(), lambda: True)
    """
    if not hasattr(estimator, "eval_dir"):
        raise InvalidTypeError(f"`estimator` must be an `Estimator`. Received: {estimator!r}.")
    return StopOnPredicateHook(should_stop_fn, run_every_secs, run_every_steps)


class WatchOptions(TypedDict, total=False):
    """The arguments with which the functions below end."""

    eval_dir: str | None
    min_steps: int
    run_every_secs: float | None
    run_every_steps: int | None


def watching_hook(
    estimator: Estimator,
    metric_name: str,
    is_enough: Callable[[str, Mapping[int, float]], bool],
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """Return a hook that ends the training by a metric of the evaluations so far."""

    def should_stop() -> bool:
        every = read_eval_metrics(estimator.eval_dir() if eval_dir is None else eval_dir)
        late = {step: metrics for step, metrics in every.items() if step >= min_steps}
        for step, metrics in late.items():
            if metric_name not in metrics:
                raise InvalidArgumentError(
                    f"Evaluations must have the metric that ends the training. Received: {metric_name!r}; "
                    f"step {step} has {sorted(metrics)}."
                )
        return is_enough(metric_name, {step: metrics[metric_name] for step, metrics in late.items()})

    return make_early_stopping_hook(estimator, should_stop, run_every_secs, run_every_steps)


def _crosses(
    is_better: Callable[[float, float], bool], threshold: float, name: str, values: Mapping[int, float]
) -> bool:
    """Return whether an evaluation was better than a number."""
    for step, value in values.items():
        if is_better(value, threshold):
            _LOG.info("At step %d, %s is %g: it is past %g.", step, name, value, threshold)
            return True
    return False


def _rests(
    is_better: Callable[[float, float], bool], steps: int, name: str, values: Mapping[int, float]
) -> bool:
    """Return whether an evaluation was so many steps after the best one before it."""
    best: tuple[int, float] | None = None
    for step, value in values.items():
        if best is None or is_better(value, best[1]):
            best = step, value
        if step - best[0] >= steps:
            _LOG.info("%s has not been better than %g for %d steps.", name, best[1], step - best[0])
            return True
    return False


_TEXTS = Texts(
    {
        "estimator": "`Estimator`, whose training ends and whose evaluations are read.",
        "metric_name": 'string; a metric of the evaluations, such as `"accuracy"`.',
        "threshold": "number.",
        "max_steps_without_increase": "whole number; how many steps the metric may go without an increase.",
        "max_steps_without_decrease": "whole number; how many steps the metric may go without a decrease.",
        "eval_dir": "path of the evaluations' event files; None for `estimator.eval_dir()`.",
        "min_steps": "whole number; evaluations of earlier steps do not count.",
        "run_every_secs": "seconds between two readings of the evaluations; None to count steps.",
        "run_every_steps": "steps between two readings of the evaluations; None to count seconds.",
    },
    "A hook for `Estimator.train` or `TrainSpec`.",
    {
        "InvalidArgumentError": "both or none of seconds and steps are given, or, in training, evaluations "
        "lack the metric.",
        "InvalidTypeError": "`estimator` is no Estimator.",
    },
    options_of=watching_hook,
)


@_TEXTS
def stop_if_higher_hook(
    estimator: Estimator, metric_name: str, threshold: float, **options: Unpack[WatchOptions]
) -> SessionRunHook:
    """Return a hook that ends the training when an evaluation's metric is higher than a number.

    >>> from unisono import estimator
    >>> hook = stop_if_higher_hook(estimator.BaselineRegressor(), "accuracy", 0.9)
    """
    return watching_hook(estimator, metric_name, partial(_crosses, operator.gt, threshold), **options)


@_TEXTS
def stop_if_lower_hook(
    estimator: Estimator, metric_name: str, threshold: float, **options: Unpack[WatchOptions]
) -> SessionRunHook:
    """Return a hook that ends the training when an evaluation's metric is lower than a number.

    >>> from unisono import estimator
    >>> hook = stop_if_lower_hook(estimator.BaselineRegressor(), "loss", 0.1)
    """
    return watching_hook(estimator, metric_name, partial(_crosses, operator.lt, threshold), **options)


@_TEXTS
def stop_if_no_increase_hook(
    estimator: Estimator, metric_name: str, max_steps_without_increase: int, **options: Unpack[WatchOptions]
) -> SessionRunHook:
    """Return a hook that ends the training when an evaluation's metric has not increased for many steps.

    >>> from unisono import estimator
    >>> hook = stop_if_no_increase_hook(estimator.BaselineRegressor(), "accuracy", 1000)
    """
    return watching_hook(
        estimator, metric_name, partial(_rests, operator.gt, max_steps_without_increase), **options
    )


@_TEXTS
def stop_if_no_decrease_hook(
    estimator: Estimator, metric_name: str, max_steps_without_decrease: int, **options: Unpack[WatchOptions]
) -> SessionRunHook:
    """Return a hook that ends the training when an evaluation's metric has not decreased for many steps.

    >>> from unisono import estimator
    >>> hook = stop_if_no_decrease_hook(estimator.BaselineRegressor(), "loss", 1000)
    """
    return watching_hook(
        estimator, metric_name, partial(_rests, operator.lt, max_steps_without_decrease), **options
    )
