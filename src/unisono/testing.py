"""Test the fault tolerance of programs: planned faults, and a history of steps to check.

>>> plan = FaultPlan().kill("worker:1", step=17).fail("worker:0", step=3)
>>> [fault.kind for fault in plan.faults]
['kill', 'fail']
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from unisono._checks import digits, is_number
from unisono._errors import InvalidArgumentError, UnisonoError
from unisono._system._environ import process_environ
from unisono._system._json import MALFORMED, parse_json
from unisono.cluster_resolver._base import TFConfigClusterResolver, whole_of

__all__ = [
    "DivergenceError",
    "Fault",
    "FaultCallback",
    "FaultPlan",
    "InjectedError",
    "Record",
    "check_history",
    "read_history",
]


def __dir__() -> list[str]:
    return __all__


class InjectedError(UnisonoError):
    """The exception that `FaultPlan.fail` raises."""


class DivergenceError(UnisonoError, AssertionError):
    """A history in which two processes, or two generations, computed different weights at one step."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
        kind: `"kill"` (SIGKILL), `"stop"` (SIGSTOP) or `"fail"` (an exception).
        task: the task, such as `"worker:1"`.
        step: the step of the whole training, from 0, after which it happens.
        generation: the generation of the cluster in which it happens.
    """

    kind: str
    task: str
    step: int
    generation: int = 0


@dataclasses.dataclass(frozen=True)
class FaultPlan:
    """Which task fails how and when; every task gets the same plan.

    Args:
        faults: the faults, in any order.
    """

    faults: tuple[Fault, ...] = ()

    def kill(self, task: str, step: int, generation: int = 0) -> FaultPlan:
        """Return the plan with a SIGKILL of a task after a step."""
        return self._with("kill", task, step, generation)

    def stop(self, task: str, step: int, generation: int = 0) -> FaultPlan:
        """Return the plan with a SIGSTOP of a task after a step."""
        return self._with("stop", task, step, generation)

    def fail(self, task: str, step: int, generation: int = 0) -> FaultPlan:
        """Return the plan with an exception in a task after a step."""
        return self._with("fail", task, step, generation)

    def _with(self, kind: str, task: str, step: int, generation: int) -> FaultPlan:
        job, _, index = task.partition(":")
        if not job or digits(index) is None or step < 0 or generation < 0:
            raise InvalidArgumentError(
                "A fault needs a task such as 'worker:1', a step and a generation of 0 or more. "
                f"Received: task={task!r}, step={step}, generation={generation}."
            )
        return FaultPlan((*self.faults, Fault(kind, task, step, generation)))

    @classmethod
    def at_random(cls, seed: int, tasks: Sequence[str], steps: int, faults: int = 2) -> FaultPlan:
        """Return a plan of random faults, one in each generation.

        Args:
            seed: the seed of the random choices.
            tasks: the tasks to choose from.
            steps: the number of steps of the whole training.
            faults: the number of faults.

        >>> FaultPlan.at_random(1, ["worker:0", "worker:1"], 30) == FaultPlan.at_random(
        ...     1, ["worker:0", "worker:1"], 30)
        True
        """
        draw = random.Random(seed)
        plan, first = cls(), 1
        for generation in range(faults):
            # A generation resumes at or before the step of the previous fault, so it certainly reaches a
            # later one.
            step = draw.randrange(first, max(first + 1, steps * (generation + 1) // faults))
            plan = plan._with(draw.choice(["kill", "fail"]), draw.choice(list(tasks)), step, generation)
            first = step + 1
        return plan

    def to_json(self) -> str:
        """Return the plan as text, for an environment variable or a file."""
        return json.dumps([dataclasses.asdict(f) for f in self.faults])

    @classmethod
    def from_json(cls, text: str) -> FaultPlan:
        """Return the plan of a text: the inverse of `to_json`."""
        try:
            faults = [Fault(**fault) for fault in parse_json(text)]
            checked = [cls()._with(f.kind, f.task, f.step, f.generation) for f in faults]
        except MALFORMED as error:
            raise InvalidArgumentError(
                f"A plan must be what `to_json` has returned. Received: {text[:200]!r} ({error})."
            ) from error
        return cls(tuple(fault for plan in checked for fault in plan.faults))

    def act(self, task: str, step: int, generation: int) -> None:
        """Carry out the faults that are planned for a task after a step.

        Raises:
            InjectedError: for a planned failure.
        """
        for fault in self.faults:
            if (fault.task, fault.step, fault.generation) != (task, step, generation):
                continue
            if fault.kind == "fail":
                raise InjectedError(f"A planned failure of {task} after step {step}.")
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)

    def callback(self, history: str | os.PathLike[str] | None = None) -> FaultCallback:
        """Return a callback for `fit` that records each step, and then carries out the plan.

        Args:
            history: the directory for the history, see `read_history`; None records nothing.
        """
        return FaultCallback(self, None if history is None else Path(history))


class FaultCallback(keras.callbacks.Callback):
    """Records each step of a task, and carries out a plan.

    Args:
        plan: the planned faults.
        history: the directory for the file of each task; None records nothing.

    >>> callback = FaultPlan([]).callback(history="history")
    """

    def __init__(self, plan: FaultPlan, history: Path | None) -> None:
        super().__init__()
        environ = process_environ()
        task = TFConfigClusterResolver(environ=environ).task
        self._task = "worker:0" if task is None else str(task)
        self._generation = whole_of("UNISONO_GENERATION", environ)
        self._plan, self._history, self._epoch = plan, history, 0

    def get_state(self) -> dict[str, Any]:
        """Return the epoch, for a backup; everything else belongs to the process."""
        return {"epoch": self._epoch}

    def set_state(self, state: dict[str, Any]) -> None:
        """Resume in an epoch."""
        self._epoch = state["epoch"]

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Record the step, then carry out its faults."""
        step = self._epoch * int(self.params["steps"]) + batch
        if self._history is not None:
            self._note(step, self._history)
        self._plan.act(self._task, step, self._generation)

    def _note(self, step: int, history: Path) -> None:
        self.model.jax_state_sync()
        state = b"".join(np.ascontiguousarray(w).tobytes() for w in self.model.get_weights())
        record = {
            "task": self._task,
            "generation": self._generation,
            "step": step,
            "time": time.time(),
            "weights": hashlib.sha256(state).hexdigest()[:16],
        }
        history.mkdir(parents=True, exist_ok=True)
        with (history / f"{self._task.replace(':', '-')}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")


