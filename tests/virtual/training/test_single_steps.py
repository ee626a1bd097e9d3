"""`train_on_batch` and its sisters: what a step costs the host, and what users change between steps."""

import contextlib
import sys
from pathlib import Path

import jax
import keras
import numpy as np
import pytest

import unisono
from tests.support import count_compiles
from tests.virtual.training._digits import crossentropy, digits, mirrored, mlp
from unisono.step._keras_internals import training_state

L = keras.layers

METHODS = ("train_on_batch", "test_on_batch", "predict_on_batch")


def compiled(replicas=1, **changes):
    with mirrored(replicas).scope() if replicas else contextlib.nullcontext():
        keras.utils.set_random_seed(1)
        model = mlp()
        model.compile(**{"optimizer": "adam", "loss": crossentropy(), "metrics": ["accuracy"], **changes})
    return model


def single_step(model, method):
    """Return a function that calls a method for one batch, which the model knows already."""
    x, y = (a[:32] for a in digits())
    arguments = (x,) if method == "predict_on_batch" else (x, y)
    for _ in range(5):
        getattr(model, method)(*arguments)
    return lambda: getattr(model, method)(*arguments)


def puts_of(step, monkeypatch):
    """Return the arguments of each call of `jax.device_put` in a step."""
    puts, put = [], jax.device_put
    for name, module in [*sys.modules.items()]:
        if name.startswith(("jax", "keras", "unisono")) and vars(module).get("device_put") is put:
            monkeypatch.setattr(
                module, "device_put", lambda *x, **options: puts.append(x) or put(*x, **options)
            )
    step()
    return puts


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_a_step_by_itself_places_nothing_by_device_put(monkeypatch, method, replicas):
    """Keras would put the batch, twice, and the metrics that it resets: 7 calls for each `train_on_batch`."""
    assert not puts_of(single_step(compiled(replicas), method), monkeypatch)


def step_of_run(replicas, form):
    """Return a function that calls `run` with a step that was compiled, a batch and a number."""
    strategy, (x, y) = mirrored(replicas), (a[:32] for a in digits())
    with strategy.scope():
        model, optimizer = mlp(), keras.optimizers.SGD()
        optimizer.build(model.trainable_variables)

    def step(x, y, factor):
        with unisono.GradientTape() as tape:
            loss = factor * keras.ops.mean(crossentropy(reduction=None)(y, model(x, training=True)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    batch = next(iter(strategy.distribute_dataset([(x, y)]))) if form == "distributed" else (x, y)
    for factor in (0.5, 0.25, 0.125, 1.0, 2.0):
        strategy.run(step, args=(*batch, factor))
    return lambda: strategy.run(step, args=(*batch, 0.75))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("form", ["distributed", "host"])
def test_a_step_of_run_places_nothing_by_device_put(monkeypatch, form, replicas):
    """Neither a batch that lies there, nor a number: it took longer than the rest of the call."""
    step = step_of_run(replicas, form)
    with count_compiles() as programs:
        assert not puts_of(step, monkeypatch)
    assert not programs


def python_calls(step, folder=""):
    """Return how many Python functions a step calls, of files in a folder."""
    calls = [0]

    def note(frame, event, arg):
        calls[0] += event == "call" and frame.f_code.co_filename.startswith(folder)

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls[0]


@pytest.mark.parametrize(
    ("method", "most"), [("train_on_batch", 350), ("test_on_batch", 330), ("predict_on_batch", 175)]
)
def test_a_step_by_itself_costs_few_calls_of_python(method, most):
    """Of functions of the library; `train_on_batch` had 529 when each array was examined by itself."""
    assert python_calls(single_step(compiled(), method), str(Path(unisono.__file__).parent)) <= most


@pytest.mark.parametrize(("call", "most"), [("predict_on_batch", 345), ("run", 140)])
def test_a_step_by_itself_costs_few_calls_of_all_python(call, most):
    """Also of JAX and Python: `predict_on_batch` had 360, `run` of a distributed batch and a number 392."""
    step = step_of_run(1, "distributed") if call == "run" else single_step(compiled(), call)
    assert python_calls(step) <= most


def calls_in_loop(model, steps=20):
    """Return how many Python functions are called for each step of `fit` that nothing runs ahead of."""
    (x, y), calls = (a[:32] for a in digits()), [0]
    looks = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: float(logs["loss"]))

    def count(steps):
        batches = ((x, y) for _ in range(steps))
        options = {"verbose": 0, "shuffle": False, "callbacks": [looks]}
        calls[0] = 0
        sys.setprofile(lambda frame, event, arg: calls.__setitem__(0, calls[0] + (event == "call")))
        try:
            model.fit(batches, steps_per_epoch=steps, **options)
        finally:
            sys.setprofile(None)
        return calls[0]

    count(10)
    return (count(2 * steps) - count(steps)) / steps


def test_a_step_by_itself_in_fit_calls_fewer_functions_than_kerass_own():
    """Keras looks for layers in all of the state: 225 calls for 16 variables; here it was 160, and is 103."""
    assert calls_in_loop(compiled()) <= 115


def test_attributes_of_a_model_are_tracked_but_for_the_state_of_a_step():
    model, other, seen = compiled(), keras.Model(), []
    other.extra = {"layer": L.Dense(2)}
    assert other.layers == [other.extra["layer"]]
    other.empty = {}
    other.empty["layer"] = L.Dense(2)
    assert len(other.layers) == 2
    looks = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(type(training_state(model)))
    )
    x, y = (a[:32] for a in digits())
    model.fit(((x, y) for _ in range(3)), steps_per_epoch=3, verbose=0, shuffle=False, callbacks=[looks])
    assert seen == [dict] * 3


