"""A step of `strategy.run` that is given a whole batch as a plain array: each replica computes all of it.

Tests: tests/virtual/test_mistakes.py.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Iterator

import numpy as np

from unisono.step._call_signature import Call, Kind
from unisono.step._functional import StatePlan
from unisono.step.variables._merge_rules import Merge

_LOG = logging.getLogger("unisono")

_said: set[str] = set()


def warn_of_whole_batch(fn: Callable[..., object], call: Call, plan: StatePlan, replicas: int) -> None:
    """Warn, once in a program, where a plain array of a step looks like the rows of all replicas.

    Args:
        fn: the step.
        call: its arguments.
        plan: the variables that it uses.
        replicas: how many compute it.
    """
    if _said or (rows := whole_batch(call, plan, replicas)) is None:
        return
    _said.add("whole batch")
    _LOG.warning(
        "`strategy.run` gives a plain array to each replica as a whole. Received: one of %d rows for %r, of "
        "which each of %d replicas computes all, so that every row counts %d times. To divide rows between "
        "the replicas, write\n    for batch in strategy.distribute_dataset(dataset):\n"
        "        strategy.run(step, args=(batch,))\n"
        "and `unisono.Mirrored(array)` for an array that each replica is meant to see as a whole.",
        rows, getattr(fn, "__name__", type(fn).__name__), replicas, replicas,
    )  # fmt: skip


def whole_batch(call: Call, plan: StatePlan, replicas: int) -> int | None:
    """Return the rows of a plain array that seem to be for all replicas; None where no array seems so.

    Beside values per replica these are as many rows as all of them have. Where there are none, a step that
    trains gets its rows in plain arrays; a step that uses variables, if their number divides.
    """
    known = {tuple(slot.variable.shape) for slot in plan.slots}
    shapes = [shape for shape in _plain_shapes(call) if len(shape) > 0 and shape not in known]
    if (totals := set(_rows_of_replicas(call))) or any(k in (Kind.SPLIT, Kind.RAGGED) for k in call.kinds):
        return next((shape[0] for shape in shapes if shape[0] in totals and shape[0] > replicas), None)
    if any(s.written and s.rule is Merge.KEEP and s.variable.trainable for s in plan.slots):
        # An optimizer has written weights.
        return next((shape[0] for shape in shapes if shape[0] > replicas), None)
    shared = collections.Counter(shape[0] for shape in shapes)
    counts = (
        s[0] for s in shapes if s[0] > replicas and s[0] % replicas == 0 and (len(s) > 1 or shared[s[0]] > 1)
    )
    return next(counts, None) if plan.slots else None


def _plain_shapes(call: Call) -> Iterator[tuple[int, ...]]:
    for kind, part in zip(call.kinds, call.parts, strict=True):
        if kind is Kind.SAME:
            yield np.shape(part[0])


def _rows_of_replicas(call: Call) -> Iterator[int]:
    """Yield how many rows all replicas have together, of each value that differs between them."""
    for kind, part in zip(call.kinds, call.parts, strict=True):
        if kind is Kind.SPLIT and np.ndim(part[0]) > 1:
            yield part[0].shape[0] * part[0].shape[1]
        elif kind is Kind.RAGGED and part and all(np.ndim(x) for x in part):
            yield sum(np.shape(x)[0] for x in part)
