"""The part of `unisono plan` for replicas of several devices: how each weight lies, and what a step sends.

The program of a training step is compiled for virtual devices, at most two replicas, and read: what XLA
plans for the memory of a device, and the messages that it has put into the program.

Tests: tests/unit/cli/test_replica_plan.py, tests/virtual/test_planned_sizes.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from unisono._errors import InvalidArgumentError, UnisonoError
from unisono.cli._model_plan import ModelFile, batch_for, checked, in_columns, megabytes
from unisono.model_parallel._program_messages import KINDS, PlannedMessage, gathered_parameters, messages_of

if TYPE_CHECKING:
    from unisono._system._literals import StateLayoutName

#: Seconds for all: a large model compiles for minutes.
_TIME_LIMIT = 1800.0

_LAYOUTS = ("mirrored", "sharded", "fully_sharded")
#: Printed where the program was compiled for fewer replicas than there are.
_NOTES = ["Bytes between steps are for all replicas, the others for the compiled ones."]


@dataclasses.dataclass(frozen=True)
class ReplicaPlanOptions(ModelFile):
    """The model, and the replicas on which it would train.

    Args:
        devices: of all replicas.
        size: devices of each replica.
        batch: rows of each replica.
        layout: `"auto"`, or the name of a layout map or function in the model's file. `"auto:3"` compares
            the choice with three others.
        memory: bytes of a device; None if unknown.
        state_layout: as in the strategies.
    """

    devices: int
    size: int
    batch: int
    layout: str
    memory: float | None
    state_layout: StateLayoutName = "mirrored"

    def __post_init__(self) -> None:
        if self.size < 2 or self.devices < self.size or self.devices % self.size:
            raise InvalidArgumentError(
                "`--devices` must be a multiple of `--devices-per-replica`, which is 2 or more. Received: "
                f"{self.devices} and {self.size}. Write `--devices {2 * max(self.size, 2)}`, for example."
            )
        if self.batch < 1:
            raise InvalidArgumentError(f"`--batch` must be at least 1. Received: {self.batch}.")
        if self.state_layout not in _LAYOUTS:
            raise InvalidArgumentError(
                f"`--state-layout` must be one of {', '.join(_LAYOUTS)}. Received: {self.state_layout}."
            )
        super().__post_init__()

    @property
    def others(self) -> int:
        """With how many other layouts the choice is compared."""
        count = self.layout.removeprefix("auto:")
        return int(count) if count != self.layout and count.isdecimal() else 0

    @property
    def replicas(self) -> int:
        """How many replicas the program is compiled for: more of them change sums, and sizes of parts."""
        return min(2, self.all_replicas)

    @property
    def all_replicas(self) -> int:
        """How many replicas train together."""
        return self.devices // self.size


class PlannedWeight(NamedTuple):
    """How a weight lies.

    Args:
        axis: that is cut; None for a weight that is whole on each device.
        nbytes: on each device.
        reason: why it is whole, where that was decided by the model's program.
    """

    path: str
    shape: tuple[int, ...]
    axis: int | None
    nbytes: int
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class ReplicaPlan:
    """The weights, messages and memory of a compiled step.

    Args:
        given: bytes of state and of the batch on each device, with all replicas.
        temporary: bytes that a step needs besides.
        estimated: bytes that devices of a replica send, by which the layout was chosen; None for a given one.
        gathered: weights in parts that a step puts together, or others of their shapes.
        others: plans with other layouts, by what is whole there.
    """

    weights: list[PlannedWeight]
    messages: list[PlannedMessage]
    given: int
    temporary: int
    estimated: int | None = None
    gathered: tuple[str, ...] = ()
    others: tuple[tuple[str, ReplicaPlan], ...] = ()

    @property
    def sent(self) -> int:
        """Bytes that devices of a replica send in a step."""
        return sum(m.times * m.nbytes for m in self.messages if m.is_inside)


def examine(options: ReplicaPlanOptions) -> ReplicaPlan | UnisonoError:
    """Compile a model's step for virtual devices, in a process that has them."""
    try:
        return _examine(options)
    except UnisonoError as error:
        # Returned, so that the process does not show where it was raised.
        return error


def _examine(options: ReplicaPlanOptions) -> ReplicaPlan:
    names = options.run()
    is_automatic = options.layout == "auto" or options.others > 0
    layout_map: Any = "auto" if is_automatic else names.get(options.layout)
    if layout_map is None:
        raise InvalidArgumentError(
            '`--layout` must be "auto", or the name of a layout map or function in the model\'s file. '
            f"Received: {options.layout}, which {options.model} does not define."
        )
    plan, layout = _compiled(options, names, layout_map)
    if not is_automatic:
        return plan
    # What sends most for what it saves is the first that might better be whole.
    classes = sorted(layout.cuts, key=lambda cut: -cut.sent / max(cut.saved, 1))[: options.others]
    others = [_without(set(cut.paths), options, names, layout.chosen) for cut in classes]
    estimated = sum(cut.sent for cut in layout.cuts)
    return dataclasses.replace(plan, estimated=estimated, others=tuple(others))


