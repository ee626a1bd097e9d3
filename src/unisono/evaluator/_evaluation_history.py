"""The evaluations of an evaluator, in a small file: the next one neither repeats nor forgets them."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterable
from typing import Any

from unisono._system._files import replace_file
from unisono._system._json import UNREADABLE, parse_json
from unisono._system._object_store import Place
from unisono._types import Json

_LOG = logging.getLogger("unisono")


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One evaluation.

    Args:
        digest: of the weights: the same checkpoint may be written again after a restart.
    """

    step: int
    results: dict[str, Any]
    name: str
    digest: str


@dataclasses.dataclass
class EvaluationHistory:
    """The evaluations of an evaluator.

    Args:
        known: name -> signature of the checkpoints that are done with.
        mark: the last end of training that was obeyed.
        watching: whether the evaluator runs, or is to resume when it starts again.
    """

    evaluations: list[Evaluation] = dataclasses.field(default_factory=list)
    known: dict[str, str] = dataclasses.field(default_factory=dict)
    mark: str = ""
    watching: bool = True

    def has(self, step: int, digest: str) -> bool:
        """Return whether these weights were evaluated as this step's."""
        # The digest, because a restarted training may write the same step with other weights.
        return any((e.step, e.digest) == (step, digest) for e in self.evaluations)

    def forget(self, names: Iterable[str]) -> None:
        """Keep only these among the checkpoints that are known: the others are no longer there."""
        kept = set(names)
        self.known = {name: value for name, value in self.known.items() if name in kept}

    def to_json(self) -> str:
        """The record as text."""
        return json.dumps(dataclasses.asdict(self), indent=1)


def read_record(path: Place, goes_on: bool = False) -> EvaluationHistory:
    """Read a record, an empty one where there is none.

    Args:
        goes_on: whether the process belongs to the run that wrote it, even if that evaluator had ended.
    """
    try:
        record = _record_of(parse_json(path.read_text()))
    except FileNotFoundError:
        return EvaluationHistory()
    # A damaged record costs repeated evaluations at most, so it does not end the evaluator.
    except UNREADABLE as error:
        _LOG.warning("%s cannot be read (%s): a new one is started.", path, error)
        return EvaluationHistory()
    # That run had ended. `known` stays, so that its checkpoints are not evaluated again.
    if not (record.watching or goes_on):
        record.evaluations = []
    record.watching = True
    return record


def _record_of(fields: Json) -> EvaluationHistory:
    """Return the record of a file.

    Raises:
        TypeError: a field has another type than `write_record` writes.
    """
    evaluations = [Evaluation(**each) for each in fields["evaluations"]]
    record = EvaluationHistory(**{**fields, "evaluations": evaluations})
    kinds = [(record.known, dict), (record.mark, str), (record.watching, bool)]
    for each in evaluations:
        kinds += [(each.step, int), (each.results, dict), (each.name, str), (each.digest, str)]
    if not all(isinstance(value, kind) for value, kind in kinds):
        raise TypeError("a field has another type")
    return record


def write_record(path: Place, record: EvaluationHistory) -> bool:
    """Write a record; return whether that was possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, record.to_json(), durable=False)
    except OSError as error:
        _LOG.warning("%s cannot be written (%s): a restart evaluates again.", path, error)
        return False
    return True
