"""Rewrite a finished pipeline for a distribution: each function returns a new data set for one worker.

Tests: tests/unit/data/test_sharding.py.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from unisono._errors import InvalidArgumentError
from unisono.data._dataset import Dataset
from unisono.data._pipeline._indexed import Slices, Source, Stride
from unisono.data._pipeline._interleave import Interleave
from unisono.data._pipeline._plan import Node, Pass, SeededNode, walk
from unisono.data._pipeline._streams import StreamBatch, StreamStride
from unisono.data._pipeline._structure import Element, leading_size
from unisono.data._sharding import balanced_sizes, split_points


def reads_files(dataset: Dataset) -> bool:
    """Return whether the source of the pipeline is names of files.

    >>> reads_files(Dataset.range(3))
    False
    """
    return any(isinstance(node, Slices) and node.files for node in walk(dataset._node))


def file_sharded(dataset: Dataset, num_shards: int, index: int) -> Dataset:
    """Return the data set with every `num_shards`-th file.

    Raises:
        InvalidArgumentError: It reads no files, or fewer than there are shards.
    """
    if not reads_files(dataset):
        raise InvalidArgumentError(
            f"AutoShardPolicy.FILE needs a pipeline that reads files. Received: {dataset!r}. "
            "Write AutoShardPolicy.DATA, or begin with TextLineDataset or list_files."
        )

    def shard(node: Node, _: Node) -> Node:
        if not (isinstance(node, Slices) and node.files):
            return node
        # As in tf.distribute: a worker without a file would have no data.
        if node.cardinality < num_shards:
            raise InvalidArgumentError(
                "AutoShardPolicy.FILE needs at least one file for each worker. "
                f"Received: {node.cardinality} files for {num_shards} workers. "
                "Write AutoShardPolicy.DATA, or split the data into more files."
            )
        # Directly at the names: shuffles after it may have other seeds on other workers, which then would
        # read files twice or not at all.
        return Stride(node, index, num_shards)

    return rewritten(dataset, shard)


def hint_sharded(dataset: Dataset, num_shards: int, index: int) -> Dataset:
    """Return the data set with each `shard(SHARD_HINT, SHARD_HINT)` made a shard of one worker.

    >>> from unisono.data import SHARD_HINT
    >>> hinted = Dataset.range(6).shard(SHARD_HINT, SHARD_HINT)
    >>> [int(x) for x in hint_sharded(hinted, 2, 1)]
    [1, 3, 5]
    """

    def shard(node: Node, _: Node) -> Node:
        if isinstance(node, StreamStride) and node.hinted:
            return dataclasses.replace(node, start=index, step=num_shards)
        return node

    return rewritten(dataset, shard)


def with_common_seed(dataset: Dataset, seed: int) -> Dataset:
    """Return the data set with the seeds drawn at random replaced, so that all workers shuffle alike."""
    shuffles = [node for node in dict.fromkeys(walk(dataset._node)) if isinstance(node, SeededNode)]
    numbers: dict[Node, int] = {node: number for number, node in enumerate(shuffles)}

    def reseed(node: Node, original: Node) -> Node:
        if isinstance(node, SeededNode) and not node.seeded:
            # A seed of its own for each shuffle; their order in the plan is the same on all workers.
            return dataclasses.replace(node, seed=(seed + numbers[original]) % 2**64)
        return node

    return rewritten(dataset, reseed)


def shuffle_seeds(dataset: Dataset, drawn: bool | None = None) -> list[int]:
    """Return the seeds of the shuffles of a pipeline.

    >>> shuffle_seeds(Dataset.range(9).shuffle(9, seed=4))
    [4]
    """
    nodes = dict.fromkeys(walk(dataset._node))
    shuffles = [node for node in nodes if isinstance(node, SeededNode)]
    return [node.seed for node in shuffles if drawn is None or node.seeded is (not drawn)]


def with_batches_divided(
    dataset: Dataset, num_shards: int, index: int, at_least_one: bool = False
) -> Dataset:
    """Return the data set with batches of one shard's part of the rows.

    Args:
        dataset: A pipeline with `batch` in it; the last one is divided. Without `batch`, each element is a
            batch, and is cut into one piece for each shard.
        at_least_one: Whether batches may be smaller than there are shards: then each has one row of them.

    Raises:
        InvalidArgumentError: Its batches are smaller than there are shards.

    >>> [len(x) for x in with_batches_divided(Dataset.range(6).batch(3), 2, 0)]
    [2, 2, 2]
    """
    # `walk` begins at the end of the pipeline: the first batch that it finds is the last to be applied.
    last = next((node for node in walk(dataset._node) if isinstance(node, StreamBatch)), None)
    if last is None:
        pieces = functools.partial(_pieces, parts=num_shards)
        return dataset._derived(Interleave(dataset._node, pieces, cycle_length=1, block_length=1, ahead=0))
    if last.batch_size < num_shards and not at_least_one:
        raise InvalidArgumentError(
            "A pipeline whose files are divided over workers must have batches of at least one row for each. "
            f"Received: {dataset!r} for {num_shards} workers. Write batch(64), the size for all together."
        )
    size = max(1, balanced_sizes(last.batch_size, num_shards)[index])

    def divide(node: Node, original: Node) -> Node:
        if original is last and isinstance(node, StreamBatch):
            return dataclasses.replace(node, batch_size=size)
        return node

    return rewritten(dataset, divide)


def _pieces(batch: Element, parts: int) -> Node:
    """Return a batch as a data set of at most `parts` smaller ones, whose sizes differ by at most one."""
    rows = leading_size(batch)
    whole = Slices(batch)
    points = split_points(rows, min(parts, max(1, rows)))
    return Source(lambda: [whole.stacked(Pass({}), np.arange(a, b)) for a, b in points])


def rewritten(dataset: Dataset, change: Callable[[Node, Node], Node]) -> Dataset:
    """Return the data set with `change(node, original)` of each node, inputs first."""
    made: dict[Node, Node] = {}

    def visit(node: Node) -> Node:
        # A node that is used twice must remain one node, because its passes are counted together.
        if node not in made:
            inputs = {below: visit(below) for below in node.inputs}
            alike = all(before is after for before, after in inputs.items())
            made[node] = change(node if alike else node.with_inputs(inputs), node)
        return made[node]

    return dataset._derived(visit(dataset._node))
