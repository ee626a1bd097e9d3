"""Data inside `unisono.function`: the numbers of the same loop outside of it."""

import functools

import jax
import keras
import numpy as np
import pytest

import unisono
from tests.support import count_compiles

#: The last one does not divide.
BATCHES = [np.arange(4, dtype=np.float32) + i for i in range(3)] + [np.asarray([7.0, 1.0, 2.0], np.float32)]


@pytest.fixture(scope="module")
def two():
    return unisono.MirroredStrategy(["cpu:0", "cpu:1"])


class Averager:
    """A step whose result depends on the order of all batches before it."""

    def __init__(self, strategy):
        self.strategy = strategy
        with strategy.scope():
            self.state = unisono.Variable(0.0, aggregation="mean")

    def step(self, x):
        total = unisono.get_replica_context().all_reduce("sum", keras.ops.sum(x))
        self.state.assign(self.state * 0.5 + total)
        return keras.ops.sum(x)

    def on(self, x):
        return self.total(self.strategy.run(self.step, args=(x,)))

    def total(self, result):
        return self.strategy.reduce("SUM", result, axis=None) if self.is_split else result

    @property
    def is_split(self):
        return self.strategy.num_replicas_in_sync > 1


def source(strategy, fetch=True):
    options = unisono.InputOptions(experimental_fetch_to_device=fetch)
    data = unisono.data.Dataset.from_source(BATCHES)
    return strategy.distribute_dataset(data, options)


def outside(strategy, epochs=3):
    """The specification: the loop without a function around it."""
    averager, totals = Averager(strategy), []
    for _ in range(epochs):
        total = 0.0
        for x in source(strategy):
            total += averager.on(x)
        totals.append(float(total))
    return totals, float(averager.state.value)


def strategies():
    return [
        pytest.param(lambda: unisono.MirroredStrategy(["cpu:0", "cpu:1"]), id="two"),
        pytest.param(lambda: unisono.OneDeviceStrategy("cpu:0"), id="one"),
        pytest.param(unisono.get_strategy, id="default"),
    ]


def loop_over_argument(averager):
    @unisono.function
    def epoch(data):
        total, count = 0.0, 0
        for x in data:
            total += averager.on(x)
            count += 1
        assert count == len(BATCHES)
        return total

    return epoch


def loop_over_closure(averager, fetch=True):
    data = source(averager.strategy, fetch)

    @unisono.function
    def epoch(_):
        total = 0.0
        for x in data:
            total += averager.on(x)
        return total

    return epoch


def next_in_function(averager):
    @unisono.function
    def train(iterator):
        def step(x):
            return averager.step(x)

        return averager.total(averager.strategy.run(step, args=(next(iterator),)))

    def epoch(data):
        iterator, total = iter(data), 0.0
        for _ in BATCHES:
            total += train(iterator)
        with pytest.raises(StopIteration):
            train(iterator)
        return total

    return epoch


def next_in_loop(averager):
    @unisono.function
    def train(iterator, steps):
        total = 0.0
        for _ in range(steps):
            total += averager.total(averager.strategy.run(lambda x: averager.step(x), args=(next(iterator),)))
        return total

    def epoch(data):
        iterator = iter(data)
        return train(iterator, 3) + train(iterator, 1)

    return epoch


def optional_in_loop(averager):
    @unisono.function
    def epoch(data):
        iterator, total = iter(data), 0.0
        while True:
            batch = iterator.get_next_as_optional()
            if not batch.has_value():
                return total
            total += averager.on(batch.get_value())

    return epoch


def get_next_of_closure(averager):
    def epoch(data):
        iterator = iter(data)
        train = unisono.function(lambda: averager.on(iterator.get_next()))
        total = sum(train() for _ in BATCHES)
        with pytest.raises(unisono.OutOfRangeError):
            train()
        return total

    return epoch


