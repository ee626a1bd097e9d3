"""What a step costs: programs, collectives, reads by the host; and what callbacks see."""

import contextlib
import io
import itertools
import re
import sys
from pathlib import Path

import jax
import keras
import numpy as np
import pytest

import unisono
from tests.batch_path import path_of_last_batch
from tests.support import count_compiles, count_host_reads
from tests.virtual.training._digits import crossentropy, digits, mirrored, mlp
from unisono.step._dispatch import CompiledStep
from unisono.training.groups import _constant_groups, _step_loop
from unisono.training.groups._batch_policy import Mode

L = keras.layers


def compiled(replicas=2, **changes):
    with mirrored(replicas).scope():
        model = mlp()
        model.compile(**{"optimizer": "adam", "loss": crossentropy(), "metrics": ["accuracy"], **changes})
    return model


def test_one_program_and_one_more_for_a_ragged_last_batch():
    model = compiled()
    x, y = digits()
    model.fit(x[:128], y[:128], batch_size=32, verbose=0)
    assert model.train_function.num_programs == 1
    with count_compiles() as programs:
        model.fit(x[:128], y[:128], batch_size=32, epochs=3, verbose=0)
    assert not programs
    model.fit(x[:129], y[:129], batch_size=32, epochs=3, verbose=0)
    assert model.train_function.num_programs == 2


def test_each_call_of_fit_has_its_own_usual_batch_size():
    model = compiled()
    x, y = digits()
    model.fit(x[:128], y[:128], batch_size=32, verbose=0)
    model.fit(x[:93], y[:93], batch_size=31, verbose=0)
    # And not `Mode.WHOLE`, as the ragged last batch of the first call would be.
    assert [key.mode for key in model.train_function._programs] == [Mode.SPLIT, Mode.PADDED]


def test_a_fit_within_fit_leaves_the_usual_batch_size_of_the_outer_one():
    model = compiled()
    x, y = digits()
    inner = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: epoch == 1 and model.fit(x[:66], y[:66], batch_size=33, verbose=0)
    )
    model.fit(x[:93], y[:93], batch_size=31, epochs=2, verbose=0, callbacks=[inner])
    assert {key.mode for key in model.train_function._programs} == {Mode.PADDED}


