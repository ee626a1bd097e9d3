"""Who is in the cluster, and which task this is: the base of all resolvers, and those of TensorFlow."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, MutableMapping

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono._system._environ import process_environ
from unisono.cluster_resolver._spec import (
    ClusterSpec,
    Task,
    chief_address,
    process_id,
    read_index,
    shortened,
    validate_collective,
)
from unisono.cluster_resolver._tf_config import TFConfig, read_tf_config, variable_of

#: The variable with the seconds for which a worker waits for the others, where the program does not say it.
START_UP_VARIABLE = "UNISONO_START_UP"


def seconds_of(variable: str, default: float) -> float:
    """Return a number of seconds from the environment."""
    text = process_environ().get(variable, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise InvalidArgumentError(
            f"{variable} must be a number of seconds, 0 or more. Received: {shortened(text)!r}. Write "
            f"`export {variable}={default:g}`."
        )
    return seconds


def whole_of(variable: str, environ: Mapping[str, str] | None = None) -> int:
    """Return a whole number from the environment; 0 where the variable is not set, or empty.

    Raises:
        InvalidArgumentError: it is no whole number, or of more than nine digits.

    >>> whole_of("UNISONO_GENERATION", {"UNISONO_GENERATION": "3"}), whole_of("UNISONO_GENERATION", {})
    (3, 0)
    """
    text = (process_environ() if environ is None else environ).get(variable, "").strip()
    number = read_index(text) if text else 0
    if number is None:
        raise InvalidArgumentError(
            f"{variable} must be a whole number, 0 or more. Received: {shortened(text)!r}. Write "
            f"`export {variable}=1`, or `unset {variable}`."
        )
    return number


class ClusterResolver(abc.ABC):
    """Reads the description of a cluster from somewhere.

    A resolver of your own overrides `cluster_spec`, and sets `task_type` and `task_id` where it knows them,
    and `rpc_layer` where its addresses begin with a protocol.

    >>> class Ours(ClusterResolver):
    ...     def cluster_spec(self):
    ...         return ClusterSpec({"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]})
    >>> resolver = Ours()
    >>> resolver.task_type, resolver.task_id = "worker", 1
    >>> resolver.coordinator_address, resolver.num_processes, resolver.process_id
    ('10.0.0.1:2222', 2, 1)
    """

    task_type: str | None = None
    task_id: int | None = None
    rpc_layer: str | None = None

    @classmethod
    def detect(cls, environ: MutableMapping[str, str]) -> ClusterResolver | None:
        """Return a resolver when the environment shows that this kind of cluster started the process.

        `unisono.cluster_resolver.resolve` asks each registered class. The base class returns None.

        Args:
            environ: the environment variables.

        Raises:
            InvalidArgumentError: when the variables are there and cannot be used.
        """
        return None

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the addresses of each job's tasks, as they are now."""

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of a task, by default this one.

        Args:
            task_type: the task's job; this task's by default.
            task_id: the task's index; this task's by default.
            rpc_layer: the protocol before the address; the resolver's by default.

        Returns:
            The address; empty where the cluster has one task at most or the task is not known.

        Raises:
            InvalidArgumentError: when the cluster has no such task.
        """
        spec = self.cluster_spec()
        job = self.task_type if task_type is None else task_type
        index = self.task_id if task_id is None else task_id
        # As in TensorFlow: an empty master means this process alone.
        if sum(spec.num_tasks(name) for name in spec) <= 1 or job is None or index is None:
            return ""
        return _with_protocol(spec.task_address(job, index), rpc_layer or self.rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """Return how many accelerators this task has; this starts JAX.

        Args:
            task_type: this task's job, or None.
            task_id: this task's index, or None.
            config_proto: accepted for TensorFlow's signature.

        Returns:
            Kind, such as `"GPU"` -> count; empty without accelerators.

        Raises:
            InvalidArgumentError: for a task other than this one.
        """
        asked = (task_type or self.task_type, self.task_id if task_id is None else task_id)
        # JAX sees only the devices of its own process; TensorFlow's sessions could ask another task's server.
        if asked != (self.task_type, self.task_id):
            raise InvalidArgumentError(
                "A task knows only its own accelerators. "
                f"Received: task_type={task_type!r}, task_id={task_id!r}. Ask for "
                f"task_type={self.task_type!r}, task_id={self.task_id!r}, or state what every task has: "
                "`SimpleClusterResolver(spec, num_accelerators={'GPU': 8})`."
            )
        return _local_accelerators()

    @property
    def environment(self) -> str:
        """Where the cluster runs; empty where that is not known."""
        return ""

    @property
    def task(self) -> Task | None:
        """This process, None where its job or its index is not known.

        Raises:
            InvalidArgumentError: when the job is not a name or the index not a number.
        """
        if self.task_type is None or self.task_id is None:
            return None
        return Task(self.task_type, self.task_id)

    @property
    def coordinator_address(self) -> str | None:
        """The address of process 0, to which the others connect; None for a task that is alone."""
        spec, task = self._checked()
        return None if task is None or task.type == "evaluator" else chief_address(spec)

    @property
    def num_processes(self) -> int:
        """How many processes compute together with this one: chief and workers."""
        spec, task = self._checked()
        return 1 if task is None else spec.num_processes(task.type)

    @property
    def process_id(self) -> int:
        """This process' number among those: the chief is 0, the workers follow."""
        spec, task = self._checked()
        return 0 if task is None else process_id(spec, task)

    def _checked(self) -> tuple[ClusterSpec, Task | None]:
        spec, task = self.cluster_spec(), self.task
        validate_collective(spec, task)
        return spec, task if spec else None


def _with_protocol(address: str, rpc_layer: str | None) -> str:
    return f"{rpc_layer}://{address}" if rpc_layer and address else address


def _local_accelerators() -> dict[str, int]:
    # Here, because it imports JAX: who only asks for addresses does not pay for that.
    from unisono._mesh import local_devices

    counts = {}
    for kind in ("gpu", "tpu"):
        try:
            counts[kind.upper()] = len(local_devices(kind))
        except RuntimeError:  # raised by JAX when it has no device of this kind
            continue
    return counts


class TFConfigClusterResolver(ClusterResolver):
    """The cluster that the environment variable TF_CONFIG describes, read again at each question.

    Vertex AI's names are known: `master` for the chief, and where there is only its CLUSTER_SPEC,
    `workerpool0` to `workerpool3`.

    Args:
        task_type: this process' job, instead of TF_CONFIG's.
        task_id: this process' index in its job, instead of TF_CONFIG's.
        rpc_layer: the protocol, instead of TF_CONFIG's.
        environment: where the cluster runs, instead of TF_CONFIG's.
        environ: read this instead of the process' environment.

    Raises:
        InvalidArgumentError: at each question, when TF_CONFIG cannot be used.

    >>> text = '{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 1}}'
    >>> resolver = TFConfigClusterResolver(environ={"TF_CONFIG": text})
    >>> resolver.cluster_spec(), resolver.task_type, resolver.task_id, resolver.master()
    (ClusterSpec({'worker': ['a:2222', 'b:2222']}), 'worker', 1, 'b:2222')
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._given_type, self._given_id = task_type, task_id
        self._given_layer, self._given_environment = rpc_layer, environment
        self._environ = environ

    @classmethod
    def detect(cls, environ: MutableMapping[str, str]) -> TFConfigClusterResolver | None:
        """Return a resolver when TF_CONFIG is set, or Vertex AI's CLUSTER_SPEC."""
        # Some launchers set it to an empty text for a single process.
        return cls(environ=environ) if environ.get(variable_of(environ), "").strip() else None

    def _read(self) -> TFConfig:
        environ = process_environ() if self._environ is None else self._environ
        variable = variable_of(environ)
        return read_tf_config(environ.get(variable), self._given_type, self._given_id, variable)

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster; an empty one without TF_CONFIG."""
        return self._read().cluster

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return TF_CONFIG's `session_master`, or else the address of a task, by default this one."""
        # `session_master` goes before all, also before a task that is named, as in TensorFlow.
        config = self._read()
        if config.session_master is not None:
            return config.session_master
        return super().master(task_type, task_id, rpc_layer)

    @property
    def environment(self) -> str:
        return self._given_environment or self._read().environment or ""

    # Properties, where the base has attributes: TF_CONFIG is read at each access. Programs may set all three.

    @property
    def task_type(self) -> str | None:
        """This process' job."""
        return self._read().task_type

    @task_type.setter
    def task_type(self, value: str | None) -> None:
        self._given_type = value

    @property
    def task_id(self) -> int | None:
        """This process' index in its job."""
        return self._read().task_id

    @task_id.setter
    def task_id(self, value: int | None) -> None:
        self._given_id = value

    @property
    def rpc_layer(self) -> str | None:
        """The protocol, None where none is given."""
        return self._read().rpc_layer if self._given_layer is None else self._given_layer

    @rpc_layer.setter
    def rpc_layer(self, value: str | None) -> None:
        self._given_layer = value


class SimpleClusterResolver(ClusterResolver):
    """A cluster that the program states.

    Args:
        cluster_spec: the cluster.
        master: what `master()` returns when no task is named.
        task_type: this process' job.
        task_id: this process' index in its job.
        environment: where the cluster runs.
        num_accelerators: what every task has, kind -> count; nothing by default.
        rpc_layer: the protocol before addresses.

    Raises:
        InvalidTypeError: when `cluster_spec` is not a `ClusterSpec` or `master` not a string.

    >>> spec = ClusterSpec({"worker": ["a:2222", "b:2222"]})
    >>> SimpleClusterResolver(spec, task_type="worker", task_id=0).num_processes
    2
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            raise InvalidTypeError(
                f"`cluster_spec` must be a `ClusterSpec`. Received: {type(cluster_spec).__name__}. "
                "Write `SimpleClusterResolver(ClusterSpec({'worker': ['10.0.0.1:2222']}))`."
            )
        if not isinstance(master, str):
            raise InvalidTypeError(
                f"`master` must be a string. Received: master={master!r}. Write `master='10.0.0.1:2222'`."
            )
        self.task_type, self.task_id, self.rpc_layer = task_type, task_id, rpc_layer
        self._spec, self._master, self._environment = cluster_spec, master, environment
        self._accelerators = dict(num_accelerators or {})

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster."""
        return self._spec

    def master(
        self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None
    ) -> str:
        """Return the address of a task, or the `master` given where none is named."""
        address = self._master
        # As in TensorFlow: only a task that is named completely goes before the `master` given.
        if task_type is not None and task_id is not None:
            address = self._spec.task_address(task_type, task_id)
        return _with_protocol(address, rpc_layer or self.rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """Return the counts given."""
        return dict(self._accelerators)

    @property
    def environment(self) -> str:
        """Where the cluster runs, as given."""
        return self._environment
