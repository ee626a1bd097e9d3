"""A user's own step for JAX is read, without the arithmetic of its optimizer."""

import jax
import keras
import numpy as np
import pytest

from tests.virtual.training._digits import mirrored
from unisono.training.groups._batch_policy import Mode

X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")


class CountingSGD(keras.optimizers.SGD):
    """Counts how often an update is traced."""

    updates = 0

    def update_step(self, gradient, variable, learning_rate):
        self.updates += 1
        super().update_step(gradient, variable, learning_rate)


class OwnStep(keras.Model):
    """Applies gradients to weights that were decayed before, by a factor that `decay` makes of the loss."""

    decay = staticmethod(lambda weights, loss: weights)

    def train_step(self, state, data):
        trainable, non_trainable, optimizer, metrics = state
        x, y, *_ = data

        def loss_of(trainable):
            y_pred, _ = self.stateless_call(trainable, non_trainable, x, training=True)
            return self.compute_loss(x, y, y_pred)

        loss, found = jax.value_and_grad(loss_of)(trainable)
        trainable = self.decay(trainable, loss)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, found, trainable)
        return {"loss": loss}, (trainable, non_trainable, optimizer, metrics)


def trained(decay, scope):
    keras.utils.set_random_seed(0)
    with scope:
        inputs = keras.Input((3,))
        model = OwnStep(inputs, keras.layers.Dense(2)(inputs))
        model.decay = decay
        model.compile(CountingSGD(0.1), "mse")
    model.fit(X, X[:, :2] ** 2, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize(
    ("decay", "mode", "traces"),
    [
        (lambda weights, loss: weights, Mode.SPLIT, 1),
        # The same on all replicas, but not what the step was given: the reading traces the optimizer.
        (lambda weights, loss: [0.9 * w for w in weights], Mode.SPLIT, 3),
        # Each replica's own loss, of which the gradients that are reduced say nothing.
        (lambda weights, loss: [w / (1 + loss) for w in weights], Mode.JOINED, 3),
    ],
)
def test_an_optimizer_is_traced_only_where_its_weights_are_others(decay, mode, traces):
    one = trained(decay, mirrored(1).scope())
    two = trained(decay, mirrored(2).scope())
    assert {key.mode for key in two.train_function._programs} == {mode}
    assert two.optimizer.updates == traces * len(two.trainable_variables)
    for a, b in zip(one.get_weights(), two.get_weights(), strict=True):
        assert b == pytest.approx(a, rel=1e-5, abs=1e-7)