class HostReads(keras.callbacks.Callback):
    """What makes the host wait for a device array from the first batch to the end of the epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        self.counting = count_host_reads()
        self.reads = self.counting.__enter__()

    def on_epoch_end(self, epoch, logs=None):
        self.counting.__exit__(None, None, None)


def test_the_host_reads_nothing_within_an_epoch():
    """Only the two results, loss and accuracy, when the epoch is over: however many steps it has."""
    model = compiled()
    x, y = digits()
    model.fit(x[:128], y[:128], batch_size=16, verbose=0)
    for steps in (4, 8):
        counter = HostReads()
        rows = 16 * steps
        model.fit(x[:rows], y[:rows], batch_size=16, verbose=0, callbacks=[counter])
        # Waiting for a program that has two more behind it holds no device up.
        assert [name for name in counter.reads if name != "block_until_ready"] == ["array", "array"]


def collectives(model, x, y):
    strategy = unisono.training._binding.strategy_of(model)
    task = unisono.training.trainer._trainer_step.TrainerTask.TRAIN
    state = jax.device_put(
        tuple(
            [v.value for v in part]
            for part in unisono.training.trainer._trainer_step.variables_of(model, task)
        ),
        strategy.mesh.replicated,
    )
    (program,) = model.train_function._programs.values()
    (stager,) = model.train_function.loop._stagers._stagers.values()
    stager.begin()
    stager.append((x, y, None))
    text = program.lower(state, stager.place()).compile().as_text()
    return {
        k: len(re.findall(rf" {k}(?:-start)?\(", text))
        for k in ("all-reduce", "all-gather", "collective-permute", "reduce-scatter", "all-to-all")
    }


def test_a_step_has_one_all_reduce():
    """Gradients and metrics travel together."""
    model = compiled()
    x, y = digits()
    model.fit(x[:32], y[:32], batch_size=32, verbose=0)
    found = collectives(model, x[:32], y[:32])
    assert {k: v for k, v in found.items() if v} == {"all-reduce": 1}


def test_several_steps_are_one_program_and_one_call_of_the_callbacks():
    model = compiled(steps_per_execution=4)
    x, y = digits()
    seen = []
    count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    model.fit(x[:160], y[:160], batch_size=16, verbose=0, callbacks=[count])
    assert seen == [3, 7, 11]
    assert model.train_function.num_programs == 1  # the last two batches, too


def test_batch_normalization_averages_moving_statistics():
    with mirrored(2).scope():
        model = keras.Sequential([keras.Input((1,)), L.BatchNormalization(momentum=0.0)])
        model.compile("sgd", "mse")
    x = np.array([[1.0], [3.0], [10.0], [14.0]], "f4")
    model.fit(x, x, batch_size=4, shuffle=False, verbose=0)
    moving = {v.name: v.numpy().item() for v in model.layers[0].non_trainable_variables}
    assert moving["moving_mean"] == 7.0
    assert moving["moving_variance"] == 2.5  # the mean of 1 and 4, the variances of the replicas


def test_dropout_differs_between_replicas_and_is_reproducible():
    def masks():
        keras.utils.set_random_seed(3)
        strategy = mirrored(2)
        with strategy.scope():
            layer = L.Dropout(0.5)
        ones = np.ones((2, 64), "f4")
        (batch,) = strategy.distribute_dataset([ones])
        outputs = [strategy.run(lambda x: layer(x, training=True), args=(batch,)) for _ in range(2)]
        return [np.asarray(v) for out in outputs for v in strategy.local_results(out)]

    first = masks()
    for i in range(4):
        for j in range(i):
            assert (first[i] != first[j]).any()
    for a, b in zip(first, masks(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_callbacks_work_unchanged(tmp_path):
    model = compiled()
    x, y = digits()
    weights = []

    class Reads(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.jax_state_sync()
            weights.append(self.model.get_weights()[0].copy())

    callbacks = [
        keras.callbacks.ModelCheckpoint(tmp_path / "best_{epoch}.weights.h5", save_weights_only=True),
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1)),
        keras.callbacks.EarlyStopping("loss", patience=1, min_delta=1e9, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("loss", patience=5),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        Reads(),
    ]
    history = model.fit(x[:64], y[:64], batch_size=32, epochs=9, verbose=0, callbacks=callbacks)
    assert len(history.epoch) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "best_1.weights.h5",
        "best_2.weights.h5",
        "log.csv",
    ]
    assert all((a != b).any() for a, b in itertools.pairwise(weights))
    model.load_weights(tmp_path / "best_1.weights.h5")
    np.testing.assert_array_equal(model.get_weights()[0], weights[1])
    np.testing.assert_allclose(history.history["learning_rate"], [0.1, 0.05])


def printed(fit, capsys):
    fit()
    text = capsys.readouterr().out
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    return re.sub(r"\d+(ms|s|us)(/step|/epoch)?", "T", text).replace("\b", "")


@pytest.mark.parametrize(
    ("verbose", "line"),
    [(2, "2/2 - T - T - accuracy: 0."), (1, "2/2 ━━━━━━━━━━━━━━━━━━━━ T T - accuracy: 0.")],
)
def test_the_progress_bar_is_keras_own(capsys, verbose, line):
    """With times replaced. How often the live bar is drawn depends on time: the last lines count."""
    x, y = digits()
    keras.utils.set_random_seed(1)
    model = compiled()
    keras.utils.set_random_seed(1)
    plain = mlp()
    plain.compile("adam", crossentropy(), metrics=["accuracy"])
    plain.set_weights(model.get_weights())
    options = {"batch_size": 32, "shuffle": False, "verbose": verbose, "epochs": 2}
    texts = [printed(lambda m=m: m.fit(x[:64], y[:64], **options), capsys) for m in (model, plain)]
    ends = [[n.split("\r")[-1].rstrip() for n in text.splitlines()] for text in texts]
    # The end of an epoch is drawn once more where the last batch took long: one line of equal ones counts.
    ends = [[n for n in lines if n.startswith(("Epoch", "2/2"))] for lines in ends]
    ends = [[n for n, _ in itertools.groupby(lines)] for lines in ends]
    assert ends[0] == ends[1]
    assert len(ends[0]) == 4
    assert ends[0][1].startswith(line)


def test_saved_models_load_with_and_without_a_scope(tmp_path):
    model = compiled()
    x, y = digits()
    model.fit(x[:64], y[:64], verbose=0)
    expected = model.evaluate(x[:64], y[:64], verbose=0)
    model.save(tmp_path / "m.keras")
    alone = keras.models.load_model(tmp_path / "m.keras")
    np.testing.assert_allclose(alone.evaluate(x[:64], y[:64], verbose=0), expected, rtol=1e-5)
    with mirrored(3).scope():
        again = keras.models.load_model(tmp_path / "m.keras")
    np.testing.assert_allclose(again.evaluate(x[:64], y[:64], verbose=0), expected, rtol=1e-5)
    again.fit(x[:64], y[:64], verbose=0)


def test_a_summary_prints():
    stream = io.StringIO()
    compiled().summary(print_fn=lambda line: stream.write(line))
    assert "Total params" in stream.getvalue()


class CountingLayer(L.Layer):
    """Counts how often it is traced."""

    traces = 0

    def call(self, x):
        self.traces += 1
        return x


def fit_counting(monkeypatch, *layers, scope=None, **changes):
    """Return programs started, and traces of a layer, for eight steps; on two replicas without a scope."""
    keras.utils.set_random_seed(3)
    started, layer = [], CountingLayer()
    original = CompiledStep.__call__

    def counting(self, donated, kept, done=None, is_result=False):
        started.append(self)
        return original(self, donated, kept, done, is_result)

    monkeypatch.setattr(CompiledStep, "__call__", counting)
    with scope or mirrored(2).scope():
        model = keras.Sequential([keras.Input((8, 8, 1)), *layers, layer, L.Flatten(), L.Dense(10)])
        model.compile("sgd", crossentropy(), **changes)
    layer.traces = 0
    x, y = digits()
    history = model.fit(x[:128].reshape(-1, 8, 8, 1), y[:128], batch_size=16, shuffle=False, verbose=0)
    return len(started), layer.traces, history.history["loss"]


@pytest.mark.parametrize("steps", [1, 4])
def test_steps_with_grouped_convolutions_run_one_by_one(monkeypatch, steps):
    """XLA's CPU backend compiles their derivative to slow code in the body of a loop."""
    layers = L.Conv2D(2, 1), L.DepthwiseConv2D(3)
    started, traces, losses = fit_counting(monkeypatch, *layers, steps_per_execution=steps)
    assert started == 8
    # One by Keras, two that read the step, and one for both programs: the one with a loop, which is given up,
    # and that of one step.
    assert traces == 4
    if steps == 4:
        layers = L.Conv2D(2, 1), L.DepthwiseConv2D(3)
        assert losses == pytest.approx(fit_counting(monkeypatch, *layers)[2], rel=1e-6)


