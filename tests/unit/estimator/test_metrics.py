"""Metrics of two batches give TensorFlow's numbers, as recorded in tensorflow_v1_results.json."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.tensorflow_v1_results import CASES, RESULTS, halves

import unisono
from unisono.estimator import metrics
from unisono.estimator._spec import metric_of
from unisono.estimator._train_op import ModelCall, entered_call

WANTED = json.loads(RESULTS.read_text())["metrics"]


class OneMetric:
    """`metrics`, whose calls update one metric, as the calls of a model_fn in a loop do."""

    metric = None

    def __getattr__(self, name):
        return functools.partial(self._updated, getattr(metrics, name))

    def _updated(self, function, *args, **kwargs):
        pair = function(*args, **kwargs)
        if self.metric is None:
            self.metric = pair.metric
        else:
            for own, new in zip(self.metric.variables, pair.metric.variables, strict=True):
                own.assign_add(new.value)
        return pair


@pytest.mark.parametrize("expression", CASES["metrics"])
def test_as_tensorflow(expression):
    one = OneMetric()
    for batch in halves():
        eval(f"metrics.{expression}", {"metrics": one, **batch})
    np.testing.assert_allclose(one.metric.result(), WANTED[expression], rtol=2e-6, atol=2e-7)


def test_a_pair_is_a_metric_that_is_updated_once():
    value, updated = pair = metrics.mean([1.0, 3.0])
    assert float(value) == float(updated) == 2.0
    assert len(pair) == 2
    assert metric_of(pair) is pair.metric
    pair.update()
    assert float(pair.metric.variables[1].value) == 2.0
    pair.metric.reset_state()
    assert float(pair[0]) == 0.0


def test_in_training_a_metric_is_updated_where_it_is_read():
    with entered_call(ModelCall("train", None, None)) as call:
        pair = metrics.accuracy([1, 1], [1, 0])
        assert metric_of(pair) is pair.metric
        assert float(pair[0]) == 0.0
        assert float(pair[1]) == 0.5
        assert [float(v) for v in call.exposed.values()] == [0.0, 0.5]
    with entered_call(ModelCall("eval", None, None)):
        pair = metrics.accuracy([1, 1], [1, 0])
        assert float(pair[0]) == 0.5


def test_names_are_those_of_tensorflow_and_unique():
    with entered_call(ModelCall("eval", None, None)):
        names = [
            metrics.accuracy([1], [1]).metric.name,
            metrics.accuracy([1], [1]).metric.name,
            metrics.mean([1.0], name="m").metric.name,
            metrics.precision_at_k([1], [[0.0, 1.0]], 1).metric.name,
            metrics.recall_at_k([1], [[0.0, 1.0]], 2, class_id=1).metric.name,
            metrics.auc([1], [1.0]).metric.name,
        ]
    wanted = ["accuracy", "accuracy_1", "m", "precision_at_1", "recall_at_2_class1", "auc"]
    assert names == wanted


def test_old_names():
    assert metrics.sparse_precision_at_k is metrics.precision_at_k
    assert metrics.sparse_average_precision_at_k is metrics.average_precision_at_k
    with pytest.raises(AttributeError, match="accuracy"):
        metrics.acuracy  # noqa: B018


def test_metrics_are_traced():
    @jax.jit
    def area(labels, predictions):
        return metrics.auc(labels, predictions, num_thresholds=50).metric.variables[0].shape[0]

    # A variable made under a trace has its value there alone: the shape is known.
    assert int(area(jnp.array([0, 1]), jnp.array([0.2, 0.7]))) == 50


def test_empty_batches_change_nothing():
    empty = np.zeros(0, "float32")
    assert float(metrics.mean(empty)[1]) == 0.0
    assert float(metrics.accuracy(empty, empty)[1]) == 0.0
    assert np.isfinite(metrics.auc(empty, empty)[1])


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: metrics.accuracy([1, 2], [1, 2, 3]), "same shape"),
        (lambda: metrics.mean([1.0, 2.0], [1.0, 2.0, 3.0]), "weights"),
        (lambda: metrics.auc([1], [1.5]), "from 0 to 1"),
        (lambda: metrics.auc([1], [0.5], curve="roc"), "curve"),
        (lambda: metrics.auc([1], [0.5], summation_method="left"), "summation_method"),
        (lambda: metrics.sensitivity_at_specificity([1], [0.5], 2), "specificity"),
        (lambda: metrics.precision_at_k([1], [[0.5, 0.5]], 3), "`k`"),
    ],
)
def test_mistakes(call, match):
    with pytest.raises(unisono.InvalidArgumentError, match=match):
        call()
