"""The result of one device is the specification: `fit` on N replicas against plain Keras."""

import contextlib
import functools

import flax.linen
import jax
import keras
import numpy as np
import pytest

from tests.virtual.training._digits import (
    IN_CLUSTER,
    assert_equal,
    cnn,
    crossentropy,
    digits,
    mirrored,
    mlp,
    train,
)

pytestmark = pytest.mark.numbers

L = keras.layers
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(1e-3),
}
MODELS = {"mlp": mlp, "cnn": cnn}


@functools.cache
def whole_digits(model, optimizer, batch_size, replicas):
    def compiled():
        return {"optimizer": OPTIMIZERS[optimizer](), "loss": crossentropy(), "metrics": ["accuracy"]}

    return train(replicas, MODELS[model], compiled, batch_size=batch_size, epochs=3)


#: The numbers of replicas of the cases that `make test` runs, for each batch size.
FEW = {"mlp": {64: (2, 8), 50: (1, 2, 8)}, "cnn": {64: (), 50: (2,)}}
#: Each model with each batch size on each number of replicas. The optimizers take turns, as none sees how
#: rows are divided: each still trains each model on each number of replicas. A convolution sees it no more
#: than a dense layer, so that one case of it is enough between two landings.
DIGITS = [
    pytest.param(
        model,
        list(OPTIMIZERS)[(m + b + n) % 2],
        batch_size,
        replicas,
        marks=[] if replicas in FEW[model][batch_size] else [pytest.mark.exhaustive],
    )
    for m, model in enumerate(MODELS)
    for b, batch_size in enumerate([64, 50])
    for n, replicas in enumerate([1, 2, 3, 4, 8])
]


@pytest.mark.parametrize(("model", "optimizer", "batch_size", "replicas"), DIGITS)
def test_digits(model, optimizer, batch_size, replicas):
    """1,797 rows: both batch sizes are ragged at the end, and 50 does not divide by 3, 4 and 8."""
    expected = whole_digits(model, optimizer, batch_size, 0)
    assert_equal(whole_digits(model, optimizer, batch_size, replicas), expected)


def small(rows=200):
    x, y = digits()
    return x[:rows], y[:rows]


def regularized():
    return keras.Sequential(
        [
            keras.Input((64,)),
            L.Dense(16, activation="relu", kernel_regularizer="l2", activity_regularizer="l2"),
            L.Dense(10),
        ]
    )


def normalized():
    return mlp(L.BatchNormalization())


def two_heads():
    inputs = keras.Input((64,))
    hidden = L.Dense(16, activation="relu")(inputs)
    return keras.Model(inputs, [L.Dense(10, name="a")(hidden), L.Dense(1, name="b")(hidden)])


def subclassed():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.last = L.Dense(16, activation="relu"), L.Dense(10)

        def call(self, x):
            return self.last(self.first(x))

    return Net()


def own_steps():
    class Own(keras.Sequential):
        def train_step(self, state, data):
            logs, state = super().train_step(state, data)
            return logs, state

        def test_step(self, state, data):
            return super().test_step(state, data)

    return Own([keras.Input((64,)), L.Dense(10)])


def own_gradients():
    """Keras' guide to a training step of one's own on JAX: loss, derivatives and metrics by hand."""

    class Own(keras.Sequential):
        def loss_and_updates(self, trainable, non_trainable, x, y):
            y_pred, non_trainable = self.stateless_call(trainable, non_trainable, x, training=True)
            return self.compute_loss(x, y, y_pred), (y_pred, non_trainable)

        def train_step(self, state, data):
            trainable, non_trainable, optimizer, metrics = state
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            derive = jax.value_and_grad(self.loss_and_updates, has_aux=True)
            (loss, (y_pred, non_trainable)), grads = derive(trainable, non_trainable, x, y)
            trainable, optimizer = self.optimizer.stateless_apply(optimizer, grads, trainable)
            logs, updated = {}, []
            for metric in self.metrics:
                own = metrics[len(updated) : len(updated) + len(metric.variables)]
                args = (loss,) if metric.name == "loss" else (y, y_pred)
                own = metric.stateless_update_state(own, *args)
                logs[metric.name] = metric.stateless_result(own)
                updated += own
            return logs, (trainable, non_trainable, optimizer, updated)

    return Own([keras.Input((64,)), L.Dense(16, activation="relu"), L.Dense(10)])


