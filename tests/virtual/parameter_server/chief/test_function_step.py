"""Users' functions as programs of workers, with dictionaries as servers: the numbers of one device."""

import jax
import keras
import numpy as np
import pytest

import unisono
from tests.virtual.parameter_server.chief._dict_cluster import DictCluster, DictStrategy
from unisono.parameter_server.programs._function_step import (
    FunctionSteps,
    WorkerIterator,
    traced_worker_index,
)

CLOSE = {"rtol": 2e-5, "atol": 1e-6}

BATCH = (jax.ShapeDtypeStruct((8, 6), np.dtype("float32")), jax.ShapeDtypeStruct((8,), np.dtype("int32")))


def batches(count=4):
    rng = np.random.default_rng(0)
    return [
        (rng.normal(size=(8, 6)).astype("float32"), rng.integers(0, 3, 8).astype("int32"))
        for _ in range(count)
    ]


class Training:
    """The objects of TensorFlow's tutorial for parameter servers, and its step."""

    def __init__(self, strategy):
        keras.utils.set_random_seed(2)
        self.strategy = strategy
        self.model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, "relu"),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(3),
            ]
        )
        self.optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.5, name="adam")
        self.accuracy = keras.metrics.SparseCategoricalAccuracy()
        self.losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    @property
    def variables(self):
        return [*self.model.variables, *self.accuracy.variables, *self.optimizer.variables]

    def replica_fn(self, batch):
        x, y = batch
        with unisono.GradientTape() as tape:
            predictions = self.model(x, training=True)
            loss = unisono.nn.compute_average_loss(self.losses(y, predictions))
        gradients = tape.gradient(loss, self.model.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
        self.accuracy.update_state(y, predictions)
        return loss

    def worker_fn(self, iterator):
        losses = self.strategy.run(self.replica_fn, args=(next(iterator),))
        return self.strategy.reduce(unisono.ReduceOp.SUM, losses, axis=None)


def run(cluster, made, given, call=()):
    """Run a function's program on batches that its worker took."""
    return cluster.run(made.step, [*call, *jax.tree.leaves(given)])


def test_the_tutorials_step_is_that_of_one_device():
    one = unisono.OneDeviceStrategy("cpu:0")
    with one.scope():
        plain = Training(one)
    strategy = DictStrategy()
    with strategy.scope():
        ours = Training(strategy)
    steps = FunctionSteps(strategy)
    # Not built before: the optimizer makes its variables in the first trace.
    made = steps.program(unisono.function(ours.worker_fn), (WorkerIterator(7, BATCH),))
    assert made.reads == (7,)
    assert made.step.worker is None
    assert ours.optimizer.built
    assert {id(v) for v in made.variables} == {id(v) for v in ours.variables}
    cluster = DictCluster(ours.variables, [ours.optimizer], 2)
    step = unisono.function(plain.worker_fn)
    for batch in batches():
        assert steps.program(unisono.function(ours.worker_fn), (WorkerIterator(7, BATCH),)) is made
        np.testing.assert_allclose(run(cluster, made, batch), step(iter([batch])), **CLOSE)
    assert steps.num_programs == 1
    for mine, theirs in zip(ours.variables, plain.variables, strict=True):
        np.testing.assert_allclose(cluster.read(mine), theirs.value, **CLOSE, err_msg=mine.path)
    assert [v.path.partition("/")[0] for v in ours.optimizer.variables] == ["adam"] * 10


def test_arguments_and_batches_of_two_datasets():
    strategy = DictStrategy()
    with strategy.scope():
        total, last = unisono.Variable(1.0, name="total"), unisono.Variable(0.0, name="last")

    def fn(first, second, scale, offset, times):
        for _ in range(times):
            total.assign_add(keras.ops.sum(next(first)) * scale)
        last.assign(keras.ops.sum(next(second)) + offset)
        return {"last": last, "name": "done"}

    spec = jax.ShapeDtypeStruct((2,), np.dtype("float32"))
    args = (WorkerIterator(0, spec), WorkerIterator(1, spec), 0.5, np.float32([2.0]).sum(), 2)
    steps = FunctionSteps(strategy)
    made = steps.program(fn, args)
    assert made.reads == (0, 0, 1)

    cluster = DictCluster([total, last], [], 1)
    one, two = np.ones(2, "float32"), np.full(2, 2, "float32")
    result = run(cluster, made, [one, two, two], steps.arrays(args))
    assert float(result["last"]) == 6
    assert result["name"] == "done"
    assert cluster.read(total) == 4
    assert cluster.read(last) == 6
    # Overwritten unseen: its old value is not pulled.
    assert [v.name for v in made.step.reads] == ["total"]
    assert [v.name for v in made.step.assigns] == ["last"]
    # Another number needs no other program; another count of batches does.
    assert steps.program(fn, (*args[:2], 0.25, *args[3:])) is made
    assert steps.program(fn, (*args[:4], 1)).reads == (0, 1)
    # An array that is on a worker alone is known by its shape and type.
    remote = jax.ShapeDtypeStruct((), np.dtype("float32"))
    assert steps.program(fn, (*args[:3], remote, 2)) is made


def test_the_number_of_the_worker_is_an_argument_of_the_program():
    strategy = DictStrategy()
    with strategy.scope():
        total = unisono.Variable(0.0, name="total")

    def fn(factor):
        return total.assign_add(factor * (traced_worker_index() + 1))

    steps, cluster = FunctionSteps(strategy), DictCluster([total], [], 1)
    made = steps.program(fn, [np.float32(10)])
    assert (made.step.arrays, made.step.worker) == ((0, 1), 1)
    assert float(run(cluster, made, [np.float32(10), np.int32(1)])) == 20
    assert float(run(cluster, made, [np.float32(10), np.int32(0)])) == 30
    # One that does not use it is like any other.
    assert steps.program(lambda: (traced_worker_index(), 1)[1]).step.worker is None


def test_two_optimizers_of_one_step_outside_of_run():
    strategy = DictStrategy()
    with strategy.scope():
        a, b = unisono.Variable(1.0, name="a"), unisono.Variable(2.0, name="b")
        one, two = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.5)

    def fn():
        with unisono.GradientTape(persistent=True) as tape:
            loss = a.value**2 + 3 * b.value
        one.apply_gradients([(tape.gradient(loss, a), a)])
        two.apply_gradients([(tape.gradient(loss, b), b)])
        return loss

    made = FunctionSteps(strategy).program(fn)
    assert [u.optimizer for u, _ in made.step.gradients] == [one, two]
    cluster = DictCluster([a, b], [one, two], 2)
    assert float(run(cluster, made, [])) == 7
    np.testing.assert_allclose([cluster.read(a), cluster.read(b)], [0.8, 0.5], rtol=1e-6)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("scaled", [False, True])
