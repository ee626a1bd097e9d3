"""The workers of a job as a log folder: each is asked at its own port, with the key for watching.

Their events are read as they grow, each byte once. The history, which a launcher would write, is made of what
is seen: which process answers, how it ends, and which one takes its place. Nothing waits for a worker that
does not answer.

Tests: tests/unit/watch/test_worker_folder.py, tests/cluster/test_watch_workers.py.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from unisono._checks import is_number, whole_number
from unisono._errors import ClusterError
from unisono.rpc._frames import Frame
from unisono.rpc._ops import Op
from unisono.watch._log_folder import ReceivedBytes

#: Seconds between two questions to a worker, and for an answer.
_PERIOD, _ANSWER_SECONDS = 0.5, 5.0
#: Seconds in which the others of the cluster answer at first, once one has.
_OTHERS_SECONDS = 3.0
#: Seconds without an answer after which a worker counts as lost; the same for all of them, after which the
#: job counts as ended: until then a supervisor may start them again.
_LOST, _GONE = 5.0, 60.0
_TASK = re.compile("(chief|worker):[0-9]{1,6}")
_HISTORY, _LAUNCH = "history.jsonl", "launch.json"
_TEXT, _MOST_TASKS = 300, 4096


class WatchClient(Protocol):
    """Sends requests to a worker; see `unisono.rpc._transport._client.RpcClient`."""

    def send(self, frame: Frame, timeout: float | None = None) -> Future[Frame]:
        """Send a request; its future gets the answer or the error."""

    def close(self) -> None:
        """End the connection."""


class WatchedWorker:
    """One worker: what it has told, and the questions that are open.

    Args:
        address: `"host:port"`, for people.
    """

    def __init__(self, address: str, rpc_client: WatchClient) -> None:
        self.address, self._rpc_client = address, rpc_client
        #: The facts of the process of now; none before its first answer.
        self.facts: Mapping[str, Any] = {}
        #: How it has ended, as it has told it; None while it has not.
        self.end: tuple[int, str] | None = None
        #: Since when a question has no answer, and why.
        self.since: float | None = None
        self.trouble = ""
        self.error: BaseException | None = None
        self.events = ReceivedBytes()
        self._file, self._offset = "", 0
        #: When the last event was written, by the clock here.
        self.written: float | None = None
        self._numbers = itertools.count(2)
        self._asked: Future[Frame] | None = None
        self._until: Future[Frame] | None = None
        self._next = float("-inf")

    @property
    def has_more(self) -> bool:
        """True if more of its events is there than one answer holds."""
        size = whole_number(self.facts.get("size"), 0)
        return size is not None and self._offset < size

    def ask(self, now: float) -> None:
        """Send the questions that are due, and take the answers that are there."""
        self._take_answer(now)
        self._take_end()
        if self._asked is not None or now < self._next:
            return
        known = {"file": self._file, "offset": self._offset}
        self._next = now + _PERIOD
        self.since = now if self.since is None else self.since
        self._asked = self._rpc_client.send(
            Frame(Op.STATUS, next(self._numbers), meta=known), _ANSWER_SECONDS
        )
        # With its number it takes the place of the one before: the worker knows what is known here.
        self._until = self._rpc_client.send(Frame(Op.STATUS, 1, meta={**known, "until": "end"}))

    def _take_answer(self, now: float) -> None:
        if self._asked is None or not self._asked.done():
            return
        asked, self._asked = self._asked, None
        if (answer := self._answer_of(asked)) is not None:
            self._take(answer)
            if self.has_more:
                self._next = now

    def _take_end(self) -> None:
        if self._until is None or not self._until.done():
            return
        until, self._until = self._until, None
        answer = self._answer_of(until)
        code = None if answer is None else whole_number(answer.meta.get("exit_code"), 0)
        if answer is not None and code is not None:
            self._take(answer)
            self.end = code, str(answer.meta.get("text", ""))[:_TEXT]

    def _answer_of(self, future: Future[Frame]) -> Frame | None:
        """Return an answer that is there; None where it is an error, which is noted."""
        error = future.exception()
        if error is None:
            answer = future.result()
            if answer.op is Op.OK and _TASK.fullmatch(str(answer.meta.get("watch"))):
                return answer
            text = answer.meta.get("text", "it answers no watchers")
            error = ClusterError(f"{self.address} answers: {text}")
        self.error, self.trouble = error, getattr(error, "why", "") or str(error)
        return None

    def _take(self, answer: Frame) -> None:
        facts = dict(answer.meta)
        if self.facts.get("pid") != facts.get("pid"):
            self.end = None
        begins = self._begins_again(facts)
        self.facts, self.since, self.error, self.trouble = facts, None, None, ""
        offset, file = whole_number(facts.get("offset"), 0), str(facts.get("file"))
        data = answer.arrays[0].tobytes() if answer.arrays else b""
        if offset is None:
            return
        if file != self._file or offset > self._offset or begins:
            if offset:
                return
            # Of another process, or after a file that was removed: the last line may be incomplete.
            self._file, self._offset = file, 0
            self.events.append(b"\n")
        # The question may be older than the last answer.
        data = data[self._offset - offset :]
        self.events.append(data)
        self._offset += len(data)
        if data:
            self.written = time.time()

    def _begins_again(self, facts: Mapping[str, Any]) -> bool:
        """Return whether the file is shorter than what was read of it: such as after a launch in its folder.

        It may also be that an answer is older than the last one.
        """
        size = whole_number(facts.get("size"), 0)
        return size is not None and size < self._offset and _sent_at(facts) >= _sent_at(self.facts)

    def forget(self) -> None:
        """Read all of its events again."""
        self.events.close()
        self.events, self._file, self._offset = ReceivedBytes(), "", 0
        self._next = float("-inf")

    def close(self) -> None:
        """End the connection."""
        self._rpc_client.close()
        self.events.close()


class WorkerFolder:
    """The workers of a cluster, read as a log folder.

    Args:
        addresses: of some workers, which name the others.
        connect: returns a client of a worker at an address.

    Raises:
        ClusterError: one of these workers does not answer, or rejects the key.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        connect: Callable[[str], WatchClient],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connect, self._clock = connect, clock
        self._workers: dict[str, WatchedWorker] = {}
        #: By the names of their tasks, once they have answered.
        self._by_task: dict[str, WatchedWorker] = {}
        self._history = bytearray()
        self._pids: dict[str, object] = {}
        self._generation = 0
        self._has_launched = self._has_quit = False
        #: Tasks that have ended or are lost, and tasks whose processes of before a restart are expected to be
        #: replaced.
        self._ended: dict[str, int] = {}
        self._replaced: set[str] = set()
        try:
            self._open(addresses)
            first = [self._workers[address] for address in addresses]
            self._wait(first, _ANSWER_SECONDS + 1.0)
            for worker in first:
                if not worker.facts:
                    raise worker.error or ClusterError(f"{worker.address} does not answer.")
            self._find_others()
            self._wait(list(self._workers.values()), _OTHERS_SECONDS)
        except BaseException:
            self.close()
            raise
        self.name = ", ".join(addresses)
        self._note_changes()

    # --- as a log folder ------------------------------------------------------------------------

    def names(self, folder: str) -> Sequence[str]:
        """Return the names of the files in a folder below it."""
        return [f"{task.replace(':', '-')}.jsonl" for task in self._by_task] if folder == "events" else []

    def size(self, name: str) -> int:
        """Return the bytes of a file; 0 where there is none."""
        if name == _HISTORY:
            self._refresh()
            return len(self._history)
        worker = self._of(name)
        return 0 if worker is None else worker.events.size

    def read(self, name: str, start: int, most: int) -> bytes:
        """Return bytes of a file from a position on; none where there are none."""
        if name == _HISTORY:
            return bytes(self._history[start : start + most])
        if name == _LAUNCH:
            return json.dumps(self._launch()).encode()
        worker = self._of(name)
        return b"" if worker is None else worker.events.read(start, most)

    def changed_at(self, name: str) -> float | None:
        """Return when a task's last event was received: clocks of other machines may be wrong."""
        task = re.sub("^progress/g[0-9]+-(.+)-([0-9]+)$", r"\1:\2", name)
        worker = self._by_task.get(task)
        return None if worker is None else worker.written

    def close(self) -> None:
        """End the connections."""
        for worker in self._workers.values():
            worker.close()

    def _of(self, name: str) -> WatchedWorker | None:
        job, _, index = name.removeprefix("events/").removesuffix(".jsonl").rpartition("-")
        return self._by_task.get(f"{job}:{index}")

    def _launch(self) -> dict[str, Any]:
        facts = next((w.facts for w in self._by_task.values() if w.facts), {})
        tasks = facts.get("tasks")
        count = len(tasks) if isinstance(tasks, dict) else 1
        config = [["tasks", f"{count} worker{'s' * (count != 1)}"]]
        title, command = (str(facts.get(name, ""))[:_TEXT] for name in ("title", "command"))
        return {"title": title, "command": command, "config": config}

    # --- questions ------------------------------------------------------------------------------

    def _open(self, addresses: Sequence[str]) -> None:
        for address in addresses:
            if address not in self._workers:
                self._workers[address] = WatchedWorker(address, self._connect(address))

    def _find_others(self) -> None:
        known = {str(worker.facts.get("watch")) for worker in self._workers.values()}
        for worker in list(self._workers.values()):
            tasks = worker.facts.get("tasks")
            for task, address in list(tasks.items())[:_MOST_TASKS] if isinstance(tasks, dict) else ():
                if task not in known and _TASK.fullmatch(task) and isinstance(address, str):
                    known.add(task)
                    # Without a key, an address of this machine alone.
                    with contextlib.suppress(ClusterError):
                        self._open([address])
                        self._by_task.setdefault(task, self._workers[address])

    def _wait(self, workers: Sequence[WatchedWorker], seconds: float) -> None:
        """Wait until workers have answered all, or cannot; for these seconds at most."""
        deadline = time.monotonic() + seconds
        waits = list(workers)
        while waits and time.monotonic() < deadline:
            for worker in waits:
                worker.ask(self._clock())
            waits = [w for w in waits if w.error is None and (not w.facts or w.has_more)]
            time.sleep(0.01)

    def _refresh(self) -> None:
        now = self._clock()
        for worker in self._workers.values():
            worker.ask(now)
        # A supervisor may start more of them.
        self._find_others()
        self._note_changes()

    # --- the history ----------------------------------------------------------------------------

    def _note_changes(self) -> None:
        now = self._clock()
        for worker in self._workers.values():
            if worker.facts:
                self._by_task[str(worker.facts["watch"])] = worker
        if not self._has_launched:
            self._note_launch()
        for task, worker in list(self._by_task.items()):
            if task not in self._by_task:
                continue
            if worker.facts and self._pids.get(task) != worker.facts.get("pid"):
                self._note_start(task, worker)
            if task in self._pids:
                self._note_state(task, worker, now)
        self._note_quit(now)

    def _note_state(self, task: str, worker: WatchedWorker, now: float) -> None:
        """Note that a process has ended, is lost, or answers again."""
        silent = 0.0 if worker.since is None else now - worker.since
        # Where one process was replaced the others will be, too.
        is_lost = silent >= (_GONE if task in self._replaced else _LOST)
        if task in self._ended:
            if worker.end is None and not silent:
                self._ended.pop(task)
                self._note("found", time.time(), task)
        elif worker.end is not None and task not in self._replaced:
            self._note_end(task, *worker.end)
        elif is_lost:
            self._replaced.discard(task)
            self._note_end(task, None, f"does not answer any more: {worker.trouble}", silent)

    def _note_launch(self) -> None:
        started = [w.facts.get("started") for w in self._workers.values()]
        began = min((float(at) for at in started if is_number(at)), default=time.time())
        self._note("launched", began, None)
        self._has_launched = True
        for task, worker in self._by_task.items():
            # Its address may have a meaning in its cluster alone.
            self._note("created" if worker.facts else "unreachable", began, task, detail=worker.trouble)

    def _note_start(self, task: str, worker: WatchedWorker) -> None:
        before, self._pids[task] = self._pids.get(task), worker.facts.get("pid")
        if self._has_quit:
            # It counted as ended, and was started again: another launch.
            self._has_quit, self._ended, self._pids = False, {}, {task: worker.facts.get("pid")}
            self._generation = 0
            for each in self._workers.values():
                each.forget()
            self._note_launch()
        elif before is not None and task not in self._replaced:
            self._note_restart(task, worker)
        self._note_process(task, worker)

    def _note_restart(self, task: str, worker: WatchedWorker) -> None:
        generation = whole_number(worker.facts.get("generation"), 0) or 0
        if not self._ended:
            self._note_end(task, None, "another process has taken its place")
        # All processes of a cluster start again together.
        at = min(_time_of(worker), time.time())
        self._note("restart", at, None, detail="other processes answer", generation=generation)
        self._drop_others(worker.facts.get("tasks"))
        self._replaced, self._ended = set(self._pids), {}

    def _drop_others(self, tasks: object) -> None:
        """Forget the tasks that a cluster of another size lacks."""
        for task in set(self._by_task) - set(tasks if isinstance(tasks, dict) else self._by_task):
            worker = self._by_task.pop(task)
            self._workers = {a: each for a, each in self._workers.items() if each is not worker}
            self._pids.pop(task, None)
            worker.close()

    def _note_process(self, task: str, worker: WatchedWorker) -> None:
        generation = whole_number(worker.facts.get("generation"), 0) or 0
        self._generation = max(self._generation, generation)
        self._replaced.discard(task)
        self._ended.pop(task, None)
        pid, at = whole_number(worker.facts.get("pid"), 0), _time_of(worker)
        host = str(worker.facts.get("host", ""))[:_TEXT]
        self._note("started", at, task, pid=pid, generation=generation, host=host)

    def _note_end(self, task: str, code: int | None, text: str, ago: float = 0.0) -> None:
        self._ended[task] = 1 if code is None else code
        at = time.time() - ago
        self._note("ended" if code == 0 else "failed", at, task, detail=text, exit_code=code)

    def _note_quit(self, now: float) -> None:
        if self._has_quit or set(self._ended) != set(self._pids):
            return
        code = max(self._ended.values(), default=0)
        since = [worker.since for worker in self._by_task.values() if worker.since is not None]
        is_gone = len(since) == len(self._by_task) and now - max(since) >= _GONE
        if not code or is_gone:
            self._note("quit", time.time(), None, exit_code=code)
            self._has_quit = True

    def _note(
        self,
        name: str,
        at: float,
        task: str | None,
        *,
        detail: str = "",
        exit_code: int | None = None,
        **facts: object,
    ) -> None:
        record = {
            "event": name, "time": at, "task": task, "detail": detail, "generation": self._generation,
            "exit_code": exit_code, **facts,
        }  # fmt: skip
        self._history += json.dumps(record).encode() + b"\n"


def _sent_at(facts: Mapping[str, Any]) -> float:
    """Return when facts were sent, by the clock of their task."""
    now = facts.get("now")
    return float(now) if is_number(now) else 0.0


def _time_of(worker: WatchedWorker) -> float:
    """Return when a process began, by the clock of its events."""
    began = worker.facts.get("began")
    return float(began) if is_number(began) else time.time()
