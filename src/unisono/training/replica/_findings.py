"""What was found out about the parts of a model: how each is computed on several replicas, and why.

Tests: tests/virtual/training/test_explanation.py.
"""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from contextvars import ContextVar

from unisono._system._blocks import set_for_block


@dataclasses.dataclass(frozen=True)
class PartTreatment:
    """One line of what was read.

    Args:
        part: a layer, a state, a loss, metrics or an output.
        treatment: how it is computed on several replicas.
        reason: why.
    """

    part: str
    treatment: str
    reason: str


#: Collects what losses and metrics decide while a step is traced; None where they are not collected.
_NOTED: ContextVar[list[PartTreatment] | None] = ContextVar("unisono_noted", default=None)


def collected_in(findings: list[PartTreatment]) -> AbstractContextManager[object]:
    """Collect what is noted in a block.

    Args:
        findings: gets each finding once.
    """
    return set_for_block(_NOTED, findings)


def note(part: str, treatment: str, reason: str) -> None:
    """Note how a part is computed, where findings are collected."""
    findings = _NOTED.get()
    if findings is not None and (found := PartTreatment(part, treatment, reason)) not in findings:
        findings.append(found)
