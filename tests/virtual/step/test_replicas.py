"""Steps need no strategy: a record of devices, processes, layout and reduction is enough."""

import jax.numpy as jnp
import keras
import numpy as np

import unisono
from tests.support import devices
from unisono._mesh import ReplicaMesh, resolve_devices
from unisono._values import PerReplica
from unisono.collectives._cross_device import own_ops
from unisono.collectives._process_group import SingleProcessGroup
from unisono.step._compiler import StepCompiler
from unisono.step._layout import StateLayout
from unisono.step._replicas import Replicas
from unisono.training.trainer._trainer_step import TrainerStep, TrainerTask


def two_replicas():
    mesh = ReplicaMesh(resolve_devices(devices(2)))
    return Replicas(mesh, SingleProcessGroup(), StateLayout(mesh), own_ops(mesh.platform))


def test_a_function_runs_once_per_replica():
    total = unisono.Variable(0.0, aggregation="sum", synchronization="on_read")

    def step(x):
        context = unisono.get_replica_context()
        total.assign_add(jnp.sum(x))
        return context.all_reduce("sum", jnp.sum(x)), context.strategy.num_replicas_in_sync

    replicas = two_replicas()
    given = PerReplica((jnp.arange(3.0), jnp.arange(3.0, 6.0)))
    sums, counts = StepCompiler(replicas).run(step, (given,), {})
    assert [float(x) for x in sums.values] == [15.0, 15.0]
    assert counts == 2
    assert float(total.read_value()) == 15.0
    assert repr(replicas) == "Replicas(cpu:0, cpu:1)"


def test_a_step_of_keras_is_read():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.BatchNormalization()])
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    batch = (np.zeros((8, 3), np.float32), np.zeros((8, 2), np.float32))
    reading = TrainerStep(model, two_replicas(), TrainerTask.TRAIN).read(batch)
    assert not reading.mixes
