"""Windows, groups, other batches, sampling and the like: the results of tf.data, which are written here."""

import numpy as np
import pytest

from unisono.data import Dataset, DatasetSpec, TensorSpec, experimental


def plain(dataset):
    return [x.tolist() for x in dataset]


def windows(dataset):
    return [plain(window) for window in dataset]


def stream(dataset):
    """The same elements, one after the other."""
    return dataset.filter(lambda *x: True)


@pytest.mark.parametrize("kind", [lambda ds: ds, stream], ids=["indexed", "stream"])
def test_window(kind):
    seven = kind(Dataset.range(7))
    assert windows(seven.window(3, 2)) == [[0, 1, 2], [2, 3, 4], [4, 5, 6], [6]]
    assert windows(seven.window(3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert windows(seven.window(3, 1, 2, True)) == [[0, 2, 4], [1, 3, 5], [2, 4, 6]]
    assert windows(seven.window(2, 3)) == [[0, 1], [3, 4], [6]]
    assert windows(seven.window(9, drop_remainder=True)) == []
    joined = seven.window(5, 1, drop_remainder=True).flat_map(lambda w: w.batch(5))
    assert plain(joined) == [[0, 1, 2, 3, 4], [1, 2, 3, 4, 5], [2, 3, 4, 5, 6]]


@pytest.mark.parametrize("shift", [1, 2, 3, 5])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("size", range(9))
def test_windows_are_counted_and_alike_by_position_and_as_a_stream(size, drop, stride, shift):
    indexed = Dataset.range(size).window(3, shift, stride, drop)
    found = windows(indexed)
    assert len(found) == indexed.cardinality()
    assert windows(stream(Dataset.range(size)).window(3, shift, stride, drop)) == found


def test_components_of_a_window_are_data_sets(tmp_path):
    pairs = Dataset.from_tensor_slices({"a": [1, 2, 3], "b": [4.0, 5.0, 6.0]}).window(2)
    assert [(plain(w["a"]), plain(w["b"])) for w in pairs] == [([1, 2], [4.0, 5.0]), ([3], [6.0])]
    assert pairs.element_spec["a"] == DatasetSpec(TensorSpec((), "int32"))
    joined = Dataset.range(4).enumerate().window(2).flat_map(lambda i, x: Dataset.zip((i, x)).batch(2))
    assert [(i.tolist(), x.tolist()) for i, x in joined] == [([0, 1], [0, 1]), ([2, 3], [2, 3])]
    made = Dataset.range(4).window(2)
    for stacked in (made.batch(2), stream(made).batch(2), made.padded_batch(2)):
        with pytest.raises(TypeError, match="Data sets cannot be stacked"):
            list(stacked)
    for write in (made.save, lambda path: list(made.cache(path + "/cache"))):
        with pytest.raises(TypeError, match="Data sets cannot be written to a file"):
            write(str(tmp_path))


def test_group_by_window():
    numbers = Dataset.range(10).map(lambda x: (x * 7) % 10)
    grouped = numbers.group_by_window(lambda x: -(x % 3), lambda key, w: w.batch(4), window_size=2)
    assert plain(grouped) == [[7, 4], [8, 5], [0, 9], [6, 3], [2], [1]]
    grouped = Dataset.range(10).group_by_window(lambda x: x % 3, lambda key, w: w, window_size=3)
    assert plain(grouped) == [0, 3, 6, 1, 4, 7, 2, 5, 8, 9]
    sized = Dataset.range(9).group_by_window(
        lambda x: x % 2, lambda key, w: w.batch(9), window_size_func=lambda key: key + 2
    )
    assert plain(sized) == [[0, 2], [1, 3, 5], [4, 6], [8], [7]]
    assert sized.element_spec == TensorSpec((None,), "int64")
    with pytest.raises(ValueError, match="one of window_size and window_size_func"):
        numbers.group_by_window(lambda x: x, lambda key, w: w)


ROWS = [[0], [1, 2, 3, 4], [5, 6, 7], [7, 8, 9, 10, 11], [13, 14, 15, 16, 19, 20], [21, 22]]


def rows():
    return Dataset.from_generator(lambda: ROWS, output_signature=TensorSpec((None,), "int64"))


def test_bucket_by_sequence_length():
    buckets = rows().bucket_by_sequence_length(len, [3, 5], [2, 2, 2])
    assert plain(buckets) == [
        [[1, 2, 3, 4], [5, 6, 7, 0]],
        [[7, 8, 9, 10, 11, 0], [13, 14, 15, 16, 19, 20]],
        [[0, 0], [21, 22]],
    ]
    assert buckets.element_spec == TensorSpec((None, None), "int64")
    to_boundary = rows().bucket_by_sequence_length(
        len, [4, 7], [2, 1, 1], padding_values=-1, pad_to_bucket_boundary=True
    )
    assert plain(to_boundary) == [
        [[1, 2, 3, 4, -1, -1]],
        [[0, -1, -1], [5, 6, 7]],
        [[7, 8, 9, 10, 11, -1]],
        [[13, 14, 15, 16, 19, 20]],
        [[21, 22, -1]],
    ]
    dropped = rows().bucket_by_sequence_length(len, [3, 5], [2, 4, 2], drop_remainder=True)
    assert plain(dropped) == [[[7, 8, 9, 10, 11, 0], [13, 14, 15, 16, 19, 20]], [[0, 0], [21, 22]]]
    alike = rows().bucket_by_sequence_length(len, [2, 3, 4, 5, 6], [1] * 6, no_padding=True)
    assert sorted(plain(alike)) == sorted([row] for row in ROWS)


def test_buckets_that_do_not_fit_are_an_error():
    with pytest.raises(ValueError, match="shorter than the last boundary"):
        list(rows().bucket_by_sequence_length(len, [3, 5], [2, 2, 2], pad_to_bucket_boundary=True))
    with pytest.raises(ValueError, match="must increase"):
        rows().bucket_by_sequence_length(len, [5, 3], [2, 2, 2])
    fixed = Dataset.from_tensor_slices([[1, 2]])
    with pytest.raises(ValueError, match="dimension whose size varies"):
        list(fixed.bucket_by_sequence_length(len, [3], [2, 2], pad_to_bucket_boundary=True))


def test_rebatch():
    batches = Dataset.range(10).batch(4)
    assert plain(batches.rebatch([1, 2])) == [[0], [1, 2], [3], [4, 5], [6], [7, 8], [9]]
    assert plain(batches.rebatch(3)) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert plain(batches.rebatch([3, 4], drop_remainder=True)) == [[0, 1, 2], [3, 4, 5, 6], [7, 8, 9]]
    assert plain(batches.rebatch(20)) == [list(range(10))]
    assert batches.rebatch(3, drop_remainder=True).element_spec == TensorSpec((3,), "int64")


def test_take_while_scan_unique_counter():
    assert plain(Dataset.range(10).take_while(lambda x: x < 5)) == [0, 1, 2, 3, 4]
    scanned = Dataset.range(5).scan(0, lambda s, x: (s + 1, x * 10 + s))
    assert plain(scanned) == [0, 11, 22, 33, 44] == plain(scanned)
    assert scanned.cardinality() == 5
    assert plain(Dataset.from_tensor_slices([1, 37, 2, 37, 2, 1]).unique()) == [1, 37, 2]
    assert list(Dataset.from_tensor_slices(["a", "b", "a"]).unique()) == [b"a", b"b"]
    assert plain(Dataset.counter(3, -2).take(3)) == [3, 1, -1]
    assert Dataset.counter().cardinality() == -1
    with pytest.raises(TypeError, match="pair of the new state and an element"):
        list(Dataset.range(2).scan(0, lambda s, x: x))
    with pytest.raises(ValueError, match="one component"):
        list(Dataset.range(2).enumerate().unique())


def test_choose_from_datasets():
    choices = Dataset.from_tensor_slices(np.array([0, 1, 0, 1, 0, 1, 1]))
    parts = [Dataset.range(2), Dataset.range(10, 15)]
    assert plain(Dataset.choose_from_datasets(parts, choices)) == [0, 10, 1, 11]
    on = Dataset.choose_from_datasets(parts, choices, stop_on_empty_dataset=False)
    assert plain(on) == [0, 10, 1, 11, 12, 13]
    for wrong in (Dataset.range(2, 4), Dataset.from_tensor_slices([0.5])):
        with pytest.raises(ValueError, match=r"number of a data set, from 0. Received: .* for 2 data sets"):
            list(Dataset.choose_from_datasets(parts, wrong))
    with pytest.raises(ValueError, match="the same structure"):
        list(Dataset.choose_from_datasets([parts[0], parts[1].enumerate()], choices))
    with pytest.raises(ValueError, match="needs data sets"):
        Dataset.choose_from_datasets([], choices)


def test_sample_from_datasets():
    parts = [Dataset.range(5), Dataset.range(10, 15)]
    sampled = Dataset.sample_from_datasets(parts, seed=1)
    assert plain(sampled) == plain(sampled)
    assert sorted(plain(sampled)) == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
    assert plain(sampled) != plain(Dataset.sample_from_datasets(parts, seed=2))
    anew = Dataset.sample_from_datasets(parts, seed=1, rerandomize_each_iteration=True)
    assert len({tuple(plain(anew)) for _ in range(5)}) > 1
    assert plain(Dataset.sample_from_datasets(parts, [1.0, 0.0], seed=1)) == [0, 1, 2, 3, 4]
    stopped = plain(Dataset.sample_from_datasets(parts, seed=1, stop_on_empty_dataset=True))
    assert {0, 1, 2, 3, 4} <= set(stopped) or {10, 11, 12, 13, 14} <= set(stopped)
    zeros, ones = (Dataset.from_tensors(i).repeat() for i in (0, 1))
    many = plain(Dataset.sample_from_datasets([zeros, ones], [0.25, 0.75], seed=3).take(4000))
    assert 0.72 < np.mean(many) < 0.78
    for weights in ([1.0], [-1.0, 2.0], [0.0, 0.0]):
        with pytest.raises(ValueError, match="one number for each"):
            Dataset.sample_from_datasets(parts, weights)


def test_random():
    numbers = Dataset.random(seed=4).take(3000)
    assert plain(numbers) == plain(numbers) != plain(Dataset.random(seed=5).take(3000))
    assert numbers.element_spec == TensorSpec((), "int64")
    assert 0 <= min(plain(numbers)) < max(plain(numbers)) < 2**32
    assert abs(np.mean(plain(numbers)) / 2**31 - 1) < 0.05
    anew = Dataset.random(seed=4, rerandomize_each_iteration=True).take(3)
    assert plain(anew) != plain(anew)
    assert plain(numbers.batch(700))[1][:5] == plain(numbers)[700:705]


@pytest.mark.parametrize("initial", [[0.5, 0.5], None], ids=["known", "estimated"])
def test_rejection_resample(initial):
    halves = Dataset.range(4000).map(lambda x: x % 2)
    pairs = halves.rejection_resample(lambda x: x, [0.9, 0.1], initial, seed=1)
    found = [(int(kind), int(x)) for kind, x in pairs]
    assert all(kind == x for kind, x in found)
    zeros = sum(kind == 0 for kind, _ in found)
    assert zeros > 1900
    assert 0.88 < zeros / len(found) < 0.92
    with pytest.raises(ValueError, match="Received: 1 for 1 classes"):
        list(halves.rejection_resample(lambda x: x, [1.0]))


def faulty(x):
    if x % 3 == 1:
        raise RuntimeError(f"cannot make {x}")
    return x


@pytest.mark.parametrize("kind", [lambda ds: ds, stream], ids=["indexed", "stream"])
def test_ignore_errors(kind, caplog):
    assert plain(kind(Dataset.range(8)).map(faulty).ignore_errors()) == [0, 2, 3, 5, 6]
    assert plain(kind(Dataset.range(8)).map(faulty, num_parallel_calls=2).ignore_errors()) == [0, 2, 3, 5, 6]
    assert not caplog.records
    assert plain(kind(Dataset.range(2)).map(faulty).ignore_errors(log_warning=True)) == [0]
    assert "skipped an element: RuntimeError: cannot make 1" in caplog.text


def test_what_an_error_ends_is_not_lost_in_silence():
    def numbers():
        yield 1
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        list(Dataset.from_generator(numbers).ignore_errors())
    with pytest.raises(RuntimeError, match="cannot make 1"):
        list(stream(Dataset.range(8)).map(faulty).shuffle(2, seed=1).ignore_errors())


def test_save_and_load(tmp_path):
    path = str(tmp_path / "saved")
    data = Dataset.from_tensor_slices({"x": np.arange(12.0).reshape(6, 2), "name": list("abcdef")})
    for dataset in (data.batch(4), data, data.take(0)):
        dataset.save(path)
        loaded = Dataset.load(path)
        assert loaded.element_spec == dataset.element_spec
        assert len(loaded) == len(dataset)
        pairs = zip(loaded, dataset, strict=True)
        assert all((a["x"] == b["x"]).all() and np.all(a["name"] == b["name"]) for a, b in pairs)
    data.save(path)
    shuffled = Dataset.load(path, reader_func=lambda shards: shards.flat_map(lambda shard: shard.shuffle(6)))
    assert sorted(x["name"] for x in shuffled) == [b"a", b"b", b"c", b"d", b"e", b"f"]
    with pytest.raises(ValueError, match="a directory that save wrote"):
        Dataset.load(str(tmp_path))
    with pytest.raises(NotImplementedError, match="does not support shard_func"):
        data.save(path, shard_func=lambda x: 0)


def test_snapshot(tmp_path):
    made = []
    numbers = Dataset.range(3).map(lambda x: made.append(x) or x)
    for _ in range(2):
        assert plain(numbers.snapshot(str(tmp_path / "snapshot"))) == [0, 1, 2]
    assert len(made) == 3


def test_get_single_element_and_assert_cardinality():
    assert Dataset.range(3).batch(3).get_single_element().tolist() == [0, 1, 2]
    for size in (0, 2):
        with pytest.raises(ValueError, match=r"of one element. Received: (none|more than one)"):
            Dataset.range(size).get_single_element()
    odd = Dataset.range(6).filter(lambda x: x % 2)
    assert len(odd.assert_cardinality(3)) == len(plain(odd.assert_cardinality(3))) == 3
    for wrong, text in ((2, "more than 2"), (4, "no more than 3")):
        with pytest.raises(ValueError, match=text):
            list(odd.assert_cardinality(wrong))


def test_names_of_tf_data_experimental():
    assert all(hasattr(experimental, name) for name in experimental.__all__)
    five = Dataset.range(5)
    assert experimental.cardinality(five.apply(experimental.assert_cardinality(5))) == 5
    assert plain(five.batch(2).apply(experimental.unbatch())) == plain(five)
    assert plain(experimental.Counter(3).apply(experimental.take_while(lambda x: x < 5))) == [3, 4]
    shuffled = five.apply(experimental.shuffle_and_repeat(5, 2, seed=1))
    assert sorted(plain(shuffled)) == sorted(2 * plain(five))
    with pytest.raises(TypeError):
        five.apply(experimental.take_while())
