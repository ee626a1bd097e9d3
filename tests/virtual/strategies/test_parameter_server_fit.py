"""Keras' `fit`, `evaluate` and `predict` on servers and workers of this process."""

import json
import re
import sys
import threading
from pathlib import Path

import jax
import keras
import numpy as np
import pytest

import unisono
from tests.ps_cluster import local_strategy
from unisono.cluster.liveness._task_events import TaskEventFile
from unisono.cluster_resolver._spec import Task
from unisono.parameter_server.chief import _train_function
from unisono.parameter_server.chief._train_function import RemoteTrainFunction
from unisono.parameter_server.server import _traffic
from unisono.training.groups._multi_step import LazyArray

pytestmark = pytest.mark.numbers

SRC = "/src/unisono/"


def data(rows=200):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 6)).astype("float32")
    return x, (x[:, :2].sum(1) > 0).astype("int32")


def compiled(**options):
    keras.utils.set_random_seed(1)
    layers = [keras.Input((6,)), keras.layers.Dense(8, activation="relu")]
    layers += [keras.layers.BatchNormalization(), keras.layers.Dropout(0.2), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss=loss, metrics=["accuracy"], **options)
    return model


def assert_same(model, other):
    for expected, found in zip(other.weights, model.weights, strict=True):
        np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6)


@pytest.fixture(scope="module")
def alone():
    """A model that one device has trained, and its history."""
    model = compiled()
    history = model.fit(
        *data(), batch_size=32, epochs=3, shuffle=False, verbose=0, validation_data=data(50)
    ).history
    return model, history


def test_with_staleness_0_the_numbers_are_those_of_one_device(alone):
    model, history = alone
    with local_strategy(workers=3, servers=2, max_staleness=0) as strategy:
        with strategy.scope():
            own = compiled()
        # The last batch is smaller; dropout draws, and moving statistics move.
        found = own.fit(
            *data(), batch_size=32, epochs=3, shuffle=False, verbose=0, validation_data=data(50)
        ).history
        for name, values in history.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-5)
        assert_same(own, model)
        np.testing.assert_allclose(
            own.evaluate(*data(), verbose=0), model.evaluate(*data(), verbose=0), rtol=1e-5
        )
        x, _ = data()
        np.testing.assert_allclose(
            own.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-4, atol=1e-5
        )


def test_a_launcher_is_told_the_rows_of_each_step_once(tmp_path, monkeypatch):
    events = TaskEventFile(tmp_path / "events", 0)
    for module in (_train_function, _traffic):
        monkeypatch.setattr(module, "process_events", lambda: events)
    with local_strategy(workers=2, servers=1) as strategy:
        with strategy.scope():
            own = compiled()
        own.fit(*data(), batch_size=32, epochs=1, verbose=0, validation_data=data(50))
    events.flush()
    lines = map(json.loads, (tmp_path / "events").read_text().splitlines())
    steps = [line for line in lines if line["event"] == "steps"]
    assert (sum(s["count"] for s in steps), sum(s.get("rows", 0) for s in steps)) == (7, 200)


