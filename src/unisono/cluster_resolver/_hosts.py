"""The clusters of platforms that start a program once on each host: SageMaker and SkyPilot."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

from unisono._errors import InvalidArgumentError
from unisono._system._environ import process_environ
from unisono._system._json import parse_json
from unisono.cluster_resolver._base import ClusterResolver
from unisono.cluster_resolver._spec import ClusterSpec, read_index, shortened, with_port

#: The variable with the port of all workers, where the program does not say it.
PORT_VARIABLE = "UNISONO_PORT"
_PORT = 2222

#: SageMaker's description of the hosts, which every container has:
#: https://docs.aws.amazon.com/sagemaker/latest/dg/your-algorithms-training-algo-running-container.html
RESOURCES = Path("/opt/ml/input/config/resourceconfig.json")
_SAGEMAKER = ("SM_HOSTS", "SM_CURRENT_HOST")
_SKYPILOT = ("SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES")


class _HostsClusterResolver(ClusterResolver):
    """A worker on each host, all at one port."""

    def __init__(
        self,
        hosts: Sequence[str],
        index: int,
        port: int | None,
        environ: Mapping[str, str],
        gpus: int | None,
        platform: str,
    ) -> None:
        self.task_type, self.task_id = "worker", index
        self._gpus, self._platform = gpus, platform
        number = _port(environ) if port is None else port
        self._spec = ClusterSpec({"worker": [with_port(host, number) for host in hosts]})

    def cluster_spec(self) -> ClusterSpec:
        """Return the addresses of all hosts."""
        return self._spec

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """Return how many GPUs the platform has given to each host; where it does not say, ask JAX."""
        if self._gpus is None:
            return super().num_accelerators(task_type, task_id, config_proto)
        return {"GPU": self._gpus} if self._gpus else {}

    @property
    def environment(self) -> str:
        """The name of the platform."""
        return self._platform


class SageMakerClusterResolver(_HostsClusterResolver):
    """The hosts of a training job of Amazon SageMaker, each of which is a worker; read once.

    Args:
        port: of all workers; by default UNISONO_PORT, or else 2222.
        environ: read this instead of the process' environment. Without SM_HOSTS, which SageMaker's training
            toolkit sets, SageMaker's file `resourceconfig.json` is read.

    Raises:
        InvalidArgumentError: when the hosts or this one are not known.

    >>> environ = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "8"}
    >>> resolver = SageMakerClusterResolver(environ=environ)
    >>> resolver.cluster_spec(), resolver.task_id, resolver.num_accelerators()
    (ClusterSpec({'worker': ['algo-1:2222', 'algo-2:2222']}), 1, {'GPU': 8})
    """

    def __init__(self, port: int | None = None, environ: Mapping[str, str] | None = None) -> None:
        environ = process_environ() if environ is None else environ
        hosts, own = _sagemaker_hosts(environ)
        gpus = read_index(environ.get("SM_NUM_GPUS"))
        super().__init__(hosts, hosts.index(own), port, environ, gpus, "sagemaker")

    @classmethod
    def detect(cls, environ: MutableMapping[str, str]) -> SageMakerClusterResolver | None:
        """Return a resolver in a training job of several hosts."""
        # The second is set in every container, also in one without the toolkit.
        if "SM_HOSTS" not in environ and not ("TRAINING_JOB_ARN" in environ and RESOURCES.exists()):
            return None
        return cls(environ=environ) if len(_sagemaker_hosts(environ)[0]) > 1 else None


class SkyPilotClusterResolver(_HostsClusterResolver):
    r"""The nodes of a task of SkyPilot, each of which is a worker; read once.

    Args:
        port: of all workers; by default UNISONO_PORT, or else 2222.
        environ: read this instead of the process' environment.

    Raises:
        InvalidArgumentError: when the nodes or this one are not known.

    >>> environ = {"SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.3", "SKYPILOT_NODE_RANK": "1"}
    >>> resolver = SkyPilotClusterResolver(port=2000, environ=environ)
    >>> resolver.cluster_spec(), resolver.task_id
    (ClusterSpec({'worker': ['10.0.0.4:2000', '10.0.0.3:2000']}), 1)
    """

    def __init__(self, port: int | None = None, environ: Mapping[str, str] | None = None) -> None:
        environ = process_environ() if environ is None else environ
        nodes, rank = environ.get(_SKYPILOT[0], "").split(), read_index(environ.get(_SKYPILOT[1]))
        if rank is None or rank >= len(nodes) or len(nodes) != _skypilot_count(environ):
            raise InvalidArgumentError(
                "SKYPILOT_NODE_RANK must be the number of a line of SKYPILOT_NODE_IPS, which has "
                f"SKYPILOT_NUM_NODES lines. Received: {_received(environ, _SKYPILOT)}. Start the program in "
                "the section `run` of a task, and keep these variables as SkyPilot sets them."
            )
        gpus = read_index(environ.get("SKYPILOT_NUM_GPUS_PER_NODE"))
        super().__init__(nodes, rank, port, environ, gpus, "skypilot")

    @classmethod
    def detect(cls, environ: MutableMapping[str, str]) -> SkyPilotClusterResolver | None:
        """Return a resolver in a task of several nodes."""
        nodes = len(environ.get(_SKYPILOT[0], "").split())
        # The number counts, too: addresses on one line, such as "a,b", are no task of one node. And so does
        # the rank, which is 0 on the only node.
        is_first = environ.get(_SKYPILOT[1], "0").strip() == "0"
        is_task = nodes > 0 and (max(nodes, _skypilot_count(environ)) > 1 or not is_first)
        return cls(environ=environ) if is_task else None


def _skypilot_count(environ: Mapping[str, str]) -> int:
    """Return how many nodes the task has: what SkyPilot says, or else the addresses."""
    count = read_index(environ.get("SKYPILOT_NUM_NODES"))
    return len(environ.get(_SKYPILOT[0], "").split()) if count is None else count


def _sagemaker_hosts(environ: Mapping[str, str]) -> tuple[list[str], str]:
    """Return the names of all hosts, in an order that is the same on all of them, and this host's."""
    source, own = "SM_HOSTS", environ.get("SM_CURRENT_HOST")
    try:
        if "SM_HOSTS" in environ:
            hosts = parse_json(environ["SM_HOSTS"])
        else:
            source = str(RESOURCES)
            config = parse_json(RESOURCES.read_text())
            hosts, own = config["hosts"], config["current_host"]
        if isinstance(hosts, list) and isinstance(own, str) and own in hosts:
            return sorted(map(str, hosts)), own
        problem = f"hosts {shortened(hosts)} and this host {own!r}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error} ({_received(environ, _SAGEMAKER)})"
    raise InvalidArgumentError(
        f"SageMaker must say which hosts there are, and which of them this is. Received: {problem} from "
        f"{source}. Keep SM_HOSTS and SM_CURRENT_HOST as the training toolkit sets them "
        "('[\"algo-1\", \"algo-2\"]' and 'algo-1'), or set TF_CONFIG."
    )


def _port(environ: Mapping[str, str]) -> int:
    text = environ.get(PORT_VARIABLE, str(_PORT))
    port = read_index(text)
    if port is None or not 1 <= port <= 65535:
        raise InvalidArgumentError(
            f"{PORT_VARIABLE} must be a port from 1 to 65535. Received: {text!r}. Write "
            f"`export {PORT_VARIABLE}={_PORT}`."
        )
    return port


def _received(environ: Mapping[str, str], names: Sequence[str]) -> str:
    return ", ".join(f"{name}={environ.get(name)!r}" for name in names)
