"""`unisono.preprocessing`: Keras' lookups without TensorFlow."""

import json

import keras
import numpy as np
import pytest
from tests import tensorflow_lookups

import unisono
from unisono import preprocessing
from unisono.data import Dataset

RECORDED = json.loads(tensorflow_lookups.RESULTS.read_text())


@pytest.mark.parametrize("call", tensorflow_lookups.CALLS)
def test_the_numbers_are_tensorflows(call):
    array = tensorflow_lookups.evaluate(call, preprocessing)
    expected = RECORDED[call]
    assert (list(array.shape), array.dtype.kind) == (expected["shape"], expected["kind"])
    assert array.ravel().tolist() == expected["data"]


def test_indices_become_terms_again():
    lookup = preprocessing.StringLookup(vocabulary=["a", "ü"], invert=True)
    assert lookup(np.array([[1, 2], [0, 9]])).tolist() == [[b"a", "ü".encode()], [b"[UNK]", b"[UNK]"]]
    integers = preprocessing.IntegerLookup(vocabulary=[5, 7], invert=True)
    assert integers(np.array([2, 0])).tolist() == [7, -1]
    assert lookup.get_vocabulary() == ["[UNK]", "a", "ü"]
    assert lookup.vocabulary_size() == 3


def test_a_vocabulary_in_a_file(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("red\ngreen\n")
    assert preprocessing.StringLookup(vocabulary=str(path))(["green", "blue"]).tolist() == [2, 0]
    path.write_text("10\n20\n")
    assert preprocessing.IntegerLookup(vocabulary=str(path))([20]).tolist() == [2]


def test_adapt_takes_a_data_set():
    words = Dataset.from_tensor_slices(["b", "a", "b", "c"]).batch(2)
    lookup = preprocessing.StringLookup()
    lookup.adapt(words)
    assert lookup.get_vocabulary() == ["[UNK]", "b", "c", "a"]
    lookup.adapt(words, steps=1)
    assert lookup.get_vocabulary() == ["[UNK]", "b", "a"]


def test_in_a_pipeline_with_keras_other_layers():
    lookup = preprocessing.StringLookup(vocabulary=["no", "yes"], num_oov_indices=0)
    normalize = keras.layers.Normalization(mean=2.0, variance=4.0)
    bins = keras.layers.Discretization(bin_boundaries=[1.0, 3.0])
    hot = keras.layers.CategoryEncoding(num_tokens=3, output_mode="one_hot")
    dataset = Dataset.from_tensor_slices(([[1.0], [4.0]], ["yes", "no"])).batch(2)
    mapped = dataset.map(lambda x, y: ((normalize(x), hot(bins(x))), lookup(y)))
    (((normal, one_hot), label),) = list(mapped)
    np.testing.assert_allclose(normal, [[-0.5], [1.0]])
    np.testing.assert_array_equal(one_hot, [[0, 1, 0], [0, 0, 1]])
    np.testing.assert_array_equal(label, [1, 0])


def test_a_layer_is_saved_with_its_vocabulary():
    lookup = preprocessing.StringLookup(vocabulary=["a", "b"], mask_token="", name="words")
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(lookup))
    assert again(["b", "", "?"]).tolist() == lookup(["b", "", "?"]).tolist() == [3, 0, 1]


def test_symbolic_inputs_have_the_output_shape():
    words = keras.Input((3,), dtype="string")
    assert preprocessing.StringLookup(vocabulary=["a"])(words).shape == (None, 3)
    assert preprocessing.StringLookup(vocabulary=["a"], output_mode="multi_hot")(words).shape == (None, 2)
    assert preprocessing.StringLookup(vocabulary=["a"], invert=True)(words).dtype == "string"
    assert preprocessing.Hashing(4, output_mode="count")(words).shape == (None, 4)
    assert preprocessing.HashedCrossing(4)((words, words)).dtype == "int64"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: preprocessing.StringLookup(vocabulary=["a", "a"]), "each term once"),
        (lambda: preprocessing.StringLookup(vocabulary=[]), "must have a term"),
        (lambda: preprocessing.StringLookup(2, vocabulary=["a", "b"]), "at most max_tokens=2"),
        (
            lambda: preprocessing.StringLookup(vocabulary=["a", ""], mask_token=""),
            "must not contain the mask",
        ),
        (lambda: preprocessing.StringLookup(1), "above 1"),
        (lambda: preprocessing.StringLookup(num_oov_indices=-1), "at least 0"),
        (lambda: preprocessing.StringLookup(pad_to_max_tokens=True), "needs max_tokens"),
        (lambda: preprocessing.StringLookup(invert=True, output_mode="count"), "invert=True"),
        (lambda: preprocessing.StringLookup(output_mode="tf_idf"), "one of int, one_hot"),
        (lambda: preprocessing.StringLookup()("a"), "needs a vocabulary"),
        (
            lambda: preprocessing.StringLookup(vocabulary=["a"], num_oov_indices=0)("b"),
            "of its vocabulary alone",
        ),
        (lambda: preprocessing.StringLookup(vocabulary=["a"]).adapt(["b"]), "was given one"),
    ],
)
def test_errors(make, message):
    with pytest.raises(unisono.InvalidArgumentError, match=message):
        make()


def test_what_does_not_exist_says_so():
    for make in (
        lambda: preprocessing.StringLookup(sparse=True, output_mode="count"),
        lambda: preprocessing.StringLookup(salt=3),
        lambda: preprocessing.Hashing(3, salt=1),
    ):
        with pytest.raises(unisono.UnsupportedError):
            make()
