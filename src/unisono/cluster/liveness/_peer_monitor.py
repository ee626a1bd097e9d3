"""This process among the others of its cluster: who is missing, and whether all do the same.

Messages go from port to port (`_presence`), beside JAX' collectives, and only when something is new: at
the first step of another kind or shape, after a file, and when a collective has failed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from unisono._errors import ClusterError
from unisono.cluster.liveness._status import CALL, Step, WorkerStatus, described
from unisono.cluster.liveness._status_server import AbsentError, EndedError, Peers
from unisono.cluster.rendezvous._mismatch import differences, shortened

_LOG = logging.getLogger("unisono")

#: What JAX' errors say that tell of another process. Where a step is started they are ValueErrors.
_WORDS = ("Gloo", "NCCL", "ollective", "by peer")
#: Seconds between two questions, at first and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.1
#: Seconds for which another process waits in one collective, until it is sure that this one will not come.
_STUCK = 0.75
#: Characters of the reason for an end that is sent to all.
_REASON = 8000


class PeerMonitor:
    """This process among the others.

    Args:
        record: what the others may know of this process.
        peers: the others.
        limit: seconds that this process waits for another.
    """

    def __init__(self, record: WorkerStatus, peers: Peers, limit: float) -> None:
        self.record, self._peers, self._limit = record, peers, limit

    @property
    def is_broken(self) -> bool:
        """Whether all must end: another process is lost, or does something else."""
        return bool(self.record.word)

    def begin(self, kind: str, batches: Sequence[Any]) -> None:
        """Note the next step; where it differs from the one before, compare it with another process'.

        If not all take the same, there is one whose step is new and whose neighbour takes another: it is
        enough that each asks the next one.

        Args:
            kind: what is done.
            batches: pytrees of arrays, none at the end of the data.

        Raises:
            ClusterError: when the next process takes another, or does not come to this one in time.
        """
        shapes = tuple(np.shape(x) for x in jax.tree.leaves(list(batches))) if batches else None
        self._begin((kind, shapes))

    def begin_call(self, name: str) -> None:
        """Note a call that all workers must make, before its arguments are compared in a collective.

        Args:
            name: of the method, such as `"evaluate"`.

        Raises:
            ClusterError: when the next worker takes a step instead, or has come to the end of its program.
        """
        self._begin((f"{CALL}`{name}`", ()))

    def _begin(self, step: Step) -> None:
        is_new = self.record.begin(step)
        if is_new and not self.is_broken:
            self._compare(self.record.steps, described(step))
        if self.is_broken:
            raise ClusterError(self.record.word)

    def wait_for_file(self, path: str) -> None:
        """Wait until the first process has written a file, or has gone on without it.

        Args:
            path: of the file.
        """
        self._ask_first({"kind": "saved", "path": path}, f"written {path}")

    def number(self, series: str, number: int, *, is_first: bool) -> int:
        """Return the number of the next checkpoint of a series, which the first process chooses.

        Args:
            series: such as the path without the number.
            number: what this process would choose; taken where the first goes on without a checkpoint.
            is_first: whether this is the first process.
        """
        if not is_first:
            index = self.record.count(series)
            question = {"kind": "number", "series": series, "index": index}
            answer = self._ask_first(question, f"numbered checkpoint {index} of {series}")
            if answer is not None and answer.get("number") is not None:
                number = int(answer["number"])
        self.record.numbered(series, number)
        return number

    def _ask_first(self, question: dict[str, Any], what: str) -> dict[str, Any] | None:
        """The answer of the first process once it has done what is asked for, or has gone on without it."""
        question |= {"meetings": self.record.meetings}
        try:
            answer: dict[str, Any] | None = self._wait(lambda: self._asked(0, question, "done"), self._limit)
        except EndedError as error:
            _LOG.warning("The first worker may not have %s: %s.", what, error)
            return None
        if answer is None:
            _LOG.warning("The first worker has not %s within %g s.", what, self._limit)
        return answer

    def explained(self, error: BaseException) -> ClusterError | None:
        """Return the error for one of JAX that another process caused; None for other errors.

        Args:
            error: any.
        """
        cause = _of_others(error)
        if cause is None:
            return None
        if not self.is_broken:
            self._look_around()
        return ClusterError(f"{self.record.word} Here: {cause[:300]}")

    def leave(self, seconds: float) -> str | None:
        """Wait until all have come to the end of their programs.

        One that answers is waited for as long as it runs: the first worker may be writing a model. But where
        one waits in a collective that this process never began, both would wait for ever: all are told.

        Args:
            seconds: how long to wait for one that does not answer.

        Returns:
            Who has not come, None where all have, or all must end.
        """
        self.record.is_leaving = True
        staying = list(self._peers.others)
        heard = reminded = time.monotonic()
        since: dict[tuple[int, int, int], float] = {}
        pause = _FIRST_PAUSE
        while not self.is_broken:
            states = self._peers.ask_all({"kind": "state"}, staying)
            staying = [p for p, s in states.items() if not (isinstance(s, dict) and s["leaving"])]
            if not staying:
                return None
            told = self._told({p: states[p] for p in staying})
            now = time.monotonic()
            absent = [s for s in states.values() if isinstance(s, AbsentError)]
            heard = heard if absent else now
            # One that is gone will not come; one that is only silent may.
            if any(isinstance(s, EndedError) for s in absent) or now - heard >= seconds:
                return told
            since = {key: since.get(key, now) for key in self._waiting(states)}
            if any(now - first >= _STUCK for first in since.values()):
                here = f"{self._own} has come to the end of its program after {self.record.steps} steps"
                self._end(_early(f"{here}; {told}"), self._peers.others)
            if now - reminded >= seconds:
                _LOG.warning("This worker has come to its end, and waits for the others: %s.", told)
                reminded = now
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return None

    def _waiting(self, states: Mapping[int, dict[str, Any] | AbsentError]) -> list[tuple[int, int, int]]:
        """Who waits in a collective that this process has not begun, in which, and for what."""
        return [
            (p, s["meetings"], s["waits_for"])
            for p, s in states.items()
            if isinstance(s, dict) and s["waits_for"] is not None and s["meetings"] > self.record.meetings
        ]

    def name(self, process: int) -> str:
        """Return the name of a process, for messages.

        Args:
            process: its number.
        """
        return self._peers.names[process]

    def absent(self) -> dict[int, AbsentError]:
        """Return which of the others give no answer now, and why."""
        states = self._peers.ask_all({"kind": "state"}, self._peers.others)
        return {p: state for p, state in states.items() if isinstance(state, AbsentError)}

    def lost(self, absent: Mapping[int, AbsentError]) -> None:
        """Note that some of the others are gone for good, and tell those who are here.

        Args:
            absent: who, and what is known of them.
        """
        here = [p for p in self._peers.others if p not in absent]
        self._end(_stay(f"{self._own} lost {self._told(absent)}"), here)

    @property
    def _own(self) -> str:
        return f"worker {self._peers.own} of {len(self._peers.addresses)}"

    def _compare(self, number: int, step: str) -> None:
        process = (self._peers.own + 1) % len(self._peers.addresses)
        question = {"kind": "step", "number": number}
        try:
            answer = self._wait(lambda: self._asked(process, question, "reached"), self._limit)
        except EndedError:
            answer = None
        if answer is None:
            self._look_around()
        elif not answer["reached"] and answer["leaving"]:
            there = f"{self.name(process)} has come to the end of its program after {answer['steps']} steps"
            self._end(_early(f"{self._own} begins step {number}, {step}; {there}"), self._peers.others)
        elif answer["step"] not in (step, None) and not _are_calls(step, answer["step"]):
            self._end(_same(self._unequal(number, step)), self._peers.others)

    def _asked(self, process: int, question: Mapping[str, Any], key: str) -> dict[str, Any] | None:
        """The answer of a process when it says yes to `key`, or when all must end; else None.

        Raises:
            EndedError: when it has ended. One that is only silent may be busy.
        """
        try:
            answer = self._peers.ask(process, question)
        except EndedError:
            raise
        except AbsentError:
            return None
        return answer if answer[key] or answer.get("leaving") or self.is_broken else None

    def _wait(self, ask: Callable[[], Any], seconds: float) -> Any:
        """The first answer that is not None; None when the time is over."""
        until = time.monotonic() + seconds
        pause = _FIRST_PAUSE
        while (answer := ask()) is None and time.monotonic() < until:
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return answer

    def _look_around(self) -> None:
        """End: somebody is missing, or does not come to where this process waits."""
        states = self._peers.ask_all({"kind": "state"}, self._peers.others)
        lost = {p: state for p, state in states.items() if isinstance(state, AbsentError)}
        if lost:
            self.lost(lost)
            return
        progress = _progress(self.record.answer({"kind": "state"}))
        received = f"{self._own} has waited in vain, {progress}; but {self._told(states)}"
        self._end(_stay(received), self._peers.others)

    def _end(self, text: str, others: Sequence[int]) -> None:
        """Tell all why they end; what is told first counts."""
        text = shortened(text, _REASON)
        self.record.answer({"kind": "word", "text": text})
        self._peers.ask_all({"kind": "word", "text": text}, others)

    def _told(self, states: Mapping[int, dict[str, Any] | AbsentError]) -> str:
        return "; ".join(f"{self._peers.names[p]}: {_progress(state)}" for p, state in states.items())

    def _unequal(self, number: int, step: str) -> str:
        answers = self._peers.ask_all({"kind": "step", "number": number}, self._peers.others)
        texts = {p: a["step"] for p, a in answers.items() if isinstance(a, dict) and a["step"]}
        texts[self._peers.own] = step
        return " ".join(differences({p: {f"step {number}": text} for p, text in sorted(texts.items())}))


def _stay(received: str) -> str:
    return (
        f"All workers must stay until all are done. Received: {received}. The log of the worker "
        "that ended or stopped first says why; `unisono launch --max-restarts 3` starts all again."
    )


def _early(received: str) -> str:
    return (
        f"All workers must take the same steps until all are done. Received: {received}. Give every worker "
        "the same number of batches, let all leave a loop after the same step, and call `evaluate` and the "
        "like on every worker, not on the chief alone."
    )


def _are_calls(*steps: str) -> bool:
    return all(step.startswith(CALL) for step in steps)


def _same(received: str) -> str:
    if f"'{CALL}" in received:
        return (
            f"All workers must make the same calls of `fit`, `evaluate` and `predict`. Received: {received} "
            "Call them on every worker, not on the chief alone: each computes a part, and the chief prints."
        )
    return (
        "All workers must take the same steps, on batches of the same shapes. "
        f"Received: {received} For data of each worker's own there are `AutoShardPolicy.FILE` and "
        "`strategy.distribute_datasets_from_function`."
    )


def _progress(state: dict[str, Any] | AbsentError) -> str:
    if isinstance(state, AbsentError):
        return str(state)
    if state["leaving"]:
        return "it has come to the end of its program"
    last = f", the last: {state['step']}" if state["step"] else ""
    return f"it has begun {state['steps']} steps{last}"


def _of_others(error: BaseException) -> str | None:
    """What an error, or one that it came from, says of another process; None where none does.

    The state of a step that failed on the devices is gone, and what tries to save it fails as well.
    """
    seen: BaseException | None = error
    # What was explained before is the program's own affair.
    while seen is not None and not isinstance(seen, ClusterError):
        text = str(seen)
        if isinstance(seen, jax.errors.JaxRuntimeError) and any(word in text for word in _WORDS):
            return text
        if isinstance(seen, ValueError) and "Gloo" in text:
            return text
        seen = seen.__cause__ or seen.__context__
    return None
