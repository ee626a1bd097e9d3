"""Compares this process with its peers: are all alive, and do all take the same steps?

Messages are sent from port to port (`_status_server`), beside JAX's collectives, and only at an event: the
first step of another kind or shape, a file, a failed collective, the end of the program.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from unisono._errors import ClusterError
from unisono.cluster.liveness._status import CALL, READ, Step, WorkerStatus, describe_step
from unisono.cluster.liveness._status_server import AbsentError, EndedError, Peers
from unisono.cluster.rendezvous._mismatch import differences, shortened
from unisono.cluster_resolver._spec import split_address

_LOG = logging.getLogger("unisono")

_T = TypeVar("_T")
_States = Mapping[int, dict[str, Any] | AbsentError]

#: Parts of the texts of JAX's errors that a peer caused. They have no class of their own:
#: they are JaxRuntimeErrors, or ValueErrors where they are raised while a step is dispatched.
_COLLECTIVE_ERRORS = ("Gloo", "NCCL", "ollective", "by peer")
#: Seconds between two questions, at first and at most. A question takes 0.1 ms, and mostly the first will do.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.1
#: The same at the end of programs, for each process: a thousand ask process 0 five hundred times in a second.
_END_PAUSE = 0.002
#: Seconds for which a peer must be blocked in one collective that this process never began, until all abort:
#: one look may see a program that is just about to finish.
_STUCK = 0.75
#: Characters of a reason that are sent: a question has 64 KiB, and JSON writes a character in up to 12 bytes.
_REASON = 5000


class PeerMonitor:
    """This process and its peers.

    Args:
        limit: seconds for which this process waits for a peer.
    """

    def __init__(self, status: WorkerStatus, peers: Peers, limit: float) -> None:
        self.status, self._peers, self._limit = status, peers, limit

    @property
    def is_on_one_host(self) -> bool:
        """Whether all processes have published one address."""
        return len({split_address(address)[0] for address in self._peers.addresses}) == 1

    @property
    def is_aborted(self) -> bool:
        """Whether all processes must end: one is lost, or takes other steps."""
        return bool(self.status.abort_reason)

    def begin_step(self, kind: str, batches: Sequence[object]) -> None:
        """Note the next step, and compare it with the next process' where it differs from the previous one.

        If steps differ anywhere, some process takes a new step and the process after it another one:
        asking one neighbour each is enough.

        Args:
            kind: such as `"train"`.
            batches: pytrees of arrays; none at the end of the data.

        Raises:
            ClusterError: when the next process takes another step, or does not reach this one in time.
        """
        shapes = tuple(np.shape(x) for x in jax.tree.leaves(list(batches))) if batches else None
        self.begin((kind, shapes))

    def begin(self, step: Step) -> None:
        """Note a step, a call or a read, which all workers must make; see `begin_step`."""
        is_new = self.status.begin_step(step)
        if is_new and not self.is_aborted:
            # In flight: the watchdog finds a machine that is lost meanwhile long before the limit.
            with self.status.in_flight.collective():
                self._compare_with_next(self.status.steps, describe_step(step))
        if self.is_aborted:
            raise ClusterError(self.status.abort_reason)

    def wait_for_file(self, path: str) -> None:
        """Wait until the first process has written a file, or has continued without it."""
        self._ask_first({"kind": "file", "path": path}, f"written {path}")

    def agree_on_number(self, series: str, number: int, *, is_first: bool) -> int:
        """Return the number of the next checkpoint of a series, which the first process chooses.

        Args:
            series: such as the path without the number.
            number: this process' own choice; taken where the first one continues without a checkpoint.
        """
        if not is_first:
            index = self.status.num_checkpoints(series)
            question = {"kind": "checkpoint_number", "series": series, "index": index}
            answer = self._ask_first(question, f"numbered checkpoint {index} of {series}")
            if answer is not None and answer.get("number") is not None:
                number = int(answer["number"])
        self.status.note_number(series, number)
        return number

    def _ask_first(self, question: dict[str, Any], action: str) -> dict[str, Any] | None:
        """Wait until the first process has done something, or has continued without; return its answer."""
        question |= {"collectives_begun": self.status.collectives_begun}
        try:
            with self.status.in_flight.collective():
                answer = self._poll(lambda: self._ask_until(0, question, "done"), self._limit)
        except EndedError as error:
            _LOG.warning("The first worker may not have %s: %s.", action, error)
            return None
        if answer is None:
            _LOG.warning("The first worker has not %s within %g s.", action, self._limit)
        return answer

    def explain(self, error: BaseException) -> ClusterError | None:
        """Return the error that names the peer which caused one of JAX's; None for other errors."""
        cause = _collective_error(error)
        if cause is None:
            return None
        if not self.is_aborted:
            self._abort_with_diagnosis()
        return ClusterError(f"{self.status.abort_reason} The error on this worker: {cause[:300]}")

    def wait_for_shutdown(self, timeout: float) -> str | None:
        """Wait until all processes have reached the end of their programs.

        Process 0 asks all, and sends them what it finds; the others ask whether it is still there. A peer
        that answers is waited for as long as it runs: the first worker may be writing a model. But if it
        waits in a collective that this process never began, neither could ever continue: all abort.

        Args:
            timeout: seconds to wait for a peer that does not answer.

        Returns:
            The state of the peers that did not reach it; None where all did, or all must abort.
        """
        self.status.is_finished = True
        is_first = self._peers.own == 0
        running = list(self._peers.others) if is_first else [0]
        all_answered = reminded = time.monotonic()
        blocked_since: dict[tuple[int, int, int], float] = {}
        longest = max(_LONGEST_PAUSE, _END_PAUSE * len(self._peers.addresses))
        pause = max(_FIRST_PAUSE, longest / 64)
        while not self.is_aborted:
            states = self._peers.ask_all({"kind": "state"}, running)
            if self.status.end is not None:
                return self.status.end or None
            if is_first:
                running = [p for p, s in states.items() if not (isinstance(s, dict) and s["finished"])]
            if not running:
                return self._end_all("", self._peers.others, timeout)
            summary = self._summary({p: states[p] for p in running})
            now = time.monotonic()
            absent = [s for s in states.values() if isinstance(s, AbsentError)]
            all_answered = all_answered if absent else now
            # A process that has ended cannot arrive any more; one that is only silent can.
            if any(isinstance(s, EndedError) for s in absent) or now - all_answered >= timeout:
                reached = [p for p in self._peers.others if not isinstance(states.get(p), AbsentError)]
                return self._end_all(summary, reached, 0.0) if is_first else summary
            blocked_since = {key: blocked_since.get(key, now) for key in self._blocked(states)}
            if any(now - first >= _STUCK for first in blocked_since.values()):
                here = f"{self._own} has reached the end of its program after {self.status.steps} steps"
                self.abort(_unequal_ends_text(f"{here}; {summary}"))
            if now - reminded >= timeout:
                _LOG.warning("This worker has reached the end of its program and waits for: %s.", summary)
                reminded = now
            self.status.has_end.wait(pause)
            pause = min(2 * pause, longest)
        return None

    def _end_all(self, missing: str, others: Sequence[int], seconds: float) -> str | None:
        """Send other processes what this one has found at the end of the programs, and return it.

        Whom it does not reach is sent it again for some seconds: a network may have an outage, and a process
        that has not got it takes the end of this process for a failure.
        """
        deadline = time.monotonic() + seconds
        question = {"kind": "end", "missing": shortened(missing, _REASON)}
        while absent := _absent(self._peers.ask_all(question, others)):
            others = [p for p, error in absent.items() if not isinstance(error, EndedError)]
            if not others or time.monotonic() >= deadline:
                break
            time.sleep(_LONGEST_PAUSE)
        return missing or None

    def _blocked(self, states: _States) -> list[tuple[int, int, int]]:
        """The peers in a collective that this process has not begun: who, in which one, waiting for what."""
        return [
            (p, s["collectives_begun"], s["in_flight"])
            for p, s in states.items()
            if isinstance(s, dict)
            and s["in_flight"] is not None
            and s["collectives_begun"] > self.status.collectives_begun
        ]

    def name_of(self, process: int) -> str:
        """Return the name of a process, for messages."""
        return self._peers.names[process]

    def find_absent(self) -> dict[int, AbsentError]:
        """Ask all peers; return those that do not answer, and why."""
        return _absent(self._peers.ask_all({"kind": "state"}, self._peers.others))

    def broadcast_lost(self, lost: Mapping[int, AbsentError]) -> None:
        """Abort because peers are lost, and send the reason to the remaining ones."""
        remaining = [p for p in self._peers.others if p not in lost]
        self.abort(_early_end_text(f"{self._own} lost {self._summary(lost)}"), remaining)

    @property
    def _own(self) -> str:
        return f"worker {self._peers.own} of {len(self._peers.addresses)}"

    def _compare_with_next(self, number: int, step: str) -> None:
        process = (self._peers.own + 1) % len(self._peers.addresses)
        question = {"kind": "step", "number": number}
        try:
            answer = self._poll(lambda: self._ask_until(process, question, "reached"), self._limit)
        except EndedError:
            answer = None
        if answer is None:
            if not self.is_aborted:
                self._abort_with_diagnosis()
        elif not answer["reached"] and answer["finished"]:
            peer = f"{self.name_of(process)} has reached the end of its program after {answer['steps']} steps"
            self.abort(_unequal_ends_text(f"{self._own} begins step {number}, {step}; {peer}"))
        elif answer["step"] not in (step, None) and not _are_calls(step, answer["step"]):
            known = {process: answer["step"], self._peers.own: step}
            self.abort(_unequal_steps_text(self._step_differences(number, known)))

    def _ask_until(self, process: int, question: Mapping[str, Any], key: str) -> dict[str, Any] | None:
        """A process' answer once `key` is true in it, or once waiting for that is pointless; else None.

        Raises:
            EndedError: when it has ended. One that does not answer may be busy.
        """
        try:
            answer = self._peers.ask(process, question)
        except EndedError:
            raise
        except AbsentError:
            return None
        return answer if answer[key] or answer.get("finished") or self.is_aborted else None

    def _poll(self, ask: Callable[[], _T | None], timeout: float) -> _T | None:
        """Ask until the answer is not None, all must end, or the timeout has passed."""
        deadline = time.monotonic() + timeout
        pause = _FIRST_PAUSE
        while (answer := ask()) is None and not self.is_aborted and time.monotonic() < deadline:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return answer

    def _abort_with_diagnosis(self) -> None:
        """Abort because a collective cannot finish: name the peers that are lost, or where each one is."""
        states = self._peers.ask_all({"kind": "state"}, self._peers.others)
        if lost := _absent(states):
            self.broadcast_lost(lost)
            return
        progress = _progress(self.status.answer({"kind": "state"}))
        reports = self._summary(states)
        received = f"{self._own} timed out waiting for its peers ({progress}). Peers report: {reports}"
        self.abort(_early_end_text(received))

    @property
    def name(self) -> str:
        """The name of this process, for messages."""
        return self.name_of(self._peers.own)

    def abort(self, reason: str, others: Sequence[int] | None = None) -> None:
        """Send processes, all by default, the reason why they must end; the first that arrives counts."""
        question = {"kind": "abort", "reason": shortened(reason, _REASON)}
        self.status.answer(question)
        self._peers.ask_all(question, self._peers.others if others is None else others)

    def _summary(self, states: _States) -> str:
        return "; ".join(f"{self._peers.names[p]}: {_progress(state)}" for p, state in states.items())

    def _step_differences(self, number: int, known: Mapping[int, str]) -> str:
        answers = self._peers.ask_all({"kind": "step", "number": number}, self._peers.others)
        texts = {p: a["step"] for p, a in answers.items() if isinstance(a, dict) and a["step"]}
        # One that has answered before may be silent now: without it there would be no difference.
        texts |= known
        return " ".join(differences({p: {f"step {number}": text} for p, text in sorted(texts.items())}))


