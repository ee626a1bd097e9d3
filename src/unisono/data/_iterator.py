"""One pass over distributed data: batches are put onto the devices ahead of the step that takes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from unisono._errors import InvalidArgumentError, OutOfRangeError
from unisono._reads import DataIterator, current_reader, note_iteration
from unisono.data._sharding import InputOptions

_END = object()


class DistributedIterator(DataIterator):
    """One pass over a distributed dataset; the next batches are put onto the devices ahead.

    The look-ahead is visible in the source alone: an error is raised where its batch would
    have been, nothing is read after the end or before a pending error was raised, and the state
    is that of the last batch given.

    Args:
        batches: host batches.
        place: from a host batch to a batch on the devices.
        options: how many batches are put ahead.
        check_iterable_here: raises where iteration is not allowed.
        spec: returns the specification of the batches.
        again: returns the host batches of another pass; None where there is one pass.

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
        self._state: Any = None

    def initialize(self) -> None:
        """Begin another pass, as the iterators of `make_dataset_iterator` do before each epoch.

        Raises:
            InvalidArgumentError: when the source gives its batches once.
        """
        if self._again is None:
            raise InvalidArgumentError(
                "An iterator can begin again where its source can be read again. Received: batches of "
                f"{type(self._batches).__name__}. Distribute a dataset, or a function that returns "
                "a generator."
            )
        self.close()
        self._begin(self._again())

    @property
    def element_spec(self) -> Any:
        """The shapes and types of a batch; see `DistributedDataset.element_spec`."""
        return self._spec()

    def __iter__(self) -> DistributedIterator:
        note_iteration(self)
        return self

    def __next__(self) -> Any:
        self._check()
        reader = current_reader()
        return self._advance() if reader is None else reader.read(self, self._advance)

    def _advance(self) -> Any:
        if self._source_state is not None and self._state is None:
            self._state = self._source_state()
        while len(self._ready) <= self._ahead and not self._is_ended and self._error is None:
            self._read()
        if self._ready:
            batch, self._state = self._ready.popleft()
            return batch
        error, self._error = self._error, None
        if error is None:
            raise StopIteration
        try:
            raise error
        finally:
            # An error holds this frame: without the name there is no circle.
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
            # The batches before it come first.
            self._error = error

    def close(self) -> None:
        """End the pass: drop what was put ahead, and close the source where it can be closed."""
        self._is_ended = True
        self._ready.clear()
        self._error = None
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()

    def get_state(self) -> Any:
        """Return where the source stood after the last batch that was given.

        Raises:
            InvalidArgumentError: when the source has no state.
        """
        if self._source_state is None:
            raise _no_state(self._batches)
        return self._source_state() if self._state is None else self._state

    def set_state(self, state: Any) -> None:
        """Go on from a state.

        Args:
            state: from `get_state`, of an iterator over the same source.

        Raises:
            InvalidArgumentError: when the source has no state.
        """
        if self._source_state is None:
            raise _no_state(self._batches)
        self._batches.set_state(state)  # type: ignore[attr-defined]
        self._ready.clear()
        self._error, self._is_ended, self._state = None, False, None

    def get_next(self) -> Any:
        """Return the next batch.

        Raises:
            OutOfRangeError: at the end.
        """
        batch = next(self, _END)
        if batch is _END:
            raise OutOfRangeError("The input has no further batch. Iterate over the dataset again.")
        return batch

    def get_next_as_optional(self) -> OptionalBatch:
        """Return the next batch, if there is one."""
        batch = next(self, _END)
        return OptionalBatch(None if batch is _END else (batch,))


def _no_state(batches: Any) -> InvalidArgumentError:
    return InvalidArgumentError(
        "The place in an input is known where its source has `get_state` and `set_state`. Received: "
        f"{type(batches).__name__}. Distribute a `unisono.data.Dataset`."
    )


class OptionalBatch:
    """A batch, or nothing.

    Args:
        held: a tuple of the batch, or None.
    """

    def __init__(self, held: tuple[Any] | None) -> None:
        self._held = held

    def has_value(self) -> bool:
        """Return whether there is a batch."""
        return self._held is not None

    def get_value(self) -> Any:
        """Return the batch.

        Raises:
            OutOfRangeError: when there is none.
        """
        if self._held is None:
            raise OutOfRangeError("There is no batch. Ask `has_value()` first.")
        return self._held[0]
