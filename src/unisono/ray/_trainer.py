"""`unisono.ray.Trainer`: a function in a task on each actor of a placement group of Ray.

Each actor is a standalone server, and the program that calls `fit` is their client: what a failure means,
restarts, logs and leases are as with `unisono launch --cluster`. Ray places the actors, starts a lost one
again on another node, and ends them with the program.

Tests: tests/cluster/test_ray_cluster.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from unisono._errors import InvalidTypeError
from unisono._system._packages import require_packages
from unisono.launcher._options import LaunchOptions
from unisono.ray._reservation import Reservation, Resources, checked_resources


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Calls a function in tasks on a cluster of Ray, each with its TF_CONFIG; restarts them after failures.

    The actors form one placement group. Each runs its task as a process of its own, which is no worker of
    Ray: `MultiWorkerMirroredStrategy()` and `ParameterServerStrategy()` in the function find the others.
    Where a node is lost, Ray starts its actor on another one, and all tasks start again from their last
    backup (`callbacks.BackupAndRestore` in a directory that all nodes share).

    Args:
        fn: the function; a notebook may define it.
        workers: the number of workers, 2 by default; with `elastic` its greater number.
        args: the arguments of the function, the same in each task.
        ps: the number of parameter servers.
        chief: whether there is a task of the job `chief`, besides the workers.
        evaluator: whether there is an evaluator.
        resources_per_worker: what Ray reserves for a worker, the chief and the evaluator, such as
            `{"CPU": 4, "GPU": 1}`; one CPU by default.
        resources_per_ps: what Ray reserves for a parameter server; one CPU by default.
        devices_per_worker: the number of virtual CPU devices of each task; None for the function's choice.
        max_restarts: restarts after failures within ten minutes. None means none after an exception of the
            function, and ten after the loss of an actor.
        elastic: the fewest and the most workers. It starts with as many as there is room for, and goes on
            with fewer after the loss of a node.
        placement: of the group: `"PACK"`, `"SPREAD"`, `"STRICT_PACK"` or `"STRICT_SPREAD"`.
        runtime_env: Ray's description of the actors' environment, which their tasks have, too.
        start_timeout: seconds until Ray must have placed and started all actors.
        restart_timeout: seconds until Ray must have started a lost actor again.
        timeout: seconds until all tasks are killed; None for no limit.

    Raises:
        InvalidTypeError: when `fn` is not callable.
        InvalidArgumentError: when a number, a resource or `placement` cannot be used.

    >>> Trainer(print, workers=4, resources_per_worker={"GPU": 1}).workers
    4
    """

    fn: Callable[..., Any]
    workers: int | None = None
    args: Sequence[Any] = ()
    _: dataclasses.KW_ONLY
    ps: int = 0
    chief: bool = False
    evaluator: bool = False
    resources_per_worker: Resources | None = None
    resources_per_ps: Resources | None = None
    devices_per_worker: int | None = None
    max_restarts: int | None = None
    elastic: tuple[int, int] | None = None
    placement: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] = "PACK"
    runtime_env: Mapping[str, Any] | None = None
    start_timeout: float = 60.0
    restart_timeout: float = 300.0
    timeout: float | None = None

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise InvalidTypeError(
                f"`fn` must be a function. Received: fn={self.fn!r}. Write "
                "`unisono.ray.Trainer(train, workers=4)`."
            )
        self._reservation()

    def _reservation(self) -> Reservation:
        """Return Ray's reservation; numbers follow the rules of every launch."""
        options = LaunchOptions(
            workers=self._most,
            ps=self.ps,
            chief=self.chief,
            evaluator=self.evaluator,
            devices_per_worker=self.devices_per_worker,
            max_restarts=self.max_restarts,
            elastic=self.elastic,
        )
        return Reservation(
            options,
            checked_resources("resources_per_worker", self.resources_per_worker),
            checked_resources("resources_per_ps", self.resources_per_ps),
            self.placement,
            self.runtime_env,
            self.start_timeout,
        )

    @property
    def _most(self) -> int:
        if self.workers is None:
            return self.elastic[1] if self.elastic else 2
        return self.workers

    def fit(self) -> Any:
        """Place the actors, run the tasks until they return, and return the chief's value.

        Each line that a task prints is shown here, after the task's name. It connects with Ray by
        `ray.init()` unless the program has done that.

        Returns:
            What the function has returned in the chief, or in worker 0.

        Raises:
            MissingPackageError: without Ray.
            InvalidArgumentError: when the cluster has no room for the tasks, or `fn` cannot be pickled.
            ClusterError: when Ray has not started all actors in time, or a task died without an exception.
            Exception: the exception of the function in the task that failed first.
        """
        require_packages("unisono.ray.Trainer", "ray", "ray")
        import ray

        if not ray.is_initialized():
            ray.init()
        reservation = self._reservation()
        with reservation.servers(getattr(self.fn, "__name__", type(self.fn).__name__)) as servers:
            return servers.call(
                self.fn, self.args, reservation.options, self.timeout, server_timeout=self.restart_timeout
            )[0]
