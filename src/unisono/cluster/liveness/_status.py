"""What a process tells the others of itself, also while its main thread waits for them: pure."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

from unisono.cluster.liveness._in_flight import InFlight

#: Steps, and files, that are remembered. A process can be some ten steps ahead of another.
_REMEMBERED = 256

#: What is done, and the shapes of the arrays; None for the end of the data.
Step = tuple[str, tuple[tuple[int, ...], ...] | None]

#: How a call of `fit`, `evaluate` or `predict` begins as text; what differs in it is compared with its data.
CALL = "a call of "

#: What the answer to each kind of question holds.
_STATE: dict[str, tuple[type, ...]] = {
    "steps": (int,),
    "step": (str, type(None)),
    "meetings": (int,),
    "waits_for": (int, type(None)),
    "leaving": (bool,),
}
_ANSWERS: dict[str, dict[str, tuple[type, ...]]] = {
    "state": _STATE,
    "word": _STATE,
    "step": {"reached": (bool,), "step": (str, type(None)), "steps": (int,), "leaving": (bool,)},
    "saved": {"done": (bool,)},
    "number": {"done": (bool,), "number": (int, type(None))},
}


@dataclasses.dataclass
class WorkerStatus:
    """How far a process has come.

    Args:
        meetings: how many steps or messages of all processes it has begun.
        steps: how many steps.
        word: why it shall end, as a process found out.
        is_leaving: whether its program has come to its end.
        pending: what it waits for together with the others.
    """

    meetings: int = 0
    steps: int = 0
    word: str = ""
    is_leaving: bool = False
    pending: InFlight = dataclasses.field(default_factory=InFlight)
    _seen: collections.deque[Step] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_REMEMBERED)
    )
    _saved: collections.deque[tuple[int, str]] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_REMEMBERED)
    )
    #: Of each series, the numbers that its checkpoints got, in order.
    _numbers: dict[str, list[int]] = dataclasses.field(default_factory=lambda: collections.defaultdict(list))

    def begin(self, step: Step) -> bool:
        """Note a step; return whether it differs from the one before.

        >>> record = WorkerStatus()
        >>> record.begin(("train", ((8, 3),))), record.begin(("train", ((8, 3),)))
        (True, False)
        """
        differs = not self._seen or self._seen[-1] != step
        self.steps += 1
        self.meetings += 1
        self._seen.append(step)
        return differs

    def saved(self, path: str) -> None:
        """Note that a file is complete."""
        self._saved.append((self.meetings, path))

    def numbered(self, series: str, number: int) -> None:
        """Note the number of the next checkpoint of a series."""
        self._numbers[series].append(number)

    def count(self, series: str) -> int:
        """How many checkpoints of a series were numbered."""
        return len(self._numbers[series])

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to another process' question.

        Args:
            question: `"state"`; `"step"` with a number from 1; `"saved"` with a path, or `"number"` with a
                series and an index, and the number of meetings after which it is asked; or `"word"` with
                a text, to be told why all end.

        >>> record = WorkerStatus()
        >>> record.answer({"kind": "step", "number": 1})
        {'kind': 'step', 'reached': False, 'step': None, 'steps': 0, 'leaving': False}
        >>> record.begin(("train", ((8, 3), (8,))))
        True
        >>> record.answer({"kind": "step", "number": 1})
        {'kind': 'step', 'reached': True, 'step': 'train on (8, 3), (8,)', 'steps': 1, 'leaving': False}
        """
        kind = question.get("kind")
        if kind == "step":
            number = question.get("number")
            reached = isinstance(number, int) and number <= self.steps
            step = self._step(number) if reached else None
            progress = {"steps": self.steps, "leaving": self.is_leaving}
            return {"kind": kind, "reached": reached, "step": step, **progress}
        if kind == "saved":
            saved = (question.get("meetings"), question.get("path")) in self._saved
            return {"kind": kind, "done": saved or self._has_passed(question)}
        if kind == "number":
            given, index = self._numbers.get(str(question.get("series")), []), question.get("index")
            number = given[index] if isinstance(index, int) and 0 <= index < len(given) else None
            done = number is not None or self._has_passed(question)
            return {"kind": kind, "done": done, "number": number}
        if kind == "word":
            self.word = self.word or str(question.get("text"))
        return {
            "kind": "state",
            "steps": self.steps,
            "step": self._step(self.steps),
            "meetings": self.meetings,
            "waits_for": self.pending.waits_for,
            "leaving": self.is_leaving,
        }

    def _has_passed(self, question: Mapping[str, Any]) -> bool:
        """Whether it has gone on from where the other process is."""
        at = question.get("meetings")
        return self.is_leaving or (isinstance(at, int) and self.meetings > at)

    def _step(self, number: Any) -> str | None:
        """What the step of a number was, None where that is forgotten."""
        back = self.steps - number
        return described(self._seen[-1 - back]) if number > 0 and back < len(self._seen) else None


def answer_problem(kind: str, message: Mapping[str, Any]) -> str | None:
    """Return what an answer to a question lacks, None when it holds all parts.

    Args:
        kind: of the question.
        message: what was received; another program may have the port.

    >>> answer_problem("saved", {"kind": "saved", "done": 1})
    "its answer has no usable 'done'"
    """
    for name, types in _ANSWERS[kind].items():
        # By its exact type: bool is an int in Python.
        if type(message.get(name)) not in types:
            return f"its answer has no usable {name!r}"
    return None


def described(step: Step) -> str:
    """Return a step as text.

    >>> described(("train", ((8, 3), (8,)))), described(("train", None)), described(("a call of `fit`", ()))
    ('train on (8, 3), (8,)', 'train: the end of the data', 'a call of `fit`')
    """
    kind, shapes = step
    if shapes is None:
        return f"{kind}: the end of the data"
    return f"{kind} on {', '.join(map(str, shapes))}" if shapes else kind
