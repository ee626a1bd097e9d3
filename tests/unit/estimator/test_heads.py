"""Heads: losses, predictions and metrics, with the numbers of TensorFlow's own tests."""

import keras
import numpy as np
import pytest

import unisono
from unisono.estimator import (
    BinaryClassHead,
    LogisticRegressionHead,
    MultiClassHead,
    MultiHead,
    MultiLabelHead,
    PoissonRegressionHead,
    RegressionHead,
)

FLOATS = np.float32


def metrics_of(head, logits, labels, features=None, **kwargs):
    metrics = head.metrics(**kwargs)
    head.update_metrics(metrics, features or {}, np.array(logits, FLOATS), np.array(labels), **kwargs)
    return {name: float(metric.result()) for name, metric in metrics.items()}


def assert_close(found, expected, tolerance=1e-5):
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=tolerance), name


def test_binary_loss_and_predictions():
    head = BinaryClassHead()
    logits = np.array([[45.0], [-41.0]], FLOATS)
    # The cross entropies are 0 and 41.
    assert float(head.loss([[1], [1]], logits)) == pytest.approx(20.5)
    assert float(head.loss([1, 1], logits)) == pytest.approx(20.5)
    assert float(BinaryClassHead(loss_reduction="sum").loss([1, 1], logits)) == pytest.approx(41.0)
    found = head.predictions(np.array([[0.3], [-0.4]], FLOATS))
    np.testing.assert_allclose(found["logistic"], [[0.574443], [0.401312]], atol=1e-6)
    np.testing.assert_allclose(
        found["probabilities"], [[0.425557, 0.574443], [0.598688, 0.401312]], atol=1e-6
    )
    assert found["class_ids"].tolist() == [[1], [0]]
    assert found["all_class_ids"].tolist() == [[0, 1], [0, 1]]
    host = head._host_predictions(found)
    assert host["classes"].tolist() == [[b"1"], [b"0"]]
    assert host["all_classes"].tolist() == [[b"0", b"1"]] * 2


def test_binary_metrics():
    found = metrics_of(BinaryClassHead(), [[45.0], [-41.0]], [[1], [1]])
    expected = {
        "average_loss": 20.5, "accuracy": 0.5, "precision": 1.0, "recall": 0.5, "prediction/mean": 0.5,
        "label/mean": 1.0, "accuracy_baseline": 1.0, "auc": 0.0, "auc_precision_recall": 1.0,
    }  # fmt: skip
    assert_close(found, expected)


def test_binary_metrics_with_weights():
    head = BinaryClassHead("weight")
    features = {"weight": np.array([[1.0], [0.1], [1.5]], FLOATS)}
    logits, labels = [[45.0], [-41.0], [44.0]], [[1], [1], [0]]
    # Losses 0, 41 and 44 with these weights: 70.1, of weights 2.6.
    loss = head.loss(np.array(labels), np.array(logits, FLOATS), features)
    assert float(loss) == pytest.approx(70.1 / 3, rel=1e-6)
    found = metrics_of(head, logits, labels, features)
    logistic = (1.0 + 0.1 * 0 + 1.5) / 2.6
    assert found["average_loss"] == pytest.approx(70.1 / 2.6, rel=1e-6)
    assert found["accuracy"] == pytest.approx(1 / 2.6)
    assert found["precision"] == pytest.approx(1 / 2.5)
    assert found["recall"] == pytest.approx(1 / 1.1)
    assert found["prediction/mean"] == pytest.approx(logistic)
    assert found["label/mean"] == pytest.approx(1.1 / 2.6)
    assert found["accuracy_baseline"] == pytest.approx(max(1.1, 1.5) / 2.6)
    weights = features["weight"][:, 0]
    auc = keras.metrics.AUC()
    auc.update_state(np.array(labels)[:, 0], 1 / (1 + np.exp(-np.array(logits)[:, 0])), weights)
    assert found["auc"] == pytest.approx(float(auc.result()))


def test_binary_thresholds_and_names():
    head = BinaryClassHead(thresholds=[0.25, 0.9], name="clicks")
    found = metrics_of(head, [[-1.0], [1.0]], [[1], [1]])
    assert found["accuracy/positive_threshold_0.25/clicks"] == 1.0
    assert found["accuracy/positive_threshold_0.9/clicks"] == 0.0
    assert found["recall/positive_threshold_0.25/clicks"] == 1.0
    assert found["precision/positive_threshold_0.9/clicks"] == 0.0


