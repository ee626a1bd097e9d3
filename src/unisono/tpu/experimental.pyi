"""The public names of `unisono.tpu.experimental`; they are loaded when they are first used."""

from unisono.cluster_resolver._tpu import (
    DeviceAssignment as DeviceAssignment,
    DeviceOrderMode as DeviceOrderMode,
    HardwareFeature as HardwareFeature,
    TPUSystemMetadata as TPUSystemMetadata,
    Topology as Topology,
    initialize_tpu_system as initialize_tpu_system,
    shutdown_tpu_system as shutdown_tpu_system,
)
