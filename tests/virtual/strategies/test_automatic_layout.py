"""Replicas of several devices that share weights as the program says: numbers of one device, and messages."""

import logging
import re

import jax
import keras
import numpy as np
import pytest

import unisono
from tests.support import devices
from unisono.model_parallel._program_messages import messages_of
from unisono.step._keras_internals import stored_value
from unisono.step._value_handle import DeferredValue
from unisono.training.trainer._lowered_step import lowered_step

pytestmark = pytest.mark.numbers

L, ops = keras.layers, keras.ops

#: Sums of parts in another order: some roundings of float32.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}

STEPS, WIDTH, WORDS, CLASSES = 8, 32, 512, 16


def grid(replicas, size, **options):
    return unisono.MirroredStrategy(devices(replicas * size), devices_per_replica=size, **options)


def transformer(layers=1, attention=lambda: L.MultiHeadAttention(4, 8)):
    """A tied embedding and head, and blocks of attention and two products in a row."""
    tokens = keras.Input((STEPS,), dtype="int32")
    words = L.ReversibleEmbedding(WORDS, WIDTH, tie_weights=True, name="words")
    h = words(tokens)
    for i in range(layers):
        n = L.LayerNormalization()(h)
        h = h + attention()(n, n, use_causal_mask=True)
        n = L.Dense(4 * WIDTH, activation="gelu", name=f"up_{i}")(L.LayerNormalization()(h))
        h = h + L.Dense(WIDTH, name=f"down_{i}")(n)
    return keras.Model(tokens, words(h, reverse=True))


def mlp():
    return keras.Sequential(
        [keras.Input((20,)), *(L.Dense(128, activation="tanh") for _ in range(3)), L.Dense(CLASSES)]
    )


def cnn():
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            *(L.Conv2D(32, 3, padding="same"), L.BatchNormalization(synchronized=True), L.ReLU()),
            *(L.Conv2D(64, 3, activation="relu"), L.MaxPooling2D(), L.Conv2D(64, 3), L.Flatten()),
            *(L.Dense(128, activation="relu"), L.Dense(CLASSES)),
        ]
    )


def lstm():
    inputs = keras.Input((STEPS,), dtype="int32")
    h = L.LSTM(64, return_sequences=True)(L.Embedding(WORDS, 64, name="words")(inputs))
    return keras.Model(inputs, L.Dense(CLASSES)(L.LSTM(64)(h)))


class Experts(keras.Layer):
    """A mixture of four experts, of which the best two count."""

    def build(self, shape):
        self.gate = self.add_weight(shape=(WIDTH, 4), name="gate")
        self.up = self.add_weight(shape=(4, WIDTH, 64), name="up")
        self.down = self.add_weight(shape=(4, 64, WIDTH), name="down")

    def call(self, x):
        best, numbers = ops.top_k(ops.softmax(x @ self.gate), 2)
        mix = ops.sum(ops.one_hot(numbers, 4) * best[..., None], -2)
        h = ops.gelu(ops.einsum("bsd,edh->ebsh", x, self.up))
        return ops.einsum("ebsh,ehd,bse->bsd", h, self.down, mix)


def experts():
    x = keras.Input((STEPS, WIDTH))
    return keras.Model(x, L.Dense(CLASSES)((x + Experts(name="experts")(x))[:, 0]))


def tokens_to_tokens(rows):
    x = np.random.default_rng(0).integers(0, WORDS, (rows, STEPS))
    return x, np.roll(x, -1, 1)


def tokens_to_class(rows):
    x, _ = tokens_to_tokens(rows)
    return x, x[:, 0] % CLASSES


def numbers(*shape):
    def batch(rows):
        random = np.random.default_rng(0)
        return random.normal(size=(rows, *shape)).astype("float32"), random.integers(0, CLASSES, rows)

    return batch


def compiled(strategy, make=transformer):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = make()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, 0.9), loss)
    return model


def trained(strategy, make, batch):
    x, y = batch(14)
    model = compiled(strategy, make)
    losses = model.fit(x, y, batch_size=8, verbose=0, shuffle=False).history["loss"]
    return model, [*losses, model.evaluate(x, y, batch_size=8, verbose=0), model.predict(x, verbose=0)]


def values(model):
    return [np.asarray(v) for v in (*model.variables, *model.optimizer.variables)]


def assert_close(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, **CLOSE)


def cut_axis(variable):
    """The axis of a variable that its devices share; None for one that is whole on each."""
    value = stored_value(variable)
    part = value.addressable_shards[0].data.shape
    cut = [i for i, (a, b) in enumerate(zip(part, value.shape, strict=True)) if a < b]
    return cut[0] if cut else None


def cuts(variables):
    """By the last names of paths, the axes of those that are cut."""
    axes = {"/".join(v.path.split("/")[-2:]): cut_axis(v) for v in variables}
    return {name: axis for name, axis in axes.items() if axis is not None}


def messages(program, kind):
    """The shapes of what each collective of a kind sends between the devices of a replica."""
    found = re.findall(rf"= (.*?) {kind}(?:-start)?\(.*?replica_groups=(\S+?),? ", program)
    return [shapes for shapes, groups in found if "{0,2},{1,3}" not in groups]


