"""The all-reduce algorithms that users choose with `cross_device_ops`.

Tests: tests/virtual/collectives/test_reduce.py, tests/unit/collectives/test_options.py.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from unisono._checks import is_number, whole_number
from unisono._errors import InvalidArgumentError
from unisono._types import ArrayLike, Tree, UserValue
from unisono._values import Mirrored, PerReplica, ReduceOp
from unisono.collectives._reduce import all_gather, all_reduce

if TYPE_CHECKING:
    from unisono._mesh import ReplicaMesh
    from unisono._system._literals import ImplementationName, ReduceOpName
    from unisono.collectives._process_group import ProcessGroup
    from unisono.step._layout import StateLayout

_LOG = logging.getLogger("unisono")

#: A variable, a per-replica value or a device: only a user's hook reads it.
Destinations: TypeAlias = UserValue

#: Arrays of fewer bytes share one bucket by default. Measured on two CPU devices: an all-reduce of six arrays
#: of 0.9 MB in all takes 0.44 ms with this rule, 0.60 ms one by one and 1.7 ms in one bucket.
SMALL = 160 * 1024

#: The size at which a bucket between workers on CPUs is closed, in bytes. Gloo runs one ring per array, of
#: about 1.5 ms on loopback: 160 arrays of 64 KiB take 131 ms one by one and 17 ms in one bucket.
BYTES_PER_PACK = 32 * 1024 * 1024


class CrossDeviceOps:
    """How a strategy all-reduces: by XLA's own algorithm, with small arrays in one bucket.

    Subclass it for another algorithm: override `all_reduce`, which runs inside the compiled step, or
    tf.distribute's `reduce_implementation` or `batch_reduce_implementation`, which receive the values of
    all replicas. Gradients and `ReplicaContext.all_reduce` then use them, and `strategy.reduce` uses the
    latter two.

    >>> import unisono
    >>> class Halved(CrossDeviceOps):
    ...     def all_reduce(self, reduce_op, tree, *, axis_name, axis_size):
    ...         half = jax.tree.map(lambda x: x / 2, tree)
    ...         return super().all_reduce(reduce_op, half, axis_name=axis_name, axis_size=axis_size)
    >>> strategy = unisono.MirroredStrategy(["cpu:0", "cpu:1"], Halved())
    >>> sums = strategy.run(lambda: unisono.get_replica_context().all_reduce("sum", jnp.ones(())))
    >>> [float(x) for x in sums.values]
    [1.0, 1.0]
    """

    _algorithm = "xla"

    def all_reduce(self, reduce_op: ReduceOp, tree: Tree, *, axis_name: str, axis_size: int) -> Tree:
        """Combine `tree` over the devices of a mesh axis; called inside `jax.shard_map`.

        Args:
            reduce_op: sum or mean.
            tree: pytree of arrays.
            axis_name: the mesh axis.
            axis_size: its size.

        Returns:
            The combined pytree, on every device.
        """
        packing, algorithm = self._packing(), self._algorithm
        return all_reduce(
            tree, reduce_op, axis_name=axis_name, axis_size=axis_size, algorithm=algorithm, **packing
        )

    def _packing(self) -> Mapping[str, int]:
        """Return the rule by which arrays share a bucket; see `collectives._packing.plan`."""
        return {"smaller_than": SMALL}

    def _over(self, own: CrossDeviceOps) -> CrossDeviceOps:
        """Return what a strategy reduces with that was given this: here nothing else.

        Args:
            own: the strategy's own, for what this does not reduce itself.
        """
        return self

    def _layout(self, layout: StateLayout, mesh: ReplicaMesh, group: ProcessGroup) -> StateLayout:
        """Return the state layout of a strategy that reduces so: here the one that it has otherwise.

        Args:
            layout: that which the strategy's `state_layout` names.
            mesh: the devices that compute.
            group: the processes that train together.
        """
        return layout

    @property
    def _has_implementation(self) -> bool:
        """True if a subclass overrides one of tf.distribute's hooks for reducing."""
        names = ("reduce_implementation", "batch_reduce_implementation")
        return any(getattr(type(self), name) is not getattr(CrossDeviceOps, name) for name in names)

    def reduce(
        self,
        reduce_op: ReduceOp | ReduceOpName,
        per_replica_value: PerReplica | ArrayLike,
        destinations: Destinations = None,
        options: CommunicationOptions | None = None,
    ) -> jax.Array:
        """Combine a per-replica value outside of a step.

        Args:
            reduce_op: sum or mean.
            per_replica_value: a `PerReplica`; any other value counts as one replica's.
            destinations: a variable, a value or a device. Passed to the hook; the result can be used
                on all devices.
            options: passed to the hook.

        Returns:
            The combined array.

        Raises:
            InvalidArgumentError: for an unknown operation, or a list of destinations.
        """
        check_destinations(destinations)
        op, value = ReduceOp.parse(reduce_op), _as_per_replica(per_replica_value)
        return _unwrap(self.reduce_implementation(op, value, destinations, options))

    def batch_reduce(
        self,
        reduce_op: ReduceOp | ReduceOpName,
        value_destination_pairs: Sequence[tuple[PerReplica | ArrayLike, Destinations]],
        options: CommunicationOptions | None = None,
    ) -> list[jax.Array]:
        """Combine several per-replica values; see `reduce`."""
        pairs = []
        for value, destinations in value_destination_pairs:
            check_destinations(destinations)
            pairs.append((_as_per_replica(value), destinations))
        return [
            _unwrap(x) for x in self.batch_reduce_implementation(ReduceOp.parse(reduce_op), pairs, options)
        ]

    def broadcast(self, tensor: ArrayLike, destinations: Destinations = None) -> Mirrored[jax.Array]:
        """Return a value as `Mirrored`, for all replicas.

        Args:
            tensor: array or number.
            destinations: as for `reduce`.
        """
        check_destinations(destinations)
        return self.broadcast_implementation(tensor, destinations)

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Destinations,
        options: CommunicationOptions | None,
    ) -> Mirrored[jax.Array] | jax.Array:
        """Hook: combine the values of all replicas; may be traced.

        Args:
            reduce_op: sum or mean.
            per_replica_value: its `values` are the replicas' arrays.
            destinations: the caller's destinations.
            options: the caller's options.
        """
        return _combine(reduce_op, per_replica_value)

    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, Destinations]],
        options: CommunicationOptions | None,
    ) -> Sequence[Mirrored[jax.Array] | jax.Array]:
        """Hook: combine several values, by default one by one with `reduce_implementation`."""
        return [
            self.reduce_implementation(reduce_op, value, destinations, options)
            for value, destinations in value_destination_pairs
        ]

    def broadcast_implementation(self, tensor: ArrayLike, destinations: Destinations) -> Mirrored[jax.Array]:
        """Hook: return a value as `Mirrored`."""
        return Mirrored(jnp.asarray(tensor))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def reduce_in_step(
    ops: CrossDeviceOps, reduce_op: ReduceOp, tree: Tree, *, axis_name: str, axis_size: int
) -> Tree:
    """Combine `tree` inside a compiled step, with a subclass' hook where it has one."""
    if not ops._has_implementation:
        return ops.all_reduce(reduce_op, tree, axis_name=axis_name, axis_size=axis_size)
    leaves, structure = jax.tree.flatten(tree)
    # A hook combines values itself, so it must see all replicas' values.
    every = [
        all_gather(jnp.asarray(leaf)[None], 0, axis_name=axis_name, axis_size=axis_size) for leaf in leaves
    ]
    reduced: Tree = jax.tree.unflatten(
        structure, ops.batch_reduce(reduce_op, [(PerReplica.from_stacked(x), None) for x in every])
    )
    return reduced


