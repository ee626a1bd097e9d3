"""The `ProcessGroup` of processes that `jax.distributed` connects.

Tests: tests/cluster/test_peers.py, tests/cluster/test_absent.py, tests/cluster/test_chief.py.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from unisono._errors import ClusterError
from unisono._mesh import ReplicaMesh, devices_of_all
from unisono._system._task_reports import process_heartbeat
from unisono._types import PyTree
from unisono.cluster._batch_fingerprint import are_near, fingerprint
from unisono.cluster._state_check import StateCheck
from unisono.cluster.liveness._peer_monitor import PeerMonitor
from unisono.cluster.liveness._status import CALL, READ
from unisono.cluster.rendezvous._mismatch import differences, named
from unisono.collectives._process_group import Arrays, NamedState, ProcessGroup, ProgramToken, Tree

#: Bytes of a digest.
_DIGEST = 32


_AXIS = "process"

#: Bytes of the first collective, of which the first eight hold the number of all. A digest has 32, and the
#: fingerprint of a batch 48.
_FIRST = 256
_NUMBER = 8

#: Bytes of arrays that travel together, and that each host holds then; a larger one travels alone.
_AT_MOST = 64 << 20

#: Bytes of a message that fit into one collective.
AT_ONCE = _FIRST - _NUMBER


class HostCollectives:
    """Collectives of bytes over one device of each process, which all must call in the same order.

    They are small programs, compiled once. All processes wake up for a collective, whatever its size: a
    message is one collective when its bytes fit beside their number, and two otherwise. JAX's
    `multihost_utils` always needs two for bytes, and traces its program again in each call.
    """

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


class JaxProcessGroup(ProcessGroup):
    """The processes of a cluster on `jax.distributed`."""

    def __init__(self, index: int, size: int, collectives: HostCollectives, monitor: PeerMonitor) -> None:
        super().__init__(index, size)
        #: What the watchdog reads.
        self._in_flight = monitor.status.in_flight
        self._heartbeat = process_heartbeat()
        self._collectives, self._monitor = collectives, monitor
        # By whose steps they compare, with which they end.
        self._checks: weakref.WeakKeyDictionary[Hashable, StateCheck] = weakref.WeakKeyDictionary()

    @property
    def monitor(self) -> PeerMonitor:
        """Asks the other processes where they are."""
        return self._monitor

    @property
    def is_on_one_host(self) -> bool:
        """Whether all processes have published one address."""
        return self._monitor.is_on_one_host

    # --- collectives -----------------------------------------------------------------------

    @property
    def num_collectives(self) -> int:
        """How many messages were sent to all processes outside of steps."""
        return self._collectives.collectives

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """Count a collective, mark it as in flight, and explain its error."""
        self._monitor.status.collectives_begun += 1
        try:
            with self._in_flight.collective():
                yield
        except (RuntimeError, ValueError) as error:
            explained = self.explain(error)
            if explained is None:
                raise
            raise explained from error

    def broadcast(self, data: bytes) -> bytes:
        """Return the bytes of the first process: one collective for a few bytes, two for many."""
        with self.collective():
            return self._collectives.broadcast(data)

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every process: one collective for a few bytes, two for many."""
        return self._gathered(data)[:: self.together]

    def _gathered(self, data: bytes) -> list[bytes]:
        with self.collective():
            return self._collectives.gather(data)

    def broadcast_arrays(self, tree: Tree) -> Tree:
        """Return the arrays of the first process, as host arrays: one collective for all of them."""
        leaves, structure = jax.tree.flatten(tree)
        arrays = [x if hasattr(x, "nbytes") else np.asarray(x) for x in leaves]
        if not arrays:
            return tree
        data = _bytes_of(list(map(on_host, arrays))) if self.is_chief else b""
        with self.collective():
            data = self._collectives.send(data, sum(a.nbytes for a in arrays))
        restored: Tree = jax.tree.unflatten(structure, _arrays_from(data, arrays))
        return restored

    def equal_arrays(
        self, arrays: Arrays, known: Sequence[bool], key: object, what: str, batch: Arrays | None = None
    ) -> Arrays | None:
        """Compare digests, and broadcast only the arrays that differ: one collective, or a few."""
        lines = "\n".join(f"{a.shape} {a.dtype}" for a in arrays)
        new = [i for i, is_known in enumerate(known) if not is_known]
        size = sum(arrays[i].nbytes for i in new)
        # A message costs its latency: a few bytes of arrays travel with the digest.
        batch_print = b"" if batch is None else fingerprint(batch)
        head = _DIGEST + len(batch_print)
        at_once = size <= AT_ONCE - head
        own = [np.asarray(arrays[i]) for i in new] if at_once else []
        every = self._gathered(_digest(f"{key} {new} {lines}".encode()) + batch_print + _bytes_of(own))
        if batch_print:
            _check_batches([e[_DIGEST:head] for e in every])
        if any(e[:_DIGEST] != every[0][:_DIGEST] for e in every):
            self.require_same({"variables": lines}, what)
            return list(self.broadcast_arrays(list(arrays)))
        if not new:
            return None
        data = every[0][head:]
        found = _arrays_from(data, own) if at_once else self._equal_each([arrays[i] for i in new])
        result = list(arrays)
        for i, array in zip(new, found, strict=True):
            result[i] = array
        return result

    def _equal_each(self, arrays: Arrays) -> list[jax.Array | np.ndarray]:
        """Return the arrays of the first process: these themselves where all processes have the same.

        No host holds more of them at once than a message has, or one array of the devices.
        """
        each = [digest_of(x) for x in arrays]
        every = self._gathered(b"".join(each))
        equal: list[jax.Array | np.ndarray] = []
        # What a step is given must be there once for each variable.
        seen: set[int] = set()
        for x in arrays:
            equal.append(on_host(x).copy() if id(x) in seen else x)
            seen.add(id(x))
        places = [slice(i * len(own), (i + 1) * len(own)) for i, own in enumerate(each)]
        differ = [i for i, at in enumerate(places) if any(e[at] != every[0][at] for e in every)]
        for together in _within(differ, [arrays[i].nbytes for i in differ]):
            for i, x in zip(together, self.broadcast_arrays([arrays[i] for i in together]), strict=True):
                equal[i] = x
        return equal

    def are_alike(self, data: bytes) -> bool:
        """Compare digests: one collective."""
        every = self._gathered(_digest(data))
        return every.count(every[0]) == len(every)

    def are_alike_in_replicas(self, data: bytes) -> bool:
        """Compare digests: one collective, where replicas have several processes."""
        if self.together == 1:
            return True
        every = self._gathered(_digest(data))
        return all(own == every[i - i % self.together] for i, own in enumerate(every))

    def require_same(self, fingerprint: Mapping[str, object], what: str, besides: bytes = b"") -> list[bytes]:
        """Compare digests: one collective where the facts agree, and another one to name what differs."""
        text = json.dumps(dict(fingerprint), sort_keys=True, default=str).encode()
        every = self._gathered(_digest(text) + besides)
        if any(e[:_DIGEST] != every[0][:_DIGEST] for e in every):
            found = {i: json.loads(data) for i, data in enumerate(self._gathered(text))}
            raise ClusterError(
                f"{what} must be the same on all processes. Received: " + " ".join(differences(found))
            )
        return [e[_DIGEST:] for e in every]

    def from_chief(self, make: Callable[[], bytes]) -> bytes:
        """Call `make` on the first process and broadcast its result, or its error: one collective or two."""
        error: BaseException | None = None
        answer = b""
        if self.is_chief:
            try:
                answer = b"+" + make()
            except Exception as caught:
                error, answer = caught, b"-" + str(caught).encode()
        answer = self.broadcast(answer)
        if error is not None:
            raise error
        if answer[:1] == b"-":
            raise ClusterError(
                f"The first worker must succeed for all. Received there: {answer[1:].decode()}"
            )
        return answer[1:]

    # --- steps -----------------------------------------------------------------------------

    def note_step(self, kind: str, batches: Sequence[PyTree]) -> None:
        """Note a step; where its shapes are new, compare them with those of the next process."""
        self._monitor.begin_step(kind, batches)

    def note_call(self, name: str) -> None:
        """Note a call, and compare it with what the next process does."""
        self._monitor.begin((f"{CALL}`{name}`", ()))

    def note_read(self) -> None:
        """Note a read, and compare it with what the next process does."""
        self._monitor.begin((READ, ()))

    def dispatch(self) -> contextlib.AbstractContextManager[None]:
        """Mark the call as in flight: on CPUs it may wait for the other processes."""
        return self._in_flight.collective()

    def step_started(self, token: ProgramToken) -> None:
        """Note the step as in flight, and show a supervisor that the process advances."""
        self._in_flight.note_program(token)
        self._heartbeat.beat()

    def check_state(self, mesh: ReplicaMesh, key: Hashable, steps: int, state: NamedState) -> None:
        """Compare the state after the steps 1, 2, 4, …; see `StateCheck`."""
        with self.collective():
            self._check_of(mesh, key).note_steps(steps, state)

    def compare_state(self, mesh: ReplicaMesh, names: Sequence[str], arrays: Sequence[jax.Array]) -> None:
        """Compare a state, and wait for the result."""
        with self.collective():
            self._check_of(mesh, mesh).compare(names, arrays)

    def _check_of(self, mesh: ReplicaMesh, key: Hashable) -> StateCheck:
        if key not in self._checks:
            self._checks[key] = StateCheck(mesh.one_each, self._in_flight)
        return self._checks[key]

    # --- files and errors ------------------------------------------------------------------

    def share_file(self, path: str) -> None:
        """Note or wait for the file, by messages from port to port."""
        if self.is_chief:
            self._monitor.status.note_file(path)
        else:
            self._monitor.wait_for_file(path)

    def checkpoint_number(self, series: str, number: int) -> int:
        """Ask the chief for the number."""
        return self._monitor.agree_on_number(series, number, is_first=self.is_chief)

    def explain(self, error: BaseException) -> ClusterError | None:
        """Ask the other processes what has happened, where JAX's error is about a collective."""
        return self._monitor.explain(error)


