"""`train_and_evaluate`: one process trains and evaluates in turn; of a cluster, each task does its part.

Source: https://github.com/tensorflow/estimator (tensorflow_estimator/python/estimator/training.py)

Tests: tests/virtual/estimator/test_train_and_evaluate.py, tests/cluster/test_estimator.py.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono._types import UserValue
from unisono.checkpoint._markers import mark_finished
from unisono.cluster_resolver._spec import ClusterSpec
from unisono.estimator._estimator import Estimator
from unisono.estimator._run_config import RunConfig, TaskType
from unisono.estimator._spec import checked_call, checked_hooks, checked_listeners
from unisono.estimator.hooks._checkpoints import CheckpointSaverListener
from unisono.estimator.hooks._timer import SecondOrStepTimer
from unisono.estimator.session._progress import shown_progress
from unisono.spi import TrainingEnd
from unisono.strategies._base import Strategy

if TYPE_CHECKING:
    from unisono.estimator.hooks._hook import HookSession, SessionRunHook
    from unisono.strategies._options import WorkerTerms

_LOG = logging.getLogger("unisono")

#: Metrics of the last evaluation, None without any, and what exporters returned.
Results = tuple[dict[str, Any] | None, list[Any]]


@dataclasses.dataclass(frozen=True)
class TrainSpec:
    """The training of `train_and_evaluate`.

    Args:
        input_fn: as for `Estimator.train`.
        max_steps: the number of steps in all; None trains until the data end.
        hooks: `SessionRunHook`s.
        saving_listeners: `CheckpointSaverListener`s.

    Raises:
        InvalidArgumentError: when `max_steps` is not above 0.
        InvalidTypeError: when `input_fn` cannot be called, or a hook or listener is none.

    >>> TrainSpec(lambda: None, max_steps=100).max_steps
    100
    """

    input_fn: Callable[..., Any]
    max_steps: int | None = None
    hooks: Sequence[SessionRunHook] | None = None
    saving_listeners: Sequence[CheckpointSaverListener] | None = None

    def __post_init__(self) -> None:
        checked_call(self.input_fn, "input_fn")
        if self.max_steps is not None and self.max_steps <= 0:
            raise InvalidArgumentError(f"Must specify max_steps > 0. Received: max_steps={self.max_steps}.")
        object.__setattr__(self, "hooks", checked_hooks(self.hooks, "hooks"))
        object.__setattr__(self, "saving_listeners", checked_listeners(self.saving_listeners))


@dataclasses.dataclass(frozen=True)
class EvalSpec:
    """The evaluations of `train_and_evaluate`, and what is exported after each.

    Args:
        input_fn: as for `Estimator.evaluate`.
        steps: the number of steps of an evaluation; None for all data.
        name: of the evaluation, if there are several: each has its own event files.
        hooks: `SessionRunHook`s.
        exporters: `Exporter`s, of different names.
        start_delay_secs: seconds before an evaluator's first evaluation.
        throttle_secs: seconds from the beginning of an evaluation until the next one, at least.

    Raises:
        InvalidArgumentError: for a number that cannot be used, or exporters of one name.
        InvalidTypeError: when `input_fn` cannot be called, or a hook or exporter is none.

    >>> EvalSpec(lambda: None, steps=None).throttle_secs
    600
    """

    input_fn: Callable[..., Any]
    steps: int | None = 100
    name: str | None = None
    hooks: Sequence[SessionRunHook] | None = None
    exporters: UserValue = None
    start_delay_secs: float = 120
    throttle_secs: float = 600

    def __post_init__(self) -> None:
        checked_call(self.input_fn, "input_fn")
        if self.steps is not None and self.steps <= 0:
            raise InvalidArgumentError(f"Must specify steps > 0. Received: steps={self.steps}.")
        if self.name is not None and not isinstance(self.name, str):
            raise InvalidTypeError(
                f"EvalSpec name must be a string. Received: name={self.name!r}. Write `name='test'`."
            )
        for name in ("start_delay_secs", "throttle_secs"):
            if getattr(self, name) < 0:
                raise InvalidArgumentError(f"Must specify {name} >= 0. Received: {getattr(self, name)}.")
        object.__setattr__(self, "hooks", checked_hooks(self.hooks, "hooks"))
        object.__setattr__(self, "exporters", _checked_exporters(self.exporters))


def _checked_exporters(exporters: object) -> tuple[Any, ...]:
    if not exporters:
        return ()
    every = tuple(exporters) if isinstance(exporters, (list, tuple)) else (exporters,)
    names: set[str] = set()
    for exporter in every:
        if not callable(getattr(exporter, "export", None)):
            raise InvalidTypeError(
                f"`exporters` must be an Exporter, or several. Received: {exporter!r}. Write "
                "`unisono.estimator.FinalExporter('name', serving_input_receiver_fn)`."
            )
        name = getattr(exporter, "name", None)
        if not name:
            raise InvalidArgumentError(f"An Exporter cannot have a name that is None or empty: {exporter!r}.")
        if not isinstance(name, str):
            raise InvalidArgumentError(f"An Exporter must have a string name. Received: {name!r}.")
        if name in names:
            raise InvalidArgumentError(
                f"`exporters` must have unique names. Received: the name {name!r} twice. Rename one of them."
            )
        names.add(name)
    return every


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
    make = None if strategy is None else strategy._of_servers
    if strategy is None or make is None:
        raise InvalidArgumentError(
            "A remote cluster trains on one of ['CollectiveAllReduceStrategy', 'MirroredStrategy', "
            "'MultiWorkerMirroredStrategy', 'ParameterServerStrategy']. Received: train_distribute="
            f"{strategy!r}. Write `DistributeConfig(train_distribute="
            "unisono.MultiWorkerMirroredStrategy(), remote_cluster=...)`."
        )
    # Its packages are an extra.
    from unisono.standalone._client import run_on_cluster

    run_on_cluster(cluster, _as_task, estimator._parts(), (make, strategy._terms), train_spec, eval_spec)
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
    strategy._terms = terms
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
