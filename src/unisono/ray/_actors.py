"""Actors of Ray that train as standalone servers do, and the connections with them.

Tests: tests/cluster/test_ray_cluster.py.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np

from unisono._errors import ClusterError
from unisono._system._environ import process_environ
from unisono.cluster_resolver._spec import Task, with_port
from unisono.launcher._function_call import call_folder
from unisono.rpc._calls import ClientId, PeerLostError
from unisono.rpc._frames import Frame
from unisono.rpc._ops import Op
from unisono.rpc._transport._client import RpcClient
from unisono.rpc._transport._keys import VARIABLE, ClusterKeys
from unisono.standalone._protocol import CLIENT, LIMIT, SERVER, read_standalone_keys
from unisono.standalone._remote_machines import ServerAccess
from unisono.standalone._server import StandardServer

#: The namespace of the actors' names.
NAMESPACE = "unisono"
#: Who looks at a job has no lease of it.
_WATCHER = ClientId(b"")


class ActorServer(StandardServer):
    """A standalone server whose actor also answers those who look at its job."""

    def look(self, meta: Mapping[str, Any]) -> tuple[str, dict[str, Any], bytes]:
        """Return the answer to a question about the files of the job: its kind, facts and bytes."""
        answer = self._handle(_WATCHER, Frame(Op.STATUS, meta=meta)) or Frame(Op.ERROR)
        return answer.op.name, dict(answer.meta), b"".join(array.tobytes() for array in answer.arrays)


class ServerActor:
    """A standalone server in an actor of Ray; its tasks are processes of their own, and end with it.

    Args:
        spares: processes that have JAX and Keras imported, and wait for a task.
        threads: the size of XLA's thread pool in each task; None for the whole machine's.
        variables: of the shell that has launched the tasks.
    """

    def __init__(self, key: str, spares: int, threads: int | None, variables: Mapping[str, str]) -> None:
        import ray

        environ = process_environ()
        environ.update(variables)
        environ[VARIABLE] = key
        if threads is not None:
            environ.setdefault("PJRT_NPROC", str(threads))
        self._open = contextlib.ExitStack()
        folder = self._open.enter_context(call_folder())
        self._server = ActorServer(with_port(ray.util.get_node_ip_address(), 0), folder, spares)
        self._server.start()

    def address(self) -> str:
        """Return where it listens."""
        return self._server.address

    def look(self, meta: Mapping[str, Any]) -> tuple[str, dict[str, Any], bytes]:
        """Return the answer to one who looks at the job; see `ActorServer.look`."""
        return self._server.look(meta)

    def stop(self) -> None:
        """End its tasks, and remove its files."""
        self._server.stop()
        self._open.close()


class ActorClient:
    """The connection with the server of an actor, which Ray may start again on another node.

    A client that has lost a server begins with HELLO again: then the actor is asked where it is.
    """

    task: Task = SERVER

    def __init__(self, actor: Any, address: str, keys: ClusterKeys | None) -> None:
        self._actor, self._keys = actor, keys
        self.address = address
        self._lock = threading.Lock()
        self._client = RpcClient(SERVER, address, keys, LIMIT)

    def call(self, frame: Frame, timeout: float) -> Frame:
        """Send a request and wait for its answer."""
        self._follow(frame, timeout)
        return self._client.call(frame, timeout)

    def send(self, frame: Frame, timeout: float | None = None) -> Future[Frame]:
        """Send a request."""
        self._follow(frame, timeout)
        return self._client.send(frame, timeout)

    def take_until(self, future: Future[Any], timeout: float | None = None) -> None:
        """Take answers in the present thread until a future is done, or return: then others take them."""
        self._client.take_until(future, timeout)

    def close(self) -> None:
        """End the connection; requests without an answer fail."""
        self._client.close()

    def _follow(self, frame: Frame, timeout: float | None) -> None:
        if frame.op is not Op.HELLO:
            return
        import ray

        try:
            address = ray.get(self._actor.address.remote(), timeout=timeout)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            text = f"Ray must start the actor of a server again. Received: {error}"
            raise PeerLostError(text, self.task, self.address, timeout or 0.0) from error
        with self._lock:
            if address != self.address:
                self._client.close()
                self.address, self._client = address, RpcClient(SERVER, address, self._keys, LIMIT)


class ActorWatcher:
    """Asks an actor about the files of its job, by calls of Ray: a watcher needs no key and no port."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def call(self, frame: Frame, timeout: float) -> Frame:
        """Send a request, and wait for its answer.

        Raises:
            ClusterError: the actor does not answer in time, or has ended.
        """
        import ray

        # Ray would repeat the call until it has started a lost actor again.
        call = self._actor.look.options(max_task_retries=0)
        try:
            kind, meta, data = ray.get(call.remote(dict(frame.meta)), timeout=timeout)
        except ray.exceptions.RayError as error:
            raise ClusterError(f"An actor of Ray must answer. Received: {error}") from error
        return frame.answer(Op[kind], meta, [np.frombuffer(data, np.uint8)])


def access_to(actors: Mapping[str, tuple[Any, str]], key: str, places: Mapping[str, str]) -> ServerAccess:
    """Return how a client reaches actors, each with its address, by name.

    Args:
        places: how `unisono watch` finds them.
    """
    keys = read_standalone_keys({VARIABLE: key}, CLIENT)
    return ServerAccess(
        lambda name: ActorClient(*actors[name], keys),
        if_absent="See the log of the actor {address} in Ray",
        if_lost="Add nodes to the cluster of Ray",
        until="Ray has started its actor again",
        places=places,
    )
