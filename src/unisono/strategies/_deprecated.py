"""The deprecated methods of tf.distribute's `Strategy`, on those that every strategy has.

Tests: tests/virtual/strategies/test_extended.py.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

import keras

from unisono._errors import InvalidArgumentError
from unisono._types import PyTree, UserValue
from unisono.data._sharding import InputContext, InputOptions, InputReplicationMode

if TYPE_CHECKING:
    from unisono.data._dataset import Dataset
    from unisono.data._distribute import DistributedDataset
    from unisono.data._iterator import DistributedIterator
    from unisono.strategies._extended import StrategyExtended

T = TypeVar("T")


class DeprecatedMethods:
    """What older programs call. A new strategy overrides none of it."""

    # Of `Strategy`.
    run: Callable[..., UserValue]
    distribute_datasets_from_function: Callable[..., DistributedDataset]
    _split: Callable[..., DistributedDataset]

    @property
    @abc.abstractmethod
    def extended(self) -> StrategyExtended:
        """Less common operations, under tf.distribute's name for them."""

    def group(self, value: object, name: str | None = None) -> None:
        """Do nothing: tf.distribute makes one operation of several, and here all are done in order.

        Args:
            value: what `run` or `extended.update` returned.
            name: accepted for tf.distribute's signature.
        """

    def colocate_vars_with(
        self, colocate_with_variable: keras.Variable
    ) -> contextlib.AbstractContextManager[None]:
        """Return a block in which variables lie beside another; see `extended.colocate_vars_with`.

        Args:
            colocate_with_variable: a variable of this strategy.
        """
        return self.extended.colocate_vars_with(colocate_with_variable)

    def configure(
        self,
        session_config: object = None,
        cluster_spec: object = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Do nothing for a session: there are none. A strategy takes its cluster when it is created.

        Args:
            session_config: accepted for tf.distribute's signature.
            cluster_spec: must be None, as the next two.
            task_type: must be None.
            task_id: must be None.

        Raises:
            InvalidArgumentError: when a cluster is given.
        """
        if any(given is not None for given in (cluster_spec, task_type, task_id)):
            raise InvalidArgumentError(
                "A strategy takes its cluster when it is created. Received: "
                f"cluster_spec={cluster_spec!r}, task_type={task_type!r}, task_id={task_id!r}. Write "
                "`MultiWorkerMirroredStrategy(SimpleClusterResolver(cluster_spec, task_type=…, task_id=…))`."
            )

    def update_config_proto(self, config_proto: T) -> T:
        """Return the argument: there are no sessions to configure.

        Args:
            config_proto: anything.
        """
        return config_proto

    def make_dataset_iterator(self, dataset: object) -> DistributedIterator:
        """Return an iterator over global batches split over the replicas, as older programs write it.

        Args:
            dataset: as for `distribute_dataset`. `iterator.initialize()` begins it again.
        """
        # Not `distribute_dataset`: the default strategy's returns datasets as they are.
        return iter(self._split(dataset))

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Iterable[object]],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> DistributedIterator:
        """Return an iterator over the input of a function, as older programs write it.

        Args:
            input_fn: as for `distribute_datasets_from_function`.
            replication_mode: whether it is called for each worker or for each replica.
        """
        options = InputOptions(experimental_replication_mode=replication_mode)
        return iter(self.distribute_datasets_from_function(input_fn, options))

    def experimental_make_numpy_dataset(self, numpy_input: PyTree, session: object = None) -> Dataset:
        """Return a `unisono.data.Dataset` of the rows of arrays: batch and distribute it.

        Args:
            numpy_input: arrays with equal numbers of rows, also nested.
            session: accepted for tf.distribute's signature.
        """
        from unisono.data._dataset import Dataset

        return Dataset.from_tensor_slices(numpy_input)

    def experimental_run(
        self, fn: Callable[..., object], input_iterator: Iterator[PyTree] | None = None
    ) -> UserValue:
        """Call `fn` once per replica with the next batch of an iterator, as older programs write it.

        Args:
            fn: the step of one replica.
            input_iterator: from `make_dataset_iterator` or `make_input_fn_iterator`, or any other; without
                one, `fn` is called without arguments.

        Raises:
            OutOfRangeError: at the end of distributed data.
        """
        if input_iterator is None:
            return self.run(fn)
        # A distributed iterator's `get_next` ends with tf.distribute's error, which older programs catch.
        following = getattr(input_iterator, "get_next", input_iterator.__next__)
        return self.run(fn, args=(following(),))
