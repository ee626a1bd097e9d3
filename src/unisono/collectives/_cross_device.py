"""Ways to all-reduce between devices, as users choose them: `cross_device_ops`."""

from __future__ import annotations

import dataclasses
import enum
import functools
import logging
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from unisono._errors import InvalidArgumentError
from unisono._values import Mirrored, PerReplica, ReduceOp
from unisono.collectives._reduce import all_gather, all_reduce

_LOG = logging.getLogger("unisono")

#: Arrays of fewer bytes share one bucket by default. Measured on two CPU devices: an all-reduce
#: of six arrays of 0.9 MB in all takes 0.44 ms so, 0.60 ms one by one and 1.7 ms in one bucket.
SMALL = 160 * 1024

#: A bucket between workers is closed when it holds so many bytes.
BYTES_PER_PACK = 32 * 1024 * 1024


class CrossDeviceOps:
    """How a strategy all-reduces: XLA's own algorithm, small arrays together.

    Subclass it for another way: override `all_reduce`, which runs inside the compiled step, or
    tf.distribute's `reduce_implementation` or `batch_reduce_implementation`, which see the values of all
    replicas. Gradients, `strategy.reduce` and `ReplicaContext.all_reduce` then use these.
    """

    def all_reduce(self, reduce_op: ReduceOp, tree: Any, *, axis_name: str, axis_size: int) -> Any:
        """Combine `tree` over the devices of a mesh axis; called inside `jax.shard_map`.

        Args:
            reduce_op: sum or mean.
            tree: pytree of arrays.
            axis_name: the mesh axis.
            axis_size: its size.

        Returns:
            The combined pytree, on every device.
        """
        return all_reduce(tree, reduce_op, axis_name=axis_name, axis_size=axis_size, smaller_than=SMALL)

    @property
    def has_implementation(self) -> bool:
        """Whether a subclass brings one of tf.distribute's hooks for reducing."""
        names = ("reduce_implementation", "batch_reduce_implementation")
        return any(getattr(type(self), name) is not getattr(CrossDeviceOps, name) for name in names)

    def reduce(
        self, reduce_op: ReduceOp | str, per_replica_value: Any, destinations: Any = None, options: Any = None
    ) -> Any:
        """Combine a per-replica value outside of a step.

        Args:
            reduce_op: sum or mean.
            per_replica_value: a `PerReplica`; another value counts as that of one replica.
            destinations: a variable, a value or a device; the result can be used on all of them.
            options: `CommunicationOptions`, handed to the hook.

        Returns:
            The combined array.

        Raises:
            InvalidArgumentError: for an unknown operation, or a list of destinations.
        """
        check_destinations(destinations)
        op, value = ReduceOp.parse(reduce_op), _as_per_replica(per_replica_value)
        return _bare(self.reduce_implementation(op, value, destinations, options))

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: Any = None,
    ) -> list[Any]:
        """Combine several per-replica values; see `reduce`."""
        pairs = []
        for value, destinations in value_destination_pairs:
            check_destinations(destinations)
            pairs.append((_as_per_replica(value), destinations))
        return [_bare(x) for x in self.batch_reduce_implementation(ReduceOp.parse(reduce_op), pairs, options)]

    def broadcast(self, tensor: Any, destinations: Any = None) -> Any:
        """Return a value for all replicas, as `Mirrored`.

        Args:
            tensor: array or number.
            destinations: as for `reduce`.
        """
        check_destinations(destinations)
        return self.broadcast_implementation(tensor, destinations)

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: PerReplica, destinations: Any, options: Any
    ) -> Any:
        """Hook: combine the values of all replicas; may be traced.

        Args:
            reduce_op: sum or mean.
            per_replica_value: whose `values` are the replicas' arrays.
            destinations: what the caller gave.
            options: likewise.
        """
        return _combined(reduce_op, per_replica_value)

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Sequence[tuple[PerReplica, Any]], options: Any
    ) -> Sequence[Any]:
        """Hook: combine several values, by `reduce_implementation` one by one."""
        return [
            self.reduce_implementation(reduce_op, value, destinations, options)
            for value, destinations in value_destination_pairs
        ]

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Hook: make a value one of all replicas."""
        return Mirrored(jnp.asarray(tensor))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


def reduce_in_step(
    ops: CrossDeviceOps, reduce_op: ReduceOp, tree: Any, *, axis_name: str, axis_size: int
) -> Any:
    """Combine `tree` inside a compiled step, by a subclass' hook where there is one.

    Args:
        ops: how.
        reduce_op: sum or mean.
        tree: pytree of arrays.
        axis_name: the mesh axis.
        axis_size: its size.
    """
    if not ops.has_implementation:
        return ops.all_reduce(reduce_op, tree, axis_name=axis_name, axis_size=axis_size)
    leaves, structure = jax.tree.flatten(tree)
    every = [
        all_gather(jnp.asarray(leaf)[None], 0, axis_name=axis_name, axis_size=axis_size) for leaf in leaves
    ]
    return jax.tree.unflatten(
        structure, ops.batch_reduce(reduce_op, [(PerReplica.from_stacked(x), None) for x in every])
    )


def check_destinations(destinations: Any) -> None:
    """Raise for a list of destinations, which tf.distribute does not take.

    Raises:
        InvalidArgumentError: for a list.
    """
    if isinstance(destinations, list):
        raise InvalidArgumentError(
            "`destinations` must be a variable, a per-replica value or a device. "
            f"Received: {destinations!r}. Pass one of them, not a list."
        )


def _as_per_replica(value: Any) -> PerReplica:
    """A value as one for each replica, all on one device: a hook computes with several of them."""
    if not isinstance(value, PerReplica):
        return PerReplica((value,))
    stacked = value.stacked
    if stacked is None:
        first = next((v for v in value.values if isinstance(v, jax.Array)), None)
        if first is None or isinstance(first, jax.core.Tracer):
            return value
        return PerReplica(jax.device_put(v, first.sharding) for v in value.values)
    if isinstance(stacked, jax.core.Tracer) or not isinstance(stacked, jax.Array):
        return value
    if not isinstance(stacked.sharding, NamedSharding):
        return value
    # Also for an array of several processes, which all must take part then.
    everywhere = NamedSharding(stacked.sharding.mesh, PartitionSpec())
    placed = jax.jit(lambda x: x, out_shardings=everywhere)(stacked)
    return PerReplica.from_stacked(placed.addressable_data(0))


def _bare(value: Any) -> Any:
    return value.value if isinstance(value, Mirrored) else value


def _combined(op: ReduceOp, value: PerReplica) -> Any:
    stacked = value.stacked
    if stacked is None:
        total = sum(jnp.asarray(v) for v in value.values)
        return total if op is ReduceOp.SUM else total / value.num_replicas
    return jnp.sum(stacked, axis=0) if op is ReduceOp.SUM else jnp.mean(stacked, axis=0)


def _is_count(value: Any) -> bool:
    # Python's bool is an int; numpy's integers are not, but are Integral.
    return type(value) is not bool and isinstance(value, numbers.Integral) and int(value) >= 0


class _Packed(CrossDeviceOps):
    """An algorithm on a number of flat buckets."""

    algorithm = "xla"

    def __init__(self, num_packs: int = 1) -> None:
        if not _is_count(num_packs):
            raise InvalidArgumentError(
                "`num_packs` must be 0 (every array alone) or more. "
                f"Received: num_packs={num_packs!r}. Write `{type(self).__name__}(num_packs=1)`."
            )
        self.num_packs = int(num_packs)

    def all_reduce(self, reduce_op: ReduceOp, tree: Any, *, axis_name: str, axis_size: int) -> Any:
        """Combine `tree` by the algorithm of the class."""
        return all_reduce(
            tree,
            reduce_op,
            axis_name=axis_name,
            axis_size=axis_size,
            algorithm=self.algorithm,
            num_packs=self.num_packs,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_packs={self.num_packs})"


class NcclAllReduce(_Packed):
    """NCCL's all-reduce, which is XLA's own on GPUs; elsewhere XLA's for that device.

    Args:
        num_packs: into how many buckets the arrays are packed; 0 for none.
    """

    def all_reduce(self, reduce_op: ReduceOp, tree: Any, *, axis_name: str, axis_size: int) -> Any:
        """Combine `tree` by XLA's all-reduce."""
        if jax.default_backend() != "gpu":
            _say_no_nccl(jax.default_backend(), "XLA's all-reduce is used")
        return super().all_reduce(reduce_op, tree, axis_name=axis_name, axis_size=axis_size)