@pytest.mark.parametrize("steps", [1, 4])
def test_other_steps_share_programs_and_are_traced_once(monkeypatch, steps):
    started, traces, _ = fit_counting(monkeypatch, L.Conv2D(2, 3), steps_per_execution=steps)
    assert started < 8
    # One by Keras, which builds the model's metrics from symbols, two that read how the step treats rows, and
    # one by the program.
    assert traces == 4


def test_a_step_of_one_replica_is_not_read(monkeypatch):
    _, traces, losses = fit_counting(monkeypatch, scope=mirrored(1).scope())
    _, plain_traces, plain_losses = fit_counting(monkeypatch, scope=contextlib.nullcontext())
    assert traces == plain_traces
    assert losses == pytest.approx(plain_losses, rel=1e-6)


def test_a_large_state_gets_a_loop_when_there_are_steps_enough(monkeypatch):
    """Counted over calls: the first two have 8 steps each, and 20 make up for the compilation of a loop."""
    monkeypatch.setattr(_step_loop, "_MANY_ARRAYS", 8)
    monkeypatch.setattr(_step_loop, "_PAYING_STEPS", 20)
    x, y = digits()
    model = compiled()
    slots = lambda: sorted(key.slots for key in model.train_function._programs)  # noqa: E731
    for _ in range(2):
        model.fit(x[:128], y[:128], batch_size=32, epochs=2, verbose=0)
        assert slots() == [1]
    model.fit(x[:128], y[:128], batch_size=32, verbose=0)
    assert slots() == [1, 32]
    # It is there now, so that few steps use it, too.
    model.fit(x[:96], y[:96], batch_size=32, verbose=0)
    assert slots() == [1, 32]


