"""What a step's trace says decides how it runs: the numbers are those of plain Keras on one device.

Tolerance 2e-5 of the largest value: sums of a few rows in another order, over a few steps of training.
"""

import contextlib

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unisono
from unisono.training.groups._batch_policy import Mode
from unisono.training.replica import _whole_batches

pytestmark = pytest.mark.numbers

L, ops = keras.layers, keras.ops
CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def data(rows, width=6, classes=3):
    rng = np.random.default_rng(0)
    return rng.normal(size=(rows, width)).astype("f4"), rng.integers(0, classes, rows)


def mirrored(replicas, **options):
    return unisono.MirroredStrategy([f"cpu:{i}" for i in range(replicas)], **options)


def trained(make, x, y, strategy=None, batch_size=12, **options):
    """Losses of two epochs, weights and states, predictions; and the modes of the batches."""
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy is not None else contextlib.nullcontext():
        model = make()
    history = model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0, **options).history
    found = {**history, "predicted": model.predict(x[:batch_size], batch_size=batch_size, verbose=0)}
    found |= {f"{i} {v.path.rpartition('/')[2]}": v.numpy() for i, v in enumerate(model.variables)}
    return found, {key.mode for key in getattr(model.train_function, "_programs", ())}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        scale = max(1.0, float(np.abs(np.asarray(value, "f8")).max()))
        np.testing.assert_allclose(found[name], value, rtol=0, atol=2e-5 * scale, err_msg=name)


def functional(*layers, loss=CROSSENTROPY, optimizer="sgd"):
    def make():
        inputs = keras.Input((6,))
        model = keras.Model(
            inputs, keras.Sequential([L.Dense(8), *[layer() for layer in layers], L.Dense(3)])(inputs)
        )
        model.compile(optimizer, loss)
        return model

    return make


class State(L.Layer):
    """A layer with one state, which `update` changes from its value and the rows."""

    def __init__(self, update, shape=(), dtype="float32"):
        super().__init__()
        self.update, self.of = update, (shape, dtype)

    def build(self, _):
        shape, dtype = self.of
        self.state = self.add_weight(
            shape=shape, initializer="zeros", dtype=dtype, trainable=False, name="state"
        )

    def call(self, x):
        self.state.assign(self.update(self.state.value, x))
        return x


STATES = {
    "maximum": (lambda s, x: ops.maximum(s, ops.max(x)), {}, Mode.SPLIT),
    "minimum of each column": (lambda s, x: ops.minimum(s, ops.min(x, axis=0)), {"shape": (8,)}, Mode.SPLIT),
    "moving maximum": (lambda s, x: 0.9 * s + 0.1 * ops.max(x), {}, Mode.SPLIT),
    "count": (lambda s, x: s + ops.sum(ops.cast(x[:, 0] > 0, "float32")), {}, Mode.SPLIT),
    "rows": (lambda s, x: s + ops.shape(x)[0], {"dtype": "int32"}, Mode.SPLIT),
    "integers": (
        lambda s, x: s + ops.sum(ops.cast(x > 0, "int32"), axis=0),
        {"shape": (8,), "dtype": "int32"},
        Mode.SPLIT,
    ),
    "histogram": (lambda s, x: s.at[ops.argmax(x, axis=1)].add(1.0), {"shape": (8,)}, Mode.SPLIT),
    "moving mean": (lambda s, x: 0.9 * s + 0.1 * ops.mean(x, axis=0), {"shape": (8,)}, Mode.SPLIT),
    "last sum": (lambda _, x: ops.sum(x, axis=0), {"shape": (8,)}, Mode.SPLIT),
    "ever positive": (
        lambda s, x: ops.logical_or(s, ops.any(x > 2, axis=0)),
        {"shape": (8,), "dtype": "bool"},
        Mode.SPLIT,
    ),
    "steps": (lambda s, _: s + 1, {"dtype": "int32"}, Mode.SPLIT),
    "moving sum": (lambda s, x: 0.9 * s + 0.1 * ops.sum(x), {}, Mode.JOINED),
    "queue": (lambda s, x: ops.concatenate([x, s])[:12], {"shape": (12, 8)}, Mode.JOINED),
    "median": (lambda _, x: ops.median(x), {}, Mode.JOINED),
    "code book": (
        lambda s, x: 0.5 * s + 0.5 * ops.matmul(ops.transpose(ops.one_hot(ops.argmax(x, axis=1), 8)), x),
        {"shape": (8, 8)},
        Mode.JOINED,
    ),
}


