"""`train_step(self, data)`, `test_step` and `predict_step` that read and assign variables."""

# ruff: noqa: B905

import jax
import keras
import numpy as np
import pytest

import unisono
from tests.ps_cluster import local_strategy
from tests.virtual.training.stateful._models import L, gan, rows, weights_of
from unisono import tf
from unisono.step._keras_internals import stored_value
from unisono.step._value_handle import ValueHandle
from unisono.training._binding import bind

DATA = rows(3, 4)


@pytest.fixture(scope="module")
def two():
    return unisono.MirroredStrategy(["cpu:0", "cpu:1"])


def close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5), found, expected)


def by_hand(batch_size, count):
    """The same mathematics with `jax.grad` and the optimizers' `stateless_apply`."""
    model = gan()
    g, d = model.generator, model.discriminator
    g.build((None, 4)), d.build((None, 3))
    optimizers = model.optimizers["d"][0], model.optimizers["g"]
    optimizers[0].build(d.trainable_variables), optimizers[1].build(g.trainable_variables)
    state = [[v.value for v in part] for part in (d.trainable_variables, g.trainable_variables)]
    slots = [[v.value for v in o.variables] for o in optimizers]

    def losses(d_weights, g_weights, real, noise):
        fake = d.stateless_call(d_weights, [], g.stateless_call(g_weights, [], noise)[0])[0]
        logits = d.stateless_call(d_weights, [], real)[0]
        on_fake, softplus = jax.nn.softplus(fake), jax.nn.softplus
        return softplus(-logits).mean() + on_fake.mean(), softplus(-fake).mean(), (logits > 0).mean()

    @jax.jit
    def step(state, slots, real, noise):
        (d_loss, hits), d_grads = jax.value_and_grad(
            lambda w: (lambda found: (found[0], found[2]))(losses(w, state[1], real, noise)), has_aux=True
        )(state[0])
        new_d, d_slots = optimizers[0].stateless_apply(slots[0], d_grads, state[0])
        g_loss, g_grads = jax.value_and_grad(lambda w: losses(new_d, w, real, noise)[1])(state[1])
        new_g, g_slots = optimizers[1].stateless_apply(slots[1], g_grads, state[1])
        return [new_d, new_g], [d_slots, g_slots], (g_loss, d_loss, hits)

    history = {"g_loss": [], "d_loss": [], "last_d_loss": [], "error": []}
    for _ in range(2):
        found, counts = [], []
        for i in range(0, count, batch_size):
            batch = [x[i : i + batch_size] for x in DATA]
            state, slots, numbers = step(state, slots, *batch)
            found.append(numbers)
            counts.append(len(batch[0]))
        history["g_loss"].append(np.mean([n[0] for n in found]))
        history["d_loss"].append(np.mean([n[1] for n in found]))
        history["last_d_loss"].append(found[-1][1])
        history["error"].append(1 - np.average([n[2] for n in found], weights=counts))
    return history, [*state[1], *state[0]]


@pytest.fixture(scope="module")
def expected():
    """By batch size and rows: 8 divides over two replicas but for a last batch of 5, 7 does not."""
    return {given: by_hand(*given) for given in ((8, 16), (8, 21), (7, 21))}


def assert_trains_as_by_hand(model, expected, batch_size=8, count=21):
    data = [x[:count] for x in DATA]
    found = model.fit(*data, batch_size=batch_size, epochs=2, shuffle=False, verbose=0).history
    history, weights = expected[batch_size, count]
    close({name: found[name] for name in history}, history)
    close(weights_of(model), weights)


