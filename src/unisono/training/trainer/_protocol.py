"""What Keras' loop, and the callbacks of `fit`, may expect of the function that runs the steps.

A strategy makes the function (`Strategy.make_trainer_function`). It must be callable in Keras'
convention; what else it can do, it shows by three attributes, which it may leave out:

| attribute | who uses it | without it |
|---|---|---|
| `lookahead` | set while no callback sees single batches | each call of the function is one step |
| `batch_policy` | its `usual_rows` is None when a call of `fit` begins; backups keep it | no size is usual |
| `timer` | `callbacks.StepTimer` reads it | `StepTimer` rejects the model |

A user's own `make_train_function` may return any other callable: hence functions instead of an
`isinstance`, which does not look through the wrapper of `BackupAndRestore` either.

Tests: tests/unit/training/test_trainer_protocol.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import jax

from unisono._types import PyTree

if TYPE_CHECKING:
    from unisono.training.groups._lookahead import StepLookahead
    from unisono.training.groups._step_profile import HostTimer

#: The values of a step's variables: one sequence for each of Keras' lists, in its order.
State = tuple[Sequence[jax.Array], ...]


class StepFunction(Protocol):
    """A `train_function`, `test_function` or `predict_function`, as Keras' loop calls it."""

    def __call__(self, state: State, iterator: Iterator[PyTree]) -> tuple[PyTree, State]:
        """Run the next step, or the next `steps_per_execution` of them.

        Args:
            state: values of the variables. It may be donated: Keras reads the one that is returned.
            iterator: gives host batches `(x, y, sample_weight)`.

        Returns:
            The logs, or the predictions, and the new state.

        Raises:
            StopIteration: at the end of the data.
        """


def plain_function_of(function: Callable[..., object] | None) -> Callable[..., object] | None:
    """Return the function that `BackupAndRestore` has wrapped; any other as it is."""
    return getattr(function, "plain_function", function)


def set_usual_rows(function: Callable[..., object] | None, rows: int | None) -> None:
    """Set the usual batch size of a running call of `fit` and the like; None for that of the next batch."""
    if function is not None and hasattr(function, "batch_policy"):
        function.batch_policy.usual_rows = rows


def usual_rows_of(function: Callable[..., object] | None) -> int | None:
    """Return the usual batch size of the running call; None where it is not known."""
    return getattr(getattr(function, "batch_policy", None), "usual_rows", None)


def set_lookahead(function: Callable[..., object] | None, lookahead: StepLookahead | None) -> None:
    """Let a function run ahead of Keras' loop, or no longer, if it can.

    Args:
        function: of a model: a strategy's, a wrapper of it, or a user's own.
        lookahead: shared with `fit`; None at the end of the call.
    """
    if function is not None and hasattr(function, "lookahead"):
        function.lookahead = lookahead


def lookahead_of(function: Callable[..., object] | None) -> StepLookahead | None:
    """Return what a function runs ahead with; None where it does not."""
    return getattr(function, "lookahead", None)


def timer_of(function: Callable[..., object]) -> HostTimer | None:
    """Return the timer of a function; None where it has none."""
    return getattr(function, "timer", None)
