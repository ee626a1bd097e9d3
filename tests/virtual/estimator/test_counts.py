"""How many programs an Estimator compiles, and how often it waits for the devices."""

import keras
import numpy as np
import pytest

import unisono
from tests.support import count_compiles, count_host_reads
from unisono.data import Dataset
from unisono.estimator import Estimator, EstimatorSpec, RunConfig
from unisono.estimator._estimator import data_of
from unisono.estimator._train_op import minimize
from unisono.estimator.session._model_step import ModelFunction
from unisono.estimator.session._train import Training, TrainTask

X, Y = np.ones((800, 2), "float32"), np.ones((800, 1), "float32")


def model_fn(features, labels, mode):
    loss = keras.ops.mean((keras.layers.Dense(1)(features) - labels) ** 2)
    return EstimatorSpec(mode, loss=loss, train_op=minimize(keras.optimizers.SGD(0.1), loss))


def training(strategy, batch, steps, directory):
    config = RunConfig(save_checkpoints_secs=None, save_summary_steps=0, log_step_count_steps=100)
    task = TrainTask(ModelFunction(model_fn, None, config), config, strategy, str(directory), [])
    elements = data_of(lambda: Dataset.from_tensor_slices((X, Y)).batch(batch).take(steps), strategy, {})
    return Training(task, elements)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_hundred_steps_are_one_program_and_wait_rarely(devices, tmp_path):
    strategy = unisono.MirroredStrategy([f"cpu:{i}" for i in range(devices)])
    counts = []
    for steps in (10, 100):
        run = training(strategy, 8 // devices, steps * devices, tmp_path)
        # As on a fast machine, from the first program on.
        run.runner._pace.size = run.runner._pace.wish = 32
        with count_host_reads() as reads:
            run.run()
        counts.append(len(reads))
        assert int(run.variables.global_step.value) == steps
        assert run.runner.num_programs == 1
    # Programs of 32, 32, 32 and 4 steps, each of which waits for the last but one; none for each step.
    assert counts[1] - counts[0] < 15


def test_a_second_estimator_of_the_same_kind_compiles_the_step_alone(tmp_path):
    def call(name):
        config = RunConfig(save_checkpoints_secs=None, save_summary_steps=0)
        with count_compiles() as compiled:
            Estimator(model_fn, tmp_path / name, config).train(
                lambda: Dataset.from_tensor_slices((X, Y)).batch(8)
            )
        return len(compiled)

    call("first")
    assert call("second") <= 2