STRATEGIES = {
    "one device": lambda: unisono.OneDeviceStrategy("cpu:0"),
    "central storage": lambda: unisono.CentralStorageStrategy(["cpu:0", "cpu:1"]),
    "parameter servers, local": unisono.ParameterServerStrategy,
    "sharded": lambda: unisono.MirroredStrategy(["cpu:0", "cpu:1"], state_layout="sharded"),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_trains_as_by_hand(name, expected):
    with STRATEGIES[name]().scope():
        model = gan()
    assert_trains_as_by_hand(model, expected, count=16)


@pytest.mark.parametrize("batch_size", [8, 7])
def test_two_replicas_train_evaluate_and_predict_as_one_device(two, expected, batch_size):
    with two.scope():
        model = gan()
    assert_trains_as_by_hand(model, expected, batch_size)
    if batch_size == 7:
        return
    real, noise = DATA
    ones = np.ones((len(real), 1))
    loss = model.loss_fn(ones, model.discriminator(real))
    close(model.test_on_batch(real, noise), loss)
    # The metric is the mean over batches, as on one device.
    sizes = [slice(i, i + batch_size) for i in range(0, len(real), batch_size)]
    means = [model.loss_fn(ones[s], model.discriminator(real[s])) for s in sizes]
    close(model.evaluate(*DATA, batch_size=batch_size, verbose=0), np.mean(means))
    images = np.asarray(model.generator(noise))
    close(model.predict(noise, batch_size=batch_size, verbose=0), images)
    close(model.predict_on_batch(noise[:4]), images[:4])


def test_workers_and_servers_train_as_by_hand(expected):
    with local_strategy(workers=2, servers=2, max_staleness=0) as strategy:
        with strategy.scope():
            model = gan()
        assert_trains_as_by_hand(model, expected, count=16)
        # Each variable is on a server, also the optimizers' own.
        slots = [v for v in model.optimizers["g"].variables if v.shape]
        assert len(slots) == 8
        assert all(isinstance(stored_value(v), ValueHandle) for v in slots)


def test_without_a_strategy_the_default_one_trains_in_a_program_of_unisono_tf(expected):
    assert_trains_as_by_hand(gan(), expected, count=16)


def test_train_on_batch_and_several_steps_per_execution(two, expected):
    with two.scope():
        one_by_one, together = gan(), gan(steps_per_execution=2)
    for i in (0, 8):
        logs = one_by_one.train_on_batch(*(x[i : i + 8] for x in DATA), return_dict=True)
    together.fit(*(x[:16] for x in DATA), batch_size=8, shuffle=False, verbose=0)
    close(weights_of(together), weights_of(one_by_one))
    assert set(logs) == {"g_loss", "d_loss", "last_d_loss", "error"}


def test_op_by_op_the_numbers_are_the_same():
    models, seen = [], []
    for eagerly in (True, False):
        keras.utils.set_random_seed(1)
        models.append(Noted())
        models[-1].compile("sgd", run_eagerly=eagerly)
        seen.append(models[-1].fit(DATA[0], batch_size=16, shuffle=False, verbose=0).history)
    close([seen[0], weights_of(models[0])], [seen[1], weights_of(models[1])])


def test_one_program_for_each_shape(two):
    with two.scope():
        model = gan()
    model.fit(*DATA, batch_size=8, epochs=2, verbose=0)
    function = model.train_function
    assert function.num_programs == 2
    model.fit(*DATA, batch_size=8, verbose=0)
    assert model.train_function is function
    assert function.num_programs == 2


class Inherits(tf.keras.Model):
    """Changes the data, and leaves the rest to Keras' own step; layers are built by the first step."""

    def __init__(self):
        super().__init__()
        self.hidden, self.normal = L.Dense(4, activation="tanh"), L.BatchNormalization()
        self.out = L.Dense(1)

    def call(self, x, training=False):
        self.add_loss(0.01 * tf.reduce_mean(tf.square(x)))
        return self.out(self.normal(self.hidden(x), training=training))

    def train_step(self, data):
        x, y = data
        return super().train_step((2 * x, y))

    def test_step(self, data):
        x, y = data
        return super().test_step((2 * x, y))

    def predict_step(self, data):
        return super().predict_step((2 * data,))


class Plain(Inherits):
    """The same for Keras' form."""

    train_step, test_step, predict_step = (
        getattr(keras.Model, n) for n in ("train_step", "test_step", "predict_step")
    )


def test_a_step_may_call_keras_own(two):
    x, y = rows(3, 1)
    models, found = [], []
    # Batches that do not divide: BatchNormalization sees all rows on each replica.
    options = {"batch_size": 7, "verbose": 0}
    for kind, factor in ((Inherits, 1), (Plain, 2)):
        keras.utils.set_random_seed(2)
        with two.scope():
            models.append(kind())
            models[-1].compile("adam", "mse", metrics=["mae"])
        history = models[-1].fit(factor * x, y, epochs=2, shuffle=False, **options).history
        found.append((history, models[-1].evaluate(factor * x, y, **options)))
        found[-1] += (models[-1].predict(factor * x, **options), weights_of(models[-1]))
    close(*found)


class Noted(tf.keras.Model):
    """Keeps what its step is given, decorated as many programs do."""

    def __init__(self):
        super().__init__()
        self.dense, self.calls = L.Dense(1), []

    @tf.function
    def train_step(self, data):
        self.calls.append(jax.tree.map(np.shape, data))
        x = data[0] if isinstance(data, tuple) else data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self.dense(x)))
        weights = self.dense.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}


def test_a_step_gets_data_as_in_tensorflow():
    x, y = rows(3, 1, count=4)
    dataset = tf.data.Dataset.from_tensor_slices
    for expected, data in {
        (4, 3): [(x,), (dataset(x).batch(4),)],
        ((4, 3), (4, 1)): [(x, y), (dataset((x, y)).batch(4),)],
        ((4, 3),): [(dataset((x,)).batch(4),)],
    }.items():
        for given in data:
            model = Noted()
            model.compile("sgd")
            model.fit(*given, verbose=0)
            assert set(model.calls) == {expected}
    model.calls.clear()
    model.train_on_batch(x, y)
    model.train_on_batch(x)
    assert set(model.calls) <= {((4, 3), (4, 1)), (4, 3)}


class ReturnsNothing(Noted):
    def train_step(self, data):
        self.dense(data)


def test_bad_steps_have_clear_errors():
    x = rows(3)[0]
    model = ReturnsNothing()
    model.compile("sgd")
    with pytest.raises(unisono.InvalidTypeError, match=r"return a dictionary.*ReturnsNothing.train_step"):
        model.fit(x, verbose=0)


def test_keras_alone_gets_a_note():
    """As in a program that does not use `unisono.tf`."""
    for model, error in ((Noted(), RuntimeError), (Inherits(), TypeError)):
        model.compile("sgd")
        bind(model, None)
        with pytest.raises(error) as raised:
            model.fit(*rows(3, 1), verbose=0)
        assert "OneDeviceStrategy" in "".join(raised.value.__notes__)
