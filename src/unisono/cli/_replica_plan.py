"""The part of `unisono plan` for replicas of several devices: how each weight lies, and what a step sends.

The program of a training step is compiled for virtual devices, at most two replicas, and read: what XLA
plans for the memory of a device, and the messages that it has put into the program.

Tests: tests/unit/cli/test_replica_plan.py, tests/virtual/test_planned_sizes.py.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from unisono._errors import InvalidArgumentError, UnisonoError
from unisono.cli._model_plan import ModelFile, batch_for, checked, in_columns, megabytes

#: Seconds for all: a large model compiles for minutes.
_TIME_LIMIT = 1800.0

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_SIZES = {"pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2}
_SIZES |= {"f32": 4, "s32": 4, "u32": 4, "f64": 8, "s64": 8, "u64": 8, "c64": 8, "c128": 16}


@dataclasses.dataclass(frozen=True)
class ReplicaPlanOptions(ModelFile):
    """The model, and the replicas on which it would train.

    Args:
        devices: of all replicas.
        size: devices of each replica.
        batch: rows of each replica.
        layout: `"auto"`, or the name of a layout map or function in the model's file.
        memory: bytes of a device; None if unknown.
    """

    devices: int
    size: int
    batch: int
    layout: str
    memory: float | None

    def __post_init__(self) -> None:
        if self.size < 2 or self.devices < self.size or self.devices % self.size:
            raise InvalidArgumentError(
                "`--devices` must be a multiple of `--devices-per-replica`, which is 2 or more. Received: "
                f"{self.devices} and {self.size}. Write `--devices {2 * max(self.size, 2)}`, for example."
            )
        if self.batch < 1:
            raise InvalidArgumentError(f"`--batch` must be at least 1. Received: {self.batch}.")
        super().__post_init__()

    @property
    def replicas(self) -> int:
        """How many replicas the program is compiled for: with more of them nothing but sums is longer."""
        return min(2, self.devices // self.size)


class PlannedWeight(NamedTuple):
    """How a weight lies.

    Args:
        axis: that is cut; None for a weight that is whole on each device.
        nbytes: on each device.
    """

    path: str
    shape: tuple[int, ...]
    axis: int | None
    nbytes: int


class PlannedMessage(NamedTuple):
    """A collective of a compiled program.

    Args:
        kind: as XLA calls it.
        is_inside: whether the devices of a replica exchange, and not replicas.
        nbytes: of its result on each device.
    """

    kind: str
    is_inside: bool
    nbytes: int


@dataclasses.dataclass(frozen=True)
class ReplicaPlan:
    """The weights, messages and memory of a compiled step.

    Args:
        given: bytes of state and of the batch on each device.
        temporary: bytes that a step needs besides.
    """

    weights: list[PlannedWeight]
    messages: list[PlannedMessage]
    given: int
    temporary: int


def messages_of(program: str, size: int) -> list[PlannedMessage]:
    """Return the collectives of a compiled program.

    Args:
        program: XLA's text of it.
        size: devices of each replica.

    >>> text = "%a = f32[4,8]{1,0} all-reduce(%b), channel_id=1, replica_groups=[2,2]<=[4], to_apply=%c"
    >>> messages_of(text, 2)
    [PlannedMessage(kind='all-reduce', is_inside=True, nbytes=128)]
    """
    form = rf"= (\(.*?\)|\S+) ({'|'.join(_KINDS)})(-start)?\(.*"
    return list(_messages(re.finditer(form, program), size))


def _messages(found: Iterator[re.Match[str]], size: int) -> Iterator[PlannedMessage]:
    for match in found:
        shapes = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
        sizes = [
            _SIZES.get(kind, 4) * int(np.prod([int(n) for n in dims.split(",") if n]))
            for kind, dims in shapes
        ]
        if match[3]:
            # One that is started and awaited returns its operands, too.
            sizes = sizes[len(sizes) // 2 :]
        members = _first_group(match[0])
        yield PlannedMessage(match[2], len({n // size for n in members}) == 1, sum(sizes))


def _first_group(line: str) -> list[int]:
    """Return the numbers of the devices of the first group of a collective."""
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]+)\}", line)
    if listed is not None:
        return [int(n) for n in listed[1].split(",")]
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if iota is None:
        return [0]
    lists = ([int(n) for n in text.split(",")] if text else [] for text in iota.groups())
    groups, dims, order = lists
    numbers = np.arange(math.prod(dims)).reshape(dims)
    return [int(n) for n in numbers.transpose(order or None).reshape(groups)[0]]


def examine(options: ReplicaPlanOptions) -> ReplicaPlan | UnisonoError:
    """Compile a model's step for virtual devices, in a process that has them."""
    try:
        return _examine(options)
    except UnisonoError as error:
        # Returned, so that the process does not show where it was raised.
        return error


