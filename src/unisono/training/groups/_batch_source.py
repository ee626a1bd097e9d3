"""Where the batches of a call come from, and what Keras' loop gets for their steps.

A policy is one class: `BatchSource` runs `steps_per_execution` batches at a call, `StepLookahead` several
steps ahead of Keras' loop, and `Speculation` ahead of callbacks which see single batches.

Keras' `predict` keeps what each step returns, and concatenates at the end. A group's predictions are copied
to the host when its program is done and others are in flight: no step waits for a transfer.

Tests: tests/unit/training/test_lookahead.py, tests/virtual/training/test_counts.py.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import jax
import numpy as np

from unisono._types import PyTree
from unisono.collectives._process_group import ProcessGroup
from unisono.data._batches import check_values
from unisono.training.groups._batch_policy import Mode
from unisono.training.groups._multi_step import LazyArray
from unisono.training.groups._step_profile import HostTimer

#: Seconds after which the host no longer waits for one more batch: a program of fewer steps is better than
#: idle devices.
_PATIENCE = 0.01


def _newest(every: Any, count: int, is_stacked: bool) -> Any:
    """Return the last step's log: of a number, what reads it where Keras asks for it."""
    if not is_stacked:
        return LazyArray(lambda: every, None) if isinstance(every, jax.Array) and not every.ndim else every
    return LazyArray.of_step(every, count - 1) if every.ndim == 1 else every[count - 1]


@dataclasses.dataclass(frozen=True)
class GroupResult:
    """What the steps of one program have returned: logs, or predictions.

    Args:
        value: pytree of arrays.
        is_stacked: whether the arrays have a first dimension for the steps.
    """

    value: PyTree
    count: int
    is_stacked: bool

    def newest(self) -> PyTree:
        """Return the last step's logs."""
        if not self.is_stacked and type(self.value) is dict:
            # Of a step by itself, as Keras' own: for one number, the tree's map takes longer than all else.
            return {name: _newest(x, 1, False) for name, x in self.value.items()}
        return jax.tree.map(lambda x: _newest(x, self.count, self.is_stacked), self.value)

    def rows(self) -> PyTree:
        """Return the rows of all steps, on the host."""
        if not self.is_stacked:
            return jax.tree.map(np.asarray, self.value)
        return jax.tree.map(lambda x: np.asarray(x)[: self.count].reshape(-1, *x.shape[2:]), self.value)


class GroupPredictions:
    """The predictions of the steps of one program.

    Args:
        outputs: pytree of arrays `(slots, rows, ...)`, of which the first `count` slots are used.

    >>> import jax.numpy as jnp
    >>> group = GroupPredictions({"y": jnp.array([[1.0, 2.0], [3.0, 4.0], [0.0, 0.0]])}, count=2)
    >>> group.fetch()
    >>> np.concatenate([step["y"] for step in group.steps()]).tolist()
    [1.0, 2.0, 3.0, 4.0]
    """

    def __init__(self, outputs: PyTree, count: int) -> None:
        self._devices: list[jax.Array]
        self._devices, self._structure = jax.tree.flatten(outputs)
        self._num_leaves = len(self._devices)
        self._host: list[np.ndarray] = []
        self._count = count

    def steps(self) -> list[PyTree]:
        """Return the predictions of each step: pytrees of what NumPy takes as arrays."""
        return [
            jax.tree.unflatten(
                self._structure,
                [LazyArray(functools.partial(self._rows, leaf), i) for leaf in range(self._num_leaves)],
            )
            for i in range(self._count)
        ]

    def fetch(self) -> None:
        """Copy the predictions to the host, and free those on the devices."""
        if self._devices:
            self._host = [_on_host(x, self._count) for x in self._devices]
            self._devices = []

    def _rows(self, leaf: int) -> np.ndarray:
        """Return one array of all steps."""
        self.fetch()
        return self._host[leaf]


def _on_host(array: jax.Array, count: int) -> np.ndarray:
    """Return the first slots of an array whose parts lie on several devices, without a copy of the others."""
    host = np.empty((count, *array.shape[1:]), array.dtype)
    for shard in array.addressable_shards:
        host[(slice(None), *shard.index[1:])] = np.asarray(shard.data)[:count]
        if array.is_fully_replicated:
            break
    return host


