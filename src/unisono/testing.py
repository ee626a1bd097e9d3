"""For tests of programs that must survive: planned faults, and a history that shows what they did.

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

from unisono._errors import InvalidArgumentError, UnisonoError
from unisono.cluster_resolver._base import TFConfigClusterResolver, process_environ


class InjectedError(UnisonoError):
    """The exception that `FaultPlan.fail` raises."""


class DivergenceError(UnisonoError, AssertionError):
    """A history in which two processes, or two generations, computed different weights at one step."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
        kind: `"kill"` (SIGKILL), `"stop"` (SIGSTOP) or `"fail"` (an exception).
        task: such as `"worker:1"`.
        step: after which step of the whole training, from 0.
        generation: in which generation of the cluster.
    """

    kind: str
    task: str
    step: int
    generation: int = 0


@dataclasses.dataclass(frozen=True)
class FaultPlan:
    """What goes wrong, where and when; the same plan on every task.

    Args:
        faults: in any order.
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
        if not job or not index.isdigit() or step < 0 or generation < 0:
            raise InvalidArgumentError(
                "A fault needs a task such as 'worker:1', a step and a generation of 0 or more. "
                f"Received: task={task!r}, step={step}, generation={generation}."
            )
        return FaultPlan((*self.faults, Fault(kind, task, step, generation)))

    @classmethod
    def at_random(cls, seed: int, tasks: Sequence[str], steps: int, faults: int = 2) -> FaultPlan:
        """Return a plan of random faults, one in each generation.

        Args:
            seed: decides the plan.
            tasks: that may be hit.
            steps: of the whole training.
            faults: how many.

        >>> FaultPlan.at_random(1, ["worker:0", "worker:1"], 30) == FaultPlan.at_random(
        ...     1, ["worker:0", "worker:1"], 30)
        True
        """
        draw = random.Random(seed)
        plan, first = cls(), 1
        for generation in range(faults):
            # A generation begins at the last backup, so a later fault comes at a later step.
            step = draw.randrange(first, max(first + 1, steps * (generation + 1) // faults))
            plan = plan._with(draw.choice(["kill", "fail"]), draw.choice(list(tasks)), step, generation)
            first = step + 1
        return plan

    def to_json(self) -> str:
        """The plan as text, for an environment variable or a file."""
        return json.dumps([dataclasses.asdict(f) for f in self.faults])

    @classmethod
    def from_json(cls, text: str) -> FaultPlan:
        """Inverse of `to_json`."""
        return cls(tuple(Fault(**f) for f in json.loads(text)))

    def act(self, task: str, step: int, generation: int) -> None:
        """Do what the plan says for a task after a step.

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
        """A callback for `fit` that notes each step, and then does what the plan says.

        Args:
            history: a directory for the history, see `read_history`; None for none.
        """
        return FaultCallback(self, None if history is None else Path(history))


class FaultCallback(keras.callbacks.Callback):
    """Notes each step of a task, and carries out a plan.

    Args:
        plan: what goes wrong.
        history: a directory for a file of each task; None for none.
    """

    def __init__(self, plan: FaultPlan, history: Path | None) -> None:
        super().__init__()
        environ = process_environ()
        task = TFConfigClusterResolver(environ=environ).task
        self._task = "worker:0" if task is None else str(task)
        self._generation = int(environ.get("UNISONO_GENERATION", "0") or 0)
        self._plan, self._history, self._epoch = plan, history, 0

    def get_state(self) -> dict[str, Any]:
        """The epoch; the rest belongs to the process."""
        return {"epoch": self._epoch}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on in an epoch."""
        self._epoch = state["epoch"]

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Count epochs."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note the step, then act."""
        step = self._epoch * int(self.params["steps"]) + batch
        if self._history is not None:
            self._note(step)
        self._plan.act(self._task, step, self._generation)

    def _note(self, step: int) -> None:
        self.model.jax_state_sync()
        state = b"".join(np.ascontiguousarray(w).tobytes() for w in self.model.get_weights())
        record = {
            "task": self._task,
            "generation": self._generation,
            "step": step,
            "time": time.time(),
            "weights": hashlib.sha256(state).hexdigest()[:16],
        }
        if self._history is None:
            return
        self._history.mkdir(parents=True, exist_ok=True)
        with (self._history / f"{self._task.replace(':', '-')}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")


@dataclasses.dataclass(frozen=True)
class Record:
    """A step that a task has finished.

    Args:
        task: such as `"worker:1"`.
        generation: of the cluster.
        step: of the whole training, from 0.
        time: seconds since 1970.
        weights: a hash of all weights after the step.
    """

    task: str
    generation: int
    step: int
    time: float
    weights: str


def read_history(directory: str | os.PathLike[str]) -> list[Record]:
    """Read what `FaultPlan.callback(history=directory)` noted, in the order of time."""
    records = []
    for path in sorted(Path(directory).glob("*.jsonl")):
        for line in path.read_text().splitlines():
            # The last line of a process that was killed may be half written.
            if line.endswith("}"):
                records.append(Record(**json.loads(line)))
    return sorted(records, key=lambda r: r.time)


def check_history(records: Iterable[Record]) -> None:
    """Raise when weights differ anywhere at one step, or a generation left steps out.

    Args:
        records: from `read_history`.

    Raises:
        DivergenceError: it names the first step, and who computed what.
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
                f"A task must do one step after the other. Received: step {record.step} after {before} on "
                f"{record.task}, generation {record.generation}."
            )
        last[record.task, record.generation] = record.step
