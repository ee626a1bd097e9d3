"""Steps in groups of constant length, as on GPUs: the same numbers, and two programs for a kind of batch.

Here virtual CPU devices stand for GPUs: the platform decides alone whether a loop has a constant length.
"""

import re
import threading

import jax
import keras
import numpy as np
import pytest

import unisono
from tests.virtual.training._digits import crossentropy, digits, mirrored, mlp
from unisono.data import Dataset
from unisono.step._dispatch import CompiledStep
from unisono.training.groups import _constant_groups, _step_loop
from unisono.training.groups._batch_placement import BatchStager

#: A step alone and one in a loop are two programs, which XLA:CPU rounds in two ways.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(autouse=True)
def as_on_gpus(monkeypatch):
    """Loops of constant length alone, tried soon, and with an answer that does not depend on the clock."""
    monkeypatch.setattr(_step_loop, "may_loop", lambda platform: False)
    monkeypatch.setattr(_constant_groups, "_IDLE", 0.0)
    monkeypatch.setattr(_constant_groups, "_WARM_UP", 2)
    monkeypatch.setattr(_constant_groups, "_MEASURED", 2)
    monkeypatch.setattr(_constant_groups, "pays", lambda alone, together: True)


@pytest.fixture
def compiled_at_once(monkeypatch):
    """Compile before the next step, so that it is known when the first group runs."""

    original = _constant_groups._in_thread

    def at_once(compile_):
        future = original(compile_)
        future.exception()
        return future

    monkeypatch.setattr(_constant_groups, "_in_thread", at_once)


@pytest.fixture
def dispatches(monkeypatch):
    """The number of programs that were started."""
    started = []
    original = CompiledStep.__call__

    def call(self, *args, **kwargs):
        started.append(self)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(CompiledStep, "__call__", call)
    return started


def model_of(replicas, seed=3, **options):
    keras.utils.set_random_seed(seed)
    with mirrored(replicas).scope():
        model = mlp()
        model.compile("adam", crossentropy(), metrics=["accuracy"], **options)
    return model


def plain_model(**options):
    keras.utils.set_random_seed(3)
    model = mlp()
    model.compile("adam", crossentropy(), metrics=["accuracy"], **options)
    return model


def assert_same(ours, theirs):
    for a, b in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, **CLOSE)


@pytest.mark.numbers
@pytest.mark.parametrize("stays", ["0", "1"])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_numbers_are_those_of_one_device(replicas, stays, compiled_at_once, dispatches, monkeypatch):
    """Also where the data stay on the devices.

    40 steps of 24 rows and one of 13: 4 alone, three groups that are measured, then as many as fit.
    """
    monkeypatch.setenv("UNISONO_RESIDENT_DATA", stays)
    x, y = (values[: 40 * 24 + 13] for values in digits())
    ours, theirs = model_of(replicas), plain_model()
    for model in (ours, theirs):
        keras.utils.set_random_seed(4)
        model.history = model.fit(x, y, batch_size=24, epochs=3, verbose=0)
    assert_same(ours, theirs)
    for name, values in theirs.history.history.items():
        np.testing.assert_allclose(ours.history.history[name], values, rtol=1e-5)
    assert len(dispatches) < 40
    # One step, several, and the rows that are left over.
    assert ours.train_function.num_programs == 3 if replicas > 1 else 2
    np.testing.assert_allclose(ours.evaluate(x, y, 24, 0), theirs.evaluate(x, y, 24, 0), rtol=1e-5)
    np.testing.assert_allclose(ours.predict(x, 24, 0), theirs.predict(x, 24, 0), rtol=1e-4, atol=1e-5)


def test_an_epoch_is_few_dispatches(compiled_at_once, dispatches, monkeypatch):
    """60 steps, of which the last may be ragged: groups of 29 or 30, and what is left over alone."""
    x, y = (values[: 60 * 16] for values in digits())
    model = model_of(2)
    model.fit(x, y, batch_size=16, epochs=3, verbose=0)
    (trial,) = model.train_function.loop.constant._trials.values()
    dispatches.clear()
    model.fit(x, y, batch_size=16, verbose=0)
    assert len(dispatches) == 60 // trial.length + 60 % trial.length <= 4
    assert model.train_function.num_programs == 2