def _check_batches(prints: Sequence[bytes]) -> None:
    """Raise on every process when the first batches differ, of which each process computes a part."""
    others = [i for i, batch in enumerate(prints) if not are_near([prints[0], batch])]
    if others:
        raise ClusterError(
            "The first batch must be the same on all processes, for each computes its own rows of it. "
            f"Received: other values in the batch of {named(others)} than in that of process 0, of the same "
            "shapes. Seed what is drawn (`keras.utils.set_random_seed`); give data of each worker's own as a "
            "`unisono.data.Dataset` with AutoShardPolicy.FILE or OFF, or by "
            "`strategy.distribute_datasets_from_function`."
        )


def digest_of(array: jax.Array | np.ndarray) -> bytes:
    """Return 16 bytes that are the same for the same values in the same parts; reads one part at a time.

    >>> digest_of(np.arange(3)) == digest_of(jax.numpy.arange(3, dtype="int32"))
    False
    """
    digest = hashlib.blake2b(str(array.dtype).encode(), digest_size=16)
    for part in _parts_of(array):
        digest.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
    return digest.digest()


def on_host(array: jax.Array | np.ndarray) -> np.ndarray:
    """Return an array on the host; no copy of an array in parts stays there, as JAX would keep."""
    if isinstance(array, np.ndarray) or array.is_fully_replicated or not array.is_fully_addressable:
        return np.asarray(array)
    whole = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        whole[shard.index] = np.asarray(shard.data)
    return whole