def check_destinations(destinations: Destinations) -> None:
    """Reject a list of destinations, as tf.distribute does."""
    # TensorFlow raises an AssertionError here.
    if isinstance(destinations, list):
        raise InvalidArgumentError(
            "`destinations` must be a variable, a per-replica value or a device. "
            f"Received: {destinations!r}. Pass one of them, not a list."
        )


def _as_per_replica(value: PerReplica | ArrayLike) -> PerReplica:
    """Return a value as a `PerReplica` on one device, where a hook can combine the replicas' values."""
    if not isinstance(value, PerReplica):
        return PerReplica((value,))
    stacked = value.stacked
    if stacked is None:
        first = next((v for v in value.values if isinstance(v, jax.Array)), None)
        if first is None or isinstance(first, jax.core.Tracer):
            return value
        # On one device: JAX combines no arrays that lie on different devices.
        return PerReplica(jax.device_put(v, first.sharding) for v in value.values)
    if isinstance(stacked, jax.core.Tracer) or not isinstance(stacked, jax.Array):
        return value
    if not isinstance(stacked.sharding, NamedSharding):
        return value
    # Compiled, because an array of several processes is not fully addressable: all of them must call this
    # then.
    everywhere = NamedSharding(stacked.sharding.mesh, PartitionSpec())
    placed = jax.jit(lambda x: x, out_shardings=everywhere)(stacked)
    # All devices have the same: the copy of one is enough.
    return PerReplica.from_stacked(placed.addressable_data(0))


def _unwrap(value: Mirrored[jax.Array] | jax.Array) -> jax.Array:
    return value.value if isinstance(value, Mirrored) else value