@functools.cache
def _say_no_nccl(platform: str, instead: str) -> None:
    _LOG.warning("NCCL is for GPUs, and these are devices of the kind %r: %s instead.", platform, instead)


class HierarchicalCopyAllReduce(_Packed):
    """Sums climb a binary tree of devices and are copied back down.

    Args:
        num_packs: into how many buckets the arrays are packed; 0 for none.
    """

    algorithm = "hierarchical"


class RingAllReduce(_Packed):
    """Reduce-scatter and all-gather around a ring.

    Args:
        num_packs: into how many buckets the arrays are packed; 0 for none.
    """

    algorithm = "ring"


class ReductionToOneDevice(_Packed):
    """All values travel to one device, are summed there, and are sent back.

    Args:
        reduce_to_device: accepted for tf.distribute's signature; the first device sums.
        accumulation_fn: accepted for tf.distribute's signature; must be None.

    Raises:
        InvalidArgumentError: for an `accumulation_fn`: the sum is part of the compiled program.
    """

    algorithm = "one_device"

    def __init__(self, reduce_to_device: Any = None, accumulation_fn: Any = None) -> None:
        super().__init__(num_packs=1)
        if accumulation_fn is not None:
            raise InvalidArgumentError(
                "Values are added up inside the compiled step. Received: accumulation_fn="
                f"{accumulation_fn!r}. Leave it out, or subclass `unisono.CrossDeviceOps`."
            )
        self.reduce_to_device = reduce_to_device


