"""The contents of a checkpoint, apart from the objects: arrays by name, states, plain values.

Tests: tests/virtual/checkpoint/test_checkpoint.py, tests/unit/checkpoint/test_unread_arrays.py.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

import jax
import jax.numpy as jnp
import numpy as np

from unisono._system._json import parse_json
from unisono._types import ArrayLike, Json
from unisono.checkpoint._json_state import Array, HostArray, check_encoded, stand_ins
from unisono.checkpoint._unread_arrays import SentArray, UnreadArray
from unisono.collectives._process_group import ProcessGroup
from unisono.step._value_handle import ValueHandle


class Copies(np.ndarray):
    """The copies of a variable that have no common value: one for each replica, along the first dimension."""


class Facts(TypedDict):
    """The contents of a checkpoint besides arrays, by the names of the objects."""

    states: dict[str, Json]
    values: dict[str, Json]
    #: The arrays that are `Copies`.
    copies: NotRequired[list[str]]
    #: Where a run of `fit` stands, in its backups.
    progress: NotRequired[Json]


def read_facts(text: bytes, arrays: Mapping[str, HostArray]) -> Facts:
    """Return the contents of a checkpoint besides arrays.

    Args:
        text: of the file; its hash may be right, and its contents another program's.
        arrays: of the checkpoint.

    Raises:
        ValueError: it is not what was written of a `Snapshot`.
    """
    facts: Facts = parse_json(text)
    for key in ("states", "values"):
        if not isinstance(facts, dict) or not isinstance(facts.get(key), dict):
            raise ValueError(f"an object must hold the {key} by name")
    shapes = stand_ins(arrays)
    # One by one, as they are decoded: a name among them is no mark of a form.
    for value in (*facts["states"].values(), *facts["values"].values(), facts.get("progress")):
        check_encoded(value, shapes)
    copies = facts.get("copies", [])
    # Each has the copies along its first dimension.
    if not isinstance(copies, list) or any(
        not isinstance(n, str) or not _has_rows(n, arrays) for n in copies
    ):
        raise ValueError("`copies` must name arrays with copies along the first dimension")
    known: Any = {key: value for key, value in facts.items() if key in Facts.__annotations__}
    return cast(Facts, known)


def _has_rows(name: Json, arrays: Mapping[str, HostArray]) -> bool:
    array = arrays.get(name) if isinstance(name, str) else None
    return array is not None and array.ndim > 0 and array.shape[0] > 0


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The contents of a checkpoint, no longer touched by what trains on.

    Args:
        arrays: by name; on the devices or the host. What lies in parts on several workers lasts until the
            next step, and all of them must read it.
        file: what of a checkpoint is on the disk already, written by `_series.staged`; None for nothing.
        digest: of this file's contents; empty where it is not to be compared.
    """

    arrays: Mapping[str, Array]
    facts: Facts
    file: Path | None = None
    digest: str = ""

    @property
    def nbytes(self) -> int:
        """The size of all arrays."""
        written = 0 if self.file is None else self.file.stat().st_size
        return written + sum(a.nbytes for a in self.arrays.values())

    def on_host(self) -> dict[str, HostArray]:
        """The arrays as numpy arrays, several copies of one as `Copies`; waits for the devices.

        Large ones that lie on the disk, or on another worker, are read when they are needed.
        """
        copies = self.facts.get("copies", ())
        return {
            name: np.asarray(a).view(Copies)
            if name in copies
            else (a if isinstance(a, UnreadArray) else np.asarray(a))
            for name, a in self.arrays.items()
        }

    def to_bytes(self) -> bytes:
        """The snapshot as bytes, to be sent to other processes; what is not read yet `sent` sends later."""
        arrays = self.on_host()
        # JSON and raw bytes, not pickle, which would run code that arrives from the network.
        head = [[name, list(a.shape), str(a.dtype), isinstance(a, UnreadArray)] for name, a in arrays.items()]
        text = json.dumps({"arrays": head, "facts": self.facts}).encode()
        parts = [np.ascontiguousarray(a).tobytes() for a in arrays.values() if not isinstance(a, UnreadArray)]
        return b"".join([len(text).to_bytes(8, "big"), text, *parts])

    def sent(self, group: ProcessGroup) -> Snapshot:
        """The snapshot for the process that has called `to_bytes`; all of a group read its large arrays."""
        arrays = {
            name: SentArray(a.shape, a.dtype, group, a) if isinstance(a, UnreadArray) else a
            for name, a in self.on_host().items()
        }
        return Snapshot(arrays, self.facts)

    @classmethod
    def from_bytes(cls, data: bytes, group: ProcessGroup) -> Snapshot:
        """Inverse of `to_bytes`."""
        at = 8 + int.from_bytes(data[:8], "big")
        head = json.loads(data[8:at])
        arrays: dict[str, Array] = {}
        for name, shape, dtype, is_later in head["arrays"]:
            kind = jnp.dtype(dtype)
            if is_later:
                arrays[name] = SentArray(tuple(shape), kind, group)
                continue
            count = int(np.prod(shape))
            arrays[name] = np.frombuffer(data, kind, count, at).reshape(shape)
            at += count * kind.itemsize
        return cls(arrays, head["facts"])


def copy_of(value: ArrayLike | ValueHandle) -> Array:
    """Return a copy of an array that no later step can donate; does not wait for it.

    Args:
        value: an array; if it lies on every device, one copy is taken. What lies in parts on several
            workers is returned as it is: no host may be able to hold the copies of all.
    """
    if isinstance(value, ValueHandle) and value.needs_all:
        return value
    if not isinstance(value, jax.Array):
        return np.array(value)
    if value.is_fully_replicated and len(value.sharding.device_set) > 1:
        value = value.addressable_shards[0].data
    if value.sharding.memory_kind not in (None, "device"):
        return np.array(value)
    return jnp.copy(value)
