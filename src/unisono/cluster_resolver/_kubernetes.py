"""The cluster of pods that Kubernetes finds by their labels.

Tests: tests/unit/cluster_resolver/test_launchers.py.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from unisono._errors import BackendError, InvalidArgumentError
from unisono.cluster_resolver._base import ClusterResolver
from unisono.cluster_resolver._spec import ClusterSpec, with_port


class KubernetesExecutableLocation(enum.Enum):
    """Where this program runs: in a pod of the cluster, or outside.

    >>> [each.name for each in KubernetesExecutableLocation]
    ['WITHIN_CLUSTER', 'OFF_CLUSTER']
    """

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


class PodList(Protocol):
    """The part of a `kubernetes.client.V1PodList` that the resolver uses."""

    # The client's classes are generated and have no types.
    @property
    def items(self) -> Sequence[Any]: ...


class Client(Protocol):
    """The part of a `kubernetes.client.CoreV1Api` that the resolver uses."""

    def list_pod_for_all_namespaces(self, *, label_selector: str) -> PodList: ...


def pod_addresses(pods: Sequence[Any], port: int) -> list[str]:
    """Return the pods' addresses in the order of their names, which is the same at every call."""
    # The API promises no order, and all processes must number the pods alike.
    named = sorted(pods, key=lambda pod: str(pod.metadata.name))
    waiting = {pod.metadata.name: pod.status.phase for pod in named if pod.status.phase != "Running"}
    if waiting:
        raise BackendError(
            f"All pods of the cluster must be Running. Received: {waiting}. See "
            f"`kubectl describe pod {next(iter(waiting))}`, and make the strategy when the pods run."
        )
    # A pod's own address, unlike TensorFlow: pods of one node share the node's address.
    return [with_port(pod.status.pod_ip, port) for pod in named]


class KubernetesClusterResolver(ClusterResolver):
    """The pods that Kubernetes finds by their labels, asked again at each question.

    Kubernetes does not know which task this is: set `task_type` and `task_id`.

    Args:
        job_to_label_mapping: job -> selectors of its pods; `{"worker": ["job-name=tensorflow"]}` by default.
        tf_server_port: the port of every task.
        rpc_layer: the protocol before addresses.
        override_client: a `kubernetes.client.CoreV1Api`, instead of one with this pod's rights.
        executable_location: where this program runs; outside, it has the rights of `kubectl`.

    Raises:
        BackendError: when no client is given and the package `kubernetes` is not installed, or finds no
            way to the cluster.

    >>> from types import SimpleNamespace
    >>> pod = lambda name, ip: SimpleNamespace(
    ...     metadata=SimpleNamespace(name=name), status=SimpleNamespace(phase="Running", pod_ip=ip))
    >>> client = SimpleNamespace(list_pod_for_all_namespaces=lambda label_selector: SimpleNamespace(
    ...     items=[pod("w-1", "10.0.0.2"), pod("w-0", "10.0.0.1")]))
    >>> KubernetesClusterResolver(override_client=client).cluster_spec()
    ClusterSpec({'worker': ['10.0.0.1:8470', '10.0.0.2:8470']})
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,  # TensorFlow's default
        rpc_layer: str | None = "grpc",
        override_client: Client | None = None,
        executable_location: KubernetesExecutableLocation = KubernetesExecutableLocation.WITHIN_CLUSTER,
    ) -> None:
        self._selectors = _checked(job_to_label_mapping or {"worker": ["job-name=tensorflow"]})
        self._port = tf_server_port
        self._client = override_client or _client(executable_location)
        self.rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Return the addresses of all pods, which must all run.

        Raises:
            BackendError: when a pod does not run, or a selector finds none.
        """
        return ClusterSpec({job: self._addresses(selectors) for job, selectors in self._selectors.items()})

    def _addresses(self, selectors: Sequence[str]) -> list[str]:
        addresses = []
        for selector in selectors:
            pods = self._client.list_pod_for_all_namespaces(label_selector=selector).items
            if not pods:
                raise BackendError(
                    f"A selector must find pods. Received: {selector!r}, which finds none. See "
                    f"`kubectl get pods --all-namespaces -l {selector}`."
                )
            addresses += pod_addresses(pods, self._port)
        return addresses


def _checked(mapping: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    for job, selectors in mapping.items():
        # A text is a sequence, too, and would be read letter by letter.
        if isinstance(selectors, str) or not all(isinstance(s, str) for s in selectors):
            raise InvalidArgumentError(
                f"Each job must have a list of selectors. Received: {job!r}: {selectors!r}. "
                "Write `{'worker': ['job-name=trainer']}`."
            )
    return {job: list(selectors) for job, selectors in mapping.items()}


def _client(location: KubernetesExecutableLocation) -> Client:
    api: Client = configured_client(location).CoreV1Api()
    return api


def configured_client(location: KubernetesExecutableLocation) -> Any:
    """Return the module `kubernetes.client`, which knows the cluster and this user's or pod's rights.

    Raises:
        BackendError: the package is not installed, or finds no way to the cluster.
    """
    try:
        config = importlib.import_module("kubernetes.config")
        client = importlib.import_module("kubernetes.client")
    except ImportError as error:
        raise BackendError(
            f"Kubernetes must be reached through its Python client. Received: {error}. "
            "Install `unisono[kubernetes]`, or pass `override_client`."
        ) from error
    within = location is KubernetesExecutableLocation.WITHIN_CLUSTER
    try:
        # TensorFlow 2.16 tries only `kubectl`'s configuration, which a pod does not have:
        # https://github.com/tensorflow/tensorflow/issues/70581
        config.load_incluster_config() if within else config.load_kube_config()
    except config.ConfigException as error:
        remedy = (
            "WITHIN_CLUSTER is for pods: write `KubernetesExecutableLocation.OFF_CLUSTER` elsewhere."
            if within
            else "Make `kubectl get pods` work: it reads the file of KUBECONFIG, or ~/.kube/config. In a pod "
            "a resolver takes `KubernetesExecutableLocation.WITHIN_CLUSTER`."
        )
        raise BackendError(
            f"Kubernetes must have a configuration. Received: {error} (for {location.name}). {remedy}"
        ) from error
    return client
