"""`train_and_evaluate`: one process trains and evaluates in turn; of a cluster, each task does its part.

Tests: tests/virtual/estimator/test_train_and_evaluate.py, tests/cluster/test_estimator.py.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono.checkpoint._markers import mark_finished
from unisono.cluster_resolver._spec import ClusterSpec
from unisono.estimator._estimator import Estimator
from unisono.estimator._run_config import RunConfig, TaskType
from unisono.estimator._train_spec import EvalSpec, TrainSpec
from unisono.estimator.hooks._checkpoints import CheckpointSaverListener
from unisono.estimator.hooks._timer import SecondOrStepTimer
from unisono.estimator.session._progress import shown_progress
from unisono.spi import TrainingEnd
from unisono.standalone._client import run_on_cluster
from unisono.strategies._base import Strategy

if TYPE_CHECKING:
    from unisono.estimator.hooks._hook import HookSession
    from unisono.strategies._options import WorkerTerms

_LOG = logging.getLogger("unisono")

#: Metrics of the last evaluation, None without any, and what exporters returned.
Results = tuple[dict[str, Any] | None, list[Any]]


def train_and_evaluate(estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec) -> Results:
    """Train, and evaluate checkpoints.

    In one process each checkpoint is evaluated when it is written, unless the evaluation before began less
    than `throttle_secs` ago; the last one always is. In a cluster of TF_CONFIG, chief and workers train on
    the strategy, and the task `evaluator` evaluates the newest checkpoint until training is over. With
    `DistributeConfig(remote_cluster=...)` the servers there train, and this process is their client, which
    evaluates the last checkpoint where the cluster has no evaluator.

    Args:
        estimator: an `Estimator`; of a cluster, all tasks' `model_dir` must be one shared directory.
        train_spec: the training.
        eval_spec: the evaluations.

    Returns:
        The metrics of the last evaluation, and what the exporters returned after it; `(None, [])` in a task
        that evaluates nothing.

    Raises:
        InvalidTypeError: for an argument of another type.
        InvalidArgumentError: for a cluster that the strategy cannot use.

    >>> from unisono import estimator
    >>> data = lambda: ({"age": [20.0]}, [1.0])
    >>> specs = estimator.TrainSpec(data, max_steps=1), estimator.EvalSpec(data, steps=1)
    >>> results, exports = train_and_evaluate(estimator.BaselineRegressor(), *specs)
    >>> int(results["global_step"])
    1
    """
    given = ((estimator, Estimator), (train_spec, TrainSpec), (eval_spec, EvalSpec))
    for value, kind in given:
        if not isinstance(value, kind):
            raise InvalidTypeError(
                f"train_and_evaluate needs an {kind.__name__}. Received: {type(value).__name__}. Write "
                "`train_and_evaluate(estimator, train_spec, eval_spec)`."
            )
    config = estimator.config
    if config.remote_cluster is not None:
        return _on_servers(estimator, train_spec, eval_spec)
    if config.task_type == TaskType.EVALUATOR:
        with shown_progress():
            return _Evaluations(estimator, train_spec, eval_spec).until_finished()
    cluster = config.cluster_spec
    if cluster and sum(cluster.num_tasks(job) for job in cluster.jobs) > 1:
        _train_in_cluster(estimator, train_spec)
        return None, []
    evaluations = _Evaluations(estimator, train_spec, eval_spec)
    listener = _EvaluationListener(evaluations, eval_spec.throttle_secs)
    _train(estimator, train_spec, [listener])
    return evaluations.metrics, evaluations.exports


def _on_servers(estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec) -> Results:
    """Let servers train; evaluate here where none of them does."""
    config = estimator.config
    cluster = (config.remote_cluster or ClusterSpec({})).as_dict()
    strategy = config.train_distribute
    make = None if strategy is None else strategy.of_servers
    if strategy is None or make is None:
        raise InvalidArgumentError(
            "A remote cluster trains on one of ['CollectiveAllReduceStrategy', 'MirroredStrategy', "
            "'MultiWorkerMirroredStrategy', 'ParameterServerStrategy']. Received: train_distribute="
            f"{strategy!r}. Write `DistributeConfig(train_distribute="
            "unisono.MultiWorkerMirroredStrategy(), remote_cluster=...)`."
        )
    run_on_cluster(cluster, _as_task, estimator.parts(), (make, strategy.terms), train_spec, eval_spec)
    evaluations = _Evaluations(estimator, train_spec, eval_spec)
    if TaskType.EVALUATOR not in cluster:
        evaluations.evaluate()
    return evaluations.metrics, evaluations.exports


def _as_task(
    parts: dict[str, Any],
    made_as: tuple[Callable[[], Strategy], WorkerTerms],
    train_spec: TrainSpec,
    eval_spec: EvalSpec,
) -> None:
    """Do the part of a task that TF_CONFIG describes."""
    make, terms = made_as
    # Parameter servers, and workers of theirs, serve in the constructor.
    strategy = make()
    strategy.terms = terms
    arguments = {**parts.pop("config"), "train_distribute": strategy}
    train_and_evaluate(Estimator(**parts, config=RunConfig(**arguments)), train_spec, eval_spec)


def _train(estimator: Estimator, spec: TrainSpec, listeners: list[CheckpointSaverListener]) -> None:
    estimator.train(
        spec.input_fn, hooks=spec.hooks, max_steps=spec.max_steps,
        saving_listeners=[*(spec.saving_listeners or ()), *listeners],
    )  # fmt: skip


def _train_in_cluster(estimator: Estimator, spec: TrainSpec) -> None:
    """Train as a task of a cluster; of several workers the first says when it is over."""
    config = estimator.config
    if config.train_distribute is None:
        raise InvalidArgumentError(
            "A cluster needs a strategy. Received: a TF_CONFIG with the jobs "
            f"{config.cluster_spec.jobs}, and a RunConfig without `train_distribute`. Write "
            "`RunConfig(train_distribute=unisono.MultiWorkerMirroredStrategy())`, or "
            "`ParameterServerStrategy()` for a cluster with `ps` tasks."
        )
    if config.is_chief:
        TrainingEnd(estimator.model_dir).revoke()
    _train(estimator, spec, [])
    if config.is_chief:
        mark_finished(estimator.model_dir)


class _Evaluations:
    """The evaluations of one Estimator, and what is exported."""

    def __init__(self, estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec) -> None:
        self._estimator, self._train, self._eval = estimator, train_spec, eval_spec
        self._last: str | None = None
        self.metrics: dict[str, Any] | None = None
        self.exports: list[Any] = []

    def evaluate(self) -> bool:
        """Evaluate the newest checkpoint and export; return whether there was a new one."""
        path = self._estimator.latest_checkpoint()
        if path is None or path == self._last:
            return False
        spec = self._eval
        self.metrics = self._estimator.evaluate(
            spec.input_fn, steps=spec.steps, name=spec.name, checkpoint_path=path, hooks=spec.hooks
        )
        self._last = path
        self.exports = []
        for exporter in spec.exporters or ():
            where = os.path.join(self._estimator.model_dir, "export", exporter.name)
            self.exports.append(
                exporter.export(
                    estimator=self._estimator,
                    export_path=where,
                    checkpoint_path=path,
                    eval_result=self.metrics,
                    is_the_final_export=self._is_over(),
                )
            )
        return True

    def _is_over(self) -> bool:
        """Return whether the evaluated checkpoint is the last one of the training."""
        most = self._train.max_steps
        return bool(most and self.metrics is not None and self.metrics["global_step"] >= most)

    def until_finished(self) -> Results:
        """Evaluate new checkpoints until training is over."""
        end = TrainingEnd(self._estimator.model_dir)
        end.wait(self._eval.start_delay_secs)
        while True:
            # In this order: a checkpoint that appears between the two looks is evaluated.
            is_over, began = end.is_reached(), time.monotonic()
            if self.evaluate():
                if self._is_over():
                    break
                end.wait(self._eval.throttle_secs - (time.monotonic() - began))
            elif is_over:
                break
            else:
                end.wait()
        step = None if self.metrics is None else self.metrics["global_step"]
        _LOG.info("Exiting evaluation: training is over, global_step=%s.", step)
        return self.metrics, self.exports


class _EvaluationListener(CheckpointSaverListener):
    """Evaluates each checkpoint of a training in this process.

    Args:
        throttle_secs: seconds between two evaluations, at least.
    """

    def __init__(self, evaluations: _Evaluations, throttle_secs: float) -> None:
        self._evaluations = evaluations
        self._throttle = throttle_secs
        self._timer = SecondOrStepTimer(every_secs=throttle_secs)
        self._is_first = True

    def begin(self) -> None:
        """Begin with a timer that has not triggered."""
        self._timer.reset()
        self._is_first = True

    def after_save(self, session: HookSession, global_step_value: int) -> bool | None:
        """Evaluate, unless the last evaluation was a moment ago."""
        if self._is_first:
            # Written before the first step.
            self._is_first = False
        elif self._timer.should_trigger_for_step(global_step_value):
            self._evaluate(global_step_value)
        else:
            _LOG.info("Skip the current checkpoint eval due to throttle secs (%s secs).", self._throttle)
        return None

    def end(self, session: HookSession, global_step_value: int) -> None:
        """Evaluate the last checkpoint, if that is not done."""
        if global_step_value != self._timer.last_triggered_step():
            self._evaluate(global_step_value)

    def _evaluate(self, step: int) -> None:
        self._timer.update_last_triggered_step(step)
        self._evaluations.evaluate()
