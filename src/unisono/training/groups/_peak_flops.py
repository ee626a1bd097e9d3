"""How fast devices compute at most, by their makers' data sheets.

Tests: tests/unit/training/test_step_work.py.
"""

from __future__ import annotations

import re

from unisono._checks import is_number
from unisono._errors import InvalidArgumentError

_TERA = 1e12

# Operations a second of one device, with dense matrices: the sheets of NVIDIA print twice as many for sparse
# ones. "float32" is TF32 where a GPU has it, and one pass in bfloat16 on TPUs, because JAX multiplies float32
# like this unless `jax_default_matmul_precision` says otherwise.
#
# Sheets: nvidia.com/en-us/data-center/{v100,tesla-t4,a100,l4,h100,h200,hgx},
# cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}. What NVIDIA's print, where that is with sparse matrices alone:
# L4 242 and 120, H100 SXM and H200 SXM 1,979 and 989, H100 PCIe 1,513 and 756, both NVL 1,671 and 835, eight
# B200 36,000 and 18,000. The names are parts of `jax.Device.device_kind`.
_PEAKS: dict[str, dict[str, float]] = {
    "V100": {"float16": 125 * _TERA, "float32": 15.7 * _TERA},
    "V100-PCIE": {"float16": 112 * _TERA, "float32": 14 * _TERA},
    "T4": {"float16": 65 * _TERA, "float32": 8.1 * _TERA},
    "A100": {"bfloat16": 312 * _TERA, "float16": 312 * _TERA, "float32": 156 * _TERA},
    "L4": {"bfloat16": 121 * _TERA, "float16": 121 * _TERA, "float32": 60 * _TERA},
    "H100": {"bfloat16": 989 * _TERA, "float16": 989 * _TERA, "float32": 494 * _TERA},
    "H100 PCIe": {"bfloat16": 756 * _TERA, "float16": 756 * _TERA, "float32": 378 * _TERA},
    "H100 NVL": {"bfloat16": 835 * _TERA, "float16": 835 * _TERA, "float32": 417 * _TERA},
    "H200": {"bfloat16": 989 * _TERA, "float16": 989 * _TERA, "float32": 494 * _TERA},
    "H200 NVL": {"bfloat16": 835 * _TERA, "float16": 835 * _TERA, "float32": 417 * _TERA},
    "B200": {"bfloat16": 2250 * _TERA, "float16": 2250 * _TERA, "float32": 1125 * _TERA},
    "TPU v4": {"bfloat16": 275 * _TERA, "float32": 275 * _TERA},
    "TPU v5e": {"bfloat16": 197 * _TERA, "float32": 197 * _TERA},
    "TPU v5p": {"bfloat16": 459 * _TERA, "float32": 459 * _TERA},
    "TPU v6e": {"bfloat16": 918 * _TERA, "float32": 918 * _TERA},
}
#: JAX's names of TPUs that have others.
_PEAKS |= {"TPU v5 lite": _PEAKS["TPU v5e"], "TPU v5": _PEAKS["TPU v5p"], "TPU v6 lite": _PEAKS["TPU v6e"]}


def peak_flops_of(device_kind: str, dtype: str) -> float | None:
    """Return the operations a second that a device reaches at most; None where that is not known.

    The longest name in the table counts that is a part of the device's, in whole words. A part of a GPU
    (MIG) has a part of its speed, which is not known.

    >>> peak_flops_of("NVIDIA H100 80GB HBM3", "bfloat16"), peak_flops_of("NVIDIA H100 PCIe", "bfloat16")
    (989000000000000.0, 756000000000000.0)
    >>> peak_flops_of("cpu", "float32"), peak_flops_of("NVIDIA L40S", "float32")
    (None, None)
    """
    if device_kind in _PEAKS:
        return _PEAKS[device_kind].get(dtype)
    names = [n for n in _PEAKS if re.search(rf"\b{re.escape(n)}\b", device_kind)]
    if not names or "MIG" in device_kind:
        return None
    return _PEAKS[max(names, key=len)].get(dtype)


def set_peak_flops(device_kind: str, dtype: str, flops: float) -> None:
    """Set the operations a second that a kind of device reaches at most, for `mfu` of `StepTimer`.

    Args:
        device_kind: JAX's name of the device, or a part of it: `jax.devices()[0].device_kind`.
        dtype: in which the model computes: `model.compute_dtype`.
        flops: operations a second of one device; a multiplication with an addition counts two.

    Raises:
        InvalidArgumentError: `flops` is no positive number.

    >>> set_peak_flops("My accelerator", "bfloat16", 5e14)
    >>> peak_flops_of("My accelerator 2", "bfloat16")
    500000000000000.0
    """
    _PEAKS.setdefault(device_kind, {})[dtype] = checked_peak(flops)


def checked_peak(flops: float) -> float:
    """Return a peak that a user gives."""
    if not is_number(flops) or flops <= 0:
        raise InvalidArgumentError(
            "A device's peak must be a positive number of operations a second. Received: "
            f"{flops!r}. Write 989e12 for 989 TFLOP/s."
        )
    return float(flops)
