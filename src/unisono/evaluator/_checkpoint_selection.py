"""Which checkpoint an evaluator takes next, and when it ends: pure decisions, obeyed by `_sidecar`."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping


@dataclasses.dataclass(frozen=True)
class CheckpointEntry:
    """A checkpoint in the directory.

    Args:
        series: its name without the number: checkpoints of one series are in the order of their numbers.
        number: at the end of its name, None where there is none.
        time_ns: when it was written, in nanoseconds.
        signature: another one when something else lies under the name.
        is_atomic: whether it is complete once it is there, as commits are.
    """

    name: str
    series: str
    number: int | None
    time_ns: int
    signature: str
    is_atomic: bool


class FinishReason(enum.Enum):
    """Why an evaluator ends."""

    ASKED = "it was asked to (SIGTERM)"
    ENOUGH = "`max_evaluations` are done"
    FINISHED = "training is over"
    TIMEOUT = "no new checkpoint in time"


@dataclasses.dataclass(frozen=True)
class View:
    """An evaluator's view of a directory.

    Args:
        known: name -> signature of those that are done with: evaluated, overtaken or damaged.
        before: name -> signature of those that were there when it looked last.
        over: whether training had ended before it looked.
        idle: seconds without a new checkpoint.
    """

    found: tuple[CheckpointEntry, ...] = ()
    known: Mapping[str, str] = dataclasses.field(default_factory=dict)
    before: Mapping[str, str] = dataclasses.field(default_factory=dict)
    over: bool = False
    asked: bool = False
    evaluations: int = 0
    idle: float = 0.0


class Wait:
    """There is nothing to do yet."""


@dataclasses.dataclass(frozen=True)
class Evaluate:
    """A checkpoint is to be evaluated."""

    chosen: CheckpointEntry
    overtaken: tuple[CheckpointEntry, ...] = ()


@dataclasses.dataclass(frozen=True)
class Finish:
    """Nothing more is to be done."""

    reason: FinishReason


def next_action(view: View, max_evaluations: int | None, timeout: float) -> Wait | Evaluate | Finish:
    """Decide what to do.

    >>> next_action(View(over=True), None, 60.0)
    Finish(reason=<FinishReason.FINISHED: 'training is over'>)
    """
    # First of all: after SIGTERM there may be seconds left, too few for another evaluation.
    if view.asked:
        return Finish(FinishReason.ASKED)
    if max_evaluations is not None and view.evaluations >= max_evaluations:
        return Finish(FinishReason.ENOUGH)
    new = [f for f in in_order(view.found) if view.known.get(f.name) != f.signature]
    # A file that still grows is another one at the next look. At the end of training all are complete.
    ready = [f for f in new if f.is_atomic or view.over or view.before.get(f.name) == f.signature]
    if ready:
        return Evaluate(ready[-1], tuple(new[: new.index(ready[-1])]))
    # Only now: the last checkpoint of a finished run is evaluated before.
    if view.over:
        return Finish(FinishReason.FINISHED)
    return Finish(FinishReason.TIMEOUT) if view.idle >= timeout else Wait()


def in_order(entries: Iterable[CheckpointEntry]) -> list[CheckpointEntry]:
    """Return checkpoints in the order in which they were written.

    That is the order of their times; but within a series of commits the number counts, as a copied
    directory may have lost the times.
    """
    # Each commit is at least as new as its series' commits with smaller numbers.
    latest: dict[str, int] = {}
    ages: dict[str, int] = {}
    for each in sorted(entries, key=lambda f: (f.number or 0, f.name)):
        ages[each.name] = each.time_ns
        if each.is_atomic and each.number is not None:
            ages[each.name] = latest[each.series] = max(each.time_ns, latest.get(each.series, 0))
    return sorted(entries, key=lambda f: (ages[f.name], f.number or 0, f.name))


def signatures(entries: Iterable[CheckpointEntry]) -> dict[str, str]:
    """Name -> signature.

    >>> signatures([CheckpointEntry("ckpt-1", "ckpt", 1, 0, "a", True)])
    {'ckpt-1': 'a'}
    """
    return {f.name: f.signature for f in entries}
