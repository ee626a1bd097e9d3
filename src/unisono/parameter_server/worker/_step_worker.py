"""A worker's side: run closures, one after the other, with the values that the servers hold now.

The thread that computes takes batches, pulls, runs the program and sends the pushes off. When all servers
have acknowledged them, the results go to the chief; meanwhile the next closure is computed. Where that was
there before the pushes went off, they carry its pull: it brings what this worker has changed, and servers see
it later than the chief has sent the closure, as the bound of staleness assumes. A later closure has a pull of
its own. With pulls ahead of these pushes two workers trained on updates of which they missed 1.7 in the mean
instead of 0.7, and three workers 2.6 instead of 1.5; their accuracy on digits was 0.960 and 0.904 instead of
0.968 and 0.956 (Adam at 0.01, which gives 0.982 on one device; 2026-11-22).

Tests: tests/unit/parameter_server/worker/test_step_worker.py.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import numpy as np

from unisono._errors import ClusterError, ContextError, UnisonoError
from unisono._system._blocks import set_for_block
from unisono._system._process import let_others_finish
from unisono._system._task_reports import process_events
from unisono.parameter_server.server._chief_presence import chief_lease
from unisono.parameter_server.server._client import Countdown, ServerClient
from unisono.parameter_server.server._programs import ExportedProgram
from unisono.parameter_server.worker._batch_spec import describe
from unisono.parameter_server.worker._batched_reply import BatchedReply
from unisono.parameter_server.worker._step_plan import OWN_INDEX, StepPlan
from unisono.parameter_server.worker._table_rows import LookupPlan, RowNumbers, TableRows, pushed_rows
from unisono.parameter_server.worker._worker_data import TakenBatches, WorkerData
from unisono.rpc._calls import ClientId, PushToServer, StaleValuesError, error_answer
from unisono.rpc._frames import Frame
from unisono.rpc._ops import Op
from unisono.rpc._versions import check_versions

#: The number of the worker whose thread this is.
_INDEX: ContextVar[int | None] = ContextVar("unisono_worker_index", default=None)


@dataclasses.dataclass
class _WorkItem:
    client: ClientId
    frame: Frame
    #: Of the worker when it arrived.
    incarnation: str
    #: Of the message that brought several closures.
    batched_reply: BatchedReply | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class _EarlyPull:
    """What the pushes of a closure have pulled for the next one."""

    task: _WorkItem
    plan: StepPlan
    pulled: Future[list[Any]]


class StepWorker:
    """Runs what the chief sends.

    Args:
        is_chief: whether functions of a client may be executed here.
        platform: what it computes on, as `jax.export` names it.
    """

    def __init__(
        self,
        index: int,
        num_workers: int,
        servers: ServerClient,
        load_program: Callable[[str, bytes], ExportedProgram],
        reply: Callable[[ClientId, Frame], None],
        is_chief: Callable[[ClientId], bool],
        platform: str = "cpu",
    ) -> None:
        self._index, self._servers, self._load, self._reply = index, servers, load_program, reply
        self._is_chief, self._num_workers, self._platform = is_chief, num_workers, platform
        self._own_index = np.asarray(index, np.int32)
        self._rows = TableRows(servers.rows)
        self._spending = servers.traffic.spending
        self._programs: dict[str, ExportedProgram] = {}
        #: Exported programs that are not compiled yet.
        self._exported: dict[str, bytes] = {}
        self._tasks: queue.SimpleQueue[_WorkItem | None] = queue.SimpleQueue()
        #: What was taken from there, and waits for the thread that computes.
        self._following: list[_WorkItem | None] = []
        self._ahead: _EarlyPull | None = None
        #: The names of the chiefs that have led here; the last one leads. One that starts again has another.
        self._chiefs: list[str | None] = []
        #: Renewed by what the chief sends.
        self.chief_lease = chief_lease()
        #: The pushes that were not acknowledged when the last one was sent.
        self._pushing: list[Future[Any]] = []
        self._begin_incarnation(0)
        self._is_closing = False
        #: Whether the thread runs code of a dataset, which may block for ever.
        self._reads_data = False
        self._thread = threading.Thread(target=self._run, name=f"unisono-worker-{index}", daemon=True)
        self.ended = threading.Event()
        self.exit_code = 0

    def _begin_incarnation(self, generation: int) -> None:
        """Forget what a chief has sent: each incarnation of a worker gets programs and datasets anew."""
        self._generation, self._has_lived = generation, False
        self._data = WorkerData(self._index, self._num_workers)
        self._plans: dict[str, StepPlan] = {}
        #: The plans of functions that take batches from datasets, by function and signature of the batches.
        self._of_batches: dict[tuple[str, str], str] = {}
        #: The plan of each such function's last run: most likely that of the next one.
        self._last_of: dict[str, str] = {}
        #: The numbers of closures that are not to be begun any more.
        self._cancelled: list[range] = []
        self._incarnation = secrets.token_hex(8)

    def start(self) -> None:
        """Begin to run closures."""
        self._thread.start()

    def close(self) -> None:
        """End the thread when it has run what it runs now."""
        self._is_closing = True
        self._tasks.put(None)

    def join(self, seconds: float) -> None:
        """Wait for the thread's end; not for a dataset that blocks.

        A process must not end while a thread of it is in JAX: Python ends that thread when it returns, C++
        forbids that there, and the process aborts with SIGABRT (6 of 6 attempts, 2026-11-22).
        """
        deadline = time.monotonic() + seconds
        while self._thread.is_alive() and time.monotonic() < deadline and not self._reads_data:
            self._thread.join(0.1)

    def handle(self, client: ClientId, frame: Frame) -> Frame | None:
        """Answer a request of the chief, or take it over; called by the transport."""
        if not self._is_chief(client):
            return error_answer(frame, ContextError("A worker takes requests of its chief alone."))
        if frame.op is Op.HELLO:
            return self._answer_hello(client, frame)
        if frame.generation < self._generation:
            # Also what an earlier chief has sent before its end, and arrives now.
            return self._of_another_incarnation(frame)
        self.chief_lease.renew()
        self._has_lived = self._has_lived or frame.op in (Op.RUN, Op.PROGRAM, Op.DATASET)
        match frame.op:
            case Op.RUN:
                if frame.meta["incarnation"] != self._incarnation:
                    return self._of_another_incarnation(frame)
                self._put_closures(client, frame)
                return None
            case Op.PROGRAM:
                # Here and not in the thread: a closure that follows pulls by this plan.
                self._note_plan(frame)
                self._tasks.put(_WorkItem(client, frame, self._incarnation))
                return None
            case Op.DATASET:
                self._tasks.put(_WorkItem(client, frame, self._incarnation))
                return None
            case Op.CANCEL:
                self._cancelled.append(range(frame.meta["first"], frame.meta["below"]))
            case Op.END:
                self.exit_code = int(frame.meta.get("code", 0))
                self.ended.set()
            case Op.HEARTBEAT if frame.meta.get("hold"):
                # No answer: the chief waits for the end of the connection.
                return None
            case Op.HEARTBEAT:
                pass
            case _:
                return error_answer(frame, UnisonoError(f"A worker does not know {frame.op.name}."))
        return self._hello(frame)

    def _put_closures(self, client: ClientId, frame: Frame) -> None:
        if "closures" not in frame.meta:
            self._tasks.put(_WorkItem(client, frame, self._incarnation))
            return
        batched_reply = BatchedReply(frame, functools.partial(self._reply, client))
        for each in batched_reply.closures():
            self._tasks.put(_WorkItem(client, each, self._incarnation, batched_reply))

    def _hello(self, frame: Frame) -> Frame:
        own = {"incarnation": self._incarnation, "index": self._index, "platform": self._platform}
        return frame.answer(Op.OK, own)

    def _answer_hello(self, client: ClientId, frame: Frame) -> Frame | None:
        """Follow the chief that says hello, unless another one has taken over."""
        chief = frame.meta.get("chief")
        # An older chief, which was stopped meanwhile, may say it for the first time.
        if chief in self._chiefs[:-1] or frame.generation < self._generation:
            return error_answer(frame, ContextError("A worker serves one chief: another one has taken over."))
        try:
            check_versions(frame.meta.get("versions"))
        except ClusterError as error:
            return error_answer(frame, error)
        self.chief_lease.renew()
        is_new = chief not in self._chiefs
        if is_new:
            self._chiefs.append(chief)
        # What waits of an earlier chief, or is run by others, is left. Several HELLOs may arrive at once.
        if is_new or (frame.meta.get("anew") and self._has_lived):
            self._begin_incarnation(frame.generation)
        if not frame.meta.get("anew"):
            return self._hello(frame)
        # The chief had lost this worker. It is answered when what was begun is done, so that the servers know
        # how far the worker's datasets are.
        self._tasks.put(_WorkItem(client, frame, self._incarnation))
        return None

    def _of_another_incarnation(self, frame: Frame) -> Frame:
        text = f"Worker {self._index} was started again, or serves another chief."
        return frame.answer(Op.ERROR, {"kind": "WorkerLostError", "text": text})

    def _note_plan(self, frame: Frame) -> None:
        plan = StepPlan.from_meta(frame.meta["plan"])
        programs = [
            plan.digest,
            *([plan.lookups.digest] if plan.lookups is not None and plan.lookups.digest else []),
        ]
        for digest, array in zip(programs, frame.arrays, strict=True):
            if digest not in self._programs:
                self._exported[digest] = bytes(array)
        self._plans[frame.meta["name"]] = plan
        if frame.meta.get("signature") is not None:
            self._of_batches[frame.meta["function"], frame.meta["signature"]] = frame.meta["name"]

    # --- the thread that computes ----------------------------------------------------------------

    def _run(self) -> None:
        _INDEX.set(self._index)
        let_others_finish()
        while (task := self._following.pop() if self._following else self._tasks.get()) is not None:
            if self._is_closing:
                return
            try:
                self._execute(task)
            except Exception as error:
                # A closure's own error: the chief raises it, and this worker goes on.
                self._answer(task, error_answer(task.frame, error))

    def _execute(self, task: _WorkItem) -> None:
        frame = task.frame
        if frame.op is Op.HELLO:
            concurrent.futures.wait(self._pushing)
            self._answer(task, self._hello(frame))
            return
        if task.incarnation != self._incarnation:
            self._answer(task, self._of_another_incarnation(frame))
            return
        if frame.op is Op.RUN:
            self._closure(task)
            return
        if frame.op is Op.PROGRAM:
            self._program(frame.meta["plan"]["digest"])
        else:
            self._reads_data = True
            try:
                self._data.change(frame)
            finally:
                self._reads_data = False
        self._answer(task, frame.answer(Op.OK))

    def _program(self, digest: str) -> ExportedProgram:
        """Return a compiled program: a closure that came before the plan may be the first one to use it."""
        if digest not in self._programs:
            self._programs[digest] = self._load(digest, self._exported[digest])
        self._exported.pop(digest, None)
        return self._programs[digest]

    def _closure(self, task: _WorkItem) -> None:
        frame, meta = task.frame, task.frame.meta
        # One that a lost worker had is begun: it may have pushed to some of the servers.
        is_left = task.batched_reply is not None and task.batched_reply.has_failed
        if is_left or (not meta.get("again") and any(meta["closure"] in n for n in self._cancelled)):
            self._answer(task, frame.answer(Op.ERROR, {"kind": "CancelledError", "text": "cancelled"}))
            return
        self._reads_data = True
        try:
            with self._spending("data"):
                taken = self._data.take(names) if (names := meta.get("takes")) else None
        finally:
            self._reads_data = False
        name: str | None = meta.get("plan")
        arrays = [*frame.arrays]
        if taken:
            signature, leaves = describe(taken.batches)
            arrays += leaves
            name = self._of_batches.get((meta["function"], signature))
            if name is None or self._plans[name].states != meta["states"]:
                # The chief traces the function for batches of this form; they are taken again then.
                taken.give_back()
                self._answer(task, frame.answer(Op.RESULT, {"needs": signature}))
                return
            self._last_of[meta["function"]] = name
        plan = self._plans[str(name)]
        outputs, rows, lineages = self._compute(task, plan, [*arrays, self._own_index])
        pushes = self._push(task, plan, outputs, rows, taken, lineages)
        if taken and meta.get("again") and _had_been_applied(pushes) and not self._are_used(taken):
            # Another batch is in the updates: that of the worker which was lost.
            taken.give_back()
        with self._spending("compute"):
            results = [np.asarray(outputs[i]) for i in plan.results]
        # What was pushed the servers know.
        numbers = taken.numbers if taken and not pushes else {}
        self._acknowledge(task, pushes, {"plan": name, "taken": numbers}, results)

    def _compute(
        self, task: _WorkItem, plan: StepPlan, arrays: Sequence[Any]
    ) -> tuple[Sequence[Any], RowNumbers | None, Mapping[int, str]]:
        """Return the outputs of a closure, the rows that it used, and the lineages of its values."""
        program = self._program(plan.digest)
        states, others = arrays[: plan.states], arrays[plan.states :]
        given_here = [*states, *(arrays[OWN_INDEX] if i == OWN_INDEX else others[i] for i in plan.arrays)]
        while True:
            with self._spending("pull"):
                values, compiled = self._pull(task, plan), program.compiled_count
            given = [*values, *given_here]
            numbers: RowNumbers | None = None
            if plan.lookups is not None:
                with self._spending("pull"):
                    given += self._rows.pull(plan.lookups, numbers := self._numbers(plan.lookups, given))
            with self._spending("compute"):
                outputs = program(*given)
            # While it was compiled others went on: where that took 2 s, the first update missed 398 of them
            # (2 workers, 2026-11-22). The program changes nothing here, so that it can run once more.
            if not plan.pushes or program.compiled_count == compiled:
                return outputs, numbers, getattr(values, "lineages", {})
            del outputs, given, values

    def _numbers(self, plan: LookupPlan, given: Sequence[Any]) -> RowNumbers:
        """Return the rows that a step uses."""
        found = self._program(plan.digest)(*(given[i] for i in plan.takes)) if plan.digest else ()
        return RowNumbers(plan, found)

    def _push(
        self,
        task: _WorkItem,
        plan: StepPlan,
        outputs: Sequence[Any],
        numbers_of_rows: RowNumbers | None,
        taken: TakenBatches | None,
        lineages: Mapping[int, str],
    ) -> list[Future[Any]]:
        numbers = task.frame.meta["closure"], task.frame.meta["watermark"]
        # With the update, so that it is known exactly also where this worker is lost before it answers.
        own = {f"{name}@{self._index}": n for name, n in taken.numbers.items()} if taken else {}
        used = {"used": own} if own else {}
        given = []
        for p in plan.pushes:
            with self._spending("compute"):  # until the program has ended
                sent, meta = [np.asarray(outputs[i]) for i in p.outputs], p.meta
            if p.rows:
                rows, updates = pushed_rows(p.rows, numbers_of_rows, outputs, meta["updates"])
                sent, meta = [*rows, *sent], {**meta, "updates": updates}
            lineage = lineages.get(p.server)
            given.append(PushToServer(p.server, *numbers, {**meta, **used}, sent, lineage))
        # The program has ended: what has come until now was sent before the servers see the pushes.
        following, following_plan = self._peek()
        pulls = following_plan.pulls if given and following_plan is not None else None
        with self._spending("push"):
            pushes, pulled = self._servers.push(given, pulls)
        if following is not None and following_plan is not None and pulled is not None:
            self._ahead = _EarlyPull(following, following_plan, pulled)
        self._pushing = [push for push in self._pushing if not push.done()] + pushes
        return pushes

    def _are_used(self, taken: TakenBatches) -> bool:
        """Return whether a server has batches in its updates: it may have, where its answer was lost."""
        used = self._servers.used_batches()
        of_own = {name: used.get(f"{name}@{self._index}", ()) for name in taken.numbers}
        return any(n in of_own[name] for name, numbers in taken.numbers.items() for n in numbers)

    def _acknowledge(
        self, task: _WorkItem, pushes: Sequence[Future[Any]], meta: dict[str, Any], results: Sequence[Any]
    ) -> None:
        frame = task.frame
        answer = frame.answer(Op.RESULT, meta, results)
        if not pushes:
            self._answer(task, answer)
            return
        began, spent = time.perf_counter(), self._servers.traffic.spent

        def answer_chief(error: BaseException | None) -> None:
            spent("push", time.perf_counter() - began)
            self._answer(task, answer if error is None else self._failed(frame, error))

        left = Countdown(len(pushes), answer_chief)
        for push in pushes:
            push.add_done_callback(lambda sent: left.one_done(sent.exception()))

    def _peek(self) -> tuple[_WorkItem | None, StepPlan | None]:
        """Return the next closure, where it has come, and the plan by which it will most likely run."""
        if not self._following:
            try:
                self._following.append(self._tasks.get_nowait())
            except queue.Empty:
                return None, None
        following = self._following[0]
        if following is None or following.frame.op is not Op.RUN:
            return None, None
        meta = following.frame.meta
        name = meta.get("plan") or self._last_of.get(str(meta.get("function")))
        return following, None if name is None else self._plans.get(name)

    def _pull(self, task: _WorkItem, plan: StepPlan) -> Sequence[Any]:
        """Return the values for a closure."""
        ahead, self._ahead = self._ahead, None
        is_own = ahead is not None and ahead.task is task and ahead.plan is plan
        # The push that carried it may have failed.
        if ahead is not None and is_own:
            self._servers.take_until(ahead.pulled)
            if ahead.pulled.exception() is None:
                return ahead.pulled.result()
        pulled = self._servers.pull(plan.pulls)
        self._servers.take_until(pulled)
        return pulled.result()

    def _failed(self, frame: Frame, error: BaseException) -> Frame:
        # A server has lost changes: the closure runs again, with what is there now.
        return (
            self._of_another_incarnation(frame)
            if isinstance(error, StaleValuesError)
            else error_answer(frame, error)
        )

    def _answer(self, task: _WorkItem, answer: Frame) -> None:
        if "plan" in answer.meta:
            cost = self._servers.traffic.take()
            answer = dataclasses.replace(answer, meta={**answer.meta, "cost": cost})
            *_, data, pull, compute, _ = cost
            if (events := process_events()).is_read:
                events.stepped(1, data, pull, compute)
        if task.batched_reply is None:
            self._reply(task.client, answer)
        else:
            task.batched_reply.add(task.frame.meta["closure"], answer)


def _had_been_applied(pushes: Sequence[Future[Any]]) -> bool:
    """Wait for pushes; return whether all servers had them already, from an earlier attempt."""
    concurrent.futures.wait(pushes)
    if not pushes or any(push.exception() is not None for push in pushes):
        return False
    return not any(push.result().meta["applied"] for push in pushes)


def as_worker(index: int) -> AbstractContextManager[object]:
    """Surround a call of a worker's function on the chief."""
    return set_for_block(_INDEX, index)


def current_worker_index() -> int:
    """Return the number of the worker that executes this code."""
    index = _INDEX.get()
    if index is None:
        raise ContextError(
            "The index of a worker is known in functions that a worker executes. Received: a call outside of "
            "them. Call it in a function given to `create_per_worker_dataset` or `schedule`."
        )
    return index
