"""Data that workers make themselves, on servers and workers of this process."""

import functools
import threading

import keras
import numpy as np
import pytest

import unisono
from tests.ps_cluster import local_strategy
from unisono.data import DatasetCreator
from unisono.parameter_server.worker._step_worker import current_worker_index


def rows(count=64):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 6)).astype("float32")
    return x, (x[:, :2].sum(1) > 0).astype("int32")


def compiled(**options):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dropout(0.2), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss=loss, metrics=["accuracy"], **options)
    return model


def dataset_fn(context, batch=16):
    return unisono.data.Dataset.from_tensor_slices(rows()).batch(batch).repeat()


class Callable:
    """An object that makes data."""

    def __init__(self, batch):
        self.batch = batch

    def __call__(self, context):
        return dataset_fn(context, self.batch)


def creators():
    batch = 16

    class Local:
        def __call__(self, context):
            return [
                (x, y) for x, y in zip(*(np.split(part, 64 // batch) for part in rows()), strict=True)
            ] * 9

    return {
        "function": dataset_fn,
        "lambda": lambda context: dataset_fn(context, batch),
        "partial": functools.partial(dataset_fn, batch=batch),
        "object": Callable(16),
        "local class": Local(),
        "creator": DatasetCreator(dataset_fn, input_options=unisono.InputOptions()),
        "unisono.function": unisono.function(dataset_fn),
        "without arguments": lambda: dataset_fn(None),
        "optional": lambda context=None: dataset_fn(context, 16 if context is not None else 3),
    }


@pytest.fixture(scope="module")
def expected():
    """What one device computes of the same batches, with validation on one half of them."""
    model = compiled()
    history = model.fit(
        *rows(),
        batch_size=16,
        shuffle=False,
        epochs=2,
        verbose=0,
        validation_data=tuple(p[:32] for p in rows()),
    ).history
    return model.get_weights(), history


@pytest.mark.parametrize("kind", creators())
def test_whatever_makes_data_can_be_called(kind, expected):
    weights, history = expected
    with local_strategy(workers=1, servers=1, max_staleness=0) as strategy:
        with strategy.scope():
            model = compiled()
        made = creators()[kind]
        found = model.fit(
            made, epochs=2, steps_per_epoch=4, verbose=0, validation_data=made, validation_steps=2
        ).history
        for name, values in history.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-4)
        for one, other in zip(weights, model.get_weights(), strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)
        found = model.evaluate(made, steps=2, verbose=0)
        np.testing.assert_allclose(
            found, [history[f"val_{name}"][-1] for name in ("loss", "accuracy")], rtol=1e-4
        )
        # The workers keep nothing: what follows comes behind the messages that say so.
        (worker,) = strategy.cluster.workers.values()
        model.predict(rows()[0], verbose=0)
        assert (worker._data._sources, worker._data._datasets) == ({}, {})


def test_workers_make_their_own_batches_for_evaluate_too():
    seen = []

    class Inside(keras.callbacks.Callback):
        """Calls other methods while the data of `fit` are the workers' own."""

        def on_train_batch_end(self, batch, logs=None):
            seen.append(self.model.evaluate(*rows(), verbose=0)[1])
            seen.append(self.model.predict(rows()[0], verbose=0).shape)

    def of_worker(context):
        x, y = rows()
        return [(x[:8] + current_worker_index(), y[:8])] * 30

    with local_strategy(workers=2, servers=2, max_staleness=0) as strategy:
        with strategy.scope():
            model = compiled(steps_per_execution=2)
        model.fit(of_worker, steps_per_epoch=4, verbose=0, callbacks=[Inside()])
        assert seen[1::2] == [(64, 2)] * 2
        assert int(model.optimizer.iterations.numpy()) == 4
        before = model.get_weights()
        assert len(model.evaluate(of_worker, steps=6, verbose=0)) == 2
        for one, other in zip(before, model.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)


WRONG = {
    "steps_per_epoch=None": lambda model: model.fit(dataset_fn),
    "validation_steps=None": lambda model: model.fit(*rows(), validation_data=dataset_fn),
    "and class_weight": lambda model: model.fit(dataset_fn, steps_per_epoch=2, class_weight={0: 2.0}),
    "and validation_split": lambda model: model.fit(dataset_fn, steps_per_epoch=2, validation_split=0.5),
    "and batch_size": lambda model: model.evaluate(dataset_fn, batch_size=3, steps=2),
    "steps=None": lambda model: model.evaluate(dataset_fn),
    "order is known": lambda model: model.predict(dataset_fn, steps=2),
    "Received: an empty one": lambda model: model.fit(lambda context: [], steps_per_epoch=2),
    "Received: int": lambda model: model.fit(lambda context: 3, steps_per_epoch=2),
    "cannot be": lambda model: model.fit(
        functools.partial(lambda lock, _: [], threading.Lock()), steps_per_epoch=2
    ),
}


class NoiseInLargeBatches(keras.layers.Layer):
    """Takes random numbers for batches of one size alone."""

    def __init__(self):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, inputs):
        is_large = inputs.shape[0] == 16
        return inputs + keras.random.normal((6,), seed=self.seed_generator) if is_large else inputs


def test_batches_of_all_sizes_must_take_the_same_random_numbers():
    def uneven(context):
        x, y = rows()
        return [(x[:16], y[:16]), (x[:8], y[:8])] * 4

    with local_strategy(workers=1) as strategy:
        with strategy.scope():
            model = keras.Sequential([NoiseInLargeBatches(), keras.layers.Dense(2)])
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        with pytest.raises(unisono.UnsupportedError, match="the same random generators"):
            model.fit(uneven, steps_per_epoch=4, verbose=0)


@pytest.fixture(scope="module")
def model():
    with local_strategy(workers=1) as strategy:
        with strategy.scope():
            made = compiled()
        yield made


@pytest.mark.parametrize("message", WRONG)
def test_what_is_missing_is_said_before_training(message, model):
    with pytest.raises(
        (unisono.InvalidArgumentError, unisono.InvalidTypeError, unisono.UnsupportedError), match=message
    ):
        WRONG[message](model)


def test_under_other_strategies_a_creator_makes_the_input_here(expected):
    for strategy in (unisono.OneDeviceStrategy("cpu:0"), unisono.ParameterServerStrategy()):
        with strategy.scope():
            model = compiled()
        history = model.fit(
            DatasetCreator(dataset_fn), epochs=2, steps_per_epoch=4, verbose=0,
            validation_data=DatasetCreator(dataset_fn), validation_steps=2,
        ).history  # fmt: skip
        # The batches are each replica's, as in tf.distribute.
        if strategy.num_replicas_in_sync == 1:
            np.testing.assert_allclose(history["loss"], expected[1]["loss"], rtol=1e-4)
        assert len(history["val_loss"]) == 2


def test_arguments_of_a_creator_are_checked():
    with pytest.raises(unisono.InvalidTypeError, match="must be a function"):
        DatasetCreator([1])
    with pytest.raises(unisono.InvalidTypeError, match="must be `InputOptions`"):
        DatasetCreator(dataset_fn, "options")