def _parts_of(array: jax.Array | np.ndarray) -> Iterator[np.ndarray]:
    """Yield what the devices of an array hold, each part once; the whole of one on the host."""
    if isinstance(array, np.ndarray) or array.is_fully_replicated:
        yield np.asarray(array if isinstance(array, np.ndarray) else array.addressable_data(0))
        return
    seen = set()
    for shard in array.addressable_shards:
        place = tuple((at.start, at.stop) for at in shard.index)
        if place not in seen:
            seen.add(place)
            yield np.asarray(shard.data)


def _within(numbers: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """Yield numbers in groups, of which each fits into a message.

    >>> list(_within([3, 5, 6, 9], [_AT_MOST // 2, _AT_MOST // 2, 1, 2 * _AT_MOST]))
    [[3, 5], [6], [9]]
    """
    group: list[int] = []
    total = 0
    for number, size in zip(numbers, sizes, strict=True):
        if group and total + size > _AT_MOST:
            yield group
            group, total = [], 0
        group.append(number)
        total += size
    if group:
        yield group


def _bytes_of(arrays: Sequence[np.ndarray]) -> bytes:
    return b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)


def _arrays_from(data: bytes, like: Arrays) -> list[np.ndarray]:
    found, at = [], 0
    for array in like:
        found.append(np.frombuffer(data, array.dtype, array.size, at).reshape(array.shape))
        at += array.nbytes
    return found


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
