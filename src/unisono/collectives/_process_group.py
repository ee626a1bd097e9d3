"""What the processes of a cluster say to each other outside of steps, and the group of a lone process.

A strategy has one `ProcessGroup`. Code that runs on one process or on several calls it without
asking how many there are: `SingleProcessGroup` returns its own values and does nothing else.
"""

from __future__ import annotations

import abc
import contextlib
import copy
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Protocol, TypeVar

import jax
import numpy as np

from unisono._mesh import ReplicaMesh
from unisono._system._task_reports import process_heartbeat
from unisono._types import PyTree

#: Arrays of a process, in host memory or on its devices.
Arrays = Sequence[jax.Array | np.ndarray]

#: Give the names and the arrays of a state, when it is wanted.
NamedState = Callable[[], tuple[Sequence[str], Sequence[jax.Array]]]

#: In each step: made once.
_NOTHING = contextlib.nullcontext()

Tree = TypeVar("Tree", bound=PyTree)
Share = TypeVar("Share")


class ProgramToken(Protocol):
    """An output of a program that was dispatched, such as a `jax.Array`."""

    def is_ready(self) -> bool: ...

    def block_until_ready(self) -> object: ...


class ProcessGroup(abc.ABC):
    """The processes that train together, as one of them sees the others.

    All processes must call the collective methods in the same order. Only `note_step`, `note_call`,
    `note_read`, `share_file`, `checkpoint_number` and `explain` send messages beside the collectives.

    Args:
        index: the number of this process; 0 is the chief.
        size: how many processes there are.
    """

    def __init__(self, index: int, size: int) -> None:
        self._index, self._size, self._is_chief = index, size, index == 0
        #: How many processes after each other are one here; see `of_replicas`.
        self.together = 1

    @property
    def index(self) -> int:
        """The number of this process."""
        return self._index

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self._size

    @property
    def is_chief(self) -> bool:
        """Whether this process writes and prints for all."""
        return self._is_chief

    @property
    def is_on_one_host(self) -> bool:
        """Whether all processes listen at one address, as those of one machine do."""
        return True

    @property
    def own_name(self) -> str:
        """This process, for messages to people."""
        return "this process" if self._size == 1 else f"worker {self._index}"

    def of_replicas(self, processes: int) -> ProcessGroup:
        """Return the group in which so many processes after each other, of the same replicas, are one.

        They make the same input. `gather` gives the bytes of the first of them; messages are still of all.
        """
        if processes == 1:
            return self
        group = copy.copy(self)
        group._index, group._size = self._index // processes, self._size // processes
        group.together = processes
        return group

    def share_of(self, whole: Share, divide: Callable[[Share, int, int], Share]) -> Share:
        """Return this process' share of what all have; the whole in a lone process.

        Args:
            whole: what is divided.
            divide: gets it, the number of processes and the number of this one.
        """
        return whole if self._size == 1 else divide(whole, self._size, self._index)

    # --- collectives -----------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def num_collectives(self) -> int:
        """How many collectives this group has made; those of steps are not counted."""

    @abc.abstractmethod
    def collective(self) -> contextlib.AbstractContextManager[None]:
        """Surround collectives that the caller makes, so that their errors name the missing process.

        Raises:
            ClusterError: when one failed because of another process.
        """

    @abc.abstractmethod
    def broadcast(self, data: bytes) -> bytes:
        """Return the bytes of the first process on every process.

        Args:
            data: on the first process; those of the others are ignored.
        """

    @abc.abstractmethod
    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every process, in the order of their numbers.

        Args:
            data: of this process.
        """

    @abc.abstractmethod
    def broadcast_arrays(self, tree: Tree) -> Tree:
        """Return the arrays of the first process on every process, as host arrays: one collective.

        Args:
            tree: pytree of arrays of the same shapes and dtypes on all processes.
        """

    @abc.abstractmethod
    def equal_arrays(
        self, arrays: Arrays, known: Sequence[bool], key: object, what: str, batch: Arrays | None = None
    ) -> Arrays | None:
        """Return the arrays of the first process on every process, unless all have them already.

        Args:
            arrays: of the same shapes and dtypes on all processes.
            known: for each array, whether all processes got it together under `key`.
            key: under which; anything with a `repr`.
            what: what the arrays are, for the message.
            batch: arrays of the first batch, which must be equal on all processes; None not to compare them.

        Returns:
            The arrays, as host arrays where they came from the first process; None where all processes
            know all of them.

        Raises:
            ClusterError: when shapes, dtypes or the batch differ; the message names every difference.
        """

    @abc.abstractmethod
    def are_alike(self, data: bytes) -> bool:
        """Return whether all processes hold the same bytes.

        Args:
            data: of this process, of any size.
        """

    def are_alike_in_replicas(self, data: bytes) -> bool:
        """Return whether the processes of each replica have the same bytes; see `of_replicas`."""
        return True

    @abc.abstractmethod
    def require_same(self, fingerprint: Mapping[str, object], what: str, besides: bytes = b"") -> list[bytes]:
        """Raise on every process when facts differ between them.

        Args:
            fingerprint: name to number or text.
            what: what they are about, for the message.
            besides: a few bytes that may differ.

        Returns:
            What every process gave as `besides`.

        Raises:
            ClusterError: it names every difference, and which process has which value.
        """

    @abc.abstractmethod
    def from_chief(self, make: Callable[[], bytes]) -> bytes:
        """Return on every process what `make` returns on the first; raise its error on all.

        Args:
            make: called on the first process alone.

        Raises:
            ClusterError: on the others, when it raised on the first.
        """

    def value_of_chief(
        self, make: Callable[[], Share], encode: Callable[[Share], bytes], decode: Callable[[bytes], Share]
    ) -> Share:
        """Return on every process the value that `make` returns on the first; raise its error on all.

        Args:
            make: called on the first process alone.
            encode: makes bytes of the value, where there are others.
            decode: makes the value of them, on the others.

        Raises:
            ClusterError: on the others, when `make` raised on the first.
        """
        if self._size == 1:
            return make()
        own: list[Share] = []

        def encoded() -> bytes:
            own.append(make())
            return encode(own[0])

        data = self.from_chief(encoded)
        return own[0] if own else decode(data)

    # --- steps -----------------------------------------------------------------------------

    @abc.abstractmethod
    def note_step(self, kind: str, batches: Sequence[PyTree]) -> None:
        """Note that a step of all processes begins: all must have batches of the same shapes.

        Args:
            kind: what the step does.
            batches: pytrees of arrays; none at the end of the data.

        Raises:
            ClusterError: when the next process takes another step, or none in time.
        """

    @abc.abstractmethod
    def note_call(self, name: str) -> None:
        """Note a call that all processes must make, before its arguments are compared in a collective.

        Args:
            name: of the method, such as `"evaluate"`.

        Raises:
            ClusterError: when the next process takes a step instead, or has ended its program.
        """

    @abc.abstractmethod
    def note_read(self) -> None:
        """Note that this process reads a variable whose parts lie on all, before the collective.

        Raises:
            ClusterError: when the next process does something else, or has ended its program.
        """

    @abc.abstractmethod
    def dispatch(self) -> contextlib.AbstractContextManager[None]:
        """Surround the start of a program, which may block until the other processes have started theirs."""

    @abc.abstractmethod
    def step_started(self, token: ProgramToken) -> None:
        """Note that a step was started: a sign of life for a supervisor and for the other processes.

        Args:
            token: an output of the step that no later step donates.
        """

    @abc.abstractmethod
    def check_state(self, mesh: ReplicaMesh, key: Hashable, steps: int, state: NamedState) -> None:
        """Compare the state between processes after some of the steps, without waiting for the result.

        Args:
            mesh: the replicas that took the steps.
            key: whose steps; held by a weak reference.
            steps: how many steps were started in all.
            state: gives names and arrays of the state after them; called when they are compared.

        Raises:
            ClusterError: on all processes, when an earlier comparison has found a difference.
        """

    @abc.abstractmethod
    def compare_state(self, mesh: ReplicaMesh, names: Sequence[str], arrays: Sequence[jax.Array]) -> None:
        """Compare a state between processes now.

        Args:
            mesh: the replicas that hold it.
            names: of the arrays.
            arrays: of the same shapes and dtypes on all processes.

        Raises:
            ClusterError: on all processes, when they differ by more than rounding.
        """

    # --- files and errors ------------------------------------------------------------------

    @abc.abstractmethod
    def share_file(self, path: str) -> None:
        """Note on the chief that a file is complete; wait on the others until it is.

        A process that writes elsewhere is not waited for: the others continue when the chief does.

        Args:
            path: of the file, as the program gives it.
        """

    @abc.abstractmethod
    def checkpoint_number(self, series: str, number: int) -> int:
        """Return the number of the next checkpoint of a series, which the chief chooses.

        Args:
            series: the path without the number.
            number: what this process would choose; taken where the chief saves nothing here.
        """

    @abc.abstractmethod
    def explain(self, error: BaseException) -> Exception | None:
        """Return an error that names the process which caused one of JAX; None for other errors.

        Args:
            error: any.
        """


class SingleProcessGroup(ProcessGroup):
    """The group of a lone process: every value is its own, and no call costs anything.

    >>> group = SingleProcessGroup()
    >>> group.size, group.is_chief, group.gather(b"own"), group.are_alike(b"own")
    (1, True, [b'own'], True)
    """

    def __init__(self) -> None:
        super().__init__(0, 1)
        self._heartbeat = process_heartbeat()

    @property
    def num_collectives(self) -> int:
        """None."""
        return 0

    def collective(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing around it."""
        return _NOTHING

    def broadcast(self, data: bytes) -> bytes:
        """Return the bytes."""
        return data

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes alone in a list."""
        return [data]

    def broadcast_arrays(self, tree: Tree) -> Tree:
        """Return the arrays as they are."""
        return tree

    def equal_arrays(
        self, arrays: Arrays, known: Sequence[bool], key: object, what: str, batch: Arrays | None = None
    ) -> Arrays | None:
        """Return the arrays as they are; None where all are known."""
        return None if all(known) else arrays

    def are_alike(self, data: bytes) -> bool:
        """Return True: one process cannot differ."""
        return True

    def require_same(self, fingerprint: Mapping[str, object], what: str, besides: bytes = b"") -> list[bytes]:
        """Return the bytes alone in a list."""
        return [besides]

    def from_chief(self, make: Callable[[], bytes]) -> bytes:
        """Return what `make` returns."""
        return make()

    def note_step(self, kind: str, batches: Sequence[PyTree]) -> None:
        """Do nothing."""

    def note_call(self, name: str) -> None:
        """Do nothing."""

    def note_read(self) -> None:
        """Do nothing."""

    def dispatch(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing around it."""
        return _NOTHING

    def step_started(self, token: ProgramToken) -> None:
        """Show a supervisor that the process advances."""
        if self._heartbeat.is_read:
            self._heartbeat.beat()

    def check_state(self, mesh: ReplicaMesh, key: Hashable, steps: int, state: NamedState) -> None:
        """Do nothing."""

    def compare_state(self, mesh: ReplicaMesh, names: Sequence[str], arrays: Sequence[jax.Array]) -> None:
        """Do nothing."""

    def share_file(self, path: str) -> None:
        """Do nothing."""

    def checkpoint_number(self, series: str, number: int) -> int:
        """Return the number."""
        return number

    def explain(self, error: BaseException) -> Exception | None:
        """Return None: no other process causes errors here."""
        return None


_joined: ProcessGroup | None = None


def joined_group() -> ProcessGroup:
    """Return the group of the cluster that this process joined; the group of a lone process without one."""
    return _joined or SingleProcessGroup()


def note_joined(group: ProcessGroup) -> None:
    """Note the group of the cluster that this process joined."""
    global _joined
    _joined = group
