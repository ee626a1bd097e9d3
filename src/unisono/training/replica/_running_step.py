"""What code in a step may ask of the engine that runs it, and what it says of its writes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from unisono._context import Context, ReplicaContext, current, entered
from unisono.step._program import ReplicaFrame, current_frame
from unisono.step._scope import is_discovering
from unisono.step.variables._seeds import step_generator
from unisono.training.replica._losses import Gradient, aggregate_gradients

if TYPE_CHECKING:
    import keras


class RunningStep:
    """The running code as part of a step; outside of every step it answers as one replica would.

    Args:
        context: strategy and replica of the code; None outside of every scope.
        frame: the step's execution; None outside of every step.

    >>> step = RunningStep(None, None)
    >>> step.replica is None, step.averages
    (True, False)
    """

    def __init__(self, context: Context | None, frame: ReplicaFrame | None) -> None:
        self._context, self._frame = context, frame

    @property
    def replica(self) -> ReplicaContext | None:
        """The replica that runs the code; None outside of the replicas of a strategy."""
        return None if self._context is None else self._context.replica

    @property
    def averages(self) -> bool:
        """Whether gradients of the replicas are averaged, as in `fit`, and not summed, as in `run`."""
        return self._context is not None and self._context.means

    @contextlib.contextmanager
    def averaging(self, averages: bool) -> Iterator[None]:
        """Let losses and gradients of the replicas be averaged in a block, or summed.

        Args:
            averages: False sums them.
        """
        with entered(self._context and dataclasses.replace(self._context, means=averages)):
            yield

    def aggregate(self, gradients: list[Gradient], variables: Sequence[keras.Variable]) -> list[Gradient]:
        """Return the mean or sum over the replicas of each gradient, equal on all of them.

        Args:
            gradients: this replica's; None for a variable without one.
            variables: one for each gradient.
        """
        return (
            gradients if self._context is None else aggregate_gradients(gradients, variables, self._context)
        )

    @contextlib.contextmanager
    def alike(self) -> Iterator[None]:
        """Declare that what a block assigns to variables is equal on all replicas: nothing is merged."""
        with contextlib.nullcontext() if self._frame is None else self._frame.scope.synced():
            yield

    def has_written(self, variable: keras.Variable) -> bool:
        """Return whether the step has assigned a variable so far; False outside of a step.

        Args:
            variable: any.
        """
        return self._frame is not None and self._frame.scope.is_written(variable)

    def seed(self, given: Any) -> Any:
        """Return the seed for random numbers: in a step that names none, a generator of steps.

        Args:
            given: that of the code: an integer, a key of JAX, or None.
        """
        return given if given is not None or self._frame is None else step_generator()

    @property
    def is_repeated(self) -> bool:
        """Whether the step has run before: what the code makes now is not kept. False outside of a step."""
        return self._frame is not None and not is_discovering()


def running_step() -> RunningStep:
    """Return the step that the running code is part of.

    >>> running_step().replica is None, running_step().averages
    (True, False)
    """
    return RunningStep(current(), current_frame())
