"""Which server runs which task; pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono.cluster_resolver._spec import ClusterSpec, Task, split_address, with_port
from unisono.launcher._options import LaunchOptions

_EXAMPLE = '`cluster={"worker": ["host1:2222", "host2:2222"]}`'
_ORDER = ("chief", "worker", "ps", "evaluator")


@dataclasses.dataclass(frozen=True)
class Slots:
    """The servers of a cluster: for each job the addresses on which its tasks may run, in their order.

    An address may occur several times: that server runs several tasks.

    >>> slots = Slots.of({"worker": ["a:1", "b:1"], "evaluator": ["a:1"]})
    >>> slots.addresses, slots.count("worker")
    (('a:1', 'b:1'), 2)
    """

    by_job: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, cluster: Mapping[str, Any] | ClusterSpec | Slots) -> Slots:
        """Return the servers that a user names."""
        if isinstance(cluster, Slots):
            return cluster
        if isinstance(cluster, ClusterSpec):
            cluster = cluster.as_dict()
        if not isinstance(cluster, Mapping):
            raise InvalidTypeError(
                f"A cluster must be a dict from each job to the addresses of its servers. Received: "
                f"{type(cluster).__name__}. Write {_EXAMPLE}."
            )
        addresses = {}
        for job in sorted(cluster, key=lambda name: _ORDER.index(name) if name in _ORDER else 9):
            every = [cluster[job]] if isinstance(cluster[job], str) else list(cluster[job])
            # Names and addresses follow the rules of every cluster; each for itself, as an address
            # may occur several times.
            addresses[job] = tuple(str(ClusterSpec({job: [each]}).task_address(job, 0)) for each in every)
        slots = cls({job: every for job, every in addresses.items() if every})
        if not {"chief", "worker"} & set(slots.by_job):
            raise InvalidArgumentError(
                f"A cluster must have the job 'chief' or 'worker'. Received: {dict(cluster)}. Write "
                f"{_EXAMPLE}."
            )
        for job in ("chief", "evaluator"):
            if slots.count(job) > 1:
                raise InvalidArgumentError(
                    f"A cluster must have one {job} at most. Received: {slots.count(job)}."
                )
        return slots

    @property
    def addresses(self) -> tuple[str, ...]:
        """All servers, each once, in the order in which every client takes them."""
        return tuple(sorted({each for every in self.by_job.values() for each in every}))

    def count(self, job: str) -> int:
        """Return how many tasks a job may have."""
        return len(self.by_job.get(job, ()))

    def options(self, **others: Any) -> LaunchOptions:
        """Return the options of a launch with a task for each slot."""
        return LaunchOptions(
            workers=self.count("worker"),
            ps=self.count("ps"),
            chief=self.count("chief") > 0,
            evaluator=self.count("evaluator") > 0,
            **others,
        )

    def room(self, live: Collection[str]) -> int:
        """Return how many workers the servers have room for that are there."""
        return sum(each in live for each in self.by_job.get("worker", ()))

    def missing(self, workers: int, live: Collection[str]) -> tuple[str, ...]:
        """Return the servers that must come back before a generation with so many workers can start."""
        others = [each for job, every in self.by_job.items() if job != "worker" for each in every]
        away = [each for each in others if each not in live]
        if self.room(live) < workers:
            away += [each for each in self.by_job["worker"] if each not in live]
        return tuple(sorted(set(away)))

    def placed(self, tasks: Sequence[Task], live: Collection[str]) -> dict[Task, str]:
        """Return the server of each task: workers take the first ones that are there."""
        workers = [each for each in self.by_job.get("worker", ()) if each in live]
        return {t: workers[t.index] if t.type == "worker" else self.by_job[t.type][t.index] for t in tasks}


def parse_cluster(text: str) -> dict[str, list[str]]:
    """Return a cluster from the text of a command line.

    >>> parse_cluster("a:2222,b:2222,ps=c:2222")
    {'worker': ['a:2222', 'b:2222'], 'ps': ['c:2222']}
    """
    cluster: dict[str, list[str]] = {}
    for item in filter(None, (each.strip() for each in text.split(","))):
        job, equals, address = item.partition("=")
        cluster.setdefault(job if equals else "worker", []).append(address if equals else item)
    if not cluster or any(":" not in address for servers in cluster.values() for address in servers):
        raise InvalidArgumentError(
            f"`--cluster` must name servers, each with its port. Received: {text!r}. Write `--cluster "
            "host1:2222,host2:2222`."
        )
    return cluster


def task_address(server: str, port: int) -> str:
    """Return the address of a task: a port of its own on the host of its server.

    >>> task_address("node1:2222", 10001), task_address("[::1]:2222", 10001)
    ('node1:10001', '[::1]:10001')
    """
    return with_port(split_address(server)[0], port)
