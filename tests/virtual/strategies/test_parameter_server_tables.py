"""Tables on parameter servers of which only the rows that a step looks up travel."""

import keras
import numpy as np
import pytest

import unisono
from tests.ps_cluster import local_strategy
from unisono.parameter_server.chief import _remote_variables
from unisono.parameter_server.programs import _push_layout
from unisono.partitioners import FixedShardsPartitioner
from unisono.step._value_handle import DeferredValue

K, L = keras.optimizers, keras.layers
ROWS = 90


@pytest.fixture(autouse=True)
def small_tables(monkeypatch):
    """Let tables be large from 300 bytes on, and be made by servers."""
    monkeypatch.setattr(_remote_variables, "SMALL_TABLE_BYTES", 300)
    monkeypatch.setattr(_remote_variables, "TABLE_BYTES", 300)
    monkeypatch.setattr(_push_layout, "MADE_LATER", 300)


def data(rows=100, dtype="int32"):
    rng = np.random.default_rng(0)
    x = rng.integers(0, ROWS, (rows, 3)).astype(dtype)
    return x, (x.astype(int).sum(1) % 2).astype("int32")


def compiled(optimizer, **options):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((3,), dtype="int32")
    table = L.Embedding(ROWS, 4, embeddings_initializer="glorot_uniform", **options)
    x = L.Flatten()(table(inputs))
    model = keras.Model(inputs, L.Dense(2)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    return model


def fitted(model, rows=100, **options):
    return model.fit(*data(rows), batch_size=32, epochs=2, shuffle=False, verbose=0, **options).history


def assert_same(model, other):
    for found, expected in zip(model.variables, other.variables, strict=True):
        np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-5, atol=1e-6, err_msg=found.path)


def is_table(strategy, variable):
    return strategy._job.variables[variable].is_table


@pytest.mark.parametrize(
    ("make", "partitioner"),
    [
        (lambda: K.Adagrad(0.5, global_clipnorm=0.01), None),
        (lambda: K.SGD(0.5, clipnorm=0.01), FixedShardsPartitioner(3)),
        (lambda: K.LossScaleOptimizer(K.SGD(0.5)), FixedShardsPartitioner(2)),
    ],
)
def test_with_staleness_0_the_numbers_are_those_of_one_device(make, partitioner):
    alone = compiled(make())
    history = fitted(alone)
    with local_strategy(servers=2, max_staleness=0, variable_partitioner=partitioner) as strategy:
        with strategy.scope():
            model = compiled(make())
        found = fitted(model)
        assert is_table(strategy, model.layers[1].embeddings)
        for name, values in history.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-5)
        assert_same(model, alone)
        x, y = data()
        np.testing.assert_allclose(
            model.evaluate(x, y, verbose=0), alone.evaluate(x, y, verbose=0), rtol=1e-5
        )
        np.testing.assert_allclose(model.predict(x, verbose=0), alone.predict(x, verbose=0), atol=1e-5)


def test_lazy_optimizers_leave_rows_without_a_gradient_as_they_are():
    x, y = np.array([[1, 2, 3], [2, 3, 4]]), np.array([0, 1])
    alone = compiled(K.Adam(0.1))
    before = alone.layers[1].embeddings.numpy()
    alone.fit(x, y, verbose=0)
    alone.fit(x[:1], y[:1], verbose=0)
    with local_strategy(servers=2, max_staleness=0) as strategy:
        with strategy.scope():
            model = compiled(K.Adam(0.1))
        table = model.layers[1].embeddings
        model.fit(x, y, verbose=0)
        after_one = table.numpy()
        model.fit(x[:1], y[:1], verbose=0)
        after_two = table.numpy()
    np.testing.assert_array_equal(after_two[5:], before[5:])
    # Row 4 had a gradient in the first step alone: Keras moves it in the second, by its momentum.
    np.testing.assert_array_equal(after_two[4], after_one[4])
    assert not np.allclose(alone.layers[1].embeddings.numpy()[4], after_one[4])
    np.testing.assert_allclose(after_two[1:4], alone.layers[1].embeddings.numpy()[1:4], rtol=1e-4)


