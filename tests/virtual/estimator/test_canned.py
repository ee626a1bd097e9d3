"""Canned estimators: the numbers of plain Keras, on any number of devices, from strings."""

from pathlib import Path

import jax
import keras
import numpy as np
import pytest

import unisono
from unisono import feature_column as fc
from unisono.checkpoint import load_checkpoint
from unisono.data import Dataset
from unisono.estimator import (
    BaselineClassifier,
    BaselineRegressor,
    DNNClassifier,
    DNNEstimator,
    DNNLinearCombinedClassifier,
    DNNLinearCombinedEstimator,
    DNNLinearCombinedRegressor,
    EvalSpec,
    LinearClassifier,
    LinearEstimator,
    MultiLabelHead,
    RegressionHead,
    RunConfig,
    TrainSpec,
    build_raw_serving_input_receiver_fn,
    train_and_evaluate,
)

ROWS = 48
RNG = np.random.default_rng(0)
COLORS = ["red", "green", "blue"]
FEATURES = {
    "color": RNG.choice([*COLORS, "mauve"], ROWS),
    "age": RNG.uniform(0, 80, ROWS).astype("float32"),
    "weight": RNG.choice([0.5, 1.0, 2.0], ROWS).astype("float32"),
}
LABELS = ((FEATURES["color"] == "red") | (FEATURES["age"] > 50)).astype("int32")
NAMES = np.array(["no", "yes"])[LABELS]

COLOR = fc.categorical_column_with_vocabulary_list("color", COLORS, num_oov_buckets=1)
AGE = fc.numeric_column("age", normalizer_fn=lambda x: x / 80)
BUCKETS = fc.bucketized_column(fc.numeric_column("age"), [20, 50])


def batches(labels, size, repeat=2):
    return lambda: Dataset.from_tensor_slices((FEATURES, labels)).batch(size).repeat(repeat)


def values(estimator):
    """The model's own variables after training."""
    names = [n for n in estimator.get_variable_names() if n.startswith(("dnn", "linear", "baseline"))]
    return {name: estimator.get_variable_value(name) for name in names if "seed" not in name}


def first(estimator):
    """The variables before training."""
    path = Path(estimator.model_dir) / "model.ckpt-0"
    reader = load_checkpoint(path)
    return lambda name: np.asarray(reader.get_tensor(name))


def numbers(features):
    """What a plain Keras model reads: colors as integers, ages, buckets of ages."""
    color = np.array([COLORS.index(c) if c in COLORS else 3 for c in features["color"]])
    return color, features["age"][:, None] / 80, np.digitize(features["age"], [20, 50])


def plain_wide_and_deep(initial):
    """Train the same model with Keras and JAX alone: eight batches of twelve rows."""
    color, age, bucket, targets, weights = map(
        jax.numpy.asarray, (*numbers(FEATURES), LABELS.astype("float32"), FEATURES["weight"])
    )
    deep = keras.Sequential([keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
    deep.build((None, 1 + 4 + 2))
    table = keras.Variable(
        initial("dnn/input_from_feature_columns/input_layer/color_embedding/embedding_weights")
    )
    for variable, name in zip(
        deep.variables,
        ("hiddenlayer_0/kernel", "hiddenlayer_0/bias", "logits/kernel", "logits/bias"),
        strict=True,
    ):
        variable.assign(initial(f"dnn/{name}"))
    wide = [keras.Variable(np.zeros(shape, "float32")) for shape in ((4, 1), (3, 1), (1,))]
    deep_variables = [table, *deep.variables]
    adagrad, ftrl = keras.optimizers.Adagrad(0.001), keras.optimizers.Ftrl(0.005)
    adagrad.build(deep_variables)
    ftrl.build(wide)

    def loss(deep_values, wide_values, rows):
        hot = jax.nn.one_hot(color[rows], 4)
        # Sorted by name: the age, then the color's embedding and indicator.
        inputs = jax.numpy.concatenate([age[rows], deep_values[0][color[rows]], hot], axis=1)
        logits, _ = deep.stateless_call(deep_values[1:], [], inputs)
        logits = logits + wide_values[0][color[rows]] + wide_values[1][bucket[rows]] + wide_values[2]
        losses = keras.ops.binary_crossentropy(targets[rows][:, None], logits, from_logits=True)
        return jax.numpy.mean(losses * weights[rows][:, None])

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1)))
    for start in list(range(0, ROWS, 12)) * 2:
        rows = np.arange(start, start + 12)
        grads = gradients([v.value for v in deep_variables], [v.value for v in wide], rows)
        adagrad.apply(grads[0], deep_variables)
        ftrl.apply(grads[1], wide)
    names = ["color_embedding", "hiddenlayer_0/kernel", "hiddenlayer_0/bias", "logits/kernel", "logits/bias"]
    return dict(zip([*names, "color/weights", "age_bucketized/weights", "bias_weights"],
                    map(np.asarray, [*deep_variables, *wide]), strict=True))  # fmt: skip