def test_many_classes():
    head = MultiClassHead(3, label_vocabulary=["a", "b", "c"])
    logits = [[10.0, 0.0, 0.0], [0.0, 10.0, 0.0]]
    labels = head._host_labels(np.array([["b"], ["b"]]))
    assert labels.tolist() == [[1], [1]]
    loss = head.loss(labels, np.array(logits, FLOATS))
    assert float(loss) == pytest.approx((10 + 2 * np.log1p(2 * np.exp(-10))) / 2, rel=1e-5)
    assert_close(metrics_of(head, logits, labels), {"average_loss": float(loss), "accuracy": 0.5})
    found = head._host_predictions(head.predictions(np.array(logits, FLOATS)))
    assert found["classes"].tolist() == [[b"a"], [b"b"]]
    np.testing.assert_allclose(np.asarray(found["probabilities"]).sum(1), 1, rtol=1e-6)


def test_many_labels():
    head = MultiLabelHead(2, label_vocabulary=["cat", "dog"], classes_for_class_based_metrics=["dog"])
    logits = np.array([[-10.0, 10.0], [-15.0, 10.0]], FLOATS)
    labels = np.array([[1, 0], [1, 1]])
    # The cross entropies are 10, 10 and 15, 0; their means over classes are 10 and 7.5.
    assert float(head.loss(labels, logits)) == pytest.approx((10 + 7.5) / 2, rel=1e-4)
    found = metrics_of(head, logits, labels)
    assert found["average_loss"] == pytest.approx(8.75, rel=1e-4)
    assert found["probability_mean/dog"] == pytest.approx(1.0, abs=1e-4)
    assert {"auc/dog", "auc_precision_recall/dog", "auc", "auc_precision_recall"} <= set(found)
    assert head._host_predictions(head.predictions(logits))["classes"].tolist() == [[b"cat", b"dog"]] * 2


def test_regression():
    head = RegressionHead(2, weight_column="weight")
    logits = np.array([[1.0, 2.0], [3.0, 4.0]], FLOATS)
    labels = np.array([[0.0, 2.0], [3.0, 6.0]], FLOATS)
    features = {"weight": np.array([1.0, 3.0], FLOATS)}
    # Squared errors 1, 0 and, three times, 0 and 4.
    assert float(head.loss(labels, logits, features)) == pytest.approx(13 / 4)
    expected = {
        "average_loss": 13 / 8, "prediction/mean": (3 + 3 * 7) / 8, "label/mean": (2 + 3 * 9) / 8,
    }  # fmt: skip
    assert_close(metrics_of(head, logits, labels, features), expected)
    assert float(RegressionHead().loss([1.0], [[3.0]], regularization_losses=[0.5])) == pytest.approx(4.5)


def test_poisson_and_logistic_regression():
    logits = np.array([[0.0], [-1.0], [1.0]], FLOATS)
    labels = np.array([[1.0], [2.0], [3.0]], FLOATS)
    plain = np.exp(logits) - labels * logits
    assert float(PoissonRegressionHead(compute_full_loss=False).loss(labels, logits)) == pytest.approx(
        plain.mean(), rel=1e-6
    )
    stirling = labels * np.log(labels) - labels + 0.5 * np.log(2 * np.pi * labels)
    full = (plain + np.where(labels > 1, stirling, 0)).mean()
    assert float(PoissonRegressionHead().loss(labels, logits)) == pytest.approx(full, rel=1e-6)
    half = LogisticRegressionHead()
    expected = keras.losses.BinaryCrossentropy(from_logits=True)(np.full((3, 1), 0.5, FLOATS), logits)
    assert float(half.loss(np.full((3, 1), 0.5), logits)) == pytest.approx(float(expected), rel=1e-6)
    assert sorted(half.predictions(logits)) == ["logits", "predictions"]


