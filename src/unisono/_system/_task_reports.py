"""Reports of this process to the launcher that started it: none where no launcher asked for any.

A launcher puts names of files into the environment of a task; their writer is loaded where a name is there.

Tests: tests/unit/cluster/test_task_events.py, tests/unit/cluster/test_heartbeat_file.py.
"""

from __future__ import annotations

import contextlib
import functools
from typing import cast

from unisono._features import load
from unisono._system._environ import process_environ


class TaskEvents:
    """The events of a process: this class keeps none of them."""

    #: The shares of a sampled step in which devices exchanged, and in which they computed.
    exchange: float | None = None
    compute: float | None = None
    is_read = False  # by the launcher

    def begin_at(self, step: int) -> None:
        """Note how many steps a run has made that this process resumes."""

    def stepped(
        self, steps: int = 1, data: float | None = None, pulling: float | None = None, computing: float = 0.0
    ) -> None:
        """Count steps, and seconds: of waiting for batches or for parameter servers, and of computing."""

    def worked(self, work: object, logs: object, steps: int) -> None:
        """Add the work (`StepWork`) and the logs of steps that are counted next."""

    def note(self, event: str, **facts: object) -> None:
        """Note something that has happened, with facts that JSON can hold."""

    def is_new(self, text: str) -> bool:
        """Return whether no process of this task has printed a text before."""
        return True

    def span(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Note when a block runs, also where it raises."""
        return contextlib.nullcontext()


class Heartbeat:
    """Signs of life for a supervisor: this class gives none."""

    is_read = False  # by a supervisor

    def beat(self) -> None:
        """Count a step, and show it when that is due."""


@functools.cache
def process_events() -> TaskEvents:
    """Return the events of this process; they begin where the launcher has given it a file for them."""
    if not process_environ().get("UNISONO_EVENTS"):
        return TaskEvents()
    return cast(TaskEvents, load("events of a task").from_environ())


def heartbeat_of_environ() -> Heartbeat:
    """Return the heartbeat that a supervisor's variables describe."""
    if not any(map(process_environ().get, ("UNISONO_PROGRESS", "UNISONO_FENCE"))):
        return Heartbeat()
    return cast(Heartbeat, load("heartbeat of a task").from_environ())


@functools.cache
def process_heartbeat() -> Heartbeat:
    """Return the heartbeat of this process, which counts the steps of all its strategies."""
    return heartbeat_of_environ()