def wide_and_deep(directory, config=None):
    return DNNLinearCombinedClassifier(
        directory,
        linear_feature_columns=[COLOR, BUCKETS],
        dnn_feature_columns=[AGE, fc.embedding_column(COLOR, 2), fc.indicator_column(COLOR)],
        dnn_hidden_units=[4],
        weight_column="weight",
        label_vocabulary=["no", "yes"],
        config=config,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    estimator = wide_and_deep(str(tmp_path_factory.mktemp("one")), RunConfig(tf_random_seed=3))
    return estimator.train(batches(NAMES, 12))


@pytest.fixture(scope="module")
def evaluated(trained):
    return trained.evaluate(batches(NAMES, 12, 1))


def test_wide_and_deep_is_that_of_plain_keras(trained):
    expected = plain_wide_and_deep(first(trained))
    found = values(trained)
    assert len(found) == len(expected)
    for end, value in expected.items():
        (name,) = [name for name in found if name.removesuffix("/embedding_weights").endswith(end)]
        np.testing.assert_allclose(found[name], value.reshape(found[name].shape), rtol=1e-5, atol=1e-6)


def test_two_devices_compute_what_one_does(trained, evaluated, tmp_path):
    strategy = unisono.MirroredStrategy(["cpu:0", "cpu:1"])
    config = RunConfig(tf_random_seed=3, train_distribute=strategy, eval_distribute=strategy)
    estimator = wide_and_deep(str(tmp_path), config)
    # Two batches of six rows a step, which are the batches of twelve.
    estimator.train(batches(NAMES, 6))
    alone, together = values(trained), values(estimator)
    assert alone.keys() == together.keys()
    for name, value in alone.items():
        np.testing.assert_allclose(together[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    two = estimator.evaluate(batches(NAMES, 6, 1))
    assert evaluated.keys() == two.keys()
    for name, value in evaluated.items():
        np.testing.assert_allclose(two[name], value, rtol=1e-4, err_msg=name)


def test_evaluation_and_predictions(trained, evaluated):
    found = evaluated
    assert found["global_step"] == 8
    assert set(found) == {
        "accuracy", "accuracy_baseline", "auc", "auc_precision_recall", "average_loss", "global_step",
        "label/mean", "loss", "precision", "prediction/mean", "recall",
    }  # fmt: skip
    weights = FEATURES["weight"]
    predictions = list(trained.predict(batches(NAMES, 20, 1)))
    logistic = np.array([p["logistic"][0] for p in predictions])
    classes = np.array([p["classes"][0].decode() for p in predictions])
    assert found["accuracy"] == pytest.approx(np.average(classes == NAMES, weights=weights), abs=1e-6)
    assert found["prediction/mean"] == pytest.approx(np.average(logistic, weights=weights), rel=1e-5)
    assert found["label/mean"] == pytest.approx(np.average(LABELS, weights=weights), rel=1e-5)
    losses = -np.log(np.where(LABELS == 1, logistic, 1 - logistic))
    assert found["average_loss"] == pytest.approx(np.average(losses, weights=weights), rel=1e-5)
    assert predictions[0]["all_classes"].tolist() == [b"no", b"yes"]
    (only,) = trained.predict(batches(NAMES, 48, 1), predict_keys="classes", yield_single_examples=False)
    assert sorted(only) == ["classes"]
    assert only["classes"].shape == (48, 1)


def test_features_alone_are_enough_to_predict(trained):
    row = {"color": ["red"], "age": [70.0]}
    assert next(trained.predict(lambda: row))["logits"].shape == (1,)


@pytest.mark.parametrize("reduction", ["sum", "sum_over_batch_size"])
def test_both_reductions_are_those_of_one_device(reduction, tmp_path):
    """Also where the last batches have another size, and a replica none."""
    strategy, results = unisono.MirroredStrategy(["cpu:0", "cpu:1"]), []
    for where, size in ((None, 20), (strategy, 10)):
        head = RegressionHead(weight_column="weight", loss_reduction=reduction)
        estimator = LinearEstimator(
            head, [AGE], str(tmp_path / str(size)),
            optimizer=keras.optimizers.SGD(0.001), config=RunConfig(train_distribute=where),
        )  # fmt: skip
        estimator.train(batches(FEATURES["age"], size, 1))
        results.append(values(estimator))
    for name, value in results[0].items():
        np.testing.assert_allclose(results[1][name], value, rtol=1e-5, err_msg=name)


def test_an_exported_model_takes_encoded_features(trained, tmp_path):
    rows = trained.encode({"color": np.array(["red", "mauve"]), "age": np.array([70.0, 20.0], "float32")})
    assert sorted(rows) == ["age", "color/vocabulary"]
    path = trained.export_saved_model(str(tmp_path), build_raw_serving_input_receiver_fn(rows))
    served = unisono.export.load(path)(rows)
    (found,) = trained.predict(lambda: iter([rows]), yield_single_examples=False)
    for key in ("logits", "logistic", "probabilities", "class_ids"):
        np.testing.assert_allclose(served[key], found[key], rtol=1e-6)


def test_train_and_evaluate(tmp_path):
    estimator = LinearClassifier([COLOR], str(tmp_path), label_vocabulary=["no", "yes"])
    train, test = (
        TrainSpec(batches(NAMES, 16, None), max_steps=20),
        EvalSpec(batches(NAMES, 16, 1), steps=None),
    )
    metrics, _ = train_and_evaluate(estimator, train, test)
    assert metrics["global_step"] == 20
    assert metrics["accuracy"] > metrics["accuracy_baseline"]


@pytest.mark.parametrize(
    ("make", "labels", "names"),
    [
        (
            lambda where: DNNClassifier(
                [3, 2], [AGE, fc.indicator_column(COLOR)], where, n_classes=3, dropout=0.1, batch_norm=True,
                optimizer=lambda: keras.optimizers.Adam(0.01),
            ),
            LABELS,
            {"accuracy", "average_loss"},
        ),
        (
            lambda where: DNNLinearCombinedRegressor(
                where, [COLOR], dnn_feature_columns=[AGE], dnn_hidden_units=[2], label_dimension=2,
                loss_reduction="sum",
            ),
            RNG.normal(size=(ROWS, 2)).astype("float32"),
            {"average_loss", "label/mean", "prediction/mean"},
        ),
        (
            lambda where: LinearEstimator(MultiLabelHead(2), [COLOR], where, "SGD"),
            np.stack([LABELS, 1 - LABELS], 1),
            {"average_loss", "auc", "auc_precision_recall"},
        ),
        (lambda where: BaselineClassifier(where, 3), LABELS, {"accuracy", "average_loss"}),
    ],
    ids=["dnn classifier", "combined", "multi-label", "baseline"],
)  # fmt: skip
def test_every_kind_learns(make, labels, names, tmp_path):
    estimator = make(str(tmp_path))
    data = batches(labels, 16)
    before = estimator.train(data, steps=1).evaluate(data)
    after = estimator.train(data, steps=30).evaluate(data)
    assert set(after) == {*names, "loss", "global_step"}
    assert after["loss"] < before["loss"]
    # The data end after six steps.
    assert after["global_step"] == 7


def test_a_baseline_is_the_mean(tmp_path):
    estimator = BaselineRegressor(str(tmp_path), optimizer=keras.optimizers.SGD(0.5))
    estimator.train(lambda: (FEATURES, FEATURES["age"]), steps=30)
    assert estimator.get_variable_value("baseline/bias")[0] == pytest.approx(FEATURES["age"].mean(), rel=1e-4)


def test_errors_come_before_the_step():
    classifier = LinearClassifier([COLOR], label_vocabulary=["no", "yes"])
    with pytest.raises(unisono.InvalidArgumentError, match="must be in label_vocabulary"):
        classifier.train(lambda: (FEATURES, np.array(["perhaps"] * ROWS)), steps=1)
    with pytest.raises(unisono.InvalidArgumentError, match="'color' must be in the features"):
        classifier.train(lambda: ({"age": FEATURES["age"]}, NAMES), steps=1)
    with pytest.raises(unisono.InvalidTypeError, match="must be a dict"):
        classifier.train(lambda: (FEATURES["age"], NAMES), steps=1)
    with pytest.raises(unisono.InvalidTypeError, match="takes dense columns"):
        DNNClassifier([3], [COLOR])
    with pytest.raises(unisono.InvalidArgumentError, match="positive integers"):
        DNNEstimator(MultiLabelHead(2), [0], [AGE])
    with pytest.raises(unisono.InvalidArgumentError, match="Received: neither"):
        DNNLinearCombinedEstimator(MultiLabelHead(2))
    with pytest.raises(unisono.InvalidArgumentError, match="needs dnn_hidden_units"):
        DNNLinearCombinedEstimator(MultiLabelHead(2), dnn_feature_columns=[AGE])
    with pytest.raises(unisono.InvalidArgumentError, match="name must be one of"):
        LinearClassifier([COLOR], optimizer="ftrl").train(lambda: (FEATURES, LABELS), steps=1)
    with pytest.raises(unisono.InvalidTypeError, match="must be a name, an optimizer"):
        LinearClassifier([COLOR], optimizer=3).train(lambda: (FEATURES, LABELS), steps=1)


def test_the_tutorial_on_premade_estimators():
    """https://www.tensorflow.org/tutorials/estimator/premade, with fewer steps."""
    from sklearn.datasets import load_iris

    from unisono import tf

    table, order = load_iris(), np.random.default_rng(0).permutation(150)
    keys = ["SepalLength", "SepalWidth", "PetalLength", "PetalWidth"]
    rows = {key: table.data[order, i] for i, key in enumerate(keys)}
    species = table.target[order]

    def input_fn(features, labels, training=True, batch_size=256):
        dataset = tf.data.Dataset.from_tensor_slices((dict(features), labels))
        if training:
            dataset = dataset.shuffle(1000, seed=0).repeat()
        return dataset.batch(batch_size)

    classifier = tf.estimator.DNNClassifier(
        feature_columns=[tf.feature_column.numeric_column(key=key) for key in keys],
        hidden_units=[30, 10],
        n_classes=3,
        config=RunConfig(tf_random_seed=0),
    )
    train = {key: values[:120] for key, values in rows.items()}
    test = {key: values[120:] for key, values in rows.items()}
    classifier.train(input_fn=lambda: input_fn(train, species[:120]), steps=300)
    result = classifier.evaluate(input_fn=lambda: input_fn(test, species[120:], training=False))
    assert result["accuracy"] > 0.9
    assert result["global_step"] == 300
    flowers = {
        "SepalLength": [5.1, 6.9],
        "SepalWidth": [3.3, 3.1],
        "PetalLength": [1.7, 5.4],
        "PetalWidth": [0.5, 2.1],
    }
    predictions = classifier.predict(lambda: tf.data.Dataset.from_tensor_slices(flowers).batch(256))
    assert [int(found["class_ids"][0]) for found in predictions] == [0, 2]
