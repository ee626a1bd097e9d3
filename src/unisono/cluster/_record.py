"""What a process tells the others of itself, also while its main thread waits for them: pure."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

#: Batches, and files, that are remembered. A process can be some ten batches ahead of another.
_REMEMBERED = 256

#: A step and the shapes of its arrays; None for the end of the data.
Batch = tuple[str, tuple[tuple[int, ...], ...] | None]


@dataclasses.dataclass
class Record:
    """How far a process has come.

    Args:
        meetings: how many steps or messages of all processes it has begun.
        batches: how many batches it has taken.
        word: why it shall end, as a process found out.
        is_leaving: whether its program has come to its end.
    """

    meetings: int = 0
    batches: int = 0
    word: str = ""
    is_leaving: bool = False
    _seen: collections.deque[Batch] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_REMEMBERED)
    )
    _saved: collections.deque[tuple[int, str]] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_REMEMBERED)
    )

    def take(self, batch: Batch) -> bool:
        """Note a batch; return whether it differs from the one before.

        >>> record = Record()
        >>> record.take(("train", ((8, 3),))), record.take(("train", ((8, 3),)))
        (True, False)
        """
        differs = not self._seen or self._seen[-1] != batch
        self.batches += 1
        self.meetings += 1
        self._seen.append(batch)
        return differs

    def saved(self, path: str) -> None:
        """Note that a file is complete."""
        self._saved.append((self.meetings, path))

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to another process' question.

        Args:
            question: `"state"`; `"batch"` with a number from 1; `"saved"` with a path and the number of
                meetings after which it was saved; or `"word"` with a text, to be told why all end.

        >>> record = Record()
        >>> record.answer({"kind": "batch", "number": 1})
        {'kind': 'batch', 'reached': False, 'batch': None}
        >>> record.take(("train", ((8, 3), (8,))))
        True
        >>> record.answer({"kind": "batch", "number": 1})
        {'kind': 'batch', 'reached': True, 'batch': 'train on (8, 3), (8,)'}
        """
        kind = question.get("kind")
        if kind == "batch":
            number = question.get("number")
            reached = isinstance(number, int) and number <= self.batches
            return {"kind": kind, "reached": reached, "batch": self._batch(number) if reached else None}
        if kind == "saved":
            at, path = question.get("meetings"), question.get("path")
            done = (at, path) in self._saved or (isinstance(at, int) and self.meetings > at)
            return {"kind": kind, "done": done}
        if kind == "word":
            self.word = self.word or str(question.get("text"))
        batch = self._batch(self.batches)
        return {"kind": "state", "batches": self.batches, "batch": batch, "leaving": self.is_leaving}

    def _batch(self, number: Any) -> str | None:
        """What the batch of a number was, None where that is forgotten."""
        back = self.batches - number
        return described(self._seen[-1 - back]) if number > 0 and back < len(self._seen) else None


def described(batch: Batch) -> str:
    """Return a batch as text.

    >>> described(("train", ((8, 3), (8,)))), described(("train", None))
    ('train on (8, 3), (8,)', 'train: the end of the data')
    """
    kind, shapes = batch
    return f"{kind}: the end of the data" if shapes is None else f"{kind} on {', '.join(map(str, shapes))}"
