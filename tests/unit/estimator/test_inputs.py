"""Input functions of arrays and data frames."""

import numpy as np
import pytest

from unisono.estimator.inputs import numpy_input_fn, pandas_input_fn

X = {"a": np.arange(5.0), "b": np.arange(10).reshape(5, 2)}


class Frame:
    """The part of pandas' data frames that is used; a series without columns."""

    def __init__(self, index, **columns):
        self.index = np.asarray(index)
        self.columns = list(columns)
        self._found = columns

    def __getitem__(self, name):
        return self._found[name]


class Series:
    def __init__(self, index, values):
        self.index, self._values = np.asarray(index), values

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self._values, dtype)


def test_arrays_are_given_in_order_and_batches_reach_over_epochs():
    elements = list(numpy_input_fn(X, np.arange(5), batch_size=2, num_epochs=2, shuffle=False)())
    assert [labels.tolist() for _, labels in elements] == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]]
    assert elements[0][0]["b"].tolist() == [[0, 1], [2, 3]]
    assert next(iter(numpy_input_fn(np.ones((3, 2)), shuffle=False)())).shape == (3, 2)
    assert set(next(iter(numpy_input_fn(X, {"y": np.arange(5)}, shuffle=False)()))[1]) == {"y"}


def test_shuffled_rows_stay_together_and_differ_between_epochs():
    input_fn = numpy_input_fn(
        {"x": np.arange(50)}, np.arange(50), batch_size=50, num_epochs=None, shuffle=True
    )
    epochs = iter(input_fn())
    orders = []
    for _ in range(2):
        features, labels = next(epochs)
        assert features["x"].tolist() == labels.tolist()
        orders.append(labels.tolist())
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(50))
    assert orders[0] != orders[1]


def test_a_data_frame_gives_its_columns_strings_among_them():
    frame = Frame(range(2), age=np.array([3, 4]), name=np.array(["x", "yy"], object))
    ((features, labels),) = pandas_input_fn(frame, Series(range(2), [1, 0]), shuffle=False)()
    assert features["age"].tolist() == [3, 4]
    assert [str(np.asarray(s).astype(str)) for s in features["name"]] == ["x", "yy"]
    assert labels.tolist() == [1, 0]
    assert set(next(iter(pandas_input_fn(frame, frame, shuffle=False)()))[1]) == {"age", "name"}
    with pytest.raises(ValueError, match="mismatched"):
        pandas_input_fn(frame, Series([1, 2], [1, 0]), shuffle=False)


def test_errors():
    with pytest.raises(ValueError, match="shuffle must be provided"):
        numpy_input_fn(X)
    with pytest.raises(ValueError, match="cannot be empty"):
        numpy_input_fn({}, shuffle=False)
    with pytest.raises(ValueError, match="mismatched"):
        numpy_input_fn(X, np.arange(4), shuffle=False)
