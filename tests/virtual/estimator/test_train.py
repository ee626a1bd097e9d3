"""`Estimator.train` against plain Keras on one device, with the union of the replicas' batches."""

import keras
import numpy as np
import pytest

import unisono
from unisono.data import Dataset
from unisono.estimator import Estimator, EstimatorSpec, ModeKeys, RunConfig
from unisono.estimator._train_op import apply_gradients, compute_gradients, get_global_step, group, minimize

RNG = np.random.default_rng(0)
X = RNG.normal(size=(70, 6)).astype("float32")
Y = (X @ RNG.normal(size=(6, 1)) + 0.3).astype("float32")
IMAGES = RNG.normal(size=(24, 8, 8, 2)).astype("float32")
LABELS = RNG.integers(0, 3, 24)
WORDS = RNG.integers(1, 20, (24, 5))

layers = keras.layers


def mlp():
    return keras.Sequential([layers.Dense(8, "tanh", kernel_regularizer="l2"), layers.Dense(1)])


def dropout():
    return keras.Sequential([layers.Dense(8, "tanh"), layers.Dropout(0.5), layers.Dense(1)])


def functional():
    inputs = keras.Input((6,))
    hidden = layers.Dense(5, "relu")(inputs)
    return keras.Model(
        inputs, layers.Dense(1)(layers.Concatenate()([inputs, layers.LayerNormalization()(hidden)]))
    )


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(7, "gelu"), layers.Dense(1)

    def call(self, x):
        return self.out(self.hidden(x))


def cnn():
    return keras.Sequential(
        [
            layers.Conv2D(4, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )


def synchronized_cnn():
    bn = layers.BatchNormalization(synchronized=True)
    return keras.Sequential([layers.Conv2D(4, 3), bn, layers.Flatten(), layers.Dense(3)])


def rnn():
    return keras.Sequential([layers.Embedding(20, 4, mask_zero=True), layers.SimpleRNN(5), layers.Dense(3)])


def decayed():
    return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), momentum=0.9)


MSE = keras.losses.MeanSquaredError
CE = lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True)  # noqa: E731
ADAM = lambda: keras.optimizers.Adam(0.01)  # noqa: E731
NONE, TWO, FOUR = None, ("cpu:0", "cpu:1"), ("cpu:0", "cpu:1", "cpu:2", "cpu:3")


def model_fn_of(make_model, make_loss, make_optimizer, clips=False):
    def model_fn(features, labels, mode):
        model = make_model()
        outputs = model(features, training=mode == ModeKeys.TRAIN)
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(mode, predictions={"outputs": outputs})
        loss = make_loss()(labels, outputs) + sum(model.losses)
        optimizer = make_optimizer()
        if clips:
            pairs = compute_gradients(optimizer, loss)
            grads, _ = zip(*pairs, strict=True)
            norm = keras.ops.sqrt(sum(keras.ops.sum(g * g) for g in grads))
            pairs = [(g * keras.ops.minimum(1.0, 0.5 / norm), v) for g, v in pairs]
            train_op = group(apply_gradients(optimizer, pairs, get_global_step()))
        else:
            train_op = minimize(optimizer, loss)
        return EstimatorSpec(mode, loss=loss, train_op=train_op)

    return model_fn


def data(x, y, batch):
    return lambda: Dataset.from_tensor_slices((x, y)).batch(batch)


def reference(make_model, make_loss, make_optimizer, x, y, batch, epochs=1):
    # Variables are compared in the order of their names, in which dense_10 comes before dense_9.
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    model = make_model()
    model.compile(make_optimizer(), make_loss())
    model.fit(x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0)
    return model


def compare(estimator, model, tolerance=2e-5):
    for name, variable in zip(
        sorted(
            n for n in estimator.get_variable_names() if not n.startswith(("adam", "sgd", "global", "loss_"))
        ),
        sorted(model.variables, key=lambda v: v.path),
        strict=True,
    ):
        np.testing.assert_allclose(
            estimator.get_variable_value(name), variable.value, atol=tolerance, rtol=tolerance, err_msg=name
        )


def strategy_of(devices):
    return None if devices is None else unisono.MirroredStrategy(list(devices))


