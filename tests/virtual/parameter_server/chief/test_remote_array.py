"""A variable whose value lies on servers is read, assigned and saved as any other."""

import copy
from concurrent.futures import Future

import keras
import numpy as np
import pytest

import unisono
from unisono.parameter_server.chief._placement import Division
from unisono.parameter_server.chief._remote_array import RemoteArray
from unisono.rpc._frames import Frame
from unisono.rpc._ops import Op
from unisono.step._keras_internals import store_value, stored_value
from unisono.step._value_handle import ValueHandle


class Server:
    """Values by number, as a client of one server gives them, and the numbers of those read and written."""

    def __init__(self):
        self.held, self.reads, self.writes = [], [], []

    def pull(self, keys):
        self.reads += [number for _, number in keys]
        return done([self.held[number] for _, number in keys])

    def write(self, key, value):
        self.writes.append(key[1])
        self.held[key[1]] = np.array(value)

    def send(self, server, op, meta, arrays=()):
        rows = slice(meta["begin"], meta["end"]) if op is Op.READ else arrays[0]
        (number,) = meta.get("ids", [meta.get("id")])
        return done(Frame(op, arrays=[self.held[number][rows]]))

    def call(self, server, op, meta, arrays):
        assert op is Op.WRITE
        self.held[meta["ids"][0]][meta["begin"] : meta["begin"] + len(arrays[0])] = arrays[0]

    def hold(self, variables):
        for variable in variables:
            array = RemoteArray(variable, Division.copies([0]), self, lambda: None)
            array.numbers = dict.fromkeys(array.division.parts, len(self.held))
            self.held.append(np.array(stored_value(variable)))
            store_value(variable, array)

    def __getitem__(self, variable):
        return self.held[self.number(variable)]

    def __setitem__(self, variable, value):
        self.held[self.number(variable)] = value

    @staticmethod
    def number(variable):
        (number,) = stored_value(variable).numbers.values()
        return number


def done(result):
    future = Future()
    future.set_result(result)
    return future


@pytest.fixture
def model():
    with unisono.OneDeviceStrategy("cpu:0").scope():
        inputs = keras.Input((3,))
        outputs = keras.layers.BatchNormalization()(keras.layers.Dense(2)(inputs))
        model = keras.Model(inputs, outputs)
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    return model


def test_reads_and_writes_go_to_the_servers(model):
    before = model.get_weights()
    server = Server()
    server.hold(model.variables)
    for got, value in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(got, value)
    kernel = model.trainable_variables[0]
    # Reading, then writing.
    kernel.assign_add(np.ones((3, 2)))
    np.testing.assert_allclose(server[kernel], before[0] + 1)
    assert server.writes == [server.number(kernel)]
    assert isinstance(stored_value(kernel), RemoteArray)
    model.set_weights(before)
    np.testing.assert_array_equal(server[kernel], before[0])
    server[kernel] = np.zeros((3, 2), "float32")
    assert not kernel.numpy().any()


def test_single_rows_are_read_and_written(model):
    server = Server()
    server.hold(model.variables)
    kernel = model.trainable_variables[0]
    held = stored_value(kernel)
    before = kernel.numpy()
    np.testing.assert_array_equal(held.rows(1, 3), before[1:])
    np.testing.assert_array_equal(held.take(np.array([2, 0, 2])), before[[2, 0, 2]])
    held.write_rows(1, np.zeros((1, 2)))
    before[1] = 0
    np.testing.assert_array_equal(kernel, before)


def test_what_needs_no_value_asks_no_server(model):
    server = Server()
    server.hold(model.variables)
    held = stored_value(model.trainable_variables[0])
    assert isinstance(held, ValueHandle)
    assert not held.is_deleted()
    assert (held.shape, held.dtype, held.ndim) == ((3, 2), np.float32, 2)
    assert model.count_params() == 16
    assert "on servers" in repr(held)
    assert not server.reads


def test_a_wrong_assignment_changes_nothing(model):
    server = Server()
    server.hold(model.variables)
    kernel = model.trainable_variables[0]
    with pytest.raises(ValueError, match="shape"):
        kernel.assign(np.zeros((2, 2)))
    with keras.StatelessScope() as scope:
        kernel.assign(np.zeros((3, 2)))
        assert not np.asarray(kernel.value).any()
    assert scope.get_current_value(kernel) is not None
    assert isinstance(stored_value(kernel), RemoteArray)
    assert not server.writes
    # Keras' loop takes a variable's value and puts it back.
    held = stored_value(kernel)
    kernel.assign(held)
    assert stored_value(kernel) is held
    assert not server.writes


def test_a_model_is_saved_and_copied_with_the_servers_values(model, tmp_path):
    server = Server()
    server.hold([*model.variables, *model.optimizer.variables])
    kernel = model.trainable_variables[0]
    server[kernel] = np.full((3, 2), 7, "float32")
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for got, variable in zip(loaded.variables, model.variables, strict=True):
        np.testing.assert_array_equal(got, server[variable])
    twin = copy.deepcopy(kernel)
    assert not isinstance(stored_value(twin), ValueHandle)
    np.testing.assert_array_equal(twin, np.full((3, 2), 7))
    number = server.number(kernel)
    store_value(kernel, stored_value(kernel).whole())
    assert not isinstance(stored_value(kernel), ValueHandle)
    kernel.assign(np.ones((3, 2)))
    assert (server.held[number] == 7).all()


def test_a_metric_gives_the_servers_result():
    with unisono.OneDeviceStrategy("cpu:0").scope():
        mean = keras.metrics.Mean()
    server = Server()
    server.hold(mean.variables)
    server.held = [np.float32(6), np.float32(4)]
    assert float(mean.result()) == 1.5
    mean.reset_state()
    assert all(value == 0 for value in server.held)
