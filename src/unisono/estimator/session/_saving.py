"""Checkpoints of a model_fn's variables: what is in them, and how they are restored.

Tests: tests/virtual/estimator/test_model_fn.py, tests/virtual/estimator/test_train.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras

from unisono._errors import CheckpointError, CheckpointMismatchError
from unisono._system._object_store import place_of
from unisono.checkpoint._checkpoint import Checkpoint
from unisono.checkpoint._manager import CheckpointManager
from unisono.checkpoint._reader import latest_checkpoint, load_checkpoint
from unisono.estimator.hooks._hook import HookSession
from unisono.estimator.session._model_step import GLOBAL_STEP, ModelStep, ModelVariables

if TYPE_CHECKING:
    from unisono.collectives._process_group import ProcessGroup
    from unisono.training.named_steps._protocol import StepRunner

#: Checkpoints are called `model.ckpt-N`, N the number of steps.
SERIES = "model.ckpt"

#: Hyperparameters that optimizers keep in variables: a program that has another one when it is started again
#: means it.
_HYPERPARAMETERS = ("learning_rate",)


def saved_variables(variables: ModelVariables) -> dict[str, keras.Variable]:
    """Return a checkpoint's variables by path: all but hyperparameters and the state of metrics."""
    return {
        path: variable
        for path, variable in variables.variables.items()
        if not _is_of_metric(variable) and not _is_hyperparameter(path, variables)
    }


def _is_of_metric(variable: keras.Variable) -> bool:
    # Keras marks the variables of metrics alone.
    return type(variable) is keras.Variable and variable.aggregation == "sum"


def _is_hyperparameter(path: str, variables: ModelVariables) -> bool:
    return path.rpartition("/")[2] in _HYPERPARAMETERS and path in variables.given


def restore(variables: ModelVariables, path: str, names: Mapping[str, str] | None = None) -> None:
    """Restore the variables of a checkpoint.

    Raises:
        CheckpointMismatchError: it lacks a variable, or has one of another shape.
        CheckpointError: it cannot be read.
    """
    wanted = {(names or {}).get(own, own): v for own, v in saved_variables(variables).items()}
    reader = load_checkpoint(path)
    missing = sorted(name for name in wanted if not reader.has_tensor(name))
    if missing:
        raise CheckpointMismatchError(
            f"A checkpoint must hold all variables of the model_fn. Received: {path} without {missing}; "
            f"it has {sorted(reader.get_variable_to_shape_map())}. Use the model_fn and params that trained "
            "it, or another `model_dir`."
        )
    for name, variable in wanted.items():
        value = reader.get_tensor(name)
        if tuple(value.shape) != tuple(variable.shape):
            raise CheckpointMismatchError(
                f"A checkpoint must fit the variables of the model_fn. Received: {name!r} of shape "
                f"{tuple(value.shape)} in {path}, which the model_fn makes of shape {tuple(variable.shape)}. "
                "Use the model_fn and params that trained it, or another `model_dir`."
            )
        variable.assign(value)


def newest_checkpoint(directory: str, group: ProcessGroup) -> str | None:
    """Return the path of the newest checkpoint that the first worker sees, or None.

    The others may look when it is not there yet, or when there is a newer one.
    """
    path = group.from_chief(lambda: os.fspath(latest_checkpoint(directory) or "").encode()).decode()
    if not path:
        return None
    # The same directory may have another name here.
    places = [path, os.path.join(directory, os.path.basename(path))]
    own = next((place for place in places if place_of(place).exists()), "")
    missing = [i for i, seen in enumerate(group.gather(own.encode())) if not seen]
    if missing:
        raise CheckpointError(
            "All workers need one `model_dir`, on a shared file system: they restore the checkpoint that the "
            f"first one has chosen. Received: {path}, which the workers {missing} do not see; `model_dir` is "
            f"{directory} here. Pass the same directory everywhere."
        )
    return own


def global_step_in(path: str | os.PathLike[str]) -> int:
    """Return the number of steps that a checkpoint was saved after."""
    return int(load_checkpoint(path).get_tensor(GLOBAL_STEP))


class TrainingSaver:
    """Writes the checkpoints of a training.

    Args:
        runner: of its steps; where all workers must read variables together, they do so between two steps.
    """

    def __init__(
        self,
        variables: ModelVariables,
        directory: str,
        max_to_keep: int | None,
        every_n_hours: float,
        runner: StepRunner,
    ) -> None:
        objects: dict[str, Any] = dict(saved_variables(variables))
        self._variables = variables
        # Not by Orbax: in one of 12 trainings on a busy machine a save failed, as TensorStore (0.1.86) did
        # not find a file that it had just written (2026-11-22).
        self._manager = CheckpointManager(
            Checkpoint(**objects), directory, max_to_keep or None, checkpoint_name=SERIES,
            keep_checkpoint_every_n_hours=every_n_hours, in_one_file=True,
        )  # fmt: skip
        self._last = ""
        self._write = runner.sharing(self._written)

    def save(self, wait: bool = False) -> str:
        """Write a checkpoint of the present step, unless there is one; return its path."""
        path = str(self._manager.directory / f"{SERIES}-{self._step}")
        if path != self._last and not place_of(path).exists():
            self._write()
        if wait:
            self._manager.wait()
        return path

    def _written(self) -> None:
        self._last = self._manager.save(self._step)

    @property
    def _step(self) -> int:
        return int(self._variables.global_step.value)

    def close(self) -> None:
        """Finish writing."""
        self._manager.close()


def initialize(step: ModelStep, given: Initializer | None) -> None:
    """Give variables their first values, where no checkpoint is restored."""
    for initializer in (given, *step.call.initializers):
        if initializer is not None:
            initializer(step.variables)
    init_fn = getattr(step.spec.scaffold, "init_fn", None)
    if init_fn is not None:
        init_fn(step.spec.scaffold, HookSession(variable=step.variables.variables.get))


#: Restores variables in place of a checkpoint, where there is none: warm start.
Initializer = Callable[[ModelVariables], None]


def assign_from(
    path: str | os.PathLike[str], chosen: Mapping[str, Sequence[keras.Variable]], advice: str = ""
) -> None:
    """Assign the values of a checkpoint to variables."""
    reader = load_checkpoint(path)
    for name, variables in chosen.items():
        if not reader.has_tensor(name):
            raise CheckpointMismatchError(
                f"A checkpoint must hold the variables that are taken from it. Received: {name!r}, which is "
                f"not in {os.fspath(path)}; it has {sorted(reader.get_variable_to_shape_map())}.{advice}"
            )
        value = reader.get_tensor(name)
        for variable in variables:
            if tuple(value.shape) != tuple(variable.shape):
                raise CheckpointMismatchError(
                    "A checkpoint must fit the variables that take its values. Received: "
                    f"{variable.path!r} of shape {tuple(variable.shape)}, which is {tuple(value.shape)} as "
                    f"{name!r} in {os.fspath(path)}. Leave it out."
                )
            variable.assign(value)
