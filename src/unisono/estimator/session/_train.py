"""A training: from the first element to the last step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from unisono._errors import InvalidArgumentError, MissingPackageError
from unisono._system._packages import require_packages
from unisono.estimator._collections import RecordedSummary, summaries_of
from unisono.estimator._spec import ModeKeys
from unisono.estimator.hooks._checkpoints import CheckpointSaverHook, CheckpointSaverListener
from unisono.estimator.hooks._hook import HookSession, SessionRunHook
from unisono.estimator.hooks._logging import LoggingTensorHook, NanTensorHook, StepCounterHook
from unisono.estimator.hooks._runner import HookRunner
from unisono.estimator.hooks._summaries import SummarySaverHook
from unisono.estimator.session._evaluate import DataPass, PassTask
from unisono.estimator.session._input import InputFunction
from unisono.estimator.session._saving import TrainingSaver

if TYPE_CHECKING:
    from unisono.estimator._run_config import RunConfig

_LOG = logging.getLogger("unisono")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainTask(PassTask):
    """The parts of a training."""

    config: RunConfig
    model_dir: str
    listeners: Sequence[CheckpointSaverListener] = ()


class Training(DataPass):
    """One call of `Estimator.train`.

    Args:
        data: makes pairs of features and labels, here or on the workers of a cluster with parameter servers.
    """

    def __init__(self, task: TrainTask, data: InputFunction) -> None:
        super().__init__(task, ModeKeys.TRAIN, data)
        self._task = task
        self._global_step = 0

    def run(self) -> float | None:
        """Train until the data end or a hook stops; return the last loss."""
        with self.runner.around_training():
            return self._run()

    def _run(self) -> float | None:
        self.create_with_data()
        saver = self._saver()
        session = HookSession(
            exposed=self.step.exposed,
            global_step=lambda: self._global_step,
            save=saver.save,
            variable=self.variables.variables.get,
            summaries=self._summaries(),
        )
        hooks = self.begin(self._hooks(), session)
        self._global_step = int(self.variables.global_step.value)
        # Hooks run in no scope: they may evaluate, on another strategy.
        with contextlib.closing(saver):
            hooks.after_create_session()
            loss = self._loop(hooks)
            hooks.end()
            self.runner.wait_for_all()
        # The others see the last checkpoint when they return, too.
        self._task.strategy.process_group.gather(b"")
        return loss

    def _saver(self) -> TrainingSaver:
        """Return the writer of checkpoints, as the model_fn's saver says, or the configuration."""
        own, config = getattr(self.step.spec.scaffold, "saver", None), self._task.config
        keeps = getattr(own, "max_to_keep", config.keep_checkpoint_max)
        hours = getattr(own, "keep_checkpoint_every_n_hours", config.keep_checkpoint_every_n_hours)
        return TrainingSaver(self.variables, self._task.model_dir, keeps, hours, self.runner)

    def _loop(self, hooks: HookRunner) -> float | None:
        values: dict[str, Any] = {}
        while not hooks.should_stop:
            with self.runner.shared_errors():
                room = hooks.before_step(self._global_step)
            with self._task.strategy.scope():
                done, fetched = self.runner.run(room, hooks.wanted)
            if not done:
                break
            self._global_step += done
            values = {**fetched, "global_step": self._global_step}
            with self.runner.shared_errors():
                hooks.after_step(values)
        self.runner.stop()
        loss = None if not values else float(values["loss"])
        if loss is not None:
            _LOG.info("Loss for final step: %s.", loss)
        return loss

    def _hooks(self) -> list[SessionRunHook]:
        """Return all hooks, in TensorFlow's order."""
        task, config, spec = self._task, self._task.config, self.step.spec
        hooks: list[SessionRunHook] = [*task.hooks, NanTensorHook("loss")]
        every = config.log_step_count_steps
        if every:
            hooks.append(LoggingTensorHook({"loss": "loss", "step": "global_step"}, every_n_iter=every))
        hooks.extend(spec.training_hooks or ())
        if not task.strategy.is_chief:
            return hooks
        hooks.extend(spec.training_chief_hooks or ())
        writes = can_write_summaries(config)
        if every:
            hooks.append(StepCounterHook(every_n_steps=every, output_dir=task.model_dir if writes else None))
        if writes and config.save_summary_steps:
            hooks.append(SummarySaverHook(save_steps=config.save_summary_steps, output_dir=task.model_dir))
        hooks.extend(self._savers(hooks))
        return hooks

    def _savers(self, hooks: Sequence[SessionRunHook]) -> list[SessionRunHook]:
        """Return the hook that saves checkpoints, unless the user has one."""
        task, config = self._task, self._task.config
        own = [hook for hook in hooks if isinstance(hook, CheckpointSaverHook)]
        if own:
            for listener in task.listeners:
                own[0].add_listener(listener)
            return []
        if not (config.save_checkpoints_steps or config.save_checkpoints_secs):
            if task.listeners:
                raise InvalidArgumentError(
                    "There should be a CheckpointSaverHook to use saving_listeners. Received: a RunConfig "
                    "that saves no checkpoints. Set one of `save_checkpoints_steps` and "
                    "`save_checkpoints_secs`."
                )
            return []
        return [
            CheckpointSaverHook(
                task.model_dir,
                save_secs=config.save_checkpoints_secs,
                save_steps=config.save_checkpoints_steps,
                listeners=task.listeners,
            )
        ]

    def _summaries(self) -> list[RecordedSummary]:
        loss = RecordedSummary("scalar", "loss", "loss")
        return [loss, *(s for s in summaries_of(self.step.call) if s.tag != "loss")]


def can_write_summaries(config: RunConfig) -> bool:
    """Return whether the packages for event files are there; a log line says if not."""
    try:
        require_packages("A file for TensorBoard", "tensorboard", "tensorboard")
    except MissingPackageError as error:
        if config.save_summary_steps:
            _say_without_summaries(str(error))
        return False
    return True


@functools.cache  # Once in a program, which may train many estimators, each in several turns.
def _say_without_summaries(why: str) -> None:
    _LOG.info("No summaries are written. %s", why)