class Noisy(keras.layers.Layer):
    """Draws in every call, and uses it in training alone, as layers with a cell do in Keras."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(3)

    def call(self, x, training=False):
        noise = keras.random.normal(keras.ops.shape(x), seed=self.seed)
        return x + noise if training else x


def test_evaluate_and_predict_advance_random_generators_that_they_do_not_use():
    def states(model):
        """Train, evaluate and predict, twice; return the generator's states and the weights."""
        (x, y), found = data(70), []
        for run in (
            lambda: model.fit(x, y, batch_size=32, shuffle=False, verbose=0),
            lambda: model.evaluate(x, y, batch_size=32, verbose=0),
            lambda: model.predict(x, batch_size=32, verbose=0),
        ) * 2:
            run()
            found.append(model.layers[0].seed.state.numpy().tolist())
        return found, [weight.numpy() for weight in model.trainable_weights]

    def noisy():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((6,)), Noisy(), keras.layers.Dense(2)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
        return model

    expected, weights = states(noisy())
    assert expected == [[3, n] for n in (3, 6, 9, 12, 15, 18)]
    with local_strategy(max_staleness=0) as strategy:
        with strategy.scope():
            model = noisy()
        found, own = states(model)
    assert found == expected
    for ours, theirs in zip(own, weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_without_a_bound_it_trains_as_well_and_every_step_counts():
    with local_strategy(workers=2, servers=2) as strategy:
        with strategy.scope():
            model = compiled()
        history = model.fit(*data(), batch_size=16, epochs=12, verbose=0).history
        assert int(model.optimizer.iterations.numpy()) == 12 * 13
        assert history["accuracy"][-1] > 0.85
        assert strategy.cluster.servers[0].store.applied_count == 12 * 13
        # Each worker has had its part.
        used = strategy._job.pool.queue.num_workers
        assert used == 2
        assert len(model.predict(data()[0], batch_size=64, verbose=0)) == 200


def test_steps_run_beside_each_other_also_where_each_epoch_is_saved(tmp_path):
    """Keras' `ModelCheckpoint` has a hook for batches, which would wait for each step."""
    at_once = []
    with local_strategy(workers=2) as strategy:
        with strategy.scope():
            model = compiled()
        queue = strategy._job.pool.queue
        schedule = queue.schedule
        queue.schedule = lambda request: at_once.append(len(queue._closures)) or schedule(request)
        save = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")
        model.fit(*data(), batch_size=16, epochs=2, verbose=0, callbacks=[save])
    assert max(at_once) >= 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.keras", "2.keras"]


def test_callbacks_see_logs_and_may_change_the_model():
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(float(logs["loss"]))

        def on_epoch_end(self, epoch, logs=None):
            seen.append(float(self.model.optimizer.learning_rate.numpy()))
            self.model.optimizer.learning_rate = 0.125

    plain = compiled()
    plain.fit(*data(64), batch_size=32, epochs=2, shuffle=False, verbose=0, callbacks=[Watch()])
    expected = list(seen)
    seen.clear()
    with local_strategy(servers=2, max_staleness=0) as strategy:
        with strategy.scope():
            model = compiled()
        model.fit(*data(64), batch_size=32, epochs=2, shuffle=False, verbose=0, callbacks=[Watch()])
        np.testing.assert_allclose(seen, expected, rtol=1e-5)
        assert_same(model, plain)


def test_steps_per_execution_and_steps_per_epoch():
    dataset = unisono.data.Dataset.from_tensor_slices(data()).batch(16).repeat()
    with local_strategy(max_staleness=0) as strategy:
        with strategy.scope():
            model = compiled(steps_per_execution=2)
        model.fit(dataset, epochs=2, steps_per_epoch=4, verbose=0)
        assert int(model.optimizer.iterations.numpy()) == 8


def test_a_lost_worker_costs_nothing(alone):
    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2 and self.params["epochs"] == 3:
                task = Task("worker", 1 if strategy.kills % 2 else 0)
                strategy.kills += 1
                strategy.cluster.kill_worker(task)
                strategy.cluster.start_worker(task)

    with local_strategy(workers=2, servers=2, max_staleness=0) as strategy:
        strategy.kills = 0
        with strategy.scope():
            model = compiled()
        model.fit(*data(), batch_size=32, epochs=3, shuffle=False, verbose=0, callbacks=[Kill()])
        assert strategy.kills == 3
        assert_same(model, alone[0])


def test_errors_of_the_data_are_raised_and_the_model_is_as_it_was():
    def batches():
        x, y = data(64)
        for _ in range(4):
            yield x[:32], y[:32]
        raise ZeroDivisionError("in the data")

    with local_strategy(max_staleness=0) as strategy:
        with strategy.scope():
            model = compiled()
        with pytest.raises(ZeroDivisionError, match="in the data"):
            model.fit(batches(), shuffle=False, verbose=0)
        assert int(model.optimizer.iterations.numpy()) == 4
        model.fit(*data(64), verbose=0)
        assert int(model.optimizer.iterations.numpy()) == 6


def test_eager_models_are_refused():
    with local_strategy() as strategy:
        with strategy.scope():
            model = compiled(run_eagerly=True)
        with pytest.raises(unisono.UnsupportedError, match="compiled with `run_eagerly=True`"):
            model.fit(*data(64), verbose=0)


def test_a_lazy_array_is_read_where_its_number_is_needed():
    asked = []

    def wait():
        asked.append(1)
        return [np.float32(2.5), np.ones((2, 3))]

    number, rows = LazyArray(wait, 0), LazyArray(wait, 1)
    assert not asked
    assert (float(number), f"{number:.2f}", rows.shape, rows.dtype) == (2.5, "2.50", (2, 3), np.float64)
    np.testing.assert_array_equal(np.concatenate([rows, rows]), np.ones((4, 3)))


def test_workers_make_their_own_data(alone):
    def dataset_fn(context):
        rows = unisono.data.Dataset.from_tensor_slices(data())
        return rows.shard(context.num_input_pipelines, context.input_pipeline_id).batch(32)

    model, _ = alone
    # One worker, one closure at a time: the numbers of one device, also of the smaller last batch and of
    # dropout.
    with local_strategy(workers=1, servers=2, max_staleness=0) as strategy:
        with strategy.scope():
            own = compiled()
        logs = own.fit(
            lambda context: dataset_fn(context).repeat(), epochs=3, steps_per_epoch=7, verbose=0
        ).history
        assert_same(own, model)
        assert len(logs["loss"]) == 3
        # The random states go on.
        own.fit(*data(), batch_size=32, shuffle=False, verbose=0)
        with pytest.raises(unisono.OutOfRangeError, match="end of the data on worker 0 after 7 batches"):
            own.fit(dataset_fn, steps_per_epoch=9, verbose=0)
        with pytest.raises(unisono.InvalidArgumentError, match="steps_per_epoch=None"):
            own.fit(dataset_fn, verbose=0)


class TrainedByAnother(keras.Sequential):
    """Its step applies an optimizer that is not the one of `compile`, which has no part in it."""

    def __init__(self):
        super().__init__([keras.Input((6,)), keras.layers.Dense(2)])
        self.other = keras.optimizers.Adam(0.1)
        self.other.build(self.trainable_variables)

    @property
    def non_trainable_variables(self):
        return [*super().non_trainable_variables, *self.other.variables]

    def train_step(self, state, data):
        weights, slots, optimizer, metrics = state

        def loss_of(weights):
            return self.loss(data[1], self.stateless_call(weights, slots, data[0])[0])

        loss, grads = jax.value_and_grad(loss_of)(weights)
        weights, slots = self.other.stateless_apply(slots, grads, weights)
        return {"loss": loss}, (weights, slots, optimizer, metrics)


def test_a_step_of_keras_form_may_apply_another_optimizer():
    def trained():
        keras.utils.set_random_seed(1)
        model = TrainedByAnother()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    expected = trained()
    expected.fit(*data(64), batch_size=16, shuffle=False, verbose=0)
    with local_strategy(workers=1, servers=2) as strategy:
        with strategy.scope():
            model = trained()
        model.fit(*data(64), batch_size=16, shuffle=False, verbose=0)
        assert_same(model, expected)


class _Visits:
    """The files of Unisono whose functions are called while Keras' train function sends a batch, and after.

    The calls of all threads are counted: of the chief, of workers and of servers. What Keras' callbacks
    visit in the chief's main thread, outside of the train function, is no part of a batch's way.
    """

    def __init__(self):
        self.files, self.is_on = set(), False
        self._main, self._inside = threading.main_thread(), 0

    def __call__(self, frame, event, _):
        path = frame.f_code.co_filename
        if event not in ("call", "return") or SRC not in path:
            return
        if threading.current_thread() is self._main:
            if frame.f_code is RemoteTrainFunction.__call__.__code__:
                self._inside += 1 if event == "call" else -1
            elif not self._inside:
                return
        if self.is_on and event == "call":
            self.files.add(path.partition(SRC)[2].removesuffix(".py"))


def test_a_batch_visits_the_files_of_the_document():
    visits = _Visits()

    def begin(batch, logs):
        # After the warm-up, with programs and plans known, until the last batches still run.
        visits.is_on = 16 <= batch < 28

    threading.setprofile(visits)
    sys.setprofile(visits)
    try:
        with local_strategy(workers=2, servers=2) as strategy:
            with strategy.scope():
                model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
            callback = keras.callbacks.LambdaCallback(on_train_batch_begin=begin)
            model.fit(*data(128), batch_size=4, verbose=0, callbacks=[callback])
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    text = (Path(__file__).parents[3] / "docs" / "architecture.md").read_text()
    section = text.partition("## The life of a batch with parameter servers")[2].partition("\n## ")[0]
    visits.files -= {"_checks", "rpc/_fields"}
    assert visits.files - set(re.findall(r"`((?:\w+/)+\w+)", section)) == set()
    assert len(visits.files) == int(re.search(r"visits (\d+) files", section)[1]) <= 25
