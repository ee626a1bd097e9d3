"""Elements of datasets have `numpy()` in programs of TensorFlow."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import unisono
from unisono import tf


def test_elements_of_any_structure_have_numpy():
    dataset = tf.data.Dataset.from_tensor_slices(({"x": [[1.0, 2.0], [3.0, 4.0]]}, [5, 6], ["a", "b"]))
    features, label, name = next(iter(dataset))
    np.testing.assert_array_equal(features["x"].numpy(), [1.0, 2.0])
    assert type(features["x"].numpy()) is np.ndarray
    assert (label.numpy(), name.numpy()) == (5, b"a")
    assert type(label.numpy()) is np.int32
    assert f"{label:.2f}" == "5.00"


def test_the_next_element_by_name():
    inner = tf.data.Dataset.range(2)
    iterator = iter(tf.data.Dataset.from_tensors(inner))
    assert list(iterator.get_next().as_numpy_iterator()) == [0, 1]
    assert not iterator.get_next_as_optional().has_value()
    with pytest.raises(tf.errors.OutOfRangeError):
        iterator.get_next()


def test_numpy_of_an_element_is_a_copy():
    source = np.zeros((2, 2))
    for row in tf.data.Dataset.from_tensor_slices(source):
        array = row.numpy()
        array += 1
    assert not source.any()


def test_data_sets_of_unisono_itself_give_what_they_give_without_these_names(tmp_path):
    with tf.io.TFRecordWriter(str(tmp_path / "records")) as writer:
        writer.write(json.dumps([1, 2]).encode())
    seen = []

    def parsed(record):
        seen.append(type(record))
        return json.loads(bytes(record)) if isinstance(record, bytes) else json.loads(record.numpy())

    readers = (unisono.data.TFRecordDataset, tf.data.TFRecordDataset)
    first, second = (reader(str(tmp_path / "records")).map(parsed) for reader in readers)
    kinds = [type(element) for made in (first, second) for element in made]
    assert kinds[0] is np.ndarray
    assert hasattr(kinds[1], "numpy")
    assert seen[0] is bytes
    assert hasattr(seen[1], "numpy")
    # Who asks for a data set means either.
    assert isinstance(first, tf.data.Dataset)
    assert not isinstance([], tf.data.Dataset)
    # Of both, the name that a program calls decides.
    pairs = (kind.zip((first, second)) for kind in (unisono.data.Dataset, tf.data.Dataset))
    assert [hasattr(next(iter(pair))[0], "numpy") for pair in pairs] == [False, True]


@pytest.mark.parametrize(
    "transform",
    [
        lambda data, note: data.filter(lambda x: note(x) and x > 0),
        lambda data, note: data.take_while(lambda x: note(x) and x > 0),
        lambda data, note: data.flat_map(lambda x: note(x) and tf.data.Dataset.range(x)),
        lambda data, note: data.group_by_window(lambda x: note(x) and x, lambda key, group: group, 1),
        lambda data, note: data.window(2).flat_map(lambda group: group.map(lambda x: note(x) and x)),
        lambda data, note: data.reduce(0, lambda state, x: note(x) and x) and data,
    ],
)
def test_functions_of_elements_get_tensors(transform):
    seen = []

    def note(x):
        seen.append(type(x))
        return True

    list(transform(tf.data.Dataset.range(1, 3), note))
    assert seen
    assert all(hasattr(kind, "numpy") for kind in seen)


def test_elements_are_arrays_for_operations_functions_and_strategies():
    dataset = tf.data.Dataset.from_tensor_slices(np.arange(8, dtype="float32")).batch(4)
    first, second = dataset
    assert isinstance(jnp.add(first, second), jnp.ndarray)
    assert float(tf.reduce_sum(first * 2).numpy()) == 12.0
    traces = []

    @tf.function
    def total(batch):
        traces.append(batch.shape)
        return tf.reduce_sum(batch)

    assert float(total(first)) == 6.0
    traced = len(traces)
    # One signature for arrays with `numpy()` and for those without.
    assert [float(total(batch)) for batch in (second, np.asarray(first))] == [22.0, 6.0]
    assert len(traces) == traced


def test_other_iterators_give_plain_arrays():
    dataset = tf.data.Dataset.from_tensor_slices(np.arange(4, dtype="float32")).batch(2)
    assert type(next(dataset.as_numpy_iterator())) is np.ndarray
    strategy = unisono.MirroredStrategy(["cpu:0"])
    with strategy.scope():
        assert float(next(iter(strategy.experimental_distribute_dataset(dataset))).sum()) == 1.0
    # A pass has a state, as other iterators of the dataset have.
    iterator = iter(dataset)
    next(iterator)
    state = iterator.get_state()
    again = iter(dataset)
    again.set_state(state)
    np.testing.assert_array_equal(next(again).numpy(), [2.0, 3.0])


def test_the_structure_of_elements_by_its_old_names():
    dataset = tf.data.Dataset.from_tensor_slices({"x": np.zeros((6, 2), "float32"), "y": ["a"] * 6}).batch(2)
    old = tf.compat.v1.data
    shapes = old.get_output_shapes(dataset)
    assert shapes == {"x": (None, 2), "y": (None,)}
    assert shapes["x"].as_list() == [None, 2]
    assert old.get_output_types(dataset) == {"x": np.float32, "y": np.dtype(object)}
    assert old.get_output_classes(dataset) == {"x": tf.Tensor, "y": tf.Tensor}
    iterator = old.make_one_shot_iterator(dataset)
    assert old.get_output_shapes(iterator)["x"] == (None, 2)
    padded = dataset.unbatch().padded_batch(4, old.get_output_shapes(dataset.unbatch()))
    assert next(iter(padded))["x"].shape == (4, 2)


def test_iterators_of_tensorflow_1_over_distributed_data():
    strategy = unisono.MirroredStrategy(["cpu:0", "cpu:1"])
    distributed = strategy.experimental_distribute_dataset(tf.data.Dataset.range(4).batch(4))
    for make in (
        distributed.make_initializable_iterator,
        distributed.make_one_shot_iterator,
        lambda: tf.compat.v1.data.make_initializable_iterator(distributed),
    ):
        iterator = make()
        assert iterator.initializer is not None
        for _ in range(2):
            parts = strategy.experimental_local_results(iterator.get_next())
            assert [part.tolist() for part in parts] == [[0, 1], [2, 3]]
            iterator.initialize()


def test_elements_in_a_tape_are_recorded_and_stay_elements_otherwise():
    element = next(iter(tf.data.Dataset.from_tensor_slices(np.float32([[1.0, 2.0]]))))
    other = element * 2
    assert type(element.sum()) is type(other) is type(divmod(element, 2)[1]) is type(element)
    with tf.GradientTape() as tape:
        tape.watch(element)
        y = element[0] * tf.reduce_sum(other * element)
    np.testing.assert_array_equal(tape.gradient(y, element), [10.0 + 2.0, 4.0])
    assert type(element * 2) is type(other)


def test_components_are_what_they_hold_for_plain_python():
    (words,) = tf.data.Dataset.from_tensor_slices([b"sea", b"air"]).batch(2)
    numbers = {b"sea": 7, b"air": 8}
    assert [numbers[word] for word in words] == [7, 8]
    assert (words[0].decode(), len(words[0]), words[1].numpy()) == ("sea", 3, b"air")
    (counts,) = tf.data.Dataset.range(3).batch(3)
    assert [n.numpy() for n in counts] == [0, 1, 2]
    assert "abc"[counts[2]] == "c"
    with pytest.raises(AttributeError, match="decode"):
        counts[0].decode()
    # In `map`, too.
    data = tf.data.Dataset.from_tensor_slices([b"sea"]).map(lambda word: (numbers[word], word.upper()))
    assert [(int(n), word.numpy()) for n, word in data] == [(7, b"SEA")]