def _combine(op: ReduceOp, value: PerReplica) -> jax.Array:
    stacked = value.stacked
    if stacked is None:
        total = jnp.asarray(sum(jnp.asarray(v) for v in value.values))
        return total if op is ReduceOp.SUM else total / value.num_replicas
    return jnp.sum(stacked, axis=0) if op is ReduceOp.SUM else jnp.mean(stacked, axis=0)


class _PackingOps(CrossDeviceOps):
    """An all-reduce algorithm on a fixed number of buckets."""

    def __init__(self, num_packs: int = 1) -> None:
        if whole_number(num_packs, 0) is None:
            raise InvalidArgumentError(
                "`num_packs` must be 0 (every array alone) or more. "
                f"Received: num_packs={num_packs!r}. Write `{type(self).__name__}(num_packs=1)`."
            )
        self.num_packs = int(num_packs)

    def _packing(self) -> Mapping[str, int]:
        return {"num_packs": self.num_packs}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_packs={self.num_packs})"


def own_ops(platform: str) -> CrossDeviceOps:
    """Return XLA's all-reduce, with arrays packed where that is faster on a platform.

    XLA's compilers for GPUs and TPUs combine all-reduces as their network takes them best, without a copy,
    and start the first ones while other gradients are computed. On CPUs each array is sent by itself.

    >>> own_ops("cpu"), own_ops("gpu")._packing()
    (CrossDeviceOps(), {'num_packs': 0})
    """
    return CrossDeviceOps() if platform == "cpu" else _PackingOps(num_packs=0)


class NcclAllReduce(_PackingOps):
    """XLA's all-reduce, which is NCCL's on GPUs.

    Args:
        num_packs: the number of buckets into which arrays are packed; 0 for none.

    >>> import unisono
    >>> strategy = unisono.MirroredStrategy(["cpu:0", "cpu:1"], NcclAllReduce())
    """

    def all_reduce(self, reduce_op: ReduceOp, tree: Tree, *, axis_name: str, axis_size: int) -> Tree:
        """Combine `tree` with XLA's all-reduce."""
        if jax.default_backend() != "gpu":
            _warn_without_nccl(jax.default_backend(), "XLA's all-reduce is used")
        return super().all_reduce(reduce_op, tree, axis_name=axis_name, axis_size=axis_size)


# Cached: one warning, although each trace gets here.
@functools.cache
def _warn_without_nccl(platform: str, instead: str) -> None:
    _LOG.warning("NCCL needs GPUs, but the devices are of the platform %r: %s instead.", platform, instead)


class HierarchicalCopyAllReduce(_PackingOps):
    """All-reduce up and down a binary tree of devices.

    Args:
        num_packs: the number of buckets into which arrays are packed; 0 for none.

    >>> import unisono
    >>> strategy = unisono.MirroredStrategy(["cpu:0", "cpu:1"], HierarchicalCopyAllReduce(num_packs=2))
    """

    _algorithm = "hierarchical"


class RingAllReduce(_PackingOps):
    """Reduce-scatter and all-gather around a ring of devices.

    Args:
        num_packs: the number of buckets into which arrays are packed; 0 for none.

    >>> import unisono
    >>> strategy = unisono.MirroredStrategy(["cpu:0", "cpu:1"], RingAllReduce())
    """

    _algorithm = "ring"


class ReductionToOneDevice(_PackingOps):
    """Send all values to one device, sum them there, and send the result back.

    Args:
        reduce_to_device: accepted for tf.distribute's signature; the sum is computed on the first device.
        accumulation_fn: accepted for tf.distribute's signature; must be None.

    Raises:
        InvalidArgumentError: for an `accumulation_fn`, because the sum is part of the compiled program.

    >>> import unisono
    >>> strategy = unisono.MirroredStrategy(["cpu:0", "cpu:1"], ReductionToOneDevice())
    """

    _algorithm = "one_device"

    def __init__(self, reduce_to_device: object = None, accumulation_fn: None = None) -> None:
        super().__init__(num_packs=1)
        if accumulation_fn is not None:
            raise InvalidArgumentError(
                "`accumulation_fn` must be None: values are summed inside the compiled step. Received: "
                f"accumulation_fn={accumulation_fn!r}. Leave it out, or subclass `unisono.CrossDeviceOps`."
            )
        self.reduce_to_device = reduce_to_device


