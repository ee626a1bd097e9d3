"""`unisono.Server`: a worker or a parameter server in a program of its own, as `tf.distribute.Server`.

Tests: tests/cluster/test_parameter_server.py, tests/unit/strategies/test_server_task.py.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Literal

from unisono._errors import ClusterError, InvalidArgumentError, UnsupportedError
from unisono.cluster_resolver._spec import ClusterSpec, Task
from unisono.parameter_server.strategy._roles import roles_of
from unisono.parameter_server.strategy._serve import Service, service_of


class Server:
    """A task of a cluster that serves the chief: a worker that computes, or a parameter server.

    A program of three lines is such a task: create the server, `join`, end. The chief's program creates a
    `ParameterServerStrategy` with the same cluster.

    Args:
        server_or_cluster_def: the cluster, a `ClusterSpec` or a dict from each job to its addresses.
        job_name: `"worker"` or `"ps"`.
        task_index: the task's index within its job.
        protocol: accepted for TensorFlow's signature, as is `config`.
        config: likewise.
        start: whether to serve at once, in threads; else with `start`.

    Raises:
        InvalidArgumentError: the cluster cannot be used, or the task does not serve in it.
        ClusterError: the task cannot listen at its address.

    >>> cluster = {"chief": ["localhost:2222"], "ps": ["localhost:2223"], "worker": ["localhost:2224"]}
    >>> server = Server(cluster, "ps", 0, start=False)  # then `server.start()` and `server.join()`
    """

    def __init__(
        self,
        server_or_cluster_def: ClusterSpec | Mapping[str, Any],
        job_name: Literal["worker", "ps"] | str = "worker",
        task_index: int = 0,
        protocol: str | None = None,
        config: object = None,
        start: bool = True,
    ) -> None:
        self._roles = roles_of(ClusterSpec(server_or_cluster_def), Task(job_name, task_index), serves=True)
        if self._roles.is_chief or self._roles.is_evaluator:
            raise InvalidArgumentError(
                "A `Server` is a worker or a parameter server of a chief elsewhere. "
                f"Received: {self._roles.task}, which "
                f"{'is the chief' if self._roles.is_chief else 'evaluates'}. Create a "
                "`ParameterServerStrategy` in that task, and a `Server` in the others."
            )
        self._service: Service | None = None
        self._lock = threading.Lock()
        if start:
            self.start()

    @staticmethod
    def create_local_server(config: object = None, start: bool = True) -> Server:
        """Raise an error: a server belongs to a cluster.

        Args:
            config: is not used.
            start: likewise.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "A server is a task of a cluster with a chief. Received: `create_local_server`, for sessions of "
            "TensorFlow 1. In one process write `ParameterServerStrategy()`, which needs no server."
        )

    def start(self) -> None:
        """Begin to serve, in threads; does nothing the second time."""
        with self._lock:
            if self._service is None:
                self._service = service_of(self._roles)

    def join(self) -> None:
        """Serve until the chief ends the job.

        Raises:
            ClusterError: the chief's program has failed or vanished, or the server was not started.
        """
        if self._service is None:
            raise ClusterError("A server must be started. Received: `join` before `start`.")
        code = self._service.join()
        if code:
            raise ClusterError(
                f"The job of {self._roles.task} must end well. Received: the exit code {code} of its "
                "chief. Look into the chief's log."
            )

    @property
    def target(self) -> str:
        """The address of this task, after the name of a protocol."""
        return f"zmq://{self._roles.addresses[self._roles.task]}"

    @property
    def server_def(self) -> Task:
        """This task."""
        return self._roles.task
