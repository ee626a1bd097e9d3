"""What the chief and the workers ask of the parameter servers: pull, push, read, write, on all of them.

A request that a server does not answer is sent again under its number, until the server is there again: the
servers carry it out once. Meanwhile the caller waits; after `absence_limit` the error names the server.

Tests: tests/unit/parameter_server/test_client.py.
"""

from __future__ import annotations

import builtins
import concurrent.futures
import contextlib
import functools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias

import numpy as np

from unisono import _errors
from unisono._errors import ClusterError
from unisono.parameter_server.server._traffic import Traffic
from unisono.parameter_server.state._create import NewVariable, encode_news
from unisono.parameter_server.state._push import UsedBatches
from unisono.rpc._calls import PeerLostError, PushToServer, RequestClient, RequestNumbers, StaleValuesError
from unisono.rpc._frames import Frame, blob
from unisono.rpc._ops import Op
from unisono.rpc._versions import installed

#: Seconds after which a request is sent again, and between two attempts while a server is away.
RETRY_AFTER = 5.0
RETRY_EVERY = 0.2

#: Chiefs that begin at the same moment wait for up to 15 of these seconds before they try again.
_TURN = 0.02

#: Seconds for the answer of a server that is asked to end.
_END_WITHIN = 5.0
#: Seconds for which a server, or all workers, may be away: a server that is started again reads its state
#: from a disk.
ABSENCE_SECONDS = 300.0

#: Seconds after which the log names a task that is away, once; one that is just starting imports for 2 to
#: 8 s.
WARN_AFTER = 8.0

_LOG = logging.getLogger("unisono")

#: A variable: the number of its server, its own number there, and the type to which it is rounded, if it is.
Key: TypeAlias = "tuple[int, int] | tuple[int, int, str]"


def key_of(server: int, number: int, dtype: str | None = None) -> Key:
    """Return the key of a variable."""
    return (server, number) if dtype is None else (server, number, dtype)


class PulledValues(list[Any]):
    """The values of a pull, and where they come from.

    Args:
        lineages: by server, within which changes these values are.
    """

    def __init__(self, values: Iterable[Any], lineages: Mapping[int, str]) -> None:
        super().__init__(values)
        self.lineages = lineages


