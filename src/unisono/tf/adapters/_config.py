"""Devices as `tf.config` names them, over JAX's.

Tests: tests/unit/tf/test_config.py.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import jax

from unisono._errors import UnsupportedError
from unisono._mesh import jax_runs, local_devices, make_cpu_devices

_PLATFORMS = {"CPU": "cpu", "GPU": "gpu", "TPU": "tpu"}


@dataclasses.dataclass(frozen=True)
class Device:
    """A device of this machine.

    Args:
        name: such as `"/physical_device:GPU:0"`.
        device_type: `"CPU"`, `"GPU"` or `"TPU"`.
    """

    name: str
    device_type: str


@dataclasses.dataclass(frozen=True)
class LogicalDeviceConfiguration:
    """A virtual device.

    Args:
        memory_limit: is not used: JAX's virtual CPU devices share the machine's memory.
        experimental_priority: is not used.
    """

    memory_limit: int | None = None
    experimental_priority: int | None = None


def list_physical_devices(device_type: str | None = None) -> list[Device]:
    """Return the devices of this machine; all of its CPUs are one, as in TensorFlow.

    Args:
        device_type: `"CPU"`, `"GPU"` or `"TPU"`; None for all.
    """
    return _devices(device_type, "/physical_device")


def list_logical_devices(device_type: str | None = None) -> list[Device]:
    """Return the devices that replicas may be on: virtual CPU devices are several.

    Args:
        device_type: `"CPU"`, `"GPU"` or `"TPU"`; None for all.
    """
    return _devices(device_type, "/device", all_cpus=True)


def _devices(device_type: str | None, prefix: str, all_cpus: bool = False) -> list[Device]:
    kinds = list(_PLATFORMS) if device_type is None else [device_type.upper()]
    found = []
    for kind in kinds:
        if kind == "CPU" and not all_cpus:
            # Without starting JAX, which could make no virtual devices afterwards.
            found.append(Device(f"{prefix}:CPU:0", "CPU"))
        elif kind == "CPU" or _has_accelerators():
            try:
                number = len(local_devices(_PLATFORMS[kind]))
            except RuntimeError:
                number = 0
            found += [Device(f"{prefix}:{kind}:{i}", kind) for i in range(number)]
    return found


def _has_accelerators() -> bool:
    """Return whether JAX may have other devices than CPUs; it starts where it may."""
    platforms = getattr(jax.config, "jax_platforms", None)
    return platforms is None or bool(set(platforms.split(",")) - {"cpu", ""})


def set_visible_devices(devices: Sequence[Device] | Device, device_type: str | None = None) -> None:
    """Let JAX see the given devices alone; only "none of the GPUs" can be said.

    Raises:
        UnsupportedError: some GPUs, but not all, or JAX has started.
    """
    shown = [devices] if isinstance(devices, Device) else list(devices)
    if device_type is not None and device_type.upper() == "CPU":
        return
    if not shown:
        if jax_runs():
            raise UnsupportedError(
                "Devices are hidden before JAX computes anything. Received: `set_visible_devices([])` "
                "afterwards. Move it to the top of the program, or set JAX_PLATFORMS=cpu."
            )
        jax.config.update("jax_platforms", "cpu")
        return
    if len(shown) != len(list_physical_devices(shown[0].device_type)):
        raise UnsupportedError(
            "JAX sees all GPUs or none. Received: some of them. Set CUDA_VISIBLE_DEVICES before the program "
            "starts, or name the devices: `MirroredStrategy(devices=[…])`."
        )


def set_logical_device_configuration(device: Device, logical_devices: Sequence[Any]) -> None:
    """Divide the CPU into virtual devices; before JAX computes anything.

    Args:
        device: a CPU of `list_physical_devices`.
        logical_devices: one for each virtual device.

    Raises:
        UnsupportedError: the device is no CPU, or JAX has started.
    """
    if device.device_type != "CPU":
        raise UnsupportedError(
            f"JAX divides CPUs alone into virtual devices. Received: {device.name}. Use virtual CPU "
            "devices, or let JAX share the GPU: XLA_PYTHON_CLIENT_MEM_FRACTION."
        )
    if jax_runs():
        raise UnsupportedError(
            "Virtual devices are made before JAX computes anything. Received: "
            f"{len(logical_devices)} devices afterwards. Move the call to the top of the program."
        )
    make_cpu_devices(len(logical_devices))


def set_memory_growth(device: Device, enable: bool) -> None:
    """Do nothing: JAX reads XLA_PYTHON_CLIENT_PREALLOCATE when the process starts."""


def run_functions_eagerly(run_eagerly: bool) -> None:
    """Run functions without compiling them, or compile them again."""
    jax.config.update("jax_disable_jit", run_eagerly)


def is_gpu_available(cuda_only: bool = False, min_cuda_compute_capability: Any = None) -> bool:
    """Return whether there is a GPU.

    Args:
        cuda_only: is not used.
        min_cuda_compute_capability: is not used.
    """
    return bool(list_physical_devices("GPU"))


def get_logger() -> logging.Logger:
    """Return the logger of the library."""
    return logging.getLogger("unisono")
