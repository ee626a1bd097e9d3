"""Hooks that end training where an evaluation's metric is good enough, or gets no better.

The metrics are read from the event files that `Estimator.evaluate` writes, so that an evaluation in another
process counts, too.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

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
)


@_TEXTS
def stop_if_higher_hook(
    estimator: Estimator,
    metric_name: str,
    threshold: float,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """Return a hook that ends the training when an evaluation's metric is higher than a number.

    >>> from unisono import estimator
    >>> hook = stop_if_higher_hook(estimator.BaselineRegressor(), "accuracy", 0.9)
    """
    watch = _Watch(estimator, metric_name, eval_dir, min_steps, operator.gt)
    return make_early_stopping_hook(
        estimator, lambda: watch.crosses(threshold), run_every_secs, run_every_steps
    )


@_TEXTS
def stop_if_lower_hook(
    estimator: Estimator,
    metric_name: str,
    threshold: float,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """Return a hook that ends the training when an evaluation's metric is lower than a number.

    >>> from unisono import estimator
    >>> hook = stop_if_lower_hook(estimator.BaselineRegressor(), "loss", 0.1)
    """
    watch = _Watch(estimator, metric_name, eval_dir, min_steps, operator.lt)
    return make_early_stopping_hook(
        estimator, lambda: watch.crosses(threshold), run_every_secs, run_every_steps
    )


@_TEXTS
def stop_if_no_increase_hook(
    estimator: Estimator,
    metric_name: str,
    max_steps_without_increase: int,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """Return a hook that ends the training when an evaluation's metric has not increased for many steps.

    >>> from unisono import estimator
    >>> hook = stop_if_no_increase_hook(estimator.BaselineRegressor(), "accuracy", 1000)
    """
    watch = _Watch(estimator, metric_name, eval_dir, min_steps, operator.gt)
    return make_early_stopping_hook(
        estimator, lambda: watch.rests(max_steps_without_increase), run_every_secs, run_every_steps
    )


@_TEXTS
def stop_if_no_decrease_hook(
    estimator: Estimator,
    metric_name: str,
    max_steps_without_decrease: int,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> SessionRunHook:
    """Return a hook that ends the training when an evaluation's metric has not decreased for many steps.

    >>> from unisono import estimator
    >>> hook = stop_if_no_decrease_hook(estimator.BaselineRegressor(), "loss", 1000)
    """
    watch = _Watch(estimator, metric_name, eval_dir, min_steps, operator.lt)
    return make_early_stopping_hook(
        estimator, lambda: watch.rests(max_steps_without_decrease), run_every_secs, run_every_steps
    )


class _Watch:
    """A metric of the evaluations so far."""

    def __init__(
        self,
        estimator: Estimator,
        metric: str,
        eval_dir: str | None,
        min_steps: int,
        is_better: Callable[[float, float], bool],
    ) -> None:
        self._estimator, self._eval_dir = estimator, eval_dir
        self._metric, self._min_steps, self._is_better = metric, min_steps, is_better

    def _values(self) -> dict[int, float]:
        eval_dir = self._estimator.eval_dir() if self._eval_dir is None else self._eval_dir
        every = read_eval_metrics(eval_dir)
        found = {step: metrics for step, metrics in every.items() if step >= self._min_steps}
        for step, metrics in found.items():
            if self._metric not in metrics:
                raise InvalidArgumentError(
                    f"Evaluations must have the metric that ends the training. Received: {self._metric!r}; "
                    f"that of step {step} has {sorted(metrics)}."
                )
        return {step: metrics[self._metric] for step, metrics in found.items()}

    def crosses(self, threshold: float) -> bool:
        """Return whether an evaluation was better than a number."""
        for step, value in self._values().items():
            if self._is_better(value, threshold):
                _LOG.info("At step %d, %s is %g: it is past %g.", step, self._metric, value, threshold)
                return True
        return False

    def rests(self, steps: int) -> bool:
        """Return whether an evaluation was so many steps after the best one before it."""
        best: tuple[int, float] | None = None
        for step, value in self._values().items():
            if best is None or self._is_better(value, best[1]):
                best = step, value
            if step - best[0] >= steps:
                _LOG.info(
                    "%s has not been better than %g for %d steps.", self._metric, best[1], step - best[0]
                )
                return True
        return False
