"""`DenseFeatures` and `LinearModel` in Keras models; their numbers are in test_columns.py."""

import keras
import numpy as np
import pytest

import unisono
from unisono import feature_column as fc
from unisono.data import Dataset

COLOR = fc.categorical_column_with_vocabulary_list("color", ["red", "green"])
FEATURES = {"age": np.array([1.0, 2.0, 3.0, 4.0], "float32"), "color": ["red", "green", "red", "green"]}


def test_a_keras_model_learns_from_strings():
    keras.utils.set_random_seed(0)
    features = fc.DenseFeatures([fc.numeric_column("age"), fc.embedding_column(COLOR, 2)])
    with unisono.OneDeviceStrategy("cpu:0").scope():
        model = keras.Sequential([features, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05), "mse")
    data = Dataset.from_tensor_slices((FEATURES, [[1.0], [0.0], [1.0], [0.0]])).batch(4).map(features.encode)
    features.build()
    before = np.asarray(features.variables[0])
    losses = model.fit(data, epochs=5, verbose=0, shuffle=False).history["loss"]
    assert losses[-1] < losses[0]
    assert (np.asarray(features.variables[0]) != before).all()
    assert model.predict(data, verbose=0).shape == (4, 1)


def test_variables_are_named_as_tensorflows():
    model = fc.LinearModel([fc.numeric_column("age"), COLOR], units=3, name="linear_model")
    model.build()
    assert sorted((v.path, v.shape) for v in model.variables) == [
        ("linear_model/age/weights", (1, 3)),
        ("linear_model/bias_weights", (3,)),
        ("linear_model/color/weights", (2, 3)),
    ]


def test_shared_tables_are_one_variable():
    a, b = (fc.categorical_column_with_identity(key, 5) for key in "ab")
    layer = fc.DenseFeatures(fc.shared_embeddings([a, b], 2), name="features")
    layer.build()
    assert [v.path for v in layer.variables] == ["features/a_b_shared_embedding/embedding_weights"]
    frozen = fc.DenseFeatures([fc.embedding_column(a, 2, trainable=False)])
    frozen.build()
    assert not frozen.trainable_variables


def test_functions_of_tensorflow_1():
    columns = [fc.numeric_column("age"), fc.indicator_column(COLOR)]
    assert np.asarray(fc.input_layer(FEATURES, columns))[0].tolist() == [1.0, 1.0, 0.0]
    assert fc.linear_model(FEATURES, columns, units=2).shape == (4, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fc.DenseFeatures([COLOR]), "takes dense columns"),
        (lambda: fc.LinearModel([COLOR], sparse_combiner="max"), "sparse_combiner must be one of"),
        (lambda: fc.LinearModel([fc.embedding_column(COLOR, 2)])(FEATURES), "takes numeric, bucketized"),
        (lambda: fc.DenseFeatures([fc.numeric_column("age")])(np.zeros((2, 1))), "takes a dict"),
        (lambda: fc.DenseFeatures([fc.numeric_column("age", 2)])(FEATURES), r"\(batch, 2\)"),
        (lambda: fc.DenseFeatures([fc.numeric_column("color")])(FEATURES), "takes numbers"),
    ],
)
def test_errors(make, message):
    with pytest.raises(unisono.UnisonoError, match=message):
        make()