def test_several_heads():
    """The numbers of the example in TensorFlow's `MultiHead`."""
    head = MultiHead([MultiLabelHead(2, name="head1"), MultiLabelHead(3, name="head2")], [2.0, 0.5])
    every = np.array([[-10, 10, 20, -20, 20], [-15, 10, -30, 20, -20]], "f4")
    logits = {"head1": every[:, :2], "head2": every[:, 2:]}
    labels = {"head1": np.array([[1, 0], [1, 1]]), "head2": np.array([[0, 1, 0], [1, 1, 0]])}
    for given in (logits, every):
        assert float(head.loss(labels, given)) == pytest.approx(2 * 8.75 + 0.5 * 15.0, rel=1e-4)
    found = head.update_metrics(head.metrics([1.0]), {}, every, labels, [1.0])
    results = {name: round(float(metric.result()), 2) for name, metric in found.items()}
    assert results == {
        "regularization_loss/head1_head2": 1.0, "loss/head1": 8.75, "loss/head2": 15.0,
        "average_loss/head1": 8.75, "average_loss/head2": 15.0, "auc/head1": 0.17, "auc/head2": 0.33,
        "auc_precision_recall/head1": 0.6, "auc_precision_recall/head2": 0.4,
    }  # fmt: skip
    spec = head.create_estimator_spec({}, "infer", every)
    assert spec.predictions["head2", "logits"].tolist() == every[:, 2:].tolist()
    assert set(spec.export_outputs) == {
        "serving_default", "head1", "predict/head1", "head2", "predict/head2",
    }  # fmt: skip
    assert head._host_predictions({("head2", "logits"): every[:, 2:]})["head2", "classes"].shape == (2, 3)
    assert head.loss_reduction == "sum_over_batch_size"


def test_an_own_loss():
    head = RegressionHead(loss_fn=lambda labels, logits: abs(labels - logits))
    assert float(head.loss([[1.0], [4.0]], [[3.0], [4.0]])) == 1.0
    wrong = RegressionHead(loss_fn=lambda y, p: y)
    with pytest.raises(unisono.InvalidArgumentError, match="`labels` and `logits`"):
        wrong.loss([[1.0]], [[1.0]])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BinaryClassHead(loss_reduction="none"), "loss_reduction must be"),
        (lambda: BinaryClassHead(weight_column=3), "weight_column must be"),
        (lambda: BinaryClassHead(thresholds=[1.0]), "between 0 and 1"),
        (lambda: BinaryClassHead(label_vocabulary=["a"]), "a name for each of the 2"),
        (lambda: MultiClassHead(2), "n_classes must be > 2"),
        (lambda: MultiLabelHead(1), "n_classes must be > 1"),
        (lambda: MultiLabelHead(3, classes_for_class_based_metrics=[3]), "among the 3 classes"),
        (lambda: RegressionHead(0), "at least 1"),
        (lambda: BinaryClassHead().loss(None, [[1.0]]), "needs labels"),
        (lambda: BinaryClassHead().loss([[1], [0]], [[1.0]]), r"labels of shape \(1, 1\)"),
        (lambda: BinaryClassHead().loss([1], [[1.0, 2.0]]), r"logits of shape \(batch, 1\)"),
        (lambda: BinaryClassHead().predictions([[1.0]], ["class"]), "Prediction keys must be"),
        (lambda: BinaryClassHead()._host_labels([2]), "<= n_classes - 1 = 1"),
        (lambda: BinaryClassHead()._host_labels(["a"]), "need label_vocabulary"),
        (lambda: BinaryClassHead(label_vocabulary="ab")._host_labels([0]), "must be strings"),
        (lambda: BinaryClassHead(label_vocabulary="ab")._host_labels(["c"]), r"Received: \[b'c'\]"),
        (lambda: MultiHead([]), "Must specify heads"),
        (lambda: MultiHead([BinaryClassHead()]), "must have a name"),
        (lambda: MultiHead([BinaryClassHead(name="a")], [1.0, 2.0]), "the same size"),
        (lambda: MultiHead([BinaryClassHead(name="a")]).loss([1], [[1.0]]), "a dict of labels"),
        (lambda: MultiHead([BinaryClassHead(name="a")]).loss({"a": [1]}, {"b": [1.0]}), "by the names"),
        (lambda: MultiLabelHead(2)._host_labels([["a", "b"]]), "zeros and ones"),
        (lambda: RegressionHead()._host_labels(["a"]), "takes numbers"),
        (lambda: PoissonRegressionHead()._host_labels([-1.0]), "at least 0"),
        (lambda: LogisticRegressionHead()._host_labels([2.0]), "from 0 to 1"),
        (lambda: RegressionHead().create_estimator_spec({}, "train", [[1.0]], [1.0]), "an optimizer or"),
    ],
)
def test_errors(make, message):
    with pytest.raises(unisono.UnisonoError, match=message):
        make()
