"""Elements of a process in rows of one for each of its replicas, which workers take in step.

Tests: tests/unit/training/test_row_source.py, tests/virtual/estimator/test_train.py.
"""

from __future__ import annotations

import collections
import itertools
import json
import logging
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import numpy as np

from unisono._errors import ClusterError, InvalidArgumentError
from unisono._types import PyTree
from unisono.data._batches import as_array, check_values
from unisono.data._workers import gathered
from unisono.training.groups._batch_placement import form_of

if TYPE_CHECKING:
    from unisono.collectives._process_group import ProcessGroup

_LOG = logging.getLogger("unisono")

Result = TypeVar("Result")


class ReplicaParts:
    """Arrays of one form, one for each replica of this process, as an array with a leading axis would be.

    Args:
        parts: the arrays. They are copied once, to where the program reads them.
    """

    def __init__(self, parts: Sequence[np.ndarray]) -> None:
        self._parts = parts
        self.shape, self.dtype = (len(parts), *parts[0].shape), parts[0].dtype

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, replica: int) -> np.ndarray:
        return self._parts[replica]

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self._parts)


class Row(NamedTuple):
    """The elements that one step takes.

    Args:
        batch: `(features, labels)`, a pytree of `ReplicaParts`; of host arrays with the rows of all replicas
            where every replica computes all.
        is_whole: whether it has the rows of all replicas.
    """

    batch: PyTree
    is_whole: bool

    def fits(self, other: Row) -> bool:
        """Return whether another row has the same form."""
        return not (self.is_whole or other.is_whole) and form_of(self.batch) == form_of(other.batch)


def rows_of(elements: Iterator[PyTree], replicas: int) -> Iterator[Row]:
    """Yield rows of elements, one for each replica of this process.

    The last row may have fewer elements, or elements of fewer rows: these are joined, and every replica
    computes all of them, as one device would.
    """
    while taken := list(itertools.islice(elements, replicas)):
        arrays = [jax.tree.map(lambda leaf: np.asarray(as_array(leaf)), e) for e in taken]
        for element in arrays:
            check_values(element, "(features, labels)")
        if len(arrays) == replicas and len({form_of(e) for e in arrays}) == 1:
            parts = [ReplicaParts(leaves) for leaves in zip(*map(jax.tree.leaves, arrays), strict=True)]
            yield Row(jax.tree.unflatten(jax.tree.structure(arrays[0]), parts), is_whole=False)
        elif (joined := _joined(arrays)) is not None:
            yield Row(joined, is_whole=True)
        else:
            _LOG.warning(
                "The last %d element(s) of the input_fn are left out: they have no rows that %d replicas "
                "could share. Give a number of elements that divides by %d, or batch them.",
                len(arrays), replicas, replicas,
            )  # fmt: skip


def _joined(elements: list[PyTree]) -> PyTree | None:
    """Return the rows of several elements as one; None where they have none."""
    if len(elements) == 1:
        return elements[0]
    for element in elements:
        sizes = {np.shape(x)[:1] for x in jax.tree.leaves(element)}
        if len(sizes) != 1 or () in sizes:
            return None
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *elements)