def generator_of(x, y):
    for i in range(3 * 90):
        rows = slice(16 * (i % 90), 16 * (i % 90) + 16)
        yield x[rows], y[rows]


def loader_of(x, y):
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    return torch.utils.data.DataLoader(data, batch_size=16)


PIPELINES = {
    "pipeline": lambda x, y: Dataset.from_tensor_slices((x, y)).map(lambda x, y: (2 * x, y)).batch(16),
    "generator": generator_of,
    "loader of torch": loader_of,
}


@pytest.mark.parametrize("kind", PIPELINES)
def test_a_group_of_a_pipeline_is_one_transfer_for_each_input(kind, monkeypatch, dispatches):
    """From memory that stays: later groups are staged at the addresses of earlier ones."""
    transfers, sent = [], []
    original = jax.make_array_from_callback

    def counting(shape, sharding, read):
        def reading(index):
            part = read(index)
            transfers[-1][1].append(part.ctypes.data)
            sent.append(part.nbytes)
            return part

        if not shape:  # a number that Keras sets, as of a metric
            return original(shape, sharding, read)
        transfers.append((shape, []))
        return original(shape, sharding, reading)

    monkeypatch.setattr(jax, "make_array_from_callback", counting)
    x, y = (values[: 90 * 16] for values in digits())
    model = model_of(2, steps_per_execution=10)
    model.fit(PIPELINES[kind](x, y), epochs=3, steps_per_epoch=90, verbose=0, shuffle=False)
    # In an epoch 4 groups of 20, and 10 steps alone, each with two inputs.
    assert len(dispatches) == 3 * (4 + 10)
    assert len(transfers) == 2 * len(dispatches)
    # Each row once, and nothing else; JAX keeps integers of 32 bits.
    assert sum(sent) == 3 * (x.nbytes + y.astype("int32").nbytes)
    for shape in ((20, 16, 64), (20, 16)):
        groups = [addresses for found, addresses in transfers if found == shape]
        assert len(groups) == 3 * 4
        # A part for each replica, in turn in the memory of three groups.
        assert all(len(set(addresses)) == 2 for addresses in groups)
        assert len(set(map(tuple, groups))) == 3
        assert groups[3:] == groups[:-3]


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_the_next_group_is_staged_while_the_last_one_computes(monkeypatch):
    """From a generator: a group waits on the devices until the host has staged a batch of the next."""
    staged, held = threading.Semaphore(0), []
    append = BatchStager.append
    monkeypatch.setattr(BatchStager, "append", lambda self, batch: (append(self, batch), staged.release())[0])

    class Held(keras.layers.Layer):
        def call(self, x):
            is_first = jax.lax.stop_gradient(jax.numpy.max(x[:, 0]))
            zero = jax.pure_callback(wait, jax.ShapeDtypeStruct((), "float32"), is_first)
            return x + zero

    def wait(number):
        """On a device: the group's last batch is followed by the first of the next group."""
        if int(number) % 4 == 3 and int(number) < 11:
            held.append(reached(int(number) + 2))
        return np.float32(0)

    count, lock = [0], threading.Lock()

    def reached(wanted):
        """Wait until so many batches were staged."""
        with lock:
            while count[0] < wanted:
                if not staged.acquire(timeout=20):
                    return False
                count[0] += 1
        return True

    def batches():
        for i in range(12):
            yield np.full((4, 2), i, "float32"), np.zeros((4, 1), "float32")

    with mirrored(2).scope():
        model = keras.Sequential([keras.Input((2,)), unisono.per_replica(Held()), keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=4)
    monkeypatch.setattr(_constant_groups, "best_length", lambda *args: 4)
    model.fit(batches(), steps_per_epoch=12, verbose=0, shuffle=False)
    # Two groups on two devices; the last one is followed by nothing.
    assert held == [True] * 4


def test_the_loop_has_a_constant_length_and_reads_nothing_back():
    x, y = (values[:320] for values in digits())
    model = model_of(2, steps_per_execution=10)
    lowered = []
    original = CompiledStep.__call__

    def call(self, donated, kept, *others):
        if len(kept) == 2 and isinstance(kept, tuple) and not lowered:
            lowered.append(self.lower(donated, kept))
        return original(self, donated, kept, *others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CompiledStep, "__call__", call)
        model.fit(x, y, batch_size=32, verbose=0)
    text = lowered[0].compile().as_text()
    assert re.findall(r'known_trip_count[^0-9]*"?(\d+)', text) == ["10"]
    assert not re.search(r"outfeed|infeed|custom-call.*callback", text)


def test_a_training_that_ends_first_does_not_wait(monkeypatch, dispatches):
    gate, began = threading.Event(), threading.Event()

    compilations = []
    original = _constant_groups._in_thread

    def slow(compile_):
        compilations.append(original(lambda: (began.set(), gate.wait(60), compile_())[-1]))
        return compilations[-1]

    monkeypatch.setattr(_constant_groups, "_in_thread", slow)
    x, y = (values[:960] for values in digits())
    model = model_of(1)
    model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    assert began.is_set()
    assert not gate.is_set()
    assert len(dispatches) == 120
    gate.set()
    for compilation in compilations:
        compilation.result(60)
    # Those who train on get it.
    dispatches.clear()
    model.fit(x, y, batch_size=16, epochs=2, verbose=0)
    assert len(dispatches) < 40


@pytest.mark.numbers
@pytest.mark.parametrize("wanted", [3, 10])
def test_steps_per_execution_is_one_dispatch(wanted, dispatches):
    x, y = (values[: 30 * 32 + 5] for values in digits())
    ours, theirs = model_of(2, steps_per_execution=wanted), plain_model(steps_per_execution=wanted)
    for model in (ours, theirs):
        model.fit(x, y, batch_size=32, epochs=2, verbose=0, shuffle=False)
    assert_same(ours, theirs)
    length = 30
    # 30 steps and one of 5 rows, in each epoch.
    assert len(dispatches) == 2 * (30 // length + 1)
    np.testing.assert_allclose(ours.evaluate(x, y, 32, 0), theirs.evaluate(x, y, 32, 0), rtol=1e-5)
    np.testing.assert_allclose(ours.predict(x, 32, 0), theirs.predict(x, 32, 0), rtol=1e-4, atol=1e-5)


class Looks(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.batches = []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append((batch, logs["loss"]))


def test_callbacks_see_every_so_many_steps(dispatches):
    x, y = (values[: 22 * 32] for values in digits())
    seen = []
    for model in (model_of(1, steps_per_execution=10), plain_model(steps_per_execution=10)):
        looks = Looks()
        model.fit(x, y, batch_size=32, verbose=0, shuffle=False, callbacks=[looks])
        seen.append(looks.batches)
    assert [batch for batch, _ in seen[0]] == [batch for batch, _ in seen[1]]
    np.testing.assert_allclose(*([loss for _, loss in one] for one in seen), rtol=1e-5)
    # A group of twenty, and two steps.
    assert len(dispatches) == 3


@pytest.mark.parametrize("wanted", [2, pytest.param(9, marks=pytest.mark.exhaustive)])
def test_a_callback_of_so_many_steps_costs_no_further_programs(wanted, dispatches):
    """Also of a model that was trained without the callback before."""
    x, y = (values[: 55 * 16] for values in digits())
    model, counts = model_of(1, steps_per_execution=wanted), []
    for callbacks in ([], [Looks()]):
        dispatches.clear()
        model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=callbacks)
        counts.append(len(dispatches))
    # Of a group of 27 or 28 steps and what is left over, or of few groups of 9.
    assert counts[1] == counts[0] <= 2 * (2 + 55 % wanted + 1)


@pytest.mark.numbers
@pytest.mark.parametrize("replicas", [1, 3])
def test_steps_run_ahead_of_callbacks_that_see_batches(replicas, compiled_at_once, dispatches):
    """Epochs of 40 steps and one of 13 rows: once a group is tried, steps are handed out one by one."""
    x, y = (values[: 40 * 24 + 13] for values in digits())
    seen = []
    for model in (model_of(replicas), plain_model()):
        looks = Looks()
        model.fit(x, y, batch_size=24, epochs=3, verbose=0, shuffle=False, callbacks=[looks])
        seen.append(looks.batches)
    assert [batch for batch, _ in seen[0]] == [batch for batch, _ in seen[1]]
    np.testing.assert_allclose(*([loss for _, loss in one] for one in seen), rtol=1e-5)
    assert len(dispatches) < 60


def test_backups_that_are_more_frequent_than_groups(compiled_at_once, dispatches, tmp_path):
    """A group is then as long as the steps between two of them."""
    x, y = (values[: 90 * 16] for values in digits())
    model = model_of(1)
    model.fit(x, y, 16, 2, 0, callbacks=[unisono.callbacks.BackupAndRestore(tmp_path, save_freq=15)])
    (trial,) = model.train_function.loop.constant._trials.values()
    assert trial.length == 15
    # Until a group is tried some steps run by themselves.
    assert len(dispatches) <= 15 + 2 * 90 // 15


class Reads(keras.callbacks.Callback):
    """Reads the weights at some batches, and changes them at another."""

    def __init__(self, batches, changed=None):
        super().__init__()
        self.at, self.changed, self.read = batches, changed, []

    def on_train_batch_end(self, batch, logs=None):
        if batch in self.at:
            self.read.append(self.model.get_weights())
        if batch == self.changed:
            self.model.set_weights([0.5 * value for value in self.model.get_weights()])


@pytest.mark.numbers
@pytest.mark.parametrize("changed", [None, 50])
def test_a_callback_reads_the_weights_within_a_group(changed, compiled_at_once):
    """The group runs again up to that step; what follows a change is computed anew."""
    x, y = (values[: 70 * 24] for values in digits())
    read, ours = [], model_of(2)
    for model in (ours, plain_model()):
        reads = Reads([3, 30, 41], changed)
        model.fit(x, y, batch_size=24, verbose=0, shuffle=False, callbacks=[reads])
        read.append([*reads.read, model.get_weights()])
    for a, b in zip(*read, strict=True):
        for value, expected in zip(a, b, strict=True):
            np.testing.assert_allclose(value, expected, **CLOSE)
    slots = {key.slots for key in ours.train_function._programs if key.keeps_state}
    assert max(slots) > 1


@pytest.mark.numbers
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_data_of_unknown_length_that_write_into_their_last_batch(compiled_at_once, dispatches):
    """What was taken for a group that does not get full runs one by one, with the rows it was given."""
    x, y = digits()

    def batches():
        rows, labels = np.empty((16, 64), "float32"), np.empty(16, "int64")
        for i in range(75):
            rows[:], labels[:] = x[16 * i : 16 * i + 16], y[16 * i : 16 * i + 16]
            yield rows, labels

    def copies():
        for rows, labels in batches():
            yield rows.copy(), labels.copy()

    ours, theirs = model_of(2), plain_model()
    ours.fit(batches(), verbose=0, shuffle=False)
    theirs.fit(copies(), verbose=0, shuffle=False)
    assert_same(ours, theirs)
    assert len(dispatches) < 75


def test_batches_that_are_too_few_for_a_group_are_staged_once(monkeypatch):
    """No buffer is written again while a program reads it, however often a group is begun."""
    staged, turned = [], []
    append, begin = BatchStager.append, BatchStager.begin

    def counted_begin(self):
        turned.append(id(self._buffers))
        begin(self)
        turned[-1] = turned[-1] != id(self._buffers)

    monkeypatch.setattr(BatchStager, "append", lambda self, batch: (staged.append(1), append(self, batch))[1])
    monkeypatch.setattr(BatchStager, "begin", counted_begin)
    monkeypatch.setenv(_constant_groups.SWITCH, "always")
    x, y = (values[: 90 * 16] for values in digits())
    model = model_of(1)
    model.evaluate(x, y, 16, 0)
    staged.clear(), turned.clear()
    for _ in range(2):
        model.evaluate(x, y, 16, 0)
    # Two groups of 32, and 26 batches that are tried as a third one; its buffers serve the next group.
    assert len(staged) == 2 * 90
    assert turned == [False, True, True, False, True, True]


def test_a_training_that_is_stopped_takes_no_further_group(compiled_at_once, dispatches):
    class Stops(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 1

    x, y = (values[:960] for values in digits())
    history = model_of(1).fit(x, y, batch_size=16, epochs=9, verbose=0, callbacks=[Stops()])
    assert history.epoch == [0, 1]


def test_switched_off_and_on(monkeypatch, dispatches):
    x, y = (values[:960] for values in digits())
    for chosen, fewest, most in (("never", 60, 60), ("always", 2, 4)):
        monkeypatch.setenv(_constant_groups.SWITCH, chosen)
        dispatches.clear()
        model_of(1).fit(x, y, batch_size=16, verbose=0)
        assert fewest <= len(dispatches) <= most
