"""Transformations, each on indexed data and on a stream of the same elements."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono.data import (
    AUTOTUNE,
    SHARD_HINT,
    UNKNOWN_CARDINALITY,
    AutoShardPolicy,
    Dataset,
    Options,
    TensorSpec,
    TextLineDataset,
)
from unisono.data._readers import interleaved
from unisono.data._rewrite import file_sharded, hint_sharded, reads_files, with_common_seed


def _first(dataset: Dataset) -> Dataset:
    return dataset.take(1)


INDEXED = Dataset.range(10)
STREAM = Dataset.from_generator(lambda: iter(range(10)), output_signature=TensorSpec((), np.int64))

CASES: dict[str, tuple[Callable[[Dataset], Dataset], list[Any]]] = {
    "map": (lambda ds: ds.map(lambda x: x + 1), list(range(1, 11))),
    "map_parallel": (lambda ds: ds.map(lambda x: x + 1, num_parallel_calls=3), list(range(1, 11))),
    "map_autotune": (lambda ds: ds.map(lambda x: x + 1, AUTOTUNE, deterministic=False), list(range(1, 11))),
    "filter": (lambda ds: ds.filter(lambda x: x % 3 == 0), [0, 3, 6, 9]),
    "repeat": (lambda ds: ds.repeat(2), [*range(10), *range(10)]),
    "repeat_nothing": (lambda ds: ds.repeat(0), []),
    "repeat_for_ever": (lambda ds: ds.repeat(-1).take(12), [*range(10), 0, 1]),
    "take": (lambda ds: ds.take(3), [0, 1, 2]),
    "take_none": (lambda ds: ds.take(0), []),
    "take_all": (lambda ds: ds.take(-1), list(range(10))),
    "take_too_many": (lambda ds: ds.take(20), list(range(10))),
    "skip": (lambda ds: ds.skip(7), [7, 8, 9]),
    "skip_all": (lambda ds: ds.skip(-1), []),
    "shard": (lambda ds: ds.shard(3, 1), [1, 4, 7]),
    "shard_hint": (lambda ds: ds.shard(SHARD_HINT, SHARD_HINT), list(range(10))),
    "concatenate": (lambda ds: ds.take(2).concatenate(ds.skip(8)), [0, 1, 8, 9]),
    "batch": (lambda ds: ds.batch(4), [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
    "batch_drop": (lambda ds: ds.batch(4, drop_remainder=True), [[0, 1, 2, 3], [4, 5, 6, 7]]),
    "batch_parallel": (lambda ds: ds.batch(8, num_parallel_calls=2), [[*range(8)], [8, 9]]),
    "batch_of_batches": (lambda ds: ds.batch(2).batch(2).take(1), [[[0, 1], [2, 3]]]),
    "unbatch": (lambda ds: ds.batch(4).unbatch(), list(range(10))),
    "enumerate": (lambda ds: ds.skip(8).enumerate(5).map(lambda i, x: i * 100 + x), [508, 609]),
    "flat_map": (lambda ds: ds.take(4).flat_map(Dataset.range), [0, 0, 1, 0, 1, 2]),
    "cache": (lambda ds: ds.cache(), list(range(10))),
    "prefetch": (lambda ds: ds.prefetch(2), list(range(10))),
    "prefetch_default": (lambda ds: ds.prefetch(), list(range(10))),
    "prefetch_none": (lambda ds: ds.prefetch(0), list(range(10))),
    "apply": (lambda ds: ds.apply(_first), [0]),
    "padded_batch": (
        lambda ds: ds.take(3).map(np.arange).padded_batch(3, padding_values=-1),
        [[[-1, -1], [0, -1], [0, 1]]],
    ),
}


@pytest.mark.parametrize("source", [INDEXED, STREAM], ids=["indexed", "stream"])
@pytest.mark.parametrize("name", CASES)
def test_elements(name: str, source: Dataset) -> None:
    transform, expected = CASES[name]
    dataset = transform(source)
    for _ in range(2):
        assert [np.asarray(element).tolist() for element in dataset] == expected


def _interleaved(inputs: list[list[int]], cycle: int, block: int) -> list[int]:
    """The rule of TensorFlow's kernel, written for lists."""
    waiting, slots, given = iter(inputs), [None] * cycle, []
    place, is_done = 0, False
    while not is_done or any(slot is not None for slot in slots):
        if slots[place] is None:
            slots[place] = next((iter(values) for values in waiting), None) if not is_done else None
            if slots[place] is None:
                is_done, place = True, (place + 1) % cycle
            continue
        taken = list(itertools.islice(slots[place], block))
        given.extend(taken)
        if len(taken) < block:
            slots[place] = None
        place = (place + 1) % cycle
    return given


