"""The commands `unisono plan` and `unisono explain`: what a model needs, exchanges and computes on replicas.

`plan` shows what a model needs on each device, and what a step exchanges, before it is run.

Memory is what XLA plans for the very program of a step, compiled for two virtual devices and scaled: of
state in parts a replica of n keeps 1/n; what a step needs besides state hardly changes with n. A step takes
the time of one device, and of its exchange at the link's rate: a ring sends (n-1)/n of an array a pass
(Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms", 2009).

Tests: tests/unit/cli/test_model_plan.py, tests/virtual/test_planned_sizes.py.
"""

from __future__ import annotations

import dataclasses
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from unisono._errors import InvalidArgumentError, UnisonoError
from unisono.cli._warn_once import warn_once

if TYPE_CHECKING:
    from unisono._system._literals import StateLayoutName

#: Seconds for all: a large model compiles for minutes.
_TIME_LIMIT = 1800.0
#: Steps of a timed `fit`, after one to compile and to choose its groups; the fastest of some counts.
_STEPS, _ROUNDS = 20, 3
#: Devices of the programs that are compiled.
_COMPILED_FOR = 2
#: How often a ring passes all gradients or weights: a reduce-scatter and an all-gather, as in an all-reduce;
#: weights in parts are gathered for the forward and for the backward pass.
_PASSES = {"mirrored": 2, "sharded": 2, "fully_sharded": 3}
_LINK_UNITS = {"mbit": 1e6 / 8, "gbit": 1e9 / 8, "tbit": 1e12 / 8}
_MEMORY_UNITS = {"mb": 10**6, "gb": 10**9, "tb": 10**12, "mib": 1 << 20, "gib": 1 << 30}


@dataclasses.dataclass(frozen=True)
class ModelFile:
    """A program that makes a model.

    Args:
        model: a Python file, with `:function` where that is not `make_model`.
    """

    model: str

    def __post_init__(self) -> None:
        if not Path(self._file_and_function[0]).is_file():
            raise InvalidArgumentError(
                "A model is made by a Python file with a function that returns a compiled model. Received: "
                f"{self.model!r}, which is no file. Write `model.py` or `model.py:make_model`."
            )

    @property
    def _file_and_function(self) -> tuple[str, str]:
        file, colon, function = self.model.rpartition(":")
        return (file, function) if colon and function.isidentifier() else (self.model, "make_model")

    def load(self) -> tuple[Callable[[], Any], Callable[[int], Any] | None]:
        """Run the file; return what makes a model, and what makes a batch of so many rows, if it is there."""
        return self.functions_of(self.run())

    def run(self) -> dict[str, Any]:
        """Run the file; return what it defines."""
        return runpy.run_path(self._file_and_function[0])

    def functions_of(self, names: dict[str, Any]) -> tuple[Callable[[], Any], Callable[[int], Any] | None]:
        """Return the makers of a model and of a batch, among the names that the file defines."""
        file, function = self._file_and_function
        if not callable(names.get(function)):
            raise InvalidArgumentError(
                f"{file} must have a function `{function}` that returns a compiled model. Received: "
                f"{sorted(n for n in names if not n.startswith('_') and callable(names[n]))}. Write "
                f"`def {function}():` around the lines that create and compile the model, and "
                '`return model`; what trains it stands below `if __name__ == "__main__":`.'
            )
        return names[function], names.get("make_batch")


@dataclasses.dataclass(frozen=True)
class PlanOptions(ModelFile):
    """The model and the ways to train it.

    Args:
        devices: how many train together.
        batch: rows of each device.
        servers: tasks of a job of parameter servers; 0 for no such row.
        link: bytes a second between two devices, in each direction.
        memory: bytes of a device; None if unknown.
        step_seconds: of one device; None to measure it here.
        device_kind: of the devices that will compute; None if unknown.
    """

    devices: int
    batch: int
    servers: int
    link: float
    memory: float | None
    step_seconds: float | None
    device_kind: str | None = None

    def __post_init__(self) -> None:
        least = {"devices": (self.devices, 1), "batch": (self.batch, 1), "ps": (self.servers, 0)}
        for name, (value, low) in least.items():
            if value < low:
                raise InvalidArgumentError(f"`--{name}` must be at least {low}. Received: {value}.")
        super().__post_init__()


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """The needs of one model, in bytes.

    Args:
        state: weights, the optimizer's variables and metrics, of one replica that holds all.
        batch: of one device.
        given: by layout, what a replica of two is given: its state and its batch.
        temporary: by layout, what a step needs besides, on each of two; of `"one"` on a single device.
        step_seconds: of one device; None where it was not measured.
        flops: operations of a step of one device: a multiplication with an addition counts two.
        dtype: in which the model computes.
        peak: operations a second of a device at most; None where its kind was not given.
    """

    weights: int
    gradients: int
    state: int
    batch: int
    given: dict[str, int]
    temporary: dict[str, int]
    step_seconds: float | None
    flops: float = 0.0
    dtype: str = "float32"
    peak: float | None = None

    def state_of(self, layout: str, devices: int) -> float:
        """The bytes of state on each of some devices."""
        in_parts = _COMPILED_FOR * (self.state + self.batch - self.given[layout]) / (_COMPILED_FOR - 1)
        # Slots of a few numbers stay whole; a padded part is no negative one.
        in_parts = min(max(in_parts, 0.0), self.state)
        return self.state - in_parts * (1 - 1 / devices)


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """The needs of one way to train: bytes on each device, and seconds.

    Args:
        state: weights, the optimizer's variables and metrics.
        temporary: gradients, activations and the batch.
        sent: in a step, by each device.
        seconds: a step's.
    """

    name: str
    state: float
    temporary: float
    sent: float
    seconds: float

    @property
    def peak(self) -> float:
        """The bytes of a device while it trains."""
        return self.state + self.temporary


