"""Calls between tasks, without a socket: what both transports share.

A client sends requests to one task and gets a `Future` for each; a server answers the requests of its
clients. `_transport` has both over ZeroMQ, and `_loopback` within a process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, Protocol, TypeAlias

from unisono._errors import ClusterError
from unisono.cluster_resolver._spec import Task
from unisono.rpc._frames import Frame
from unisono.rpc._ops import Op

#: Bytes of requests without an answer, at most, of one client: `send` waits beyond them.
BYTES_IN_FLIGHT = 256 << 20
#: Seconds that `close` may take.
CLOSE_SECONDS = 5.0


class PeerLostError(ClusterError):
    """A task does not answer: it has ended, or cannot be reached. The same request may be sent again.

    Args:
        why: what is known of the connection; empty for nothing.
    """

    def __init__(self, text: str, task: Task, address: str, seconds: float, why: str = "") -> None:
        super().__init__(text)
        self.task, self.address, self.seconds, self.why = task, address, seconds, why


class PeerRejectedError(ClusterError):
    """Two tasks have different keys: a repetition cannot help.

    Args:
        why: what the other end did.
    """

    def __init__(self, text: str, why: str = "") -> None:
        super().__init__(text)
        self.why = why


class StaleValuesError(ClusterError):
    """A push was computed from values that a server has lost: it is to be computed again."""


@dataclasses.dataclass(frozen=True)
class ClientId:
    """Who sent a request, as far as it is proved.

    Args:
        connection: identifies the connection. A client that connects again gets another one.
        task: the task whose key the client has; None without keys.
        is_same_user: whether the operating system says that it is a process of this user on this machine.
    """

    connection: bytes
    task: Task | None = None
    is_same_user: bool = False

    def acts_for(self, task: Task) -> bool:
        """Return whether the client may act as a task, for example send functions as the chief.

        >>> ClientId(b"1", Task("worker", 1)).acts_for(Task("chief", 0))
        False
        """
        return self.is_same_user or self.task == task


#: Answers a request, or returns None and calls `reply` later.
Handler: TypeAlias = Callable[[ClientId, Frame], Frame | None]


class RequestClient(Protocol):
    """Sends requests to one task; may be used by several threads."""

    task: Task
    address: str

    def call(self, frame: Frame, timeout: float) -> Frame:
        """Send a request and wait for its answer."""

    def send(self, frame: Frame, timeout: float | None = None) -> Future[Frame]:
        """Send a request."""

    def take_until(self, future: Future[Any], timeout: float | None = None) -> None:
        """Take answers in the present thread until a future is done, or return: then others take them."""

    def close(self) -> None:
        """End the connection; requests without an answer fail."""


class RequestServer(Protocol):
    """Answers the requests of clients."""

    address: str

    def start(self) -> None:
        """Begin to answer."""

    def reply(self, client: ClientId, answer: Frame) -> None:
        """Answer a request whose handler returned None; from any thread."""

    def close(self) -> None:
        """End all connections."""


class RequestNumbers:
    """Gives numbers to the requests of one process, different from all others'.

    >>> numbers = RequestNumbers(client=1)
    >>> [hex(numbers.next()) for _ in range(2)]
    ['0x100000001', '0x100000002']

    Args:
        client: the upper 32 bits; random by default.
    """

    def __init__(self, client: int | None = None) -> None:
        self._client = (secrets.randbits(32) if client is None else client) << 32
        # `next` of `itertools.count` is one operation of the interpreter: no lock is needed.
        self._count = itertools.count(1)

    def next(self) -> int:
        """Return the next number."""
        return self._client | next(self._count) & 0xFFFFFFFF


def error_answer(request: Frame, error: BaseException) -> Frame:
    """Return the answer to a request whose handler raised.

    >>> error_answer(Frame(Op.PULL, 3), KeyError("w")).meta
    {'kind': 'KeyError', 'text': "'w'"}
    """
    return request.answer(Op.ERROR, {"kind": type(error).__name__, "text": str(error)})


def set_outcome(future: Future[Any], outcome: object) -> None:
    """Hand a result, or an exception, to those that wait, unless they have one already.

    >>> future = Future()
    >>> set_outcome(future, 1); set_outcome(future, ValueError())
    >>> future.result()
    1
    """
    # The caller may cancel its future at any moment.
    with contextlib.suppress(InvalidStateError):
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


@dataclasses.dataclass(frozen=True)
class PushToServer:
    """A closure's changes on one server.

    Args:
        closure: the closure's number, the same in every attempt.
        watermark: below which every closure has ended.
        lineage: of the values which the closure has pulled from this server; None for none.
    """

    server: int
    closure: int
    watermark: int
    fields: Mapping[str, Any]
    arrays: Sequence[Any]
    lineage: str | None = None

    @property
    def meta(self) -> dict[str, Any]:
        """The fields of the message."""
        of_values = {} if self.lineage is None else {"lineage": self.lineage}
        return {**self.fields, "closure": self.closure, "watermark": self.watermark, **of_values}


@dataclasses.dataclass(eq=False)
class _PendingCall:
    future: Future[Frame]
    frame: Frame
    size: int
    since: float
    deadline: float
    is_sent: bool = False


class PendingCalls:
    """The requests of a client that have no answer yet: their futures, deadlines and bytes.

    Args:
        budget: bytes in flight at most; a larger request goes alone.
    """

    def __init__(self, task: Task, address: str, budget: int = BYTES_IN_FLIGHT) -> None:
        self._task, self._address, self._budget = task, address, budget
        self._waiting: dict[int, _PendingCall] = {}
        #: No request is late before this time of the monotonic clock; infinity without any. A scan then finds
        #: the late ones: with a heap the entry of a request that was answered would stay until its deadline.
        self.first_deadline = math.inf
        self._room = threading.Condition()
        #: Bytes of the requests that have no answer yet.
        self.bytes_in_flight = 0
        self._refusal: Callable[[], ClusterError] | None = None
        #: The state of the connection, for messages.
        self.state = "not connected yet"

    def add(self, frame: Frame, size: int, timeout: float | None, may_wait: bool = True) -> Future[Frame]:
        """Note a request; wait while too many bytes are in flight.

        A request that waits already, by its number, keeps its future: it is sent again.

        Raises:
            PeerLostError: when there was no room in time.
            ClusterError: when the client was closed.
        """
        now = time.monotonic()
        deadline = math.inf if timeout is None else now + timeout
        with self._room:
            while (
                may_wait
                and self.bytes_in_flight
                and self.bytes_in_flight + size > self._budget
                and not self._refusal
            ):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self.lost(frame, now)
                # Not for ever: an interrupt must find its thread on every platform.
                self._room.wait(min(left, 1.0))
            if self._refusal is not None:
                raise self._refusal()
            known = self._waiting.get(frame.request)
            if known is not None:
                return known.future
            entry = _PendingCall(Future(), frame, size, now, deadline)
            self._waiting[frame.request] = entry
            self.bytes_in_flight += size
            self.first_deadline = min(self.first_deadline, deadline)
        return entry.future

    def settle(self, answer: Frame) -> bool:
        """Hand an answer to its request; return whether one waited for it."""
        entry = self._take(answer.request)
        if entry is None:
            return False
        set_outcome(entry.future, answer)
        return True

    def forget(self, request: int) -> None:
        """Drop a request: its answer will not be used."""
        self._take(request)

    def fail(self, request: int, error: ClusterError) -> None:
        """Fail a request, where it still waits."""
        entry = self._take(request)
        if entry is not None:
            set_outcome(entry.future, error)

    def fail_all(self, make: Callable[[], ClusterError]) -> None:
        """Fail all requests, each with an error of its own."""
        with self._room:
            entries, self._waiting = list(self._waiting.values()), {}
            self.bytes_in_flight = 0
            self._room.notify_all()
        for entry in entries:
            set_outcome(entry.future, make())

    def mark_sent(self, request: int) -> bool:
        """Note that a request goes on its way; return whether it still waits for an answer."""
        entry = self._waiting.get(request)
        if entry is not None:
            entry.is_sent = True
        return entry is not None

    def fail_sent(self, why: str) -> None:
        """Fail the requests that were sent: their connection was lost before their answers came."""
        for entry in list(self._waiting.values()):
            if entry.is_sent:
                self.fail(entry.frame.request, self.lost(entry.frame, entry.since, why))

    def refuse(self, make: Callable[[], ClusterError]) -> None:
        """Fail all requests, and those that will come."""
        with self._room:
            self._refusal = make
            self._room.notify_all()
        self.fail_all(make)

    def expire(self, now: float) -> float:
        """Fail the requests whose time is over; return when the next one will be, infinity without any."""
        if now < self.first_deadline:
            return self.first_deadline
        with self._room:
            late = [entry for entry in self._waiting.values() if entry.deadline <= now]
            others = (entry.deadline for entry in self._waiting.values() if entry.deadline > now)
            self.first_deadline = min(others, default=math.inf)
        for entry in late:
            self.fail(entry.frame.request, self.lost(entry.frame, entry.since))
        return self.first_deadline

    def lost(self, frame: Frame, since: float, why: str | None = None) -> PeerLostError:
        """Return the error for a request without an answer."""
        seconds, known = time.monotonic() - since, why or self.state
        return PeerLostError(
            f"A task must answer while the job runs. Received: no answer from {self._task} at "
            f"{self._address} to {frame.op.name} after {seconds:.3g} s ({known}). "
            f"Look into the log of {self._task}: it has ended, or works longer than the timeout.",
            self._task,
            self._address,
            seconds,
            known,
        )

    def closed(self) -> PeerLostError:
        """Return the error for a request of a client that was closed."""
        return PeerLostError(
            f"A request must be made before its client is closed. Received: one for {self._task} at "
            f"{self._address}, whose client was closed.",
            self._task,
            self._address,
            0.0,
        )

    def wait(self, frame: Frame, future: Future[Frame], timeout: float, since: float) -> Frame:
        """Wait for the answer of a request.

        Raises:
            PeerLostError: when it does not come in time.
        """
        try:
            return future.result(max(0.0, since + timeout - time.monotonic()))
        except TimeoutError:
            raise self.lost(frame, since) from None
        finally:
            # Also after an interrupt: an answer that is not waited for must not keep its bytes.
            self.forget(frame.request)

    def _take(self, request: int) -> _PendingCall | None:
        with self._room:
            entry = self._waiting.pop(request, None)
            if entry is not None:
                self.bytes_in_flight -= entry.size
                self._room.notify_all()
        return entry