class RowSource:
    """Takes rows for programs; of several workers all take as many of one form.

    Args:
        errors: that all workers raise where one has stopped with them.
        readers: the same processes, a group for each replica, which make the same rows; `group` by default.
    """

    def __init__(
        self,
        rows: Iterator[Row],
        group: ProcessGroup,
        errors: tuple[type[Exception], ...] = (),
        readers: ProcessGroup | None = None,
    ) -> None:
        self._rows, self._group, self._readers = rows, group, readers or group
        self._errors = {kind.__name__: kind for kind in errors}
        #: The action that all workers take together once a worker has announced it.
        self._along: Callable[[], object] | None = None
        #: Rows that were taken, and have not been given out.
        self._kept: collections.deque[Row] = collections.deque()
        self._is_over = False
        self._structure: Any = None

    def peek(self) -> Row | None:
        """Return the first row, which is given out later; None without data."""
        if not self._kept and (row := next(self._rows, None)) is not None:
            self._kept.append(row)
            self._structure = jax.tree.structure(row.batch)
        return self._kept[0] if self._kept else None

    def take(self, most: Callable[[Row], int], extra: frozenset[str]) -> tuple[list[Row], frozenset[str]]:
        """Return rows of one form, none at the end, and the names of values that are asked for."""
        own = [] if self._is_over else self._fill(most)
        if self._group.size > 1:
            count, extra = self._agreed(own, extra)
        else:
            count = len(own)
        if count >= 0:
            return [self._kept.popleft() for _ in range(count)], extra
        joined = self._joined(own)
        return ([] if joined is None else [joined]), extra

    def give_back(self, rows: Sequence[Row]) -> None:
        """Let rows that were taken come again, before all others; all workers do so alike."""
        self._kept.extendleft(reversed(rows))

    def stop(self, error: Exception | None = None) -> None:
        """Tell the other workers, once, that this one takes no more rows.

        Args:
            error: why, where it is an error of this worker's hooks: the others raise it, too.
        """
        if self._is_over:
            return
        self._is_over = True
        message: dict[str, Any] = {"stops": True}
        if error is not None:
            message |= {"error": type(error).__name__, "text": str(error)}
        every = self._gathered(message)
        if error is None:
            self._raise_errors(every)

    def sharing(self, action: Callable[[], Result]) -> Callable[[], Result]:
        """Return an action of all workers which one may begin: the others do theirs where they wait.

        Args:
            action: a collective; one for each source.
        """
        self._along = action

        def announced() -> Result:
            # Of workers that begin it at the same time, each finds the message of the others here.
            self._raise_errors(self._messages({"shares": True}))
            return action()

        return announced

    def wait_for_all(self) -> None:
        """Wait until all workers have done what they share; all call it after their last step."""
        self._gathered({})

    def _gathered(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the messages of all workers, after the actions that others have announced."""
        while True:
            every = self._messages(message)
            if not any("shares" in m for m in every) or any("error" in m for m in every):
                return every
            if self._along is not None:
                self._along()

    def _messages(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        return [json.loads(data) for data in self._group.gather(json.dumps(message).encode())]

    def _fill(self, most: Callable[[Row], int]) -> list[Row]:
        """Return the next rows of one form, which stay here."""
        first = self.peek()
        if first is None:
            return []
        wanted = most(first)
        while len(self._kept) < wanted and (row := next(self._rows, None)) is not None:
            self._kept.append(row)
            if not first.fits(row):
                break
        same = itertools.takewhile(lambda row: row is first or first.fits(row), self._kept)
        return list(itertools.islice(same, wanted))

    def _agreed(self, own: list[Row], extra: frozenset[str]) -> tuple[int, frozenset[str]]:
        """Return how many rows all workers have; -1 where their next rows must be joined."""
        if self._is_over:
            return 0, extra
        form = None if not own or own[0].is_whole else repr(form_of(own[0].batch))
        message: dict[str, Any] = {"count": len(own), "form": form, "extra": sorted(extra)}
        if self._readers.together > 1:
            message["rows"] = list(map(_checksum, own))
        every = self._gathered(message)
        if any(m.get("stops") for m in every) or not any(m["count"] for m in every):
            self._is_over = True
            self._raise_errors(every)
            return 0, extra
        names = frozenset(name for m in every for name in m["extra"])
        is_joined = {m["form"] for m in every} != {form} or form is None
        count = -1 if is_joined else min(m["count"] for m in every)
        if self._readers.together > 1:
            self._check_rows([m["rows"][: abs(count)] for m in every])
        return count, names

    def _check_rows(self, checksums: Sequence[list[int]]) -> None:
        """Raise, on all workers, where processes of one replica have other rows."""
        together = self._readers.together
        for index, own in enumerate(checksums):
            if own != checksums[index - index % together]:
                raise InvalidArgumentError(
                    "All processes of a replica must make the same elements, for each has a part of the "
                    f"model. Received: other ones on worker {index} than on worker {index - index % together}"
                    ". Choose them by `input_context.input_pipeline_id`, which is the same for the processes "
                    "of a replica, and seed what is drawn: `shuffle(1000, seed=1)`."
                )

    def _joined(self, own: list[Row]) -> Row | None:
        """Return the next elements of all workers as one row, which every replica computes."""
        if own:
            self._kept.popleft()
        elements = [] if not own else _split_up(own[0])
        every = gathered([jax.tree.leaves(e) for e in elements], self._readers)
        joined = _joined([jax.tree.unflatten(self._structure, leaves) for leaves in every])
        if joined is None:
            self._is_over = True
            _LOG.warning(
                "The last elements of the workers are left out: they have no rows that can be joined."
            )
            return None
        return Row(joined, is_whole=True)

    def _raise_errors(self, messages: list[dict[str, Any]]) -> None:
        """Raise the error with which a worker has stopped, if one has."""
        for index, message in enumerate(messages):
            if (kind := self._errors.get(message.get("error", ""))) is not None:
                raise kind(message["text"])
            if "error" in message:
                raise ClusterError(
                    "The hooks of all workers must run without errors. Received: "
                    f"{message['error']} in worker {index}: {message['text']}"
                )


def _checksum(row: Row) -> int:
    """Return a number that differs where the elements of two rows do."""
    checksum = 0
    for leaf in jax.tree.leaves(row.batch):
        for part in leaf if isinstance(leaf, ReplicaParts) else [leaf]:
            checksum = zlib.crc32(np.ascontiguousarray(part).tobytes(), checksum)
    return checksum


def _split_up(row: Row) -> list[PyTree]:
    """Return the elements of a row."""
    if row.is_whole:
        return [row.batch]
    count = len(jax.tree.leaves(row.batch)[0])
    return [jax.tree.map(lambda x, i=i: x[i], row.batch) for i in range(count)]
