"""`TrainSpec` and `EvalSpec`: what `train_and_evaluate` does.

Source: https://github.com/tensorflow/estimator (tensorflow_estimator/python/estimator/training.py)

Tests: tests/virtual/estimator/test_train_and_evaluate.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono._types import UserValue
from unisono.estimator._spec import checked_call, checked_hooks, checked_listeners

if TYPE_CHECKING:
    from unisono.estimator.hooks._checkpoints import CheckpointSaverListener
    from unisono.estimator.hooks._hook import SessionRunHook


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