def plain(**changes):
    return lambda: {"optimizer": "adam", "loss": crossentropy(), "metrics": ["accuracy"], **changes}


def optimizer(**kwargs):
    return lambda: plain(optimizer=keras.optimizers.Adam(1e-2, **kwargs))()


def two_losses():
    return {
        "optimizer": "adam",
        "loss": {"a": crossentropy(), "b": "mse"},
        "loss_weights": {"a": 1.0, "b": 0.5},
        "metrics": {"a": ["accuracy"], "b": ["mae"]},
    }


def many_metrics():
    metrics = [
        keras.metrics.SparseTopKCategoricalAccuracy(3),
        keras.metrics.SparseCategoricalAccuracy(),
        keras.metrics.SparseCategoricalCrossentropy(from_logits=True, name="ce"),
    ]
    return plain(metrics=metrics, weighted_metrics=["accuracy"])()


def binary_metrics():
    m = keras.metrics
    return {
        "optimizer": "adam",
        "loss": "binary_crossentropy",
        "metrics": [
            m.AUC(name="auc"),
            m.Precision(name="precision"),
            m.Recall(name="recall"),
            m.BinaryIoU(name="iou"),
            m.R2Score(name="r2"),
            m.F1Score(name="f1"),
        ],
    }


def binary():
    return keras.Sequential([keras.Input((64,)), L.Dense(1, activation="sigmoid")])


def even_digits():
    x, y = small()
    return x, (y % 2).astype("f4")[:, None]


def heads_data():
    x, y = small()
    return x, [y, y.astype("f4")[:, None]]


WEIGHT = np.random.default_rng(0).random(200).astype("f4")

#: name: (build, compile, arguments of `train`). Batches of 50 are even on 2 replicas and uneven on 3; what
#: never divides (31 rows, and 14 at the end) is trained on 3.
CASES = {
    "batch smaller than the replicas": (mlp, plain(), {"batch_size": 2, "data": small(7)}),
    "a size that never divides": (mlp, plain(), {"batch_size": 31, "only": [3]}),
    "never divides, rows mixed": (normalized, plain(), {"batch_size": 31, "only": [2], "data": small(155)}),
    "sample weights": (mlp, plain(weighted_metrics=["accuracy"]), {"sample_weight": WEIGHT}),
    "weights, never divides": (mlp, plain(), {"sample_weight": WEIGHT, "batch_size": 31, "only": [3]}),
    "class weights": (mlp, plain(), {"class_weight": {i: 1.0 + i for i in range(10)}}),
    "validation data": (mlp, plain(), {"validation_data": small(33)}),
    "validation split": (mlp, plain(), {"validation_split": 0.2}),
    "sum of losses": (mlp, lambda: plain(optimizer="sgd", loss=crossentropy(reduction="sum"))(), {}),
    "mean with weights": (
        mlp,
        lambda: plain(loss=crossentropy(reduction="mean_with_sample_weight"))(),
        {"sample_weight": WEIGHT},
    ),
    "regularizers": (regularized, plain(), {}),
    "regularizers, a loss of all rows": (
        regularized,
        lambda: plain(loss=crossentropy(ignore_class=1))(),
        {"only": [2]},
    ),
    "several outputs": (two_heads, two_losses, {"data": heads_data()}),
    "several outputs, never divides": (
        two_heads,
        two_losses,
        {"data": heads_data(), "batch_size": 31, "only": [3]},
    ),
    "clipnorm": (mlp, optimizer(clipnorm=0.1), {}),
    "global clipnorm": (mlp, optimizer(global_clipnorm=0.1), {}),
    "gradient accumulation": (mlp, optimizer(gradient_accumulation_steps=2), {}),
    "moving average": (mlp, optimizer(use_ema=True, ema_overwrite_frequency=2), {}),
    "metrics": (mlp, many_metrics, {}),
    "several steps at once": (mlp, plain(steps_per_execution=3), {}),
    "eagerly": (mlp, plain(run_eagerly=True), {"epochs": 1, "data": small(40)}),
    "not compiled": (mlp, plain(jit_compile=False), {"epochs": 1, "data": small(40)}),
    "built late": (lambda: keras.Sequential([L.Dense(8), L.Dense(10)]), plain(), {}),
    "subclassed": (subclassed, plain(), {}),
    "own steps": (own_steps, plain(), {}),
    "own gradients": (own_gradients, plain(), {}),
    "own gradients, never divides": (own_gradients, plain(), {"batch_size": 31, "only": [3]}),
    "initial epoch": (mlp, plain(), {"initial_epoch": 1}),
}  # fmt: skip