def parse_rate(text: str) -> float:
    """Return the bytes a second of a link.

    >>> parse_rate("10gbit")
    1250000000.0
    """
    return _parsed(text, _LINK_UNITS, "--link", "10gbit")


def parse_memory(text: str) -> float:
    """Return the bytes of a device's memory.

    >>> parse_memory("80gb")
    80000000000.0
    """
    return _parsed(text, _MEMORY_UNITS, "--memory", "80gb")


def _parsed(text: str, units: dict[str, Any], flag: str, example: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([a-z]+)", text.lower())
    if match is None or match[2] not in units or not float(match[1]):
        raise InvalidArgumentError(
            f"`{flag}` must be a number with one of the units {', '.join(units)}. Received: {text!r}. "
            f"Write `{flag} {example}`."
        )
    return float(float(match[1]) * units[match[2]])


def _examine(options: PlanOptions) -> ModelSize | UnisonoError:
    # A warning about the model would stand there for each layout that is compiled.
    warn_once()
    try:
        return examine(options)
    except UnisonoError as error:
        # Returned, so that the process does not show where it was raised.
        return error


def examine(options: PlanOptions) -> ModelSize:
    """Compile a model's step for one device and for two, in a process that has two; time it on one."""
    import jax
    import keras

    from unisono.strategies._mirrored import MirroredStrategy
    from unisono.strategies._replicated import LAYOUTS
    from unisono.training.groups._step_work import flops_of
    from unisono.training.trainer._lowered_step import lowered_and_traced

    make_model, make_batch = options.load()
    given, temporary = {}, {}
    seconds, sizes, kind = options.step_seconds, (0, 0, 0, 0), options.device_kind
    # The strategies of several devices first: the first one decides how many virtual devices there are.
    runs: list[tuple[str, StateLayoutName]] = [*((each, each) for each in LAYOUTS), ("one", LAYOUTS[0])]
    for number, (layout, state_layout) in enumerate(runs, start=1):
        # Each takes as long as the first step of the model.
        what = "one device" if layout == "one" else f'two devices, state_layout="{layout}"'
        print(f"compiling the step for {what} ({number} of {len(runs)})", file=sys.stderr, flush=True)
        count = 1 if layout == "one" else _COMPILED_FOR
        devices = [f"cpu:{i}" for i in range(count)]
        strategy = MirroredStrategy(devices, state_layout=state_layout)
        with strategy.scope():
            model = checked(make_model(), options.model)
        rows = options.batch * count
        x, y = make_batch(rows) if make_batch is not None else batch_for(model, rows)
        if count == 1:
            if seconds is None:
                print("measuring the step of one device, on a CPU", file=sys.stderr, flush=True)
                seconds = _step_seconds(model, x, y)
            model.optimizer.build(model.trainable_variables)
            weights, trained = (sum(_size(v) for v in vs) for vs in (model.weights, model.trainable_weights))
            others = [*model.optimizer.variables, *model.metrics_variables]
            batch = sum(a.nbytes for a in jax.tree.leaves((x, y)))
            sizes = weights, trained, weights + sum(map(_size, others)), batch
        lowered, trace = lowered_and_traced(model, x, y)
        dtype = str(model.compute_dtype)
        # Here, where the model's file may have set it.
        work = flops_of(trace), dtype, None if kind is None else peak_of(kind, dtype)
        plan: Any = lowered.compile().memory_analysis()
        given[layout], temporary[layout] = plan.argument_size_in_bytes, plan.temp_size_in_bytes
        keras.backend.clear_session()
    return ModelSize(*sizes, given, temporary, seconds, *work)


def checked(model: Any, where: str) -> Any:
    import keras

    if not isinstance(model, keras.Model) or not model.compiled or not model.built:
        raise InvalidArgumentError(
            f"{where} must return a Keras model that is built and compiled. Received: {model!r}. Begin it "
            "with `keras.Input(shape)`, and call `model.compile(...)` before it is returned."
        )
    return model


def _size(variable: Any) -> int:
    return int(variable.value.nbytes)


def batch_for(model: Any, rows: int) -> tuple[Any, Any]:
    """Return a batch of zeros as a model's inputs, outputs and loss want it."""
    import keras
    import numpy as np

    loss = model.loss
    name = str(getattr(loss, "name", loss) or "")
    inputs: list[Any] = getattr(model, "inputs", None) or []
    outputs: list[Any] = getattr(model, "outputs", None) or []
    has_shapes = not any(None in t.shape[1:] for t in (*inputs, *outputs))
    if not inputs or len(outputs) != 1 or not has_shapes or not name:
        raise InvalidArgumentError(
            "A batch follows from a functional model with one output, fixed shapes and one loss. Received: "
            f"{type(model).__name__} {model.name!r}, loss {loss!r}. Write a function `make_batch(rows)` that "
            "returns `(x, y)` into the same file."
        )
    # As the model was given them: one, a list, or a dict.
    given = inputs[0] if isinstance(model, keras.Sequential) else model.input
    x = keras.tree.map_structure(lambda t: np.zeros((rows, *t.shape[1:]), str(t.dtype)), given)
    shape = (rows, *outputs[0].shape[1:])
    is_sparse = "sparse" in name.lower()
    return x, np.zeros(shape[:-1], "int32") if is_sparse else np.zeros(shape, "float32")


def _step_seconds(model: Any, x: Any, y: Any) -> float:
    from unisono.data._dataset import Dataset

    data = Dataset.from_tensors((x, y)).repeat(_STEPS)
    seconds = []
    for _ in range(1 + _ROUNDS):
        began = perf_counter()
        # The logs of an epoch are read, so its steps are over.
        model.fit(data, verbose=0)
        seconds.append((perf_counter() - began) / _STEPS)
    return min(seconds[1:])


def plan_rows(size: ModelSize, options: PlanOptions) -> list[PlanRow]:
    """Return the needs of each way to train."""
    n, compute = options.devices, options.step_seconds or size.step_seconds or 0.0
    alone = PlanRow("OneDeviceStrategy", size.state, size.temporary["one"] + size.batch, 0, compute)
    rows = [alone]
    for layout in (name for name in size.given if name != "one"):
        sent = _PASSES[layout] * (n - 1) / n * size.gradients
        name = "MirroredStrategy" if layout == "mirrored" else f'  state_layout="{layout}"'
        state, temporary = size.state_of(layout, n), size.temporary[layout] + size.batch
        rows.append(PlanRow(name, state, temporary, sent, compute + sent / options.link))
    if options.servers:
        # A worker pulls all weights and pushes all gradients, one after the other; a server's link carries
        # both at once, for more workers than there are servers.
        both = size.weights + size.gradients
        crowd = n / options.servers * max(size.weights, size.gradients)
        worker = PlanRow(
            "ParameterServerStrategy",
            size.weights,
            alone.temporary,
            size.gradients,
            compute + max(both, crowd) / options.link,
        )
        server = PlanRow(
            "  each server", size.state / options.servers, 0, n * size.weights / options.servers, 0
        )
        rows += [worker, server]
    return rows


def table(size: ModelSize, options: PlanOptions) -> str:
    """Return the plan as text."""
    cells_of: list[Sequence[str]] = [("", "state", "step", "peak", "sent a step", "exchange", "step time")]
    if options.memory is not None:
        cells_of[0] = (*cells_of[0], "fits")
    compute = options.step_seconds or size.step_seconds or 0.0
    rows = plan_rows(size, options)
    bytes_of = [(row.state, row.temporary, row.peak, row.sent) for row in rows]
    # The unit of the largest number in each column, for all of them: sizes can be compared at a glance.
    units = [_unit_of(max(column)) for column in zip(*bytes_of, strict=True)]
    for row, sizes in zip(rows, bytes_of, strict=True):
        exchange = max(row.seconds - compute, 0.0)
        times = (_ms(exchange), _ms(row.seconds)) if row.seconds else ("", "")
        fits = () if options.memory is None else ("yes" if row.peak <= options.memory else "no",)
        cells_of.append((row.name, *map(megabytes, sizes, units), *times, *fits))
    lines = in_columns(cells_of)
    servers = f", servers: {options.servers}" if options.servers else ""
    how = "given" if options.step_seconds is not None else "measured here, on a CPU"
    return "\n".join(
        [
            f"{options.devices} devices, {options.batch} rows each, links of "
            f"{options.link * 8 / 1e9:g} Gbit/s{servers}; a step of one device takes {_ms(compute)} ({how})",
            f"weights {megabytes(size.weights)}, gradients {megabytes(size.gradients)}, "
            f"optimizer and metrics {megabytes(size.state - size.weights)}",
            *_work_lines(size, options),
            "",
            *lines,
            "",
            "Bytes on each device: what rests between steps, what a step needs besides (XLA's plan for "
            "CPUs), and both.",
        ]
    )


def _work_lines(size: ModelSize, options: PlanOptions) -> list[str]:
    """Return the line on the operations of a step, and on the peak of a device where its kind is known."""
    if not size.flops:
        return []
    line = f"a step of one device computes {_scaled(size.flops)}FLOP"
    if size.peak is None:
        return [line]
    least = size.flops / size.peak
    line += (
        f": {_ms(least)} at the peak of {options.device_kind} in {size.dtype} ({_scaled(size.peak)}FLOP/s)"
    )
    if options.step_seconds is not None:
        line += f", {100 * least / options.step_seconds:.0f} % of it in the time that is given (MFU)"
    return [line]


def peak_of(device_kind: str, dtype: str) -> float:
    """Return the operations a second of a kind of device at most, by the table of `StepTimer`.

    Raises:
        InvalidArgumentError: the table does not have it.
    """
    from unisono.training.groups._peak_flops import peak_flops_of

    peak = peak_flops_of(device_kind, dtype)
    if peak is None:
        raise InvalidArgumentError(
            "`--device-kind` must be a kind of device with a known peak, such as 'NVIDIA H200' or 'TPU v5e'. "
            f"Received: {device_kind!r}, for a model that computes in {dtype}. Call "
            "`unisono.callbacks.set_peak_flops` at the top of the model's file, or leave the flag out."
        )
    return peak


def _scaled(number: float) -> str:
    """Return a number with the prefix of its unit.

    >>> _scaled(989e12), _scaled(1.25e6)
    ('989 T', '1.25 M')
    """
    scale, prefix = next(((s, p) for s, p in _PREFIXES if number >= s), (1.0, ""))
    return f"{number / scale:.3g} {prefix}"


#: Prefixes of units, the largest first.
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def in_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: the first column begins, and all others end at one place."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *others in rows:
        cells = [name.ljust(widths[0]), *map(str.rjust, others, widths[1:])]
        lines.append("  ".join(cells).rstrip())
    return lines


#: Units of sizes, the largest first, in bytes.
_UNITS = {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}


def _unit_of(size: float) -> str:
    return next((name for name, scale in _UNITS.items() if size >= scale), "B")


def megabytes(size: float, unit: str | None = None) -> str:
    """Return a number of bytes as text."""
    unit = unit or _unit_of(size)
    number = size / _UNITS[unit]
    # No power of ten beside a larger number of the same column.
    text = f"{number:.3g}" if number >= 0.001 or not number else f"{number:.4f}"
    return f"{text} {unit}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def main(options: PlanOptions) -> str:
    """Examine a model in a new process with two virtual devices, and return the plan as text."""
    from unisono.cli._launch_function import launch

    (size,) = launch(
        _examine, workers=1, args=(options,), devices_per_worker=_COMPILED_FOR, timeout=_TIME_LIMIT
    )
    if isinstance(size, UnisonoError):
        raise size
    return table(size, options)


def explain(model: str, devices: int) -> str:
    """Read a model's step in a new process with virtual devices, and return the table as text."""
    from unisono.cli._launch_function import launch

    if devices < 2:
        raise InvalidArgumentError(
            "`--devices` must be at least 2, as one replica computes what plain Keras does. Received: "
            f"{devices}."
        )
    (text,) = launch(
        _explain, workers=1, args=(ModelFile(model), devices), devices_per_worker=devices, timeout=_TIME_LIMIT
    )
    if isinstance(text, UnisonoError):
        raise text
    return str(text)


def _explain(file: ModelFile, devices: int) -> Any:
    """Return the table, or the error that says why there is none."""
    from unisono.strategies._mirrored import MirroredStrategy

    strategy = MirroredStrategy([f"cpu:{i}" for i in range(devices)])
    lines: list[str] = []
    try:
        make_model, make_batch = file.load()
        with strategy.scope():
            model = checked(make_model(), file.model)
        rows = 4 * devices
        strategy.explain(model, make_batch(rows) if make_batch else batch_for(model, rows), lines.append)
    except UnisonoError as error:
        return error
    return "\n".join(lines)