def test_an_optimizer_may_update_several_times_in_one_step(scaled):
    strategy = DictStrategy()

    def made():
        a, b = unisono.Variable([1.0, -2.0], name="a"), unisono.Variable(2.0, name="b")
        inner = keras.optimizers.Adam(0.1, global_clipnorm=1.0)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, 8.0, dynamic_growth_steps=2)
        return a, b, optimizer if scaled else inner

    def step(a, b, optimizer, x):
        for number in range(3):
            with unisono.GradientTape() as tape:
                loss = keras.ops.sum(a.value**2) * x + (number - 1) * b.value**3
                given = optimizer.scale_loss(loss) if scaled else loss
            # The last one of a alone.
            variables = [a, b][: 3 - number]
            optimizer.apply_gradients(zip(tape.gradient(given, variables), variables, strict=True))
        return loss + keras.ops.sum(a.value)

    with strategy.scope():
        a, b, optimizer = made()
        optimizer.build([a, b])
    program = FunctionSteps(strategy).program(lambda x: step(a, b, optimizer, x), [np.float32(1)])
    assert [u.call for u in program.step.updates] == [0, 1, 2]
    cluster = DictCluster([a, b], [optimizer], 2)
    with unisono.OneDeviceStrategy("cpu:0").scope():
        alone = made()
        alone[2].build(list(alone[:2]))
        expected = unisono.function(lambda x: step(*alone, x))
    for x in (1.0, 0.5, np.inf if scaled else 0.25, 2.0):
        found = float(run(cluster, program, [np.float32(x)]))
        np.testing.assert_allclose(found, float(expected(np.float32(x))), **CLOSE)
    for variable, twin in zip([a, b, *optimizer.variables], [*alone[:2], *alone[2].variables], strict=True):
        np.testing.assert_allclose(cluster.read(variable), twin.value, **CLOSE, err_msg=twin.path)


def test_what_an_update_leaves_can_be_read_after_it():
    strategy = DictStrategy()
    with strategy.scope():
        a, kept = unisono.Variable(1.0, name="a"), unisono.Variable(3.0, name="kept")
        calls = unisono.Variable(
            0.0, name="calls", synchronization="on_read", aggregation=unisono.VariableAggregation.SUM
        )
        optimizer = keras.optimizers.Adam(0.25)

    def replica_fn():
        optimizer.apply_gradients([(keras.ops.ones(()), a)])
        calls.assign_add(1.0)
        return optimizer.learning_rate + kept

    made = FunctionSteps(strategy).program(lambda: strategy.run(replica_fn))
    cluster = DictCluster([a, kept, calls], [optimizer], 1)
    assert float(run(cluster, made, [])) == 3.25
    assert float(run(cluster, made, [])) == 3.25
    assert cluster.read(calls) == 2
    np.testing.assert_allclose(cluster.read(a), 0.5, rtol=1e-4)
    # The slots, which no step needs that does not read weights after their update.
    assert "momentum" not in "".join(v.path for v in made.step.reads)


def faults():
    strategy = DictStrategy()
    with strategy.scope():
        a = unisono.Variable(1.0, name="a")
        optimizer = keras.optimizers.SGD(0.1)
    apply = lambda: optimizer.apply_gradients([(keras.ops.ones(()), a)])  # noqa: E731
    data = unisono.data.Dataset.range(3)
    iterator = WorkerIterator(0, jax.ShapeDtypeStruct((), np.dtype("float32")))
    return strategy, {
        "by that update alone": lambda: (apply(), a.assign(a + 1)),
        "take its batches with `next`": lambda: sum(data),
        "outside of a step": lambda: strategy.run(lambda: next(iterator)),
        "must not call Python": lambda: jax.debug.print("{}", a.value),
    }


@pytest.mark.parametrize("message", faults()[1])
def test_what_no_worker_can_do_is_refused(message):
    strategy, functions = faults()
    kinds = (unisono.UnsupportedError, unisono.InvalidArgumentError)
    with pytest.raises(kinds, match=message):
        FunctionSteps(strategy).program(functions[message])


def test_what_belongs_to_workers_is_refused_on_the_coordinator():
    with pytest.raises(unisono.UnisonoError, match="on workers alone"):
        next(WorkerIterator(0, BATCH))
    assert traced_worker_index() is None