def test_bytes_of_a_step_are_those_of_its_rows_and_few_programs_are_compiled():
    with local_strategy(workers=1, servers=2, max_staleness=0) as strategy:
        with strategy.scope():
            model = compiled(K.Adagrad(0.5))
        servers = strategy.cluster.servers

        def counted(x):
            for _ in range(2):
                before = [dict(s.counts) for s in servers]
                model.fit(x, np.zeros(len(x), "int32"), batch_size=len(x), shuffle=False, verbose=0)
            return {
                name: sum(s.counts[name] - b.get(name, 0) for s, b in zip(servers, before, strict=True))
                for name in ("bytes sent", "bytes received", "ROWS", "PUSH")
            }

        few = counted(np.full((32, 3), 7))
        many = counted(np.arange(96).reshape(32, 3) % 60)
        # A row of four floats travels once in each direction, up with its number.
        assert many["bytes sent"] - few["bytes sent"] == 59 * 4 * 4
        assert many["bytes received"] - few["bytes received"] == 59 * (4 * 4 + 8 + 8)
        assert few["ROWS"] == 1
        # Eight places for rows were enough, then 64: two programs of one export.
        (worker,) = strategy.cluster.workers.values()
        step = [
            p
            for p in worker._programs.values()
            if p.exported.in_avals
            and not all(isinstance(n, int) for a in p.exported.in_avals for n in a.shape)
        ]
        assert [p.compiled_count for p in step] == [2]
        counted(np.arange(96).reshape(32, 3) % 50)
        assert [p.compiled_count for p in step] == [2]


def test_the_table_is_made_on_the_servers_and_never_on_the_chief(monkeypatch):
    asked = []
    original = DeferredValue.whole

    def whole(self):
        value = original(self)
        asked.append(type(value).__name__)
        return value

    monkeypatch.setattr(DeferredValue, "whole", whole)
    alone = compiled(K.Adam(0.1))
    with local_strategy(
        servers=2, max_staleness=0, variable_partitioner=FixedShardsPartitioner(2)
    ) as strategy:
        with strategy.scope():
            model = compiled(K.Adam(0.1))
        assert len(model.predict(data(8)[0], verbose=0)) == 8
        fitted(model, rows=1)
        # Traced, to know how rows are made; never computed.
        assert "ArrayImpl" not in asked
        others = np.setdiff1d(np.arange(ROWS), data(1)[0])
        found, expected = (m.layers[1].embeddings.numpy()[others] for m in (model, alone))
        np.testing.assert_array_equal(found, expected)


