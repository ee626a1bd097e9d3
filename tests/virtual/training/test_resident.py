"""Arrays that stay on the devices during a call: the same bits as batches that are placed one by one."""

import gc
import logging
import shutil
import weakref

import jax
import keras
import numpy as np
import pytest

import unisono
from tests.support import devices
from tests.virtual.training._digits import crossentropy, digits, mirrored, mlp, train
from unisono.callbacks import BackupAndRestore
from unisono.training.groups import _group_size, _multi_step
from unisono.training.groups._batch_policy import Mode
from unisono.training.resident import _arrays, _bound

L = keras.layers
ROWS = 103


@pytest.fixture
def resident(monkeypatch):
    """A function that lets arrays stay on the devices, or no longer."""

    def switch(value):
        monkeypatch.setenv(_bound.SWITCH, str(value))

    switch(1)
    return switch


@pytest.fixture
def placed(monkeypatch):
    """The arrays that were copied from the host to the devices."""
    found = []

    def counting(original):
        def place(*args, **kwargs):
            result = original(*args, **kwargs)
            leaves = jax.tree.leaves(args[0])
            if not any(isinstance(x, jax.Array) for x in leaves):
                found.extend(x for x in jax.tree.leaves(result) if x.ndim)
            return result

        return place

    for name in ("device_put", "make_array_from_callback"):
        monkeypatch.setattr(jax, name, counting(getattr(jax, name)))
    return found


def compile_with(**changes):
    return lambda: {"optimizer": "adam", "loss": crossentropy(), "metrics": ["accuracy"], **changes}


def data(rows=ROWS):
    x, y = digits()
    return x[:rows], y[:rows]


def chosen(model):
    """How the batches of programs that choose rows reach the replicas."""
    return {key.mode for key in model.train_function._programs if key.chooses}


def assert_same_bits(found, expected):
    found, expected = ({k: v for k, v in r.items() if k != "model"} for r in (found, expected))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def assert_same_with_and_without(resident, *args, modes=None, **kwargs):
    found = train(*args, **kwargs)
    assert chosen(found["model"])
    assert modes is None or chosen(found["model"]) == modes
    resident(0)
    expected = train(*args, **kwargs)
    assert not chosen(expected["model"])
    assert_same_bits(found, expected)


def dropout():
    return mlp(L.Dropout(0.2))


