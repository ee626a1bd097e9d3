"""What a loop of named steps and what runs its steps know of each other.

Tests: tests/virtual/estimator/test_train.py, tests/virtual/estimator/test_parameter_servers.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from unisono._types import PyTree
from unisono.data._sharding import InputContext

if TYPE_CHECKING:
    from unisono._values import Mirrored
    from unisono.collectives._process_group import ProcessGroup
    from unisono.strategies._base import Strategy

Result = TypeVar("Result")

#: Makes the elements of a process, each a batch for one replica. The second argument are the processes
#: between which one dataset is divided; None where each has its own. Picklable, where workers call it.
ElementSource = Callable[[InputContext, "ProcessGroup | None"], Iterator[PyTree]]


class NamedStep(Protocol):
    """The step of one replica, from an element of its data to named values, the same on all replicas."""

    @property
    def scalars(self) -> frozenset[str]:
        """The names of all numbers that it can return; known when it was created."""

    @property
    def shared_errors(self) -> tuple[type[Exception], ...]:
        """Errors between steps that each worker raises where one does; others become a `ClusterError`."""

    def create(self, element: PyTree) -> Mirrored[Any]:
        """Run the step the first time, which makes its variables, and return its numbers."""

    def returning(self, names: Iterable[str]) -> Callable[[PyTree], Mirrored[Any]]:
        """Return the step as a function that returns the values of these names."""


class StepRunner(Protocol):
    """Runs named steps: on the replicas of this process and its group, or on workers that make their data."""

    @property
    def num_programs(self) -> int:
        """How many programs were made."""

    def around_training(self) -> contextlib.AbstractContextManager[None]:
        """Surround all steps of a training."""

    def create_variables(self) -> bool:
        """Trace the step with the first element, so that its variables are made; False without data."""

    def run(
        self, most: int, names: Iterable[str], losses: list[tuple[int, Any]] | None = None
    ) -> tuple[int, Mapping[str, Any]]:
        """Run some steps; fewer at the end of the data.

        Args:
            names: of the values that are needed of the last step, besides numbers.
            losses: gets, for each program, the number of its steps and the array of their losses.

        Returns:
            How many have run, and the last one's values by name, which may lie on devices.
        """

    def shared_errors(self) -> contextlib.AbstractContextManager[None]:
        """Surround what runs between steps: where it raises, the other workers' loops end, too."""

    def stop(self) -> None:
        """End a loop that was ended by this process, and not by the data: the other workers' loops, too."""

    def sharing(self, action: Callable[[], Result]) -> Callable[[], Result]:
        """Return an action that a single worker may begin between steps, such as to save.

        Args:
            action: where all workers must take part, the others call theirs where they wait for the next
                step, or in `wait_for_all`.
        """

    def wait_for_all(self) -> None:
        """Wait, after the last step, until all workers have done what they share."""


def elements_for(
    strategy: Strategy, source: ElementSource, group: ProcessGroup | None = None
) -> Iterator[PyTree]:
    """Return the elements of this process.

    Args:
        strategy: whose replicas take the elements; all of them on each worker, unless its terms say that they
            are divided.
        group: its processes; a replica's processes take the same elements. By default each has its own.
    """
    group = strategy.process_group if group is None else group
    context = InputContext(group.size, group.index, strategy.num_replicas_in_sync)
    return source(context, group if strategy._terms.shards_input and group.size > 1 else None)