def _without(
    whole: set[str], options: ReplicaPlanOptions, names: dict[str, Any], chosen: dict[str, int]
) -> tuple[str, ReplicaPlan]:
    """Return the plan with some weights whole that were cut, and their names."""
    import keras

    from unisono.model_parallel._replica_grid import MODEL_AXIS

    # Layers without names are named as in the first model.
    keras.backend.clear_session()
    axes = {path: axis for path, axis in chosen.items() if path not in whole}

    def layout_map(variable: Any) -> tuple[str | None, ...] | None:
        axis = axes.get(variable.path)
        cut = tuple(MODEL_AXIS if i == axis else None for i in range(len(variable.shape)))
        return None if axis is None else cut

    first, *more = (path for path in chosen if path in whole)
    title = f"{first} whole" if not more else f"{first} and {len(more)} more whole"
    return title, _compiled(options, names, layout_map)[0]


def _compiled(options: ReplicaPlanOptions, names: dict[str, Any], layout_map: Any) -> tuple[ReplicaPlan, Any]:
    """Return the plan of one layout, and how the devices of a replica share its weights."""
    import jax

    from unisono._mesh import AXIS
    from unisono.strategies._mirrored import MirroredStrategy
    from unisono.training.trainer._lowered_step import lowered_step

    make_model, make_batch = options.functions_of(names)
    replicas = options.replicas
    strategy = MirroredStrategy(
        [f"cpu:{i}" for i in range(replicas * options.size)],
        devices_per_replica=options.size,
        layout_map=layout_map,
        state_layout=options.state_layout,
    )
    with strategy.scope():
        model = checked(make_model(), options.model)
    rows = options.batch * replicas
    x, y = make_batch(rows) if make_batch is not None else batch_for(model, rows)
    compiled = lowered_step(model, x, y).compile()
    memory: Any = compiled.memory_analysis()
    layout: Any = strategy.state_layout
    shared = getattr(layout, "of_replica", layout)
    reasons = getattr(shared, "reasons", {})

    def bytes_of(variable: Any, replicas: int) -> int:
        lies, count = layout.of(variable), int(math.prod(variable.shape))
        count //= 1 if lies.axis is None else options.size
        # Parts on the replicas are filled up to equal lengths.
        count = -(-count // replicas) if AXIS in jax.tree.leaves(tuple(lies.spec)) else count
        nbytes: int = count * np.dtype(variable.dtype).itemsize
        return nbytes

    weights = [
        PlannedWeight(
            v.path,
            tuple(v.shape),
            layout.of(v).axis,
            bytes_of(v, options.all_replicas),
            reasons.get(v.path, ""),
        )
        for v in model.weights
    ]
    variables = {id(v): v for v in (*model.weights, *model.optimizer.variables)}.values()
    saved = sum(bytes_of(v, options.replicas) - bytes_of(v, options.all_replicas) for v in variables)
    text = compiled.as_text() or ""
    gathered = gathered_parameters(text, options.size)
    plan = ReplicaPlan(
        weights,
        messages_of(text, options.size),
        memory.argument_size_in_bytes - saved,
        memory.temp_size_in_bytes,
        gathered=tuple(w.path for w in weights if w.axis is not None and _part(w, options.size) in gathered),
    )
    return plan, shared


def _part(weight: PlannedWeight, size: int) -> tuple[int, ...]:
    """Return the shape of a device's part of a weight."""
    return tuple(n // size if i == weight.axis else n for i, n in enumerate(weight.shape))


def table(plan: ReplicaPlan, options: ReplicaPlanOptions) -> str:
    """Return the plan as text."""
    count, size = options.replicas, options.size
    has_reasons = any(w.reason for w in plan.weights)
    weights = [("weight", "shape", "axis", "on each device", *(["why whole"] if has_reasons else []))]
    for path, shape, axis, nbytes, reason in plan.weights:
        row = path, "x".join(map(str, shape)), "" if axis is None else str(axis), megabytes(nbytes)
        weights.append((*row, *([reason] if has_reasons else [])))
    peak = plan.given + plan.temporary
    fits = "" if options.memory is None else f"; fits: {'yes' if peak <= options.memory else 'no'}"
    return "\n".join(
        [
            f"{options.all_replicas} replicas of {size} devices, {options.batch} rows each; "
            f"state_layout={options.state_layout!r}; compiled for {count} of them",
            "",
            *in_columns(weights),
            "",
            *in_columns(_rows_of_messages(plan.messages)),
            "",
            f"Bytes on each device: {megabytes(plan.given)} between steps, {megabytes(plan.temporary)} "
            f"besides in a step, {megabytes(peak)} in all (XLA's plan for CPUs){fits}.",
            *(_NOTES if count < options.all_replicas and options.state_layout != "mirrored" else []),
            "A message in a loop counts as often as it is sent.",
            *_notes(plan),
        ]
    )


def _notes(plan: ReplicaPlan) -> list[str]:
    """Return lines on the choice, from the compiled program."""
    lines = []
    if plan.estimated is not None:
        lines.append(
            f"The axes were chosen by an estimate of {megabytes(plan.estimated)} sent in a replica; the "
            f"program sends {megabytes(plan.sent)}."
        )
    lines += [
        f"XLA puts the weight {path} together in a step, or another of its shape: cut another axis of it, or "
        "leave it whole."
        for path in plan.gathered
    ]
    if plan.others:
        rows = [("layout", "sent in a replica", "messages", "on each device")]
        for title, each in (("the choice", plan), *plan.others):
            count = sum(m.times for m in each.messages if m.is_inside)
            memory = megabytes(each.given + each.temporary)
            rows.append((title, megabytes(each.sent), str(count), memory))
        lines += ["", *in_columns(rows)]
    return lines


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
