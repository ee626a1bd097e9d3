"""State of callbacks is restored, arguments are the program's."""

import json
import math

import keras
import numpy as np
import pytest

from unisono.callbacks._callback_state import CallbackBaseline, set_state_of, state_of
from unisono.checkpoint._json_state import decode, encode

C = keras.callbacks


def saved(callback, train):
    """The state after `train`, as a backup holds it."""
    made = CallbackBaseline.of(callback)
    train(callback)
    arrays = {}
    state = json.loads(json.dumps(encode(state_of(callback, made), arrays, "x")))
    return decode(state, arrays)


def resumed(callback, state, begin=lambda callback: None):
    made = CallbackBaseline.of(callback)
    begin(callback)
    return set_state_of(callback, state, made)


def train_early_stopping(callback):
    callback.set_model(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]))
    callback.on_train_begin()
    for epoch, loss in enumerate([1.0, 0.5, 0.6]):
        callback.on_epoch_end(epoch, {"loss": loss})


def early_stopping(**arguments):
    return C.EarlyStopping("loss", restore_best_weights=True, **arguments)


def test_arguments_are_the_programs_and_state_is_restored():
    state = saved(early_stopping(patience=3, min_delta=0.1), train_early_stopping)
    callback = early_stopping(patience=50, min_delta=0.25)
    said = resumed(callback, state, lambda c: c.on_train_begin())
    assert said == ["min_delta=0.25, in the backup 0.1", "patience=50, in the backup 3"]
    assert (callback.patience, callback.best, callback.wait) == (50, 0.5, 1)
    assert len(callback.best_weights) == 2
    # Keras negates it when it finds out which way the monitor goes, which happens once.
    assert callback.min_delta == 0.25
    callback.set_model(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]))
    callback.on_epoch_end(3, {"loss": 0.3})
    assert (callback.min_delta, callback.wait, callback.best) == (-0.25, 2, 0.5)


def test_nothing_is_said_where_arguments_are_equal():
    state = saved(early_stopping(patience=3, baseline=math.nan), train_early_stopping)
    assert resumed(early_stopping(patience=3, baseline=math.nan), state) == []


def test_an_attribute_of_another_name_than_its_argument_is_the_programs():
    state = saved(C.CSVLogger("a.csv", separator=";"), lambda c: None)
    callback = C.CSVLogger("b.csv", separator=",")
    assert len(resumed(callback, state)) == 2
    assert (callback.sep, callback.filename) == (",", "b.csv")


class Counting(C.Callback):
    """An argument that is state too."""

    def __init__(self, count=0, scale=None):
        super().__init__()
        self.count, self.scale, self.seen = count, np.ones(2) if scale is None else scale, []

    def train(self):
        self.count += 5
        self.seen.append(self.count)


def test_an_argument_that_training_has_changed_is_state():
    state = saved(Counting(1), Counting.train)
    callback = Counting(2, np.zeros(2))
    assert resumed(callback, state) == ["scale=array([0., 0.]), in the backup array([1., 1.])"]
    assert (callback.count, callback.seen, callback.scale.tolist()) == (6, [6], [0, 0])


def test_of_a_callback_that_has_trained_only_arguments_are_kept():
    """A notebook calls `fit` again with the same objects after an error."""
    state = saved(early_stopping(patience=3), lambda c: None)
    callback = early_stopping(patience=4)
    train_early_stopping(callback)
    assert resumed(callback, state) == ["patience=4, in the backup 3"]
    assert (callback.wait, callback.best_weights) == (0, None)


def test_backups_of_earlier_versions_do_not_say_what_was_an_argument():
    state = saved(early_stopping(patience=3), train_early_stopping)
    del state["initial"]
    callback = early_stopping(patience=50)
    assert resumed(callback, state) == []
    assert (callback.patience, callback.wait) == (3, 1)
    assert callback.monitor_op is keras.ops.less


class Own(C.Callback):
    def __init__(self, first):
        super().__init__()
        self.first = first

    def get_state(self):
        return {"first": self.first}

    def set_state(self, state):
        self.first = state["first"]


def test_a_callback_with_a_state_of_its_own_decides_itself():
    state = saved(Own(1), lambda c: None)
    callback = Own(2)
    assert resumed(callback, state) == []
    assert callback.first == 1


@pytest.mark.parametrize("kind", [C.ReduceLROnPlateau, C.EarlyStopping])
def test_callbacks_of_keras_can_be_restored_before_their_first_epoch(kind):
    state = saved(kind("loss"), lambda c: None)
    callback = kind("loss")
    resumed(callback, state)
    assert callback.monitor_op is None


@pytest.mark.parametrize("name", ["monitor_op", "on_epoch_end"])
@pytest.mark.parametrize("path", [("os", "system"), ("builtins", "exec"), ("no module", "x"), 7, [[], {}]])
def test_a_backup_does_not_choose_among_all_functions(name, path, caplog):
    callback = C.ReduceLROnPlateau("loss")
    before = getattr(callback, name)
    state = {"attributes": {"on_train_end": "x"}, "functions": {name: path}, "initial": {}}
    set_state_of(callback, state, CallbackBaseline.of(callback))
    assert getattr(callback, name) == before
    assert callable(callback.on_train_end)
    # A method is no state, and is passed over without a word.
    assert ("is what the program gave it" in caplog.text) == (name == "monitor_op")
