"""`CompressedAllReduce`: gradients travel between the replicas in fewer bytes.

What an optimizer adds for it, and how a step uses it, is in `step/variables/_compressed_layout`.

Tests: tests/virtual/collectives/test_compression.py, tests/virtual/strategies/test_compressed_gradients.py.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence

import jax

from unisono._checks import is_number, whole_number
from unisono._errors import InvalidArgumentError
from unisono._types import Tree
from unisono._values import ReduceOp
from unisono.collectives._compression import (
    BlockCodec,
    Codec,
    HalfCodec,
    encoded_sums,
    largest_sums,
    low_rank_sums,
)
from unisono.collectives._cross_device import CrossDeviceOps

#: The kinds, each with the argument that belongs to it, and its value where a user gives none.
_KINDS: dict[str, dict[str, float]] = {
    "bfloat16": {},
    "float16": {},
    "int8": {"block": 256},
    "power_sgd": {"rank": 4},
    "top_k": {"k": 0.01},
}


@dataclasses.dataclass(frozen=True)
class Compression:
    """What is done with the gradients of a step.

    Args:
        setting: the value of the kind's own argument; 0 where it has none.
        exact_below: gradients of fewer bytes are summed exactly.
    """

    kind: str
    setting: float
    exact_below: int

    @property
    def has_parts(self) -> bool:
        """Whether a replica can be sent its part of the sums alone."""
        return self.kind not in ("power_sgd", "top_k")

    def applies_to(self, shape: Sequence[int], dtype: str) -> bool:
        """Return whether gradients of a weight are compressed."""
        if len(shape) == 0 or str(dtype) != "float32" or 4 * math.prod(shape) < max(self.exact_below, 1):
            return False
        if self.kind != "power_sgd":
            return True
        # Two thin matrices must be smaller than the one that they stand for.
        columns, rank = self.basis_shape(shape) or (0, 0)
        return rank > 0 and rank * (columns + math.prod(shape) // columns) < math.prod(shape)

    def basis_shape(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """Return the shape of what a weight keeps besides its errors; None where there is nothing."""
        if self.kind != "power_sgd" or len(shape) < 2:
            return None
        return shape[-1], min(int(self.setting), shape[-1], math.prod(shape[:-1]))

    def sums(
        self,
        arrays: Sequence[jax.Array],
        bases: Sequence[jax.Array],
        exact: CrossDeviceOps,
        *,
        axis_name: str,
        axis_size: int,
        in_parts: bool,
    ) -> tuple[list[jax.Array], list[jax.Array], list[jax.Array]]:
        """Return the sums over the replicas, this replica's errors, and new bases.

        Args:
            arrays: that `applies_to` allows.
            bases: of shapes `basis_shape`, for each array; empty where there are none.
            exact: sums what `power_sgd` sends.
            in_parts: whether this replica's flat parts of the sums are enough; only where `has_parts`.
        """

        def summed(factors: list[jax.Array]) -> list[jax.Array]:
            found: list[jax.Array] = exact.all_reduce(
                ReduceOp.SUM, factors, axis_name=axis_name, axis_size=axis_size
            )
            return found

        if self.kind == "power_sgd":
            return low_rank_sums(arrays, bases, summed)
        if self.kind == "top_k":
            return *largest_sums(arrays, self.setting, axis_name=axis_name), []
        codec: Codec = BlockCodec(int(self.setting)) if self.kind == "int8" else HalfCodec(self.kind)
        found = encoded_sums(arrays, codec, axis_name=axis_name, axis_size=axis_size, in_parts=in_parts)
        return *found, []


class CompressedAllReduce(CrossDeviceOps):
    """Sum gradients in fewer bytes; what a step does not send is added to the gradients of the next one.

    Gradients are compressed where an optimizer applies them: in `fit` and in custom loops. Losses, metrics,
    what `strategy.reduce` and `ReplicaContext.all_reduce` sum, and small gradients are exact.

    Args:
        kind: `"bfloat16"` or `"float16"`: half of the bytes; `"int8"`: a quarter, with a scale for each
            block; `"power_sgd"`: two thin matrices for each matrix; `"top_k"`: the numbers of the largest
            magnitude with their places.
        rank: of the thin matrices of `"power_sgd"`; 4 by default.
        k: which part of all numbers `"top_k"` sends, more than 0 and at most 1; 0.01 by default.
        block: how many numbers share a scale in `"int8"`; 256 by default.
        exact_below: gradients of fewer bytes are summed exactly, and with `"power_sgd"` those that two thin
            matrices would not make smaller, such as a bias.

    Raises:
        InvalidArgumentError: for another kind, a number out of its range, or one that is not of the kind.

    >>> import unisono
    >>> strategy = unisono.MirroredStrategy(["cpu:0", "cpu:1"], CompressedAllReduce("int8"))
    >>> strategy.cross_device_ops
    CompressedAllReduce('int8', block=256)
    """

    def __init__(
        self,
        kind: str = "bfloat16",
        *,
        rank: int | None = None,
        k: float | None = None,
        block: int | None = None,
        exact_below: int = 8192,
    ) -> None:
        if kind not in _KINDS:
            raise InvalidArgumentError(
                f"`kind` must be one of {list(_KINDS)}. Received: kind={kind!r}. "
                'Write `CompressedAllReduce("bfloat16")`, for example.'
            )
        own, given = _KINDS[kind], {"rank": rank, "k": k, "block": block}
        for name, value in given.items():
            if value is not None and name not in own:
                of = next(each for each, names in _KINDS.items() if name in names)
                raise InvalidArgumentError(
                    f'`{name}` is an argument of "{of}". Received: {name}={value!r} with kind={kind!r}. '
                    f'Leave it out, or write `CompressedAllReduce("{of}", {name}={value!r})`.'
                )
        chosen = {n: default if given[n] is None else given[n] for n, default in own.items()}
        for name, value in {**chosen, "exact_below": exact_below}.items():
            _check_range(kind, name, value)
        self._chosen = chosen
        self._exact = CrossDeviceOps()
        self.compression = Compression(kind, next(iter(chosen.values()), 0) or 0, int(exact_below))

    def all_reduce(self, reduce_op: ReduceOp, tree: Tree, *, axis_name: str, axis_size: int) -> Tree:
        """Combine `tree` exactly: what is called here are no gradients that an optimizer applies."""
        return self._exact.all_reduce(reduce_op, tree, axis_name=axis_name, axis_size=axis_size)

    def over(self, exact: CrossDeviceOps) -> CompressedAllReduce:
        """Return the same compression, with another algorithm for what is exact.

        Args:
            exact: a strategy's own.
        """
        made = copy.copy(self)
        made._exact = exact
        return made

    def __repr__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self._chosen.items())
        return f"CompressedAllReduce({self.compression.kind!r}{options})"


def _check_range(kind: str, name: str, value: object) -> None:
    """Raise for a number out of range."""
    if name == "k":
        is_right, wanted = is_number(value) and 0 < value <= 1, "a number over 0, at most 1"
    elif name == "exact_below":
        is_right, wanted = whole_number(value, 0) is not None, "a number of bytes, 0 or more"
    else:
        is_right, wanted = whole_number(value, 1) is not None, "an integer, 1 or more"
    if not is_right:
        better = _KINDS[kind].get(name, 8192)
        raise InvalidArgumentError(
            f"`{name}` must be {wanted}. Received: {name}={value!r}. "
            f'Write `CompressedAllReduce("{kind}", {name}={better})`.'
        )
