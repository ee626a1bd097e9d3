"""The chief's side of the workers: what they were sent, who is there, and what a worker that returns needs.

Tests: tests/unit/parameter_server/chief/test_workers.py.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import functools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from unisono._errors import ClusterError
from unisono.parameter_server.chief._closures import Absence, Rules, given_up, to_ask
from unisono.parameter_server.chief._queue import (
    ClosureQueue,
    NotReadyError,
    QueuedClosure,
    WorkerLostError,
)
from unisono.parameter_server.server._client import ABSENCE_SECONDS, WARN_AFTER, error_of
from unisono.parameter_server.server._traffic import StepTally
from unisono.parameter_server.state._push import UsedBatches
from unisono.parameter_server.worker._batched_reply import taken_apart
from unisono.parameter_server.worker._step_plan import StepPlan
from unisono.rpc._calls import PeerLostError, PeerRejectedError, RequestClient, RequestNumbers
from unisono.rpc._frames import Frame, blob
from unisono.rpc._ops import Op
from unisono.rpc._versions import installed

_LOG = logging.getLogger("unisono")

#: The arrays of several closures go in one message up to so many bytes.
_JOINT_BYTES = 1 << 20

#: Seconds between two looks at who is away, and for the answer of a worker that is asked.
_LOOK_EVERY = 0.1
_ANSWER_WITHIN = 5.0

#: Seconds for the first worker to come, so that the first program is for what it computes on.
_FIRST_WITHIN = 20.0

#: Seconds for a worker that has not come yet to learn that the job is over: else it would wait for a chief.
_LATE_WITHIN = 20.0
#: The same where it learns that otherwise.
_INFORMED_WITHIN = 0.2

#: Seconds of this wait after which the log says for whom.
_TELL_AFTER = 2.0


@dataclasses.dataclass(eq=False)
class BatchFunction:
    """A scheduled function that takes batches of workers: what is known of it, for all of its calls.

    Args:
        reads: for each batch that a call takes, the number of its iterator among those of the call; one of
            each until the function was traced.
        trace: makes the plan for batches of a form, and says what the function reads.
        states: gives a call the states of random generators; None until it was traced.
        plan: the name of its plan where it takes no batch at all.
    """

    name: str
    reads: tuple[int, ...]
    trace: Callable[[str], None]
    states: Callable[[], list[Any]] | None = None
    plan: str | None = None


@dataclasses.dataclass(eq=False)
class RunRequest:
    """What a closure executes.

    Args:
        plan: the name of a plan that the workers have; None where it depends on batches that they take.
        arrays: the arguments that travel with it, after the states.
        function: takes batches, where `plan` is None.
        states: of random generators: the same in every attempt. None where they are not known yet.
        tally: counts what it costs.
        reads: the function's, when the request was sent last.
    """

    plan: str | None
    arrays: Sequence[Any] = ()
    function: BatchFunction | None = None
    iterators: tuple[str, ...] = ()
    states: list[Any] | None = None
    tally: StepTally | None = None
    reads: tuple[int, ...] = ()

    def to_meta(self) -> dict[str, Any]:
        """Return what a worker gets besides arrays."""
        function = self.function
        self.reads = () if function is None else function.reads
        if self.states is None and function is not None and function.states is not None:
            self.states = function.states()
        return {
            "plan": self.plan if function is None else function.plan,
            "function": None if function is None else function.name,
            "takes": [self.iterators[i] for i in self.reads],
            "states": len(self.states or ()),
        }


@dataclasses.dataclass(frozen=True, eq=False)
class RunResult:
    """What a closure has computed."""

    plan: str
    arrays: list[Any]


#: What every worker gets before it runs closures: from the worker's number to operation, meta and arrays.
Setup = Callable[[int], tuple[Op, Mapping[str, Any], Sequence[Any]]]


class WorkerPool:
    """All workers of a cluster; safe to use from several threads.

    Args:
        prepare: makes a plan for batches of a form that a worker has; gets the request and the form.
        generation: how often this chief was started before.
        absence_limit: seconds for which all workers may be away.
        find_used: returns which batches are in the servers' updates, by `iterator@worker`.
    """

    def __init__(
        self,
        clients: Sequence[RequestClient],
        rules: Rules,
        prepare: Callable[[RunRequest, str], None],
        generation: int = 0,
        absence_limit: float = ABSENCE_SECONDS,
        find_used: Callable[[], Mapping[str, UsedBatches]] = dict,
    ) -> None:
        self._clients, self._generation, self._absence_limit = list(clients), generation, absence_limit
        self._find_used = find_used
        self._numbers = RequestNumbers()
        self._lock = threading.RLock()
        self._setups: list[Setup] = []
        #: Of datasets and iterators, by name.
        self._of_data: dict[str, Setup] = {}
        #: Says to workers whether they serve this chief already: one that is started again is another.
        self._name = secrets.token_hex(8)
        self._incarnations: dict[int, str] = {}
        #: On what each worker computes that has come, as `jax.export` names it.
        self._platforms: dict[int, str] = {}
        self._has_come = threading.Event()
        self._absent = {i: Absence(i, time.monotonic()) for i in range(len(self._clients))}
        #: The workers that were lost at least once.
        self._were_lost: set[int] = set()
        #: The absent workers that the log has named.
        self._named: set[int] = set()
        #: By worker and iterator: which batches are used that this chief knows of.
        self._used: dict[tuple[int, str], UsedBatches] = collections.defaultdict(UsedBatches)
        self._closed = threading.Event()
        self.queue = ClosureQueue(rules, self._run, prepare, self._lost, generation)
        self._watch = threading.Thread(target=self._look, name="unisono-workers", daemon=True)

    @property
    def num_workers(self) -> int:
        """How many workers the cluster has, also those that are away."""
        return len(self._clients)

    def find_platforms(self) -> tuple[str, ...]:
        """Return on what the workers compute, after the first one has come; CPUs are always among it.

        A worker of another kind, that comes later, computes on its CPU.
        """
        self._has_come.wait(_FIRST_WITHIN)
        return tuple(sorted({"cpu", *self._platforms.values()}))

    def start(self) -> None:
        """Begin to look for workers."""
        self._watch.start()

    # --- what all workers have -----------------------------------------------------------------

    def add_plan(
        self,
        name: str,
        plan: StepPlan,
        programs: Sequence[bytes],
        function: str | None = None,
        signature: str | None = None,
    ) -> None:
        """Give a program to all workers, also to those that come later.

        Args:
            plan: how it is run.
            programs: exported: that of the step, and where it uses tables that of its lookups.
            signature: likewise, their form.
        """
        meta = {"name": name, "plan": plan.to_meta(), "function": function, "signature": signature}
        data = [blob(program) for program in programs]
        self._set_up(lambda worker: (Op.PROGRAM, meta, data))

    def make_dataset(self, name: str, function: bytes) -> None:
        """Let every worker make a dataset."""
        data = [blob(function)]
        setup = self._of_data[name] = lambda worker: (Op.DATASET, {"make": name}, data)
        self._set_up(setup)

    def iterate(self, name: str, dataset: str) -> None:
        """Let every worker begin to iterate over a dataset; one that comes again goes on where it was."""
        setup = self._of_data[name] = lambda worker: (
            Op.DATASET,
            {"iterate": name, "of": dataset, "used": self._used[worker, name].encode()},
            (),
        )
        self._set_up(setup)

    def forget(self, name: str) -> None:
        """Let every worker drop an iterator, or a dataset without iterators."""
        with self._lock:
            setup = self._of_data.pop(name, None)
            self._setups = [s for s in self._setups if s is not setup]
            for worker in self._incarnations:
                self._send(worker, Op.DATASET, {"forget": [name]})

    def _set_up(self, setup: Setup) -> None:
        with self._lock:
            self._setups.append(setup)
            sent = [(*each, self._send(each[0], *setup(each[0]))) for each in self._incarnations.items()]
        # Without the lock: who has the queue's may want this one.
        for worker, incarnation, answer in sent:
            answer.add_done_callback(functools.partial(self._on_instructed, worker, incarnation))

    def _on_instructed(self, worker: int, incarnation: str, sent: Future[Frame]) -> None:
        """Report a user's error. A worker that may have missed something gets all again."""
        error = sent.exception()
        if isinstance(error, PeerLostError):
            self.queue.worker_lost(worker, error)
        elif error is None and (frame := sent.result()).op is Op.ERROR:
            if not _is_lost(frame):
                self.queue.report(error_of(frame))
            elif self._incarnations.get(worker) == incarnation:
                self.queue.worker_lost(worker, WorkerLostError(str(frame.meta.get("text"))))

    # --- closures ------------------------------------------------------------------------------

    def leave(self, first: int, drops: bool) -> None:
        """Let nothing wait any longer for closures, from a number on; see `ClosureQueue.leave`."""
        numbers = self.queue.leave(first, drops)
        if not drops or not numbers:
            return
        with self._lock:
            for worker in self._incarnations:
                self._send(worker, Op.CANCEL, {"first": numbers.start, "below": numbers.stop})

    def _run(self, worker: int, closures: Sequence[QueuedClosure], watermark: int) -> list[Future[Any]]:
        """Send closures, in one message where they differ in their numbers and in small arrays alone."""
        requests: list[RunRequest] = [closure.payload for closure in closures]
        calls = [
            {
                **request.to_meta(),
                "watermark": watermark,
                "incarnation": self._incarnations.get(worker),
                "again": closure.was_lost,
            }
            for closure, request in zip(closures, requests, strict=True)
        ]
        arrays = [[*(request.states or ()), *request.arrays] for request in requests]
        answers: list[Future[Any]] = [Future() for _ in closures]
        if len(closures) > 1 and _are_alike(calls, arrays):
            meta = {**calls[0], "closures": [closure.number for closure in closures]}
            sent = self._send(worker, Op.RUN, meta, [array for own in arrays for array in own])
            sent.add_done_callback(functools.partial(self._all_answered, worker, requests, answers))
            return answers
        for i, closure in enumerate(closures):
            sent = self._send(worker, Op.RUN, {**calls[i], "closure": closure.number}, arrays[i])
            one = functools.partial(self._all_answered, worker, [requests[i]], [answers[i]])
            sent.add_done_callback(one)
        return answers

    def _all_answered(
        self,
        worker: int,
        requests: Sequence[RunRequest],
        answers: Sequence[Future[Any]],
        sent: Future[Frame],
    ) -> None:
        error = sent.exception()
        if isinstance(error, PeerLostError):
            error = WorkerLostError(str(error))
        # What concerns the message as a whole has one answer.
        found = [] if error is not None else taken_apart(sent.result())
        found = found * len(requests) if len(found) == 1 else found
        for i, (request, answer) in enumerate(zip(requests, answers, strict=True)):
            if error is not None:
                answer.set_exception(error)
            else:
                self._on_answer(worker, request, found[i], answer)

    def _on_answer(self, worker: int, request: RunRequest, frame: Frame, answer: Future[Any]) -> None:
        if frame.op is Op.ERROR:
            text = str(frame.meta.get("text"))
            answer.set_exception(WorkerLostError(text) if _is_lost(frame) else error_of(frame))
        elif "needs" in frame.meta:
            answer.set_exception(NotReadyError(frame.meta["needs"]))
        else:
            if taken := frame.meta.get("taken"):
                # Another thread may just tell the worker what it has used.
                with self._lock:
                    for name, number in ((name, n) for name, numbers in taken.items() for n in numbers):
                        self._used[worker, name].add(number)
            if request.tally is not None and "cost" in frame.meta:
                request.tally.add(worker, frame.meta["cost"])
            answer.set_result(RunResult(frame.meta["plan"], list(frame.arrays)))

    def _send(
        self,
        worker: int,
        op: Op,
        meta: Mapping[str, Any],
        arrays: Sequence[Any] = (),
        timeout: float | None = None,
    ) -> Future[Frame]:
        frame = Frame(op, self._numbers.next(), self._generation, dict(meta), arrays)
        try:
            return self._clients[worker].send(frame, timeout)
        except ClusterError as error:
            failed: Future[Frame] = Future()
            failed.set_exception(error)
            return failed

    # --- who is there --------------------------------------------------------------------------

    def _lost(self, worker: int, error: Exception) -> None:
        with self._lock:
            self._incarnations.pop(worker, None)
            self._were_lost.add(worker)
            self._absent[worker] = Absence(worker, time.monotonic())

    def _look(self) -> None:
        while not self._closed.wait(_LOOK_EVERY):
            now = time.monotonic()
            with self._lock:
                absent = list(self._absent.values())
                asked = to_ask(absent, now)
                for absence in asked:
                    self._absent[absence.worker] = dataclasses.replace(absence, tries=absence.tries + 1)
            self._name_absent(absent, now)
            gone = given_up(absent, len(self._clients), now, self._absence_limit)
            if gone:
                self.queue.abort(self._absence_error(gone))
                return
            for absence in asked:
                was_lost = absence.worker in self._were_lost
                hello = {"chief": self._name, "anew": was_lost, "versions": installed()}
                sent = self._send(absence.worker, Op.HELLO, hello, timeout=_ANSWER_WITHIN)
                sent.add_done_callback(functools.partial(self._on_hello_answer, absence.worker))

    def _name_absent(self, absent: Sequence[Absence], now: float) -> None:
        """Name the workers that have been away for a while in the log, once for each absence."""
        self._named &= {each.worker for each in absent}
        for each in absent:
            if now - each.since >= WARN_AFTER and each.worker not in self._named:
                self._named.add(each.worker)
                _LOG.warning(
                    "%s at %s has been away for %.1f s. Others run its steps; where all workers are away, "
                    "steps wait for %g s.",
                    self._clients[each.worker].task, self._clients[each.worker].address, now - each.since,
                    self._absence_limit,
                )  # fmt: skip

    def _on_hello_answer(self, worker: int, sent: Future[Frame]) -> None:
        error = sent.exception()
        if isinstance(error, PeerRejectedError):
            # Another key: waiting does not help.
            self.queue.abort(error)
        if error is not None or sent.result().op is Op.ERROR:
            if error is None:
                self.queue.abort(error_of(sent.result()))
            return
        incarnation = sent.result().meta["incarnation"]
        self._platforms[worker] = sent.result().meta.get("platform", "cpu")
        self._has_come.set()
        if worker in self._were_lost and self._of_data:
            # The servers are asked; their answers arrive in this thread.
            threading.Thread(
                target=self._resume, args=(worker, incarnation), name="unisono-resumes", daemon=True
            ).start()
        else:
            self._welcome(worker, incarnation)

    def _resume(self, worker: int, incarnation: str) -> None:
        """Let a worker that was lost go on with the batches that are not in the servers' updates."""
        try:
            found = self._find_used()
        except ClusterError as error:
            # The worker stays away, and is asked again.
            if self._closed.is_set():
                return
            _LOG.warning("How far the data of %s are is not known: %s", self._clients[worker].task, error)
            return
        with self._lock:
            for name, used in found.items():
                iterator, _, index = name.rpartition("@")
                if index == str(worker):
                    self._used[worker, iterator].join(used)
        self._welcome(worker, incarnation)

    def _welcome(self, worker: int, incarnation: str) -> None:
        """Give a worker what the others have, and let it run closures."""
        with self._lock:
            if worker not in self._absent:
                return
            del self._absent[worker]
            self._incarnations[worker] = incarnation
            # Never answered: it fails when the connection ends, also while the worker has nothing to run.
            sent = [self._send(worker, Op.HEARTBEAT, {"hold": True})]
            # The connection may have ended since the worker's answer: then all of this waits for another
            # connection, which may never exist. Before the programs, whose bytes may take longer.
            sent.append(self._send(worker, Op.HEARTBEAT, {}, timeout=_ANSWER_WITHIN))
            sent += [self._send(worker, *setup(worker)) for setup in self._setups]
        self.queue.worker_came(worker)
        # Not before: the queue passes over the loss of a worker that it does not have.
        for answer in sent:
            answer.add_done_callback(functools.partial(self._on_instructed, worker, incarnation))

    def _absence_error(self, workers: Sequence[int]) -> ClusterError:
        clients = ", ".join(f"{self._clients[i].task} at {self._clients[i].address}" for i in workers)
        return ClusterError(
            f"A worker must be there to run what was scheduled. Received: no answer from {clients} for "
            f"{self._absence_limit:g} s. Start them with the same TF_CONFIG, or look into their logs."
        )

    # --- the end -------------------------------------------------------------------------------

    @property
    def away(self) -> list[str]:
        """The addresses of the workers that are not there."""
        with self._lock:
            return [client.address for i, client in enumerate(self._clients) if i not in self._incarnations]

    def end(self, code: int, informed: Collection[str] = ()) -> None:
        """Let all workers end.

        Args:
            informed: addresses of workers that are away and learn otherwise that the job is over. For others
                the chief waits: they would wait for a chief.
        """
        sent = []
        for i, client in enumerate(self._clients):
            wait = _INFORMED_WITHIN if client.address in informed else _LATE_WITHIN
            wait = _ANSWER_WITHIN if i in self._incarnations else wait
            sent.append(self._send(i, Op.END, {"code": code}, timeout=wait))
        late = concurrent.futures.wait(sent, _TELL_AFTER).not_done
        if away := [str(c.task) for c, each in zip(self._clients, sent, strict=True) if each in late]:
            _LOG.warning(
                "The job is over. The chief waits up to %g s for %s, which would serve on if it returned.",
                _LATE_WITHIN, ", ".join(away),
            )  # fmt: skip
        for each in sent:
            # One that has ended already does not answer.
            each.exception()
        self.close()

    def close(self) -> None:
        """End the connections."""
        self._closed.set()
        self.queue.abort(ClusterError("The job has ended. Received: a closure that had not."))
        for client in self._clients:
            client.close()


def _are_alike(calls: Sequence[Mapping[str, Any]], arrays: Sequence[Sequence[Any]]) -> bool:
    """Return whether closures may go in one message: the fields are equal, and the arrays few and small."""
    size = sum(np.asarray(array).nbytes for own in arrays for array in own)
    counts = {len(own) for own in arrays}
    return all(call == calls[0] for call in calls) and len(counts) == 1 and size <= _JOINT_BYTES


def _is_lost(answer: Frame) -> bool:
    """Return whether a worker says that it is not the one, or not the incarnation, that was meant."""
    return answer.meta.get("kind") == WorkerLostError.__name__
