"""Who gets which rows: index arithmetic without arrays, and the options of distributed input."""

from __future__ import annotations

import dataclasses
import enum

from unisono._errors import InvalidArgumentError


def balanced_sizes(total: int, parts: int) -> tuple[int, ...]:
    """Return sizes that differ by one at most and add up to `total`; the first get more.

    TensorFlow cuts chunks of the rounded-up size, which starves the last replicas (6 rows on 4
    replicas: 2, 2, 2, 0); this rule never does.

    Args:
        total: how many rows.
        parts: how many replicas.

    >>> balanced_sizes(5, 2), balanced_sizes(1, 2)
    ((3, 2), (1, 0))
    """
    if total < 0 or parts < 1:
        raise InvalidArgumentError(
            f"Rows must be 0 or more and parts 1 or more. Received: total={total}, parts={parts}."
        )
    size, more = divmod(total, parts)
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
    """Whether an input function is called once per worker or once per replica."""

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


class AutoShardPolicy(enum.Enum):
    """How the input is divided between workers."""

    OFF = "OFF"
    AUTO = "AUTO"
    FILE = "FILE"
    DATA = "DATA"
    HINT = "HINT"


@dataclasses.dataclass(frozen=True)
class InputContext:
    """What an input function must know to make its part of the input.

    Args:
        num_input_pipelines: how many inputs there are.
        input_pipeline_id: which of them this is, from 0.
        num_replicas_in_sync: how many replicas share them.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the rows of one replica.

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
    """How input is distributed; the names are tf.distribute's.

    Args:
        experimental_fetch_to_device: whether batches are put onto the devices ahead of time.
        experimental_replication_mode: one input function call per worker or per replica.
        experimental_place_dataset_on_device: refused: pipelines run on the host.
        experimental_per_replica_buffer_size: how many batches are put ahead.

    Raises:
        InvalidArgumentError: for `experimental_place_dataset_on_device=True`, or a negative size.
    """

    experimental_fetch_to_device: bool = True
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1

    def __post_init__(self) -> None:
        if self.experimental_place_dataset_on_device:
            raise InvalidArgumentError(
                "Input pipelines run on the host. Received: experimental_place_dataset_on_device=True. "
                "Leave it out; batches are put onto the devices one step ahead."
            )
        if self.experimental_per_replica_buffer_size < 0:
            raise InvalidArgumentError(
                "A buffer must hold 0 batches or more. Received: experimental_per_replica_buffer_size="
                f"{self.experimental_per_replica_buffer_size}. Use 1."
            )


@dataclasses.dataclass(frozen=True)
class ValueContext:
    """For which replica a value is made.

    Args:
        replica_id_in_sync_group: its number, from 0.
        num_replicas_in_sync: how many there are.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1