def _examine(options: ReplicaPlanOptions) -> ReplicaPlan:
    from unisono.strategies._mirrored import MirroredStrategy
    from unisono.training.trainer._lowered_step import lowered_step

    names = options.run()
    make_model, make_batch = options.functions_of(names)
    layout_map: Any = options.layout if options.layout == "auto" else names.get(options.layout)
    if layout_map is None:
        raise InvalidArgumentError(
            '`--layout` must be "auto", or the name of a layout map or function in the model\'s file. '
            f"Received: {options.layout}, which {options.model} does not define."
        )
    replicas = options.replicas
    strategy = MirroredStrategy(
        [f"cpu:{i}" for i in range(replicas * options.size)],
        devices_per_replica=options.size,
        layout_map=layout_map,
    )
    with strategy.scope():
        model = checked(make_model(), options.model)
    rows = options.batch * replicas
    x, y = make_batch(rows) if make_batch is not None else batch_for(model, rows)
    compiled = lowered_step(model, x, y).compile()
    memory: Any = compiled.memory_analysis()
    layout = strategy.state_layout
    weights = [_planned(v, tuple(layout.of(v).sharding.spec), options.size) for v in model.weights]
    messages = messages_of(compiled.as_text() or "", options.size)
    return ReplicaPlan(weights, messages, memory.argument_size_in_bytes, memory.temp_size_in_bytes)


def _planned(variable: Any, spec: Sequence[Any], size: int) -> PlannedWeight:
    axis = next((i for i, name in enumerate(spec) if name), None)
    nbytes = int(np.prod(variable.shape)) * np.dtype(variable.dtype).itemsize
    return PlannedWeight(variable.path, tuple(variable.shape), axis, nbytes // (1 if axis is None else size))


def table(plan: ReplicaPlan, options: ReplicaPlanOptions) -> str:
    """Return the plan as text."""
    count, size = options.replicas, options.size
    weights = [("weight", "shape", "axis", "on each device")]
    for path, shape, axis, nbytes in plan.weights:
        weights.append(
            (path, "x".join(map(str, shape)), "" if axis is None else str(axis), megabytes(nbytes))
        )
    peak = plan.given + plan.temporary
    fits = "" if options.memory is None else f"; fits: {'yes' if peak <= options.memory else 'no'}"
    return "\n".join(
        [
            f"{options.devices // size} replicas of {size} devices, {options.batch} rows each; compiled for "
            f"{count} of them",
            "",
            *in_columns(weights),
            "",
            *in_columns(_rows_of_messages(plan.messages)),
            "",
            f"Bytes on each device: {megabytes(plan.given)} between steps, {megabytes(plan.temporary)} "
            f"besides in a step, {megabytes(peak)} in all (XLA's plan for CPUs){fits}.",
            "A message in a loop counts once.",
        ]
    )


def _rows_of_messages(messages: Sequence[PlannedMessage]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("messages of a step", "", "count", "bytes")]
    scopes: tuple[tuple[str, Callable[[PlannedMessage], bool]], ...] = (
        ("in a replica", lambda m: m.is_inside),
        ("of replicas", lambda m: not m.is_inside),
    )
    for scope, belongs in scopes:
        for kind in _KINDS:
            own = [m for m in messages if m.kind == kind and belongs(m)]
            if own:
                rows.append((kind, scope, str(len(own)), megabytes(sum(m.nbytes for m in own))))
    return rows if len(rows) > 1 else [*rows, ("none", "", "0", megabytes(0))]


def main(options: ReplicaPlanOptions) -> str:
    """Examine a model in a new process with virtual devices, and return the plan as text."""
    from unisono.cli._launch_function import launch

    count = options.replicas * options.size
    (plan,) = launch(examine, workers=1, args=(options,), devices_per_worker=count, timeout=_TIME_LIMIT)
    if isinstance(plan, UnisonoError):
        raise plan
    return table(plan, options)
