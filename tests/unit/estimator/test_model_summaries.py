"""Summaries of a model_fn are recorded with what they need of a step."""

import jax.numpy as jnp
import keras
import numpy as np
import pytest
from tests.event_files import read

import unisono
from unisono.estimator import metrics, summary
from unisono.estimator._train_op import ModelCall, entered_call
from unisono.estimator.hooks._summaries import write_summaries


@pytest.fixture
def call():
    with entered_call(ModelCall("train", None, None)) as call:
        yield call


def test_all_kinds_are_recorded_and_written(call, tmp_path):
    assert summary.merge_all() is None
    recorded = [
        summary.scalar("loss", 2.0),
        summary.scalar("loss", jnp.ones((1, 1))),
        summary.scalar("accuracy", metrics.accuracy([1, 1], [1, 0])[1], family="train"),
        summary.histogram("weights", keras.Variable([1.0, 2.0])),
        summary.image("picture", np.ones((5, 4, 4, 1)), max_outputs=2),
        summary.text("note", "a *note*"),
    ]
    tags = ["loss", "loss_1", "train/accuracy", "weights", "picture", "note"]
    assert [s.tag for s in recorded] == tags
    assert summary.merge_all() == recorded == summary.merge([recorded[0], recorded[1:]])
    assert call.exposed[recorded[4].key].shape == (2, 4, 4, 1)
    writer = unisono.summary.create_file_writer(str(tmp_path))
    write_summaries(writer, recorded, call.exposed, 7)
    writer.close()
    values, plugins = read(tmp_path)
    assert sorted(plugins) == sorted(tags)
    assert [(s, float(v)) for s, v in values["train/accuracy"]] == [(7, 0.5)]
    assert [(s, float(v)) for s, v in values["loss_1"]] == [(7, 1.0)]


def test_floats_of_images_are_scaled_one_by_one(call):
    pictures = np.zeros((3, 1, 2, 1), "f4")
    pictures[0, 0, :, 0] = 0, 5
    pictures[1, 0, :, 0] = -2, 1
    found = np.asarray(call.exposed[summary.image("p", pictures).key])[:, 0, :, 0]
    np.testing.assert_allclose(found, [[0, 1], [0, 0.75], [0, 0]])
    whole = np.full((1, 1, 1, 3), 200, "uint8")
    np.testing.assert_array_equal(call.exposed[summary.image("q", whole).key], whole)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: summary.scalar("x", [1.0, 2.0]), "one number"),
        (lambda: summary.image("x", np.ones((2, 2))), "channels"),
        (lambda: summary.text("x", 3), "strings"),
    ],
)
def test_mistakes(call, make, match):
    with pytest.raises(unisono.InvalidArgumentError, match=match):
        make()


@pytest.mark.parametrize(
    "make", [lambda: summary.scalar("x", 1.0), lambda: summary.text("x", "y"), summary.merge_all]
)
def test_outside_of_a_model_fn(make):
    with pytest.raises(unisono.ContextError, match=r"summary\."):
        make()
