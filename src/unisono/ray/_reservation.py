"""Ray's reservation for a launch: a placement group with an actor for each task, if the cluster has room.

Tests: tests/cluster/test_ray_cluster.py, tests/unit/ray/test_ray_placement.py.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from unisono._errors import ClusterError, InvalidArgumentError
from unisono._system._environ import process_environ
from unisono._system._packages import require_packages
from unisono.launcher._options import LaunchOptions

if TYPE_CHECKING:
    from unisono.standalone._remote_machines import ServerAccess
    from unisono.standalone._slots import Slots

#: Seconds for the actors to remove their files.
_STOP_SECONDS = 5.0
#: Amounts of Ray's resources, such as `{"CPU": 2, "GPU": 1}`.
Resources = Mapping[str, float]

#: Resources may be parts, as 0.1 CPUs: their sums are not exact.
_ROUNDING = 1e-6
PLACEMENTS = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


@dataclasses.dataclass(frozen=True)
class TaskResources:
    """The tasks of a training, and what each needs.

    Args:
        counts: how many tasks each job has, the chief's job first.

    >>> tasks = TaskResources({"worker": 2, "ps": 1}, {"worker": {"CPU": 2}, "ps": {"CPU": 1}})
    >>> [name for name, _ in tasks.each()], tasks.most_workers([{"CPU": 4.0}, {"CPU": 1.0}])
    (['worker-0', 'worker-1', 'ps-0'], 2)
    """

    counts: Mapping[str, int]
    needs: Mapping[str, Resources]

    def each(self) -> Iterator[tuple[str, Resources]]:
        """Return the name of each task's actor, and what it needs."""
        for job, count in self.counts.items():
            for index in range(count):
                yield f"{job}-{index}", self.needs[job]

    def most_workers(self, nodes: Sequence[Resources]) -> int:
        """Return for how many workers there is room at most, beside all other tasks.

        It is a bound: what the nodes have in all may be more than fits in single nodes.
        """
        need = self.needs["worker"]
        total = {name: sum(node.get(name, 0) for node in nodes) for node in nodes for name in node}
        for job, count in self.counts.items():
            if job != "worker":
                total = {k: v - count * self.needs[job].get(k, 0) for k, v in total.items()}
        whole = [_times(total, need), sum(_times(node, need) for node in nodes)]
        for job, count in self.counts.items():
            if job != "worker" and sum(_times(node, self.needs[job]) for node in nodes) < count:
                return -1
        return min(whole)

    def checked(self, nodes: Sequence[Resources], least: int) -> TaskResources:
        """Return the tasks that start: with fewer workers, where there is room for `least` at least."""
        most = self.most_workers(nodes)
        if most < least:
            wanted = ", ".join(
                f"{n} {job} with {resources_text(self.needs[job])}" for job, n in self.counts.items() if n
            )
            has = "; ".join(resources_text(node) for node in nodes) or "no nodes"
            room = "no room for the tasks that are no workers" if most < 0 else f"room for {most} workers"
            room += self._too_large(nodes)
            raise InvalidArgumentError(
                f"The cluster of Ray must have room for all tasks. Received: {wanted}; and a cluster of "
                f"{len(nodes)} nodes ({has}), with {room}. Ask for fewer tasks "
                "or for less of each, or add nodes."
            )
        return dataclasses.replace(self, counts={**self.counts, "worker": min(most, self.counts["worker"])})

    def _too_large(self, nodes: Sequence[Resources]) -> str:
        """Return the first task that needs more of a resource than any node has, for a message."""
        for name, need in self.each():
            for resource, amount in need.items():
                largest = max((node.get(resource, 0) for node in nodes), default=0)
                if largest + _ROUNDING < amount:
                    return f": {name} needs {amount:g} {resource}, and no node has more than {largest:g}"
        return ""


def _times(node: Resources, need: Resources) -> int:
    """Return how often a need fits."""
    return math.floor(min(max(0.0, node.get(name, 0)) / amount for name, amount in need.items()) + _ROUNDING)


def resources_text(resources: Resources) -> str:
    """Return resources for a message, without those that Ray adds to each node.

    >>> resources_text({"GPU": 1.0, "CPU": 4.0, "node:10.0.0.1": 1.0, "bundle_group_0_1f": 1e3})
    '4 CPU, 1 GPU'
    """
    hidden = ("node:", "accelerator_type:", "memory", "object_store_memory", "bundle_group_")
    own = {name: amount for name, amount in resources.items() if not name.startswith(hidden)}
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(own.items()))


