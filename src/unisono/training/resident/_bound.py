"""How much of the devices' memory the arrays of a call may take.

Tests: tests/unit/training/test_resident_bound.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax

from unisono._checks import digits
from unisono._errors import InvalidArgumentError
from unisono._system._environ import process_environ

#: The variable of the environment that allows, forbids or bounds arrays on the devices.
SWITCH = "UNISONO_RESIDENT_DATA"

#: The share of a device's free memory, and the bytes where a device does not say how much it has.
_SHARE, _BYTES = 4, 256 << 20

#: Rows up to these many bytes are filled up, so that arrays of similar sizes share a program.
_COPIED = 256 << 20

#: The numbers that a device gives for its memory; CPUs give None.
MemoryStats = Mapping[str, int] | None


def most_bytes(switch: str, stats: Sequence[MemoryStats]) -> int:
    """Return how many bytes of arrays may lie on each device.

    Args:
        switch: the value of `SWITCH`: empty or `1` for a quarter of the free memory, else a number of bytes.
        stats: of each device.

    Raises:
        InvalidArgumentError: the value is no whole number.

    >>> most_bytes("", [{"bytes_limit": 1000, "bytes_in_use": 200}, {"bytes_limit": 1000, "bytes_in_use": 0}])
    200
    >>> most_bytes("5000", [None])
    5000
    """
    number = digits(switch) if switch else 1
    if number is None:
        raise InvalidArgumentError(
            f"{SWITCH} must be 0, 1 or a number of bytes. Received: {switch!r}. Write {SWITCH}=0 to place "
            f"batches one by one, {SWITCH}=1000000000 to let arrays take 1 GB of each device."
        )
    if number != 1:
        return number
    return min(_free(one) // _SHARE if one else _BYTES for one in stats)


def bytes_here(devices: Sequence[jax.Device]) -> int:
    """Return how many bytes of arrays may lie on each of these devices now."""
    return most_bytes(process_environ().get(SWITCH, ""), [device.memory_stats() for device in devices])


def _free(stats: Mapping[str, int]) -> int:
    return max(0, stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0))


def rows_on_device(rows: int, nbytes: int) -> int:
    """Return for how many rows an array on a device has room, at most an eighth more than it has.

    A program is compiled for one number: arrays of similar sizes share it. Filling up takes a copy on the
    host, so that larger arrays keep their number.

    >>> [rows_on_device(rows, 100) for rows in (5, 16, 17, 1000, 1025)]
    [5, 16, 18, 1024, 1152]
    >>> rows_on_device(1000, 1 << 30)
    1000
    """
    step = 1 << max(0, (rows - 1).bit_length() - 4)
    return rows if nbytes > _COPIED else -(-rows // step) * step
