"""The names of `tf.tpu.experimental`.

Tests: tests/unit/test_tpu.py.
"""

from __future__ import annotations

from typing import NoReturn

from unisono._names import no_attribute
from unisono.cluster_resolver._tpu import TPUSystemMetadata, initialize_tpu_system, shutdown_tpu_system
from unisono.cluster_resolver._tpu_topology import (
    DeviceAssignment,
    DeviceOrderMode,
    HardwareFeature,
    Topology,
)

__all__ = [
    "DeviceAssignment",
    "DeviceOrderMode",
    "HardwareFeature",
    "TPUSystemMetadata",
    "Topology",
    "initialize_tpu_system",
    "shutdown_tpu_system",
]


def __getattr__(name: str) -> NoReturn:
    raise no_attribute(__name__, name, __all__)