def test_few_variables_get_a_loop_at_once():
    x, y = digits()
    model = compiled()
    model.fit(x[:64], y[:64], batch_size=32, verbose=0)
    assert [key.slots for key in model.train_function._programs] == [32]


@pytest.mark.parametrize(("kind", "most"), [("ahead", 8), ("alone", 8), ("together", 9)])
def test_a_batch_passes_few_files_twice(kind, most):
    """Where one who follows a batch through the library must go back to a file; see `tests/batch_path.py`."""
    x, y = digits()
    arguments = {"x": x[:104], "y": y[:104], "batch_size": 8}
    if kind == "ahead":
        # Such steps begin with groups of one.
        arguments = {"x": x[:128], "y": y[:128], "batch_size": 32}
    if kind == "alone":
        sees = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
        batches = ((x[i : i + 8], y[i : i + 8]) for i in range(0, 40, 8))
        arguments = {"x": batches, "steps_per_epoch": 5, "callbacks": [sees], "shuffle": False}
    # Of 13 steps that run three at a time one is left: such a call also asks for what follows it.
    path = path_of_last_batch(compiled(steps_per_execution=3 if kind == "together" else 1), **arguments)
    assert path.num_returns <= most
    assert path.num_visits("training/trainer/_trainer_function.py") <= 4


def library_calls_per_step(model, steps):
    """Return how many functions of the library Python calls for each step of an epoch."""
    x, y = digits()
    source, calls = str(Path(unisono.__file__).parent), [0]

    def note(frame, event, arg):
        calls[0] += event == "call" and frame.f_code.co_filename.startswith(source)

    def count(steps):
        calls[0] = 0
        sys.setprofile(note)
        try:
            model.fit(x[: 4 * steps], y[: 4 * steps], batch_size=4, verbose=0)
        finally:
            sys.setprofile(None)
        return calls[0]

    # Compiled first, and past the calls that JAX starts from Python code.
    model.fit(x[:64], y[:64], batch_size=4, verbose=0)
    return (count(2 * steps) - count(steps)) / steps


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_step_that_is_its_own_program_costs_few_calls_of_python(monkeypatch, replicas):
    """As on GPUs, where groups do not pay: 117 of one replica and 126 of two when each batch was examined."""
    monkeypatch.setattr(_step_loop, "may_loop", lambda *_: False)
    monkeypatch.setattr(_constant_groups, "first_phase", lambda: _constant_groups.TrialPhase.ALONE)
    assert library_calls_per_step(compiled(replicas), 16) <= (56 if replicas == 1 else 63)
