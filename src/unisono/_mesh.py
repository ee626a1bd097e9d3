"""The devices of a strategy as a mesh with one axis; the only caller of `jax.devices`.

Also creates virtual CPU devices, and a thread pool large enough for their collectives: XLA's CPU backend runs
programs and their dispatch in one pool of `PJRT_NPROC` threads, and hangs when all of these wait for each
other.

Tests: tests/unit/test_mesh.py.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from unisono._backend import devices_forced_by, reserve_threads, threads_of_xla
from unisono._features import load
from unisono._types import ArrayLike, PyTree

_LOG = logging.getLogger("unisono")

#: The name of the mesh axis along which replicas lie.
AXIS = "replica"

#: `/job:localhost/replica:0/task:0/device:GPU:0`, `/gpu:0`, `GPU:0`, `cpu:1`, …
_NAME = re.compile(r"^(?:/?job:\w+/)?(?:/?replica:\d+/)?(?:/?task:\d+/)?/?(?:device:)?([a-z]+):(\d+)$", re.I)

#: Users' names of platforms that JAX calls otherwise.
_PLATFORMS = {"cuda": "gpu", "rocm": "gpu"}

#: True if each process has one CPU device more than its replicas need: the last one, see `exchange_devices`.
_has_spare = False


@dataclasses.dataclass(frozen=True)
class ReplicaMesh:
    """The devices of a strategy, in replica order, as a JAX mesh with one axis.

    Args:
        devices: at least one, none twice.

    >>> ReplicaMesh(resolve_devices(["cpu:0", "cpu:1"])).num_replicas
    2
    """

    devices: tuple[jax.Device, ...]

    @property
    def devices_per_replica(self) -> int:
        """How many devices a replica has."""
        return 1

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The JAX mesh."""
        return Mesh(np.array(self.devices), (AXIS,))

    @property
    def num_replicas(self) -> int:
        """How many devices there are."""
        return len(self.devices)

    @property
    def platform(self) -> str:
        """`"cpu"`, `"gpu"` or `"tpu"`."""
        return str(self.devices[0].platform)

    @functools.cached_property
    def spans_processes(self) -> bool:
        """True if other processes have some of the devices."""
        return len({d.process_index for d in self.devices}) > 1

    @property
    def processes_per_replica(self) -> int:
        """How many processes have devices of a replica, each of which feeds it the same rows."""
        return 1

    @property
    def one_each(self) -> ReplicaMesh:
        """The devices as replicas of whole values, which processes compare."""
        return self

    @property
    def results(self) -> NamedSharding | None:
        """Where the results of a step of `fit` lie; None where every process can read them anyway."""
        return None

    @functools.cached_property
    def local_replicas(self) -> tuple[int, ...]:
        """The numbers of the replicas on this process' devices."""
        own = jax.process_index()
        return tuple(i for i, d in enumerate(self.devices) if d.process_index == own)

    @functools.cached_property
    def local_devices(self) -> tuple[jax.Device, ...]:
        """This process' devices among them, in replica order."""
        return tuple(self.devices[i] for i in self.local_replicas)

    def on_replicas(
        self, function: Callable[..., Any], in_specs: PyTree, out_specs: PyTree
    ) -> Callable[..., Any]:
        """Return a function that runs another one once per replica, in `jax.shard_map`."""
        # Other axes of the mesh are left to XLA, which divides a replica's arrays over its devices.
        specs: dict[str, Any] = {"in_specs": in_specs, "out_specs": out_specs}
        return jax.shard_map(function, mesh=self.mesh, axis_names={AXIS}, check_vma=False, **specs)

    def place_of(self, number: int) -> jax.Device | jax.sharding.Sharding:
        """Return the destination of `jax.device_put` for an array of one replica of this process."""
        return self.devices[number]

    @functools.cached_property
    def replicated(self) -> NamedSharding:
        """The same array on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @functools.cached_property
    def sharded(self) -> NamedSharding:
        """An array split along its first axis."""
        return NamedSharding(self.mesh, PartitionSpec(AXIS))

    @functools.cached_property
    def scanned(self) -> NamedSharding:
        """An array of several steps' batches, split along its second axis."""
        return NamedSharding(self.mesh, PartitionSpec(None, AXIS))

    def put(self, tree: PyTree, sharding: NamedSharding) -> PyTree:
        """Return host or local arrays as arrays on all the devices, without any communication.

        Args:
            tree: pytree of arrays; every process holds the same *global* arrays.
            sharding: one of this mesh.
        """
        if not self.spans_processes:
            if type(tree) is np.ndarray and tree.itemsize <= 4 and tree.dtype.kind in "fiub":
                return jax.make_array_from_callback(tree.shape, sharding, tree.__getitem__)  # 3 times as fast
            return jax.device_put(tree, sharding)
        # `device_put` would compare the values of all processes: a collective for every array.
        return jax.tree.map(lambda x: self._put_on_processes(x, sharding), tree)

    def _put_on_processes(self, value: object, sharding: NamedSharding) -> jax.Array:
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            if value.sharding.is_equivalent_to(sharding, value.ndim):
                return value
            return _resharded(sharding)(value)
        if sharding.is_fully_replicated and isinstance(value, jax.Array):
            copies = [jax.device_put(value, d) for d in self.local_devices]
            return jax.make_array_from_single_device_arrays(value.shape, sharding, copies)
        array = np.asarray(value)
        array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    def put_parts(self, parts: Sequence[jax.Array | np.ndarray]) -> Sequence[jax.Array | np.ndarray]:
        """Return the parts of a batch of unequal sizes, each on the device of its replica.

        On several processes they stay as they are: replicas of unequal size are traced in turn, and every
        device computes all of them.

        Args:
            parts: one array for each replica.
        """
        if self.spans_processes:
            return parts
        return [jax.device_put(part, self.place_of(i)) for i, part in enumerate(parts)]

    def put_own(self, value: np.generic) -> jax.Array:
        """Return an array with an element for each replica: what the replica's own process says.

        Args:
            value: a number; processes may give different ones.
        """
        return jax.make_array_from_callback(
            (self.num_replicas,), self.sharded, lambda index: np.full(1, value)
        )

    def local(self, array: jax.Array) -> jax.Array:
        """Return this process' copy of an array that is the same on all devices.

        Between steps every process holds arrays of its own: an operation on an array of all
        processes would wait for the others.

        Args:
            array: any; what is not such an array is returned as it is.
        """
        if not self.spans_processes or not isinstance(array, jax.Array) or array.is_fully_addressable:
            return array
        return array.addressable_data(0) if array.is_fully_replicated else array

    def copies(self, value: ArrayLike) -> tuple[ArrayLike, ...]:
        """Return the copy of an array that each of this process' replicas has, without a transfer."""
        on = {s.device: s.data for s in getattr(value, "addressable_shards", ())}
        return tuple(on.get(device, value) for device in self.local_devices)

    def local_each(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """Return `local` of each array; the list itself where all devices are of this process.

        Args:
            arrays: any.
        """
        return [self.local(x) for x in arrays] if self.spans_processes else arrays

    def lay_out(self, array: jax.Array, sharding: NamedSharding) -> jax.Array:
        """Fix, in a step that is traced, where a result lies, so that each process holds what it may read.

        Args:
            array: a traced result.
            sharding: one of this mesh.
        """
        return jax.lax.with_sharding_constraint(array, sharding) if self.spans_processes else array


@functools.cache
def _resharded(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """The identity, with its result laid out anew by all processes together."""
    return jax.jit(lambda x: x, out_shardings=sharding)


def on_device(value: ArrayLike) -> ArrayLike:
    """Copy an array from host memory to its device; return anything else unchanged.

    Args:
        value: the value of a variable, which may be traced.
    """
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return value
    if value.sharding.memory_kind != "pinned_host":
        return value
    return jax.device_put(value, value.sharding.with_memory_kind("device"))


def resolve_devices(
    devices: Sequence[str | jax.Device] | None, num: int | None = None
) -> tuple[jax.Device, ...]:
    """Return the devices of a list of names.

    Args:
        devices: names such as `"/gpu:0"`, `"GPU:1"`, `"cpu:0"`, or `jax.Device`s. None takes all
            accelerators, or all CPU devices where there are none.
        num: the number of devices to take, instead of names.

    Raises:
        DeviceError: when there is none, one is absent or named twice, or its name is malformed.
        InvalidArgumentError: when both `devices` and `num` are given.

    >>> len(resolve_devices(["cpu:0", "cpu:1"]))
    2
    """
    if devices and num is not None:
        raise load("mistake")("devices and number", devices, num)
    if devices is None:
        return _first(num)
    is_list = isinstance(devices, Sequence) and not isinstance(devices, str) and devices
    if not is_list or not all(isinstance(d, (str, jax.Device)) for d in devices):
        raise load("mistake")("devices", devices, list_devices())
    parsed = [_parse(d) if isinstance(d, str) else d for d in devices]
    wanted = [index for kind, index in (p for p in parsed if isinstance(p, tuple)) if kind == "cpu"]
    if wanted:
        make_cpu_devices(max(wanted) + 1)
    chosen = tuple(_find(*p) if isinstance(p, tuple) else p for p in parsed)
    for device in chosen:
        if chosen.count(device) > 1:
            raise load("mistake")("device twice", device, devices, list_devices())
    return chosen


def _first(num: int | None) -> tuple[jax.Device, ...]:
    make_cpu_devices(1)
    # Those of this process: only a multi-worker strategy computes on the devices of others.
    available = _of_replicas(jax.local_devices())
    if num is None:
        return available
    if not 1 <= num <= len(available):
        raise load("mistake")("number of GPUs", num, list_devices())
    return available[:num]


def _parse(name: str) -> tuple[str, int]:
    match = _NAME.match(name.strip())
    if match is None:
        raise load("mistake")("name of a device", name, list_devices())
    kind = match.group(1).lower()
    return _PLATFORMS.get(kind, kind), int(match.group(2))


def _find(kind: str, index: int) -> jax.Device:
    try:
        available = local_devices(kind)
    except RuntimeError:
        available = ()
    if index < len(available):
        return available[index]
    raise load("mistake")("no device", kind, index, list_devices())


def devices_of_all() -> tuple[jax.Device, ...]:
    """Return the devices of all processes, in the order of the processes."""
    make_cpu_devices(1)
    return _of_replicas(jax.devices())


def exchange_devices() -> tuple[jax.Device, ...]:
    """Return the CPU device of each process on which no replica may be; none where they were not made.

    XLA:CPU begins nothing on a device while a collective of that device runs. What is sent beside the steps
    needs another one.
    """
    if not _has_spare:
        return ()
    last = {d.process_index: d for d in jax.devices("cpu")}
    return tuple(last[process] for process in sorted(last))


def _of_replicas(devices: Sequence[jax.Device]) -> tuple[jax.Device, ...]:
    spare = exchange_devices()
    return tuple(d for d in devices if d not in spare)


def local_devices(platform: str) -> tuple[jax.Device, ...]:
    """Return this process's devices of one platform.

    Raises:
        RuntimeError: when JAX has none.
    """
    return _of_replicas(jax.local_devices(backend=platform))


def list_devices() -> str:
    """Return the names of this process' devices, for messages."""
    devices = local_devices("cpu")
    if jax.default_backend() != "cpu":
        devices = (*jax.local_devices(), *devices)
    names = [f"{d.platform}:{d.id}" for d in devices]
    return ", ".join(names)


def make_cpu_devices(count: int, with_spare: bool = False) -> None:
    """Create `count` virtual CPU devices and threads for their collectives, if JAX has not started.

    Args:
        with_spare: whether to create one more, see `exchange_devices`.
    """
    global _has_spare
    if jax_runs():
        return  # `_find` raises if a device is then absent
    known = max(int(_config("jax_num_cpu_devices")), devices_forced_by())
    wanted = max(count, known) + 1 if with_spare else count
    if wanted > max(1, known):
        jax.config.update("jax_num_cpu_devices", wanted)
    reserve_threads(max(wanted, known))
    _has_spare |= with_spare


def jax_runs() -> bool:
    """Return whether a backend has started."""
    # JAX has no public predicate that does not start one. But it refuses to change the number of CPU devices
    # then.
    number = _config("jax_num_cpu_devices")
    try:
        jax.config.update("jax_num_cpu_devices", max(number, 0) + 1)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", number)
    return False


def _config(name: str) -> int:
    """Return an option of JAX, which `jax.config` does not declare as an attribute."""
    option: int = getattr(jax.config, name)
    return option


def check_alike(devices: Sequence[jax.Device]) -> None:
    """Check that replicas can run one program; warn where one kind of device would wait for another.

    Raises:
        DeviceError: when the devices are of several platforms.
    """
    first = devices[0]
    for device in devices:
        if device.platform != first.platform:
            raise load("mistake")("platforms", first, device)
    kinds = collections.Counter(device.device_kind for device in devices)
    if len(kinds) > 1:
        _LOG.warning(
            "The replicas are on devices of several kinds (%s), which get equal parts of a batch: in each "
            "step the faster ones wait for the others. Choose with `devices` or CUDA_VISIBLE_DEVICES.",
            ", ".join(f"{count} x {kind}" for kind, count in kinds.items()),
        )


def ensure_collectives_can_run(devices: Sequence[jax.Device]) -> None:
    """Check that collectives between CPU devices of one process cannot hang.

    Raises:
        BackendError: when several CPU devices share a thread pool that is too small. XLA aborts
            the process 40 seconds after such a hang.
    """
    count = sum(d.process_index == devices[0].process_index for d in devices)
    if count == 1 or devices[0].platform != "cpu" or threads_of_xla() >= 2 * count:
        return
    raise load("mistake")("threads", count, threads_of_xla())
