"""One pass over distributed data: batches are put onto the devices ahead of the step that uses them.

Tests: tests/virtual/data/test_distribute.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from unisono._errors import InvalidArgumentError, OutOfRangeError
from unisono._reads import DataIterator, current_reader, note_iteration
from unisono._types import PyTree, UserValue
from unisono.data._sharding import InputOptions

_END = object()


class DistributedIterator(DataIterator):
    """One pass over a distributed dataset; the next batches are put onto the devices ahead.

    Only the source can observe the read-ahead: an error is raised in place of its batch, nothing is
    read after the end or while an error is pending, and the state belongs to the last batch returned.

    Args:
        batches: host batches.
        place: puts a host batch onto the devices.
        options: the number of batches to read ahead.
        check_iterable_here: raises where iteration is not allowed.
        spec: returns the specification of the batches.
        again: returns the host batches of another pass; None if the source allows only one.

    >>> import unisono
    >>> iterator = iter(unisono.MirroredStrategy(["cpu:0"]).distribute_dataset([[1.0, 2.0]]))
    >>> isinstance(iterator, unisono.DistributedIterator)
    True
    """

    def __init__(
        self,
        batches: Iterator[Any],
        place: Callable[[Any], Any],
        options: InputOptions,
        check_iterable_here: Callable[[], None],
        spec: Callable[[], Any] = lambda: None,
        again: Callable[[], Iterator[Any]] | None = None,
    ) -> None:
        self._place, self._check = place, check_iterable_here
        # A function, because some sources compute their first element to find the spec.
        self._spec, self._again = spec, again
        fetch = options.experimental_fetch_to_device
        self._ahead = options.experimental_per_replica_buffer_size if fetch else 0
        #: Batches on the devices, each with the state of the source after it.
        self._ready: deque[tuple[Any, Any]] = deque()
        self._begin(batches)

    def _begin(self, batches: Iterator[Any]) -> None:
        self._batches = batches
        self._source_state = getattr(batches, "get_state", None)
        self._ready.clear()
        self._error: Exception | None = None
        self._is_ended = False
        self._state: UserValue = None

    def initialize(self) -> None:
        """Start another pass, as the iterators of `make_dataset_iterator` do before each epoch.

        Raises:
            InvalidArgumentError: when the source can be read only once.
        """
        if self._again is None:
            raise InvalidArgumentError(
                "The source of an iterator that is initialized must be readable again. Received: batches of "
                f"{type(self._batches).__name__}. Distribute a dataset, or a function that returns "
                "a generator."
            )
        self.close()
        self._begin(self._again())

    @property
    def element_spec(self) -> PyTree:
        """The shapes and types of a batch; see `DistributedDataset.element_spec`."""
        return self._spec()

    def __iter__(self) -> DistributedIterator:
        note_iteration(self)
        return self

    def __next__(self) -> PyTree:
        self._check()
        reader = current_reader()
        return self._advance() if reader is None else reader.read(self, self._advance)

    def _advance(self) -> PyTree:
        # Before the first read, after which the source is ahead of what was returned.
        if self._source_state is not None and self._state is None:
            self._state = self._source_state()
        # One more than is read ahead: the first of them is returned now.
        while len(self._ready) <= self._ahead and not self._is_ended and self._error is None:
            self._read()
        if self._ready:
            batch, self._state = self._ready.popleft()
            return batch
        # Raised once; the next call reads on, as it would from the source itself.
        error, self._error = self._error, None
        if error is None:
            raise StopIteration
        try:
            raise error
        finally:
            # The traceback refers to this frame, and the frame to the error: break the reference cycle.
            del error

    def _read(self) -> None:
        try:
            batch = next(self._batches, _END)
            if batch is _END:
                self._is_ended = True
                return
            state = None if self._source_state is None else self._source_state()
            self._ready.append((self._place(batch), state))
        except Exception as error:
            # Raised by `_advance` after the batches that were read before it.
            self._error = error

    def close(self) -> None:
        """End the pass: drop the batches read ahead, and close the source if it can be closed."""
        self._is_ended = True
        self._ready.clear()
        self._error = None
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()

    def get_state(self) -> UserValue:
        """Return the state of the source after the last batch that was returned.

        Raises:
            InvalidArgumentError: when the source has no state.
        """
        if self._source_state is None:
            raise _no_state(self._batches)
        return self._source_state() if self._state is None else self._state

    def set_state(self, state: object) -> None:
        """Resume from a state.

        Args:
            state: the result of `get_state` of an iterator over the same source.

        Raises:
            InvalidArgumentError: when the source has no state.
        """
        if self._source_state is None:
            raise _no_state(self._batches)
        self._batches.set_state(state)  # type: ignore[attr-defined]
        self._ready.clear()
        self._error, self._is_ended, self._state = None, False, None

    def get_next(self) -> PyTree:
        """Return the next batch.

        Raises:
            OutOfRangeError: at the end.
        """
        batch = next(self, _END)
        if batch is _END:
            raise OutOfRangeError(
                "`get_next` needs a further batch. Received: a call at the end of the input. "
                "Iterate over the dataset again, or write `get_next_as_optional()`."
            )
        return batch

    def get_next_as_optional(self) -> OptionalBatch:
        """Return the next batch, if there is one."""
        batch = next(self, _END)
        return OptionalBatch(None if batch is _END else (batch,))


def _no_state(batches: Iterator[Any]) -> InvalidArgumentError:
    return InvalidArgumentError(
        "To save or restore the position in an input, its source must have `get_state` and `set_state`. "
        f"Received: {type(batches).__name__}. Distribute a `unisono.data.Dataset`."
    )


class OptionalBatch:
    """A batch, or nothing."""

    def __init__(self, held: tuple[Any] | None) -> None:
        self._held = held

    def has_value(self) -> bool:
        """Return whether there is a batch."""
        return self._held is not None

    def get_value(self) -> PyTree:
        """Return the batch.

        Raises:
            OutOfRangeError: when there is none.
        """
        if self._held is None:
            raise OutOfRangeError(
                "`get_value` needs a batch. Received: a call at the end of the input. "
                "Check `has_value()` first."
            )
        return self._held[0]