def test_two_towers_share_a_table_and_have_others(tmp_path):
    def towers():
        keras.utils.set_random_seed(2)
        user, item = keras.Input((), dtype="int32"), keras.Input((4,), dtype="uint8")
        shared, own = L.Embedding(ROWS, 4), L.Embedding(ROWS, 4, mask_zero=True)
        one = L.Concatenate()([shared(user), own(user)])
        two = L.GlobalAveragePooling1D()(own(item))
        three = L.GlobalAveragePooling1D()(shared((item * 7) % ROWS))
        model = keras.Model([user, item], L.Dense(1)(L.Concatenate()([one, two, three])))
        model.compile(K.Adagrad(0.3), "mse")
        return model

    rng = np.random.default_rng(0)
    x = [rng.integers(0, ROWS, 70), rng.integers(0, 6, (70, 4)).astype("uint8")]
    y = rng.normal(size=(70, 1)).astype("float32")
    alone = towers()
    alone.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0)
    with local_strategy(servers=2, max_staleness=0) as strategy:
        with strategy.scope():
            model = towers()
        model.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0)
        assert sum(is_table(strategy, v) for v in model.trainable_variables) == 2
        assert_same(model, alone)
        # A saved model is one file of whole tables.
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        np.testing.assert_allclose(
            loaded.predict(x, verbose=0), alone.predict(x, verbose=0), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize(
    ("options", "by_rows"),
    [
        ({"embeddings_regularizer": "l2"}, False),
        ({"embeddings_constraint": keras.constraints.MaxNorm(0.51, axis=1)}, True),
        ({"embeddings_constraint": keras.constraints.MaxNorm(0.1, axis=0)}, False),
        ({"lora_rank": 2}, True),
        ({"trainable": False}, True),
    ],
)
def test_options_of_embeddings(options, by_rows):
    # Rows begin within the constraint: Keras applies it to all, servers to some.
    alone = compiled(K.SGD(5.0), **options)
    fitted(alone)
    with local_strategy(servers=2, max_staleness=0) as strategy:
        with strategy.scope():
            model = compiled(K.SGD(5.0), **options)
        fitted(model)
        embedding = next(layer for layer in model.layers if isinstance(layer, L.Embedding))
        assert (
            is_table(
                strategy, embedding.embeddings if not options.get("lora_rank") else embedding._embeddings
            )
            is by_rows
        )
        assert_same(model, alone)


def test_numbers_that_are_none_of_a_row_give_nan_as_on_one_device():
    x = np.array([[0, 1, ROWS], [-1, 2, 3]])
    alone = compiled(K.SGD(0.1))
    with local_strategy() as strategy:
        with strategy.scope():
            model = compiled(K.SGD(0.1))
        found, expected = model.predict(x, verbose=0), alone.predict(x, verbose=0)
    assert np.isnan(expected[0]).all()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_table_is_used_by_rows_and_as_a_whole_in_one_job():
    class Tied(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = L.Embedding(ROWS, 4)
            self.table.build()

        def call(self, x, training=False):
            found = keras.ops.mean(self.table(x), axis=1)
            if training:
                # All rows: the output's weights are the table's.
                return found @ keras.ops.transpose(self.table.embeddings)
            return found

    def make():
        keras.utils.set_random_seed(0)
        model = Tied()
        model.compile(K.SGD(0.5), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    x, y = data()
    alone = make()
    alone.fit(x, y, batch_size=32, shuffle=False, verbose=0)
    with local_strategy(
        servers=2, max_staleness=0, variable_partitioner=FixedShardsPartitioner(2)
    ) as strategy:
        with strategy.scope():
            model = make()
        # First by rows, which makes it a table.
        assert model.predict(x[:4], verbose=0).shape == (4, 4)
        model.fit(x, y, batch_size=32, shuffle=False, verbose=0)
        assert is_table(strategy, model.table.embeddings)
        assert_same(model, alone)


def test_an_optimizer_whose_rows_need_each_other_keeps_the_table_whole():
    alone = compiled(K.Lamb(0.1))
    fitted(alone)
    with local_strategy(servers=2, max_staleness=0) as strategy:
        with strategy.scope():
            model = compiled(K.Lamb(0.1))
        fitted(model)
        assert not is_table(strategy, model.layers[1].embeddings)
        assert_same(model, alone)
        with strategy.scope():
            other = compiled(K.Lamb(0.1))
        other.predict(data(8)[0], verbose=0)
        with pytest.raises(unisono.UnsupportedError, match="Lamb"):
            fitted(other)


def test_a_lost_worker_costs_nothing():
    alone = compiled(K.Adagrad(0.5))
    fitted(alone)

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                for task in strategy.cluster.worker_tasks[:1]:
                    strategy.cluster.kill_worker(task)
                    strategy.cluster.start_worker(task)

    with local_strategy(workers=2, servers=2, max_staleness=0) as strategy:
        with strategy.scope():
            model = compiled(K.Adagrad(0.5))
        fitted(model, callbacks=[Kill()])
        assert_same(model, alone)


def test_functions_of_a_coordinator_use_rows():
    with local_strategy(
        servers=2, max_staleness=0, variable_partitioner=FixedShardsPartitioner(2)
    ) as strategy:
        with strategy.scope():
            table = keras.Variable("glorot_uniform", shape=(ROWS, 4), dtype="float32")
            optimizer = K.Adagrad(0.5)
            optimizer.build([table])
        before = table.numpy()

        @unisono.function
        def step(ids):
            def run(ids):
                with unisono.GradientTape() as tape:
                    loss = keras.ops.sum(keras.ops.take(table, ids % ROWS, axis=0) ** 2)
                optimizer.apply_gradients(zip(tape.gradient(loss, [table]), [table], strict=True))
                return loss

            return strategy.run(run, args=(ids,))

        coordinator = unisono.coordinator.ClusterCoordinator(strategy)
        ids = np.array([3, 70, 3 + ROWS])
        value = coordinator.schedule(step, args=(ids,))
        coordinator.join()
        np.testing.assert_allclose(value.fetch(), (before[ids % ROWS] ** 2).sum(), rtol=1e-5)
        assert is_table(strategy, table)
        changed = np.flatnonzero((table.numpy() != before).any(1))
        assert changed.tolist() == [3, 70]