@pytest.mark.parametrize("fetch", [True, False])
@pytest.mark.parametrize("make", strategies())
@pytest.mark.parametrize(
    "idiom",
    [
        loop_over_argument,
        loop_over_closure,
        next_in_function,
        next_in_loop,
        optional_in_loop,
        get_next_of_closure,
    ],
)
def test_the_numbers_are_those_of_the_loop_outside(idiom, make, fetch):
    strategy = make()
    if strategy._is_default and idiom in (optional_in_loop, get_next_of_closure):
        pytest.skip("the default strategy gives the source itself, whose iterators are Python's")
    averager = Averager(strategy)
    epoch = idiom(averager)
    totals = [float(epoch(source(strategy, fetch)))]
    with count_compiles() as compiled:
        totals += [float(epoch(source(strategy, fetch))) for _ in range(2)]
    expected, state = outside(strategy)
    assert totals == pytest.approx(expected)
    assert float(averager.state.value) == pytest.approx(state)
    if idiom is not get_next_of_closure:
        assert not compiled


def test_what_came_before_the_end_counts(two):
    """Three batches at a time of four: the second call takes one, and raises."""
    averager = Averager(two)

    @unisono.function
    def train(iterator):
        return [averager.on(next(iterator)), averager.on(next(iterator)), averager.on(next(iterator))]

    for _ in range(3):
        iterator = iter(source(two))
        train(iterator)
        with pytest.raises(StopIteration):
            train(iterator)
    assert float(averager.state.value) == pytest.approx(outside(two)[1])
    assert train.num_programs == 2


def test_an_optional_batch_decides_in_a_program(two):
    @unisono.function
    def take(iterator):
        batch = iterator.get_next_as_optional()
        if not batch.has_value():
            return -1.0
        return two.reduce("SUM", two.run(keras.ops.sum, args=(batch.get_value(),)), axis=None)

    for _ in range(2):
        iterator = iter(source(two))
        assert [float(take(iterator)) for _ in range(5)] == [6.0, 10.0, 14.0, 10.0, -1.0]
    assert take.num_programs == 3


def test_two_iterators(two):
    @unisono.function
    def both(left, right):
        return two.reduce(
            "SUM", two.run(lambda x, y: (x * y).sum(), args=(next(left), next(right))), axis=None
        )

    left, right = iter(source(two)), iter(source(two))
    assert [float(both(left, right)) for _ in BATCHES] == pytest.approx([(b * b).sum() for b in BATCHES])
    same = iter(source(two))
    assert float(both(same, same)) == pytest.approx((BATCHES[0] * BATCHES[1]).sum())


def test_enumerate_zip_break_and_return(two):
    averager = Averager(two)

    @unisono.function
    def some(left, right):
        seen = []
        for i, (x, y) in enumerate(zip(left, right, strict=True)):
            if i == 1:
                continue
            seen.append((i, float(averager.on(x) - averager.on(y))))
            if i == 2:
                return seen
        return None

    data = source(two)
    assert some(data, data) == [(0, 0.0), (2, 0.0)]
    assert some(data, data) == [(0, 0.0), (2, 0.0)]


def test_a_method_with_an_iterator_of_its_object(two):
    class Trainer:
        def __init__(self):
            self.iterator = iter(source(two))

        @unisono.function
        def advance(self, scale):
            x = next(self.iterator)
            return two.reduce("SUM", two.run(lambda x: (x * scale).sum(), args=(x,)), axis=None)

    trainer = Trainer()
    assert [float(trainer.advance(np.float32(2))) for _ in range(3)] == [12.0, 20.0, 28.0]
    trainer.iterator = iter(source(two))
    assert float(trainer.advance(np.float32(3))) == 18.0


def test_functions_in_functions(two):
    averager = Averager(two)
    inner = unisono.function(lambda iterator: averager.on(next(iterator)))

    @unisono.function
    def outer(data):
        iterator = iter(data)
        return [inner(iterator) for _ in BATCHES]

    assert [float(x) for x in outer(source(two))] == pytest.approx([b.sum() for b in BATCHES])
    # One for each shape: the loop is outer's, the program is inner's.
    assert (outer.num_programs, inner.num_programs) == (0, 2)


