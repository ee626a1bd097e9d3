"""Iterator state: one that is restored, in a pipeline built anew, goes on with the very next element."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from unisono._errors import InvalidArgumentError
from unisono.data import AUTOTUNE, Dataset

Step = Callable[[Dataset], Dataset]

SOURCES: dict[str, Callable[[int], Dataset]] = {
    "range": Dataset.range,
    "slices": lambda n: Dataset.from_tensor_slices(
        (np.arange(n) * 10, {"a": np.arange(2.0 * n).reshape(n, 2)})
    ),
    "generator": lambda n: Dataset.from_generator(lambda: iter(range(n))),
    "filtered": lambda n: Dataset.range(2 * n).filter(lambda x: x % 2 == 0),
    "zipped": lambda n: Dataset.zip((Dataset.range(n), Dataset.range(n + 2).shuffle(4, seed=3))),
}

# Each step keeps elements of any structure usable by each other one.
STEPS: dict[str, Callable[[int], Step]] = {
    "map": lambda k: lambda ds: ds.map(_same),
    "parallel_map": lambda k: lambda ds: ds.map(_same, num_parallel_calls=1 + k),
    "filter": lambda k: lambda ds: ds.enumerate().filter(lambda i, x: i % (k + 2) != 0).map(lambda i, x: x),
    "shuffle": lambda k: lambda ds: ds.shuffle(1 + 2 * k, seed=k),
    "fixed_shuffle": lambda k: lambda ds: ds.shuffle(100, seed=k, reshuffle_each_iteration=False),
    "repeat": lambda k: lambda ds: ds.repeat(k),
    "repeat_for_ever": lambda k: lambda ds: ds.repeat(),
    "rebatch": lambda k: lambda ds: ds.batch(k + 1).unbatch(),
    "take": lambda k: lambda ds: ds.take(3 * k),
    "skip": lambda k: lambda ds: ds.skip(k),
    "shard": lambda k: lambda ds: ds.shard(k + 1, k),
    "cache": lambda k: lambda ds: ds.take(50).cache(),
    "prefetch": lambda k: lambda ds: ds.prefetch(k or AUTOTUNE),
    "concatenate": lambda k: lambda ds: ds.concatenate(ds.skip(k)),
    "flat_map": lambda k: lambda ds: ds.batch(k + 1).flat_map(lambda *x: _slices(x)),
    "interleave": lambda k: (
        lambda ds: ds.batch(2).interleave(lambda *x: _slices(x), k + 1, 1 + k % 2, k or None)
    ),
    "window": lambda k: lambda ds: ds.window(3, 1 + k, 1 + k % 2, k > 2).flat_map(lambda *x: _zipped(x)),
    "group": lambda k: (
        lambda ds: ds.enumerate().group_by_window(lambda i, x: i % (k + 1), lambda key, w: _seconds(w), 3)
    ),
    "rebatch_in_turn": lambda k: lambda ds: ds.batch(3).rebatch([1, k + 1]).unbatch(),
    "take_while": lambda k: lambda ds: _seconds(ds.enumerate().take_while(lambda i, x: i < 5 * k)),
    "scan": lambda k: lambda ds: _seconds(ds.scan(k, lambda n, x: (n + 1, (n, x))).filter(_mostly)),
    "sample": lambda k: (
        lambda ds: Dataset.sample_from_datasets([ds, ds.skip(k)], [0.3, 0.7], k, k > 2, k % 2 == 0)
    ),
    "choose": lambda k: (
        lambda ds: Dataset.choose_from_datasets([ds, ds.skip(1)], Dataset.range(2).repeat(2 * k), k > 2)
    ),
    "ignore_errors": lambda k: lambda ds: _seconds(ds.enumerate().map(_faulty).ignore_errors()),
    "resample": lambda k: (
        lambda ds: (
            ds.enumerate()
            .rejection_resample(lambda i, x: i % 2, [0.7, 0.3], [0.5, 0.5] if k > 2 else None, seed=k)
            .map(lambda kind, element: element[1])
        )
    ),
    "random": lambda k: (
        lambda ds: (
            Dataset.zip((Dataset.random(k, k > 2), ds)).filter(lambda n, x: n % 2 == 0).map(lambda n, x: x)
        )
    ),
    "flat_map_shuffled": lambda k: lambda ds: ds.batch(4).flat_map(lambda *x: _slices(x).shuffle(4, seed=k)),
}
LAST: dict[str, Step] = {
    "nothing": lambda ds: ds,
    "batch": lambda ds: ds.batch(3),
    "batch_ahead": lambda ds: ds.batch(3, drop_remainder=True).prefetch(2),
    "shuffled_batches": lambda ds: ds.batch(2).shuffle(3, seed=1).take(10),
}
PIPELINES = st.tuples(
    st.sampled_from(sorted(SOURCES)),
    st.integers(0, 9),
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 4)), max_size=4),
    st.sampled_from(sorted(LAST)),
)


def _same(*parts: Any) -> Any:
    return parts[0] if len(parts) == 1 else parts


def _seconds(pairs: Dataset) -> Dataset:
    return pairs.map(lambda first, second: second)


def _zipped(parts: tuple[Any, ...]) -> Dataset:
    return Dataset.zip(_same(*parts))


def _mostly(number: Any, element: Any) -> bool:
    return bool(number % 5 != 1)


def _faulty(number: Any, element: Any) -> Any:
    if number % 4 == 1:
        raise ValueError("cannot be made")
    return number, element


def _slices(parts: tuple[Any, ...]) -> Dataset:
    return Dataset.from_tensor_slices(_same(*parts))


def _build(plan: tuple[str, int, list[tuple[str, int]], str]) -> Dataset:
    source, size, steps, last = plan
    dataset = SOURCES[source](size)
    for name, number in steps:
        dataset = STEPS[name](number)(dataset)
    return LAST[last](dataset)


def _pull(iterator: Any, count: int) -> list[Any]:
    pulled = []
    for _ in range(count):
        try:
            pulled.append(_plain(next(iterator)))
        except StopIteration:
            break
    return pulled


def _plain(element: Any) -> Any:
    if isinstance(element, tuple):
        return tuple(_plain(part) for part in element)
    if isinstance(element, dict):
        return {key: _plain(part) for key, part in element.items()}
    return (str(element.dtype), element.tolist())


@settings(max_examples=150, deadline=None)
@given(plan=PIPELINES, epochs=st.integers(0, 2), stop=st.integers(0, 30))
def test_a_restored_iterator_goes_on_exactly(plan: Any, epochs: int, stop: int) -> None:
    original = _build(plan)
    for _ in range(epochs):
        _pull(iter(original), 25)
    iterator = iter(original)
    _pull(iterator, stop)
    state = json.dumps(iterator.get_state())
    rest = _pull(iterator, 40)
    next_epoch = _pull(iter(original), 25)

    rebuilt = _build(plan)
    restored = iter(rebuilt)
    _pull(restored, 3)
    restored.set_state(json.loads(state))
    again = iter(_build(plan))
    again.set_state(restored.get_state())
    assert _pull(restored, 40) == rest
    assert _pull(again, 40) == rest
    assert _pull(iter(rebuilt), 25) == next_epoch


def test_states_of_earlier_versions_can_be_restored() -> None:
    """Those of November 2026, after three elements: names of nodes and what a state holds are a format."""
    for plan, state, following in json.loads(Path(__file__).with_name("dataset_states.json").read_text()):
        iterator = iter(_build(plan))
        iterator.set_state(state)
        assert json.loads(json.dumps(_pull(iterator, 2))) == following, plan


@settings(max_examples=100, deadline=None)
@given(plan=PIPELINES, stop=st.integers(0, 12))
def test_a_state_can_be_set_back_in_the_same_iterator(plan: Any, stop: int) -> None:
    iterator = iter(_build(plan))
    _pull(iterator, stop)
    state = iterator.get_state()
    once = _pull(iterator, 15)
    iterator.set_state(state)
    assert _pull(iterator, 15) == once


@settings(max_examples=150, deadline=None)
@given(plan=PIPELINES)
def test_the_number_of_elements_is_the_cardinality(plan: Any) -> None:
    dataset = _build(plan)
    size = dataset.cardinality()
    pulled = len(_pull(iter(dataset), 200))
    # As in tf.data, a stream of unknown size counts as infinite once it is repeated for ever, even if it is
    # empty.
    assume(pulled > 0 or size == 0)
    if size >= 0:
        assert pulled == min(size, 200)
        assert len(dataset) == size


def test_states_do_not_grow_with_the_position() -> None:
    dataset = Dataset.from_tensor_slices(np.arange(5000)).shuffle(1000).repeat().batch(10).prefetch(2)
    iterator = iter(dataset)
    _pull(iterator, 1000)
    assert len(json.dumps(iterator.get_state())) < 300


def test_a_file_cache_resumes(tmp_path: Any) -> None:
    def build(name: str) -> Dataset:
        return Dataset.range(10).shuffle(10, seed=1).cache(str(tmp_path / name)).shuffle(4, seed=2).batch(3)

    original = build("a")
    iterator = iter(original)
    _pull(iterator, 2)
    state = json.dumps(iterator.get_state())
    rest = _pull(iterator, 9)
    restored = iter(build("b"))
    restored.set_state(json.loads(state))
    assert _pull(restored, 9) == rest


def test_unique_and_assert_cardinality_resume() -> None:
    def build() -> Dataset:
        return (
            Dataset.range(60).map(lambda x: (x * x) % 23).unique().assert_cardinality(12).shuffle(3, seed=1)
        )

    iterator = iter(build())
    _pull(iterator, 5)
    restored = iter(build())
    restored.set_state(json.loads(json.dumps(iterator.get_state())))
    assert _pull(restored, 20) == _pull(iterator, 20)


def test_a_state_of_another_pipeline_is_refused() -> None:
    state = iter(Dataset.range(5).batch(2)).get_state()
    with pytest.raises(InvalidArgumentError, match=r"same pipeline. Received: the state of Batch\(Range\)"):
        iter(Dataset.range(5)).set_state(state)


def test_prefetching_threads_end_with_their_iterator() -> None:
    import threading

    before = set(threading.enumerate())
    for dataset in (
        Dataset.range(1000).map(_same, num_parallel_calls=2).prefetch(2),
        Dataset.from_generator(lambda: iter(range(1000))).map(_same, num_parallel_calls=2).prefetch(2),
        Dataset.range(100).interleave(lambda x: Dataset.range(9), 3, num_parallel_calls=2),
    ):
        iterator = iter(dataset)
        next(iterator)
        iterator.close()
        del iterator
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert set(threading.enumerate()) <= before
