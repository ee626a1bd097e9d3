"""What steps cost: bytes pulled and pushed, seconds, and how many updates of others an update has missed.

A worker counts while it sends and receives, and says it in the reply to each step; the chief adds it up. No
message is sent for it.

Tests: tests/unit/parameter_server/test_traffic.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from unisono._system._task_reports import process_events
from unisono.rpc._frames import Frame
from unisono.rpc._ops import Op

_MB = 1e6
#: The parts of a worker's step.
PARTS = ("data", "pull", "compute", "push")


@dataclasses.dataclass
class StepCosts:
    """What some steps have cost.

    Args:
        pulled: bytes of values that came from servers.
        pushed: bytes that went to them.
        updates: pushes that were applied, one for each server and step.
        missed: by how many pushes of others these were preceded, since their step had pulled; in sum.
        most: the same of one push, at most.
        data: seconds in which the worker waited for batches of its datasets.
        pull: seconds in which it waited for values. A pull that travels with a push costs less.
        compute: seconds in which it computed.
        push: seconds from the moment when its pushes went off until all servers had them; it computes the
            next step meanwhile.
    """

    pulled: int = 0
    pushed: int = 0
    updates: int = 0
    missed: int = 0
    most: int = 0
    steps: int = 0
    data: float = 0.0
    pull: float = 0.0
    compute: float = 0.0
    push: float = 0.0

    def add(self, others: Iterable[float]) -> None:
        """Add what other steps have cost.

        >>> costs = StepCosts(pulled=10, most=3)
        >>> costs.add([5, 0, 1, 2, 2, 1, 0.0, 0.5, 0.25, 0.0])
        >>> costs.pulled, costs.missed, costs.most, costs.steps, costs.pull
        (15, 2, 3, 1, 0.5)
        """
        for name, other in zip(vars(self), others, strict=True):
            own = getattr(self, name)
            setattr(self, name, max(own, other) if name == "most" else own + other)

    @property
    def numbers(self) -> dict[str, float]:
        """The costs as they are shown: means, a maximum, and megabytes."""
        return {
            "staleness": self.missed / self.updates if self.updates else 0.0,
            "staleness_max": float(self.most),
            "pulled_mb": self.pulled / _MB,
            "pushed_mb": self.pushed / _MB,
            **{f"{name}_ms": 1000 * getattr(self, name) / max(1, self.steps) for name in PARTS},
        }


class Traffic:
    """Counts the requests of one client; safe to use from several threads.

    A client's steps run one after the other: what a step pushes is computed from what was pulled last.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._costs = StepCosts()
        #: By server: how many pushes it had applied when values came from it last.
        self._counts: dict[int, int] = {}

    def sent(self, server: int, op: Op, arrays: Sequence[Any]) -> Callable[[Future[Frame]], None]:
        """Count a request; return what counts its answer."""
        with self._lock:
            if op is Op.PUSH:
                self._costs.pushed += sum(array.nbytes for array in arrays)
            return functools.partial(self._answered, server, op, self._counts.get(server))

    @contextlib.contextmanager
    def spending(self, part: str) -> Iterator[None]:
        """Count the seconds of a block, also where it raises."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.spent(part, time.perf_counter() - began)

    def spent(self, part: str, seconds: float) -> None:
        """Count seconds of a part."""
        with self._lock:
            setattr(self._costs, part, getattr(self._costs, part) + seconds)

    def take(self) -> list[float]:
        """Return the costs of one step, and begin to count for the next."""
        with self._lock:
            costs, self._costs = self._costs, StepCosts()
        costs.steps = 1
        # Not `astuple`, which copies deeply: this is for each step.
        return list(vars(costs).values())

    def _answered(self, server: int, op: Op, before: int | None, sent: Future[Frame]) -> None:
        if sent.exception() is not None:
            return
        answer = sent.result()
        meta = answer.meta
        with self._lock:
            self._costs.pulled += sum(array.nbytes for array in answer.arrays)
            if op is Op.PUSH and meta.get("applied") and before is not None:
                # Not negative, where the server was started again.
                missed = max(0, meta["count"] - before - 1)
                self._costs.updates += 1
                self._costs.missed += missed
                self._costs.most = max(self._costs.most, missed)
            values = meta if op is Op.PULL else meta.get("pulled")
            if values is not None and "count" in values:
                self._counts[server] = values["count"]


class StepTally:
    """What the steps of workers have cost, as the chief adds it up; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: dict[int, StepCosts] = {}

    def add(self, worker: int, cost: Sequence[float]) -> None:
        """Add a step."""
        if (events := process_events()).is_read:
            events.stepped()
        with self._lock:
            self._workers.setdefault(worker, StepCosts()).add(cost)

    def take(self) -> dict[int, StepCosts]:
        """Return the costs by worker, and begin again."""
        with self._lock:
            taken, self._workers = self._workers, {}
        return dict(sorted(taken.items()))
