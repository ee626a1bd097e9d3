"""When a worker answers the chief: behind the last push of a closure, and the last closure of a message.

A step has four messages: the chief's, a push, its answer with the next values, and the result. Where many
closures wait, the first and the last serve four of them.

Tests: tests/unit/parameter_server/worker/test_step_worker.py.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

from unisono.rpc._frames import Frame
from unisono.rpc._ops import Op


class BatchedReply:
    """Collects the answers to the closures of one message; safe to use from several threads."""

    def __init__(self, request: Frame, reply: Callable[[Frame], None]) -> None:
        self._request, self._reply = request, reply
        self._numbers: list[int] = request.meta["closures"]
        self._answers: dict[int, Frame] = {}
        self._lock = threading.Lock()
        #: Whether one of the closures has failed: those after it are not begun.
        self.has_failed = False

    def closures(self) -> list[Frame]:
        """Return a message for each closure."""
        frame = self._request
        meta = {name: value for name, value in frame.meta.items() if name != "closures"}
        count = len(frame.arrays) // len(self._numbers)
        return [
            dataclasses.replace(
                frame, meta={**meta, "closure": number}, arrays=frame.arrays[i * count : (i + 1) * count]
            )
            for i, number in enumerate(self._numbers)
        ]

    def add(self, closure: int, answer: Frame) -> None:
        """Keep an answer; with the last one, send all."""
        with self._lock:
            self.has_failed = self.has_failed or answer.op is Op.ERROR
            self._answers[closure] = answer
            if len(self._answers) < len(self._numbers):
                return
        answers = [self._answers[number] for number in self._numbers]
        each = [{"op": int(a.op), "meta": a.meta, "arrays": len(a.arrays)} for a in answers]
        self._reply(self._request.answer(Op.RESULT, {"each": each}, [x for a in answers for x in a.arrays]))


def taken_apart(answer: Frame) -> list[Frame]:
    """Return the answers that a message holds: its own where it is to one closure.

    >>> frame = Frame(Op.RESULT, 3, meta={"each": [{"op": int(Op.RESULT), "meta": {}, "arrays": 0}] * 2})
    >>> taken_apart(frame)
    [Frame(RESULT, request 3, 0 arrays of 0 bytes), Frame(RESULT, request 3, 0 arrays of 0 bytes)]
    """
    if "each" not in answer.meta:
        return [answer]
    left, found = list(answer.arrays), []
    for each in answer.meta["each"]:
        own, left = left[: each["arrays"]], left[each["arrays"] :]
        found.append(Frame(Op(each["op"]), answer.request, answer.generation, each["meta"], own))
    return found
