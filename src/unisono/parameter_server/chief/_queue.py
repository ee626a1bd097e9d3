"""The chief's queue of closures: sends what `_closures` decides, and hands out results and errors.

Tests: tests/unit/parameter_server/chief/test_queue.py.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from unisono._errors import CancelledError, ClusterError, UnisonoError
from unisono._system._interrupts import INTERRUPTS
from unisono.parameter_server.chief import _closures as decide
from unisono.parameter_server.chief._closures import Closures, Rules
from unisono.rpc._calls import set_outcome

#: How often something is prepared for one closure: batches may have several forms.
_ATTEMPTS = 100

#: Seconds after which a thread that waits looks whether it was interrupted.
_CHECK_EVERY = 0.2


class WorkerLostError(ClusterError):
    """A worker does not answer any more; its closures run on others."""


class NotReadyError(UnisonoError):
    """A worker cannot run a closure before the chief has prepared something for it."""

    def __init__(self, needs: Any) -> None:
        super().__init__("The closure must be prepared first.")
        self.needs = needs


@dataclasses.dataclass(eq=False)
class QueuedClosure:
    """A scheduled call.

    Args:
        number: the same in every attempt to run it.
    """

    number: int
    payload: Any
    result: Future[Any] = dataclasses.field(default_factory=Future)
    #: How often something was prepared for it.
    attempts: int = 0
    #: Whether a worker that had it was lost, perhaps with a part of its changes pushed.
    was_lost: bool = False
    #: Whether its caller is gone: it ends as others do, and its error is not raised.
    is_left: bool = False


#: Send closures to a worker: gets the worker's number, the closures and the watermark below which every
#: closure has ended. It must not block. The future of each fails with a `WorkerLostError` or `NotReadyError`,
#: or with the closure's own error.
Send = Callable[[int, Sequence[QueuedClosure], int], "Sequence[Future[Any]]"]


class ClosureQueue:
    """Closures that wait and run; safe to use from several threads.

    Ctrl-C is obeyed at some places alone: a closure that was sent must not be forgotten.

    Args:
        prepare: gets a closure's payload and what a worker needs for it, and provides that. It runs in the
            thread that schedules or waits, never in one of the transport.
        on_loss: called with the number of a worker that was lost, and why.
        generation: how often this chief was started before.
    """

    def __init__(
        self,
        rules: Rules,
        send: Send,
        prepare: Callable[[Any, Any], None],
        on_loss: Callable[[int, Exception], None],
        generation: int = 0,
    ) -> None:
        self._rules, self._send, self._prepare, self._on_loss = rules, send, prepare, on_loss
        self._state = Closures.of_generation(generation)
        self._changed = threading.Condition(threading.RLock())
        #: What threads wait for.
        self._awaited: list[Callable[[], bool]] = []
        self._closures: dict[int, QueuedClosure] = {}
        #: What a worker needs before it can run a closure, which it holds until then.
        self._unready: dict[int, Any] = {}
        self._error: Exception | None = None
        #: After this one nothing can run any more.
        self._fatal: Exception | None = None
        #: The thread that prepares closures: the one that scheduled last.
        self._owner = threading.get_ident()
        self._is_starting = False

    # --- what users call -----------------------------------------------------------------------

    def schedule(self, payload: Any) -> Future[Any]:
        """Add a closure; wait while too many wait already.

        Raises:
            Exception: the error of an earlier closure, once; or one that ended the cluster.
        """
        self._owner = threading.get_ident()
        with INTERRUPTS.at_checks(), self._changed:
            self._wait(lambda: decide.has_room(self._state, self._rules) or decide.can_raise(self._state))
            self._raise_error()
            self._state, number = decide.schedule(self._state)
            closure = self._closures[number] = QueuedClosure(number, payload)
            self._start()
        return closure.result

    def wait_for_room(self, most: int) -> None:
        """Wait until fewer closures wait for a worker than `most`.

        Raises:
            Exception: the error of an earlier closure, once.
        """
        self._owner = threading.get_ident()
        with INTERRUPTS.at_checks(), self._changed:
            self._wait(
                lambda: (
                    (self._state.num_waiting < most and self._state.failed is None)
                    or decide.can_raise(self._state)
                )
            )
            self._raise_error()

    def join(self) -> None:
        """Wait until no closure waits or runs.

        Raises:
            Exception: the first error of a closure, once.
        """
        self._owner = threading.get_ident()
        with INTERRUPTS.at_checks(), self._changed:
            self._wait(lambda: decide.is_done(self._state))
            self._raise_error()

    def done(self) -> bool:
        """Return whether no closure waits or runs.

        Raises:
            Exception: the first error of a closure, once, when none runs any more.
        """
        with INTERRUPTS.at_checks(), self._changed:
            self._prepare_all()
            self._raise_error()
            return decide.is_done(self._state)

    def result(self, future: Future[Any]) -> Any:
        """Wait for a closure, and return its result.

        Raises:
            Exception: the closure's own error.
            CancelledError: the closure was dropped because of another one's error.
        """
        if future.done():
            return future.result()
        with INTERRUPTS.at_checks(), self._changed:
            self._wait(future.done)
        return future.result()

    @property
    def num_workers(self) -> int:
        """How many workers are there now."""
        return len(self._state.workers)

    @property
    def next_number(self) -> int:
        """The number of the closure that is scheduled next."""
        return self._state.scheduled

    def leave(self, first: int, drops: bool) -> range:
        """Let nothing wait any longer for closures, from a number on: their results raise `CancelledError`.

        What a worker has runs to its end, so that no update is applied in part.

        Args:
            drops: whether those are dropped that no worker was sent, and errors of the others.

        Returns:
            The numbers of those that a worker may drop too, where it has not begun them.
        """
        with INTERRUPTS.at_checks(), self._changed:
            if drops:
                self._state = decide.drop(self._state, first)
                for number in [n for n in self._unready if n >= first]:
                    del self._unready[number]
                    self._state = decide.finish(self._state, number)
            left = {n: c for n, c in self._closures.items() if n >= first}
            held = {*self._state.retries, *(r.number for r in self._state.running)}
            for number, closure in left.items():
                closure.is_left = closure.is_left or drops
                set_outcome(closure.result, _cancelled())
                if drops and number not in held:
                    del self._closures[number]
            self._start()
            return range(first, self._state.scheduled)

    # --- what the cluster reports --------------------------------------------------------------

    def worker_came(self, worker: int) -> None:
        """Let a worker run closures."""
        with self._changed:
            self._state = decide.join(self._state, worker)
            self._start()

    def worker_lost(self, worker: int, error: Exception) -> None:
        """Let others run the closures of a worker."""
        with self._changed:
            if self._fatal is not None or worker not in self._state.workers:
                return
            for running in self._state.running:
                if running.worker == worker:
                    self._unready.pop(running.number, None)
                    self._closures[running.number].was_lost = True
            self._state = decide.lose(self._state, worker)
            self._drop_cancelled()
            self._start()
        self._on_loss(worker, error)

    def report(self, error: Exception) -> None:
        """Note an error that belongs to no closure, such as a dataset's: it is raised as a closure's."""
        with self._changed:
            if self._state.failed is None:
                self._error = error
            self._state = decide.fail(self._state, -1)
            self._drop_cancelled()
            self._wake()

    def abort(self, error: Exception) -> None:
        """Let every call fail: nothing can run any more."""
        with self._changed:
            self._fatal = self._fatal or error
            for closure in self._closures.values():
                set_outcome(closure.result, error)
            self._closures.clear()
            self._wake()

    # --- the shell -----------------------------------------------------------------------------

    def _start(self) -> None:
        """Send what may be sent now."""
        # A closure may end while it is sent; what this allows is sent by the loop that runs.
        if self._is_starting:
            return
        self._is_starting = True
        try:
            while self._fatal is None and (state := decide.start(self._state, self._rules)) is not None:
                begun = state.running[len(self._state.running) :]
                self._state, worker = state, begun[0].worker
                closures = [self._closures[running.number] for running in begun]
                replies = self._send(worker, closures, state.watermark)
                for running, reply in zip(begun, replies, strict=True):
                    reply.add_done_callback(functools.partial(self._ended, running))
        finally:
            self._is_starting = False
        self._wake()

    def _ended(self, sent: decide.SentClosure, reply: Future[Any]) -> None:
        """Note a worker's reply; called in a thread of the transport."""
        number, worker, error = sent.number, sent.worker, reply.exception()
        if isinstance(error, WorkerLostError):
            self.worker_lost(worker, error)
            return
        with self._changed:
            # A late reply of a worker that was given up: another one has the closure, or the same one again.
            if self._fatal is not None or not any(each is sent for each in self._state.running):
                return
            if isinstance(error, NotReadyError) and not self._closures[number].is_left:
                if self._state.failed is None:
                    self._unready[number] = error.needs
                else:
                    self._state = decide.finish(self._state, number)
                    self._drop_cancelled()
                self._wake()
                return
            closure = self._closures.pop(number)
            if error is None or closure.is_left:
                self._state = decide.finish(self._state, number)
                set_outcome(closure.result, error or reply.result())
            else:
                self._fail(closure, error)
            self._start()

    def _fail(self, closure: QueuedClosure, error: BaseException) -> None:
        if self._state.failed is None:
            self._error = error if isinstance(error, Exception) else ClusterError(str(error))
        self._state = decide.fail(self._state, closure.number)
        set_outcome(closure.result, error)
        # A worker that waits for something need not get it any more.
        for number in self._unready:
            self._state = decide.finish(self._state, number)
        self._unready.clear()
        self._drop_cancelled()

    def _drop_cancelled(self) -> None:
        """Let the results of closures fail that will not run."""
        if self._state.failed is None:
            return
        running = {r.number for r in self._state.running}
        for number in [n for n in self._closures if n not in running]:
            set_outcome(self._closures.pop(number).result, _cancelled())

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        """Wait for a condition, and prepare meanwhile what workers need."""
        while True:
            self._prepare_all()
            if is_ready():
                return
            if self._fatal is not None:
                raise self._fatal
            INTERRUPTS.check()
            self._awaited.append(is_ready)
            try:
                self._changed.wait(_CHECK_EVERY)
            finally:
                self._awaited.remove(is_ready)

    def _wake(self) -> None:
        """Wake the threads that wait, where one of them can go on: not at each of the steps of a `join`."""
        if self._fatal is not None or self._unready or any(is_ready() for is_ready in self._awaited):
            self._changed.notify_all()

    def _prepare_all(self) -> None:
        while self._unready and self._owner == threading.get_ident():
            number, needs = next(iter(self._unready.items()))
            del self._unready[number]
            closure = self._closures[number]
            closure.attempts += 1
            # Without the lock: it may compile for minutes, while other closures end.
            self._changed.release()
            error: Exception | None = None
            try:
                if closure.attempts > _ATTEMPTS:
                    raise ClusterError(
                        f"A worker must be able to run what was prepared. Received: {needs!r}."
                    )
                with INTERRUPTS.allowed():
                    self._prepare(closure.payload, needs)
            except Exception as raised:
                error = raised
            except BaseException:
                self._unready[number] = needs
                raise
            finally:
                self._changed.acquire()
            if number not in self._closures or self._state.worker_of(number) is None:
                continue
            if error is None:
                self._state = decide.put_back(self._state, number)
                # Another one may have failed meanwhile: this one runs no more then.
                self._drop_cancelled()
            else:
                self._fail(self._closures.pop(number), error)
            self._start()

    def _raise_error(self) -> None:
        if self._fatal is not None:
            raise self._fatal
        if not decide.can_raise(self._state):
            return
        self._state = decide.forget_error(self._state)
        error, self._error = self._error, None
        if error is not None:
            raise error


def _cancelled() -> CancelledError:
    return CancelledError("The corresponding function is cancelled. Please reschedule the function.")