@functools.cache
def plain_feature(name):
    build, compile_with, options = CASES[name]
    return train(0, build, compile_with, **{"data": small(), **options})


#: Those of which another case is as hard: the same where no batch divides, or by other arguments of `fit`.
EASIER = ("several outputs", "own gradients", "validation split", "global clipnorm")
#: On 3 replicas a batch of 50 does not divide, which is the harder case; all tests run both.
FEATURES = [
    pytest.param(
        name,
        n,
        marks=[pytest.mark.exhaustive]
        if not IN_CLUSTER and ns == [2, 3] and (n == 2 or name in EASIER)
        else [],
    )
    for name, (_, _, options) in CASES.items()
    for ns in [options.pop("only", [2, 3])]
    for n in ns[: 1 if IN_CLUSTER else None]
]


@pytest.mark.parametrize(("name", "replicas"), FEATURES)
def test_feature(name, replicas):
    build, compile_with, options = CASES[name]
    found = train(replicas, build, compile_with, **{"data": small(), **options})
    assert_equal(found, plain_feature(name))


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")  # Keras' own F1Score
@pytest.mark.parametrize(
    ("batch_size", "replicas"),
    [pytest.param(50, 2, id="even", marks=pytest.mark.exhaustive), pytest.param(31, 3, id="never divides")],
)
def test_binary_metrics(batch_size, replicas):
    options = {"data": even_digits(), "batch_size": batch_size}
    expected = train(0, binary, binary_metrics, **options)
    assert_equal(train(replicas, binary, binary_metrics, **options), expected)


def test_synchronized_batch_normalization_equals_one_device():
    expected = train(
        0, lambda: mlp(L.BatchNormalization()), plain(optimizer="sgd"), data=small(192), batch_size=48
    )
    found = train(
        4,
        lambda: mlp(L.BatchNormalization(synchronized=True)),
        plain(optimizer="sgd"),
        data=small(192),
        batch_size=48,
    )
    assert_equal(found, expected)


class AssignsWhatItHolds(L.Layer):
    """As `FlaxLayer` does with the moving statistics of an inference, also where Keras builds the model."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[1:], initializer="ones", trainable=False)

    def call(self, inputs):
        self.scale.assign(self.scale.value)
        return inputs * self.scale


class Normalized(flax.linen.Module):
    """Flax' batch normalization."""

    @flax.linen.compact
    def __call__(self, inputs, training=False):
        return flax.linen.BatchNorm(use_running_average=not training, momentum=0.9)(inputs)


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_layers_that_assign_what_their_variables_hold(replicas):
    """Each replica gets the same rows, so that its statistics are those of the whole batch."""
    x, y = ([np.tile(part, (2, *(1,) * (part.ndim - 1))) for part in np.split(a, 4)] for a in small(96))
    # Not as arrays of JAX, whose memory a step of plain Keras takes.
    made = jax.tree.map(np.asarray, Normalized().init(jax.random.key(0), np.ones((1, 32), "f4")))

    def build():
        return mlp(AssignsWhatItHolds(), L.FlaxLayer(Normalized(), variables=made))

    options = {"data": (np.concatenate(x), np.concatenate(y)), "batch_size": 48}
    expected = train(0, build, plain(optimizer="sgd"), **options)
    assert_equal(train(replicas, build, plain(optimizer="sgd"), **options), expected)