def test_a_tape_beside_next():
    w = unisono.Variable(1.0)

    @unisono.function
    def train(iterator):
        x = next(iterator)
        with unisono.GradientTape() as tape:
            loss = keras.ops.sum(w * x)
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss

    expected = 1.0
    for _ in range(2):
        iterator = iter(unisono.data.Dataset.from_source(BATCHES[:3]))
        for batch in BATCHES[:3]:
            assert float(train(iterator)) == pytest.approx(expected * batch.sum(), rel=1e-5)
            expected -= 0.1 * batch.sum()
    assert train.num_programs == 1


def test_a_tape_in_a_loop_over_data_records():
    w = unisono.Variable(1.0)

    @unisono.function
    def epoch(data):
        found = []
        for x in data:
            with unisono.GradientTape() as tape:
                loss = keras.ops.sum(w * w * x)
            found.append(tape.gradient(loss, w))
        return found

    found = epoch(unisono.data.Dataset.from_source(BATCHES))
    np.testing.assert_allclose(found, [2 * x.sum() for x in BATCHES], rtol=1e-6)


def test_a_loop_that_was_not_foreseen_loses_no_batch(two):
    """The trace fetches the first batch before it comes to the second `next`."""

    @unisono.function
    def take(iterator, count):
        return [
            two.reduce("SUM", two.run(lambda x: x.sum(), args=(next(iterator),)), axis=None)
            for _ in range(count)
        ]

    iterator = iter(source(two))
    assert [float(x) for x in take(iterator, 3)] == [6.0, 10.0, 14.0]
    assert [float(np.sum(x)) for x in two.local_results(next(iterator))] == [8.0, 2.0]


def test_the_number_of_steps_may_be_an_array(two):
    """As in TensorFlow's guide to TPUs; and values may be looked at between steps."""

    @unisono.function
    def take(iterator, steps):
        seen = []
        for _ in range(steps):
            total = two.reduce("SUM", two.run(lambda x: x.sum(), args=(next(iterator),)), axis=None)
            seen.append(float(total))
        return seen

    iterator = iter(source(two))
    assert take(iterator, np.asarray(2)) + take(iterator, jax.numpy.asarray(2)) == [6.0, 10.0, 14.0, 10.0]


def test_an_error_in_a_step_of_a_function_with_data_is_that_of_the_step(two):
    @unisono.function
    def take(iterator):
        return two.run(lambda x: float(x.sum()), args=(next(iterator),))

    with pytest.raises(jax.errors.ConcretizationTypeError) as error:
        take(iter(source(two)))
    assert "which `strategy.run` compiles" in error.value.__notes__[0]


def test_a_bare_except_does_not_stop_it(two):
    @unisono.function
    def count(data):
        found = 0
        try:
            for _ in data:
                found += 1
        except:  # noqa: E722
            raise RuntimeError("it was stopped") from None
        return found

    assert count(source(two)) == len(BATCHES)


@pytest.mark.parametrize("make", [iter, lambda batches: (b for b in batches)], ids=["iterator", "generator"])
def test_iterators_of_other_libraries(make):
    take = unisono.function(lambda iterator: keras.ops.sum(next(iterator)))
    for _ in range(2):
        iterator = make(BATCHES)
        assert [float(take(iterator)) for _ in BATCHES] == [b.sum() for b in BATCHES]
    assert take.num_programs == 2


def test_a_py_dataset():
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return len(BATCHES)

        def __getitem__(self, index):
            return BATCHES[index] * self.scale

    @unisono.function
    def total(data):
        return sum(float(data[i].sum()) for i in range(len(data)))

    data = Batches()
    for data.scale in (1.0, 2.0):
        assert total(data) == data.scale * sum(b.sum() for b in BATCHES)


def test_strings_stay_outside():
    take = unisono.function(lambda iterator: next(iterator))
    iterator = iter(unisono.data.Dataset.from_tensor_slices(["a", "b"]))
    assert [take(iterator), take(iterator)] == [b"a", b"b"]


def test_an_error_of_the_data_is_raised_at_its_batch(two):
    def batches():
        yield BATCHES[0]
        raise OSError("disk")

    take = unisono.function(lambda iterator: two.run(lambda x: x * 2, args=(next(iterator),)))
    iterator = iter(two.distribute_dataset(batches()))
    take(iterator)
    with pytest.raises(OSError, match="disk"):
        take(iterator)