class BatchSource:
    """Takes the batches of one call from the data, and keeps what was taken too early."""

    #: Whether a call runs one group of as many batches as pay, instead of `steps_per_execution` batches.
    is_ahead = False
    #: Whether the last batch had been taken before, and was given back.
    is_again = False
    #: How many steps the whole call has, and each of its epochs; None where that is unknown.
    planned: int | None = None
    epoch_steps: int | None = None
    #: Is another object in each epoch.
    epoch: object = None
    #: How many steps of a call follow those that were run ahead; None for all of them.
    left_of_call: int | None = None

    def __init__(self) -> None:
        #: Batches that were taken and not used, and further ones that were noted, too.
        self._held: list[PyTree] = []
        self._again: collections.deque[PyTree] = collections.deque()
        self._raised: Exception | None = None

    @property
    def room(self) -> int:
        """How many batches may be taken behind the first one of a group."""
        return sys.maxsize

    def take_first(self, iterator: Iterator[PyTree]) -> PyTree:
        """Return the next batch.

        Raises:
            Exception: what the data raised when they were asked ahead of time.
        """
        self.is_again = bool(self._again)
        if self._again:
            return self._again.popleft()
        if self._held:
            return self._held.pop()
        if self._raised is not None:
            raised, self._raised = self._raised, None
            raise raised
        return next(iterator)

    def take_more(
        self, iterator: Iterator[PyTree], most: int, fits: Callable[[PyTree], bool], waits: bool
    ) -> Iterator[PyTree]:
        """Give further batches for the program of the first one.

        Args:
            fits: whether a batch may go with the first. One that does not is the next first one.
        """
        while most > 0 and self._again and fits(self._again[0]):
            self.is_again = True
            most -= 1
            yield self._again.popleft()
        if self._again or self._held or self._raised is not None:
            return
        self.is_again = False
        began = perf_counter()
        for _ in range(most):
            if not waits and perf_counter() - began > _PATIENCE:
                return
            try:
                batch = next(iterator)
            except Exception as error:
                # Raised by `take_first`, when Keras asks for this batch: the steps before it count.
                self._raised = error
                return
            if not fits(batch):
                self._held.append(batch)
                return
            yield batch

    def has_next(self, iterator: Iterator[PyTree]) -> bool:
        """Return whether there is another batch, or an error in its place."""
        if not (self._again or self._held or self._raised):
            try:
                self._held.append(next(iterator))
            except Exception as error:
                self._raised = error
        return not isinstance(self._raised, StopIteration)

    def give_back(self, batches: Iterable[PyTree]) -> None:
        """Let batches that were noted come again, before all others."""
        self._again.extendleft(reversed([*batches]))

    def hand_out(self, results: Sequence[GroupResult], is_predict: bool) -> PyTree:
        """Return what Keras gets for a call: the last logs, or all predictions."""
        last = results[-1]
        if not is_predict:
            # As in Keras, whose metrics are those of all steps so far.
            return last.newest()
        if len(results) == 1:
            return last.rows() if last.is_stacked else last.value
        return jax.tree.map(lambda *parts: np.concatenate(parts), *[result.rows() for result in results])


class KnownForm(NamedTuple):
    """The form of a batch that was examined: the next one of this form is not.

    Args:
        arrays: class, shape and dtype of each; None where a batch holds other things, and is always examined.
        facts: that decide besides the form how a batch runs.
        slots: how many such batches may share a program.
        has_wide_integers: whether the values of each batch must be examined, see `check_values`.
    """

    structure: object
    arrays: list[tuple[type, tuple[int, ...], np.dtype]] | None
    facts: object
    mode: Mode
    rows: int
    slots: int
    has_wide_integers: bool

    @classmethod
    def of(cls, batch: PyTree, facts: object, mode: Mode, rows: int, slots: int) -> KnownForm:
        """Return the form of a batch."""
        leaves, structure = jax.tree.flatten(batch)
        if not all(type(x) is np.ndarray or isinstance(x, jax.Array) for x in leaves):
            return cls(structure, None, facts, mode, rows, slots, False)
        is_wide = any(type(x) is np.ndarray and x.dtype.kind in "iu" and x.itemsize == 8 for x in leaves)
        arrays = [(type(x), x.shape, x.dtype) for x in leaves]
        return cls(structure, arrays, facts, mode, rows, slots, is_wide)

    def describes(self, batch: PyTree, facts: object) -> bool:
        """Return whether a batch has this form, and runs in the same way."""
        if self.arrays is None or facts != self.facts:
            return False
        leaves: list[jax.Array]
        leaves, structure = jax.tree_util.tree_flatten(batch)
        if structure != self.structure:
            return False
        for x, (kind, shape, dtype) in zip(leaves, self.arrays, strict=True):
            if type(x) is not kind or x.shape != shape or x.dtype != dtype:
                return False
        return True


class BatchNotes:
    """Notes the batches that are taken: checks each, here and against the other workers."""

    def __init__(self, group: ProcessGroup, kind: str, timer: HostTimer) -> None:
        self._group, self._kind, self._timer = group, kind, timer
        self._known: KnownForm | None = None

    def share(self, batches: list[PyTree]) -> None:
        """Let the workers compare what they are about to run.

        Args:
            batches: the next one; none at the end of the data.
        """
        self._group.note_step(self._kind, batches)

    def add(
        self, batch: PyTree, seconds: float, shares: bool, is_again: bool = False, facts: object = None
    ) -> KnownForm | None:
        """Note a batch; return its form where the last one had it, and None otherwise.

        Args:
            seconds: that it took to get it.
            is_again: whether it was noted before.
            facts: that decide besides its form how it runs.
        """
        known = self._known if self._known is not None and self._known.describes(batch, facts) else None
        if is_again:
            return known
        if shares:
            self._group.note_step(self._kind, [batch])
        if known is None or known.has_wide_integers:
            check_values(batch)
        if known is None:
            self._timer.add(batch, seconds)
        else:
            self._timer.add_rows(known.rows, seconds)
        return known

    def know(self, form: KnownForm) -> KnownForm:
        """Note the form of the last batch, and return it."""
        self._known = form
        return form

    def each(self, source: BatchSource, batches: Iterable[PyTree]) -> Iterator[PyTree]:
        """Give batches, and note those that do not come again."""
        began = perf_counter()
        for batch in batches:
            if not source.is_again:
                self.add(batch, perf_counter() - began, shares=True)
            yield batch
            began = perf_counter()
