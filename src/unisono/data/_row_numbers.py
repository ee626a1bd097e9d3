"""Pipelines that only choose rows of arrays, as pipelines of the rows' numbers.

Tests: tests/unit/data/test_row_numbers.py.
"""

from __future__ import annotations

import dataclasses
import operator
from typing import NamedTuple

import numpy as np

from unisono.data._dataset import Dataset
from unisono.data._pipeline import _indexed
from unisono.data._pipeline._plan import Node, walk
from unisono.data._pipeline._structure import Element, map_leaves
from unisono.data._rewrite import rewritten

#: Transformations of which each element is one of the input's, or a batch of them. By their exact classes:
#: `PaddedBatch` is a `Batch`, too.
_CHOOSING = frozenset(
    {_indexed.Shuffle, _indexed.Repeat, _indexed.Stride, _indexed.ReadAhead, _indexed.Batch}
)


class RowPipeline(NamedTuple):
    """Arrays, and a pipeline that chooses their rows.

    Args:
        arrays: a structure of arrays, views of the user's.
        numbers: data set whose batches are the numbers of rows. Its plan differs from the original in its
            source alone: states and passes are the same.
        batch_size: rows of a batch; the last one may have fewer.
    """

    arrays: Element
    numbers: Dataset
    batch_size: int


def row_pipeline(dataset: Dataset) -> RowPipeline | None:
    """Return the arrays whose rows a pipeline chooses; None for a pipeline that does something else.

    >>> rows = row_pipeline(Dataset.from_tensor_slices(np.arange(5) * 10).skip(1).batch(3))
    >>> rows.arrays, [batch.tolist() for batch in rows.numbers.as_numpy_iterator()]
    (array([10, 20, 30, 40]), [[0, 1, 2], [3]])
    """
    *transforms, source = walk(dataset._node)
    if not isinstance(source, _indexed.Slices) or source.files:
        return None
    if any(type(node) not in _CHOOSING for node in transforms):
        return None
    batches = [node for node in transforms if isinstance(node, _indexed.Batch)]
    if len(batches) != 1:
        return None
    arrays, chosen = source.arrays, np.arange(source.cardinality, dtype=np.int32)
    # What `take` and `skip` directly behind the source leave out, as of a part for validation, is no part of
    # the arrays.
    for node in reversed(transforms):
        if not isinstance(node, _indexed.Stride):
            break
        part = slice(node.start, node.start + node.step * node.cardinality, node.step)
        arrays, chosen = map_leaves(operator.itemgetter(part), arrays), chosen[part]
    numbers = np.zeros(source.cardinality, np.int32)
    numbers[chosen] = np.arange(len(chosen))

    def of_numbers(node: Node, _: Node) -> Node:
        return dataclasses.replace(node, arrays=numbers) if isinstance(node, _indexed.Slices) else node

    return RowPipeline(arrays, rewritten(dataset, of_numbers), batches[0].batch_size)