@pytest.mark.parametrize("name", STATES)
def test_states_of_layers(name):
    """102 rows: the last batch has 6, and divides by the replicas."""
    update, options, mode = STATES[name]
    make, given = functional(lambda: State(update, **options)), data(102)
    expected, _ = trained(make, *given)
    found, modes = trained(make, *given, mirrored(3))
    assert_equal(found, expected)
    assert modes == {mode}


def pairs():
    """The similarities of all pairs of rows, each of which is its own label."""
    inputs = keras.Input((6,))
    model = keras.Model(inputs, L.Lambda(lambda a: ops.matmul(a, ops.transpose(a)))(L.Dense(8)(inputs)))
    loss = keras.losses.sparse_categorical_crossentropy
    model.compile("sgd", lambda y, p: loss(ops.arange(ops.shape(p)[0]), p, from_logits=True))
    return model


ROWS_THAT_MEET = {
    "pairs": pairs,
    "centered": functional(lambda: L.Lambda(lambda t: t - ops.mean(t, axis=0))),
    "softmax over rows": functional(lambda: L.Softmax(axis=0)),
    "sorted": functional(lambda: L.Lambda(lambda t: ops.sort(t, axis=0))),
    "root of an added loss": functional(lambda: L.ActivityRegularization(0.0), lambda: _Root()),
}


class _Root(L.Layer):
    def call(self, x):
        self.add_loss(ops.sqrt(ops.sum(ops.square(x))))
        return x


@pytest.mark.parametrize("name", ROWS_THAT_MEET)
@pytest.mark.parametrize("layout", ["mirrored", pytest.param("fully_sharded", marks=pytest.mark.exhaustive)])
def test_rows_that_meet_are_computed_together(name, layout, caplog):
    """Of 34 rows the last batch has 10: the same program for sizes that divide, and all rows for others."""
    given = data(34)
    expected, _ = trained(ROWS_THAT_MEET[name], *given)
    caplog.clear()
    found, modes = trained(ROWS_THAT_MEET[name], *given, mirrored(2, state_layout=layout))
    assert_equal(found, expected)
    assert modes == {Mode.JOINED if layout == "mirrored" else Mode.WHOLE}
    assert caplog.text.count("cannot be computed apart") == 1


class OfSizes(L.Layer):
    """A function that asks for the number of rows, which Keras does not know when it builds a model."""

    def __init__(self, fn):
        super().__init__()
        self._fn = fn

    def call(self, x):
        return self._fn(x)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


def in_groups(x):
    """Center groups of four rows, as "ghost" normalization does, or the last rows."""
    if len(x) % 4:
        return x - ops.mean(x, axis=0)
    groups = ops.reshape(x, (-1, 4, x.shape[1]))
    return ops.reshape(groups - ops.mean(groups, axis=1, keepdims=True), x.shape)


#: Layers that treat numbers of rows in different ways: by size of the batch, and of all rows, the modes.
SIZES = {
    # The last batch, of 12 rows, has three groups, and that of a replica none.
    "groups": (in_groups, 16, 44, {Mode.JOINED}),
    # A replica's one row has no axis of rows any more; at the end there are two rows.
    "one row": (
        lambda x: ops.expand_dims(ops.squeeze(x[:, :1]), -1) * ops.ones(8),
        12,
        26,
        {Mode.SPLIT, Mode.JOINED},
    ),
    "few rows": (lambda x: x if len(x) > 5 else x - ops.mean(x, axis=0), 12, 32, {Mode.SPLIT, Mode.JOINED}),
}


@pytest.mark.parametrize("name", SIZES)
def test_layers_that_treat_numbers_of_rows_in_different_ways(name):
    fn, batch_size, rows, expected_modes = SIZES[name]
    make, given = functional(lambda: OfSizes(fn)), data(rows)
    expected, _ = trained(make, *given, batch_size=batch_size)
    found, modes = trained(make, *given, mirrored(2), batch_size=batch_size)
    assert_equal(found, expected)
    assert modes == expected_modes