class ServerClient:
    """A client of all servers of a cluster; safe to use from several threads.

    Args:
        clients: one for each server, in the order of their numbers.
        absence_limit: seconds for which a server may be away.
    """

    def __init__(
        self, clients: Sequence[RequestClient], generation: int = 0, absence_limit: float = ABSENCE_SECONDS
    ) -> None:
        self._clients, self._generation, self._absence_limit = list(clients), generation, absence_limit
        self._numbers = RequestNumbers()
        #: Tells this chief from others that ask for the same generation.
        self._name = secrets.token_hex(8)
        self._lock = threading.Lock()
        #: Counts what goes to the servers, and what comes.
        self.traffic = Traffic()
        #: By variable and type: the newest version that was seen, and its value.
        self._known: dict[Key, tuple[int, Any]] = {}
        #: By server: within which its versions can be compared, and how many pushes of it were applied.
        self._lineages: dict[int, str] = {}
        self._counts: dict[int, int] = {}
        #: By server: how often variables were dropped there.
        self._dropped: dict[int, int] = {}
        self._is_closed = threading.Event()

    @property
    def num_servers(self) -> int:
        """How many servers the cluster has."""
        return len(self._clients)

    @property
    def generation(self) -> int:
        """Which start of the job this is, once it has begun."""
        return self._generation

    def begin_job(self, least: int) -> int:
        """Drop the variables of earlier jobs on all servers; return the generation of this job.

        It is higher than any earlier job's: what workers compute for an earlier chief is refused. Chiefs
        that begin at the same moment may ask for the same one, which a server gives to the first: the others
        take a higher one, and the last of them leads.

        Raises:
            ClusterError: other chiefs take each generation first, or a server is away for too long.
            InvalidArgumentError: a chief of a higher generation has taken over meanwhile.
        """
        for digit in self._name:
            known = [int(answer.meta["generation"]) for answer in self.on_all(Op.STATUS)]
            self._generation = max(least, 1 + max(known, default=0))
            hello = {"reset": True, "chief": self._name, "versions": installed()}
            if all(answer.meta["chief"] == self._name for answer in self.on_all(Op.HELLO, hello)):
                return self._generation
            # Each chief waits for another time, so that one of them is the first at all servers.
            self._is_closed.wait(int(digit, 16) * _TURN)
        raise ClusterError(
            "A job must have one chief. Received: others that begin at the same moment as this one, each of "
            f"{len(self._name)} times. Start one chief, and another one when it has ended."
        )

    def used_batches(self) -> dict[str, UsedBatches]:
        """Return which batches of workers' datasets are in the updates of any server.

        By name of an iterator and, after `@`, number of the worker.
        """
        used: dict[str, UsedBatches] = {}
        for answer in self.on_all(Op.STATUS, {"used": True}):
            for name in answer.meta["used"]:
                used.setdefault(name, UsedBatches()).join(UsedBatches.decode(answer.meta["used"], name))
        return used

    # --- requests ------------------------------------------------------------------------------

    def send(
        self, server: int, op: Op, meta: Mapping[str, Any] | None = None, arrays: Sequence[Any] = ()
    ) -> Future[Frame]:
        """Send a request to a server until it is answered."""
        frame = Frame(op, self._numbers.next(), self._generation, dict(meta or {}), arrays)
        attempts = _Attempts(self._clients[server], frame, self._absence_limit, self._is_closed)
        attempts.answer.add_done_callback(self.traffic.sent(server, op, arrays))
        attempts.begin()
        return attempts.answer

    def call(
        self, server: int, op: Op, meta: Mapping[str, Any] | None = None, arrays: Sequence[Any] = ()
    ) -> Frame:
        """Send a request to a server, and wait for its answer; see `send`."""
        sent = self.send(server, op, meta, arrays)
        self.take_until(sent)
        return sent.result()

    def take_until(self, future: Future[Any]) -> None:
        """Take answers in the present thread until a future is done, where no other thread does."""
        # Any client: those of a process share what takes answers.
        if self._clients:
            self._clients[0].take_until(future)

    def on_all(self, op: Op, meta: Mapping[str, Any] | None = None) -> list[Frame]:
        """Send a request to all servers, and wait for their answers."""
        return [sent.result() for sent in [self.send(i, op, meta) for i in range(self.num_servers)]]

    # --- variables -----------------------------------------------------------------------------

    def pull(self, keys: Sequence[Key]) -> Future[list[Any]]:
        """Return the values that variables have now; only those travel that changed since the last pull."""
        pulled: Future[list[Any]] = Future()
        self._pull(pulled, keys, ())
        return pulled

    def _pull(
        self, pulled: Future[list[Any]], keys: Sequence[Key], pushes: Sequence[PushToServer]
    ) -> list[Future[Frame]]:
        """Send pushes, and pull behind them; return the answers to the pushes."""
        parts = _by_server(keys)
        if not parts:
            pulled.set_result(PulledValues([], {}))
        left = Countdown(len(parts), lambda error: self._finish_pull(pulled, keys, error))
        answers = []
        for push in pushes:
            own = parts.pop(push.server, None)
            meta = push.meta if own is None else {**push.meta, "pull": self._asked(own)}
            answers.append(self.send(push.server, Op.PUSH, meta, push.arrays))
            if own is not None:
                answers[-1].add_done_callback(functools.partial(self._note_answer, own, left))
        for server, own in parts.items():
            sent = self.send(server, Op.PULL, self._asked(own))
            sent.add_done_callback(functools.partial(self._note_answer, own, left))
        return answers

    def _note_answer(self, keys: Sequence[Key], left: Countdown, sent: Future[Frame]) -> None:
        error: BaseException | None = None
        try:
            self._note(keys, sent.result())
        except Exception as problem:  # else who waits for the pull would wait for ever
            error = problem
        left.one_done(error)

    def _asked(self, keys: Sequence[Key]) -> dict[str, Any]:
        """Return the fields of a pull of variables of one server."""
        with self._lock:
            versions = [self._known[key][0] if key in self._known else -1 for key in keys]
            lineage, count = self._lineages.get(keys[0][0]), self._counts.get(keys[0][0], 0)
        return {**_named(keys), "versions": versions, "lineage": lineage, "count": count}

    def _finish_pull(
        self, pulled: Future[list[Any]], keys: Sequence[Key], error: BaseException | None
    ) -> None:
        if error is not None:
            pulled.set_exception(error)
            return
        with self._lock:
            found = [self._known.get(key) for key in keys]
            lineages = {key[0]: self._lineages[key[0]] for key in keys}
        if None in found:
            # A server was started again, and the answer to another pull has dropped what it had before.
            self._pull(pulled, keys, ())
            return
        pulled.set_result(PulledValues([known[1] for known in found if known is not None], lineages))

    def _note(self, keys: Sequence[Key], answer: Frame) -> None:
        meta = answer.meta.get("pulled", answer.meta)
        lineage = meta["lineage"]
        with self._lock:
            server, dropped = keys[0][0], meta.get("dropped", 0)
            if self._lineages.get(server) != lineage:
                # The server was started again, or begins another job: its versions begin again, too.
                self._lineages[server], self._counts[server] = lineage, 0
                self._known = {key: known for key, known in self._known.items() if key[0] != server}
            elif self._dropped.get(server, 0) < dropped:
                # What is in use is asked for now.
                asked = set(keys)
                self._known = {k: known for k, known in self._known.items() if k[0] != server or k in asked}
            self._counts[server] = max(meta.get("count", 0), self._counts[server])
            self._dropped[server] = max(dropped, self._dropped.get(server, 0))
            for i, array in zip(meta["changed"], answer.arrays, strict=True):
                version = meta["versions"][i]
                # Two pulls may be under way: the older answer may come last.
                if keys[i] not in self._known or self._known[keys[i]][0] < version:
                    self._known[keys[i]] = version, array

    def push(
        self, pushes: Sequence[PushToServer], pulls: Sequence[Key] | None = None
    ) -> tuple[list[Future[Frame]], Future[list[Any]] | None]:
        """Send what a closure changes on servers, which apply it once.

        Args:
            pushes: one for each server.
            pulls: variables whose values come back in the answers, as they are behind the pushes; a server
                without a push is asked in a message of its own. None for no pull.
        """
        pulled: Future[list[Any]] = Future()
        answers = self._pull(pulled, pulls or (), pushes)
        return answers, None if pulls is None else pulled

    def read(self, key: Key) -> np.ndarray[Any, Any]:
        """Return the value of a variable."""
        value: np.ndarray[Any, Any] = self.pull([key]).result()[0]
        return value

    def write(self, key: Key, value: Any) -> None:
        """Assign a variable."""
        self.call(key[0], Op.WRITE, {"ids": [key[1]]}, [np.asarray(value)])

    def rows(self, keys: Sequence[Key], indices: Sequence[Any]) -> Future[list[Any]]:
        """Return rows of variables, later."""
        found: Future[list[Any]] = Future()

        def answered(sent: Future[Frame]) -> None:
            if (error := sent.exception()) is not None:
                found.set_exception(error)
            else:
                found.set_result(list(sent.result().arrays))

        self.send(keys[0][0], Op.ROWS, _named(keys), indices).add_done_callback(answered)
        return found

    def create_variables(self, server: int, news: Sequence[NewVariable]) -> list[int]:
        """Make variables on a server; return their numbers there."""
        meta, arrays = encode_news(news)
        numbers: list[int] = self.call(server, Op.CREATE, {"variables": meta}, arrays).meta["ids"]
        return numbers

    def end(self, code: int) -> list[str]:
        """Let all servers end; this ends the connections, too."""
        sent: dict[str, Future[Frame]] = {}
        for client in self._clients:
            frame = Frame(Op.END, self._numbers.next(), self._generation, {"code": code})
            with contextlib.suppress(ClusterError):
                sent[client.address] = client.send(frame, timeout=_END_WITHIN)
        # One that is away, or has ended already, does not answer.
        done = concurrent.futures.wait(sent.values(), _END_WITHIN).done
        self.close()
        answered = {a for a, each in sent.items() if each in done and each.exception() is None}
        return [client.address for client in self._clients if client.address not in answered]

    def close(self) -> None:
        """End the connections; requests without an answer fail."""
        self._is_closed.set()
        for client in self._clients:
            client.close()

    def add_program(self, server: int, data: bytes) -> str:
        """Bring a program to a server; return its digest."""
        digest: str = self.call(server, Op.PROGRAM, {}, [blob(data)]).meta["digest"]
        return digest


