"""One pass of a model_fn over data: an evaluation, predictions, or a part of a training."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from unisono._errors import InvalidArgumentError
from unisono._types import PyTree
from unisono.estimator._collections import summaries_of
from unisono.estimator._spec import ModeKeys, metric_of
from unisono.estimator.hooks._hook import HookSession, SessionRunHook
from unisono.estimator.hooks._runner import HookRunner
from unisono.estimator.session._input import InputFunction
from unisono.estimator.session._model_step import PREDICTIONS, ModelFunction, ModelStep, ModelVariables
from unisono.estimator.session._saving import Initializer, initialize, restore
from unisono.spi import Executables
from unisono.summary import create_file_writer

if TYPE_CHECKING:
    from unisono.spi import ReplicatedStrategy
    from unisono.training.named_steps._protocol import ElementSource

_LOG = logging.getLogger("unisono")


@dataclasses.dataclass(frozen=True)
class PassTask:
    """The parts of a pass over data."""

    model_fn: ModelFunction
    strategy: ReplicatedStrategy
    checkpoint: str | None
    hooks: Sequence[SessionRunHook] = ()
    initialize: Initializer | None = None
    executables: Executables | None = None


class DataPass:
    """One pass of a model_fn over data."""

    def __init__(self, task: PassTask, mode: str, source: ElementSource) -> None:
        self.task = task
        self.variables = ModelVariables()
        self.step = ModelStep(task.model_fn, mode, self.variables)
        self.runner = task.strategy.make_step_runner(self.step, source, task.executables)

    def create(self) -> bool:
        """Make the variables; False without data."""
        with self.task.strategy.scope():
            return self.runner.create_variables()

    def create_with_data(self) -> None:
        """Make the variables.

        Raises:
            InvalidArgumentError: without data.
        """
        if not self.create():
            raise InvalidArgumentError(
                "Data must hold at least one element. Received: an input_fn whose data are empty. Check the "
                "source, and the batch size with `drop_remainder=True`."
            )

    def begin(self, hooks: Sequence[SessionRunHook], session: HookSession | None = None) -> HookRunner:
        """Restore the variables, and begin with the hooks."""
        task, step, names = self.task, self.step, None
        if session is None:
            names = getattr(getattr(step.spec.scaffold, "saver", None), "names", None)
            session = HookSession(
                exposed=step.exposed,
                global_step=lambda: int(self.variables.global_step.value),
                variable=self.variables.variables.get,
                summaries=summaries_of(step.call),
            )
        runner = HookRunner(hooks, session)
        runner.begin()
        if task.checkpoint is not None:
            restore(self.variables, task.checkpoint, names)
            _LOG.info("Restored the variables of %s.", task.checkpoint)
        else:
            initialize(step, task.initialize)
        return runner


def evaluate(task: PassTask, data: InputFunction, steps: int | None, log_dir: str | None) -> dict[str, Any]:
    """Return the metrics of a checkpoint by name, with `loss` and `global_step`.

    Raises:
        InvalidArgumentError: without data.
    """
    run = DataPass(task, ModeKeys.EVAL, data)
    with task.strategy.scope():
        run.create_with_data()
        spec = run.step.spec
        hooks = run.begin([*task.hooks, *(spec.evaluation_hooks or ())])
        hooks.after_create_session()
        metrics = {name: metric_of(value) for name, value in (spec.eval_metric_ops or {}).items()}
        for metric in metrics.values():
            if metric is not None:
                metric.reset_state()
        loss = _mean_loss(run, hooks, steps)
        values = {name: metric.result() for name, metric in metrics.items() if metric is not None}
        hooks.end()
    results = {name: _number(value) for name, value in values.items()}
    results.setdefault("loss", loss)
    results["global_step"] = np.int64(run.variables.global_step.value)
    shown = ", ".join(f"{name} = {value}" for name, value in sorted(results.items()))
    _LOG.info("Saving dict for global step %d: %s", results["global_step"], shown)
    if log_dir is not None and task.strategy.is_chief:
        _write(log_dir, results)
    return results


def _mean_loss(run: DataPass, hooks: HookRunner, steps: int | None) -> np.float32:
    # On the devices until the end: reading each would wait for its step.
    losses: list[tuple[int, Any]] = []
    taken = 0
    while not hooks.should_stop and (steps is None or taken < steps):
        with run.runner.shared_errors():
            room = hooks.before_step(taken)
        room = room if steps is None else min(room, steps - taken)
        done, values = run.runner.run(room, hooks.wanted, losses)
        if not done:
            break
        taken += done
        with run.runner.shared_errors():
            hooks.after_step({**values, "global_step": taken})
    run.runner.stop()
    numbers = [np.asarray(every)[:count] for count, every in losses]
    return np.float32(np.mean(np.concatenate(numbers), dtype=np.float64)) if numbers else np.float32(np.nan)


def _number(value: object) -> Any:
    array = np.asarray(value)
    return array[()] if array.ndim == 0 else array


def _write(log_dir: str, results: Mapping[str, Any]) -> None:
    """Write the results for TensorBoard."""
    writer = create_file_writer(log_dir)
    step = int(results["global_step"])
    for name, value in results.items():
        if name != "global_step" and np.ndim(value) == 0:
            writer.write("scalar", name, step, np.asarray(value))
    writer.close()


def predictions(
    task: PassTask,
    data: InputFunction,
    keys: Sequence[str] | str | None,
    single: bool,
) -> Iterator[Any]:
    """Yield the predictions of a checkpoint.

    Raises:
        InvalidArgumentError: for keys of no prediction, or predictions of different lengths.
    """
    run = DataPass(task, ModeKeys.PREDICT, lambda *where: ((features, None) for features, _ in data(*where)))
    with task.strategy.scope():
        if not run.create():
            return
        spec = run.step.spec
        names = _chosen(spec.predictions, keys)
        hooks = run.begin([*task.hooks, *(spec.prediction_hooks or ())])
        hooks.after_create_session()
    for taken in itertools.count():
        if hooks.should_stop:
            break
        # Not around `yield`: the caller's code is in no scope of ours.
        with task.strategy.scope():
            hooks.before_step(taken)
            done, values = run.runner.run(1, {*hooks.wanted, *names.values()})
            if not done:
                break
            hooks.after_step({**values, "global_step": taken + 1})
        batch = {key: np.asarray(values[name]) for key, name in names.items()}
        yield from _examples(batch, isinstance(spec.predictions, Mapping), single)
    with task.strategy.scope():
        hooks.end()


def _chosen(predictions: PyTree, keys: Sequence[str] | str | None) -> dict[str, str]:
    """Return the names of the values that a step returns, by the keys of predictions."""
    if not isinstance(predictions, Mapping):
        if keys is not None:
            raise InvalidArgumentError(
                "predict_keys argument is not valid in case of non-dict predictions. Received: "
                f"predict_keys={keys!r}. Leave it out."
            )
        return {"": PREDICTIONS}
    wanted = None if keys is None else {keys} if isinstance(keys, str) else set(keys)
    names = {key: f"{PREDICTIONS}/{key}" for key in predictions if wanted is None or key in wanted}
    if not names:
        raise InvalidArgumentError(
            f"Expected to run at least one output from {list(predictions)}. Received: predict_keys={keys!r}."
        )
    return names


def _examples(batch: Mapping[str, np.ndarray], is_dict: bool, single: bool) -> Iterator[Any]:
    if not single:
        yield dict(batch) if is_dict else batch[""]
        return
    lengths = {key: value.shape[0] if value.ndim else None for key, value in batch.items()}
    if len(set(lengths.values())) != 1 or None in lengths.values():
        raise InvalidArgumentError(
            f"Batch length of predictions should be same. Received: {lengths}. Pass "
            "`yield_single_examples=False`."
        )
    for i in range(next(iter(lengths.values())) or 0):
        yield {key: value[i] for key, value in batch.items()} if is_dict else batch[""][i]