class OfGroups(keras.metrics.Metric):
    """The mean deviation within groups of four rows, as of a person each."""

    def __init__(self):
        super().__init__(name="of_groups")
        self.total, self.count = (self.add_variable((), "zeros", name=n) for n in ("total", "count"))

    def update_state(self, y, p, sample_weight=None):
        groups = ops.reshape(p, (-1, 4, 3))
        self.total.assign_add(ops.sum(ops.std(groups, axis=1)))
        self.count.assign_add(float(len(groups)))

    def result(self):
        return self.total / self.count


def of_groups(y, p):
    groups = ops.reshape(p, (-1, 4, 3))
    return ops.mean(ops.square(groups - ops.mean(groups, axis=1, keepdims=True)))


def test_losses_and_metrics_of_groups_of_rows():
    """A replica's six rows make no groups of four."""

    def make():
        model = keras.Sequential([keras.Input((6,)), L.Dense(3)])
        model.compile("sgd", of_groups, metrics=[OfGroups()])
        return model

    expected, _ = trained(make, *data(24))
    found, modes = trained(make, *data(24), mirrored(2))
    assert_equal(found, expected)
    assert modes == {Mode.SPLIT}


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_last_batch_of_a_row_for_each_replica_is_normalized_as_a_whole(replicas):
    make, given = functional(L.BatchNormalization), data(100 + replicas)
    expected, _ = trained(make, *given, batch_size=25)
    found, modes = trained(make, *given, mirrored(replicas), batch_size=25)
    assert_equal(found, expected)
    assert modes == {Mode.WHOLE}


def test_batch_normalization_is_filled_up_where_it_does_not_train(caplog):
    x, y = data(24)
    with mirrored(2).scope():
        model = functional(L.BatchNormalization)()
    for rows in (5, 7, 9):
        whole = model.predict(x, verbose=0)
        np.testing.assert_allclose(model.predict(x[:rows], verbose=0), whole[:rows], rtol=1e-5, atol=1e-6)
        model.evaluate(x[:rows], y[:rows], verbose=0)
    assert {key.mode for key in model.predict_function._programs} == {Mode.SPLIT, Mode.PADDED}
    assert not caplog.records


def test_a_layer_that_is_meant_per_replica():
    marked = lambda: unisono.per_replica(L.Lambda(lambda t: t - ops.mean(t, axis=0)))  # noqa: E731
    x, _ = data(24)
    expected = [part - part.mean(axis=0) for part in np.split(x[:12], 2)]
    with mirrored(2).scope():
        model = keras.Sequential([keras.Input((6,)), marked()])
        model.compile("sgd", "mse")
    model.fit(x, x, batch_size=12, verbose=0)
    assert {key.mode for key in model.train_function._programs} == {Mode.SPLIT}
    np.testing.assert_allclose(model.predict(x[:12], verbose=0), np.concatenate(expected), atol=1e-6)


class OwnStep(keras.Model):
    """A `train_step` of Keras' guides, with what users put between the gradients and the optimizer."""

    def __init__(self, kind, body):
        super().__init__()
        self.kind, self.body = kind, body

    def call(self, x, training=False):
        return self.body(x, training=training)

    def loss_of(self, trained, states, x, y):
        y_pred, states = self.stateless_call(trained, states, x, training=True)
        return self.compute_loss(x, y, y_pred), (y_pred, states)

    def train_step(self, state, given):
        trained, states, slots, metrics = state
        x, y = given
        gradient = jax.value_and_grad(self.loss_of, has_aux=True)
        (loss, (y_pred, after)), grads = gradient(trained, states, x, y)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads))
        if self.kind == "clipped":
            grads = [g * jnp.minimum(1.0, 0.1 / norm) for g in grads]
        if self.kind == "sharpness-aware":
            moved = [w + 0.5 * g / (norm + 1e-12) for w, g in zip(trained, grads, strict=True)]
            (_, _), grads = gradient(moved, states, x, y)
        if self.kind == "by hand":
            trained = [w - 0.1 * g for w, g in zip(trained, grads, strict=True)]
        else:
            trained, slots = self.optimizer.stateless_apply(slots, grads, trained)
        new, logs = [], {}
        for metric in self.metrics:
            own = metrics[len(new) : len(new) + len(metric.variables)]
            given = (loss,) if metric.name == "loss" else (y, y_pred)
            own = metric.stateless_update_state(own, *given)
            logs[metric.name] = metric.stateless_result(own)
            new += own
        return logs, (trained, after, slots, new)


