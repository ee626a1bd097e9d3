"""`unisono.summary` inside compiled steps: the first replica writes, once for each run."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unisono
from tests.event_files import read, scalars
from unisono import summary


def cpus(n):
    return [f"cpu:{i}" for i in range(n)]


STRATEGIES = {
    "one device": lambda: unisono.OneDeviceStrategy("cpu:1"),
    "mirrored 2": lambda: unisono.MirroredStrategy(cpus(2)),
    "mirrored 8": lambda: unisono.MirroredStrategy(cpus(8)),
    "central storage": lambda: unisono.CentralStorageStrategy(cpus(2)),
}


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    return STRATEGIES[request.param]()


@pytest.fixture
def two():
    return unisono.MirroredStrategy(cpus(2))


@pytest.fixture
def writer(tmp_path):
    writer = summary.create_file_writer(tmp_path)
    yield writer
    writer.close()


def numbers(strategy):
    return strategy.distribute_values_from_function(lambda c: np.float32(c.replica_id_in_sync_group + 1))


def test_the_first_replica_writes_once_for_each_run(strategy, tmp_path, writer):
    @jax.tree_util.Partial
    def step(x, i):
        assert summary.scalar("x", x * i, step=i)
        summary.histogram("h", jnp.full(3, x), step=i)
        summary.image("picture", jnp.ones((4, 2, 2, 1)) * x, step=i, max_outputs=1)
        summary.text("note", "compiled", step=i)

    x = numbers(strategy)
    with writer.as_default():
        for i in range(1, 5):
            strategy.run(step, args=(x, np.int32(i)))
    assert scalars(tmp_path, "x") == [(i, float(i)) for i in range(1, 5)]
    values, plugins = read(tmp_path)
    assert set(plugins) == {"x", "h", "picture", "note"}
    assert all(sorted(s for s, _ in points) == [1, 2, 3, 4] for points in values.values())
    assert all(v[-1].tolist() == [1.0, 1.0, 3.0] for _, v in values["h"])
    assert {v.item() for _, v in values["note"]} == {b"compiled"}
    assert strategy.num_programs == 1


def test_defaults_are_those_of_the_call(two, tmp_path):
    """One program, and the writer, the step and the condition change between its runs."""
    first, second = summary.create_file_writer(tmp_path / "1"), summary.create_file_writer(tmp_path / "2")

    def step(x):
        summary.scalar("x", x)

    for writer, steps in ((first, range(3)), (second, range(3, 8))):
        with writer.as_default(step=-1):
            for i in steps:
                summary.set_step(i)
                with summary.record_if(lambda i=i: i != 4):
                    two.run(step, args=(np.float32(i),))
    two.run(step, args=(np.float32(9),))
    first.close()
    second.close()
    assert scalars(tmp_path / "1", "x") == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert scalars(tmp_path / "2", "x") == [(3, 3.0), (5, 5.0), (6, 6.0), (7, 7.0)]
    assert two.num_programs == 1


def test_a_variable_counts_the_steps(two, tmp_path, writer):
    with two.scope():
        counter = keras.Variable(0, dtype="int32", trainable=False)

    def step(x):
        with summary.record_if(lambda: counter % 2 == 0):
            summary.scalar("x", x)
        counter.assign(counter + 1)

    with writer.as_default(step=counter):
        for i in range(4):
            two.run(step, args=(np.float32(i),))
    assert scalars(tmp_path, "x") == [(0, 0.0), (2, 2.0)]


def test_a_default_writer_inside_the_step(two, tmp_path, writer):
    other = summary.create_file_writer(tmp_path / "other")

    def step(x, i):
        with other.as_default(step=i):
            summary.scalar("x", x)

    with writer.as_default(step=100):
        two.run(step, args=(np.float32(1), np.int32(4)))
    two.run(step, args=(np.float32(2), np.int32(5)))
    other.close()
    assert scalars(tmp_path / "other", "x") == [(4, 1.0), (5, 2.0)]
    assert scalars(tmp_path, "x") == []


def test_derivatives_write_once(two, tmp_path, writer):
    with two.scope():
        w = keras.Variable(2.0)

    def step(x):
        with unisono.GradientTape(persistent=True) as tape:
            summary.scalar("before", w * x, step=1)
            loss = w * w * x
            summary.scalar("loss", loss, step=1)
        grads = tape.gradient(loss, [w]), tape.gradient(loss * 2, [w])

        def again():
            summary.scalar("inside", w * 3, step=1)
            return w * 3

        _, (by_w,) = unisono.value_and_grad(again, [w])()
        return grads[0][0] + grads[1][0] + by_w

    with writer.as_default():
        result = two.run(step, args=(np.float32(1),))
    assert float(two.local_results(result)[0]) == 15.0
    assert {tag: len(points) for tag, points in read(tmp_path)[0].items()} == {
        "before": 1, "loss": 1, "inside": 1,
    }  # fmt: skip


def test_replicas_of_unequal_size(two, tmp_path, writer):
    def step(x):
        total = unisono.get_replica_context().all_reduce("sum", jnp.sum(x))
        summary.scalar("total", total, step=1)
        summary.scalar("rows", x.shape[0], step=1)

    (batch,) = two.distribute_dataset([np.ones(3, "f4")])
    with writer.as_default():
        two.run(step, args=(batch,))
    assert scalars(tmp_path, "total") == [(1, 3.0)]
    assert scalars(tmp_path, "rows") == [(1, 2.0)]


def test_in_a_function_and_in_a_scan(two, tmp_path, writer):
    x = numbers(two)

    def step(x):
        def body(i, _):
            summary.scalar("scanned", x + i, step=i)
            return i + 1, None

        jax.lax.scan(body, jnp.zeros((), "int32"), None, length=3)
        return x

    @unisono.function
    def both():
        total = two.reduce("sum", two.run(step, args=(x,)), axis=None)
        summary.scalar("cross", total, step=7)

    with writer.as_default():
        both()
    assert scalars(tmp_path, "scanned") == [(0, 1.0), (1, 2.0), (2, 3.0)]
    assert scalars(tmp_path, "cross") == [(7, 3.0)]


def test_large_values_do_not_hang(tmp_path, writer):
    strategy = unisono.MirroredStrategy(cpus(8))

    def step(x):
        summary.histogram("h", jnp.ones((500, 500)) * x, step=1)
        return unisono.get_replica_context().all_reduce("sum", x)

    with writer.as_default():
        for _ in range(40):
            strategy.run(step, args=(numbers(strategy),))
    assert len(read(tmp_path)[0]["h"]) == 40


def test_a_program_compiled_without_a_writer_sends_nothing(two, tmp_path, writer):
    answers = []

    def step(x):
        answers.append(summary.scalar("x", x, step=1))

    two.run(step, args=(np.float32(1),))
    with writer.as_default():
        two.run(step, args=(np.float32(1),))
    assert not any(answers)
    assert read(tmp_path)[0] == {}


def test_layers_write_in_fit_where_each_device_computes_all_rows(two, tmp_path, writer):
    class Watched(keras.layers.Layer):
        def call(self, x):
            summary.scalar("mean", keras.ops.mean(x))
            return x

    with two.scope():
        model = keras.Sequential([keras.Input((1,)), Watched(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((5, 1), "f4")
    with writer.as_default(step=1):
        model.fit(x, x, batch_size=2, verbose=0, shuffle=False)  # 2, 2 and 1 rows
        model.compile("sgd", "mse", steps_per_execution=2)
        model.fit(x[:4], x[:4], batch_size=2, verbose=0)
        model.compile("sgd", "mse", run_eagerly=True)
        model.fit(x[:4], x[:4], batch_size=4, verbose=0)
    assert scalars(tmp_path, "mean") == [(1, 1.0)] * 6


class TestErrors:
    def test_set_step_in_a_step(self, two):
        with pytest.raises(unisono.ContextError, match="outside of compiled code"):
            two.run(lambda: summary.set_step(1))

    def test_no_step(self, two, writer):
        with writer.as_default(), pytest.raises(unisono.InvalidArgumentError, match="must have a step"):
            two.run(lambda x: summary.scalar("x", x) and None, args=(np.float32(1),))

    def test_shape(self, two, writer):
        with writer.as_default(step=1), pytest.raises(unisono.InvalidArgumentError, match=r"shape \(3,\)"):
            two.run(lambda: summary.scalar("x", jnp.ones(3)) and None)

    def test_a_writer_that_was_closed_is_told_to_the_caller(self, two, tmp_path):
        writer = summary.create_file_writer(tmp_path)
        writer.close()
        with pytest.raises(unisono.ContextError, match="must be open"):
            with writer.as_default(step=1):
                two.run(lambda x: summary.scalar("x", x) and None, args=(np.float32(1),))
        assert summary.get_step() is None

    def test_an_error_is_raised_once(self, two, tmp_path, writer):
        def condition():
            if isinstance(jnp.zeros(()), jax.core.Tracer):
                return True
            raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            with writer.as_default(step=1), summary.record_if(condition):
                two.run(lambda x: summary.scalar("x", x) and None, args=(np.float32(1),))
        writer.flush()