def _absent(states: _States) -> dict[int, AbsentError]:
    return {p: state for p, state in states.items() if isinstance(state, AbsentError)}


def _early_end_text(received: str) -> str:
    return (
        f"All workers must run until the last collective has finished. Received: {received}. The log of the "
        "worker that ended or stopped first shows the cause; `unisono launch --max-restarts 3` restarts all."
    )


def _unequal_ends_text(received: str) -> str:
    if READ in received:
        return _unequal_reads_text(f"{received}.")
    return (
        f"All workers must take the same steps until their programs end. Received: {received}. Give every "
        "worker the same number of batches, leave a loop after the same step on every worker, and call "
        "`evaluate` and the like on every worker, not on the chief alone."
    )


def _are_calls(*steps: str) -> bool:
    return all(step.startswith(CALL) for step in steps)


def _unequal_reads_text(received: str) -> str:
    return (
        "All workers must read variables that lie in parts together. "
        f"Received: {received} Call `model.save`, `get_weights` and the like on every worker, not on the "
        "chief alone: each sends its parts, and the chief writes the file."
    )


def _unequal_steps_text(received: str) -> str:
    if READ in received:
        return _unequal_reads_text(received)
    if f"'{CALL}" in received:
        return (
            f"All workers must make the same calls of `fit`, `evaluate` and `predict`. Received: {received} "
            "Call them on every worker, not on the chief alone: each computes a part, and the chief prints."
        )
    return (
        "All workers must take the same steps, on batches of the same shapes. "
        f"Received: {received} To give each worker data of its own, use `AutoShardPolicy.FILE` or "
        "`strategy.distribute_datasets_from_function`."
    )


def _progress(state: dict[str, Any] | AbsentError) -> str:
    if isinstance(state, AbsentError):
        return str(state)
    if state["finished"]:
        return "it has reached the end of its program"
    last = f", the last one {state['step']}" if state["step"] else ""
    return f"{state['steps']} steps begun{last}"


def _collective_error(error: BaseException) -> str | None:
    """The text of an error, or of one in its chain, that a peer caused; None where there is none.

    The chain matters because a failed step deletes its state: what tries to save that state fails as well.
    """
    link: BaseException | None = error
    # Stop at a ClusterError: what follows was explained before.
    while link is not None and not isinstance(link, ClusterError):
        text = str(link)
        if isinstance(link, jax.errors.JaxRuntimeError) and any(part in text for part in _COLLECTIVE_ERRORS):
            return text
        if isinstance(link, ValueError) and "Gloo" in text:
            return text
        link = link.__cause__ or link.__context__
    return None
