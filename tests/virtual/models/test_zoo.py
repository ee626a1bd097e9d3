"""Other people's models: each on two and on three replicas against plain Keras.

20 rows in batches of 10 are split over two replicas; they do not divide over three, so that rows are
filled up, or every replica computes all.
"""

import functools

import jax
import keras
import numpy as np
import pytest

from tests.virtual.models._zoo import (
    HALF,
    Entry,
    assert_alike,
    classes,
    images,
    labels,
    numbers,
    sequences,
    sgd,
    tokens,
    trained,
    vectors,
)

#: RNNs of Keras 3.16 say that they pass no mask on, also without a strategy.
pytestmark = [pytest.mark.numbers, pytest.mark.filterwarnings("ignore:.*does not support masking")]

L, ops = keras.layers, keras.ops


def dense(*extra, outputs=3, **kwargs):
    return keras.Sequential(
        [keras.Input((6,)), L.Dense(8, activation="tanh", **kwargs), *extra, L.Dense(outputs)]
    )


# --- architectures ------------------------------------------------------------------------------


def several_inputs():
    a, b = keras.Input((6,), name="a"), keras.Input((5, 4), name="b")
    joined = L.Concatenate()([L.Dense(4, activation="relu")(a), L.GlobalAveragePooling1D()(b)])
    return keras.Model(
        {"a": a, "b": b}, {"x": L.Dense(3, name="x")(joined), "y": L.Dense(1, name="y")(joined)}
    )


def several_inputs_data(rows):
    x = {"a": numbers(rows, 6), "b": numbers(rows, 5, 4)}
    return x, {"x": numbers(rows, 3, seed=1), "y": numbers(rows, 1, seed=2)}


def several_losses():
    return {
        "optimizer": keras.optimizers.SGD(0.05),
        "loss": {"x": "mse", "y": "mae"},
        "loss_weights": {"x": 1.0, "y": 0.3},
        "metrics": {"x": ["mae"], "y": ["mse"]},
    }


def shared_layers():
    a = keras.Input((6,))
    shared = L.Dense(6, activation="tanh")
    return keras.Model(a, L.Dense(3)(L.Add()([shared(a), shared(shared(a))])))


def convolutions():
    inputs = keras.Input((8, 8, 3))
    x = L.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    x = L.Add()([x, L.DepthwiseConv2D(3, padding="same")(x)])
    x = L.GroupNormalization(2)(L.MaxPooling2D()(x))
    return keras.Model(inputs, L.Dense(3)(L.GlobalAveragePooling2D()(x)))


def transposed():
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            L.SeparableConv2D(4, 3, strides=2, padding="same"),
            L.LayerNormalization(),
            L.Conv2DTranspose(3, 3, strides=2, padding="same"),
            L.Flatten(),
            L.Dense(3),
        ]
    )


def frozen_mobilenet():
    """Fine-tuning: the statistics of the part that was trained before stay."""
    base = keras.applications.MobileNet((32, 32, 3), 0.25, weights=None, include_top=False, pooling="avg")
    base.trainable = False
    inputs = keras.Input((8, 8, 3))
    return keras.Model(inputs, L.Dense(3)(base(L.UpSampling2D(4)(inputs), training=False)))


def transformer():
    inputs = keras.Input((5,), dtype="int32")
    x = L.Embedding(12, 8)(inputs)
    y = L.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True)
    x = L.LayerNormalization()(L.Add()([x, y]))
    y = L.Dense(8)(L.Dense(16, activation="gelu")(x))
    x = L.RMSNormalization()(L.Add()([x, y]))
    return keras.Model(inputs, L.Dense(3)(L.GlobalMaxPooling1D()(x)))


def masked_lstm():
    return keras.Sequential(
        [keras.Input((5,), dtype="int32"), L.Embedding(12, 6, mask_zero=True), L.LSTM(5), L.Dense(3)]
    )


def bidirectional():
    layers = [L.Bidirectional(L.GRU(3, return_sequences=True)), L.TimeDistributed(L.Dense(4)), L.SimpleRNN(3)]
    return keras.Sequential([keras.Input((5, 4)), *layers])


