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
    """An iterator, with the batches that were given back to it."""

    batches: Iterator[Any]
    #: How many batches closures have used.
    used: int = 0
    returned: collections.deque[Any] = dataclasses.field(default_factory=collections.deque)


@dataclasses.dataclass
class TakenBatches:
    """The batches of a closure.

    Args:
        parts: each with its source, in the order in which they were taken.
    """

    parts: list[tuple[str, _WorkerIteration, Any]]

    @property
    def batches(self) -> tuple[Any, ...]:
        """The batches."""
        return tuple(batch for _, _, batch in self.parts)

    @property
    def counts(self) -> Mapping[str, int]:
        """How many batches closures have used of each iterator, by its name."""
        return {name: source.used for name, source, _ in self.parts}

    def give_back(self) -> None:
        """Let the next closure take them again."""
        for _, source, batch in reversed(self.parts):
            source.returned.appendleft(batch)
            source.used -= 1


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
                self.iterate(name, meta["of"], meta.get("skip", 0))
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

    def iterate(self, name: str, dataset: str, skip: int) -> None:
        """Begin to iterate over a dataset.

        Args:
            skip: how many batches were used before this worker was started again.
        """
        if dataset in self._errors:
            raise self._errors[dataset]
        batches = _batches_of(self._datasets[dataset])
        for _ in itertools.islice(batches, skip):
            pass
        self._sources[name] = _WorkerIteration(batches, skip)

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
                batch = source.returned.popleft() if source.returned else next(source.batches)
            except StopIteration:
                used = source.used
                taken.give_back()
                raise OutOfRangeError(
                    "An iterator of a per-worker dataset must have a next batch. Received: the end of the "
                    f"data on worker {self._context.input_pipeline_id} after {used} batches. Schedule "
                    "fewer steps, or make the dataset with `.repeat()`."
                ) from None
            source.used += 1
            taken.parts.append((name, source, batch))
        return taken


def _batches_of(dataset: Any) -> Iterator[Any]:
    # Before `__iter__`, which gives tensors of TensorFlow.
    if hasattr(dataset, "as_numpy_iterator"):
        return iter(dataset.as_numpy_iterator())
    return iter(dataset)
