"""Models with steps in TensorFlow's form, as keras.io's examples write them, small."""

# ruff: noqa: B905

import keras
import numpy as np

from unisono import tf

L = tf.keras.layers


def rows(*widths, count=21, seed=0):
    """Arrays of random numbers with the same number of rows."""
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=(count, width)).astype("float32") for width in widths)


class Gan(tf.keras.Model):
    """Two optimizers under names of its own, no `call`; noise comes with the data."""

    def __init__(self):
        super().__init__()
        self.generator = tf.keras.Sequential([L.Dense(3, activation="tanh"), L.Dense(3)])
        self.discriminator = tf.keras.Sequential([L.Dense(4, activation="tanh"), L.Dense(1)])
        self.g_metric = tf.keras.metrics.Mean(name="g_loss")
        self.d_metric = tf.keras.metrics.Mean(name="d_loss")
        self.accuracy = tf.keras.metrics.BinaryAccuracy(name="accuracy")

    def compile(self, g_optimizer, d_optimizer, loss_fn, **options):
        super().compile(**options)
        self.optimizers = {"g": g_optimizer, "d": [d_optimizer]}
        self.loss_fn = loss_fn

    @property
    def metrics(self):
        return [self.g_metric, self.d_metric, self.accuracy]

    def train_step(self, data):
        real, noise = data
        ones, zeros = tf.ones((tf.shape(real)[0], 1)), tf.zeros((tf.shape(real)[0], 1))
        with tf.GradientTape() as tape:
            logits = self.discriminator(real)
            fake = self.discriminator(self.generator(noise))
            d_loss = self.loss_fn(ones, logits) + self.loss_fn(zeros, fake)
        weights = self.discriminator.trainable_weights
        self.optimizers["d"][0].apply_gradients(zip(tape.gradient(d_loss, weights), weights))
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(ones, self.discriminator(self.generator(noise)))
        weights = self.generator.trainable_weights
        self.optimizers["g"].apply_gradients(zip(tape.gradient(g_loss, weights), weights))
        self.g_metric.update_state(g_loss)
        self.d_metric.update_state(d_loss)
        self.accuracy.update_state(ones, tf.sigmoid(logits))
        return {
            "g_loss": self.g_metric.result(),
            "d_loss": self.d_metric.result(),
            "last_d_loss": d_loss,
            "error": 1 - self.accuracy.result(),
        }

    def test_step(self, data):
        real, _noise = data
        self.g_metric.update_state(self.loss_fn(tf.ones((tf.shape(real)[0], 1)), self.discriminator(real)))
        return {"g_loss": self.g_metric.result()}

    def predict_step(self, data):
        return self.generator(data)


def gan(**options):
    """A compiled `Gan`, from the same numbers each time."""
    keras.utils.set_random_seed(1)
    model = Gan()
    loss = tf.keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(0.01), tf.keras.optimizers.SGD(0.1, 0.9), loss, **options)
    return model


def weights_of(model):
    return [np.asarray(v.value) for v in model.trainable_variables]