def masking_layer():
    return keras.Sequential([keras.Input((5, 4)), L.Masking(), L.GRU(3), L.Dense(3)])


def nested_models():
    inner = keras.Sequential([L.Dense(5, activation="relu"), L.Dense(4)])
    return keras.Sequential([keras.Input((6,)), inner, keras.Sequential([L.Dense(3)])])


def lazily_built():
    return keras.Sequential([L.Dense(5, activation="relu"), L.Dense(3)])


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.blocks = [L.Dense(6, activation="tanh") for _ in range(2)]
        self.head = L.Dense(3)

    def call(self, x, training=False):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def fixed_batch(size):
    return lambda: keras.Sequential([keras.Input(batch_shape=(size, 6)), L.Dense(3)])


def stateful(size):
    def build():
        layers = [L.LSTM(4, stateful=True), L.Dense(3)]
        return keras.Sequential([keras.Input(batch_shape=(size, 5, 4)), *layers])

    return build


def functional_operations():
    inputs = keras.Input((6,))
    return keras.Model(inputs, L.Dense(3)(ops.tanh(inputs * 2.0) - ops.mean(inputs, axis=-1, keepdims=True)))


def batch_normalization():
    return dense(L.BatchNormalization())


def synchronized():
    return dense(L.BatchNormalization(synchronized=True))


# --- layers that users write ----------------------------------------------------------------------


class Centered(L.Layer):
    """Rows meet: the batch's mean is taken away."""

    def call(self, x):
        return x - ops.mean(x, axis=0, keepdims=True)


class Scaled(L.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return x * self.scale


class SumOfSquares(L.Layer):
    """Adds a loss that is a sum over rows."""

    def call(self, x):
        self.add_loss(0.01 * ops.sum(ops.square(x)))
        return x


class MeanOfSquares(L.Layer):
    def call(self, x):
        self.add_loss(ops.mean(ops.sum(ops.square(x), axis=-1)))
        return x


def jax_layer():
    """With given weights: to make them itself, Keras' layer needs TensorFlow."""
    return L.JaxLayer(
        lambda params, inputs: (inputs - inputs.mean(0)) * params["scale"], params={"scale": np.float32(2)}
    )


def counting_layer():
    class Counting(L.Layer):
        def build(self, shape):
            self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int32")

        def call(self, x, training=False):
            if training:
                self.calls.assign_add(1)
            return x

    return Counting()


def autoencoder():
    """A variational autoencoder whose noise is left out, with both of its losses added by layers."""

    class Divergence(L.Layer):
        def call(self, inputs):
            mean, log = inputs
            self.add_loss(-0.5 * ops.mean(ops.sum(1 + log - ops.square(mean) - ops.exp(log), axis=-1)))
            return mean

    inputs = keras.Input((6,))
    hidden = L.Dense(8, activation="relu")(inputs)
    code = Divergence()([L.Dense(2)(hidden), L.Dense(2)(hidden)])
    return keras.Model(inputs, L.Dense(3)(L.Dense(8, activation="relu")(code)))


# --- steps that users write -----------------------------------------------------------------------


class OwnStep(keras.Sequential):
    """Keras' guide to a training step of one's own."""

    def losses_of(self, trainable, non_trainable, x, y):
        y_pred, non_trainable = self.stateless_call(trainable, non_trainable, x, training=True)
        return self.compute_loss(x, y, y_pred), (y_pred, non_trainable)

    def train_step(self, state, data):
        trainable, non_trainable, optimizer, metrics = state
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        derive = jax.value_and_grad(self.losses_of, has_aux=True)
        (loss, (_, non_trainable)), grads = derive(trainable, non_trainable, x, y)
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, grads, trainable)
        new = self.metrics[0].stateless_update_state(metrics[:2], loss)
        logs = {"loss": self.metrics[0].stateless_result(new)}
        return logs, (trainable, non_trainable, optimizer, [*new, *metrics[2:]])


class OwnLoss(keras.Sequential):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return ops.mean(ops.square(y - y_pred)) + 0.1 * ops.mean(ops.abs(y_pred))