def forms():
    x, y = (a[:12] for a in digits())
    return {
        "float64": (x.astype("float64"), y.astype("int64")),
        "jax": (jax.numpy.asarray(x), jax.numpy.asarray(y)),
        "weights": (x, y, np.linspace(0, 1, 12)),
        "bytes": ((x > 0).astype("uint8"), y.astype("uint8")),
    }


@pytest.mark.parametrize("form", forms())
def test_arrays_of_all_forms(form):
    """As Keras does, also where the model is built by the first batch."""
    results = []
    for replicas in (0, 1, 2):
        with mirrored(replicas).scope() if replicas else contextlib.nullcontext():
            keras.utils.set_random_seed(1)
            model = keras.Sequential([L.Dense(16, "relu"), L.Dense(10)])
            model.compile("adam", crossentropy(), metrics=["accuracy"])
        steps = [model.train_on_batch(*forms()[form]) for _ in range(3)]
        results.append((*steps, model.test_on_batch(*forms()[form])))
        assert {v.dtype for v in model.variables} <= {"float32", "uint32", "int32"}
    np.testing.assert_allclose(results[1], results[0], rtol=2e-5)
    np.testing.assert_allclose(results[2], results[0], rtol=2e-5)


def test_a_label_that_does_not_fit_is_an_error():
    x, y = (a[:4] for a in digits())
    with pytest.raises(unisono.InvalidArgumentError, match=r"batch\[1\] of dtype int64"):
        compiled().train_on_batch(x, y.astype("int64") + (1 << 32))


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_buffer_that_its_owner_writes_again_after_the_step(replicas):
    x, y = digits()
    model, plain, buffer = compiled(replicas), compiled(0), np.empty_like(x[:32])
    for i in range(0, 160, 32):
        buffer[:] = x[i : i + 32]
        expected = plain.train_on_batch(x[i : i + 32], y[i : i + 32])
        found = model.train_on_batch(buffer, y[i : i + 32])
        buffer[:] = np.nan
        np.testing.assert_allclose(found, expected, rtol=2e-5)
    for a, b in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_what_is_changed_between_two_steps(replicas, optimizer):
    """Weights, the learning rate, what is trained, a metric, and steps of other kinds between."""
    x, y = (a[:32] for a in digits())
    results = []
    for model in (compiled(0, optimizer=optimizer), compiled(replicas, optimizer=optimizer)):
        seen = [model.train_on_batch(x, y)]
        model.optimizer.learning_rate = 0.5
        seen.append(model.train_on_batch(x, y))
        assert float(model.optimizer.learning_rate.numpy()) == 0.5
        model.layers[-1].set_weights([w * 0.5 for w in model.layers[-1].get_weights()])
        seen.append(model.train_on_batch(x, y))
        seen.append(model.evaluate(x, y, verbose=0))
        model.optimizer.iterations.assign(0)
        seen.append(model.train_on_batch(x, y))
        model.metrics_variables[0].assign(7)
        assert float(model.metrics_variables[0].numpy()) == 7.0
        model.layers[0].trainable = False
        model.compile(optimizer, crossentropy(), metrics=["accuracy"])
        seen.append(model.train_on_batch(x, y))
        history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        seen.append([history.history["loss"][0], history.history["accuracy"][0]])
        results.append(np.array(seen))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-4)
