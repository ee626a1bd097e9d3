"""Texts on what batches lack, and on what differs from one device.

Tests: tests/unit/training/test_batch_policy.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono._types import PyTree
from unisono.data._batches import unbatched
from unisono.training.replica._step_reading import StepReading


def of_unequal(model: str, batch: PyTree) -> str:
    """Return how a batch of unequal arrays is computed on several replicas.

    Args:
        model: its name.
    """
    return (
        f"The arrays of a batch of {model!r} have not the same number of rows: {unequal(batch)}. So every "
        "replica computes the whole batch: the result equals one device's. To divide the work, give "
        "every array one row for each example."
    )


def many_shapes(count: int) -> str:
    """Return the warning of batches whose rows had many shapes."""
    return (
        f"Batches had {count} shapes of rows, and a program is compiled for each, which takes longer than "
        "its steps. Where each batch is padded to its own length, write "
        "`dataset.padded_batch(size, padded_shapes=([128], []))` for one length, or "
        "`dataset.bucket_by_sequence_length(..., pad_to_bucket_boundary=True)` for a few."
    )


def together(model: str, reading: StepReading, joins: bool) -> str:
    """Return the warning of rows that are computed together.

    Args:
        model: its name.
        reading: says why.
        joins: whether one program computes them.
    """
    how = "one program computes all rows of a batch, which XLA divides over the devices"
    if not joins:
        how = "every replica computes all rows of a batch"
    return (
        f"The rows of a batch of {model!r} cannot be computed apart: {reading.mixes}. So {how}: the numbers "
        "are those of one device. `unisono.per_replica(layer)` lets a layer see the rows of one replica "
        "alone; `strategy.explain(model)` shows each part of a model."
    )


def whole(cause: str) -> str:
    """Return the warning of a batch that is not divided."""
    return f"{cause}: every replica computes all rows, which is exact but no faster than one device."


def without_rows(batch: PyTree) -> InvalidArgumentError | InvalidTypeError:
    """Return the error for a batch without rows, or with arrays of different numbers of rows."""
    sizes = [(path, np.shape(x)) for path, x in jax.tree_util.tree_leaves_with_path(batch)]
    if not sizes:
        return InvalidArgumentError(
            "A batch must hold at least one array. Received: an empty batch. Yield `(x, y)` from the data."
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if not np.ndim(leaf):
            return unbatched(f"batch{jax.tree_util.keystr(path)}", leaf)
    return InvalidArgumentError(
        f"All arrays of a batch must have the same number of rows. Received: {unequal(batch)}. Give every "
        "array one row for each example."
    )


def unequal(batch: PyTree) -> str:
    """Return the shapes of two arrays that have not the same number of rows, and where they are."""
    (path, first), *rest = ((p, np.shape(x)) for p, x in jax.tree_util.tree_leaves_with_path(batch))
    other, shape = next(size for size in rest if size[1][0] != first[0])
    places = [f"batch{jax.tree_util.keystr(p)}" for p in (path, other)]
    return f"shape {first} at {places[0]}, and {shape} at {places[1]}"


def differences(model: str, replicas: int, reading: StepReading) -> str:
    """Return the warning of results that will not be as on one device.

    Args:
        model: its name.
        reading: says that something will not.
    """
    parts = []
    if reading.apart:
        parts.append(f"{_names(reading.apart)} {_verb(reading.apart)} the rows of one replica alone")
    if reading.draws:
        parts.append(f"{_names(reading.draws)} {_verb(reading.draws, 'draws')} random numbers per replica")
    return (
        f"On {replicas} replicas {model!r} differs from one device, as in tf.distribute: "
        f"{'; '.join([*parts, *reading.others])}. `strategy.explain(model)` shows each part of a model."
    )


def _names(names: Sequence[str]) -> str:
    """Return the first name, and how many there are besides."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]!r}{more}"


def _verb(names: Sequence[str], verb: str = "sees") -> str:
    """Return a verb in the number of its subjects."""
    return verb if len(names) == 1 else verb.removesuffix("s")
