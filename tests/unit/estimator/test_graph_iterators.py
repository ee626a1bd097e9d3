"""Iterators of TensorFlow 1 in input functions."""

import numpy as np
import pytest

from unisono import OutOfRangeError, tf
from unisono.data._sharding import InputContext
from unisono.estimator.session._input import InputFunction, InputRun, current_input_run

CONTEXT = InputContext(1, 0, 1)


def dataset():
    return tf.data.Dataset.from_tensor_slices({"x": np.arange(5), "y": 10 * np.arange(5)}).batch(2)


def elements(input_fn):
    return [
        (np.asarray(features).tolist(), None if labels is None else np.asarray(labels).tolist())
        for features, labels in InputFunction(input_fn, {})(CONTEXT)
    ]


@pytest.mark.parametrize("make", ["make_one_shot_iterator", "make_initializable_iterator"])
def test_what_get_next_returns_stands_for_all_elements(make):
    runs = []

    def input_fn():
        runs.append(current_input_run())
        iterator = getattr(dataset(), make)()
        tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
        element = iterator.get_next()
        return element["y"], element["x"]

    assert elements(input_fn) == [([0, 10], [0, 1]), ([20, 30], [2, 3]), ([40], [4])]
    assert len(runs) == 1


def test_what_is_computed_of_an_element_is_computed_of_each():
    runs = []

    def input_fn():
        runs.append(0)
        first = tf.data.Dataset.range(4).batch(2).make_one_shot_iterator()
        second = tf.compat.v1.data.make_one_shot_iterator(tf.data.Dataset.range(4, 9).batch(2))
        return first.get_next() + second.get_next(), None

    assert elements(input_fn) == [([4, 6], None), ([8, 10], None)]
    # The last one meets the end of the first dataset.
    assert len(runs) == 3


def test_a_dataset_whose_first_element_was_looked_at():
    def input_fn():
        data = tf.data.Dataset.range(3)
        data.make_one_shot_iterator().get_next()
        return data

    assert elements(input_fn) == [(0, None), (1, None), (2, None)]


def test_empty_data_have_no_elements():
    empty = tf.data.Dataset.range(0)
    assert elements(lambda: (empty.make_one_shot_iterator().get_next(), None)) == []


def test_elsewhere_it_is_an_iterator():
    iterator = tf.data.Dataset.range(2).make_one_shot_iterator()
    assert current_input_run() is None
    assert [int(iterator.get_next()) for _ in range(2)] == [0, 1]
    with pytest.raises(OutOfRangeError, match="end of the data"):
        iterator.get_next()
    assert iterator.element_spec.shape == ()


def test_an_error_of_the_input_fn_is_raised():
    def input_fn():
        raise OutOfRangeError("of the user")

    with pytest.raises(OutOfRangeError, match="of the user"):
        InputRun(input_fn).first()
