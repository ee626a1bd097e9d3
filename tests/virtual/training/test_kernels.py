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
    found = []
    for together in ("always", "never"):
        monkeypatch.setenv("UNISONO_STEPS_TOGETHER", together)
        with programs_on("gpu"):
            with unisono.MirroredStrategy(ONE).scope():
                model = deep()
            found.append([model.evaluate(x, y, 24, verbose=0), model.predict(x, 24, verbose=0)])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), *found)
