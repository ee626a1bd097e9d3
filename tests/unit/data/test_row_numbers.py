"""Pipelines that choose rows of arrays, as pipelines of row numbers: the same rows in the same order."""

import jax
import numpy as np
import pytest

from unisono.data import AUTOTUNE, Dataset
from unisono.data._row_numbers import row_pipeline

X, Y = np.arange(69, dtype="f4").reshape(23, 3), np.arange(23)

CHOOSING = {
    "batch": lambda d: d.batch(4),
    "dropped remainder": lambda d: d.batch(4, drop_remainder=True),
    "shuffle": lambda d: d.shuffle(23).batch(4),
    "shuffle of a window": lambda d: d.shuffle(5, seed=3).batch(4),
    "same order in each epoch": lambda d: d.shuffle(23, seed=3, reshuffle_each_iteration=False).batch(4),
    "shuffled batches": lambda d: d.batch(4).shuffle(3),
    "repeat": lambda d: d.shuffle(23).repeat(2).batch(4),
    "repeated batches": lambda d: d.shuffle(23).batch(4).repeat(2),
    "take": lambda d: d.take(9).shuffle(9).batch(4),
    "skip": lambda d: d.skip(9).batch(4).take(3),
    "take of a shuffle": lambda d: d.shuffle(23, reshuffle_each_iteration=False).skip(3).take(15).batch(4),
    "shards": lambda d: d.shard(3, 1).skip(1).batch(2),
    "prefetch": lambda d: d.shuffle(23).batch(4).prefetch(AUTOTUNE),
    "threads": lambda d: d.batch(4, num_parallel_calls=2),
}


def batches(dataset):
    return list(dataset.as_numpy_iterator())


@pytest.mark.parametrize("name", CHOOSING)
def test_the_numbers_choose_the_rows_of_the_pipeline(name):
    dataset = CHOOSING[name](Dataset.from_tensor_slices({"x": X, "y": Y}))
    rows = row_pipeline(dataset)
    for _ in range(2):
        state = dataset.as_numpy_iterator().get_state()
        expected = batches(dataset)
        numbers = rows.numbers.as_numpy_iterator()
        # Both count the passes together, which decide the order.
        numbers.set_state({**state, "passes": [p + 1 for p in state["passes"]]})
        found = [jax.tree.map(lambda x, n=n: x[n], rows.arrays) for n in numbers]
        assert len(found) == len(expected)
        jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_state_belongs_to_both():
    dataset = Dataset.from_tensor_slices(X).shuffle(23).batch(4)
    rows = row_pipeline(dataset)
    numbers = rows.numbers.as_numpy_iterator()
    first = [next(numbers) for _ in range(2)]
    resumed = dataset.as_numpy_iterator()
    resumed.set_state(numbers.get_state())
    np.testing.assert_array_equal(next(resumed), X[next(numbers)])
    assert len(first[0]) == 4


@pytest.mark.parametrize(
    ("name", "used"), [("take", slice(9)), ("skip", slice(9, None)), ("shards", slice(4, None, 3))]
)
def test_rows_that_are_left_out_at_the_source_are_no_part_of_the_arrays(name, used):
    rows = row_pipeline(CHOOSING[name](Dataset.from_tensor_slices((X, Y))))
    jax.tree.map(np.testing.assert_array_equal, rows.arrays, (X[used], Y[used]))
    # Views, without a copy.
    assert np.shares_memory(rows.arrays[0], X)


def test_a_batch_has_its_size():
    assert row_pipeline(Dataset.from_tensor_slices(X).shuffle(9).batch(4)).batch_size == 4


OTHER = {
    "map": lambda d: d.map(lambda x: x).batch(4),
    "map of batches": lambda d: d.batch(4).map(lambda x: x),
    "filter": lambda d: d.filter(lambda x: True).batch(4),
    "padded batches": lambda d: d.padded_batch(4),
    "batches of batches": lambda d: d.batch(2).batch(2),
    "rows": lambda d: d.shuffle(9),
    "unbatch": lambda d: d.batch(4).unbatch().batch(2),
    "cache": lambda d: d.cache().batch(4),
    "zip": lambda d: Dataset.zip(d, d).batch(4),
    "concatenation": lambda d: d.concatenate(d).batch(4),
    "another source": lambda _: Dataset.range(9).batch(4),
}


@pytest.mark.parametrize("name", OTHER)
def test_another_pipeline_has_no_numbers(name):
    assert row_pipeline(OTHER[name](Dataset.from_tensor_slices(X))) is None
