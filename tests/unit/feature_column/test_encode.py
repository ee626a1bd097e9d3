"""Features are encoded on the host, once."""

import jax
import numpy as np
import pytest

import unisono
from unisono import feature_column as fc
from unisono.data import Dataset

COLOR = fc.categorical_column_with_vocabulary_list("color", ["red", "green"])
AGE = fc.numeric_column("age")
COLUMNS = [AGE, fc.indicator_column(COLOR), fc.embedding_column(fc.crossed_column(["color", "n"], 9), 2)]
FEATURES = {"age": [1.0, 2.0], "color": ["red", "blue"], "n": [3, 4], "unused": ["x", "y"]}


def test_a_step_takes_what_a_dataset_gives():
    dataset = Dataset.from_tensor_slices((FEATURES, [0, 1])).batch(2).map(fc.encode(COLUMNS))
    ((features, labels),) = list(dataset)
    assert sorted(features) == ["age", "color/vocabulary", "color_X_n/hash_9"]
    assert features["color/vocabulary"].tolist() == [[0], [-1]]
    assert labels.tolist() == [0, 1]
    layer = fc.DenseFeatures(COLUMNS)
    layer.build()
    np.testing.assert_allclose(jax.jit(layer)(features), layer(FEATURES), rtol=1e-6)


def test_encoded_features_stay_as_they_are():
    encode = fc.encode(COLUMNS)
    once = encode(FEATURES)
    again = encode(once)
    assert {key: np.asarray(value).tolist() for key, value in again.items()} == {
        key: np.asarray(value).tolist() for key, value in once.items()
    }


def test_raw_features_in_a_compiled_step_are_an_error():
    layer = fc.DenseFeatures([fc.indicator_column(fc.categorical_column_with_hash_bucket("n", 3))])
    layer.build()
    with pytest.raises(unisono.InvalidTypeError, match=r"dataset\.map\(feature_column\.encode"):
        jax.jit(layer)({"n": np.arange(3)})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([], "one feature column or more"),
        ([AGE, fc.numeric_column("age", 2)], r"Received twice: \['age'\]"),
        (["age"], "takes feature columns"),
        ({"age": AGE}, "Received: a dict"),
    ],
)
def test_lists_that_cannot_be(columns, message):
    with pytest.raises(unisono.UnisonoError, match=message):
        fc.encode(columns)


def test_two_vocabularies_of_one_feature_are_an_error():
    other = fc.categorical_column_with_vocabulary_list("color", ["blue"])
    with pytest.raises(unisono.InvalidArgumentError, match="cannot be in one model"):
        fc.encode([fc.indicator_column(COLOR), fc.embedding_column(other, 2)])
    # Of different kinds, they can.
    hashed = fc.categorical_column_with_hash_bucket("color", 7)
    encoded = fc.encode([fc.indicator_column(COLOR), fc.embedding_column(hashed, 2)])(FEATURES)
    assert sorted(encoded) == ["color/hash_7", "color/vocabulary"]


def test_features_must_be_a_dict():
    with pytest.raises(unisono.InvalidTypeError, match="must be a dict"):
        fc.encode([AGE])(np.zeros(3))


def test_a_column_needs_its_feature():
    with pytest.raises(unisono.InvalidArgumentError, match=r"Feature 'age' .*Received: features \['size'\]"):
        fc.encode([AGE])({"size": np.zeros(3)})