def checked_resources(argument: str, resources: Resources | None) -> Resources:
    """Return the resources of a task, one CPU by default.

    >>> checked_resources("resources_per_worker", None)
    {'CPU': 1}
    """
    given = {"CPU": 1} if resources is None else dict(resources)
    bad = [a for a in given.values() if not isinstance(a, (int, float)) or not 0 <= a < math.inf]
    given = {name: amount for name, amount in given.items() if amount}
    if bad or not given:
        raise InvalidArgumentError(
            f"`{argument}` must be a dict from Ray's resources to amounts above 0. Received: {resources!r}. "
            f"Write `{argument}={{'CPU': 2, 'GPU': 1}}`."
        )
    return given


def actor_options(resources: Resources) -> dict[str, object]:
    """Return resources as Ray's actors take them.

    >>> actor_options({"CPU": 2, "GPU": 1, "disk": 5})
    {'num_cpus': 2, 'num_gpus': 1, 'resources': {'disk': 5}}
    """
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    own: dict[str, object] = {"num_cpus": 0}
    own |= {named[name]: amount for name, amount in resources.items() if name in named}
    if others := {name: amount for name, amount in resources.items() if name not in named}:
        own["resources"] = others
    return own


@dataclasses.dataclass(frozen=True)
class RayServers:
    """The servers of a launch, while their actors run.

    Args:
        elastic: the fewest and the most workers, as a launch on these servers needs it.
    """

    slots: Slots
    access: ServerAccess
    elastic: tuple[int, int] | None

    def call(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        options: LaunchOptions,
        timeout: float | None,
        **run: float,
    ) -> list[Any]:
        """Call a function in all tasks, as `call_on_cluster` does; return the values of those that train."""
        from unisono.standalone._client import call_on_cluster

        return call_on_cluster(
            self.slots,
            fn,
            args,
            devices_per_worker=options.devices_per_worker,
            max_restarts=options.max_restarts,
            elastic=self.elastic,
            timeout=timeout,
            access=self.access,
            **run,
        )


@dataclasses.dataclass(frozen=True)
class Reservation:
    """A launch's needs on a cluster of Ray.

    Args:
        options: of the launch; its jobs have an actor for each task.
        worker: what Ray reserves for a worker, the chief and the evaluator.
        ps: what Ray reserves for a parameter server.
        placement: of the group, one of `PLACEMENTS`.
        runtime_env: Ray's description of the actors' environment.
        start_timeout: seconds until Ray must have placed and started all actors.
        variables: of the environment of the tasks, besides the nodes' own and `runtime_env`.

    Raises:
        InvalidArgumentError: when `placement` or `runtime_env` cannot be used.
    """

    options: LaunchOptions
    worker: Resources
    ps: Resources
    placement: str = "PACK"
    runtime_env: Mapping[str, Any] | None = None
    start_timeout: float = 60.0
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.placement not in PLACEMENTS:
            raise InvalidArgumentError(
                f"`placement` must be one of {', '.join(PLACEMENTS)}. Received: placement={self.placement!r}."
            )
        if self.runtime_env is not None:
            _check_runtime_env(self.runtime_env)

    def _tasks(self) -> TaskResources:
        options = self.options
        counts = {
            "chief": int(options.chief),
            "worker": options.workers,
            "ps": options.ps,
            "evaluator": int(options.evaluator),
        }
        return TaskResources(counts, {**dict.fromkeys(counts, self.worker), "ps": self.ps})

    @contextmanager
    def servers(self, job: str, address: str = "auto") -> Iterator[RayServers]:
        """Start a server for each task on the cluster with which this process is connected; end them.

        Args:
            job: the name by which `unisono watch` finds them.
            address: of the cluster, for those who look at the job.

        Raises:
            InvalidArgumentError: when the cluster has no room for the tasks.
            ClusterError: when Ray has not started all actors in time.
        """
        import ray

        from unisono.ray._actors import access_to
        from unisono.rpc._transport._keys import new_secret
        from unisono.standalone._slots import Slots

        options = self.options
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        tasks = self._tasks().checked(nodes, options.worker_range[0])
        workers, key = tasks.counts["worker"], new_secret()
        elastic = (options.elastic[0], workers) if options.elastic else None
        if options.ps and elastic is None:
            # A task of parameter servers would start again alone, at its address: an actor has another one
            # on another node. So all tasks do.
            elastic = (workers, workers)
        slots = Slots({job: tuple(f"{job}-{i}" for i in range(n)) for job, n in tasks.counts.items() if n})
        # The clock: the newest of several jobs of a name is found by it.
        launch = f"{job}/{time.time_ns():020d}"
        with self._actors(tasks, key, launch) as actors:
            places = {"kind": "ray", "launch": launch, "address": address}
            yield RayServers(slots, access_to(actors, key, places), elastic)

    @contextmanager
    def _actors(self, tasks: TaskResources, key: str, launch: str) -> Iterator[dict[str, tuple[Any, str]]]:
        """Start a server for each task; the actor and where it listens by name."""
        import ray

        deadline = time.monotonic() + self.start_timeout
        group = ray.util.placement_group([dict(need) for _, need in tasks.each()], strategy=self.placement)
        actors: dict[str, Any] = {}
        try:
            if not group.wait(self.start_timeout):
                free = resources_text(ray.available_resources())
                raise ClusterError(
                    f"Ray must have room for all tasks within {self.start_timeout:g} s. Received: a "
                    f"placement group that waits; free are {free}. End other programs "
                    "on this cluster, add nodes, pass fewer `workers`, or a longer `start_timeout`."
                )
            for index, (name, need) in enumerate(tasks.each()):
                actors[name] = self._actor(group, index, need, key, f"{launch}/{name}")
            yield _started(actors, deadline, self.start_timeout)
        finally:
            stopped = [actor.stop.remote() for actor in actors.values()]
            if stopped:
                ray.wait(stopped, num_returns=len(stopped), timeout=_STOP_SECONDS)
            for actor in actors.values():
                ray.kill(actor)
            ray.util.remove_placement_group(group)

    def _actor(self, group: Any, index: int, need: Resources, key: str, name: str) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        from unisono.ray._actors import NAMESPACE, ServerActor

        # What Ray reserves is no limit: the size of XLA's thread pool is what keeps tasks of one node apart.
        # With fewer than two threads per device, processes with two devices each hang.
        least = 2 * (self.options.devices_per_worker or 1)
        threads = max(least, int(need["CPU"])) if need.get("CPU", 0) >= 1 else None
        options: dict[str, Any] = actor_options(need)
        if self.runtime_env is not None:
            options["runtime_env"] = dict(self.runtime_env)
        return (
            ray.remote(ServerActor)
            .options(
                **options,
                name=name,
                namespace=NAMESPACE,
                max_restarts=-1,
                max_task_retries=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=index
                ),
            )
            .remote(
                key,
                int(bool(self.options.max_restarts or self.options.elastic)),
                threads,
                dict(self.variables),
            )
        )