def test_what_came_before_an_error_of_the_data_counts(two):
    averager = Averager(two)

    def batches():
        yield from BATCHES[:3]
        raise OSError("disk")

    @unisono.function
    def train(iterator):
        first = averager.on(next(iterator))
        try:
            return first + averager.on(next(iterator))
        except OSError:
            return -first

    iterator = iter(two.distribute_dataset(batches()))
    assert [float(train(iterator)), float(train(iterator))] == pytest.approx([16.0, -14.0])
    assert float(averager.state.value) == pytest.approx((6.0 * 0.5 + 10.0) * 0.5 + 14.0)
    assert train.num_programs == 1


def test_next_with_a_default(two):
    @unisono.function
    def take(iterator, *, default):
        batch = next(iterator, None)
        return (
            default
            if batch is None
            else two.reduce("SUM", two.run(lambda x: x.sum(), args=(batch,)), axis=None)
        )

    iterator = iter(source(two))
    assert [float(take(iterator, default=-1.0)) for _ in range(5)] == [6.0, 10.0, 14.0, 10.0, -1.0]


def test_data_in_a_step_are_an_error(two):
    data = unisono.data.Dataset.from_source(BATCHES)
    with pytest.raises(unisono.InvalidArgumentError, match="Data must be read outside of a step"):
        two.run(lambda: next(iter(data)))
    function = unisono.function(lambda: two.run(lambda: next(iter(data))))
    with pytest.raises(unisono.InvalidArgumentError, match="Data must be read outside of a step"):
        function()


def test_a_step_that_is_defined_anew_is_compiled_once(two):
    def make(scale, helper):
        def step(x):
            return helper(x) * scale

        return step

    def squared(x):
        return x**2

    run = functools.partial(two.run, args=(np.float32(3),))
    before = two.num_programs
    assert [float(run(make(2.0, squared)).values[0]) for _ in range(3)] == [18.0] * 3
    assert two.num_programs == before + 1
    # Other values, and other functions, are other programs.
    assert float(run(make(3.0, squared)).values[0]) == 27.0
    assert float(run(make(2.0, abs)).values[0]) == 6.0
    assert float(run(functools.partial(make(2.0, squared))).values[0]) == 18.0
    assert two.num_programs == before + 4


def test_a_step_sees_new_values_of_what_it_closes_over(two):
    scale = 1

    def step(x):
        return x * scale

    assert float(two.run(step, args=(np.float32(3),)).values[0]) == 3.0
    scale = 2
    assert float(two.run(step, args=(np.float32(3),)).values[0]) == 6.0


def test_a_step_that_makes_its_model_is_compiled_once():
    strategy = unisono.OneDeviceStrategy("cpu:0")
    model = None

    def step(x):
        nonlocal model
        if model is None:
            model = keras.layers.Dense(2)
        return model(x)

    for _ in range(3):
        assert strategy.run(step, args=(np.ones((2, 3), np.float32),)).shape == (2, 2)
    assert strategy.num_programs == 1


def test_a_function_does_not_keep_the_data_of_past_epochs():
    import gc
    import weakref

    take = unisono.function(lambda iterator: jax.numpy.sum(next(iterator)))
    iterator = iter(unisono.data.Dataset.from_source(BATCHES))
    take(iterator)
    gone = weakref.ref(iterator)
    del iterator
    gc.collect()
    assert gone() is None


def test_a_generator_of_a_closure_is_read_at_each_call(two):
    """Its reads cannot be seen in a trace, which would make a constant of its first batch."""
    generator = (batch for batch in BATCHES[:3])

    @unisono.function
    def step():
        return two.reduce("SUM", two.run(keras.ops.sum, args=(next(generator),)), axis=None)

    assert [float(step()) for _ in range(3)] == [
        float(two.num_replicas_in_sync * b.sum()) for b in BATCHES[:3]
    ]
    with pytest.raises(StopIteration):
        step()