class Adversaries(keras.Model):
    """A GAN with two optimizers, without noise."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((6,)), L.Dense(4, activation="relu"), L.Dense(3)])
        self.discriminator = keras.Sequential([keras.Input((3,)), L.Dense(4, activation="relu"), L.Dense(1)])
        self.rate = 0.05
        self.built = True

    def call(self, x):
        return self.discriminator(self.generator(x))

    def train_step(self, state, data):
        trainable, non_trainable, optimizer, metrics = state
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        split = len(self.generator.trainable_variables)

        def generator_loss(own, other):
            fake, _ = self.generator.stateless_call(own, [], x)
            return ops.mean(ops.softplus(-self.discriminator.stateless_call(other, [], fake)[0]))

        def discriminator_loss(own, other):
            fake, _ = self.generator.stateless_call(other, [], x)
            real = self.discriminator.stateless_call(own, [], y)[0]
            return ops.mean(
                ops.softplus(self.discriminator.stateless_call(own, [], fake)[0]) + ops.softplus(-real)
            )

        first, g = jax.value_and_grad(generator_loss)(trainable[:split], trainable[split:])
        second, d = jax.value_and_grad(discriminator_loss)(trainable[split:], trainable[:split])
        trainable, optimizer = self.optimizer.stateless_apply(optimizer, [*g, *d], trainable)
        logs = {"generator": first, "discriminator": second}
        return logs, (trainable, non_trainable, optimizer, metrics)


def adapted():
    model = dense()
    model.layers[0].enable_lora(2)
    return model


def quantized():
    model = dense()
    for layer in model.layers:
        layer.quantize("float8")
    return model


def scaled_half():
    inputs = keras.Input((6,), dtype="float16")
    return keras.Model(inputs, L.Dense(3, dtype="mixed_float16")(inputs))


def brain_half():
    return dense(dtype=keras.DTypePolicy("mixed_bfloat16"))


def constrained():
    constraint = keras.constraints.MaxNorm(0.5)
    return dense(kernel_constraint=constraint, kernel_regularizer="l2", activity_regularizer="l1")


def adam(**kwargs):
    return lambda: {"optimizer": keras.optimizers.Adam(1e-2, **kwargs), "loss": "mse"}


def scaled_loss():
    inner = keras.optimizers.SGD(0.05)
    return {"optimizer": keras.optimizers.LossScaleOptimizer(inner, initial_scale=64.0), "loss": "mse"}


def weights(rows):
    return {"sample_weight": abs(numbers(rows, seed=5))}


def class_weights(rows):
    return {"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}}


def schedule():
    return sgd(optimizer=keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 9)))()


ZOO = {
    "functional, several inputs and outputs": Entry(several_inputs, several_losses, several_inputs_data),
    "shared layers": Entry(shared_layers),
    "convolutions": Entry(convolutions, labels(), images),
    "transposed convolutions": Entry(transposed, labels(), images),
    "frozen MobileNet": Entry(frozen_mobilenet, labels(), images),
    "transformer": Entry(transformer, labels(), tokens),
    "LSTM with a mask": Entry(masked_lstm, labels(), tokens),
    "bidirectional": Entry(bidirectional, data=sequences),
    "Masking": Entry(masking_layer, data=sequences),
    "nested models": Entry(nested_models),
    "lazily built": Entry(lazily_built),
    "subclassed": Entry(Subclassed),
    "operations without layers": Entry(functional_operations),
    "BatchNormalization": Entry(batch_normalization, splits=False),
    "BatchNormalization, synchronized": Entry(synchronized),
    "a layer of a user": Entry(lambda: dense(Scaled())),
    "a layer that mixes rows": Entry(lambda: dense(Centered()), splits=False),
    "JAX code that mixes rows": Entry(lambda: dense(jax_layer()), splits=False),
    "a lambda that mixes rows": Entry(lambda: dense(L.Lambda(lambda x: x - ops.mean(x, 0))), splits=False),
    "a layer that counts": Entry(lambda: dense(counting_layer())),
    "an added sum": Entry(lambda: dense(SumOfSquares())),
    "an added mean": Entry(lambda: dense(MeanOfSquares())),
    "variational autoencoder": Entry(autoencoder),
    "a step of one's own": Entry(lambda: OwnStep([keras.Input((6,)), L.Dense(3)])),
    "a loss of one's own": Entry(lambda: OwnLoss([keras.Input((6,)), L.Dense(3)])),
    "adversaries": Entry(Adversaries, sgd(loss=None)),
    "LoRA": Entry(adapted),
    "float8": Entry(quantized, tolerance=HALF),
    "float16": Entry(scaled_half, scaled_loss, tolerance=HALF),
    "bfloat16": Entry(brain_half, tolerance=HALF),
    "constraints and regularizers": Entry(constrained),
    "moving average": Entry(dense, adam(use_ema=True, ema_overwrite_frequency=1)),
    "accumulated gradients": Entry(dense, adam(gradient_accumulation_steps=2)),
    "weights of rows": Entry(dense, labels(weighted_metrics=["accuracy"]), classes, fit=weights),
    "weights of classes": Entry(dense, labels(), classes, fit=class_weights),
    "validation": Entry(dense, labels(), classes, fit=lambda rows: {"validation_data": classes(7)}),
    "schedule": Entry(dense, schedule),
}  # fmt: skip

NAMES = ("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax")
NAMES += ("Nadam", "Adafactor", "Ftrl", "Lion", "Lamb", "Muon")


def optimized(name):
    return lambda: sgd(optimizer=getattr(keras.optimizers, name)(learning_rate=1e-2))()


ALL = ZOO | {f"optimizer {name}": Entry(dense, optimized(name)) for name in NAMES}


#: A batch divides on two replicas, and does not on three.
ROWS, BATCH = 20, 10


@functools.cache
def expected(name):
    return trained(ALL[name], 0, ROWS, BATCH)


#: What `make test` trains on two replicas, too, whose parts are even: all that splits is trained on three.
EVEN = ("functional, several inputs and outputs", "convolutions", "frozen MobileNet", "validation")
EVEN += ("BatchNormalization, synchronized", "accumulated gradients", "weights of rows", "an added sum")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in EVEN else [pytest.mark.exhaustive])
        for name, entry in ZOO.items()
        if entry.splits
    ],
)
def test_two_replicas(name):
    """Not where rows meet inside the model, replica by replica."""
    entry = ALL[name]
    assert_alike(trained(entry, 2, ROWS, BATCH), expected(name), entry.tolerance)


@pytest.mark.parametrize("name", [name for name in ALL if name != "frozen MobileNet"])
def test_three_replicas_and_a_batch_that_does_not_divide(name):
    assert_alike(trained(ALL[name], 3, ROWS, BATCH), expected(name), ALL[name].tolerance)


@pytest.mark.parametrize(
    ("build", "data"), [(fixed_batch, vectors), (stateful, sequences)], ids=["fixed batch", "stateful"]
)
def test_a_model_for_one_batch_size_runs_whole(build, data, caplog):
    entry = Entry(build(12), data=data)
    assert_alike(trained(entry, 2, 24, 12), trained(entry, 0, 24, 12), entry.tolerance)
    assert sum("every replica computes all" in r.message for r in caplog.records) == 1


class RefusesWholeBatches(L.Layer):
    def call(self, x, training=False):
        if training and x.shape[0] == BATCH:
            raise ValueError("too many rows")
        self.add_loss(ops.mean(x))
        return x


def test_a_layer_that_refuses_the_rows_of_all_replicas_sees_those_of_one_which_is_said(caplog):
    trained(Entry(lambda: dense(RefusesWholeBatches())), 2, ROWS, BATCH)
    assert f"a step that takes {BATCH // 2} rows and not {BATCH}" in caplog.text


def in_a_subclassed_model():
    return Wrapping(lazily_built())


class Wrapping(keras.Model):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x):
        return self.inner(x)


@pytest.mark.parametrize("build", [lazily_built, in_a_subclassed_model])
def test_a_sequential_built_by_its_first_batch_is_split(build, caplog):
    entry = Entry(build)
    assert_alike(trained(entry, 2, 24, 12), trained(entry, 0, 24, 12), entry.tolerance)
    assert not [r for r in caplog.records if "every replica computes all" in r.message]