HEADS = {f"{n}/kernel": 1 for n in ("query", "key", "value")} | {"attention_output/kernel": 0}
BIASES = {f"{n}/bias": 0 for n in ("query", "key", "value")}

MODELS = {
    "transformer": (transformer, tokens_to_tokens, {"words/embeddings": 0, "up_0/kernel": 1} | HEADS),
    "mlp": (mlp, numbers(20), {}),
    "grouped queries": (
        lambda: transformer(attention=lambda: L.GroupQueryAttention(16, 4, 2)),
        tokens_to_tokens,
        HEADS,
    ),
    "cnn": (cnn, numbers(8, 8, 3), {}),
    "lstm": (lstm, tokens_to_class, {"words/embeddings": 0}),
    "experts": (experts, numbers(STEPS, WIDTH), {"experts/up": 0, "experts/down": 0}),
}
#: How many weights are cut of the models whose layers have numbers for names.
COUNTS = {"mlp": 6, "cnn": 6}


@pytest.mark.parametrize(
    "name",
    ["transformer", "mlp", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in list(MODELS)[2:])],
)
def test_numbers_are_those_of_one_device(name):
    make, batch, expected = MODELS[name]
    wanted_model, wanted = trained(unisono.OneDeviceStrategy(devices(1)[0]), make, batch)
    model, found = trained(grid(2, 2), make, batch)
    assert_close(found, wanted)
    assert_close(values(model), values(wanted_model))
    chosen = cuts(model.variables)
    assert expected.items() <= chosen.items()
    assert len(chosen) >= COUNTS.get(name, 0), chosen
    slots = {v.path: cut_axis(v) for v in model.optimizer.variables if v.shape}
    axes = [cut_axis(v) for v in model.trainable_variables]
    assert [a for path, a in slots.items() if path.endswith("momentum")] == axes


def test_a_layer_costs_four_all_reduces_and_no_gather():
    """As in Megatron: two in the forward pass, two in the backward pass; and nothing gathers a weight."""
    counts = []
    for layers in (1, 2):
        model = compiled(grid(2, 2), lambda layers=layers: transformer(layers))
        program = lowered_step(model, *tokens_to_tokens(8)).compile().as_text()
        counts.append(len(messages(program, "all-reduce")))
        for kind in ("all-gather", "all-to-all", "collective-permute"):
            assert messages(program, kind) == []
    assert counts[1] - counts[0] <= 4, counts
    assert counts[1] > 4


@pytest.mark.parametrize(
    "name", ["transformer", *(pytest.param(n, marks=pytest.mark.exhaustive) for n in list(MODELS)[1:])]
)
def test_a_class_sends_what_was_estimated(name):
    """In bytes of the compiled program, whose passes merge and split some small messages."""
    make, batch, _ = MODELS[name]
    strategy = grid(1, 2)
    program = lowered_step(compiled(strategy, make), *batch(8)).compile().as_text()
    sent = sum(m.nbytes * m.times for m in messages_of(program, 2))
    estimated = sum(cut.sent for cut in strategy.state_layout.cuts)
    assert sent > 4000
    assert 0.9 * sent <= estimated <= 1.1 * sent


def test_no_message_is_sent_in_each_step_of_a_sequence():
    """As would be for a recurrent layer that is cut along its gates: a price for each leaves it whole."""
    gates = {".*recurrent_kernel": (None, "model"), ".*words/embeddings": ("model", None)}
    in_loops = []
    for layout_map in (gates, "auto"):
        strategy = grid(1, 2, layout_map=layout_map)
        model = compiled(strategy, lstm)
        program = lowered_step(model, *tokens_to_class(8)).compile().as_text()
        in_loops.append([m.times for m in messages_of(program, 2) if m.is_in_loop])
    assert "words/embeddings" in strategy.state_layout.chosen
    assert in_loops[1] == []
    assert in_loops[0]
    assert min(in_loops[0]) >= STEPS - 1


def test_first_values_are_promises_until_the_first_program_is_made():
    plain = compiled(unisono.OneDeviceStrategy(devices(1)[0]))
    strategy = grid(2, 2)
    model = compiled(strategy)
    large = [v for v in model.variables if np.prod(v.shape) * 4 > 1 << 14]
    assert large
    assert {type(stored_value(v)) for v in large} == {DeferredValue}
    # Slots that are made before lie as their weights, too.
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    x, _ = tokens_to_tokens(8)
    model.predict(x, verbose=0)
    # Prediction decides for training, too: its program is the same whatever comes first.
    assert {cut_axis(v) is not None for v in large} == {True}
    for ours, theirs in zip(model.variables, plain.variables, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs), err_msg=ours.path)
    model.fit(x, x, batch_size=8, verbose=0)
    momenta = [v for v in model.optimizer.variables if v.path.endswith("momentum")]
    assert list(map(cut_axis, momenta)) == list(map(cut_axis, model.trainable_variables))