class CommunicationImplementation(enum.Enum):
    """The all-reduce algorithm between workers.

    `AUTO`: on CPUs of one host recursive doubling and halving, and of several hosts Gloo's ring; XLA's own
        all-reduce, which is NCCL's on GPUs, on other devices.
    `RING`: a ring, on any device. `NCCL`: the same as `AUTO`, with a warning where there is no GPU.

    >>> CommunicationImplementation("RING").name
    'RING'
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """Options of the collectives between workers.

    Args:
        bytes_per_pack: the size of a bucket of arrays, in bytes; 0 lets Unisono choose.
        timeout_seconds: the longest time of a collective; None for no limit.
        implementation: a `CommunicationImplementation` or its name.
        interface: over which the workers connect: the name of a network interface (`"eth0"`), a network
            (`"10.0.0.0/24"`) or an IP address of this host. None reads UNISONO_INTERFACE, or else takes this
            task's address in the cluster, or the one from which the host reaches the first worker. Between
            GPUs NCCL chooses: see its NCCL_SOCKET_IFNAME.

    Raises:
        InvalidArgumentError: for a size that is negative or not an integer, a limit that is not
            positive, or an unknown name.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | ImplementationName = CommunicationImplementation.AUTO
    interface: str | None = None

    def merge(self, options: CommunicationOptions) -> CommunicationOptions:
        """Return these options, overridden by the values of `options` that are not the default.

        Args:
            options: the options that take precedence.

        >>> merged = CommunicationOptions(bytes_per_pack=1).merge(CommunicationOptions(timeout_seconds=2.0))
        >>> merged.bytes_per_pack, merged.timeout_seconds
        (1, 2.0)
        """
        plain = CommunicationOptions()
        # As in TensorFlow's `merge`: what differs from the default was meant.
        changed = {
            f.name: getattr(options, f.name)
            for f in dataclasses.fields(self)
            if getattr(options, f.name) != getattr(plain, f.name)
        }
        return dataclasses.replace(self, **changed)

    def __post_init__(self) -> None:
        if whole_number(self.bytes_per_pack, 0) is None:
            raise InvalidArgumentError(
                "`bytes_per_pack` must be an integer, 0 or more. "
                f"Received: bytes_per_pack={self.bytes_per_pack!r}. Write "
                "`CommunicationOptions(bytes_per_pack=50 * 1024 * 1024)`, or 0 to let Unisono choose."
            )
        limit = self.timeout_seconds
        if limit is not None and not (is_number(limit) and limit > 0):
            raise InvalidArgumentError(
                "`timeout_seconds` must be a positive number, or None for no limit. "
                f"Received: timeout_seconds={limit!r}. Write `CommunicationOptions(timeout_seconds=120.0)`."
            )
        if self.interface is not None and not (isinstance(self.interface, str) and self.interface.strip()):
            raise InvalidArgumentError(
                "`interface` must be the name of a network interface, a network or an IP address, or None. "
                f"Received: interface={self.interface!r}. Write `CommunicationOptions(interface='eth0')`."
            )
        if not isinstance(self.implementation, CommunicationImplementation):
            name = str(self.implementation).upper()
            if name not in CommunicationImplementation.__members__:
                raise InvalidArgumentError(
                    f"`implementation` must be one of {list(CommunicationImplementation.__members__)}. "
                    f"Received: implementation={self.implementation!r}. Write "
                    "`CommunicationOptions(implementation='AUTO')`."
                )
            # The dataclass is frozen; from here on the field is never a name.
            object.__setattr__(self, "implementation", CommunicationImplementation[name])


class PackedAllReduce(CrossDeviceOps):
    """The all-reduce of several workers: few large buckets, because each costs a round between all workers.

    Where XLA's compiler combines all-reduces itself (see `own_ops`), arrays are packed if the user asks for
    it.

    >>> PackedAllReduce(CommunicationOptions(), "gpu", on_one_host=True)
    PackedAllReduce(bytes_per_pack=0)
    """

    def __init__(self, options: CommunicationOptions, platform: str, on_one_host: bool) -> None:
        self._algorithm = _algorithm_of(options.implementation, platform, on_one_host)
        packs = platform == "cpu" or self._algorithm != "xla"
        self._bytes_per_pack = options.bytes_per_pack or (BYTES_PER_PACK if packs else 0)

    def _packing(self) -> Mapping[str, int]:
        return {"bytes_per_pack": self._bytes_per_pack}

    def __repr__(self) -> str:
        return f"PackedAllReduce(bytes_per_pack={self._bytes_per_pack})"


def _algorithm_of(
    implementation: CommunicationImplementation | ImplementationName, platform: str, on_one_host: bool
) -> str:
    """Return the key in `ALGORITHMS` of an implementation on a platform.

    >>> _algorithm_of(CommunicationImplementation.AUTO, "cpu", True), _algorithm_of("RING", "gpu", True)
    ('exchange', 'ring')
    """
    chosen = CommunicationImplementation(implementation)
    if chosen is CommunicationImplementation.RING:
        return "ring"
    # NCCL knows the machine's links. Within a host Gloo's all-reduce takes twice the time of an exchange, and
    # half of it over a slow link, see `_reduce`.
    if platform != "cpu":
        return "xla"
    if chosen is CommunicationImplementation.NCCL:
        _warn_without_nccl(platform, "Gloo is used")
    return "exchange" if on_one_host else "across_hosts"