@dataclasses.dataclass(frozen=True)
class Record:
    """A step that a task has finished.

    Args:
        task: the task, such as `"worker:1"`.
        generation: the generation of the cluster.
        step: the step of the whole training, from 0.
        time: the time in seconds since the epoch.
        weights: a hash of all weights after the step.

    >>> Record("worker:1", generation=0, step=3, time=0.0, weights="99bb").step
    3
    """

    task: str
    generation: int
    step: int
    time: float
    weights: str


def read_history(directory: str | os.PathLike[str]) -> list[Record]:
    """Return the records of `FaultPlan.callback(history=directory)`, in the order of time.

    >>> import tempfile
    >>> read_history(tempfile.mkdtemp())
    []
    """
    records = []
    for path in sorted(Path(directory).glob("*.jsonl")):
        for line in path.read_text(errors="replace").splitlines():
            # The last line of a process that was killed may be incomplete.
            if line.endswith("}"):
                records.append(_record_of(line, path))
    return sorted(records, key=lambda r: r.time)


def _record_of(line: str, path: Path) -> Record:
    try:
        record = Record(**parse_json(line))
        if not is_number(record.time):
            raise TypeError("its time is no number")
    except MALFORMED as error:
        raise InvalidArgumentError(
            f"A line of a history must be written by a task. Received: {line[:200]!r} in {path} "
            f"({error}). Delete the directory before the program starts."
        ) from error
    return record


def check_history(records: Iterable[Record]) -> None:
    """Check that all tasks and generations computed the same weights, and that none skipped a step.

    Args:
        records: the result of `read_history`.

    Raises:
        DivergenceError: for the first step that differs; it names the tasks and their weights.

    >>> check_history([Record("worker:0", 0, 3, 0.0, "99bb"), Record("worker:1", 0, 3, 0.1, "99bb")])
    """
    first: dict[int, Record] = {}
    last: dict[tuple[str, int], int] = {}
    for record in records:
        known = first.setdefault(record.step, record)
        if known.weights != record.weights:
            raise DivergenceError(
                "Every task and generation must compute the same weights. Received: after step "
                f"{record.step} {known.weights} on {known.task}, generation {known.generation}, but "
                f"{record.weights} on {record.task}, generation {record.generation}."
            )
        before = last.get((record.task, record.generation))
        if before is not None and record.step != before + 1:
            raise DivergenceError(
                f"A task must not skip or repeat a step. Received: step {record.step} after {before} on "
                f"{record.task}, generation {record.generation}."
            )
        last[record.task, record.generation] = record.step
