"""Partitioners, with TensorFlow's arguments and errors."""

import numpy as np
import pytest

from unisono import InvalidArgumentError, partitioners
from unisono.parameter_server.chief._partition import shard_bounds, shard_count

SHAPES = [(), (0, 4), (1,), (7, 3), (1000, 16), (10, 0), (3, 2, 5)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", np.int8, "string"])
def test_shards_have_the_promised_sizes(shape, dtype):
    item = {"float32": 4, "bfloat16": 2, np.int8: 1, "string": 16}[dtype]
    row = int(np.prod(shape[1:])) * item
    for limit in (1, 50, 300, 10**9):
        small = shard_count(partitioners.MaxSizePartitioner(limit), shape, dtype)
        large = shard_count(partitioners.MinSizePartitioner(limit, max_shards=10**6), shape, dtype)
        if not shape or not shape[0]:
            assert small == large == 1
            continue
        sizes = [(end - begin) * row for begin, end in shard_bounds(shape[0], small)]
        # As few as possible: one shard less would make one too large.
        assert max(sizes) <= max(limit, row)
        assert small == 1 or -(-shape[0] // (small - 1)) * row > limit
        sizes = [(end - begin) * row for begin, end in shard_bounds(shape[0], large)]
        assert large == 1 or min(sizes) >= limit
        assert large == shape[0] or shape[0] // (large + 1) * row < limit


def test_tensorflows_examples():
    """From TensorFlow's own tests: sharded_variable_test.py."""
    assert partitioners.FixedShardsPartitioner(num_shards=2)((10, 3), "float32") == [2, 1]
    assert partitioners.MinSizePartitioner(min_shard_bytes=4, max_shards=2)((6, 1), "float32") == [2, 1]
    assert partitioners.MinSizePartitioner(4, max_shards=6)((6, 1), "float32") == [6, 1]
    assert partitioners.MinSizePartitioner()((10**6, 1), "float32") == [1, 1]
    assert partitioners.MaxSizePartitioner(max_shard_bytes=4)((6, 1), "float32") == [6, 1]
    assert partitioners.MaxSizePartitioner(max_shard_bytes=4, max_shards=2)((6, 1), "float32") == [2, 1]
    assert partitioners.MaxSizePartitioner(max_shard_bytes=1024)((6, 1), "float32") == [1, 1]
    assert partitioners.MinSizePartitioner(16, 8, bytes_per_string=8)((6, 1), "string") == [3, 1]
    assert partitioners.FixedShardsPartitioner(2)((4, 6), "float32", axis=1) == [1, 2]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: partitioners.FixedShardsPartitioner(0), "num_shards"),
        (lambda: partitioners.FixedShardsPartitioner(1.5), "num_shards"),
        (lambda: partitioners.MinSizePartitioner(min_shard_bytes=-1), "min_shard_bytes"),
        (lambda: partitioners.MinSizePartitioner(max_shards=0), "max_shards"),
        (lambda: partitioners.MinSizePartitioner(bytes_per_string=0), "bytes_per_string"),
        (lambda: partitioners.MaxSizePartitioner(0), "max_shard_bytes"),
        (lambda: partitioners.MaxSizePartitioner(1, max_shards=0), "max_shards"),
        (lambda: partitioners.MaxSizePartitioner(1, bytes_per_string=-3), "bytes_per_string"),
    ],
)
def test_arguments_must_be_positive(make, named):
    with pytest.raises(ValueError, match=f"Argument `{named}` must be a positive integer"):
        make()


def test_a_users_function_is_checked():
    assert shard_count(lambda shape, dtype: (shape[0] // 2, 1), (4, 4), "float32") == 2
    # As in TensorFlow: no more shards than rows, scalars are whole, and trailing ones may be left out.
    assert shard_count(lambda shape, dtype: [5, 1], (4, 4), "float32") == 4
    assert shard_count(lambda shape, dtype: [3], (4, 4), "float32") == 3
    assert shard_count(lambda shape, dtype: [3], (), "float32") == 1
    assert shard_count(lambda shape, dtype: [3, 1], (0, 4), "float32") == 1
    for answer in ([], [1, 2], [0, 1], [-2, 1], 2, ["2", 1]):
        with pytest.raises(InvalidArgumentError, match=r"1 for all axes but the first.*'dense/kernel'"):
            shard_count(lambda shape, dtype, answer=answer: answer, (4, 4), "float32", "dense/kernel")
    with pytest.raises(InvalidArgumentError, match="axis=2 for shape"):
        partitioners.FixedShardsPartitioner(2)((4, 4), "float32", axis=2)


def test_bounds_cover_all_rows_once():
    for rows in range(12):
        for shards in range(1, 6):
            bounds = shard_bounds(rows, shards)
            assert [i for begin, end in bounds for i in range(begin, end)] == list(range(rows))
            sizes = [end - begin for begin, end in bounds]
            assert len(sizes) == shards
            assert max(sizes) - min(sizes) <= 1
