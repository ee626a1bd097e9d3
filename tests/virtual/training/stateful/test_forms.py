"""Ways to write a step by hand: which of them give the numbers of one device, also of a ragged last batch."""

import keras
import numpy as np
import pytest

import unisono
from tests.virtual.training.stateful._models import L, rows, weights_of
from unisono import tf


class Form(keras.Model):
    """A step whose loss a subclass writes."""

    def __init__(self):
        super().__init__()
        self.net = keras.Sequential([keras.Input((3,)), L.Dense(4, "tanh"), L.Dense(1)])
        self.mean = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.mean]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(y, self.net(x, training=True))
        weights = self.net.trainable_variables
        self.update(tape.gradient(loss, weights), weights)
        self.mean.update_state(loss)
        return {"loss": self.mean.result()}

    def update(self, gradients, weights):
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))


class ReduceMean(Form):
    def loss_of(self, y, p):
        return tf.reduce_mean(tf.square(y - p))


class AverageLoss(Form):
    def loss_of(self, y, p):
        regularizer = tf.reduce_sum(tf.square(self.net.trainable_variables[0]))
        each = tf.reduce_mean(tf.square(y - p), axis=1)
        return tf.nn.compute_average_loss(each) + tf.nn.scale_regularization_loss(0.01 * regularizer)


class Accumulates(ReduceMean):
    """Applies the mean of two gradients every other step, in a branch."""

    aggregation = tf.VariableAggregation.MEAN

    def __init__(self):
        super().__init__()
        options = {"trainable": False, "aggregation": self.aggregation}
        self.sums = [tf.Variable(tf.zeros_like(v), **options) for v in self.net.trainable_variables]
        self.steps = tf.Variable(0, trainable=False)

    def update(self, gradients, weights):
        for total, gradient in zip(self.sums, gradients, strict=True):
            total.assign_add(gradient / 2)
        self.steps.assign_add(1)

        def apply():
            self.optimizer.apply_gradients(zip(self.sums, weights, strict=True))
            for total in self.sums:
                total.assign(tf.zeros_like(total))

        tf.cond(tf.equal(self.steps % 2, 0), apply, lambda: None)


class AccumulatesApart(Accumulates):
    """Each replica adds its own gradients to its own copy, until a ragged batch."""

    aggregation = tf.VariableAggregation.NONE


def trained(kind, replicas, batch_size=8):
    keras.utils.set_random_seed(4)
    with unisono.MirroredStrategy([f"cpu:{i}" for i in range(replicas)]).scope():
        model = kind()
        model.compile(keras.optimizers.SGD(0.1), "mse")
    # 5 rows are left over; for halves of two gradients nothing is.
    x, y = rows(3, 1, count=21)
    history = model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0).history
    return weights_of(model), history["loss"]


def close(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [AverageLoss, Accumulates, AccumulatesApart])
def test_two_replicas_give_the_numbers_of_one_device(kind):
    """`test_ahead` does it for `compute_loss`."""
    (weights, losses), (expected, expected_losses) = trained(kind, 2), trained(kind, 1)
    close(weights, expected)
    close(losses, expected_losses)


def test_accumulated_gradients_are_those_of_the_batches_together():
    """Of 21 rows in batches of 7: the third and fourth batch, across epochs, as the first and second."""
    accumulated, _ = trained(Accumulates, 1, 7)
    keras.utils.set_random_seed(4)
    model = ReduceMean()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x, y = rows(3, 1, count=21)
    for parts in ((0, 7), (14, 0), (7, 14)):
        index = np.concatenate([np.arange(start, start + 7) for start in parts])
        model.train_on_batch(x[index], y[index])
    close(accumulated, weights_of(model))
