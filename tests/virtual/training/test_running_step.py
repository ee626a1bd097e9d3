"""`unisono.spi.running_step`: what code in a step may ask, and what it declares."""

import jax.numpy as jnp
import keras
import numpy as np

import unisono
from unisono.spi import running_step


def in_replicas(fn):
    """What `fn(replica's number)` returns on two replicas."""
    strategy = unisono.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        variable = keras.Variable(0.0, name="v", aggregation="sum")

    def step():
        return fn(unisono.get_replica_context().replica_id_in_sync_group, variable)

    found = strategy.experimental_local_results(strategy.run(step))
    return np.asarray(found, dtype=float).tolist(), variable


def test_outside_of_a_step_it_answers_as_one_replica():
    step, gradient, variable = running_step(), jnp.ones(2), keras.Variable(1.0)
    assert step.aggregate([gradient], [variable])[0] is gradient
    with step.averaging(True), step.alike():
        variable.assign(2.0)
    assert not step.has_written(variable)
    assert not step.is_repeated


def test_gradients_are_summed_or_averaged():
    def of_replica(number, variable):
        gradients = [jnp.asarray(number + 1.0)]
        summed = running_step().aggregate(gradients, [variable])[0]
        with running_step().averaging(True):
            mean = running_step().aggregate(gradients, [variable])[0]
            averages = running_step().averages
        return jnp.stack([summed, mean, jnp.asarray(float(averages and not running_step().averages))])

    assert in_replicas(of_replica)[0] == [[3.0, 1.5, 1.0]] * 2


def test_what_is_declared_alike_is_not_merged():
    def of_replica(number, variable):
        before = running_step().has_written(variable)
        with running_step().alike():
            variable.assign_add(1.0)
        facts = before, running_step().has_written(variable), running_step().is_repeated
        return jnp.asarray(facts, float)

    found, variable = in_replicas(of_replica)
    assert found == [[0.0, 1.0, 1.0]] * 2
    assert float(variable.value) == 1.0, "not the sum over replicas"
