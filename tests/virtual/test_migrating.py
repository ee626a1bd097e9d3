"""docs/migrating.md: its code runs, its names are there, and what it says of numbers holds."""

import contextlib
import copy
import re
from pathlib import Path

import jax.numpy as jnp
import keras
import numpy as np
import pytest
import typer

import unisono
from unisono.cli import _app

TEXT = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
#: All but the one that downloads a data set; `tests/unit/tf/test_datasets.py` runs its like.
BLOCKS = [b for b in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "tfds.load" not in b]

X = np.random.default_rng(0).normal(size=(10, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def two():
    return unisono.MirroredStrategy(["cpu:0", "cpu:1"])


def trained(scope=None, optimizer="sgd", layers=(), batch_size=4, x=X, y=Y):
    """Train, without a strategy if None, and return the weights."""
    keras.utils.set_random_seed(1)
    with scope or contextlib.nullcontext():
        model = keras.Sequential([keras.Input((3,)), *(layer() for layer in layers), keras.layers.Dense(1)])
        model.compile(
            keras.optimizers.deserialize(optimizer) if isinstance(optimizer, dict) else optimizer, "mse"
        )
    model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()


def assert_like(weights, others):
    for mine, other in zip(weights, others, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)


def test_the_code_runs_and_both_ways_give_the_numbers_of_one_device():
    line, before, after = BLOCKS
    scope = {}
    exec(line, scope)
    assert scope["tf"].keras.Model is keras.Model

    def make():
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])

    x, y = np.tile(X[:8], (2, 1)), np.tile(Y[:8], (2, 1))
    plain = make()
    plain.compile("sgd", "mse")
    plain.fit(x, y, batch_size=8, verbose=0, shuffle=False)
    for code in (before, after):
        found = {"keras": keras, "unisono": unisono, "make": make, "x": x, "y": y}
        try:
            # The order of the rows changes nothing in one batch; of two, the test fixes it.
            exec(code.replace("batch_size=8", "batch_size=8, shuffle=False, verbose=0"), found)
        finally:
            keras.distribution.set_distribution(None)
        assert_like(found["model"].get_weights(), plain.get_weights())


#: The options of `unisono launch`.
LAUNCH = {opt for p in typer.main.get_command(_app.app).commands["launch"].params for opt in p.opts}

#: What the tables call by a name; and where names are that stand alone.
OBJECTS = {
    "strategy": unisono.Strategy, "optimizer": keras.optimizers.Optimizer, "tape": unisono.GradientTape,
    "model": keras.Model, "keras": keras, "unisono": unisono,
    "cluster_resolver": unisono.cluster_resolver.ClusterResolver,
}  # fmt: skip
PLACES = (
    unisono, unisono.Strategy, unisono.ReplicaContext, unisono.callbacks, unisono.data.Dataset,
    keras.Model, keras.optimizers,
)  # fmt: skip


def found(name):
    first, *rest = name.split(".")
    places = (
        [OBJECTS[first]] if first in OBJECTS else [getattr(p, first) for p in PLACES if hasattr(p, first)]
    )
    for part in rest:
        places = [getattr(place, part) for place in places if hasattr(place, part)]
    return bool(places)


def test_the_names_of_the_tables_are_there():
    rows = re.findall(r"^\| (?!what|Horovod|torch|---).*?\|([^|]*)\|$", TEXT, re.MULTILINE)
    codes = [code for row in rows for code in re.findall(r"`([^`]+)`", row)]
    assert len(codes) > 20
    for code in codes:
        if code.startswith("unisono launch"):
            assert set(re.findall(r"(?<!\w)-+\w+", code)) <= LAUNCH, code
        else:
            # What is called, and names that stand alone.
            for name in re.findall(r"(?<![\w.])([A-Za-z_][\w.]*)(?=\(|$)", code.removeprefix("optimizer=")):
                assert found(name), code


@pytest.mark.parametrize(
    "options",
    [
        # A ragged last batch: ten rows in batches of four.
        {},
        {"optimizer": {"class_name": "SGD", "config": {"learning_rate": 0.1, "global_clipnorm": 0.05}}},
        {"optimizer": {"class_name": "Adam", "config": {"gradient_accumulation_steps": 2}}, "batch_size": 2},
    ],
    ids=["ragged", "clipped", "accumulated"],
)
def test_rows_that_say_the_numbers_of_one_device(options):
    assert_like(trained(two().scope(), **options), trained(**options))


def test_moving_statistics_are_the_mean_of_all_replicas():
    rows = np.repeat([[0.0], [2.0]], 2, axis=0).astype("float32") * np.ones(3, "float32")
    with two().scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(momentum=0.0)])
        model.compile("sgd", "mse")
    model.fit(rows, rows, batch_size=4, verbose=0, shuffle=False)
    np.testing.assert_allclose(model.layers[0].moving_mean, [1.0, 1.0, 1.0])


def test_replicas_have_masks_rows_and_means_of_their_own():
    strategy = unisono.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    with strategy.scope():
        layer = keras.layers.Dropout(0.5, seed=1)
    dropped = strategy.run(lambda: layer(jnp.ones(64), training=True)).values
    assert len({bytes(np.asarray(mask)) for mask in dropped}) == 4
    (batch,) = strategy.experimental_distribute_dataset(unisono.data.Dataset.range(5).batch(5))
    assert [len(part) for part in strategy.experimental_local_results(batch)] == [2, 1, 1, 1]

    def mean():
        context = unisono.get_replica_context()
        return context.all_reduce("mean", jnp.float32(1) * context.replica_id_in_sync_group)

    assert [float(value) for value in strategy.run(mean).values] == [1.5] * 4
    assert strategy.gather(strategy.run(lambda: jnp.ones((2, 1))), axis=0).shape == (8, 1)


def test_the_finer_rows_of_tf_distribute():
    """Each row of the table that is no number: what is an error here, and what is none."""
    strategy, calls = two(), []
    with strategy.scope():
        mean, weight = unisono.Variable(1.0, aggregation="mean"), keras.Variable(1.0)
        optimizer = keras.optimizers.SGD(0.5)
        optimizer.apply_gradients([(jnp.ones(()), weight)])
    assert float(weight.value) == 0.5
    of_each = unisono.PerReplica((1.0, 2.0))
    with pytest.raises(unisono.InvalidArgumentError, match="PerReplica can be assigned only"):
        mean.assign(of_each)
    strategy.extended.update(mean, lambda v, x: calls.append(x), args=(of_each,))
    assert calls == [1.0]
    with pytest.raises(unisono.ContextError, match="cannot be copied"):
        copy.deepcopy(strategy)
    assert len(unisono.get_strategy().extended.worker_devices) == 1
    with pytest.raises(unisono.InvalidTypeError, match="StringLookup"):
        list(strategy.distribute_dataset([np.array(["a", "b"])]))
    for of in (
        "PerReplica",
        "extended.update",
        "apply_gradients",
        "deepcopy",
        "worker_devices",
        "strings in",
    ):
        assert any(of in line for line in TEXT.splitlines() if line.startswith("| "))
