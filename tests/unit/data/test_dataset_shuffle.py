"""Shuffles: the buffer's rule, seeds, epochs, and the gather of whole batches that must change nothing."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.data import UNKNOWN_CARDINALITY, Dataset
from unisono.data._pipeline._order import ShuffledOrder


def _epochs(dataset: Dataset, count: int) -> list[list[int]]:
    return [[int(x) for x in dataset] for _ in range(count)]


@given(size=st.integers(0, 60), buffer_size=st.integers(1, 70), seed=st.integers(0, 2**63))
def test_a_shuffle_is_a_permutation_that_no_element_leaves_too_early(
    size: int, buffer_size: int, seed: int
) -> None:
    order = [int(x) for x in Dataset.range(size).shuffle(buffer_size, seed=seed)]
    assert sorted(order) == list(range(size))
    assert all(element < place + buffer_size for place, element in enumerate(order))


def test_all_orders_are_equally_likely_with_a_full_buffer() -> None:
    dataset = Dataset.range(3).shuffle(3, seed=5)
    counts: dict[tuple[int, ...], int] = {}
    for order in _epochs(dataset, 1200):
        counts[tuple(order)] = counts.get(tuple(order), 0) + 1
    assert len(counts) == 6
    # Chi-square with 5 degrees of freedom; 20.5 is exceeded once in a thousand, and the seed is fixed.
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 20.5


def test_an_order_is_the_same_for_ever() -> None:
    # Written down once: it must not change with numpy, the platform or this library.
    assert _epochs(Dataset.range(10).shuffle(4, seed=42), 2) == EXPECTED_ORDERS


EXPECTED_ORDERS = [[3, 1, 4, 2, 0, 6, 9, 7, 8, 5], [3, 0, 1, 2, 4, 7, 8, 9, 5, 6]]


def test_epochs_differ_and_are_reproducible_from_the_seed() -> None:
    first, again = (_epochs(Dataset.range(30).shuffle(30, seed=1), 3) for _ in range(2))
    assert first == again
    assert first[0] != first[1] != first[2]
    assert first != _epochs(Dataset.range(30).shuffle(30, seed=2), 3)


def test_the_order_can_be_kept() -> None:
    kept = Dataset.range(30).shuffle(30, seed=1, reshuffle_each_iteration=False)
    orders = _epochs(kept, 2)
    assert orders[0] == orders[1]
    assert [int(x) for x in kept.repeat(2)] == orders[0] * 2


def test_repetitions_are_shuffled_anew() -> None:
    order = [int(x) for x in Dataset.range(30).shuffle(30, seed=1).repeat(2)]
    assert sorted(order[:30]) == sorted(order[30:]) == list(range(30))
    assert order[:30] != order[30:]


def test_data_sets_made_in_the_loop_are_shuffled_anew_too() -> None:
    base = Dataset.range(30).shuffle(30, seed=1)
    assert list(base.take(5)) != list(base.take(5))


def test_a_cache_keeps_the_order_before_it_and_not_the_one_after() -> None:
    orders = _epochs(Dataset.range(30).shuffle(30, seed=1).cache(), 2)
    assert orders[0] == orders[1]
    orders = _epochs(Dataset.range(30).shuffle(30, seed=1).cache().shuffle(30, seed=2), 2)
    assert orders[0] != orders[1]


def test_without_a_seed_python_decides_it() -> None:
    random.seed(7)
    first = _epochs(Dataset.range(30).shuffle(30).shuffle(10), 2)
    random.seed(7)
    assert first == _epochs(Dataset.range(30).shuffle(30).shuffle(10), 2)
    assert first != _epochs(Dataset.range(30).shuffle(30).shuffle(10), 2)


def test_keras_seeds_pipelines() -> None:
    import keras

    orders = []
    for _ in range(2):
        keras.utils.set_random_seed(7)
        orders.append(_epochs(Dataset.range(30).shuffle(30), 2))
    assert orders[0] == orders[1]


def test_unknown_cardinality_means_a_full_shuffle() -> None:
    assert list(Dataset.range(9).shuffle(UNKNOWN_CARDINALITY, seed=1)) == list(
        Dataset.range(9).shuffle(9, seed=1)
    )


@settings(deadline=None)
@given(
    size=st.integers(1, 40),
    steps=st.lists(
        st.tuples(st.sampled_from(["shuffle", "repeat", "take", "skip", "shard"]), st.integers(1, 12)),
        max_size=5,
    ),
    batch=st.integers(1, 7),
    drop=st.booleans(),
)
def test_gathered_batches_hold_what_a_stream_gives(
    size: int, steps: list[tuple[str, int]], batch: int, drop: bool
) -> None:
    arrays = (np.arange(size) * 10, {"x": np.arange(2.0 * size).reshape(size, 2)})
    indexed = Dataset.from_tensor_slices(arrays)
    stream = Dataset.from_generator(lambda: list(indexed))
    batches = []
    for source in (indexed, stream):
        dataset = source
        for name, number in steps:
            dataset = {
                "shuffle": lambda ds, k: ds.shuffle(k, seed=k),
                "repeat": lambda ds, k: ds.repeat(k % 4),
                "take": lambda ds, k: ds.take(2 * k),
                "skip": lambda ds, k: ds.skip(k - 1),
                "shard": lambda ds, k: ds.shard(k, k // 2),
            }[name](dataset, number)
        dataset = dataset.batch(batch, drop_remainder=drop)
        batches.append([[(a.tolist(), d["x"].tolist()) for a, d in dataset] for _ in range(2)])
    assert batches[0] == batches[1]


def test_infinite_and_nested_shuffles_stay_right() -> None:
    endless = Dataset.range(7).repeat().shuffle(20, seed=1)
    stream = Dataset.from_generator(lambda: iter(range(7))).repeat().shuffle(20, seed=1)
    assert [int(x) for x in endless.take(500)] == [int(x) for x in stream.take(500)]
    nested = endless.shuffle(5, seed=2)
    assert [int(x) for x in nested.take(50)] == [int(x) for x in stream.shuffle(5, seed=2).take(50)]


def test_a_long_order_keeps_a_window_and_can_go_back() -> None:
    order = ShuffledOrder(None, 100, [1], keep=2)
    positions = np.arange(50_000)
    whole = order(positions)
    assert (order(positions[:300]) == whole[:300]).all()
    assert (order(positions[-300:]) == whole[-300:]).all()


def test_threads_see_one_order() -> None:
    plain = Dataset.from_tensor_slices(np.arange(3000)).shuffle(500, seed=3).repeat(2).batch(16)
    ahead = (
        Dataset.from_tensor_slices(np.arange(3000))
        .shuffle(500, seed=3)
        .repeat(2)
        .batch(16, num_parallel_calls=4)
    )
    for one, other in zip(plain, ahead, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["shuffle", "repeat"])
def test_batches_cross_repetitions(name: str) -> None:
    dataset = Dataset.range(5).shuffle(5, seed=1) if name == "shuffle" else Dataset.range(5)
    assert [len(batch) for batch in dataset.repeat(3).batch(4)] == [4, 4, 4, 3]
