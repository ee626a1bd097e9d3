"""Names of `tf.distribute.experimental.partitioners`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.partitioners import (
    FixedShardsPartitioner as FixedShardsPartitioner,
    MaxSizePartitioner as MaxSizePartitioner,
    MinSizePartitioner as MinSizePartitioner,
    Partitioner as Partitioner,
)
