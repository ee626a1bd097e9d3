"""A server of a standalone client, without sockets: requests, and what happens as time passes."""

from __future__ import annotations

import collections
import dataclasses
import logging
import os
import platform
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unisono._errors import InvalidArgumentError, UnisonoError
from unisono._system._lease import ActiveClock
from unisono.rpc import _fields as fields
from unisono.rpc._calls import ClientId, error_answer
from unisono.rpc._frames import Frame, blob
from unisono.rpc._ops import Op
from unisono.rpc._versions import installed
from unisono.standalone._lease_book import LeaseBook
from unisono.standalone._protocol import LEASE_GRACE, ProcessShape, file_name, printable, task_of
from unisono.standalone._server_job import ClientProgress, ServerJob, is_due, read_seen
from unisono.standalone._server_machine import ServerMachine

_LOG = logging.getLogger("unisono")

#: Seconds for killed processes to end.
_KILL_SECONDS = 10.0
_FIRST_SIGNAL, _LAST_SIGNAL = 1, 64


@dataclasses.dataclass(frozen=True)
class _Poll:
    """A POLL that waits for news."""

    client: ClientId
    request: Frame
    seen: dict[str, ClientProgress]
    asked: float


class Agent:
    """Answers the requests to one server.

    `handle` and `tick` may be called by different threads.
    """

    def __init__(
        self,
        name: str,
        machine: ServerMachine,
        reply: Callable[[ClientId, Frame], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._machine, self._reply, self._clock = name, machine, reply, clock
        # Without the time in which this process was stopped: it has received no request then.
        self._now = ActiveClock(clock=clock).now
        self._instance = secrets.token_hex(8)
        self._lock = threading.RLock()
        self._book = LeaseBook(name, self._now)
        self._job: ServerJob | None = None
        self._poll: _Poll | None = None
        self._answered_at = -1.0
        #: How often a job has taken this server.
        self._taken = 0
        #: When the processes of a job whose lease is over are killed.
        self._kill_at: float | None = None
        #: Requests by name, and errors.
        self.counts: collections.Counter[str] = collections.Counter()
        self._handlers: dict[Op, Callable[[Frame, ServerJob], Frame]] = {
            Op.PORTS: self._ports,
            Op.PUT: self._put,
            Op.GET: self._get,
            Op.START: self._start,
            Op.SIGNAL: self._signal,
        }

    def handle(self, client: ClientId, frame: Frame) -> Frame | None:
        """Answer a request."""
        self.counts[frame.op.name] += 1
        try:
            with self._lock:
                return self._answer(client, frame)
        except Exception as error:
            # Whatever a client sends, the server goes on.
            self.counts["errors"] += 1
            if not isinstance(error, (UnisonoError, OSError)):
                _LOG.warning("A server could not answer %s.", frame, exc_info=True)
            return error_answer(frame, error)

    def _answer(self, client: ClientId, frame: Frame) -> Frame | None:
        if frame.op is Op.STATUS:
            return self._look(frame) if frame.meta else frame.answer(Op.OK, self.status())
        job = fields.text(frame.meta, "job", 100)
        if frame.op is Op.HELLO:
            return self._hello(frame, job)
        self._book.check(job)
        running = self._job
        if running is None:
            raise InvalidArgumentError("The job must have begun with HELLO.")
        if frame.op is Op.POLL:
            seen = read_seen(fields.mapping(frame.meta, "seen"))
            self._wait_for_news(_Poll(client, frame, seen, self._now()), running)
            return None
        if frame.op in (Op.SWEEP, Op.END):
            self._end_in_thread(client, frame, running)
            return None
        if frame.op not in self._handlers:
            raise InvalidArgumentError(f"A standalone server does not answer {frame.op.name}.")
        return self._handlers[frame.op](frame, running)

    # requests

    def _hello(self, frame: Frame, job: str) -> Frame:
        if not job.isalnum():
            raise InvalidArgumentError("`job` must have letters and digits alone.")
        client = printable(fields.text(frame.meta, "client"))
        lease = fields.number(frame.meta, "lease", 1.0, 86_400.0)
        fresh = self._book.claim(job, client, float(lease))
        if fresh:
            self._taken += 1
            _LOG.warning("%s trains for %s.", self._name, client)
            try:
                self._job = ServerJob(self._machine.job_directory(job), self._machine)
            except OSError:
                self._book.end(for_good=False)
                raise
        return frame.answer(
            Op.OK,
            {
                "instance": self._instance,
                "fresh": fresh,
                "taken": self._taken,
                "root": str(self._machine.job_directory(job)),
                "cores": self._machine.cores,
                "gpus": list(self._machine.gpus),
                "python": platform.python_version(),
                "packages": installed("cloudpickle"),
            },
        )

    def _ports(self, frame: Frame, job: ServerJob) -> Frame:
        count = fields.whole(frame.meta, "count", least=1, most=1000)
        return frame.answer(Op.OK, {"ports": self._machine.ports(count, fields.ints(frame.meta, "avoid"))})

    def _put(self, frame: Frame, job: ServerJob) -> Frame:
        name = file_name(fields.text(frame.meta, "name"))
        size = fields.whole(frame.meta, "size", least=0, most=1 << 50)
        job.put(name, fields.whole(frame.meta, "offset", least=0, most=1 << 50), size, _blob(frame))
        return frame.answer(Op.OK)

    def _get(self, frame: Frame, job: ServerJob) -> Frame:
        name = file_name(fields.text(frame.meta, "name"))
        size, data = job.get(name, fields.whole(frame.meta, "offset", least=0, most=1 << 50))
        return frame.answer(Op.OK, {"size": size}, [blob(data)])

    def _start(self, frame: Frame, job: ServerJob) -> Frame:
        meta = frame.meta
        key = file_name(fields.text(meta, "key", 100))
        task = task_of(fields.text(meta, "task", 100))
        generation = fields.whole(meta, "generation", least=0, most=1 << 31)
        shape = ProcessShape.parse(fields.mapping(meta, "shape"))
        pid = job.start(key, task, generation, shape, fields.mapping(meta, "description"))
        return frame.answer(Op.OK, {"pid": pid})

    def _signal(self, frame: Frame, job: ServerJob) -> Frame:
        job.send(
            fields.text(frame.meta, "key", 100),
            fields.whole(frame.meta, "number", least=_FIRST_SIGNAL, most=_LAST_SIGNAL),
        )
        return frame.answer(Op.OK)

    def _look(self, frame: Frame) -> Frame:
        """Answer one who looks at the job, and has no lease of it."""
        job = self._job
        if "folder" in frame.meta:
            folder = fields.text(frame.meta, "folder", 100)
            return frame.answer(Op.OK, {"files": {} if job is None else job.listing(folder)})
        name = file_name(fields.text(frame.meta, "name"))
        offset = fields.whole(frame.meta, "offset", least=0, most=1 << 50)
        return frame.answer(Op.OK, {}, [blob(b"" if job is None else job.look(name, offset))])

    def status(self) -> dict[str, Any]:
        """Return numbers about the server."""
        held, job = self._book.held, self._job
        return {
            "instance": self._instance,
            "client": None if held is None else held.client,
            "processes": 0 if job is None else job.count,
            "counts": dict(self.counts),
            "bytes": resident_bytes(),
        }

    # what takes longer, or happens by itself

    def _end_in_thread(self, client: ClientId, frame: Frame, job: ServerJob) -> None:
        is_end = frame.op is Op.END
        if is_end:
            self._book.begin_to_end()

        def run() -> None:
            self._kill(job)
            killed = self._machine.sweep()
            if is_end:
                with self._lock:
                    self._forget_job(for_good=True)
            self._reply(client, frame.answer(Op.OK, {"killed": len(killed)}))

        threading.Thread(target=run, name="unisono-standalone-end", daemon=True).start()

    def _kill(self, job: ServerJob) -> None:
        """Kill the processes of a job and wait for their end, while other requests are answered."""
        deadline = self._clock() + _KILL_SECONDS
        with self._lock:
            job.kill()
        while self._clock() < deadline:
            with self._lock:
                if not job.is_running:
                    return
            time.sleep(0.01)

    def _forget_job(self, for_good: bool) -> None:
        job, self._job = self._job, None
        self._poll = self._kill_at = None
        self._book.end(for_good)
        if job is not None and for_good:
            job.remove()

    def _wait_for_news(self, poll: _Poll, job: ServerJob) -> None:
        if self._poll is not None:
            # A client has one at a time: the earlier one is a repetition, or its answer was lost. It gets
            # what is new, so that one who repeats messages keeps no output from the client.
            self._answer_poll(self._poll, job)
        self._poll = poll

    def tick(self) -> None:
        """Answer a POLL that is due, and end a job whose client is silent; some times a second."""
        with self._lock:
            now = self._now()
            self._end_silent(now)
            poll, job = self._poll, self._job
            if poll is None or job is None:
                return
            has_news, is_full = job.has_news(poll.seen)
            if is_due(now, poll.asked, self._answered_at, has_news, is_full):
                self._poll = None
                if has_news:
                    self._answered_at = now
                self._answer_poll(poll, job)

    def _answer_poll(self, poll: _Poll, job: ServerJob) -> None:
        news, blobs = job.news(poll.seen)
        answer = poll.request.answer(Op.OK, {"now": time.time(), "news": news}, blobs)
        self._reply(poll.client, answer)

    def _end_silent(self, now: float) -> None:
        held, job = self._book.held, self._job
        if held is None or job is None:
            return
        if held.is_over:
            _LOG.warning(
                "%s ends the training of %s, which was silent for %.0f s.",
                self._name,
                held.client,
                held.lease.seconds,
            )
            self._book.begin_to_end()
            self._kill_at = now + LEASE_GRACE
            job.terminate()
        if self._kill_at is not None and (now >= self._kill_at or not job.is_running):
            self._kill(job)
            self._machine.sweep()
            self._forget_job(for_good=False)

    def close(self) -> None:
        """Kill all processes; the files stay, for a server that is started again."""
        with self._lock:
            if self._job is not None:
                self._kill(self._job)
            self._machine.close()


def _blob(frame: Frame) -> memoryview:
    if len(frame.arrays) != 1:
        raise InvalidArgumentError(f"A blob must be the one array of its message, not {len(frame.arrays)}.")
    return memoryview(frame.arrays[0].tobytes())


def resident_bytes(path: Path = Path("/proc/self/statm")) -> int:
    """Return the bytes of memory of this process, 0 where the system does not say."""
    try:
        return int(path.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
