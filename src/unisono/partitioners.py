"""How `ParameterServerStrategy` cuts large variables into shards: TensorFlow's partitioners.

Tests: tests/unit/ps/test_partition.py.
"""

from __future__ import annotations

from typing import NoReturn

from unisono._names import no_attribute
from unisono.ps._partition import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]


def __getattr__(name: str) -> NoReturn:
    raise no_attribute(__name__, name, __all__)
