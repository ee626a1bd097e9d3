"""The public names of `unisono.partitioners`; they are loaded when they are first used."""

from unisono.parameter_server.chief._partition import (
    FixedShardsPartitioner as FixedShardsPartitioner,
    MaxSizePartitioner as MaxSizePartitioner,
    MinSizePartitioner as MinSizePartitioner,
    Partitioner as Partitioner,
)
