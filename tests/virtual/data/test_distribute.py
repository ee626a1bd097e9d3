"""Any iterable of batches, split over the replicas."""

import collections

import jax
import keras
import numpy as np
import pytest

import unisono
from unisono._mesh import ReplicaMesh
from unisono.collectives._process_group import SingleProcessGroup
from unisono.data import TensorSpec
from unisono.data._batches import ENDED
from unisono.data._distribute import SplitDataset, per_replica_elements, split_batch
from unisono.data._workers import elements_of_workers

TWO = ReplicaMesh(tuple(jax.devices()[:2]))
THREE = ReplicaMesh(tuple(jax.devices()[:3]))
ONE = ReplicaMesh(tuple(jax.devices()[:1]))


def values(per_replica):
    return [np.asarray(v).tolist() for v in per_replica.values]


@pytest.mark.parametrize(
    ("mesh", "rows", "parts"),
    [
        (TWO, 4, [[0, 1], [2, 3]]),
        (TWO, 5, [[0, 1, 2], [3, 4]]),
        (TWO, 1, [[0], []]),
        (THREE, 7, [[0, 1, 2], [3, 4], [5, 6]]),
        (THREE, 2, [[0], [1], []]),
    ],
)
def test_rows_are_balanced(mesh, rows, parts):
    out = split_batch(np.arange(rows, dtype="f4"), mesh)
    assert values(out) == parts
    assert [next(iter(v.devices())) for v in out.values] == list(mesh.devices)


def test_structures_none_and_scalars():
    pair = collections.namedtuple("pair", "a b")
    batch = {"x": np.zeros((4, 2)), "rest": pair(None, [np.ones(4, "i8")]), "s": 3.0, "name": "n"}
    out = split_batch(batch, TWO)
    assert out["rest"].a is None
    assert isinstance(out["rest"], pair)
    assert (out["s"], out["name"]) == (3.0, "n")
    assert out["x"].values[0].shape == (2, 2)
    assert out["rest"].b[0].values[0].dtype == np.int32


def test_one_replica_gets_plain_arrays():
    assert isinstance(split_batch(np.ones(3), ONE), jax.Array)


def test_unequal_rows_name_the_offender():
    with pytest.raises(ValueError, match=r"shape \(3,\) at batch\['y'\], where others have 4 rows"):
        split_batch({"x": np.ones((4, 2)), "y": np.ones(3)}, TWO)


class Sequence(keras.utils.PyDataset):
    ended = 0

    def __len__(self):
        return 2

    def __getitem__(self, i):
        return np.full(2, i, "f4")

    def on_epoch_end(self):
        self.ended += 1


SOURCES = {
    "list": [np.zeros(2, "f4"), np.ones(2, "f4")],
    "function": lambda: iter([np.zeros(2, "f4"), np.ones(2, "f4")]),
    "py_dataset": Sequence(),
}


@pytest.mark.parametrize("source", SOURCES)
def test_sources_can_be_read_again(source):
    dataset = SplitDataset(SOURCES[source], TWO)
    for _ in range(2):
        assert [values(b) for b in dataset] == [[[0.0], [0.0]], [[1.0], [1.0]]]


def test_py_dataset_is_told_of_the_end():
    source = Sequence()
    list(SplitDataset(source, TWO))
    assert source.ended == 1


def test_grain_and_tensors():
    grain = pytest.importorskip("grain")
    dataset = grain.MapDataset.range(6).batch(2)
    assert [values(b) for b in SplitDataset(dataset, TWO)] == [[[0], [1]], [[2], [3]], [[4], [5]]]

    class Tensor:
        """What torch's and TensorFlow's tensors have in common."""

        def __array__(self, dtype=None, copy=None):
            return np.arange(2, dtype="f4")

    assert values(split_batch(Tensor(), TWO)) == [[0.0], [1.0]]


def test_a_generator_is_read_once():
    dataset = SplitDataset((np.ones(2) for _ in range(1)), TWO)
    assert len(list(dataset)) == 1
    with pytest.raises(ValueError, match="gives its batches once"):
        iter(dataset)


@pytest.mark.parametrize("bad", [np.ones((4, 2)), (np.ones(4), np.ones(4)), {"x": np.ones(4)}, 3])
def test_unbatched_input_is_refused(bad):
    with pytest.raises(TypeError, match="iterable of batches"):
        SplitDataset(bad, TWO)


def test_a_generator_may_write_into_its_last_batch():
    def reuse():
        buffer = np.empty(128, "f4")
        for i in range(4):
            buffer[:] = i
            yield buffer

    assert [float(b.values[1][0]) for b in SplitDataset(reuse(), TWO)] == [0, 1, 2, 3]


def test_iterator_of_tf():
    iterator = iter(SplitDataset([np.zeros(2)], TWO))
    optional = iterator.get_next_as_optional()
    assert optional.has_value()
    assert values(optional.get_value()) == [[0.0], [0.0]]
    assert not iterator.get_next_as_optional().has_value()
    with pytest.raises(unisono.OutOfRangeError):
        iterator.get_next()


def test_an_iterator_begins_again():
    iterator = iter(SplitDataset([np.zeros(2), np.ones(2)], TWO))
    next(iterator)
    iterator.initialize()
    assert [values(b) for b in iterator] == [[[0.0], [0.0]], [[1.0], [1.0]]]
    once = iter(SplitDataset((x for x in [np.zeros(2)]), TWO))
    with pytest.raises(ValueError, match="must be readable again"):
        once.initialize()


