"""Which task of a cluster does what under a `ParameterServerStrategy`; pure.

Tests: tests/unit/strategies/test_roles.py.
"""

from __future__ import annotations

import dataclasses

from unisono._errors import InvalidArgumentError
from unisono.cluster_resolver._spec import ClusterSpec, Task

_EXAMPLE = (
    "Write TF_CONFIG as {'cluster': {'chief': ['a:2222'], 'worker': ['b:2222', 'c:2222'], 'ps': ['d:2222']}, "
    "'task': {'type': 'chief', 'index': 0}}, or start the program with `unisono launch -n 2 --ps 1 --chief`."
)


#: A chief beside the cluster.
_BESIDE = Task("chief", 0)


@dataclasses.dataclass(frozen=True)
class Roles:
    """The tasks of a cluster with parameter servers, as one of them sees it.

    Args:
        chief: the one that runs the user's program. In a cluster without a job `chief` it is worker 0, or a
            program beside the cluster, which has no address in it: as in TensorFlow's tutorial.
        servers: those that hold the variables.

    >>> spec = ClusterSpec({"worker": ["a:1", "b:1"], "ps": ["c:1"]})
    >>> roles = roles_of(spec, Task("worker", 0))
    >>> roles.is_chief, roles.computes, [str(t) for t in roles.remote_workers]
    (True, True, ['worker:1'])
    """

    task: Task
    chief: Task
    workers: tuple[Task, ...]
    servers: tuple[Task, ...]
    addresses: dict[Task, str]
    spec: ClusterSpec

    @property
    def is_chief(self) -> bool:
        """Whether this task runs the user's program."""
        return self.task == self.chief

    @property
    def computes(self) -> bool:
        """Whether this task is a worker; without a job `chief`, worker 0 is the chief and computes, too."""
        return self.task in self.workers

    @property
    def remote_workers(self) -> tuple[Task, ...]:
        """The workers in other processes."""
        return tuple(task for task in self.workers if task != self.task)

    @property
    def accepted(self) -> tuple[Task, ...]:
        """As whom a client may command this task."""
        return (self.chief,) if "chief" in self.spec else (_BESIDE, self.workers[0])

    @property
    def is_evaluator(self) -> bool:
        """Whether this task evaluates beside the job, in which it takes no part."""
        return self.task.type == "evaluator"


def roles_of(spec: ClusterSpec, task: Task | None, serves: bool = False) -> Roles:
    """Return who does what in a cluster.

    Args:
        task: this process; None for a chief beside a cluster that has no job `chief`.
        serves: whether the program says that this task serves, also as worker 0.

    Raises:
        InvalidArgumentError: when the cluster cannot train with parameter servers, or has no such task.
    """
    for job, what in (("ps", "holds the variables"), ("worker", "computes")):
        if job not in spec:
            raise InvalidArgumentError(
                f"A `ParameterServerStrategy` needs at least one task of the job {job!r}, which {what}. "
                f"Received: a cluster with {spec.as_dict()}. {_EXAMPLE}"
            )
    if "chief" in spec and spec.num_tasks("chief") > 1:
        raise InvalidArgumentError(
            f"A cluster must have at most one chief. Received: {spec.num_tasks('chief')}. {_EXAMPLE}"
        )
    workers = tuple(Task("worker", i) for i in spec.task_indices("worker"))
    servers = tuple(Task("ps", i) for i in spec.task_indices("ps"))
    if "chief" in spec:
        chief = Task("chief", spec.task_indices("chief")[0])
    else:
        chief = _BESIDE if task is None or serves else workers[0]
    task = task or (None if "chief" in spec else chief)
    every = dict.fromkeys([chief, *workers, *servers])
    if task is None or (task not in every and task.type != "evaluator"):
        raise InvalidArgumentError(
            "A process must know which task of the cluster it is. "
            f"Received: {'no task' if task is None else task}, and the tasks {', '.join(map(str, every))}. "
            f"{_EXAMPLE}"
        )
    addresses = {t: spec.task_address(t.type, t.index) for t in every if t.type in spec}
    return Roles(task, chief, workers, servers, addresses, spec)
