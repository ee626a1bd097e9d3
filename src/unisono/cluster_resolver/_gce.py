"""The cluster of the instances of a group on Google Compute Engine."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Iterator
from typing import Any, NoReturn

from unisono._errors import BackendError, ContextError
from unisono.cluster_resolver._base import ClusterResolver
from unisono.cluster_resolver._spec import ClusterSpec, with_port


class GCEClusterResolver(ClusterResolver):
    """The running instances of an instance group, asked again at each question.

    Args:
        project: the project's name.
        zone: such as `"us-west1-b"`.
        instance_group: the group's name.
        port: the port of every task.
        task_type: the job of all instances.
        task_id: this process' index; None looks for this machine among the instances.
        rpc_layer: the protocol before addresses.
        credentials: of `googleapiclient`; `"default"` takes the environment's.
        service: what `googleapiclient.discovery.build("compute", "v1")` returns, instead of making it.

    Raises:
        BackendError: when no service is given and `google-api-python-client` is not installed; at each
            question, when the group has no running instance, or does not contain this machine.

    >>> from unittest.mock import MagicMock
    >>> service = MagicMock()
    >>> groups, instances = service.instanceGroups(), service.instances()
    >>> groups.listInstances().execute.return_value = {"items": [{"instance": "https://x/w-0"}]}
    >>> groups.listInstances_next.return_value = None
    >>> instances.get().execute.return_value = {"networkInterfaces": [{"networkIP": "10.0.0.1"}]}
    >>> GCEClusterResolver("p", "z", "group", 2222, task_id=0, service=service).cluster_spec()
    ClusterSpec({'worker': ['10.0.0.1:2222']})
    """

    def __init__(
        self,
        project: str,
        zone: str,
        instance_group: str,
        port: int,
        task_type: str = "worker",
        task_id: int | None = None,
        rpc_layer: str | None = "grpc",
        credentials: object = "default",
        service: Any = None,
    ) -> None:
        self._place = {"project": project, "zone": zone}
        self._group, self._port, self._job = instance_group, port, task_type
        self._service = _service(credentials) if service is None else service
        self.rpc_layer = rpc_layer
        self._index = task_id

    # Properties, where the base has attributes: as in TensorFlow, the job cannot be changed.

    @property
    def task_type(self) -> str:
        """The job of all instances."""
        return self._job

    @task_type.setter
    def task_type(self, value: str) -> NoReturn:
        raise ContextError(
            f"The job of an instance group is chosen once. Received: task_type={value!r}. Write "
            f"`GCEClusterResolver(..., task_type={value!r})`."
        )

    @property
    def task_id(self) -> int:
        """This process' index: as given, or this machine's among the instances."""
        return self._own_index() if self._index is None else self._index

    @task_id.setter
    def task_id(self, value: int | None) -> None:
        self._index = value

    def cluster_spec(self) -> ClusterSpec:
        """Return the addresses of the running instances, in the order of their names.

        Raises:
            BackendError: when no instance is running.
        """
        names = self._instances()
        return ClusterSpec({self._job: [with_port(self._ip(name), self._port) for name in names]})

    def _instances(self) -> list[str]:
        # Sorted, although the request asks for this order: the indices of all processes depend on it.
        names = sorted(self._listed())
        if not names:
            raise BackendError(
                f"An instance group must have running instances. Received: {self._group!r} in {self._place}, "
                "which has none. Start them, and make the strategy when they run."
            )
        return names

    def _listed(self) -> Iterator[str]:
        groups = self._service.instanceGroups()
        only = {"instanceState": "RUNNING"}
        request = groups.listInstances(**self._place, instanceGroup=self._group, body=only, orderBy="name")
        # The API answers in pages; there is no next request after the last one.
        while request is not None:
            response = request.execute()
            for item in response.get("items", []):
                # The last part of a URL.
                yield str(item["instance"]).rpartition("/")[2]
            request = groups.listInstances_next(previous_request=request, previous_response=response)

    def _ip(self, name: str) -> str:
        instance = self._service.instances().get(**self._place, instance=name).execute()
        return str(instance["networkInterfaces"][0]["networkIP"])

    def _own_index(self) -> int:
        # Instances have short names, a machine may give its full domain name.
        names, own = self._instances(), platform.node().partition(".")[0]
        if own not in names:
            raise BackendError(
                f"This machine must be one of the instances. Received: {own!r}, but the group "
                f"{self._group!r} has {names}. Run the program on one of them, or pass `task_id`."
            )
        return names.index(own)


def _service(credentials: object) -> Any:
    try:
        discovery = importlib.import_module("googleapiclient.discovery")
    except ImportError as error:
        raise BackendError(
            f"Google Compute Engine must be reached through its Python client. Received: {error}. "
            "Install `unisono[gce]`, or pass `service`."
        ) from error
    # With None the client takes the environment's, as on an instance.
    return discovery.build("compute", "v1", credentials=None if credentials == "default" else credentials)