@pytest.mark.parametrize(
    ("make_model", "make_loss", "make_optimizer", "x", "y", "devices", "batch"),
    [
        (mlp, MSE, ADAM, X[:40], Y[:40], NONE, 16),
        (dropout, MSE, ADAM, X, Y, NONE, 14),
        (mlp, MSE, ADAM, X, Y, TWO, 8),  # 70 = 4 * 16 + 6: the last step has one short element
        (functional, MSE, decayed, X, Y, FOUR, 5),  # 3 * 20 + 10: two elements for four replicas
        (Subclassed, MSE, decayed, X[:60], Y[:60], TWO, 10),
        (rnn, CE, ADAM, WORDS, LABELS, TWO, 6),
        (cnn, CE, ADAM, IMAGES, LABELS, NONE, 12),
        (synchronized_cnn, CE, decayed, IMAGES, LABELS, TWO, 6),
    ],
    ids=lambda v: getattr(v, "__name__", None) or ("" if isinstance(v, np.ndarray) else str(v)),
)
def test_training_is_that_of_one_device(make_model, make_loss, make_optimizer, x, y, devices, batch):
    config = RunConfig(tf_random_seed=3, train_distribute=strategy_of(devices), save_summary_steps=0)
    estimator = Estimator(model_fn_of(make_model, make_loss, make_optimizer), config=config)
    estimator.train(data(x, y, batch))
    model = reference(make_model, make_loss, make_optimizer, x, y, batch * len(devices or [0]))
    compare(estimator, model)
    steps = -(-len(x) // (batch * len(devices or [0])))
    assert estimator.get_variable_value("global_step") == steps


@pytest.mark.parametrize(
    "make_strategy",
    [
        lambda: unisono.CentralStorageStrategy(["cpu:0", "cpu:1"]),
        lambda: unisono.MirroredStrategy(["cpu:0", "cpu:1"], state_layout="sharded"),
        lambda: unisono.OneDeviceStrategy("cpu:1"),
        unisono.ParameterServerStrategy,
    ],
    ids=["central", "sharded", "one", "parameter servers"],
)
def test_other_strategies(make_strategy):
    strategy = make_strategy()
    batch = 40 // strategy.num_replicas_in_sync
    config = RunConfig(tf_random_seed=3, train_distribute=strategy, save_summary_steps=0)
    estimator = Estimator(model_fn_of(mlp, MSE, ADAM), config=config).train(data(X[:40], Y[:40], batch))
    compare(estimator, reference(mlp, MSE, ADAM, X[:40], Y[:40], 40, epochs=1))


def test_clipped_gradients_are_those_of_all_replicas():
    results = []
    for devices, batch in ((NONE, 20), (TWO, 10)):
        config = RunConfig(tf_random_seed=3, train_distribute=strategy_of(devices), save_summary_steps=0)
        estimator = Estimator(model_fn_of(mlp, MSE, ADAM, clips=True), config=config)
        estimator.train(data(X[:60], Y[:60], batch))
        results.append(estimator)
    names = results[0].get_variable_names()
    assert names == results[1].get_variable_names()
    for name in names:
        first, second = (e.get_variable_value(name) for e in results)
        np.testing.assert_allclose(first, second, atol=1e-5, err_msg=name)
    assert results[1].get_variable_value("global_step") == 3


def test_mixed_precision_scales_the_loss():
    def half():
        return keras.Sequential(
            [layers.Dense(8, "tanh", dtype="mixed_float16"), layers.Dense(1, dtype="float32")]
        )

    def scaled():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0)

    model = reference(half, MSE, scaled, X[:60], Y[:60], 20)
    for devices, batch in ((NONE, 20), (TWO, 10)):
        config = RunConfig(tf_random_seed=3, train_distribute=strategy_of(devices), save_summary_steps=0)
        estimator = Estimator(model_fn_of(half, MSE, scaled), config=config).train(
            data(X[:60], Y[:60], batch)
        )
        compare(estimator, model, tolerance=2e-3)


def test_training_goes_on_where_it_ended():
    model = reference(mlp, MSE, ADAM, X[:64], Y[:64], 16, epochs=3)
    estimator = Estimator(
        model_fn_of(mlp, MSE, ADAM), config=RunConfig(tf_random_seed=3, save_summary_steps=0)
    )
    assert estimator.train(data(X[:64], Y[:64], 16)) is estimator
    again = Estimator(model_fn_of(mlp, MSE, ADAM), model_dir=estimator.model_dir)
    again.train(lambda: data(X[:64], Y[:64], 16)().repeat(), steps=4)
    again.train(lambda: data(X[:64], Y[:64], 16)().repeat(), max_steps=12)
    again.train(lambda: data(X[:64], Y[:64], 16)().repeat(), max_steps=12)
    assert again.get_variable_value("global_step") == 12
    compare(again, model)


def test_a_scalar_label_per_element_as_in_the_readme_of_tf_contrib_distribute():
    def model_fn(features, labels, mode):
        logits = layers.Dense(1)(features)
        if mode == ModeKeys.PREDICT:
            return EstimatorSpec(mode, predictions={"logits": logits})
        loss = keras.ops.mean((labels - keras.ops.reshape(logits, [])) ** 2)
        return EstimatorSpec(mode, loss=loss, train_op=minimize(keras.optimizers.SGD(0.2), loss))

    def input_fn():
        features = Dataset.from_tensors([[1.0]]).repeat(100)
        return Dataset.zip((features, Dataset.from_tensors(1.0).repeat(100)))

    for devices, steps in ((NONE, 100), (TWO, 50), (("cpu:0", "cpu:1", "cpu:2"), 34)):
        estimator = Estimator(model_fn, config=RunConfig(train_distribute=strategy_of(devices)))
        estimator.train(input_fn)
        assert estimator.get_variable_value("global_step") == steps
        np.testing.assert_allclose(next(estimator.predict(input_fn))["logits"], [1.0], atol=1e-5)
