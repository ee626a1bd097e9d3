"""Collectives of bytes between processes, outside of steps: small programs that are compiled once.

The cost of a collective between processes is that all wake up for it, whatever its size. So a message is one
collective when its bytes fit beside their number, and two otherwise. JAX's `multihost_utils` takes arrays of
equal sizes only, so that bytes always need two collectives, and traces its program again in each call.

Tests: tests/cluster/test_chief.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from unisono._mesh import devices_of_all

_AXIS = "process"

#: Bytes of the first collective, of which the first eight hold the number of all. A digest has 32, and the
#: fingerprint of a batch 48.
_FIRST = 256
_NUMBER = 8

#: Bytes of a message that fit into one collective.
AT_ONCE = _FIRST - _NUMBER


class HostCollectives:
    """Collectives over one device of each process, which all must call in the same order."""

    def __init__(self) -> None:
        devices: dict[int, jax.Device] = {}
        for device in devices_of_all():
            devices.setdefault(device.process_index, device)
        self._count = len(devices)
        self._own = devices[jax.process_index()]
        mesh = Mesh(np.array([devices[p] for p in sorted(devices)]), (_AXIS,))
        self._sharding = NamedSharding(mesh, PartitionSpec(_AXIS))
        shared = functools.partial(
            jax.shard_map,
            mesh=mesh,
            in_specs=PartitionSpec(_AXIS),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        self._gather = jax.jit(shared(lambda x: jax.lax.all_gather(x[0], _AXIS)))
        # A sum, in which all but the first process contribute zeros, moves less than a gather of all.
        self._send = jax.jit(shared(lambda x: jax.lax.psum(x[0], _AXIS)))
        #: How many collectives were run; tests count them.
        self.collectives = 0

    @property
    def platform(self) -> str:
        """Of the devices: `"cpu"`, `"gpu"` or `"tpu"`."""
        return str(self._own.platform)

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every process, in the order of their numbers."""
        begin = len(data).to_bytes(_NUMBER, "little") + data[:AT_ONCE]
        rows = self._run(self._gather, begin, _FIRST)
        sizes = [int.from_bytes(row[:_NUMBER], "little") for row in rows]
        found = [row[_NUMBER : _NUMBER + size] for row, size in zip(rows, sizes, strict=True)]
        most = max(sizes) - AT_ONCE
        if most > 0:
            rest = self._run(self._gather, data[AT_ONCE:], _rounded(most))
            found = [a + b[: max(0, size - AT_ONCE)] for a, b, size in zip(found, rest, sizes, strict=True)]
        return found

    def broadcast(self, data: bytes) -> bytes:
        """Return the first process' bytes on every process."""
        if self._own.process_index:
            data = b""
        row = self._run(self._gather, len(data).to_bytes(_NUMBER, "little") + data[:AT_ONCE], _FIRST)[0]
        size = int.from_bytes(row[:_NUMBER], "little")
        begin = row[_NUMBER : _NUMBER + size]
        return begin + self.send(data[AT_ONCE:], size - AT_ONCE) if size > AT_ONCE else begin

    def send(self, data: bytes, size: int) -> bytes:
        """Return the first process' bytes on every process: one collective."""
        own = b"" if self._own.process_index else data
        return self._run(self._send, own, _rounded(size))[0][:size]

    def _run(self, program: Callable[[jax.Array], jax.Array], data: bytes, size: int) -> list[bytes]:
        self.collectives += 1
        buffer = np.zeros(size, np.uint8)
        buffer[: len(data)] = np.frombuffer(data, np.uint8)
        part = jax.device_put(buffer.view(np.uint32)[None], self._own)
        shape = (self._count, *part.shape[1:])
        array = jax.make_array_from_single_device_arrays(shape, self._sharding, [part])
        rows = np.asarray(program(array).addressable_data(0)).reshape(-1, size // 4)
        return [row.tobytes() for row in rows]


def _rounded(size: int) -> int:
    """Round a size up to one of few, since each is a compiled program. At most an eighth is padding.

    >>> _rounded(100), _rounded(1000), _rounded(1_000_000)
    (256, 1024, 1048576)
    """
    step = max(_FIRST, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step
