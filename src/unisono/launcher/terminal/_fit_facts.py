"""The words of a task on its `fit`, from a file that may be damaged: other values are passed over.

Tests: tests/unit/watch/test_job_reader.py, tests/unit/launcher/terminal/test_live_console.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

#: Numbers in files are smaller; seconds since the epoch are, too.
_LARGEST = 1e18
#: The types of numbers in JSON. By their identity: fifty tasks have a million lines.
_NUMBERS = (int, float)
#: Names in logs, and curves, at most; characters of a text.
MOST_NAMES, MOST_TEXT = 32, 300


def is_time(value: Any) -> bool:
    """Return whether a value of JSON is a number, of a size that times and counts have."""
    return type(value) in _NUMBERS and abs(value) < _LARGEST


def count_in(event: Mapping[str, Any], name: str, least: int = 0) -> int | None:
    """Return a whole number of a record of a file; None where it has none, or a smaller one.

    >>> count_in({"step": 3}, "step"), count_in({"step": 3}, "step", 4), count_in({"step": True}, "step")
    (3, None, None)
    """
    value = event.get(name)
    return value if type(value) is int and least <= value < _LARGEST else None


def numbers_in(logs: object) -> dict[str, float]:
    """Return the numbers in logs of Keras, as a file has them.

    >>> numbers_in({"loss": 0.5, "note": "text"}), numbers_in([1])
    ({'loss': 0.5}, {})
    """
    if not isinstance(logs, dict):
        return {}
    pairs = [(str(name)[:MOST_TEXT], float(x)) for name, x in logs.items() if is_time(x)]
    return dict(pairs[:MOST_NAMES])


def pairs_in(config: object) -> list[tuple[str, str]]:
    """Return the names and values of a list of pairs, as a file has it.

    >>> pairs_in([["optimizer", "SGD"], ["rows"], 3])
    [('optimizer', 'SGD')]
    """
    pairs = config if isinstance(config, list) else []
    texts = [[str(text)[:MOST_TEXT] for text in pair] for pair in pairs if isinstance(pair, list)]
    return [(pair[0], pair[1]) for pair in texts[:MOST_NAMES] if len(pair) == 2]


@dataclasses.dataclass
class FitFacts:
    """The facts of a `fit`, as its task has said them.

    Args:
        batches: of an epoch; None where that is not known before its end.
        steps: of the whole training.
        config: names and values.
        ended_epochs: which epoch has ended last; 0 before the first.
    """

    epochs: int | None = None
    batches: int | None = None
    steps: int | None = None
    ended_epochs: int = 0
    config: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    def begin(self, event: Mapping[str, Any]) -> None:
        """Take over what a task says when `fit` begins."""
        self.epochs = count_in(event, "epochs")
        self.batches = count_in(event, "batches", 1)
        self.ended_epochs = count_in(event, "epoch") or 0
        config = event.get("config")
        self.config = pairs_in(config)
        self._expect(count_in(event, "step") or 0)

    def end_epoch(self, event: Mapping[str, Any]) -> None:
        """Take over what a task says when an epoch has ended."""
        epoch = count_in(event, "epoch", 1)
        if epoch is None:
            return
        self.ended_epochs = epoch
        self.batches = count_in(event, "batches", 1) or self.batches
        self._expect(count_in(event, "step") or 0)

    def _expect(self, step: int) -> None:
        if self.epochs is not None and self.batches is not None:
            self.steps = step + max(0, self.epochs - self.ended_epochs) * self.batches

    def epoch_at(self, step: int) -> int | None:
        """Return which epoch a step belongs to, from 1."""
        if self.epochs is None:
            return None
        if self.steps is None or not self.batches:
            return min(self.epochs, self.ended_epochs + 1)
        # Where an epoch has just ended it is that one, which may be validated now.
        left = max(0, self.steps - step) // self.batches
        return max(1, self.epochs - left)

    def left(self, step: int, rate: float | None) -> float | None:
        """Return the seconds until the end, at some steps a second; None where they are not known."""
        if self.steps is None or not rate:
            return None
        return max(0, self.steps - step) / rate


def duration(seconds: float) -> str:
    """Return a time for people.

    >>> [duration(s) for s in (0.4, 59.6, 812, 7500, 200_000)]
    ['0 s', '60 s', '14 min', '2 h 5 min', '2 d 7 h']
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    return f"{hours // 24} d {hours % 24} h"
