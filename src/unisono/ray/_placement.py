"""Which resources the tasks of a training need, and whether a cluster of Ray has them; pure.

Tests: tests/unit/ray/test_ray_placement.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from unisono._errors import InvalidArgumentError

#: Amounts of Ray's resources, such as `{"CPU": 2, "GPU": 1}`.
Resources = Mapping[str, float]

#: Resources may be parts, as 0.1 CPUs: their sums are not exact.
_ROUNDING = 1e-6


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
