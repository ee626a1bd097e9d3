"""`unisono plan` beside what devices hold: its programs of two devices, scaled to eight."""

import dataclasses

import keras
import numpy as np
import pytest

import unisono
from unisono.cli import _model_plan, _replica_plan
from unisono.step._keras_internals import stored_value
from unisono.strategies._replicated import LAYOUTS

MODEL = """
import keras

def make_model():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([
        keras.Input((64,)), keras.layers.Dense(96, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model
"""


def options(file, devices=8):
    return _model_plan.PlanOptions(str(file), devices, 4, 0, 1.25e9, None, 0.01)


def test_state_of_eight_devices_is_what_they_hold(tmp_path):
    file = tmp_path / "model.py"
    file.write_text(MODEL)
    size = _model_plan.examine(options(file))
    for layout in LAYOUTS:
        strategy = unisono.MirroredStrategy([f"cpu:{i}" for i in range(8)], state_layout=layout)
        with strategy.scope():
            model = _plan_model(file)
        model.fit(np.zeros((32, 64), "float32"), np.zeros(32, "int32"), batch_size=32, verbose=0)
        # A few scalars are in one and not in the other.
        assert size.state_of(layout, 8) == pytest.approx(held_by(model), abs=64), layout
    assert (size.weights, size.gradients) == (4 * 7210, 4 * 7210)
    # At least the activations of four rows, and the gradients.
    assert size.temporary["mirrored"] > size.gradients + 4 * 4 * 96


def _plan_model(file):
    return options(file).load()[0]()


def held_by(model):
    """The bytes of a model's state on the first device."""
    variables = {id(v): v for v in (*model.variables, *model.optimizer.variables)}.values()
    arrays = [getattr(held, "parts", held) for held in map(stored_value, variables)]
    return sum(s.data.nbytes for array in arrays for s in array.addressable_shards if s.device.id == 0)


def test_a_batch_follows_from_a_functional_model():
    inputs = {"a": keras.Input((3,), name="a"), "b": keras.Input((2,), dtype="int32", name="b")}
    joined = keras.layers.Concatenate()([inputs["a"], keras.ops.cast(inputs["b"], "float32")])
    model = keras.Model(inputs, keras.layers.Dense(4)(joined))
    model.compile("sgd", "mse")
    x, y = _model_plan.batch_for(model, 6)
    assert [(x[k].shape, str(x[k].dtype)) for k in "ab"] == [((6, 3), "float32"), ((6, 2), "int32")]
    assert y.shape == (6, 4)
    np.testing.assert_array_equal(model.predict(x, verbose=0).shape, (6, 4))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("None", "must return a Keras model that is built and compiled. Received: None"),
        ("keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])", "call `model.compile"),
    ],
)
def test_a_function_that_makes_no_trainable_model(made, message, tmp_path):
    file = tmp_path / "model.py"
    file.write_text(f"import keras\ndef make_model(): return {made}\n")
    with pytest.raises(unisono.InvalidArgumentError, match="(?s)" + message):
        _model_plan.examine(options(file))


def test_a_model_of_a_form_that_a_batch_does_not_follow_from():
    model = keras.Sequential([keras.Input((None, 3)), keras.layers.LSTM(2)])
    model.compile("sgd", "mse")
    with pytest.raises(unisono.InvalidArgumentError, match=r"Write a function `make_batch\(rows\)`"):
        _model_plan.batch_for(model, 6)


def test_a_step_that_is_not_compiled_has_no_plan(tmp_path):
    file = tmp_path / "model.py"
    file.write_text(MODEL.replace('metrics=["accuracy"]', "run_eagerly=True"))
    with pytest.raises(unisono.InvalidArgumentError, match="Received: one with `run_eagerly`"):
        _model_plan.examine(options(file))


def test_a_replica_of_several_devices_is_planned_as_it_trains(tmp_path):
    file = tmp_path / "model.py"
    named = MODEL.replace("Dense(96,", "Dense(96, name='wide',")
    file.write_text(named + "layout = {'.*wide/kernel': (None, 'model')}\n")
    planned = _replica_plan.ReplicaPlanOptions(str(file), 8, 2, 4, "auto:1", None)
    plan = _replica_plan.examine(planned)
    assert plan.estimated == plan.sent
    assert plan.gathered == ()
    # With the two products whole nothing is sent in a replica, and a device holds more.
    ((title, other),) = plan.others
    assert "wide/kernel and 2 more whole" in title
    assert (other.sent, other.given > plan.given) == (0, True)
    # Column, then row: the hidden axis is cut, and the output is all-reduced once.
    assert [(w.axis, w.nbytes) for w in plan.weights] == [(1, 12288), (0, 192), (0, 1920), (None, 40)]
    inside = [m for m in plan.messages if m.is_inside]
    assert [(m.kind, m.nbytes) for m in inside if m.nbytes >= 4 * 10 * 4] == [("all-reduce", 4 * 10 * 4)]
    assert "wide/kernel" in _replica_plan.table(plan, planned)
    unknown = _replica_plan.examine(dataclasses.replace(planned, layout="other"))
    assert isinstance(unknown, unisono.InvalidArgumentError)
    assert "layout map or function" in str(unknown)
    own = _replica_plan.examine(dataclasses.replace(planned, layout="layout"))
    assert [w.axis for w in own.weights] == [1, None, None, None]


@pytest.mark.parametrize("state_layout", ["sharded", "fully_sharded"])
def test_state_in_parts_of_replicas_of_several_devices_is_what_they_hold(state_layout, tmp_path):
    """Compiled for two replicas, and scaled to four."""
    file = tmp_path / "model.py"
    file.write_text(MODEL)
    planned = _replica_plan.ReplicaPlanOptions(str(file), 8, 2, 4, "auto", None, state_layout)
    plan = _replica_plan.examine(planned)
    names = [f"cpu:{i}" for i in range(8)]
    strategy = unisono.MirroredStrategy(names, devices_per_replica=2, state_layout=state_layout)
    with strategy.scope():
        model = _plan_model(file)
    model.fit(np.zeros((16, 64), "float32"), np.zeros(16, "int32"), batch_size=16, verbose=0)
    batch = 4 * 4 * (64 + 1)
    # A few scalars are in one and not in the other.
    assert plan.given - batch == pytest.approx(held_by(model), abs=64)
    large = plan.weights[0]
    assert large.nbytes == 4 * 64 * 96 / 2 / (4 if state_layout == "fully_sharded" else 1)
    assert "besides in a step" in _replica_plan.table(plan, planned)


def test_the_command_explain_prints_the_table_of_a_file(tmp_path):
    file = tmp_path / "model.py"
    centered = 'keras.layers.Lambda(lambda t: t - keras.ops.mean(t, axis=0), name="centered"),'
    for lines, shown in [("", "2 layers"), (centered, "centered: a difference")]:
        file.write_text(MODEL.replace("keras.Input((64,)),", "keras.Input((64,)), " + lines))
        table = _model_plan._explain(_model_plan.ModelFile(str(file)), 2)
        assert table.splitlines()[0].split() == ["part", "on", "2", "replicas", "because"]
        assert shown in table
    with pytest.raises(unisono.InvalidArgumentError, match="at least 2"):
        _model_plan.explain(str(file), 1)
    file.write_text("def make_model():\n    return 3\n")
    assert isinstance(_model_plan._explain(_model_plan.ModelFile(str(file)), 2), unisono.UnisonoError)