def test_masks_count_over_all_replicas():
    """Tokens that are masked are not spread evenly, and Keras divides by those that are not."""
    tokens = np.random.default_rng(0).integers(0, 20, (70, 9)).astype("i4")
    tokens[:30, 4:] = 0

    def build():
        return keras.Sequential(
            [
                keras.Input((9,), dtype="int32"),
                L.Embedding(20, 8, mask_zero=True),
                L.SimpleRNN(6, return_sequences=True),
                L.Dense(3),
            ]
        )

    def run(replicas):
        return train(replicas, build, plain(optimizer="sgd"), data=(tokens, tokens % 3), batch_size=16)

    # Four rows on each replica, and at the end six, which do not divide.
    assert_equal(run(4), run(0))


def half_precision(initial_scale):
    def build():
        inputs = keras.Input((64,), dtype="float16")
        return keras.Model(inputs, L.Dense(10, dtype="mixed_float16")(inputs))

    def compiled():
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=initial_scale)
        return {"optimizer": scaled, "loss": crossentropy(), "metrics": ["accuracy"]}

    return build, compiled


def test_mixed_precision():
    """Half precision has three digits."""
    expected = train(0, *half_precision(2.0**10), data=small())
    loose = {"rtol": 5e-3, "atol": 5e-3}
    for replicas in (2, 3):
        found = train(replicas, *half_precision(2.0**10), data=small())
        assert_equal(found, expected, losses=loose, weights=loose, predictions=loose)


def test_an_overflow_is_skipped_by_all_replicas_together():
    """Where exactly a scale overflows depends on which rows are added up first: not compared."""
    model = train(2, *half_precision(2.0**24), data=small())["model"]
    assert float(model.optimizer.dynamic_scale.value) < 2.0**24
    for variable in model.variables + model.optimizer.variables:
        first, second = (np.asarray(shard.data) for shard in variable.value.addressable_shards)
        np.testing.assert_array_equal(first, second)
        assert np.isfinite(first).all()


def test_generators_and_steps_per_epoch():
    x, y = small()

    def batches():
        while True:
            for i in range(0, 200, 50):
                yield x[i : i + 50], y[i : i + 50]

    results = [_fit_generator(n, batches()) for n in (0, 2)]
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5)


def _fit_generator(replicas, batches):
    keras.utils.set_random_seed(1)
    with mirrored(replicas).scope() if replicas else contextlib.nullcontext():
        model = mlp()
        model.compile(**plain()())
    return model.fit(batches, steps_per_epoch=3, epochs=2, verbose=0, shuffle=False).history["loss"]


def test_single_batches():
    x, y = small(3)
    results = []
    for replicas in (0, 2):
        model = train(replicas, mlp, plain(), data=small(), epochs=1)["model"]
        losses = [model.train_on_batch(x, y), model.test_on_batch(x, y)]
        predictions = model.predict_on_batch(x)
        assert predictions.shape == (3, 10)
        results.append((losses, predictions))
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-5)
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-3, atol=1e-4)


def test_unfreezing_and_compiling_again_keeps_the_weights():
    results = []
    for replicas in (0, 2):
        model = train(replicas, mlp, plain(), data=small(), epochs=1)["model"]
        model.layers[0].trainable = False
        model.compile(**plain()())
        frozen = model.layers[0].get_weights()[0]
        model.fit(*small(), epochs=1, verbose=0, shuffle=False)
        np.testing.assert_array_equal(model.layers[0].get_weights()[0], frozen)
        model.layers[0].trainable = True
        model.compile(**plain()())
        model.fit(*small(), epochs=1, verbose=0, shuffle=False)
        results.append(model.get_weights())
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
