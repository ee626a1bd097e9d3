"""The host works while the devices do: batches are read and placed ahead of the step that needs them.

Nothing here looks at a watch. A step is held inside the devices until the host has come to the
next batch; a host that waited for the step first would find it held, and the test would say so.
"""

import contextlib
import threading

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import unisono
from tests.virtual.training._digits import mirrored
from unisono.data import Dataset
from unisono.step._run_ahead import run_ahead_of
from unisono.training.groups import _multi_step
from unisono.training.groups._batch_placement import BatchPlacer, BatchStager

#: Seconds after which a held step gives up: only a test that fails waits for them.
GIVE_UP = 20

WIDTH = 2


class Gate:
    """Holds step i on the devices until the host has come past batch i+1."""

    def __init__(self, batches):
        self._passed = [threading.Event() for _ in range(batches + 1)]
        # The last step has no next batch to wait for.
        self._passed[batches - 1].set()
        self._count = 0
        self.held = []
        self._lock = threading.Lock()

    def host_came(self):
        """The host has read or placed one more batch."""
        self._count += 1
        self._passed[self._count - 1].set()

    def __call__(self, number):
        """On the devices: wait; return zero."""
        came = self._passed[int(number)].wait(GIVE_UP)
        with self._lock:
            self.held.append((int(number), came))
        return np.float32(0)


class Held(keras.layers.Layer):
    """Passes its input on, but not before the gate opens; the input's first column is the step."""

    def __init__(self, gate, **kwargs):
        super().__init__(**kwargs)
        self._gate = gate

    def call(self, x):
        number = jax.lax.stop_gradient(jnp.max(x[:, 0]))
        zero = jax.pure_callback(self._gate, jax.ShapeDtypeStruct((), jnp.float32), number)
        return x + zero


def batches(number, rows=8):
    for i in range(number):
        x = np.zeros((rows, WIDTH), "f4")
        x[:, 0] = i
        yield x, np.zeros((rows, 1), "f4")


