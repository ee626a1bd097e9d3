"""The datasets of a worker, made by functions of the chief, and how far each iterator is.

Tests: tests/unit/parameter_server/worker/test_worker_data.py.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from unisono._errors import OutOfRangeError
from unisono.data._sharding import InputContext
from unisono.rpc._frames import Frame


@dataclasses.dataclass
class _WorkerIteration:
    """An iterator, with the batches that are to be taken before its next one."""

    batches: Iterator[Any]
    #: The number of the newest batch of the iterator; the first one has 1.
    last: int = 0
    #: Those that were given back, each with its number.
    returned: collections.deque[tuple[int, Any]] = dataclasses.field(default_factory=collections.deque)


@dataclasses.dataclass
class TakenBatches:
    """The batches of a closure.

    Args:
        parts: each with its source and its number, in the order in which they were taken.
    """

    parts: list[tuple[str, _WorkerIteration, int, Any]]

    @property
    def batches(self) -> tuple[Any, ...]:
        """The batches."""
        return tuple(batch for *_, batch in self.parts)

    @property
    def numbers(self) -> Mapping[str, list[int]]:
        """The numbers of the batches, by the name of their iterator."""
        numbers: dict[str, list[int]] = {}
        for name, _, number, _ in self.parts:
            numbers.setdefault(name, []).append(number)
        return numbers

    def give_back(self) -> None:
        """Let the next closure take them again."""
        for _, source, number, batch in reversed(self.parts):
            source.returned.appendleft((number, batch))
        self.parts = []


class WorkerData:
    """The datasets and iterators of a worker."""

    def __init__(self, index: int, num_workers: int) -> None:
        self._context = InputContext(num_workers, index, 1)
        self._datasets: dict[str, Any] = {}
        self._sources: dict[str, _WorkerIteration] = {}
        #: Why a dataset or an iterator could not be made: the error of each closure that takes of it.
        #: Reported by itself, each worker's would be raised, the last ones long after the first.
        self._errors: dict[str, Exception] = {}

    def change(self, frame: Frame) -> None:
        """Make a dataset or an iterator, or forget some; see `make`, `iterate` and `forget`."""
        meta = frame.meta
        if "forget" in meta:
            self.forget(meta["forget"])
            return
        name = meta["make"] if "make" in meta else meta["iterate"]
        self._errors.pop(name, None)
        try:
            if "make" in meta:
                self.make(name, bytes(frame.arrays[0]))
            else:
                self.iterate(name, meta["of"], *meta.get("used", (0,)))
        except Exception as error:
            self._errors[name] = error

    def make(self, name: str, function: bytes) -> None:
        """Make a dataset.

        Args:
            function: pickled by `cloudpickle`, from the chief; gets an `InputContext`.
        """
        # Imported here: a parameter server, which imports this package too, does without.
        import cloudpickle

        # Functions of datasets may hold these layers, whose classes Keras finds once they are imported.
        from unisono.preprocessing import _hashing, _lookup  # noqa: F401

        self._datasets[name] = cloudpickle.loads(function)(self._context)

    def iterate(self, name: str, dataset: str, count: int, *left: int) -> None:
        """Begin to iterate over a dataset.

        Args:
            count: how many batches were taken before this worker was started again.
            left: the numbers of those that were not used.
        """
        if dataset in self._errors:
            raise self._errors[dataset]
        source = self._sources[name] = _WorkerIteration(_batches_of(self._datasets[dataset]), count)
        unused = {*left}
        for number, batch in enumerate(itertools.islice(source.batches, count), 1):
            if number in unused:
                source.returned.append((number, batch))

    def forget(self, names: Iterable[str]) -> None:
        """Drop iterators and datasets."""
        for name in names:
            self._sources.pop(name, None)
            self._datasets.pop(name, None)
            self._errors.pop(name, None)

    def take(self, names: Sequence[str]) -> TakenBatches:
        """Return the next batch of each iterator; of none, if one of them has ended.

        Raises:
            OutOfRangeError: an iterator has ended.
            Exception: of the user's function that makes the dataset.
        """
        taken = TakenBatches([])
        for name in names:
            if name in self._errors:
                taken.give_back()
                raise self._errors[name]
            source = self._sources[name]
            try:
                number, batch = (
                    source.returned.popleft() if source.returned else (source.last + 1, next(source.batches))
                )
            except StopIteration:
                used = source.last
                taken.give_back()
                raise OutOfRangeError(
                    "An iterator of a per-worker dataset must have a next batch. Received: the end of the "
                    f"data on worker {self._context.input_pipeline_id} after {used} batches. Schedule "
                    "fewer steps, or make the dataset with `.repeat()`."
                ) from None
            source.last = max(number, source.last)
            taken.parts.append((name, source, number, batch))
        return taken


def _batches_of(dataset: Any) -> Iterator[Any]:
    # Before `__iter__`, which gives tensors of TensorFlow.
    if hasattr(dataset, "as_numpy_iterator"):
        return iter(dataset.as_numpy_iterator())
    return iter(dataset)