def test_weights_that_were_read_from_a_file_are_cut(tmp_path):
    plain = compiled(unisono.OneDeviceStrategy(devices(1)[0]))
    plain.save_weights(tmp_path / "a.weights.h5")
    model = compiled(grid(1, 2))
    model.load_weights(tmp_path / "a.weights.h5")
    # What is read before the axes are known is on no device whole, either.
    words = next(v for v in model.variables if v.path == "words/embeddings")
    assert cut_axis(words) == 0
    x, y = tokens_to_tokens(8)
    found = model.evaluate(x, y, verbose=0)
    np.testing.assert_allclose(found, plain.evaluate(x, y, verbose=0), **CLOSE)
    assert cuts(model.variables)["words/embeddings"] == 0
    kept = cuts(model.variables)
    # Once more, now that they lie in parts.
    model.save_weights(tmp_path / "b.weights.h5")
    model.load_weights(tmp_path / "b.weights.h5")
    model.evaluate(x, y, verbose=0)
    assert cuts(model.variables) == kept


def test_a_custom_loop():
    """Its step is read as a whole, with the derivatives that a tape takes."""
    found = []
    for strategy in (unisono.OneDeviceStrategy(devices(1)[0]), grid(2, 2)):
        model = compiled(strategy)
        x, y = tokens_to_tokens(14)
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

        def step(batch, model=model, loss_fn=loss_fn):
            x, y = batch
            with unisono.GradientTape() as tape:
                loss = unisono.nn.compute_average_loss(loss_fn(y, model(x, training=True)).mean(-1))
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply(gradients, model.trainable_variables)
            return loss

        batches = strategy.distribute_dataset([(x[i : i + 6], y[i : i + 6]) for i in (0, 6, 12)])
        losses = [strategy.reduce("SUM", strategy.run(step, (b,)), axis=None) for b in batches]
        found.append([*map(np.asarray, losses), *values(model)])
    assert_close(found[1], found[0])
    chosen = cuts(model.variables)
    assert {"words/embeddings": 0, "up_0/kernel": 1, "down_0/kernel": 0}.items() <= chosen.items()
    assert HEADS.items() <= chosen.items()


def test_a_second_model_is_decided_by_itself_and_shares_what_lies():
    strategy = grid(1, 2)
    with strategy.scope():
        shared = L.Dense(128, name="shared")
        first, second = (
            keras.Sequential([keras.Input((64,)), shared, L.Dense(64, name=name)]) for name in ("one", "two")
        )
        x = np.ones((4, 64), "float32")
        first.predict(x, verbose=0)
        assert cut_axis(shared.kernel) == 1
        held = stored_value(second.get_layer("two").kernel)
        assert isinstance(held, DeferredValue)
        second.predict(x, verbose=0)
    assert cut_axis(shared.kernel) == 1
    assert [cut_axis(m.layers[-1].kernel) for m in (first, second)] == [0, 0]


class TwoOptimizers(keras.Model):
    """A model without a forward pass: its step is all that there is."""

    def __init__(self):
        super().__init__()
        self.up, self.down = L.Dense(128, name="up"), L.Dense(64, name="down")
        self.up.build((None, 64))
        self.down.build((None, 128))
        self.built = True

    def call(self, x, training=False):
        raise NotImplementedError

    def train_step(self, state, data):
        trained, others, optimizer, metrics = state

        def loss_of(trained):
            with keras.StatelessScope(zip(self.trainable_variables, trained, strict=True)):
                return ops.mean(ops.square(self.down(ops.tanh(self.up(data[0]))) - data[0]))

        loss, gradients = jax.value_and_grad(loss_of)(trained)
        trained, optimizer = self.optimizer.stateless_apply(optimizer, gradients, trained)
        return {"loss": loss}, (trained, others, optimizer, metrics)


@pytest.mark.exhaustive
def test_a_model_without_a_forward_pass_is_read_by_its_step():
    with grid(2, 2).scope():
        model = TwoOptimizers()
        model.compile("adam")
    x = np.ones((8, 64), "float32")
    model.fit(x, x, batch_size=8, verbose=0)
    assert cuts(model.variables) == {"up/kernel": 1, "up/bias": 0, "down/kernel": 0}


def test_a_large_weight_that_stays_whole_is_named(caplog, tuned):
    from unisono.model_parallel import _cut_layout

    tuned(_cut_layout, LARGE=1000)
    strategy = grid(1, 2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((15,)), L.Dense(45, name="odd")])
    with caplog.at_level(logging.WARNING, "unisono"):
        model.predict(np.ones((4, 15), "float32"), verbose=0)
        model.predict(np.ones((8, 15), "float32"), verbose=0)
    said = [r.getMessage() for r in caplog.records if "lies whole" in r.getMessage()]
    assert len(said) == 1
    assert "odd/kernel'" in said[0]


def test_auto_is_what_is_done_without_a_map():
    assert type(grid(1, 2).state_layout) is type(grid(1, 2, layout_map="auto").state_layout)
    with pytest.raises(unisono.InvalidTypeError, match='"auto"'):
        grid(1, 2, layout_map="automatic")