WEIGHTS = np.linspace(0, 1, ROWS, dtype="f4")
CALLS = {
    "shuffled": {"shuffle": True, "epochs": 3},
    "shuffled batches": {"shuffle": "batch"},
    "class weights": {"class_weight": {0: 1.0, 1: 2.0, 3: 0.5}},
    "sample weights": {"sample_weight": WEIGHTS, "shuffle": True},
    "validation split": {"validation_split": 0.2, "shuffle": True},
    "validation data": {"validation_data": (*data(57), WEIGHTS[:57]), "validation_batch_size": 9},
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_gives_the_same_bits(resident, call):
    fit = {"data": data(), "batch_size": 10, **CALLS[call]}
    assert_same_with_and_without(resident, 2, dropout, compile_with(), **fit)


@pytest.mark.parametrize(
    ("replicas", "batch_size", "modes"),
    [(1, 10, {Mode.SPLIT}), (2, 10, {Mode.SPLIT, Mode.WHOLE}), (3, 10, {Mode.PADDED, Mode.SPLIT})],
)
def test_ragged_ends_give_the_same_bits(resident, replicas, batch_size, modes):
    fit = {"data": data(), "batch_size": batch_size, "shuffle": True}
    assert_same_with_and_without(resident, replicas, mlp, compile_with(), modes=modes, **fit)


def test_rows_that_are_computed_together_give_the_same_bits(resident):
    def mixing():
        return keras.Sequential([keras.Input((64,)), Mixing(), L.Dense(10)])

    assert_same_with_and_without(
        resident, 2, mixing, compile_with(), data=data(100), batch_size=10, modes={Mode.JOINED}
    )


class Mixing(L.Layer):
    """Relates the rows of a batch."""

    def call(self, x):
        return x - keras.ops.flip(x, axis=0)


@pytest.mark.parametrize("steps", [1, 4])
def test_steps_that_run_together_or_one_by_one_give_the_same_bits(resident, monkeypatch, steps):
    for at_once in (1, 7):
        monkeypatch.setattr(_group_size, "MOST_STEPS", at_once)
        monkeypatch.setattr(_multi_step, "MOST_STEPS", at_once)
        resident(1)
        compiled = compile_with(steps_per_execution=steps)
        assert_same_with_and_without(resident, 2, mlp, compiled, data=data(), batch_size=10, shuffle=True)


def test_the_numbers_are_those_of_one_device(resident):
    x, y = data()
    fit = {"data": (x.astype("f8"), y.astype("i8")), "batch_size": 10}
    found, alone = train(2, mlp, compile_with(), **fit), train(0, mlp, compile_with(), **fit)
    np.testing.assert_allclose(found["history"]["loss"], alone["history"]["loss"], rtol=1e-5)
    np.testing.assert_allclose(found["predictions"], alone["predictions"], rtol=1e-3, atol=1e-4)


def two_inputs():
    a, b = keras.Input((64,), name="a"), keras.Input((2,), name="b")
    joined = L.Concatenate()([a, b])
    return keras.Model(
        {"a": a, "b": b}, {"digit": L.Dense(10, name="digit")(joined), "sum": L.Dense(1, name="sum")(joined)}
    )


def test_dicts_of_arrays_give_the_same_bits(resident):
    x, y = data()
    several = {"a": x, "b": x[:, 3:5].astype("f8")}, {"digit": y, "sum": x.sum(1)}
    losses = {"optimizer": "sgd", "loss": {"digit": crossentropy(), "sum": "mse"}}
    assert_same_with_and_without(resident, 2, two_inputs, lambda: losses, data=several, batch_size=10)


class Reads(keras.callbacks.Callback):
    """Reads the weights in some batches."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(logs["loss"])
        if batch in (2, 5):
            self.seen.extend(self.model.get_weights())


def test_a_callback_that_reads_weights_in_batches_sees_the_same_bits(resident):
    seen = []
    for switch in (1, 0):
        resident(switch)
        reads = Reads()
        result = train(2, mlp, compile_with(), data=data(), batch_size=10, shuffle=True, callbacks=[reads])
        assert bool(chosen(result["model"])) is bool(switch)
        seen.append([reads.seen, result["weights"]])
    jax.tree.map(np.testing.assert_array_equal, *seen)


class Stop(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 6:
            raise InterruptedError


def test_a_run_that_resumes_at_a_batch_gives_the_same_bits(resident, tmp_path):
    fit = {"data": data(), "batch_size": 10, "shuffle": True, "epochs": 3}
    results = []
    for switch in (0, 1):
        resident(switch)
        backup = lambda: BackupAndRestore(tmp_path / "backup", save_freq=2)  # noqa: E731
        with pytest.raises(InterruptedError):
            train(2, mlp, compile_with(), callbacks=[backup(), Stop()], **fit)
        results.append(train(2, mlp, compile_with(), seed=9, callbacks=[backup()], **fit))
        assert bool(chosen(results[-1]["model"])) is bool(switch)
        shutil.rmtree(tmp_path / "backup", ignore_errors=True)
    results.append(train(2, mlp, compile_with(), **fit))
    weights = [r["weights"] for r in results]
    jax.tree.map(np.testing.assert_array_equal, *weights[:2])
    jax.tree.map(np.testing.assert_array_equal, *weights[1:])


def sliced(rows=ROWS):
    return unisono.data.Dataset.from_tensor_slices(data(rows))


def shuffled(dataset):
    return dataset.shuffle(ROWS, seed=5).batch(10).prefetch(2)


def in_halves(dataset):
    return dataset.take(80).shuffle(80, seed=5).batch(5)


PIPELINES = {
    "shuffled": (shuffled, {}),
    "class weights": (shuffled, {"class_weight": {0: 1.0, 1: 2.0, 3: 0.5}}),
    "endless": (lambda d: d.shuffle(ROWS, seed=5).repeat().batch(10), {"steps_per_epoch": 11}),
    "half of the data in an epoch": (in_halves, {"steps_per_epoch": 8, "epochs": 4}),
    "with options": (lambda d: shuffled(d).with_options(unisono.data.Options()), {}),
    "validation": (lambda d: shuffled(d.skip(30)), {"validation_data": sliced(30).batch(9)}),
}


def fit_pipeline(pipeline, seed=7, distributed=False, **fit):
    keras.utils.set_random_seed(seed)
    strategy = mirrored(2)
    with strategy.scope():
        model = dropout()
        model.compile(**compile_with()())
    dataset, test = pipeline(sliced()), sliced().batch(10)
    if distributed:
        dataset, test = map(strategy.experimental_distribute_dataset, (dataset, test))
    history = model.fit(dataset, **{"epochs": 2, "verbose": 0, **fit}).history
    return {
        "model": model,
        "history": history,
        "weights": model.get_weights(),
        "evaluation": model.evaluate(test, verbose=0),
        "predictions": model.predict(sliced().batch(10), verbose=0),
    }


def assert_same_pipeline_with_and_without(resident, *args, **kwargs):
    results = []
    for switch in (1, 0):
        resident(switch)
        results.append(fit_pipeline(*args, **kwargs))
        functions = [results[-1]["model"].train_function, results[-1]["model"].test_function]
        assert [any(key.chooses for key in f._programs) for f in functions] == [bool(switch)] * 2
    assert_same_bits(*results)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in ("shuffled", "validation") else pytest.mark.exhaustive)
        for n in PIPELINES
    ],
)
def test_a_pipeline_that_chooses_rows_gives_the_same_bits(resident, name):
    pipeline, fit = PIPELINES[name]
    assert_same_pipeline_with_and_without(resident, pipeline, **fit)


def test_a_distributed_pipeline_gives_the_same_bits(resident):
    assert_same_pipeline_with_and_without(resident, shuffled, distributed=True)


@pytest.mark.parametrize(
    ("pipeline", "fit"),
    [
        pytest.param(shuffled, {"epochs": 3}, id="epochs"),
        pytest.param(
            in_halves, {"epochs": 4, "steps_per_epoch": 8}, id="halves", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_a_pipeline_that_resumes_at_a_batch_gives_the_same_bits(resident, tmp_path, pipeline, fit):
    results = []
    for before, after in ((0, 1), (1, 0)):
        backup = lambda: BackupAndRestore(tmp_path / "backup", save_freq=2)  # noqa: E731
        resident(before)
        with pytest.raises(InterruptedError):
            fit_pipeline(pipeline, callbacks=[backup(), Stop()], **fit)
        resident(after)
        results.append(fit_pipeline(pipeline, seed=9, callbacks=[backup()], **fit))
        assert bool(chosen(results[-1]["model"])) is bool(after)
        shutil.rmtree(tmp_path / "backup", ignore_errors=True)
    results.append(fit_pipeline(pipeline, **fit))
    for result in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, result["weights"], results[0]["weights"])


def test_arrays_of_a_pipeline_are_placed_once(resident, placed):
    model = trained()
    model.fit(shuffled(sliced(160)), epochs=1, verbose=0)
    placed.clear()
    model.fit(shuffled(sliced(160)), epochs=4, verbose=0)
    kinds = sorted((array.shape, str(array.dtype)) for array in placed if array.shape[0] == 160)
    assert kinds == [((160,), "int32"), ((160, 64), "float32")]
    assert {str(array.dtype) for array in placed if array.shape[0] != 160} == {"int32"}


def trained(replicas=2, **changes):
    keras.utils.set_random_seed(3)
    with mirrored(replicas).scope():
        model = mlp()
        model.compile(**compile_with(**changes)())
    return model


def test_arrays_are_placed_once_and_numbers_of_rows_thereafter(resident, placed):
    model, (x, y) = trained(), data(160)
    fit = {"batch_size": 20, "verbose": 0, "validation_data": (x[:80], y[:80])}
    model.fit(x, y, epochs=1, **fit)
    placed.clear()
    model.fit(x, y, epochs=4, **fit)
    kinds = [(array.shape, str(array.dtype)) for array in placed]
    # Of training and validation.
    assert sorted(k for k in kinds if k[0][0] in (160, 80)) == [
        ((80,), "int32"), ((80, 64), "float32"), ((160,), "int32"), ((160, 64), "float32"),
    ]  # fmt: skip
    numbers = [array for array in placed if array.shape[0] not in (160, 80)]
    assert {str(array.dtype) for array in numbers} == {"int32"}
    assert all(array.size <= 32 * 20 for array in numbers)
    assert len(numbers) <= 4 * (8 + 4)


def test_arrays_of_similar_sizes_share_a_program(resident):
    model, (x, y) = trained(), data(160)
    for rows in (160, 152, 148):
        model.fit(x[:rows], y[:rows], batch_size=4, verbose=0)
    assert model.train_function.num_programs == 1
    (program,) = model.train_function._programs.values()
    assert program._compiled._cache_size() == 1


def test_one_array_that_is_given_twice_is_placed_once(resident, placed):
    x, _ = data(160)
    with mirrored(2).scope():
        model = keras.Sequential([keras.Input((64,)), L.Dense(64)])
        model.compile("sgd", "mse")
    model.fit(x, x, batch_size=20, verbose=0)
    assert [array.shape for array in placed if array.shape == (160, 64)] == [(160, 64)]


@pytest.fixture
def made(monkeypatch):
    """Weak references to the arrays of calls, and those that were on the devices."""
    found = []
    original = _arrays.ResidentArrays._on_devices

    def noting(self):
        arrays = original(self)
        found.append(weakref.ref(self))
        found.extend(weakref.ref(x) for x in jax.tree.leaves(arrays))
        return arrays

    monkeypatch.setattr(_arrays.ResidentArrays, "_on_devices", noting)
    return found


class StopsEarly(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training = batch == 3


@pytest.mark.parametrize("callbacks", [[], [StopsEarly()], [Stop()]], ids=["whole", "stopped", "failed"])
def test_the_memory_is_free_after_the_call(resident, made, callbacks):
    model, (x, y) = trained(), data()
    gc.collect()
    gc.disable()
    try:
        model.fit(x, y, batch_size=10, verbose=0, validation_split=0.2, callbacks=callbacks)
    except InterruptedError:
        pass
    finally:
        gc.enable()
    model.evaluate(x, y, batch_size=10, verbose=0)
    assert len(made) >= 6
    on_devices = [ref for ref in made if isinstance(ref(), jax.Array)]
    assert not on_devices


def test_what_is_written_between_two_calls_is_seen(resident):
    model, (x, y) = trained(), data()
    x = x.copy()
    for call in (model.evaluate, model.fit):
        x[:] = data()[0]
        weights = model.get_weights()
        before = call(x, y, batch_size=10, verbose=0)
        model.set_weights(weights)
        x *= 2
        after = call(x, y, batch_size=10, verbose=0)
        losses = [r[0] if isinstance(r, list) else r.history["loss"][0] for r in (before, after)]
        assert losses[0] != losses[1]


@pytest.mark.parametrize("fit", [{"steps_per_epoch": 3}, {"batch_size": ROWS}])
def test_arrays_that_are_not_sent_again_are_not_kept(resident, fit):
    model, (x, y) = trained(), data()
    model.fit(x, y, verbose=0, **fit)
    assert not chosen(model)


def test_the_bound_is_kept(resident):
    x, y = data()
    size = x.nbytes + y.nbytes
    for switch, is_kept in ((size, True), (size - 1, False)):
        resident(switch)
        model = trained()
        model.fit(x, y, batch_size=10, verbose=0)
        assert bool(chosen(model)) is is_kept


@pytest.mark.parametrize("kind", ["generator", "dataset", "part of a shuffle", "objects"])
def test_other_data_are_placed_batch_by_batch(resident, kind):
    model, (x, y) = trained(), data(100)
    if kind == "generator":
        model.fit(
            ((x[i : i + 10], y[i : i + 10]) for i in range(0, 100, 10)),
            steps_per_epoch=10,
            shuffle=False,
            verbose=0,
        )
    elif kind == "dataset":
        model.fit(sliced(100).map(lambda x, y: (x, y)).batch(10), verbose=0)
    elif kind == "part of a shuffle":
        model.fit(sliced(100).shuffle(100).take(40).batch(10), verbose=0)
    else:
        with pytest.raises(ValueError, match="Invalid dtype"):
            model.fit(x, y, sample_weight=np.array(["a"] * 100), batch_size=10, verbose=0)
        return
    assert not chosen(model)


def test_without_room_on_the_devices_batches_are_placed_one_by_one(resident, monkeypatch, caplog):
    def fails(self):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(_arrays.ResidentArrays, "_on_devices", fails)
    caplog.set_level(logging.INFO, logger="unisono")
    found = train(2, mlp, compile_with(), data=data(), batch_size=10, shuffle=True)
    assert not chosen(found["model"])
    assert len([r for r in caplog.records if "found no room" in r.message]) == 3  # fit, evaluate, predict
    resident(0)
    assert_same_bits(found, train(2, mlp, compile_with(), data=data(), batch_size=10, shuffle=True))


def test_steps_that_run_op_by_op_get_values(resident):
    model, (x, y) = trained(run_eagerly=True), data(20)
    model.fit(x, y, batch_size=10, verbose=0)
    assert not chosen(model)


@pytest.mark.parametrize("layout", ["sharded", "fully_sharded"])
def test_state_in_parts_gives_the_same_bits(resident, layout):
    results = []
    for switch in (1, 0):
        resident(switch)
        keras.utils.set_random_seed(3)
        with unisono.MirroredStrategy(devices(2), state_layout=layout).scope():
            model = mlp()
            model.compile(**compile_with()())
        model.fit(*data(), batch_size=10, verbose=0)
        assert bool(chosen(model)) is bool(switch)
        results.append(model.get_weights())
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_replicas_that_train_apart_give_the_same_bits(resident):
    results = []
    for switch in (1, 0):
        resident(switch)
        keras.utils.set_random_seed(3)
        with unisono.MirroredStrategy(devices(2), sync=unisono.LocalUpdates(every=3)).scope():
            model = mlp()
            model.compile(**compile_with()())
        model.fit(*data(100), batch_size=10, verbose=0)
        assert bool(chosen(model)) is bool(switch)
        results.append(model.get_weights())
    jax.tree.map(np.testing.assert_array_equal, *results)
