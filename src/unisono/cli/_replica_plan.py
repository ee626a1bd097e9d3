"""The part of `unisono plan` for replicas of several devices: how each weight lies, and what a step sends.

The program of a training step is compiled for virtual devices, at most two replicas, and read: what XLA
plans for the memory of a device, and the messages that it has put into the program.

Tests: tests/unit/cli/test_replica_plan.py, tests/virtual/test_planned_sizes.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from unisono._errors import InvalidArgumentError, UnisonoError
from unisono.cli._model_plan import ModelFile, batch_for, checked, in_columns, megabytes
from unisono.cli._program_messages import KINDS, PlannedMessage, messages_of

#: Seconds for all: a large model compiles for minutes.
_TIME_LIMIT = 1800.0


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
            "A message in a loop counts as often as it is sent.",
        ]
    )


def _rows_of_messages(messages: Sequence[PlannedMessage]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("messages of a step", "", "count", "bytes")]
    scopes: tuple[tuple[str, Callable[[PlannedMessage], bool]], ...] = (
        ("in a replica", lambda m: m.is_inside),
        ("of replicas", lambda m: not m.is_inside),
    )
    for scope, belongs in scopes:
        for kind in KINDS:
            own = [m for m in messages if m.kind == kind and belongs(m)]
            if own:
                count, nbytes = sum(m.times for m in own), sum(m.times * m.nbytes for m in own)
                rows.append((kind, scope, str(count), megabytes(nbytes)))
    return rows if len(rows) > 1 else [*rows, ("none", "", "0", megabytes(0))]


def main(options: ReplicaPlanOptions) -> str:
    """Examine a model in a new process with virtual devices, and return the plan as text."""
    from unisono.cli._launch_function import launch

    count = options.replicas * options.size
    (plan,) = launch(examine, workers=1, args=(options,), devices_per_worker=count, timeout=_TIME_LIMIT)
    if isinstance(plan, UnisonoError):
        raise plan
    return table(plan, options)
