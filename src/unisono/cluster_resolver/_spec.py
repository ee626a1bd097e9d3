"""Who is in a cluster, and TensorFlow's rules about it: frozen records and pure functions.

The rules of `tensorflow/python/distribute/multi_worker_util.py`: the chief is the `chief`
job's task or worker 0, the chief comes before the workers, the evaluator is a cluster of its own.
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from unisono._checks import is_number, whole_number
from unisono._errors import InvalidArgumentError, InvalidTypeError

#: The jobs that tf.distribute knows.
JOBS = ("chief", "worker", "ps", "evaluator")

_JOB_NAME = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)
_HOST_NAME = re.compile(r"\w([\w.-]*[\w.])?", re.ASCII)
# No index or port is longer, and `int` itself rejects more than 4300 digits.
_DIGITS = re.compile(r"[0-9]{1,9}")
_EXAMPLE = "`ClusterSpec({'worker': ['10.0.0.1:2222', '10.0.0.2:2222']})`"

_Jobs = dict[str, dict[int, str]]


@dataclasses.dataclass(frozen=True, init=False, repr=False, eq=False)
class ClusterSpec:
    """The addresses of all tasks of a cluster, as `tf.train.ClusterSpec`.

    A job without tasks is left out.

    Args:
        cluster: job name -> list of `"host:port"`, or a sparse dict task index -> `"host:port"`.
            IPv6 addresses are written `"[::1]:2222"`. Another `ClusterSpec` is copied.

    Raises:
        InvalidTypeError: when `cluster` is not a dict.
        InvalidArgumentError: when a job is not chief, worker, ps or evaluator, when a task's index or
            an address cannot be used, or when two tasks have one address.

    >>> spec = ClusterSpec({"chief": ["a:2222"], "worker": ["b:2222", "c:2222"]})
    >>> spec.jobs, spec.num_tasks("worker"), spec.task_address("worker", 1)
    (['chief', 'worker'], 2, 'c:2222')
    >>> ClusterSpec({"worker": {3: "d:2222"}}).as_dict()
    {'worker': {3: 'd:2222'}}
    """

    _jobs: tuple[tuple[str, tuple[tuple[int, str], ...]], ...]

    def __init__(self, cluster: Mapping[str, Any] | ClusterSpec) -> None:
        if isinstance(cluster, ClusterSpec):
            cluster = cluster.as_dict()
        if not isinstance(cluster, Mapping):
            raise InvalidTypeError(
                "A cluster must be a dict from each job to its addresses. "
                f"Received: {type(cluster).__name__}. Write {_EXAMPLE}."
            )
        jobs, problems = read_jobs(cluster)
        if problems:
            raise InvalidArgumentError(
                "A cluster must map each job to the different 'host:port' of its tasks, but "
                f"{'; '.join(problems)}. Received: {shortened(dict(cluster))}. Write {_EXAMPLE}."
            )
        # By index, whatever the order in the dict: `process_id` counts positions.
        frozen = tuple((job, tuple(sorted(tasks.items()))) for job, tasks in jobs.items())
        object.__setattr__(self, "_jobs", frozen)

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs, in the order given."""
        return [job for job, _ in self._jobs]

    def as_dict(self) -> dict[str, Any]:
        """Return job -> list of addresses, or task index -> address where indices are missing."""
        every = {job: dict(tasks) for job, tasks in self._jobs}
        return {job: list(t.values()) if _is_dense(t) else t for job, t in every.items()}

    def num_tasks(self, job_name: str) -> int:
        """Return how many tasks a job has."""
        return len(self._tasks(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the indices of a job's tasks, ascending."""
        return list(self._tasks(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return a task's `"host:port"`.

        Raises:
            InvalidArgumentError: when the cluster has no such job or task.
        """
        tasks = self._tasks(job_name)
        if task_index not in tasks:
            raise InvalidArgumentError(
                f"The task must be in the cluster. Received: {job_name}:{task_index}. "
                f"The job {job_name!r} has the task indices {list(tasks)}."
            )
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return a job's addresses by task index, None where an index is missing."""
        tasks = self._tasks(job_name)
        # As TensorFlow: a list in which missing tasks are None.
        return [tasks.get(index) for index in range(max(tasks) + 1)]

    def num_processes(self, task_type: str = "worker") -> int:
        """Return how many processes compute together with a task: chief and workers.

        Args:
            task_type: the job of the task; an evaluator is alone.

        Returns:
            The number of processes; an empty cluster is one process.

        >>> spec = ClusterSpec({"chief": ["a:2222"], "worker": ["b:2222"], "evaluator": ["c:2222"]})
        >>> spec.num_processes(), spec.num_processes("evaluator")
        (2, 1)
        """
        # As in TensorFlow: the evaluator is a cluster of one.
        if task_type == "evaluator" or not self:
            return 1
        return sum(self.num_tasks(job) for job in ("chief", "worker") if job in self)

    def _tasks(self, job_name: str) -> dict[int, str]:
        for job, tasks in self._jobs:
            if job == job_name:
                return dict(tasks)
        raise InvalidArgumentError(
            f"The job must be in the cluster. Received: {job_name!r}. The cluster has the jobs {self.jobs}."
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.jobs)

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ClusterSpec):
            # The order of the jobs does not make another cluster.
            return dict(self._jobs) == dict(other._jobs)
        # TensorFlow's programs compare with the dict they made the spec from.
        return self.as_dict() == other if isinstance(other, Mapping) else NotImplemented

    def __hash__(self) -> int:
        # Without the order of the jobs, as in `__eq__`.
        return hash(frozenset(self._jobs))

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"


def _is_dense(tasks: dict[int, str]) -> bool:
    return list(tasks) == list(range(len(tasks)))


def read_jobs(cluster: Mapping[Any, Any]) -> tuple[_Jobs, list[str]]:
    """Return the readable tasks, and a sentence for each other one."""
    jobs: _Jobs = {}
    problems: list[str] = []
    for job, tasks in cluster.items():
        if not isinstance(job, str) or not _JOB_NAME.fullmatch(job):
            problems.append(f"{job!r} is not the name of a job")
            continue
        # TensorFlow's `ClusterSpec` takes any name; here a slip such as `workers` is an error at once.
        if job not in JOBS:
            problems.append(f"the job {job!r} must be one of {', '.join(JOBS)}{job_hint(job)}")
            continue
        entries, wrong = _read_tasks(job, tasks)
        problems += wrong
        if entries:
            jobs[job] = entries
    return jobs, problems + _repeated(jobs)


def job_hint(job: str) -> str:
    """Return which job may be meant, for the end of a sentence; empty where none is close.

    >>> job_hint("workers"), job_hint("gpu")
    (" (write 'worker')", '')
    """
    # TensorFlow 1 named the chief "master".
    close = ["chief"] if job == "master" else difflib.get_close_matches(job.lower(), JOBS, n=1)
    return f" (write {close[0]!r})" if close else ""


def _read_tasks(job: str, tasks: object) -> tuple[dict[int, str], list[str]]:
    if isinstance(tasks, (list, tuple)):
        tasks = dict(enumerate(tasks))
    if not isinstance(tasks, Mapping):
        return {}, [f"{job!r} has {tasks!r}, not a list of addresses"]
    entries: dict[int, str] = {}
    problems: list[str] = []
    for key, address in tasks.items():
        index = read_index(key)
        problem = address_problem(address)
        if index is None:
            problems.append(f"{job!r} has {key!r} for the index of a task")
        elif index in entries:
            problems.append(f"{job!r} has the index {index} twice")
        elif problem:
            problems.append(f"{job}:{index} is {address!r}: {problem}")
        else:
            entries[index] = address
    return entries, problems


def _repeated(jobs: _Jobs) -> list[str]:
    seen: dict[str, str] = {}
    problems = []
    for job, tasks in jobs.items():
        for index, address in tasks.items():
            # Names of hosts do not depend on upper and lower case.
            first = seen.setdefault(address.lower(), f"{job}:{index}")
            if first != f"{job}:{index}":
                problems.append(f"{first} and {job}:{index} have one address, {address!r}")
    return problems


def read_index(value: object) -> int | None:
    """Return a task's index from an integer or a string of digits, None from anything else."""
    # The keys of a JSON object are texts, as in a sparse cluster; a task's own index may be one, too.
    if isinstance(value, str) and _DIGITS.fullmatch(value):
        return int(value)
    return whole_number(value, 0)


def address_problem(address: object) -> str | None:
    """Return the problem of a `"host:port"`; None if it can be used.

    >>> address_problem("[::1]:2222"), address_problem("host")
    (None, 'it has no port')
    """
    if not isinstance(address, str):
        return "it is not a string"
    # Before the host is looked at, whose `:` would look like an IPv6 address.
    if "://" in address:
        return "it has a protocol, which is not part of an address"
    host, colon, port = address.rpartition(":")
    # The last colon of `[::1]` belongs to the address.
    if not colon or address.endswith("]"):
        return "it has no port"
    if not _DIGITS.fullmatch(port) or not 1 <= int(port) <= 65535:
        return "its port is not between 1 and 65535"
    return _host_problem(host)


def _host_problem(host: str) -> str | None:
    if not host:
        return "it has no host"
    if ":" in host.strip("[]"):
        inner = host[1:-1] if host.startswith("[") and host.endswith("]") else ""
        return None if as_ip(inner) else "an IPv6 address is written '[::1]:2222'"
    # Names may consist of digits and dots: `10.0.0.256` would be looked up as a name.
    if re.fullmatch(r"[0-9]+(\.[0-9]+){3}", host) and not as_ip(host):
        return "its four numbers are not an IPv4 address"
    return None if _HOST_NAME.fullmatch(host) else "its host is not a name or IP address"


def as_ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """Return the IP address that a host is, None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def split_address(address: str) -> tuple[str, int]:
    """Return host and port, the host without brackets.

    >>> split_address("node1:2222"), split_address("[::1]:80")
    (('node1', 2222), ('::1', 80))
    """
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def with_port(host: str, port: int) -> str:
    """Return the address of a port of a host.

    >>> with_port("node1", 2222), with_port("fe80::1", 2222)
    ('node1:2222', '[fe80::1]:2222')
    """
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def shortened(value: object, limit: int = 400) -> str:
    """Return a value's text for a message, not longer than `limit` characters."""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= limit else text[:limit] + "…"


@dataclasses.dataclass(frozen=True, order=True)
class Task:
    """One process of a cluster.

    Args:
        type: the name of its job, such as `"worker"`.
        index: its index within the job, from 0.

    Raises:
        InvalidArgumentError: when `type` is not a name, or `index` negative or not an integer.

    >>> Task("worker", 0).is_chief(ClusterSpec({"worker": ["a:1", "b:1"]}))
    True
    """

    type: str
    index: int

    def __post_init__(self) -> None:
        named = isinstance(self.type, str) and _JOB_NAME.fullmatch(self.type)
        if not named or whole_number(self.index, 0) is None:
            raise InvalidArgumentError(
                "A task must have the name of a job and an index from 0. "
                f"Received: type={self.type!r}, index={self.index!r}. Write `Task('worker', 0)`."
            )

    def is_chief(self, spec: ClusterSpec) -> bool:
        """Return whether this is the chief: of a `chief` job, or else worker 0.

        The evaluator is a cluster of its own, and its chief.
        """
        if self.type == "worker":
            return "chief" not in spec and self.index == 0
        return self.type in ("chief", "evaluator")

    def __str__(self) -> str:
        return f"{self.type}:{self.index}"


@dataclasses.dataclass(frozen=True)
class Timeouts:
    """How long the tasks of a cluster wait for each other, in seconds.

    Args:
        start_up: for all tasks to connect, when the program starts.
        heartbeat: for a task's answer; a task that is unreachable for three times as long is lost.
        collective: for the other tasks in one collective; they may be compiling.
        shutdown: for a task that does not answer, when the program ends; a running task is waited for.

    Raises:
        InvalidArgumentError: when one is not a positive finite number.

    >>> Timeouts(start_up=5.0).heartbeat
    3.0
    """

    # TensorFlow waits without a limit: a worker alone was still blocked after 600 s.
    start_up: float = 60.0
    # JAX's default is 100 s, in which all others of a lost task would stand still. A machine that is lost is
    # found within four of these and 3 s.
    heartbeat: float = 3.0
    # Gloo's own limit is 30 minutes; a first step may compile for minutes.
    collective: float = 600.0
    shutdown: float = 60.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            seconds = getattr(self, field.name)
            if not is_number(seconds) or not 0 < seconds < math.inf:
                raise InvalidArgumentError(
                    "A timeout must be a positive number of seconds. "
                    f"Received: {field.name}={seconds!r}. Write `Timeouts({field.name}={field.default})`."
                )


def process_id(spec: ClusterSpec, task: Task) -> int:
    """Return a task's number among those that compute together: the chief, then the workers.

    >>> process_id(ClusterSpec({"worker": ["a:1", "b:1"], "chief": ["c:1"]}), Task("worker", 1))
    2
    """
    if task.type == "evaluator":
        return 0
    if task.type not in ("chief", "worker"):
        raise InvalidArgumentError(
            f"Only chief, workers and the evaluator have a process number. Received: {task}."
        )
    spec.task_address(task.type, task.index)
    before = spec.num_tasks("chief") if task.type == "worker" and "chief" in spec else 0
    # The position, not the index: a sparse cluster leaves indices out.
    return before + spec.task_indices(task.type).index(task.index)


def chief_address(spec: ClusterSpec) -> str:
    """Return the address of the chief, or of the first worker where there is no chief."""
    for job in ("chief", "worker"):
        if job in spec:
            return spec.task_address(job, spec.task_indices(job)[0])
    raise InvalidArgumentError(
        f"A cluster must have a chief or a worker. Received: {spec!r}. Write {_EXAMPLE}."
    )


def validate_collective(spec: ClusterSpec, task: Task | None) -> None:
    """Check that a task can compute together with the others of its cluster.

    Args:
        spec: the cluster; an empty one is this process alone, and always right.
        task: this process, None when it is not known.

    Raises:
        InvalidArgumentError: under the conditions of `tf.distribute.MultiWorkerMirroredStrategy`.
    """
    problem = _collective_problem(spec, task) if spec else None
    if problem:
        raise InvalidArgumentError(
            f"Workers that train together {problem}. Received: task={task and str(task)!r} in {spec!r}. "
            "Set 'task': {'type': 'worker', 'index': 0} beside the 'cluster' in TF_CONFIG, or pass "
            "`task_type='worker', task_id=0` to the cluster resolver."
        )


def _collective_problem(spec: ClusterSpec, task: Task | None) -> str | None:
    if task is None:
        return "must know which task each process is: task_type and task_id"
    if task.type == "ps":
        return "have no parameter servers: a 'ps' task belongs to ParameterServerStrategy"
    if task.type not in JOBS:
        return f"must be of the jobs 'chief', 'worker' or 'evaluator', not {task.type!r}"
    if not {"chief", "worker", "evaluator"} & set(spec):
        return "need a job 'worker', 'chief' or 'evaluator' in the cluster"
    for job in ("chief", "evaluator"):
        if job in spec and spec.num_tasks(job) > 1:
            return f"can have one {job} only, not {spec.num_tasks(job)}"
    if task.type not in spec:
        # The evaluator takes no part in training, and launchers leave it out of the cluster.
        return None if task.type == "evaluator" else f"must be in the cluster, which has no {task.type!r}"
    if task.index not in spec.task_indices(task.type):
        return f"must be in the cluster, whose {task.type!r} indices are {spec.task_indices(task.type)}"
    return None
