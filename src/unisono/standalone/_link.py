"""A client's connection with one server: it holds the lease, and copies what is new.

One thread asks with POLL, of which one is always on its way; the server answers when there is something new
or after a second. Where the connection is lost, the thread looks for the server for some seconds; after that
the processes there count as lost, and the thread goes on looking.

Tests: tests/unit/standalone/test_agent.py, tests/cluster/test_standalone.py.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any

from unisono._errors import ClusterError, InvalidArgumentError
from unisono.rpc._calls import PeerLostError, RequestClient, RequestNumbers
from unisono.rpc._frames import Frame, blob
from unisono.rpc._ops import Op
from unisono.rpc._transport._local import is_refused
from unisono.rpc._versions import installed
from unisono.standalone._protocol import CHUNK
from unisono.standalone._remote_process import RemoteProcess

_LOG = logging.getLogger("unisono")

#: Seconds in which a server is found again after its connection was lost: a process that ends closes its
#: connection at once.
_FIND_SECONDS = 3.0
#: Seconds in which each attempt to connect is refused until the server counts as gone: what forwards a port
#: refuses, too, while it is started again. The tasks of a server end with it, however soon it is back.
_REFUSED_SECONDS, _PROBE_PAUSE = 0.5, 0.05
#: Seconds for a request that takes no time, on however busy a machine; and for one to kill processes.
_CALL_SECONDS, _SWEEP_SECONDS = 60.0, 40.0
#: Seconds between two attempts to find a lost server.
_RETRY_SECONDS = 1.0


class RequestRefusedError(ClusterError):
    """A server has answered with an error."""

    def __init__(self, text: str, kind: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclasses.dataclass(frozen=True)
class ServerInfo:
    """A server's description of itself.

    Args:
        instance: another text after each start.
    """

    instance: str
    root: str
    gpus: tuple[str, ...]
    python: str
    packages: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Claim:
    """With what a client takes servers.

    Args:
        lease: seconds without a request after which a server ends the job.
    """

    job: str
    client: str
    lease: float


class ServerLink:
    """The connection with a server.

    Args:
        address: where it listens, or its name where it moves from machine to machine.
        prepare: brings what the job needs to a server that has just been taken.
        is_refused: returns whether the system of an address says that no process listens there.
    """

    def __init__(
        self,
        address: str,
        rpc_client: RequestClient,
        claim: Claim,
        prepare: Callable[[ServerLink], None],
        wake: Callable[[], None],
        is_refused: Callable[[str], bool] = is_refused,
    ) -> None:
        self.address = address
        self._rpc_client, self._claim, self._prepare, self._wake = rpc_client, claim, prepare, wake
        self._is_refused = is_refused
        self._numbers = RequestNumbers()
        self._processes: dict[str, RemoteProcess] = {}
        self._info: ServerInfo | None = None
        #: How often the server was taken without the job's processes: after the first time, these are lost.
        self._beginnings = 0
        #: The server's process and its number of this job's beginning for which everything was brought.
        self._taken: tuple[str, int] | None = None
        #: False while what the job needs is brought.
        self._is_prepared = False
        #: True from the loss of the server's processes until none of them runs there.
        self._has_lost = False
        #: Why the server could not be taken again, as far as the log says it.
        self._warned: set[str] = set()
        #: With which error the server answers that was lost, where it does.
        self.refusal = ""
        #: Signals that were lost with their connection: the process, and the number.
        self._lost_signals: collections.deque[tuple[str, int]] = collections.deque()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"unisono-link-{address}", daemon=True)
        #: Answers to POLL that had something new, and all.
        self.messages = 0
        #: The reasons for the loss of this server's processes, by two threads, while a third one reads them.
        self._losses: list[str] = []

    @property
    def losses(self) -> frozenset[str]:
        """The reasons for the loss of this server's processes until now."""
        return frozenset(self._losses)

    @property
    def info(self) -> ServerInfo:
        """The server's description of itself."""
        if self._info is None:
            raise ClusterError(f"The server {self.address} must answer. Received: it is lost.")
        return self._info

    @property
    def is_live(self) -> bool:
        """True if the server answers, works for this client, and has all that the job needs."""
        return self.live_info is not None

    @property
    def live_info(self) -> ServerInfo | None:
        """The description of a live server, None of another one: its thread may lose it at any time."""
        info = self._info
        return info if self._is_prepared else None

    @property
    def reached_at(self) -> str:
        """Where the server listens: its name, unless it moves from machine to machine."""
        return self._rpc_client.address

    def is_refused(self) -> bool:
        """Return whether the system of its address says that no process listens there."""
        return self._is_refused(self.reached_at)

    def claim(self, timeout: float) -> None:
        """Claim the server, bring what the job needs, and begin to copy.

        Raises:
            PeerLostError: when it does not answer.
            RequestRefusedError: when it does not accept; its kind is `ServerBusyError` for a second client.
        """
        self._hello(timeout)
        if self._thread.ident is None:
            self._thread.start()

    def _hello(self, timeout: float) -> None:
        meta = dataclasses.asdict(self._claim)
        self._note_server(self.request(Op.HELLO, meta, timeout=timeout).meta)

    def _note_server(self, answer: Mapping[str, Any]) -> None:
        try:
            info = ServerInfo(
                answer["instance"],
                answer["root"],
                tuple(answer["gpus"]),
                answer["python"],
                answer["packages"],
            )
            # Not whether this HELLO has taken it: the answer to an earlier one may have been too late.
            taken = info.instance, answer["taken"]
        except KeyError as error:
            there = dict(answer.get("packages", {})).get("unisono", "another one")
            raise ClusterError(
                "Client and servers must have one version of Unisono. Received: "
                f"{installed().get('unisono', 'one')} here and {there} at {self.address}, whose answer has "
                f"no field {error}. Install the same version, and run `unisono serve` there again."
            ) from None
        if taken != self._taken:
            # In this order: another thread must not take it for a live one.
            self._is_prepared = False
            self._info = info
            self._beginnings += 1
            try:
                self._prepare(self)
            except BaseException:
                self._info = None
                raise
            self._taken, self._is_prepared = taken, True
        elif self._has_lost:
            # It was away for less than the lease: the processes that count as lost would run beside new ones.
            self.request(Op.SWEEP, timeout=_SWEEP_SECONDS)
        self._has_lost = False
        self._info = info

    def request(
        self,
        op: Op,
        meta: Mapping[str, Any] | None = None,
        arrays: Sequence[Any] = (),
        timeout: float = _CALL_SECONDS,
    ) -> Frame:
        """Ask the server, and return its answer.

        Raises:
            PeerLostError: when it does not answer.
            RequestRefusedError: when it answers with an error.
        """
        fields = {"job": self._claim.job, **(meta or {})}
        return _accepted(self._rpc_client.call(Frame(op, self._numbers.next(), 0, fields, arrays), timeout))

    def put(self, name: str, data: bytes) -> None:
        """Write a file in the job's directory on the server."""
        view = memoryview(data)
        for offset in range(0, max(1, len(view)), CHUNK):
            part = view[offset : offset + CHUNK]
            self.request(Op.PUT, {"name": name, "offset": offset, "size": len(view)}, [blob(part)])

    def ports(self, count: int, avoid: Sequence[int]) -> list[int]:
        """Return free ports of the server's machine."""
        answer = self.request(Op.PORTS, {"count": count, "avoid": list(avoid)})
        return [int(port) for port in answer.meta["ports"]]

    def start_process(self, process: RemoteProcess, job: Mapping[str, Any]) -> str:
        """Start a process; return why that was not possible, empty where it was."""
        if not self.is_live:
            return self._lost_text()
        self._processes[process.key] = process
        fields = {"key": process.key, "task": str(process.task), **job}
        # Its thread lets it count as lost where it does not find the server again.
        while self.is_live and process.poll() is None and not self._closing.is_set():
            try:
                self.request(Op.START, fields)
            except PeerLostError:
                # A connection was lost, perhaps with the answer: a server starts a key once.
                self._closing.wait(_PROBE_PAUSE)
            except RequestRefusedError as error:
                self._processes.pop(process.key, None)
                return f"could not be started on the server {self.address}: {error}"
            else:
                return ""
        self._processes.pop(process.key, None)
        return self._lost_text()

    def _lost_text(self, why: str = "it does not answer") -> str:
        text = f"lost its server {self.address}: {why}"
        self._losses.append(text)
        return text

    def signal_process(self, key: str, number: int) -> None:
        """Send a signal to a process; nothing happens where the server is lost."""
        if self._info is None:
            return

        def note(answer: futures.Future[Frame]) -> None:
            if isinstance(answer.exception(), PeerLostError):
                self._lost_signals.append((key, number))

        meta = {"job": self._claim.job, "key": key, "number": number}
        frame = Frame(Op.SIGNAL, self._numbers.next(), 0, meta)
        self._rpc_client.send(frame, _CALL_SECONDS).add_done_callback(note)

    def sweep(self) -> int:
        """Kill what the processes have left behind; return how many processes that were."""
        while self.is_live and not self._closing.is_set():
            try:
                return int(self.request(Op.SWEEP, timeout=_SWEEP_SECONDS).meta["killed"])
            except PeerLostError:
                # Its thread finds the server again, or lets it count as lost, and sweeps it when it is back.
                self._closing.wait(_PROBE_PAUSE)
            except RequestRefusedError:
                break
        return 0

    def close(self) -> None:
        """End the job on the server, and the connection."""
        self._closing.set()
        if self._info is not None:
            try:
                self.request(Op.END, timeout=_SWEEP_SECONDS)
            except (PeerLostError, RequestRefusedError) as error:
                _LOG.warning("The server %s ends its job when the lease does: %s", self.address, error)
        self._rpc_client.close()
        if self._thread.ident is not None:
            self._thread.join(_CALL_SECONDS)

    # the thread

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._turn()
            except Exception as error:
                # Such as of another version: without this thread the launch would wait for ever.
                _LOG.exception("What the server %s has answered could not be read.", self.address)
                self._lose(f"its answer could not be read ({error})", time.time())

    def _turn(self) -> None:
        if self._info is None:
            self._closing.wait(_RETRY_SECONDS)
            self._find()
            return
        # Such as SIGTERM, by which tasks are asked to save: the server was found again.
        while self._lost_signals:
            key, number = self._lost_signals.popleft()
            if key in self._processes:
                self.signal_process(key, number)
        before = self._info.instance, self._beginnings
        try:
            self._copy_news()
        except (PeerLostError, RequestRefusedError) as error:
            self._look_for_server(*before, error)

    def _copy_news(self) -> None:
        running = {key: p for key, p in list(self._processes.items()) if p.poll() is None}
        seen = {key: [process.offset, process.version] for key, process in running.items()}
        answer = self.request(Op.POLL, {"seen": seen}, timeout=self._claim.lease)
        self.messages += 1
        later = time.time() - float(answer.meta["now"])
        for key, entry in answer.meta["news"].items():
            if key in running:
                self._apply(running[key], entry, answer.arrays, later)
        self._processes = {key: p for key, p in list(self._processes.items()) if p.poll() is None}
        if answer.meta["news"]:
            self._wake()

    def _apply(
        self, process: RemoteProcess, entry: Mapping[str, Any], blobs: Sequence[Any], later: float
    ) -> None:
        if "log" in entry:
            process.add_output(blobs[entry["log"]].tobytes())
        process.note_step(entry["step"])
        process.offset = entry["offset"]
        if "error" in entry:
            process.note_error(blobs[entry["error"]].tobytes(), later)
        if entry.get("code") == 0:
            self._fetch_result(process)
        if "version" in entry:
            process.version = entry["version"]
        if "code" in entry:
            process.end(entry["code"], time.time() - entry["age"])

    def _fetch_result(self, process: RemoteProcess) -> None:
        name = process.copies.result.name
        try:
            answer = self.request(Op.GET, {"name": name, "offset": 0})
        except RequestRefusedError as error:
            if error.kind == InvalidArgumentError.__name__:  # a program, or a function that has not returned
                return
            # It was started again since it has told the end, and the result is lost with the processes.
            raise
        data = bytearray(answer.arrays[0].tobytes())
        while len(data) < answer.meta["size"]:
            answer = self.request(Op.GET, {"name": name, "offset": len(data)})
            data += answer.arrays[0].tobytes()
        process.note_result(bytes(data))

    def _look_for_server(self, instance: str, beginnings: int, error: ClusterError) -> None:
        """Find the server again after an error; else its processes are lost."""
        lost_at = time.time()
        if self._closing.is_set():
            return
        if isinstance(error, RequestRefusedError):
            self._lose("it was started again, or has received nothing from this client for too long", lost_at)
        elif (problem := self._search()) or self._info is None:
            self._lose(problem, lost_at)
        elif self._info.instance != instance:
            self._lose("it was started again", lost_at, is_live=True)
        elif self._beginnings != beginnings:
            # It still runs, and has ended the job meanwhile: this process was stopped, or the network was.
            self._lose("it has received nothing from this client for too long", lost_at, is_live=True)

    def _search(self) -> str:
        """Take the server again; return why that was not possible, empty where it has answered."""
        deadline = time.monotonic() + _FIND_SECONDS
        while (problem := self._asked_again(deadline)) is None:
            # The new connection was lost, too.
            self._closing.wait(_PROBE_PAUSE)
        if not problem:
            self._wake()
        return problem

    def _asked_again(self, deadline: float) -> str | None:
        """Ask the server once, as `_search`; return None where the connection is lost before the deadline."""
        meta, left = dataclasses.asdict(self._claim), max(0.0, deadline - time.monotonic())
        try:
            answer = self._rpc_client.send(Frame(Op.HELLO, self._numbers.next(), 0, meta), left)
            if self._is_gone_before(answer):
                return "no process listens there (connection refused)"
            self._note_server(_accepted(answer.result(0)).meta)
        except PeerLostError:
            is_over = time.monotonic() + _PROBE_PAUSE >= deadline or self._closing.is_set()
            return "it does not answer" if is_over else None
        except (RequestRefusedError, TimeoutError):
            return "it does not answer"
        except ClusterError as error:  # another program has been started there
            return f"it cannot be used again: {error}"
        return ""

    def _is_gone_before(self, answer: futures.Future[Frame]) -> bool:
        """Wait for an answer; return whether the server's process has ended instead."""
        refused_since = math.inf
        # A process that is just ending still takes connections: it is asked all the time.
        while not answer.done() and not self._closing.is_set():
            refused_since = min(refused_since, time.monotonic()) if self.is_refused() else math.inf
            if time.monotonic() - refused_since >= _REFUSED_SECONDS:
                return True
            futures.wait([answer], _PROBE_PAUSE)
        return False

    def _lose(self, why: str, at: float, is_live: bool = False) -> None:
        if not is_live:
            self._info, self._has_lost = None, True
        text = self._lost_text(why)
        for process in list(self._processes.values()):
            process.lose(text, at)
        self._processes = {}
        self._wake()

    def _find(self) -> None:
        """Take the server again, where it answers."""
        try:
            self._hello(_RETRY_SECONDS)
        except PeerLostError:
            self.refusal = ""
            return
        except RequestRefusedError as error:
            self.refusal = str(error)
            return
        except ClusterError as error:
            # Another program was started there, which is waited for as if there was none.
            if (text := f"The server {self.address} cannot be used again: {error}") not in self._warned:
                self._warned.add(text)
                _LOG.warning(text)
            return
        self.refusal = ""
        self._wake()


def _accepted(answer: Frame) -> Frame:
    if answer.op is Op.ERROR:
        raise RequestRefusedError(str(answer.meta.get("text")), str(answer.meta.get("kind")))
    return answer
