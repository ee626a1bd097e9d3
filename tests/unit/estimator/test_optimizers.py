"""Optimizers take TensorFlow's 20 steps, as recorded in tensorflow_v1_results.json; so do learning rates."""

import json

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from tests.tensorflow_v1_results import CASES, RESULTS, STEPS, start

import unisono
from unisono.estimator import losses, train
from unisono.estimator._train_op import ModelCall, TrainOp, entered_call

WANTED = json.loads(RESULTS.read_text())

OPTIMIZERS = {name: getattr(train, name) for name in dir(train) if name.endswith("Optimizer")}
DECAYS = {name: getattr(train, name) for name in dir(train) if "decay" in name or "piecewise" in name}


@pytest.mark.parametrize("expression", CASES["optimizers"])
def test_as_tensorflow(expression):
    first, x, y = start()
    step, weights = keras.Variable(0, dtype="int32", trainable=False), keras.Variable(first)
    # A model_fn computes its learning rate anew in each step.
    rates = {n: lambda *a, f=f, **k: lambda: f(*a, **k) for n, f in DECAYS.items()}
    optimizer = eval(expression, {**OPTIMIZERS, **rates, "step": step}).optimizer
    optimizer.build([weights])

    @jax.jit
    def run(state, i, rows, targets):
        variables = [weights, *optimizer.variables]
        with keras.StatelessScope([(step, i), *zip(variables, state, strict=True)]) as scope:
            grad = jax.grad(lambda w: losses.mean_squared_error(targets, rows @ w))(weights.value)
            optimizer.apply([grad], [weights])
        return [
            scope.get_current_value(v) if scope.get_current_value(v) is not None else v for v in variables
        ]

    state, path = [v.value for v in (weights, *optimizer.variables)], []
    for i in range(len(x)):
        state = run(state, jnp.int32(i), x[i], y[i])
        path.append(np.asarray(state[0]))
    np.testing.assert_allclose(path, WANTED["optimizers"][expression], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("expression", CASES["decays"])
def test_learning_rates_as_tensorflow(expression):
    rates = [float(eval(expression, {**DECAYS, "step": step})) for step in STEPS]
    np.testing.assert_allclose(rates, WANTED["decays"][expression], rtol=2e-6, atol=1e-7)
    variable = keras.Variable(STEPS[3], dtype="int32", trainable=False)
    assert float(eval(expression, {**DECAYS, "step": variable})) == rates[3]


def test_a_number_as_a_learning_rate_is_part_of_the_program():
    with entered_call(ModelCall("train", None, None)):
        optimizer = train.AdamOptimizer(0.25).optimizer
    optimizer.build([keras.Variable(1.0)])
    assert not [v for v in optimizer.variables if "learning_rate" in v.path]
    assert float(optimizer.learning_rate) == 0.25
    rate = keras.Variable(0.5)
    optimizer = train.GradientDescentOptimizer(rate).optimizer
    rate.assign(0.125)
    assert float(optimizer.learning_rate) == 0.125


@pytest.mark.parametrize("make", [train.RMSPropOptimizer, train.ProximalAdagradOptimizer])
def test_outside_of_a_model_fn_it_is_an_optimizer_for_keras(make):
    optimizer = make(0.25).optimizer
    again = type(optimizer).from_config(optimizer.get_config())
    variable, other = keras.Variable(1.0), keras.Variable(1.0)
    for _ in range(2):
        optimizer.apply([jnp.float32(1)], [variable])
        again.apply([jnp.float32(1)], [other])
    assert float(variable.value) == float(other.value) != 1.0
    optimizer.learning_rate = 0.5
    assert float(optimizer.learning_rate.value) == 0.5


def test_a_schedule_of_keras_is_a_learning_rate():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1], [1.0, 0.5])
    optimizer, variable = train.GradientDescentOptimizer(schedule).optimizer, keras.Variable(0.0)
    for _ in range(3):
        optimizer.apply([jnp.float32(1)], [variable])
    assert float(variable.value) == -2.5


def test_applying_gradients_is_deferred_in_a_model_fn():
    variable, step = keras.Variable(1.0), keras.Variable(0, dtype="int32", trainable=False)
    optimizer = train.GradientDescentOptimizer(0.5)
    with entered_call(ModelCall("train", None, None)):
        update = optimizer.apply_gradients([(jnp.float32(1), variable)], step)
    assert isinstance(update, TrainOp)
    assert (update.optimizer, update.global_step) == (optimizer.optimizer, step)
    assert float(variable.value) == 1.0
    assert optimizer.apply_gradients([(jnp.float32(1), variable)], step) is None
    assert (float(variable.value), int(step.value)) == (0.5, 1)


def test_outside_of_a_model_fn():
    optimizer = train.AdamOptimizer()
    for call in (optimizer.minimize, optimizer.compute_gradients):
        with pytest.raises(unisono.ContextError, match="model_fn"):
            call(jnp.float32(1), var_list=[keras.Variable(1.0)])
        with pytest.raises(unisono.UnsupportedError, match="grad_loss"):
            call(jnp.float32(1), grad_loss=1.0)
    assert train.get_or_create_global_step() == "global_step" == train.create_global_step()


def test_names_are_unique_in_a_model_fn():
    with entered_call(ModelCall("train", None, None)):
        names = [train.AdamOptimizer().get_name(), train.AdamOptimizer().get_name()]
    assert names == ["Adam", "Adam_1"]


def test_what_a_strategy_does_instead():
    with pytest.raises(unisono.UnsupportedError, match="MultiWorkerMirroredStrategy"):
        train.SyncReplicasOptimizer(train.AdamOptimizer(), replicas_to_aggregate=2)


def test_mistakes():
    with pytest.raises(unisono.InvalidArgumentError, match="global_step"):
        train.exponential_decay(0.1, None, 10, 0.5)
    with pytest.raises(unisono.InvalidArgumentError, match="boundaries"):
        train.piecewise_constant(0, [1, 2], [0.1, 0.2])
