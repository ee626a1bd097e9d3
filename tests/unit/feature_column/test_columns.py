"""Feature columns against TensorFlow's, and their errors."""

import json

import keras
import numpy as np
import pytest
from tests import tensorflow_columns
from tests.tensorflow_columns import CATEGORICAL, DENSE, FEATURES, LINEAR

import unisono
from unisono import feature_column as fc

RECORDED = json.loads(tensorflow_columns.RESULTS.read_text())


def columns_of(expression):
    return eval(expression, {"fc": fc, "INT": "int64"})


def output(layer, features):
    layer.build()
    for variable in layer.variables:
        variable.assign(tensorflow_columns.wave(variable.shape))
    # As in a pipeline: encoded on the host first.
    return np.asarray(layer(layer.encode(features)))


@pytest.mark.parametrize("column", CATEGORICAL)
def test_categories_are_tensorflows(column):
    made = columns_of(column)
    values = made.values(FEATURES)
    weights = np.ones(values.ids.shape) if values.weights is None else values.weights
    counts = np.zeros((len(values.ids), made.num_buckets))
    for row, place in np.argwhere(values.present & (values.ids >= 0)):
        counts[row, values.ids[row, place]] += weights[row, place]
    np.testing.assert_array_equal(counts, np.array(RECORDED[f"[fc.indicator_column({column})]"]))


@pytest.mark.parametrize("columns", DENSE)
def test_dense_features_are_tensorflows(columns):
    found = output(fc.DenseFeatures(columns_of(columns)), FEATURES)
    np.testing.assert_allclose(found, np.array(RECORDED[columns]), rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize(("columns", "combiner"), LINEAR)
def test_linear_models_are_tensorflows(columns, combiner):
    layer = fc.LinearModel(columns_of(columns), units=2, sparse_combiner=combiner)
    found = output(layer, FEATURES)
    np.testing.assert_allclose(found, np.array(RECORDED[f"{columns} {combiner}"]), rtol=2e-6, atol=1e-6)


def test_vocabulary_files(tmp_path):
    path = tmp_path / "colors.txt"
    path.write_text("red\ngreen\nblue\n")
    column = fc.categorical_column_with_vocabulary_file("color", path, vocabulary_size=2, num_oov_buckets=1)
    assert column.num_buckets == 3
    assert column.values({"color": ["green", "blue"]}).ids.tolist() == [[1], [2]]
    path.write_text("10\n20\n")
    numbers = fc.categorical_column_with_vocabulary_file("n", path, dtype="int64", default_value=0)
    assert numbers.values({"n": [20, 3]}).ids.tolist() == [[1], [0]]


WORDS = fc.categorical_column_with_hash_bucket("words", 5)
NUMBER = fc.numeric_column("n")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fc.numeric_column(3), "must be a string"),
        (lambda: fc.numeric_column("n", (0,)), "positive integers"),
        (lambda: fc.numeric_column("n", normalizer_fn=3), "must be a function"),
        (lambda: fc.bucketized_column(WORDS, [1]), "must be a numeric column"),
        (lambda: fc.bucketized_column(NUMBER, [2, 1]), "sorted list"),
        (lambda: fc.categorical_column_with_vocabulary_list("n", []), "must have values"),
        (lambda: fc.categorical_column_with_vocabulary_list("n", ["a", "a"]), "each once"),
        (
            lambda: fc.categorical_column_with_vocabulary_list(
                "n", ["a"], default_value=0, num_oov_buckets=1
            ),
            "either a default_value or",
        ),
        (lambda: fc.categorical_column_with_identity("n", 0), "at least 1"),
        (lambda: fc.categorical_column_with_identity("n", 3, default_value=3), "one of the categories"),
        (lambda: fc.categorical_column_with_hash_bucket("n", 0), "at least 1"),
        (lambda: fc.crossed_column(["a"], 5), "two or more"),
        (lambda: fc.crossed_column(["a", WORDS], 5), "but hashed ones"),
        (lambda: fc.crossed_column(["a", NUMBER], 5), "crosses keys"),
        (lambda: fc.weighted_categorical_column(NUMBER, "w"), "takes a categorical column"),
        (lambda: fc.indicator_column(NUMBER), "takes a categorical column"),
        (lambda: fc.embedding_column(WORDS, 0), "at least 1"),
        (lambda: fc.embedding_column(WORDS, 2, "max"), "one of mean"),
        (lambda: fc.embedding_column(WORDS, 2, ckpt_to_load_from="x"), "no checkpoint"),
        (
            lambda: fc.shared_embeddings([WORDS, fc.categorical_column_with_identity("n", 3)], 2),
            "equally many",
        ),
    ],
)
def test_columns_that_cannot_be(make, message):
    with pytest.raises(unisono.UnisonoError, match=message):
        make()


@pytest.mark.parametrize(
    ("column", "features", "message"),
    [
        (fc.categorical_column_with_vocabulary_list("n", ["a"]), {"n": [1]}, "both be of strings"),
        (fc.categorical_column_with_vocabulary_list("n", ["a"]), {"m": [1]}, "'n' must be in the features"),
        (fc.categorical_column_with_identity("n", 3), {"n": [1.0]}, "takes integers"),
        (fc.categorical_column_with_identity("n", 3), {"n": [3]}, r"from 0 to 2. Received: \[3\]"),
        (WORDS, {"words": [0.5]}, "strings or integers"),
        (fc.weighted_categorical_column(WORDS, "w"), {"words": ["a"], "w": [[1.0, 2.0]]}, "the shape of"),
    ],
)
def test_features_that_a_column_cannot_read(column, features, message):
    with pytest.raises(unisono.UnisonoError, match=message):
        column.values(features)


def test_initial_tables_have_tensorflows_deviation():
    layer = fc.DenseFeatures(
        [fc.embedding_column(fc.categorical_column_with_identity("n", 4000), 16)], name="features"
    )
    layer.build()
    (table,) = layer.variables
    assert table.path == "features/n_embedding/embedding_weights"
    values = np.asarray(table)
    # A normal of deviation 1/4, cut off at two deviations, has 0.8796 of it.
    assert abs(values.std() - 0.25 * 0.8796) < 0.002
    assert np.abs(values).max() <= 0.5
    chosen = fc.embedding_column(WORDS, 2, initializer=keras.initializers.Constant(3.0))
    layer = fc.DenseFeatures([chosen])
    layer.build()
    assert np.asarray(layer.variables[0]).tolist() == [[3.0, 3.0]] * 5


def test_floats_are_crossed_as_the_integers_that_tensorflow_casts_them_to():
    column = fc.crossed_column(["age", "sex"], 100)
    features = {"age": [[1.9], [2.1], [-0.5], [-1.5]], "sex": [["a"]] * 4}
    # TensorFlow 2.21's `FeatureTransformationCache`.
    assert column.values(features).ids.ravel().tolist() == [45, 93, 95, 58]
