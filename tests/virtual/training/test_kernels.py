"""What makes a step few kernels on a GPU, counted in the programs that the library traces for one.

Virtual CPU devices stand for GPUs. `benchmarks/gpu_kernels.py` counts the kernels themselves.
"""

import jax
import keras
import numpy as np
import pytest

import unisono
from tests.lowering import programs_on
from tests.virtual.training._digits import crossentropy, digits
from unisono.training._jaxprs import equations
from unisono.training.groups import _constant_loop, _multi_step
from unisono.training.replica import _side_by_side
from unisono.training.replica._side_by_side import side_by_side

pytestmark = pytest.mark.numbers

L = keras.layers
ONE, TWO = ["cpu:0"], ["cpu:0", "cpu:1"]


def deep(optimizer="adam", **options):
    """Ten weights: three kernels and four biases of equal sizes, and three others."""
    keras.utils.set_random_seed(3)
    layers = [L.Dense(32, activation="relu") for _ in range(4)]
    model = keras.Sequential([keras.Input((64,)), *layers, L.Dense(10)])
    model.compile(optimizer, crossentropy(), metrics=["accuracy"], **options)
    return model


def trained(devices, steps=3, optimizer="adam", **options):
    """The weights and slots of a model after some steps of `fit`."""
    x, y = (values[: 24 * steps] for values in digits())
    with unisono.MirroredStrategy(devices).scope():
        model = deep(optimizer, **options)
    history = model.fit(x, y, batch_size=24, shuffle=False, verbose=0).history
    values = [np.asarray(v) for v in (*model.trainable_variables, *model.optimizer.variables)]
    return values, [history["loss"], history["accuracy"]]


def jaxpr_of(program):
    return program.step._compiled.trace(program.donated, program.kept).jaxpr


def stacked(jaxpr):
    """The shapes of the arrays in which a program has gradients side by side."""
    barriers = [e for e in equations(jaxpr) if e.primitive.name == "optimization_barrier"]
    return sorted(v.aval.shape for e in barriers for v in e.invars if len(e.invars) == 1)


@pytest.mark.parametrize("devices", [ONE, TWO])
def test_gradients_of_equal_sizes_are_one_array_on_gpus(devices, monkeypatch):
    """To the bit what they are, so that weights, slots and logs are the same."""
    monkeypatch.setenv("UNISONO_STEPS_TOGETHER", "never")
    monkeypatch.setenv("UNISONO_RESIDENT_DATA", "0")
    with programs_on("gpu") as programs:
        ours = trained(devices)
    (program,) = programs
    assert stacked(jaxpr_of(program)) == [(3, 1024), (4, 32)]
    with programs_on("gpu") as programs, monkeypatch.context() as patch:
        patch.setattr(_side_by_side, "_MOST", 1)
        theirs = trained(devices)
    assert stacked(jaxpr_of(*programs)) == []
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_on_cpus_gradients_stay_where_they_are():
    with programs_on("cpu") as programs:
        trained(ONE)
    assert all(stacked(jaxpr_of(program)) == [] for program in programs)


def test_gradients_of_a_step_of_run():
    x, y = (values[:24] for values in digits())
    with programs_on("gpu") as programs:
        strategy = unisono.MirroredStrategy(TWO)
        with strategy.scope():
            model = deep()

        def step(x, y):
            with unisono.GradientTape() as tape:
                loss = model.loss(y, model(x, training=True))
            model.optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        strategy.run(step, (x, y))
    assert [stacked(jaxpr_of(program)) for program in programs] == [[(3, 1024), (4, 32)]]


def test_where_xla_divides_the_program_each_gradient_lies_in_its_own_way():
    x, y = (values[:24] for values in digits())
    with programs_on("gpu") as programs:
        with unisono.MirroredStrategy(TWO, devices_per_replica=2).scope():
            model = deep()
        model.fit(x, y, batch_size=24, verbose=0)
    assert programs
    assert all(stacked(jaxpr_of(program)) == [] for program in programs)


def test_large_gradients_and_none_stay_as_they_are():
    large, small = jax.numpy.ones(_side_by_side._SMALL + 1), jax.numpy.ones((2, 3))
    given = side_by_side([large, None, small, 2 * large, small.astype("bfloat16"), 3 * small.T])
    assert given[0] is large
    assert given[1] is None
    assert given[4].dtype == "bfloat16"
    np.testing.assert_array_equal(given[5], 3 * small.T)


def carried_scalars(jaxpr):
    """How many scalars of floats the loop of steps carries, and how many arrays of all."""
    loops = [e for e in equations(jaxpr) if e.primitive.name in ("while", "scan")]
    carried = max(([v.aval for v in loop.outvars] for loop in loops), key=len)
    return sum(not x.shape and x.dtype == "float32" for x in carried), len(carried)


@pytest.mark.parametrize("devices", [ONE, TWO])
def test_a_loop_carries_its_scalars_in_one_array(devices, monkeypatch):
    """Sums and counts of loss and accuracy, and the learning rate; the logs of a step are one array, too."""
    monkeypatch.setenv("UNISONO_STEPS_TOGETHER", "always")
    with programs_on("gpu") as programs:
        ours = trained(devices, steps=12)
    # Eleven steps, and the last.
    loop, _ = programs
    # The steps' number, the optimizer's, weights with two slots for each, the scalars and the logs.
    assert carried_scalars(jaxpr_of(loop)) == (0, 2 + 3 * 10 + 1 + 1)
    # To the bit the loop that carries each scalar by itself.
    unpacked = lambda step, slots, is_masked: _multi_step.multi_step_program(step, slots)  # noqa: E731
    monkeypatch.setattr(_constant_loop, "constant_loop", unpacked)
    with programs_on("gpu") as programs:
        theirs = trained(devices, steps=12)
    assert carried_scalars(jaxpr_of(next(iter(programs)))) == (5, 2 + 3 * 10 + 5 + 2)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_evaluation_and_prediction_in_loops(monkeypatch):
    x, y = (values[: 24 * 12] for values in digits())
    results = []
    for together in ("always", "never"):
        monkeypatch.setenv("UNISONO_STEPS_TOGETHER", together)
        with programs_on("gpu"):
            with unisono.MirroredStrategy(ONE).scope():
                model = deep()
            results.append([model.evaluate(x, y, 24, verbose=0), model.predict(x, 24, verbose=0)])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), *results)