def _check_runtime_env(given: Mapping[str, Any]) -> None:
    """Refuse what Ray would not apply: it ignores a field that it does not know."""
    require_packages("runtime_env", "ray", "ray")
    from ray.runtime_env import RuntimeEnv

    known = set(inspect.signature(RuntimeEnv).parameters) | RuntimeEnv.known_fields
    public = sorted(name for name in known if name.isidentifier() and not name.startswith(("_", "kwargs")))
    # A plugin of Ray brings fields of its own.
    unknown = [] if process_environ().get("RAY_RUNTIME_ENV_PLUGINS") else [n for n in given if n not in known]
    if unknown:
        alike = difflib.get_close_matches(str(unknown[0]), public, n=1)
        write = f"Write {alike[0]!r}." if alike else f"Write one of {', '.join(public)}."
        raise InvalidArgumentError(
            f"`runtime_env` must have fields that Ray knows. Received: {unknown[0]!r}. {write}"
        )
    try:
        RuntimeEnv(**given)
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"`runtime_env` must be as Ray describes it. Received: {error}. Write such as "
            "`runtime_env={'env_vars': {'NAME': 'value'}}`."
        ) from error


def _started(actors: Mapping[str, Any], deadline: float, seconds: float) -> dict[str, tuple[Any, str]]:
    """Wait until all actors listen; return each with its address."""
    import ray

    names = {actor.address.remote(): name for name, actor in actors.items()}
    ready, missing = ray.wait(
        list(names), num_returns=len(names), timeout=max(0.0, deadline - time.monotonic())
    )
    by_name = {}
    for answer in ready:
        try:
            by_name[names[answer]] = actors[names[answer]], ray.get(answer)
        except ray.exceptions.RayError as error:
            raise ClusterError(
                "Every node of Ray must be able to start an actor that imports Unisono. Received: the actor "
                f"{names[answer]} has ended: {error}. Install `unisono[ray]` in the same version on all "
                "nodes, or name it in `runtime_env`."
            ) from error
    if missing:
        raise ClusterError(
            f"Ray must start all actors within {seconds:g} s. Received: nothing from "
            f"{', '.join(sorted(names[each] for each in missing))}. See their logs in Ray, or pass a longer "
            "`start_timeout`."
        )
    return by_name