@pytest.mark.parametrize(("cycle", "block"), [(1, 1), (2, 1), (3, 2), (2, 4), (9, 1)])
def test_interleave_has_the_order_of_tf_data(cycle: int, block: int) -> None:
    lengths = [3, 1, 4, 2, 5]
    inputs = [[10 * row + n for n in range(length)] for row, length in enumerate(lengths)]
    rows = Dataset.range(5).interleave(
        lambda row: Dataset.range(10 * row, 10 * row + lengths[row]),
        cycle,
        block,
        num_parallel_calls=AUTOTUNE,
    )
    assert [int(x) for x in rows] == _interleaved(inputs, cycle, block)
    places = interleaved(lengths, cycle, block)
    assert [10 * row + n for row, n in places.tolist()] == _interleaved(inputs, cycle, block)


def test_interleave_as_in_the_documentation_of_tf_data() -> None:
    dataset = Dataset.range(1, 6).interleave(lambda x: Dataset.from_tensors(x).repeat(6), 2, block_length=4)
    expected = [1, 1, 1, 1, 2, 2, 2, 2, 1, 1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 3, 3, 4, 4, 5, 5, 5, 5, 5, 5]
    assert [int(x) for x in dataset] == expected


def test_functions_get_the_parts_of_a_tuple_as_arguments_and_a_dict_as_one() -> None:
    pairs = Dataset.from_tensor_slices((np.arange(3), {"a": np.arange(3)}))
    assert list(pairs.map(lambda x, d: (d["a"], x)))[1] == (1, 1)
    assert list(pairs.filter(lambda x, d: x == 2)) == [(2, {"a": 2})]
    with pytest.raises(InvalidTypeError, match=r"their 2 parts as arguments.*lambda x, y"):
        list(pairs.map(lambda pair: pair))
    with pytest.raises(InvalidTypeError, match=r"takes one argument.*Received: .*<lambda>"):
        list(Dataset.range(2).map(lambda x, y: x))
    assert list(pairs.map(lambda x, d: d).map(lambda d: d["a"])) == [0, 1, 2]
    assert pairs.reduce(0, lambda total, pair: total + pair[0]) == 3


def test_what_functions_may_return() -> None:
    one = Dataset.from_tensors(1.0)
    assert isinstance(next(iter(one.map(lambda x: [x, np.zeros(2)]))), tuple)
    assert next(iter(one.map(lambda x: [1, 2]))).dtype == np.int32
    assert next(iter(one.map(lambda x: (x, None)).batch(1)))[1] is None
    assert next(iter(one.map(lambda x: "a"))) == b"a"
    with pytest.raises(InvalidTypeError, match="Received: None from"):
        list(one.map(lambda x: None))
    with pytest.raises(InvalidTypeError, match="must return one truth value"):
        list(Dataset.from_tensors([1, 2]).filter(lambda x: x > 1))


def test_errors_of_functions_arrive_as_they_are() -> None:
    def fail(x: Any) -> Any:
        raise KeyError(int(x))

    for dataset in (INDEXED, STREAM):
        for calls in (None, 2):
            with pytest.raises(KeyError):
                list(dataset.map(fail, num_parallel_calls=calls).prefetch(2))


def test_nothing_runs_before_iteration_nor_ahead_of_it() -> None:
    seen: list[int] = []

    def note(x: Any) -> Any:
        seen.append(int(x))
        return x

    for source in (INDEXED, STREAM):
        dataset = source.map(note).shuffle(3, seed=1).repeat().batch(2).cache().skip(1)
        iterator = iter(dataset)
        assert seen == []
        next(iterator)
        assert len(seen) < 10
        seen.clear()


