"""Models that the first step builds, under a `GradientTape`: the numbers of models that were built before."""

import keras
import numpy as np
import pytest

import unisono

L = keras.layers

#: Batches of 5, which does not divide, and of 2.
ROWS = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")
BATCHES = [(ROWS[i : i + 5], ROWS[i : i + 5, :2] * 2) for i in (0, 5, 10)]


@pytest.fixture(scope="module")
def two():
    return unisono.MirroredStrategy(["cpu:0", "cpu:1"])


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.drop, self.out = L.Dense(4, activation="tanh"), L.Dropout(0.0), L.Dense(2)

    def call(self, x, training=False):
        return self.out(self.drop(self.hidden(x), training=training))


class Nested(L.Layer):
    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential([L.Dense(3), L.LayerNormalization()])

    def build(self, shape):
        self.kernel = self.add_weight(shape=(3, 2), initializer="glorot_uniform")
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.calls.assign_add(1.0)
        return self.inner(x) @ self.kernel


MODELS = {
    "sequential": lambda: keras.Sequential([L.Dense(4, activation="relu"), L.Dense(2)]),
    "subclassed": Subclassed,
    "nested": lambda: keras.Sequential([Nested()]),
}


def losses_of(strategy, make, build_before, in_function):
    """The losses of three steps, and the weights."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model, optimizer, loss_fn = make(), keras.optimizers.Adam(0.1), keras.losses.MeanSquaredError()
    if build_before:
        model(BATCHES[0][0])
        optimizer.build(model.trainable_variables)

    def step(x, y):
        with unisono.GradientTape() as tape:
            loss = loss_fn(y, model(x))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        return loss

    def on_all(x, y):
        loss = strategy.run(step, args=(x, y))
        return strategy.reduce("SUM", loss, axis=None) if strategy.num_replicas_in_sync > 1 else loss

    train = unisono.function(on_all) if in_function else on_all
    losses = [float(train(*batch)) for batch in strategy.distribute_dataset(BATCHES)]
    return losses, [np.asarray(w) for w in model.trainable_variables]


@pytest.mark.parametrize("kind", MODELS)
def test_the_first_step_builds_the_model(two, kind):
    one = unisono.OneDeviceStrategy("cpu:0")
    losses, weights = losses_of(one, MODELS[kind], build_before=True, in_function=False)
    for strategy, in_function in ((one, False), (two, True)):
        own_losses, own_weights = losses_of(strategy, MODELS[kind], False, in_function)
        np.testing.assert_allclose(own_losses, losses, rtol=1e-5)
        for own, weight in zip(own_weights, weights, strict=True):
            np.testing.assert_allclose(own, weight, rtol=1e-4, atol=1e-6)


def test_the_first_call_of_a_function_without_replicas():
    model = MODELS["sequential"]()

    @unisono.function
    def gradients(x):
        with unisono.GradientTape(persistent=True) as tape:
            tape.watch(x)
            loss = keras.ops.sum(model(x) ** 2)
        return tape.gradient(loss, model.trainable_variables), tape.gradient(loss, x)

    x = BATCHES[0][0]
    first, second = gradients(x), gradients(x)
    assert [g.shape for g in first[0]] == [w.shape for w in model.trainable_variables]
    assert any(np.any(np.asarray(g)) for g in first[0])
    np.testing.assert_array_equal(first[1], second[1])


def gan(strategy):
    """Two models, two tapes and two optimizers in one step, as TensorFlow's DCGAN tutorial has it."""
    keras.utils.set_random_seed(2)
    with strategy.scope():
        generator = keras.Sequential([L.Dense(4), L.LeakyReLU(), L.Dense(3)])
        discriminator = keras.Sequential([L.Dense(4), L.LeakyReLU(), L.Dropout(0.0), L.Dense(1)])
        optimizers = keras.optimizers.Adam(1e-2), keras.optimizers.Adam(1e-2)
        cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    def train_step(images, noise):
        with unisono.GradientTape() as gen_tape, unisono.GradientTape() as disc_tape:
            real = discriminator(images, training=True)
            fake = discriminator(generator(noise, training=True), training=True)
            gen_loss = cross_entropy(keras.ops.ones_like(fake), fake)
            disc_loss = cross_entropy(keras.ops.ones_like(real), real)
            disc_loss += cross_entropy(keras.ops.zeros_like(fake), fake)
        by_gen = gen_tape.gradient(gen_loss, generator.trainable_variables)
        by_disc = disc_tape.gradient(disc_loss, discriminator.trainable_variables)
        optimizers[0].apply_gradients(zip(by_gen, generator.trainable_variables, strict=True))
        optimizers[1].apply_gradients(zip(by_disc, discriminator.trainable_variables, strict=True))
        return gen_loss, disc_loss

    @unisono.function
    def epoch(data):
        losses = []
        for images, noise in data:
            losses.append(strategy.run(train_step, args=(images, noise)))
        return losses

    noise = np.random.default_rng(3).normal(size=(12, 2)).astype("float32")
    # 5 and 2 rows: the function holds a step for each.
    batches = [(ROWS[i : i + 5], noise[i : i + 5]) for i in (5, 10)]
    losses = epoch(strategy.distribute_dataset(batches))
    summed = [sum(float(x) for x in strategy.local_results(part)) for pair in losses for part in pair]
    return summed, [*generator.get_weights(), *discriminator.get_weights()]


def test_two_models(two):
    losses, weights = gan(unisono.OneDeviceStrategy("cpu:0"))
    own_losses, own_weights = gan(two)
    np.testing.assert_allclose(own_losses, losses, rtol=1e-5)
    for own, weight in zip(own_weights, weights, strict=True):
        np.testing.assert_allclose(own, weight, rtol=1e-4, atol=1e-6)