BODIES = {
    "dense": lambda: [L.Dense(16, "relu"), L.LayerNormalization()],
    "convolutions": lambda: [
        *(L.Reshape((6, 6, 1)), L.Conv2D(4, 3), L.ReLU(), L.MaxPooling2D(), L.DepthwiseConv2D(2), L.Flatten())
    ],
    "recurrent": lambda: [L.Reshape((6, 6)), L.LSTM(8)],
    "one row": lambda: [L.Dense(8), OfSizes(SIZES["one row"][0])],
}


def own_step(kind, body):
    model = OwnStep(kind, keras.Sequential([*BODIES[body](), L.Dense(3)]))
    model.compile("adam", CROSSENTROPY, metrics=["accuracy"])
    return model


@pytest.mark.parametrize("kind", ["plain", "clipped", "sharpness-aware", "by hand"])
@pytest.mark.parametrize(
    "body", ["dense", *(pytest.param(b, marks=pytest.mark.exhaustive) for b in ("convolutions", "recurrent"))]
)
def test_a_train_step_of_ones_own(kind, body):
    """Gradients that are averaged afterwards must be means over rows; else all rows are computed together."""
    given = data(24, 36)
    expected, _ = trained(lambda: own_step(kind, body), *given)
    found, modes = trained(lambda: own_step(kind, body), *given, mirrored(2))
    assert_equal(found, expected)
    assert modes == {Mode.SPLIT if kind == "plain" else Mode.JOINED}


@pytest.mark.parametrize(("body", "last"), [("dense", Mode.SPLIT), ("one row", Mode.JOINED)])
def test_a_train_step_of_ones_own_with_one_row_for_each_replica(body, last):
    given = data(26)
    expected, _ = trained(lambda: own_step("plain", body), *given)
    found, modes = trained(lambda: own_step("plain", body), *given, mirrored(2))
    assert_equal(found, expected)
    assert modes == {Mode.SPLIT, last}


def test_another_size_of_batch_is_read_as_the_first_one(caplog):
    """The last batch of 4 rows is split, too: what the first reading found of a state is no declaration."""
    caplog.set_level("INFO", "unisono")

    def make():
        frozen = L.Dense(6, trainable=False)
        model = OwnStep("plain", keras.Sequential([frozen, L.Dense(3)]))
        model.compile("adam", CROSSENTROPY)
        return model

    expected, _ = trained(make, *data(16))
    found, modes = trained(make, *data(16), mirrored(2))
    assert_equal(found, expected)
    assert modes == {Mode.SPLIT}
    assert "in another way" not in caplog.text


class Nodes(keras.Model):
    """Graphs as one: nodes, the graph of each node, and one number for each graph."""

    def __init__(self):
        super().__init__()
        self.dense = L.Dense(1)

    def call(self, given):
        hidden = self.dense(given["nodes"])
        edges = given["edges"]
        hidden = hidden + ops.segment_sum(hidden[edges[:, 1]], edges[:, 0], num_segments=hidden.shape[0])
        return ops.segment_sum(hidden, given["graph"], num_segments=3)


class Graphs(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, i):
        rng = np.random.default_rng(i)
        graphs = {
            "nodes": rng.normal(size=(6, 4)).astype("f4"),
            "graph": np.array([0, 0, 1, 1, 2, 2], "i4"),
            # In the last batch there happen to be as many edges as nodes.
            "edges": rng.integers(0, 6, (8 - i, 2)).astype("i4"),
        }
        return graphs, rng.normal(size=(3, 1)).astype("f4")


@pytest.mark.parametrize("replicas", [1, 3])
def test_batches_of_graphs(replicas):
    """Arrays of unequal lengths are for each replica as a whole."""

    def losses(strategy=None):
        keras.utils.set_random_seed(0)
        with strategy.scope() if strategy is not None else contextlib.nullcontext():
            model = Nodes()
            model.compile("sgd", "mse", metrics=["mae"])
        history = model.fit(Graphs(), epochs=2, shuffle=False, verbose=0).history
        return history, model.evaluate(Graphs(), verbose=0), model.predict(Graphs(), verbose=0)

    expected, found = losses(), losses(mirrored(replicas))
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-5)


