"""`ClusterCoordinator` on servers and workers of this process, with the error rules of tf.distribute."""

import gc

import keras
import numpy as np
import pytest

import unisono
from tests.ps_cluster import local_strategy
from unisono.cluster_resolver._spec import Task
from unisono.coordinator import (
    ClusterCoordinator,
    PerWorkerValues,
    RemoteValue,
    experimental_get_current_worker_index,
    get_current_worker_index,
)


@pytest.fixture(scope="module")
def strategy():
    with local_strategy(workers=2, servers=2) as made:
        yield made


@pytest.fixture(scope="module")
def coordinator(strategy):
    return ClusterCoordinator(strategy)


@unisono.function
def add(a, b):
    return {"sum": a + b, "word": "static"}


HERE = iter(unisono.data.Dataset.range(4).batch(2))


@unisono.function
def take(iterator):
    return keras.ops.sum(next(iterator))


def test_the_coordinator_of_a_strategy_is_one(strategy, coordinator):
    assert ClusterCoordinator(strategy) is coordinator
    assert coordinator.strategy is strategy


def test_a_custom_loop_as_in_the_tutorial(strategy, coordinator):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.3)
        accuracy = keras.metrics.BinaryAccuracy(threshold=0.0)

    def dataset_fn(input_context):
        x = np.random.default_rng(0).normal(size=(80, 4)).astype("float32")
        y = (x.sum(1, keepdims=True) > 0).astype("float32")
        dataset = unisono.data.Dataset.from_tensor_slices((x, y))
        return dataset.shuffle(64).repeat().batch(input_context.get_per_replica_batch_size(16))

    @unisono.function
    def per_worker_dataset_fn():
        return strategy.distribute_datasets_from_function(dataset_fn)

    @unisono.function
    def step_fn(iterator):
        def replica_fn(x, y):
            with unisono.GradientTape() as tape:
                pred = model(x, training=True)
                loss = keras.ops.mean(keras.losses.binary_crossentropy(y, pred, from_logits=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            accuracy.update_state(y, pred)
            return loss

        x, y = next(iterator)
        losses = strategy.run(replica_fn, args=(x, y))
        return strategy.reduce(unisono.ReduceOp.SUM, losses, axis=None)

    dataset = coordinator.create_per_worker_dataset(per_worker_dataset_fn)
    assert isinstance(dataset, PerWorkerValues)
    first = last = None
    # An iterator for each epoch, as users write it: no program is made again.
    for _ in range(3):
        iterator = iter(dataset)
        accuracy.reset_state()
        results = [coordinator.schedule(step_fn, args=(iterator,)) for _ in range(10)]
        coordinator.join()
        first, last = first or results[0].fetch(), results[-1].fetch()
    assert coordinator.done()
    assert last < first
    assert float(accuracy.result()) > 0.8
    assert int(optimizer.iterations.numpy()) == 30
    assert coordinator._steps.num_programs == 1


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    @unisono.function
    def times(self, x):
        return self.factor * x


def test_a_method_can_be_scheduled(coordinator):
    two, three = Scaled(2.0), Scaled(3.0)
    values = [coordinator.schedule(each.times, args=(np.float32(5),)) for each in (two, three, two)]
    assert coordinator.fetch(values) == [10, 15, 10]


def test_results_are_numpys_or_jaxs(coordinator):
    value = coordinator.schedule(add, args=(np.float32(1),), kwargs={"b": 2.0})
    assert isinstance(value, RemoteValue)
    fetched = coordinator.fetch([value, {"other": 3}])
    assert fetched == [{"sum": np.float32(3), "word": "static"}, {"other": 3}]
    assert isinstance(fetched[0]["sum"], np.float32)
    assert float(value.get()["sum"]) == 3.0
    assert repr(value) == "<RemoteValue: there>"


def test_a_last_batch_of_another_size_makes_another_program(coordinator):
    before = coordinator._steps.num_programs
    # Which worker takes how many is not known; one of them takes six at least.
    sizes = (4, 4, 3) * 4
    rows = iter(coordinator.create_per_worker_dataset(lambda: [np.ones(n, "float32") for n in sizes]))
    values = [coordinator.schedule(take, args=(rows,)) for _ in range(12)]
    assert set(coordinator.fetch(values)) == {3, 4}
    assert coordinator._steps.num_programs == before + 2


def test_a_function_may_take_several_batches_of_several_iterators(coordinator):
    @unisono.function
    def take_three(a, b):
        return next(a) + 10 * next(b) + 100 * next(a)

    first = iter(coordinator.create_per_worker_dataset(lambda: iter(np.arange(100, dtype="float32"))))
    second = iter(coordinator.create_per_worker_dataset(lambda: np.arange(5, 100, dtype="float32")))
    value = coordinator.schedule(take_three, args=(first, second))
    assert value.fetch() == 0 + 10 * 5 + 100 * 1


def test_an_iterator_may_be_left_alone_for_batches_of_all_sizes(coordinator):
    @unisono.function
    def take_first(a, b):
        return keras.ops.sum(next(a))

    first, second = (
        iter(coordinator.create_per_worker_dataset(lambda: [np.ones(n, "float32") for n in (4, 3) * 4]))
        for _ in range(2)
    )
    values = [coordinator.schedule(take_first, args=(first, second)) for _ in range(8)]
    assert set(coordinator.fetch(values)) == {3, 4}


def test_calls_of_one_kind_are_one_function(coordinator):
    def dataset_fn():
        return unisono.data.Dataset.range(8).batch(2)

    iterators = [iter(coordinator.create_per_worker_dataset(dataset_fn)) for _ in range(2)]
    # Each would be kept as long as the job runs.
    kept = []
    for iterator in iterators * 2:
        coordinator.schedule(take, args=(iterator,)).fetch()
        kept.append(len(coordinator._functions))
    assert len(set(kept)) == 1


def test_a_datasets_function_may_ask_for_its_worker(coordinator):
    def own(context):
        assert context.num_input_pipelines == 2
        assert context.input_pipeline_id == get_current_worker_index()
        return [np.float32(experimental_get_current_worker_index())] * 50

    iterator = iter(coordinator.create_per_worker_dataset(own))
    values = coordinator.fetch([coordinator.schedule(take, args=(iterator,)) for _ in range(20)])
    assert set(values) == {0.0, 1.0}
    with pytest.raises(RuntimeError, match="outside of"):
        get_current_worker_index()


def test_a_scheduled_function_may_ask_for_its_worker(strategy, coordinator):
    @unisono.function
    def own(factor):
        return factor * keras.ops.cast(get_current_worker_index(), "float32")

    @unisono.function
    def with_batch(iterator, factor):
        return next(iterator), factor * experimental_get_current_worker_index() + strategy.run(lambda: 1)

    before = coordinator._steps.num_programs
    values = [coordinator.schedule(own, args=(np.float32(10),)) for _ in range(20)]
    assert set(coordinator.fetch(values)) == {0.0, 10.0}
    dataset = coordinator.create_per_worker_dataset(lambda: [np.int32(get_current_worker_index())] * 50)
    iterator = iter(dataset)
    values = [coordinator.schedule(with_batch, args=(iterator, np.int32(10))) for _ in range(20)]
    assert set(coordinator.fetch(values)) == {(0, 1), (1, 11)}
    # One program for all workers.
    assert coordinator._steps.num_programs == before + 2


def test_the_first_error_is_raised_once(coordinator):
    iterator = iter(coordinator.create_per_worker_dataset(lambda: [np.ones(2, "float32")]))
    values = [coordinator.schedule(take, args=(iterator,)) for _ in range(12)]
    with pytest.raises(unisono.OutOfRangeError, match="the end of the data on worker"):
        coordinator.join()
    assert coordinator.done()
    outcomes = []
    for value in values:
        try:
            outcomes.append(float(value.fetch()))
        except Exception as error:
            outcomes.append(type(error).__name__)
    assert outcomes[:2] == [2.0, 2.0]
    assert set(outcomes[2:]) == {"OutOfRangeError", "CancelledError"}
    assert coordinator.schedule(add, args=(1.0, 2.0)).fetch()["sum"] == 3


def test_errors_of_a_dataset_are_raised_as_a_functions(coordinator):
    def broken():
        raise ZeroDivisionError("no data")

    iterator = iter(coordinator.create_per_worker_dataset(broken))
    values = [coordinator.schedule(take, args=(iterator,)) for _ in range(2)]
    with pytest.raises(ZeroDivisionError, match="no data"):
        coordinator.join()
    # Once, although no worker has this dataset.
    assert coordinator.done()
    for value in values:
        with pytest.raises((ZeroDivisionError, unisono.CancelledError)):
            value.fetch()
    assert coordinator.schedule(add, args=(1.0, 2.0)).fetch()["sum"] == 3


def test_an_error_of_the_function_itself_is_raised_where_it_is_traced(coordinator):
    @unisono.function
    def wrong():
        raise ZeroDivisionError("in the function")

    with pytest.raises(ZeroDivisionError, match="in the function"):
        coordinator.schedule(wrong)
    assert coordinator.done()


def test_a_loop_over_the_batches_is_refused_and_does_not_hang(coordinator):
    @unisono.function
    def total(iterator):
        return sum(keras.ops.sum(batch) for batch in iterator)

    iterator = iter(coordinator.create_per_worker_dataset(lambda: [np.ones(2, "float32")] * 3))
    coordinator.schedule(total, args=(iterator,))
    with pytest.raises(unisono.InvalidArgumentError, match=r"batch = next\(iterator\)"):
        coordinator.join()
    assert coordinator.done()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda c: c.schedule(lambda: 1), TypeError, "takes a `unisono.function`"),
        (
            lambda c: c.schedule(add, args=(c.schedule(add, args=(1.0, 2.0)), 1)),
            ValueError,
            "a `RemoteValue`",
        ),
        (
            lambda c: c.schedule(take, args=(iter(unisono.data.Dataset.range(4).batch(2)),)),
            ValueError,
            "as argument an iterator that this process has made",
        ),
        (
            lambda c: c.schedule(unisono.function(lambda: next(HERE))),
            ValueError,
            r"`next` of an iterator .* `iterator = iter\(coordinator.create_per_worker_dataset",
        ),
        (lambda c: next(iter(c.create_per_worker_dataset(list))), RuntimeError, "on workers alone"),
        (lambda c: c.create_per_worker_dataset(3), TypeError, "made by a function"),
        (lambda c: c.create_per_worker_dataset(lambda: c), TypeError, "must be pickled"),
        (
            lambda c: ClusterCoordinator(unisono.MirroredStrategy()),
            ValueError,
            "needs a `ParameterServerStrategy`",
        ),
    ],
)
def test_what_cannot_be_scheduled(coordinator, make, error, message):
    with pytest.raises(error, match=message):
        make(coordinator)
    coordinator.join()


