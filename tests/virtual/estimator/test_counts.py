"""How many programs an Estimator compiles, and how often it waits for the devices."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unisono
from tests.support import count_compiles, count_host_reads
from unisono._lowering._compiler_options import Executables
from unisono.data import Dataset
from unisono.estimator import Estimator, EstimatorSpec, RunConfig
from unisono.estimator._train_op import minimize
from unisono.estimator.session._input import InputFunction
from unisono.estimator.session._model_step import ModelFunction
from unisono.estimator.session._train import Training, TrainTask
from unisono.step._dispatch import CompiledStep

X, Y = np.ones((800, 2), "float32"), np.ones((800, 1), "float32")


def model_fn(features, labels, mode):
    loss = keras.ops.mean((keras.layers.Dense(1)(features) - labels) ** 2)
    return EstimatorSpec(mode, loss=loss, train_op=minimize(keras.optimizers.SGD(0.1), loss))


def training(strategy, batch, steps, directory, model_fn=model_fn, x=X):
    config = RunConfig(save_checkpoints_secs=None, save_summary_steps=0, log_step_count_steps=100)
    task = TrainTask(
        ModelFunction(model_fn, None, config), strategy, None, config=config, model_dir=str(directory)
    )
    data = lambda: Dataset.from_tensor_slices((x, Y)).batch(batch).take(steps)  # noqa: E731
    return Training(task, InputFunction(data, {}))


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


def test_steps_that_are_slow_in_a_loop_run_one_by_one(tmp_path, monkeypatch):
    """The derivative of a depthwise convolution, which XLA compiles to slow code in the body of a loop."""

    def of_images(features, labels, mode):
        channels = keras.layers.DepthwiseConv2D(3)(features)
        return model_fn(keras.layers.Flatten()(channels), labels, mode)

    started, call = [], CompiledStep.__call__
    monkeypatch.setattr(CompiledStep, "__call__", lambda *args: started.append(0) or call(*args))
    run = training(
        unisono.OneDeviceStrategy("cpu:0"), 8, 5, tmp_path, of_images, np.ones((800, 4, 4, 2), "float32")
    )
    run.run()
    assert int(run.variables.global_step.value) == len(started) == 5
    assert run.runner.num_programs == 1


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


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_train_and_evaluate_in_turn_compiles_once(devices, tmp_path):
    strategy = unisono.MirroredStrategy([f"cpu:{i}" for i in range(devices)])
    rate = [0.1]

    def model_fn(features, labels, mode):
        labels = 0 * features[:, :1] if labels is None else labels
        hidden = keras.layers.BatchNormalization()(features, training=mode == "train")
        outputs = keras.layers.Dense(1)(keras.layers.Dropout(0.1)(hidden, training=mode == "train"))
        loss = keras.ops.mean((outputs - labels) ** 2)
        metric = keras.metrics.MeanAbsoluteError()
        metric.update_state(labels, outputs)
        train_op = minimize(keras.optimizers.Adam(lambda: rate[0]), loss)
        return EstimatorSpec(mode, outputs, loss, train_op, {"mae": metric})

    config = RunConfig(
        train_distribute=strategy, eval_distribute=strategy, save_summary_steps=0, tf_random_seed=1
    )
    estimator = Estimator(model_fn, tmp_path, config)
    data = lambda: Dataset.from_tensor_slices((X, Y)).batch(8)  # noqa: E731
    compiled, found = [], []
    for i in range(3):
        # A value that the program contains.
        rate[0] = 0.1 if i < 2 else 0.2
        with count_compiles() as own:
            estimator.train(data, steps=2)
            found.append(estimator.evaluate(data, steps=2))
            list(estimator.predict(lambda: Dataset.from_tensor_slices(X[:8]).batch(8)))
        compiled.append(len(own))
    assert compiled[1:] == [0, 1]
    again = Estimator(model_fn, tmp_path, config)
    assert again.evaluate(data, steps=2) == found[-1]


def test_a_program_that_calls_python_is_compiled_anew(tmp_path):
    seen = []

    def model_fn(features, labels, mode, params):
        add = lambda x: (seen.append(params["name"]), x)[1]  # noqa: E731
        loss = jax.pure_callback(add, jax.ShapeDtypeStruct((), "float32"), keras.ops.mean(features))
        return EstimatorSpec(mode, loss=loss + keras.ops.mean(keras.layers.Dense(1)(features)))

    estimator = Estimator(model_fn, tmp_path, params={"name": "a"})
    data = lambda: Dataset.from_tensor_slices((X, Y)).batch(800)  # noqa: E731
    estimator.evaluate(data)
    estimator._params["name"] = "b"
    estimator.evaluate(data)
    assert seen == ["a", "b"]


def test_arguments_of_another_form_are_compiled_for():
    strategy = unisono.MirroredStrategy(["cpu:0"])
    executables = Executables()

    def step(donated, kept):
        return kept[0] * 2, [donated[0] + 1]

    first, second = (CompiledStep(step, strategy.mesh, executables=executables) for _ in range(2))
    for run in (first, second):
        _, (state,) = run([jnp.zeros(())], [jnp.ones(3)])
        assert float(state) == 1.0
    assert executables.num_compiled == 1
    output, _ = second([jnp.zeros(())], [jnp.ones(5)])
    np.testing.assert_array_equal(output, 2 * np.ones(5))
