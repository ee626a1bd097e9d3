"""The division of rows among replicas, as index arithmetic, and the options of distributed input; pure."""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable
from typing import Any

from unisono._errors import InvalidArgumentError, InvalidTypeError


def balanced_sizes(total: int, parts: int) -> tuple[int, ...]:
    """Return sizes that differ by at most one and add up to `total`; larger ones come first.

    TensorFlow uses chunks of the rounded-up size, which can leave the last replicas without rows
    (6 rows on 4 replicas: 2, 2, 2, 0).

    >>> balanced_sizes(5, 2), balanced_sizes(1, 2)
    ((3, 2), (1, 0))
    """
    if total < 0 or parts < 1:
        raise InvalidArgumentError(
            f"Rows must be 0 or more and parts 1 or more. Received: total={total}, parts={parts}."
        )
    size, more = divmod(total, parts)
    # The first parts get the rest, so that a part is empty only where there are fewer rows than parts.
    return tuple(size + (i < more) for i in range(parts))


def split_points(total: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Return the first row and the one after the last of each part.

    >>> split_points(5, 2)
    ((0, 3), (3, 5))
    """
    points, start = [], 0
    for size in balanced_sizes(total, parts):
        points.append((start, start + size))
        start += size
    return tuple(points)


class InputReplicationMode(enum.Enum):
    """The calls of an input function: one per worker, or one per replica.

    >>> [mode.name for mode in InputReplicationMode]
    ['PER_WORKER', 'PER_REPLICA']
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


class AutoShardPolicy(enum.Enum):
    """How the input is divided between workers.

    >>> import unisono
    >>> options = unisono.data.Options()
    >>> options.experimental_distribute.auto_shard_policy = AutoShardPolicy.DATA
    """

    OFF = "OFF"
    AUTO = "AUTO"
    FILE = "FILE"
    DATA = "DATA"
    HINT = "HINT"


@dataclasses.dataclass(slots=True)
class DistributeOptions:
    """How a data set is split over workers.

    Args:
        auto_shard_policy: The unit that is split: files, elements, or nothing.

    >>> DistributeOptions().auto_shard_policy.name
    'AUTO'
    """

    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO


@dataclasses.dataclass(slots=True)
class Options:
    """Options of a data set, set by `Dataset.with_options`.

    Args:
        experimental_distribute: How it is split over workers.
        deterministic: Accepted for compatibility; the order of elements is always deterministic.

    >>> options = Options()
    >>> options.experimental_distribute.auto_shard_policy.name
    'AUTO'
    """

    experimental_distribute: DistributeOptions = dataclasses.field(default_factory=DistributeOptions)
    deterministic: bool | None = None

    def _merged(self, later: Options) -> Options:
        """Return these options, overridden by those that `later` sets.

        Args:
            later: The options that take precedence.

        Returns:
            New options.

        Raises:
            InvalidArgumentError: the policy is none of `AutoShardPolicy`.
        """
        # Deep, because `experimental_distribute` is an object that the user may change later.
        result = copy.deepcopy(self)
        policy = later.experimental_distribute.auto_shard_policy
        if not isinstance(policy, AutoShardPolicy):
            raise InvalidArgumentError(
                "`auto_shard_policy` must be an `AutoShardPolicy`. Received: "
                f"{policy!r}. Write `unisono.data.experimental.AutoShardPolicy.DATA`."
            )
        # AUTO is the default and counts as not set: it must not override a policy that was chosen earlier.
        if policy != AutoShardPolicy.AUTO:
            result.experimental_distribute.auto_shard_policy = policy
        if later.deterministic is not None:
            result.deterministic = later.deterministic
        return result


@dataclasses.dataclass(frozen=True)
class InputContext:
    """The context of an input function: which part of the input it must create.

    Args:
        num_input_pipelines: the number of input pipelines.
        input_pipeline_id: the number of this pipeline, from 0.
        num_replicas_in_sync: the number of replicas that share them.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the number of rows of one replica.

        Raises:
            InvalidArgumentError: when the global batch size does not divide.

        >>> InputContext(1, 0, 4).get_per_replica_batch_size(64)
        16
        """
        size, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise InvalidArgumentError(
                "The global batch size must divide by the number of replicas. Received: "
                f"global_batch_size={global_batch_size} for {self.num_replicas_in_sync} replicas. "
                f"Use {size * self.num_replicas_in_sync} or {(size + 1) * self.num_replicas_in_sync}."
            )
        return size


@dataclasses.dataclass(frozen=True)
class InputOptions:
    """The options of distributed input, under tf.distribute's names.

    Args:
        experimental_fetch_to_device: whether batches are put onto the devices ahead of time.
        experimental_replication_mode: one input function call per worker or per replica.
        experimental_place_dataset_on_device: must be False, because pipelines run on the host.
        experimental_per_replica_buffer_size: the number of batches that are put ahead.

    Raises:
        InvalidArgumentError: for `experimental_place_dataset_on_device=True`, or a negative size.
    """

    # Names and defaults follow `tf.distribute.InputOptions`.
    experimental_fetch_to_device: bool = True
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1

    def __post_init__(self) -> None:
        if self.experimental_place_dataset_on_device:
            raise InvalidArgumentError(
                "Input pipelines must run on the host. Received: experimental_place_dataset_on_device=True. "
                "Leave it out; batches are put onto the devices one step ahead."
            )
        if self.experimental_per_replica_buffer_size < 0:
            raise InvalidArgumentError(
                "A buffer must hold 0 batches or more. Received: experimental_per_replica_buffer_size="
                f"{self.experimental_per_replica_buffer_size}. Use 1."
            )


@dataclasses.dataclass(frozen=True)
class DatasetCreator:
    """A function that makes the data of `fit` on each worker of a parameter-server strategy.

    As `tf.keras.utils.experimental.DatasetCreator`. Under other strategies it makes the input as
    `strategy.distribute_datasets_from_function` does.

    Args:
        dataset_fn: gets an `InputContext`, and returns a dataset of batches. Workers get it by `cloudpickle`.
        input_options: how the input is distributed.

    Raises:
        InvalidTypeError: `dataset_fn` cannot be called, or `input_options` are no `InputOptions`.

    >>> DatasetCreator(lambda context: [1, 2])(InputContext())
    [1, 2]
    """

    dataset_fn: Callable[..., Any]
    input_options: InputOptions | None = None

    def __post_init__(self) -> None:
        if not callable(self.dataset_fn):
            raise InvalidTypeError(
                "`dataset_fn` of a `DatasetCreator` must be a function. Received: "
                f"{type(self.dataset_fn).__name__}. Write `DatasetCreator(lambda context: dataset)`."
            )
        if self.input_options is not None and not isinstance(self.input_options, InputOptions):
            raise InvalidTypeError(
                "`input_options` of a `DatasetCreator` must be `InputOptions`. Received: "
                f"{self.input_options!r}. Leave them out."
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return a dataset."""
        return self.dataset_fn(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class ValueContext:
    """The replica for which a value is created.

    Args:
        replica_id_in_sync_group: its number, from 0.
        num_replicas_in_sync: the number of replicas.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1