def _by_server(keys: Sequence[Key]) -> dict[int, list[Key]]:
    parts: dict[int, list[Key]] = {}
    for key in keys:
        parts.setdefault(key[0], []).append(key)
    return parts


def _named(keys: Sequence[Key]) -> dict[str, Any]:
    """Return the fields that name variables of one server, and which of them are rounded to which type."""
    rounded = [key for key in keys if len(key) == 3]
    types = {"rounded": [key[1] for key in rounded], "dtype": rounded[0][2]} if rounded else {}
    return {"ids": [key[1] for key in keys], **types}


class _Attempts:
    """A request to one server, repeated until it is answered.

    Args:
        frame: its number is the same in each attempt.
        absence_limit: seconds for which the server may be away.
    """

    def __init__(
        self, client: RequestClient, frame: Frame, absence_limit: float, is_closed: threading.Event
    ) -> None:
        self._client, self._frame = client, frame
        self._absence_limit, self._is_closed = absence_limit, is_closed
        self._began = time.monotonic()
        self._has_warned = False
        self.answer: Future[Frame] = Future()

    def begin(self) -> None:
        """Send the request."""
        try:
            sent = self._client.send(self._frame, timeout=RETRY_AFTER)
        except PeerLostError as error:
            self._lost(error)
            return
        except Exception as error:  # from a timer's thread it would be lost
            self.answer.set_exception(error)
            return
        sent.add_done_callback(self._ended)

    def _ended(self, sent: Future[Frame]) -> None:
        error = sent.exception()
        if isinstance(error, PeerLostError):
            self._lost(error)
        elif error is not None:
            self.answer.set_exception(error)
        elif sent.result().op is Op.ERROR:
            self.answer.set_exception(error_of(sent.result()))
        else:
            self.answer.set_result(sent.result())

    def _lost(self, error: PeerLostError) -> None:
        away = time.monotonic() - self._began
        if self._is_closed.is_set():
            self.answer.set_exception(error)
            return
        if away >= self._absence_limit:
            self.answer.set_exception(
                ClusterError(
                    f"A parameter server must answer within {self._absence_limit:g} s, also after a restart. "
                    f"Received: nothing from {error.task} at {error.address} for {away:.1f} s"
                    f"{error.why and f' ({error.why})'}. Start it again; with its directory it goes on where "
                    "it was."
                )
            )
            return
        if away >= WARN_AFTER and not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "%s at %s does not answer for %.1f s%s. The request %s is repeated for %g s.",
                error.task,
                error.address,
                away,
                error.why and f" ({error.why})",
                self._frame.op.name,
                self._absence_limit,
            )
        timer = threading.Timer(RETRY_EVERY, self.begin)
        timer.daemon = True
        timer.start()


class Countdown:
    """Calls a function when some requests are done, with the first error among them."""

    def __init__(self, count: int, then: Callable[[BaseException | None], None]) -> None:
        self._count, self._then = count, then
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def one_done(self, error: BaseException | None) -> None:
        """Count a request, and note its error."""
        with self._lock:
            self._count -= 1
            self._error = self._error or error
            is_last = self._count == 0
        if is_last:
            self._then(self._error)


def error_of(answer: Frame) -> Exception:
    """Return the exception of an answer: an error of Unisono or a builtin by its name.

    >>> error_of(Frame(Op.ERROR, meta={"kind": "KeyError", "text": "'w'"}))
    KeyError("'w'")
    """
    name, text = str(answer.meta.get("kind")), str(answer.meta.get("text"))
    if name == StaleValuesError.__name__:
        return StaleValuesError(text)
    for module in (_errors, builtins):
        kind = getattr(module, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(text)
            except TypeError:  # it takes other arguments, as `UnicodeDecodeError` does
                break
    return ClusterError(f"{name}: {text}")