class CommunicationImplementation(enum.Enum):
    """How sums travel between workers.

    `AUTO`: on CPUs partners exchange packed values, on other devices XLA's own all-reduce, which is NCCL on
    GPUs. `RING`: around a ring, on any device. `NCCL`: as `AUTO`, with a log line where no GPU is.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """How collectives travel.

    Args:
        bytes_per_pack: arrays are packed into buckets of so many bytes; 0 chooses.
        timeout_seconds: how long a collective may take; None for no limit.
        implementation: a `CommunicationImplementation` or its name.

    Raises:
        InvalidArgumentError: for a size that is no integer or negative, a limit that is not
            positive, an unknown name.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO

    def merge(self, options: CommunicationOptions) -> CommunicationOptions:
        """Return these options with those of `options` that are not the default.

        Args:
            options: they win.

        >>> merged = CommunicationOptions(bytes_per_pack=1).merge(CommunicationOptions(timeout_seconds=2.0))
        >>> merged.bytes_per_pack, merged.timeout_seconds
        (1, 2.0)
        """
        plain = CommunicationOptions()
        changed = {
            f.name: getattr(options, f.name)
            for f in dataclasses.fields(self)
            if getattr(options, f.name) != getattr(plain, f.name)
        }
        return dataclasses.replace(self, **changed)

    def __post_init__(self) -> None:
        if not _is_count(self.bytes_per_pack):
            raise InvalidArgumentError(
                "`bytes_per_pack` must be an integer, 0 or more. "
                f"Received: bytes_per_pack={self.bytes_per_pack!r}. Write "
                "`CommunicationOptions(bytes_per_pack=50 * 1024 * 1024)`, or 0 to let Unisono choose."
            )
        limit: Any = self.timeout_seconds
        if limit is not None and not (isinstance(limit, (int, float)) and limit > 0):
            raise InvalidArgumentError(
                "`timeout_seconds` must be a positive number, or None for no limit. "
                f"Received: timeout_seconds={limit!r}. Write `CommunicationOptions(timeout_seconds=120.0)`."
            )
        if not isinstance(self.implementation, CommunicationImplementation):
            name = str(self.implementation).upper()
            if name not in CommunicationImplementation.__members__:
                raise InvalidArgumentError(
                    f"`implementation` must be one of {list(CommunicationImplementation.__members__)}. "
                    f"Received: implementation={self.implementation!r}. Write "
                    "`CommunicationOptions(implementation='AUTO')`."
                )
            object.__setattr__(self, "implementation", CommunicationImplementation[name])


class PackedAllReduce(CrossDeviceOps):
    """For several workers: few large buckets, because each array costs a round through all of them.

    Args:
        options: how large a bucket is, and how it travels.
        platform: of the devices, such as `"cpu"`.

    >>> PackedAllReduce(CommunicationOptions(), "gpu").algorithm
    'xla'
    """

    def __init__(self, options: CommunicationOptions, platform: str) -> None:
        self._bytes_per_pack = options.bytes_per_pack or BYTES_PER_PACK
        self.algorithm = _algorithm_of(options.implementation, platform)

    def all_reduce(self, reduce_op: ReduceOp, tree: Any, *, axis_name: str, axis_size: int) -> Any:
        """Combine `tree` in buckets; the replicas of a worker first, where it has several."""
        return all_reduce(
            tree,
            reduce_op,
            axis_name=axis_name,
            axis_size=axis_size,
            algorithm=self.algorithm,
            bytes_per_pack=self._bytes_per_pack,
        )

    def __repr__(self) -> str:
        return f"PackedAllReduce(bytes_per_pack={self._bytes_per_pack})"


def _algorithm_of(implementation: CommunicationImplementation | str, platform: str) -> str:
    """How sums are made between workers.

    >>> _algorithm_of(CommunicationImplementation.AUTO, "cpu"), _algorithm_of("RING", "gpu")
    ('exchange', 'ring')
    """
    chosen = CommunicationImplementation(implementation)
    if chosen is CommunicationImplementation.RING:
        return "ring"
    # Gloo's all-reduce takes twice the time of an exchange; NCCL's knows the machine's links.
    if platform != "cpu":
        return "xla"
    if chosen is CommunicationImplementation.NCCL:
        _say_no_nccl(platform, "partners exchange their sums")
    return "exchange"
