"""`unisono.run_standard_server` and `unisono serve`: make a machine train for clients elsewhere.

Tests: tests/cluster/test_standalone.py, tests/unit/standalone/test_standard_server.py.
"""

from __future__ import annotations

import json
import logging
import platform
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono._errors import ClusterError, InvalidArgumentError
from unisono._system._environ import process_environ
from unisono.cluster_resolver._spec import ClusterSpec, Task, read_index, split_address, with_port
from unisono.launcher._launch import stop_signals
from unisono.rpc._calls import ClientId
from unisono.rpc._frames import Frame
from unisono.rpc._ops import Op
from unisono.rpc._transport._keys import FILE_VARIABLE, VARIABLE
from unisono.rpc._transport._local import free_port
from unisono.rpc._transport._server import RpcServer, require_key
from unisono.standalone._agent import Agent
from unisono.standalone._protocol import LIMIT, SERVER, read_standalone_keys
from unisono.standalone._server_machine import ServerMachine, server_directory

_LOG = logging.getLogger("unisono")

#: Seconds between two looks at the outputs of processes: three look-ups of files for each process.
_TICK = 0.02
#: Seconds between two looks at signals.
_POLL = 0.05
_EXAMPLE = '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'


class StandardServer:
    """A machine of a cluster that trains for a client, one at a time.

    Args:
        address: `"host:port"` at which it listens; other machines need the cluster's key.
        directory: for the files of jobs; None for one below the system's temporary directory.
        spares: processes that have JAX and Keras imported, and wait for a job.

    Raises:
        ClusterError: when other machines could reach it without a key, or the key cannot be used.
        InvalidArgumentError: when the directory cannot be used.
    """

    def __init__(self, address: str, directory: Path | None = None, spares: int = 1) -> None:
        host, port = split_address(address)
        # Messages and the directory name it, also before it listens.
        self.address = address if port else with_port(host, free_port())
        self._directory, self._spares = directory, spares
        environ = process_environ()
        self._keys = read_standalone_keys(environ, SERVER)
        require_key(self.address, self._keys)
        self._rpc_server: RpcServer | None = None
        self._agent: Agent | None = None
        self._stopping = threading.Event()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Listen and begin to answer, in threads; does nothing the second time.

        Raises:
            ClusterError: when the address cannot be used.
            InvalidArgumentError: when the directory cannot.
        """
        if self._agent is not None:
            return
        machine = ServerMachine(
            server_directory(self.address, self._directory), dict(process_environ()), self._spares
        )
        rpc_server = RpcServer(self.address, self._handle, self._keys, LIMIT, budget=LIMIT)
        self._agent = Agent(shown_name(self.address), machine, rpc_server.reply)
        try:
            rpc_server.start()
        except ClusterError:
            rpc_server.close()
            machine.close()
            self._agent = None
            raise
        self._rpc_server = rpc_server
        # The kernel ends a process with the thread that has started it: spares belong to this one.
        self._thread = threading.Thread(
            target=self._run, args=(rpc_server, self._agent, machine), name="unisono-standalone", daemon=True
        )
        self._thread.start()

    def join(self) -> None:
        """Serve until `stop`, or until the program is interrupted.

        Raises:
            ClusterError: when the server was not started.
        """
        if self._agent is None:
            raise ClusterError("A server must be started. Received: `join` before `start`.")
        try:
            # Not for ever: an interrupt must find its thread on every platform.
            while not self._stopped.wait(1.0):
                pass
        finally:
            self.stop()

    def stop(self) -> None:
        """End the processes of the job, and stop listening."""
        self._stopping.set()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join()

    def status(self) -> dict[str, Any]:
        """Return numbers about the server: its client, its processes, its messages."""
        if self._agent is None:
            return {}
        return self._agent.status() | {"rejected": self._rpc_server.rejected if self._rpc_server else 0}

    @property
    def target(self) -> str:
        """The address, after the name of a protocol."""
        return f"zmq://{self.address}"

    def _handle(self, client: ClientId, frame: Frame) -> Frame | None:
        if self._agent is None:
            return frame.answer(Op.ERROR, {"kind": "ClusterError", "text": "the server begins"})
        if frame.op is Op.STATUS and not frame.meta:
            return frame.answer(Op.OK, self.status())
        return self._agent.handle(client, frame)

    def _run(self, rpc_server: RpcServer, agent: Agent, machine: ServerMachine) -> None:
        while not self._stopping.wait(_TICK):
            try:
                agent.tick()
                machine.fill_spares()
            except Exception:
                # The thread must keep running: without it leases do not end.
                _LOG.exception("A server could not look after its processes.")
        rpc_server.close()
        agent.close()
        self._stopped.set()


def run_standard_server(
    session_config: object = None, directory: str | Path | None = None, spares: int = 1
) -> StandardServer:
    """Make this machine train for a client elsewhere, as the task of TF_CONFIG; return the running server.

    It is `tf.contrib.distribute.run_standard_tensorflow_server`: a program of one line,
    `unisono.run_standard_server().join()`, on each machine. `unisono serve` does the same without TF_CONFIG.

    Args:
        session_config: accepted for TensorFlow's signature; not used.
        directory: for the files of jobs; by default one below the system's temporary directory.
        spares: processes that have JAX and Keras imported, and wait for a job.

    Returns:
        The server, which listens already. `join()` serves until the program is interrupted, `stop()` ends it.

    Raises:
        InvalidArgumentError: when TF_CONFIG lacks the cluster, the task or its type, or has neither a chief
            nor a worker.
        ClusterError: when other machines could reach it without a key, or the address is in use.

    >>> import os
    >>> os.environ["TF_CONFIG"] = '{"cluster": {"worker": ["localhost:2222"]}}'
    >>> try:
    ...     run_standard_server()
    ... except ValueError as error:
    ...     print(str(error).partition(".")[0])
    TF_CONFIG must have "task"
    >>> del os.environ["TF_CONFIG"]
    """
    address = address_of_tf_config(process_environ().get("TF_CONFIG", "{}"))
    server = StandardServer(address, None if directory is None else Path(directory), spares)
    server.start()
    return server


def serve(address: str, port: int | None, key_file: Path | None, directory: Path | None, spares: int) -> int:
    """Be the command `unisono serve`: serve until a signal asks to stop; return the exit code."""
    environ = process_environ()
    if key_file is not None:
        environ.pop(VARIABLE, None)
        environ[FILE_VARIABLE] = str(key_file)
    if port is not None:
        if not 0 <= port < 1 << 16:
            raise InvalidArgumentError(f"`--port` must be below 65536. Received: {port}.")
        has_key = bool(environ.get(VARIABLE) or environ.get(FILE_VARIABLE))
        address = with_port("0.0.0.0" if has_key else "127.0.0.1", port)
    elif not _is_address(address):
        raise InvalidArgumentError(
            f"`--address` must be HOST:PORT, the port below 65536. Received: {address!r}. "
            "Write `--address localhost:2222`."
        )
    server = StandardServer(address, directory, spares)
    with stop_signals() as requests:
        server.start()
        print(f"unisono: serving at {server.address}; {_access(environ)}", file=sys.stderr, flush=True)
        try:
            while not requests:
                time.sleep(_POLL)
        finally:
            server.stop()
    return 0 if requests[0] == signal.SIGTERM else 128 + requests[0]


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and len(port) < 6 and int(port) < 1 << 16


def _access(environ: Mapping[str, str]) -> str:
    if environ.get(VARIABLE) or environ.get(FILE_VARIABLE):
        return "clients need the cluster's key"
    return "clients of this user on this machine alone (no key)"


def shown_name(address: str) -> str:
    """Return how a server names itself to clients: all interfaces are the machine.

    >>> shown_name("node1:2222")
    'node1:2222'
    """
    host, port = split_address(address)
    return with_port(platform.node() or host, port) if host in ("0.0.0.0", "::", "*") else address


def address_of_tf_config(text: str) -> str:
    """Return the address of the task of a TF_CONFIG."""
    config = _object(text)
    for name in ("cluster", "task"):
        if name not in config:
            raise _wrong(f'TF_CONFIG must have "{name}"', text)
    task = config["task"]
    if not isinstance(task, Mapping) or "type" not in task:
        raise _wrong('The "task" of TF_CONFIG must have a "type"', text)
    spec = ClusterSpec(config["cluster"])
    if "chief" not in spec and "worker" not in spec:
        raise _wrong('The "cluster" of TF_CONFIG must have the job "chief" or "worker"', text)
    layer = config.get("rpc_layer", "grpc")
    if layer not in ("", "grpc", "zmq"):
        # A program's own choice, such as `grpc+verbs`, would not take effect.
        raise _wrong('"rpc_layer" of TF_CONFIG must be "grpc", which stands for any protocol here', text)
    index = read_index(task.get("index", 0))
    if index is None:
        raise _wrong('The "index" of the task must be a number from 0', text)
    own = Task(str(task["type"]), index)
    return spec.task_address(own.type, own.index)


def _object(text: str) -> Mapping[str, Any]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise _wrong(f"TF_CONFIG must be JSON ({error})", text) from None
    if not isinstance(config, dict):
        raise _wrong("TF_CONFIG must be a JSON object", text)
    return config


def _wrong(rule: str, text: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{rule}. Received: {text[:300]!r}. Write TF_CONFIG='{_EXAMPLE}'.")