def test_iterators_that_are_dropped_are_forgotten(strategy, coordinator):
    iterator = iter(coordinator.create_per_worker_dataset(lambda: [np.ones(2)] * 9))
    coordinator.schedule(take, args=(iterator,)).fetch()
    del iterator
    gc.collect()
    coordinator.schedule(add, args=(1.0, 2.0)).fetch()
    assert not [name for name in strategy._job.pool._of_data if name.startswith("iterator")]


def test_an_iterator_that_the_program_drops_serves_the_calls_that_have_it(strategy, coordinator):
    dataset = coordinator.create_per_worker_dataset(lambda: [np.ones(2)] * 9)
    results = [coordinator.schedule(take, args=(iter(dataset),)) for _ in range(9)]
    gc.collect()
    assert coordinator.fetch(results) == [2.0] * 9
    coordinator.join()
    assert not [name for name in strategy._job.pool._of_data if name.startswith("iterator")]


def test_workers_shuffle_a_dataset_in_orders_of_their_own(coordinator):
    @unisono.function
    def take_one(iterator):
        return next(iterator), get_current_worker_index()

    dataset = unisono.data.Dataset.range(50).shuffle(50)
    for given, is_own in ((dataset, True), (unisono.data.Dataset.range(50).shuffle(50, seed=1), False)):
        iterator = iter(coordinator.create_per_worker_dataset(given))
        found = {0: [], 1: []}
        while not all(found.values()) or min(map(len, found.values())) < 4:
            value, worker = coordinator.schedule(take_one, args=(iterator,)).fetch()
            found[int(worker)].append(int(value))
        assert (found[0][:4] != found[1][:4]) is is_own


def test_datasets_go_on_where_a_lost_workers_finished_work_ended():
    with local_strategy(workers=1) as strategy:
        coordinator = ClusterCoordinator(strategy)
        iterator = iter(coordinator.create_per_worker_dataset(lambda: np.arange(1000, dtype="float32")))
        values = []
        for round_ in range(3):
            values += coordinator.fetch([coordinator.schedule(take, args=(iterator,)) for _ in range(10)])
            if round_ < 2:
                strategy.cluster.kill_worker(Task("worker", 0))
                strategy.cluster.start_worker(Task("worker", 0))
        assert values == list(range(30))


def test_random_numbers_differ_between_calls_and_not_between_attempts():
    with local_strategy(workers=2) as strategy:
        coordinator = ClusterCoordinator(strategy)
        generator = keras.random.SeedGenerator(3)

        @unisono.function
        def draw():
            return keras.random.uniform((), seed=generator)

        drawn = coordinator.fetch([coordinator.schedule(draw) for _ in range(20)])
        assert len(set(drawn)) == 20
        again = keras.random.SeedGenerator(3)
        expected = [float(keras.random.uniform((), seed=again)) for _ in range(20)]
        np.testing.assert_allclose(drawn, expected, rtol=1e-6)