def test_spec_and_cardinality():
    dataset = SplitDataset([(np.zeros((4, 3), "f4"), None)], TWO)
    assert dataset.cardinality == 1
    rows = TensorSpec((None, 3), "float32")
    assert dataset.element_spec[0].values == (rows, rows)
    assert SplitDataset(lambda: iter([]), TWO).cardinality == unisono.data.UNKNOWN_CARDINALITY


def test_successive_elements_go_to_successive_replicas():
    elements = iter([np.array([0, 1]), np.array([2, 3]), np.array([4, 5])])
    assert [values(v) for v in per_replica_elements(elements, TWO)] == [[[0, 1], [2, 3]], [[4, 5], []]]


def test_input_context_says_what_divides():
    context = unisono.InputContext(1, 0, 3)
    assert context.get_per_replica_batch_size(9) == 3
    with pytest.raises(ValueError, match="Use 9 or 12"):
        context.get_per_replica_batch_size(10)


def test_one_public_class_for_data_and_one_for_iterators():
    strategy = unisono.MirroredStrategy(["cpu:0", "cpu:1"])
    split = strategy.distribute_dataset(unisono.data.Dataset.range(12).batch(5, drop_remainder=True))
    made = strategy.distribute_datasets_from_function(lambda _: unisono.data.Dataset.range(12).batch(3))
    for data in (split, made):
        assert isinstance(data, unisono.DistributedDataset)
        assert data.cardinality == len(data) == len(list(data)) == 2
        iterator = iter(data)
        assert isinstance(iterator, unisono.DistributedIterator)
        parts = [np.asarray(v) for v in next(iterator).values]
        for spec in (data.element_spec, iterator.element_spec):
            for own, array in zip(spec.values, parts, strict=True):
                assert own.dtype == array.dtype
                assert own.shape in (array.shape, (None,))
        total = data.reduce(0, lambda s, b: s + int(strategy.reduce("SUM", b, axis=0)))
        assert total == sum(range(10 if data is split else 12))
    assert [s.shape for s in split.element_spec.values] == [(3,), (2,)]


def test_per_replica_inputs_of_unequal_length_lose_nothing():
    strategy = unisono.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    mode = unisono.InputOptions(experimental_replication_mode=unisono.InputReplicationMode.PER_REPLICA)

    def rows(context):
        return [np.full(2, 10 * context.input_pipeline_id + i) for i in range(context.input_pipeline_id)]

    data = strategy.distribute_datasets_from_function(rows, mode)
    assert [values(b) for b in data] == [[[], [10, 10], [20, 20]], [[], [], [21, 21]]]
    with pytest.raises(NotImplementedError, match="only supported in `distribute_datasets_from_function`"):
        strategy.distribute_dataset([np.ones(2)], mode)


@pytest.mark.parametrize(
    ("batch", "error", "text"),
    [
        ({"ids": np.array([1, 2**40])}, ValueError, r"batch\['ids'\] of dtype int64 with 1099511627776"),
        ((np.zeros(2), np.array([2**32], "u8")), ValueError, r"batch\[1\] of dtype uint64 with 4294967296"),
        (
            {"word": np.array(["a", "b"])},
            TypeError,
            r"batch\['word'\] with strings, such as \['a'\].*StringL",
        ),
        ({"word": np.array([b"a"], object)}, TypeError, r"StringLookup"),
        ([np.array([object()])], TypeError, r"batch\[0\] with Python objects of type object"),
        (np.array(["2020-01-01"], "M8[D]"), TypeError, "of dtype datetime64"),
        (3.0, ValueError, r"batch of shape \(\) = 3.0. Did you forget `.batch\(\)`"),
    ],
)
def test_batches_that_devices_cannot_hold_are_refused(batch, error, text):
    with pytest.raises(error, match=text):
        next(iter(SplitDataset([batch], TWO)))


def test_integers_within_32_bits_are_taken():
    batch = np.array([2**31 - 1, -(2**31)])
    assert values(split_batch(batch, TWO)) == [[2**31 - 1], [-(2**31)]]


def test_a_forgotten_batch_is_found():
    rows = unisono.data.Dataset.from_tensor_slices((np.zeros((4, 3), "f4"), np.arange(4)))
    with pytest.raises(ValueError, match=r"batch\[1\] of shape \(\).*Did you forget `.batch\(\)`"):
        next(iter(SplitDataset(rows, TWO)))


def test_elements_of_a_worker_whose_inputs_end_apart():
    """With two replicas here, and no other worker: the same parts as in one process."""

    def inputs():
        return iter([np.array([1]), np.array([2]), ENDED, np.array([3, 4]), np.array([5])])

    alone = elements_of_workers(inputs(), TWO, SingleProcessGroup())
    expected = [[[1], [2]], [[], [3, 4]], [[5], []]]
    assert [values(v) for v in alone] == expected
    assert [values(v) for v in per_replica_elements(inputs(), TWO)] == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", ">i4", "float64"])
def test_elements_of_unequal_size_keep_their_dtype(dtype):
    """They travel between workers as a file of NumPy's, which has no names of JAX's own dtypes."""
    elements = iter([np.ones(3, jax.numpy.dtype(dtype)), np.full((), 2, jax.numpy.dtype(dtype))[None]])
    (made,) = elements_of_workers(elements, TWO, SingleProcessGroup())
    assert [v.dtype for v in made.values] == [jax.numpy.dtype(dtype)] * 2
    assert values(made) == [[1, 1, 1], [2]]