class Failing(keras.Layer):
    """A layer for batches of 12 rows alone."""

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)

    def call(self, x):
        if x.shape[0] != 12:
            raise ValueError("this layer takes 12 rows")
        return x - ops.mean(x, axis=0)


class Peak(keras.Layer):
    """Adds the largest value as a loss."""

    def call(self, x):
        self.add_loss(0.1 * ops.max(x))
        return x


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (Failing, "could not be read (ValueError: this layer takes 12 rows)"),
        (Peak, "added loss 0 relates rows to each other (it is the largest value over the rows)"),
        (lambda: L.Lambda(lambda t: t - ops.mean(t, axis=0)), ": a difference)"),
    ],
    ids=["error", "largest", "centered"],
)
def test_why_rows_are_computed_together(layer, text, caplog):
    with mirrored(2).scope():
        model = functional(layer)()
    model.fit(*data(12), batch_size=12, verbose=0)
    assert text in caplog.text


@pytest.mark.parametrize("layout", ["sharded", "fully_sharded"])
def test_a_train_step_of_ones_own_with_state_in_parts(layout):
    given = data(24, 36)
    expected, _ = trained(lambda: own_step("plain", "dense"), *given)
    found, modes = trained(lambda: own_step("plain", "dense"), *given, mirrored(2, state_layout=layout))
    assert_equal(found, expected)
    assert modes == {Mode.SPLIT}


class TapeStep(OwnStep):
    """The same in TensorFlow's form."""

    def train_step(self, given):
        x, y = given
        with unisono.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            if self.kind == "summed":
                loss = ops.sum(ops.square(self(x, training=True)))
        grads = tape.gradient(loss, self.trainable_variables)
        if self.kind == "clipped":
            norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads))
            grads = [g * jnp.minimum(1.0, 0.1 / norm) for g in grads]
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        self.metrics[0].update_state([loss] if self.kind == "listed" else loss)
        return {"loss": self.metrics[0].result()}


def largest():
    return State(lambda s, x: ops.maximum(s, ops.max(x)))


@pytest.mark.parametrize(
    ("kind", "layer", "together"),
    [
        ("plain", L.LayerNormalization, False),
        ("listed", L.LayerNormalization, False),
        ("clipped", L.LayerNormalization, True),
        ("summed", L.LayerNormalization, True),
        ("plain", largest, True),
        ("plain", lambda: L.Lambda(lambda t: t - ops.mean(t, axis=0)), True),
    ],
    ids=["plain", "listed", "clipped", "summed", "maximum", "centered"],
)
def test_a_train_step_in_tensorflows_form(kind, layer, together, caplog, monkeypatch):
    monkeypatch.setattr(_whole_batches, "_said", set())

    def make():
        model = TapeStep(kind, keras.Sequential([L.Dense(16, "relu"), layer(), L.Dense(3)]))
        model.compile("adam", CROSSENTROPY)
        return model

    given = data(24)
    expected, _ = trained(make, *given, mirrored(1))
    found, _ = trained(make, *given, mirrored(2))
    assert_equal(found, expected)
    assert caplog.text.count("cannot be computed apart") == together
    # The user has given no array to `strategy.run`.
    assert "strategy.run" not in caplog.text


@pytest.mark.parametrize(("layer", "warns"), [(largest, True), (L.BatchNormalization, False)])
def test_a_state_that_run_merges_by_a_guess_is_named(layer, warns, caplog):
    strategy = mirrored(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), L.Dense(4), layer(), L.Dense(1)])
    dataset = unisono.data.Dataset.from_tensor_slices(data(8)[0]).batch(4)
    for x in strategy.distribute_dataset(dataset):
        strategy.run(lambda x: model(x, training=True), args=(x,))
    named = [r.getMessage() for r in caplog.records if "After `strategy.run`" in r.getMessage()]
    assert len(named) == warns
    assert all("/state' is the mean over the replicas" in text and "largest value" in text for text in named)