def held_model(gate, replicas):
    with mirrored(replicas).scope():
        model = keras.Sequential(
            [
                keras.Input((WIDTH,)),
                unisono.per_replica(Held(gate)),
                keras.layers.Dense(WIDTH),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.SGD(1e-4), "mse")
    return model


@pytest.mark.parametrize("verbose", [0, 1])
def test_fit_reads_the_next_batch_while_a_step_runs(verbose):
    gate = Gate(6)

    def source():
        for batch in batches(6):
            yield batch
            gate.host_came()  # when the next one is asked for

    held_model(gate, 2).fit(source(), steps_per_epoch=6, shuffle=False, verbose=verbose)
    assert len(gate.held) == 12
    assert all(came for _, came in gate.held), gate.held


class Slow(keras.layers.Layer):
    """Passes its input on, after many matrix products."""

    def call(self, x):
        ones = jnp.ones((256, 256)) * (1 + 0 * jax.lax.stop_gradient(jnp.max(x)))
        product = jax.lax.fori_loop(0, 100, lambda _, m: jnp.tanh(m @ ones), ones)
        return x + 0 * product[0, 0]


def test_one_device_does_not_hold_the_host_either():
    """There XLA runs a program with a callback in the calling thread, so this asks instead of holding."""
    strategy = mirrored(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((WIDTH,)), Slow(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    tokens = run_ahead_of(strategy.mesh)._tokens
    running = []

    def source():
        for batch in batches(8):
            if tokens:
                running.append(not tokens[-1].is_ready())
            yield batch

    model.fit(source(), steps_per_epoch=8, shuffle=False, verbose=0)
    assert any(running)


@pytest.mark.parametrize(
    ("placer", "method", "steps"),
    [(BatchPlacer, "__call__", 1), (BatchStager, "append", 32)],
    ids=["one by one", "several in one program"],
)
def test_fit_places_the_next_batch_while_a_step_runs(monkeypatch, placer, method, steps):
    monkeypatch.setattr(_multi_step, "MOST_STEPS", steps)
    gate = Gate(6)
    place = getattr(placer, method)
    placed = []

    def counting(self, batch):
        result = place(self, batch)
        placed.append(batch)
        if len(placed) > 1:
            gate.host_came()
        return result

    monkeypatch.setattr(placer, method, counting)
    x, y = (np.concatenate(parts) for parts in zip(*batches(6), strict=True))
    held_model(gate, 2).fit(x, y, batch_size=8, shuffle=False, verbose=0)
    assert len(placed) == 6
    assert all(came for _, came in gate.held), gate.held


def test_a_custom_loop_has_its_next_batch_on_the_devices_while_a_step_runs():
    """The loop itself asks for the batch that a held step waits for: `run` came back before its end."""
    gate = Gate(5)
    strategy = mirrored(2)

    def step(batch):
        number = jnp.max(batch[0][:, 0])
        return jax.pure_callback(gate, jax.ShapeDtypeStruct((), jnp.float32), number)

    results = []
    for batch in strategy.distribute_dataset(list(batches(5))):
        if results:
            gate.host_came()
        results.append(strategy.run(step, args=(batch,)))
    jax.block_until_ready([strategy.local_results(r) for r in results])
    assert len(gate.held) == 10
    assert all(came for _, came in gate.held), gate.held


# --- the look-ahead of custom loops ----------------------------------------------------------


class Log:
    """A source that writes down what was asked of it."""

    def __init__(self, number, fails_at=None):
        self._number, self._fails_at = number, fails_at
        self.asked = self.ends = 0
        self.is_closed = False

    def __iter__(self):
        return self

    def __next__(self):
        at = self.asked
        self.asked += 1
        if at == self._fails_at:
            raise RuntimeError(f"batch {at}")
        if at >= self._number:
            self.ends += 1
            raise StopIteration
        return np.full(2, at, "f4")

    def close(self):
        self.is_closed = True


def distributed(source, options=None):
    return iter(mirrored(2).distribute_dataset(source, options))


def number(batch):
    return int(batch.values[0][0])


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (None, [2, 3, 4, 4]),
        (unisono.InputOptions(experimental_fetch_to_device=False), [1, 2, 3, 4]),
        (unisono.InputOptions(experimental_per_replica_buffer_size=2), [3, 4, 4, 4]),
    ],
)
def test_so_many_batches_are_placed_before_the_loop_asks(options, asked):
    source = Log(3)
    iterator = distributed(source, options)
    found = [(number(iterator.get_next()), source.asked) for _ in range(3)]
    assert found == list(enumerate(asked[:3]))
    assert next(iterator, None) is None
    assert source.asked == asked[3]


def test_nothing_is_read_after_the_end():
    source = Log(2)
    iterator = distributed(source)
    assert [number(b) for b in iterator] == [0, 1]
    for _ in range(3):
        assert next(iterator, None) is None
    assert source.ends == 1


def test_an_error_is_raised_where_its_batch_would_have_been():
    source = Log(4, fails_at=2)
    iterator = distributed(source)
    assert [number(next(iterator)) for _ in range(2)] == [0, 1]
    assert source.asked == 3  # nothing is read past an error that nobody has seen
    with pytest.raises(RuntimeError, match="batch 2"):
        next(iterator)
    assert number(next(iterator)) == 3  # such a source goes on, as it would without a look-ahead
    assert next(iterator, None) is None


def test_an_error_of_placing_is_raised_at_its_batch_too():
    bad = {"x": np.ones((4, 2)), "y": np.ones(3)}
    iterator = distributed([np.zeros(2, "f4"), bad])
    assert number(next(iterator)) == 0
    with pytest.raises(ValueError, match="others have 4 rows"):
        next(iterator)


def test_close_ends_the_pass_and_its_source():
    source = Log(5)
    iterator = distributed(source)
    next(iterator)
    iterator.close()
    assert source.is_closed
    assert next(iterator, None) is None
    assert source.asked == 2


def test_close_is_told_to_a_generator():
    ended = []

    def generator():
        with contextlib.closing(Log(3)) as log:
            try:
                yield from log
            finally:
                ended.append(True)

    iterator = distributed(generator())
    next(iterator)
    iterator.close()
    assert ended == [True]


@pytest.mark.parametrize("given", [0, 1, 3, 5])
@pytest.mark.parametrize("fetch", [True, False])
def test_the_state_is_that_of_the_last_batch_given(given, fetch):
    dataset = Dataset.range(20).shuffle(20, seed=1).map(lambda x: x + 1).batch(4)
    options = unisono.InputOptions(experimental_fetch_to_device=fetch)
    expected = [b.tolist() for b in dataset]

    def rows(batch):
        return np.concatenate([np.asarray(v) for v in batch.values]).tolist()

    dataset = Dataset.range(20).shuffle(20, seed=1).map(lambda x: x + 1).batch(4)
    iterator = distributed(dataset, options)
    for _ in range(given):
        next(iterator)
    state = iterator.get_state()
    assert [rows(b) for b in iterator] == expected[given:]
    iterator.set_state(state)
    assert [rows(b) for b in iterator] == expected[given:]
    iterator.close()


def test_a_source_without_a_state_says_so():
    iterator = distributed(Log(2))
    with pytest.raises(ValueError, match="Received: Log"):
        iterator.get_state()
    with pytest.raises(ValueError, match=r"Distribute a `unisono.data.Dataset`"):
        iterator.set_state({})


@pytest.mark.parametrize(("fetch", "asked"), [(True, [4, 6, 7]), (False, [2, 4, 6])])
def test_functions_of_the_input_context_are_ahead_too(fetch, asked):
    source = Log(6)
    options = unisono.InputOptions(experimental_fetch_to_device=fetch)
    iterator = iter(mirrored(2).distribute_datasets_from_function(lambda _: source, options))
    found = []
    for batch in iterator:
        found.append(([int(v[0]) for v in batch.values], source.asked))
    assert found == [([0, 1], asked[0]), ([2, 3], asked[1]), ([4, 5], asked[2])]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_function_may_write_into_its_last_batch(replicas):
    def reuse(_):
        buffers = [np.empty(128, "f4") for _ in range(replicas)]
        for i in range(4 * replicas):
            buffers[i % replicas][:] = i // replicas
            yield buffers[i % replicas]

    strategy = mirrored(replicas)
    found = [strategy.local_results(b) for b in strategy.distribute_datasets_from_function(reuse)]
    assert [[float(v[0]) for v in values] for values in found] == [[i] * replicas for i in range(4)]


@pytest.mark.parametrize("kind", [lambda batches: batches, lambda batches: map(tuple, batches)])
def test_a_generator_may_write_into_its_last_batch(kind):
    """Also of 8 MiB, which JAX reads in place, or later: while the steps before it run."""

    def batches():
        buffer = np.empty((4096, 512), "f4")
        for i in range(12):
            buffer[:] = i
            yield buffer, np.zeros((4096, 1), "f4")

    with mirrored(1).scope():
        model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(1, use_bias=False)])
        model.compile(keras.optimizers.SGD(0.0), "mae")
    model.set_weights([np.full((512, 1), 1 / 512, "f4")])
    losses = model.fit(kind(batches()), steps_per_epoch=12, shuffle=False, verbose=0).history["loss"]
    np.testing.assert_allclose(losses, np.mean(range(12)), rtol=1e-6)
