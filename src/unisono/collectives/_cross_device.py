"""Ways to all-reduce between devices, as users choose them: `cross_device_ops`."""

from __future__ import annotations

import dataclasses
import enum
import functools
import logging
import numbers
from typing import Any

import jax

from unisono._errors import InvalidArgumentError
from unisono._values import ReduceOp
from unisono.collectives._reduce import all_reduce

_LOG = logging.getLogger("unisono")

#: Arrays of fewer bytes share one bucket by default. Measured on two CPU devices: an all-reduce
#: of six arrays of 0.9 MB in all takes 0.44 ms so, 0.60 ms one by one and 1.7 ms in one bucket.
SMALL = 160 * 1024

#: A bucket between workers is closed when it holds so many bytes.
BYTES_PER_PACK = 32 * 1024 * 1024


class CrossDeviceOps:
    """How a strategy all-reduces: XLA's own algorithm, small arrays together.

    Subclass it and override `reduce` for another way.
    """

    def reduce(self, reduce_op: ReduceOp, tree: Any, *, axis_name: str, axis_size: int) -> Any:
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

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


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

    def reduce(self, reduce_op: ReduceOp, tree: Any, *, axis_name: str, axis_size: int) -> Any:
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

    def reduce(self, reduce_op: ReduceOp, tree: Any, *, axis_name: str, axis_size: int) -> Any:
        """Combine `tree` by XLA's all-reduce."""
        if jax.default_backend() != "gpu":
            _say_no_nccl(jax.default_backend(), "XLA's all-reduce is used")
        return super().reduce(reduce_op, tree, axis_name=axis_name, axis_size=axis_size)


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

    def reduce(self, reduce_op: ReduceOp, tree: Any, *, axis_name: str, axis_size: int) -> Any:
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