def test_parallel_calls_run_at_the_same_time() -> None:
    barrier = threading.Barrier(3, timeout=60)

    def meet(x: Any) -> Any:
        barrier.wait()
        return x

    for source in (INDEXED.take(9), STREAM.take(9)):
        assert [int(x) for x in source.map(meet, num_parallel_calls=3)] == list(range(9))


def test_prefetch_makes_elements_while_the_user_works() -> None:
    made: list[int] = []

    def note(x: Any) -> Any:
        made.append(int(x))
        return x

    for source in (INDEXED, STREAM):
        made.clear()
        iterator = iter(source.map(note).prefetch(3))
        next(iterator)
        deadline = time.monotonic() + 60
        while len(made) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert 4 <= len(made) < 10
        iterator.close()


def test_ragged_batches_name_padded_batch_and_the_offender() -> None:
    ragged = Dataset.range(3).map(lambda n: {"x": np.zeros(int(n) // 2)})
    with pytest.raises(
        InvalidArgumentError, match=r"component \['x'\] of shape \(0,\) in element 0 and \(1,\) in element 2"
    ):
        list(ragged.batch(3))
    with pytest.raises(InvalidArgumentError, match="a tuple of 2 as element 0"):
        list(Dataset.range(2).map(lambda n: (n, n) if n == 0 else n).batch(2))


def test_padded_batches() -> None:
    dataset = Dataset.range(1, 4).map(lambda n: (np.full(int(n), n), "s" * int(n)))
    numbers, strings = next(iter(dataset.padded_batch(3, padded_shapes=([4], []), padding_values=(-1, None))))
    assert numbers.tolist() == [[1, -1, -1, -1], [2, 2, -1, -1], [3, 3, 3, -1]]
    assert strings.tolist() == [b"s", b"ss", b"sss"]
    assert dataset.padded_batch(3, ([None], [])).element_spec[0] == TensorSpec((None, None), np.int64)
    with pytest.raises(InvalidArgumentError, match=r"padded_shapes=\(2,\)"):
        list(dataset.map(lambda x, s: x).padded_batch(3, (2,)))
    with pytest.raises(InvalidArgumentError, match="must have one rank"):
        list(dataset.map(lambda x, s: x).padded_batch(3, (None, None)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda ds: ds.batch(0), "batch_size must be at least 1. Received: batch_size=0. Write batch"),
        (lambda ds: ds.batch(2.5), "batch_size must be a whole number"),
        (lambda ds: ds.shuffle(0), "buffer_size must be at least 1"),
        (lambda ds: ds.take(-2), "count must be at least -1"),
        (lambda ds: ds.shard(2, 2), "index must be below num_shards"),
        (lambda ds: ds.map(3), "map.. needs a function. Received: 3"),
        (lambda ds: ds.map(abs, num_parallel_calls=0), "num_parallel_calls must be at least 1"),
        (lambda ds: ds.concatenate([1]), "concatenate needs a Dataset"),
        (lambda ds: list(ds.flat_map(lambda x: x)), "flat_map's function needs a Dataset"),
        (lambda ds: ds.apply(lambda inner: 3), "apply's function needs a Dataset"),
        (lambda ds: list(ds.unbatch()), "is a scalar"),
        (lambda ds: ds.filter(lambda x: x > 99).map(lambda x: x).element_spec, "must have an element"),
    ],
)
def test_errors(call: Callable[[Dataset], Any], message: str) -> None:
    with pytest.raises((InvalidArgumentError, InvalidTypeError), match=message):
        call(INDEXED)


def test_cardinalities() -> None:
    assert INDEXED.shuffle(3).repeat(3).batch(4).cardinality() == 8
    assert INDEXED.repeat().batch(4).take(5).cardinality() == 5
    assert STREAM.batch(4).cardinality() == UNKNOWN_CARDINALITY
    assert Dataset.zip((INDEXED, INDEXED.repeat())).cardinality() == 10
    assert INDEXED.repeat().shard(3, 1).batch(2, drop_remainder=True).cardinality() == -1
    cached = STREAM.cache()
    assert cached.cardinality() == UNKNOWN_CARDINALITY
    list(cached)
    assert len(cached) == 10


def test_element_specs() -> None:
    pairs = Dataset.from_tensor_slices((np.zeros((6, 3), np.float32), {"y": np.zeros(6, np.int64)}))
    assert pairs.batch(2).element_spec == (
        TensorSpec((None, 3), np.float32),
        {"y": TensorSpec((None,), np.int64)},
    )
    assert pairs.batch(2, drop_remainder=True).element_spec[0] == TensorSpec((2, 3), np.float32)
    assert pairs.map(lambda x, d: x.sum()).batch(2).element_spec == TensorSpec((None,), np.float32)
    assert pairs.enumerate().shuffle(2).element_spec[0] == TensorSpec((), np.int64)
    assert pairs.batch(4).unbatch().element_spec == pairs.element_spec


def test_asking_for_the_spec_begins_no_epoch() -> None:
    def build() -> Dataset:
        return Dataset.range(20).map(lambda x: x).shuffle(20, seed=3).map(lambda x: x)

    asked = build()
    assert asked.element_spec == TensorSpec((), np.int64)
    assert list(asked) == list(build())


def test_options_are_kept_and_merged() -> None:
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.DATA
    dataset = INDEXED.with_options(options).batch(2)
    assert dataset.options().experimental_distribute.auto_shard_policy is AutoShardPolicy.DATA
    assert INDEXED.options().experimental_distribute.auto_shard_policy is AutoShardPolicy.AUTO
    both = Dataset.zip((INDEXED, dataset))
    assert both.options().experimental_distribute.auto_shard_policy is AutoShardPolicy.DATA
    with pytest.raises(AttributeError):
        options.experimental_distribute.auto_shard_polisy = AutoShardPolicy.OFF


def test_pipelines_are_rewritten_for_a_worker(tmp_path: Any) -> None:
    names = []
    for index in range(3):
        names.append(str(tmp_path / f"{index}"))
        (tmp_path / f"{index}").write_text(f"{index}a\n{index}b\n")
    lines = TextLineDataset(names).map(lambda line: line).cache()
    list(lines)
    assert reads_files(lines)
    assert not reads_files(INDEXED)
    assert list(file_sharded(lines, 2, 0)) == [b"0a", b"0b", b"2a", b"2b"]
    assert list(file_sharded(lines, 2, 1)) == [b"1a", b"1b"]
    assert len(list(lines)) == 6
    with pytest.raises(InvalidArgumentError, match="3 files for 4 workers"):
        file_sharded(lines, 4, 0)
    with pytest.raises(InvalidArgumentError, match="reads files"):
        file_sharded(INDEXED, 2, 0)
    for source in (INDEXED, STREAM):
        hinted = source.shard(SHARD_HINT, SHARD_HINT).batch(2)
        assert [x.tolist() for x in hint_sharded(hinted, 2, 1)] == [[1, 3], [5, 7], [9]]


def test_workers_can_be_given_a_common_seed() -> None:
    workers = [INDEXED.shuffle(10).batch(2).shuffle(3).unbatch() for _ in range(2)]
    assert list(workers[0]) != list(workers[1])
    alike = [with_common_seed(worker, 7) for worker in workers]
    assert list(alike[0]) == list(alike[1])
    assert list(with_common_seed(INDEXED.shuffle(10, seed=1), 7)) == list(INDEXED.shuffle(10, seed=1))


def test_a_data_set_is_made_by_its_functions() -> None:
    with pytest.raises(InvalidTypeError, match=r"Dataset\(ndarray\).*from_tensor_slices"):
        Dataset(np.zeros(3))  # type: ignore[arg-type]


def test_the_policy_of_a_data_set_is_one_that_exists() -> None:
    options = Options()
    options.experimental_distribute.auto_shard_policy = "DATAA"  # type: ignore[assignment]
    with pytest.raises(InvalidArgumentError, match=r"Received: 'DATAA'.*AutoShardPolicy.DATA"):
        Dataset.range(3).with_options(options)
