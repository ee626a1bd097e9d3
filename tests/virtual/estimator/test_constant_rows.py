"""Steps of an Estimator in groups of constant length, as on GPUs: the same numbers, in few programs.

Here virtual CPU devices stand for GPUs: the platform decides alone whether a loop has a constant length.
"""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import keras
import numpy as np
import pytest

import unisono
from unisono._lowering._compiler_options import Executables
from unisono.data import Dataset
from unisono.estimator import Estimator, EstimatorSpec, RunConfig
from unisono.estimator._train_op import minimize
from unisono.step._dispatch import CompiledStep
from unisono.step._run_ahead import RunAhead
from unisono.training.groups import _constant_groups
from unisono.training.groups._batch_placement import form_of
from unisono.training.groups._constant_groups import TrialPhase
from unisono.training.named_steps import _constant_rows, _replica_runner
from unisono.training.named_steps._constant_rows import ConstantRows
from unisono.training.named_steps._rows import ReplicaParts, Row, RowSource

X = np.random.default_rng(0).normal(size=(300 * 8, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


@pytest.fixture
def as_on_gpus(monkeypatch):
    """Loops of constant length alone, tried soon, and with an answer that does not depend on the clock."""
    monkeypatch.setattr(_replica_runner, "may_loop", lambda platform: False)
    monkeypatch.setattr(_constant_groups, "_IDLE", 0.0)
    monkeypatch.setattr(_constant_groups, "_WARM_UP", 2)
    monkeypatch.setattr(_constant_groups, "_MEASURED", 2)
    monkeypatch.setattr(_constant_groups, "pays", lambda alone, together: True)
    original = _constant_groups._in_thread

    def at_once(compile_):
        future = original(compile_)
        future.exception()
        return future

    # Compiled before the next step, so that it is known when the first group runs.
    monkeypatch.setattr(_constant_groups, "_in_thread", at_once)


@pytest.fixture
def started(monkeypatch):
    """The programs that were started."""
    found, call = [], CompiledStep.__call__
    monkeypatch.setattr(CompiledStep, "__call__", lambda *args: found.append(args[0]) or call(*args))
    return found


def model_fn(features, labels, mode):
    loss = keras.ops.mean((keras.layers.Dense(1)(features) - labels) ** 2)
    mean = keras.metrics.MeanSquaredError(name="error")
    mean.update_state(labels, keras.ops.zeros_like(labels))
    train_op = minimize(keras.optimizers.SGD(0.01), loss)
    return EstimatorSpec(mode, loss=loss, train_op=train_op, eval_metric_ops={"error": mean})


def estimator(devices, folder, saves=False):
    strategy = unisono.MirroredStrategy([f"cpu:{i}" for i in range(devices)])
    config = RunConfig(
        train_distribute=strategy, eval_distribute=strategy, tf_random_seed=1,
        save_checkpoints_steps=10_000 if saves else None, save_summary_steps=0, log_step_count_steps=None,
    )  # fmt: skip
    return Estimator(model_fn, folder, config)


def data(steps, batch=4, rest=0):
    rows = steps * batch + rest
    return lambda: Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(batch)


@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_numbers_and_programs(as_on_gpus, started, devices, tmp_path):
    """The bits of the loops whose length is data; the last batch has fewer rows."""
    found = []
    for on_gpus in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("UNISONO_STEPS_TOGETHER", "always")
            if not on_gpus:
                patch.setattr(_replica_runner, "may_loop", lambda platform: None)
            started.clear()
            one = estimator(devices, tmp_path / str(on_gpus), saves=True)
            one.train(data(210 * devices, rest=3))
            # One step, by which the length is known; then of each 100 four groups of 25.
            if on_gpus:
                assert len(started) == 1 + 3 + 24 + 4 + 10 + 1
            assert len({id(program) for program in started}) <= 3
            found.append([one.get_variable_value(name) for name in sorted(one.get_variable_names())])
            found[-1].append(sorted(one.evaluate(data(50 * devices)).items()))
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


def first_other(started):
    """Return the number of the first step that does not run by itself."""
    return [program is started[0] for program in started].index(False)


def test_the_faster_form_is_kept_for_the_next_loop(as_on_gpus, started, tmp_path):
    one = estimator(1, tmp_path, saves=True)
    one.train(data(200), steps=200)
    # Five steps alone, three groups of 25 that are measured, 20 steps up to a hundred, and four groups.
    assert (first_other(started), len(started)) == (5, 5 + 3 + 20 + 4)
    for call, steps in ((one.train, {"steps": 200}), (one.evaluate, {}), (one.evaluate, {})):
        started.clear()
        call(data(200), **steps)
    # After one step, by which the kind is known.
    assert first_other(started) == 1


def test_hooks_that_look_at_each_step_see_each(as_on_gpus, started, tmp_path):
    class Looks(unisono.estimator.SessionRunHook):
        def __init__(self):
            self.losses = []

        def before_run(self, run_context):
            return unisono.estimator.SessionRunArgs("loss")

        def after_run(self, run_context, run_values):
            self.losses.append(float(run_values.results))

    looks = Looks()
    estimator(1, tmp_path).train(data(40), hooks=[looks])
    assert len(looks.losses) == len(started) == 40


def test_switched_off(as_on_gpus, started, tmp_path, monkeypatch):
    monkeypatch.setenv("UNISONO_STEPS_TOGETHER", "never")
    estimator(1, tmp_path).train(data(60))
    assert len(started) == 60


class Exchange:
    """Lets threads gather, as processes do."""

    def __init__(self, size):
        self.size, self._barrier, self._data = size, threading.Barrier(size), [b""] * size

    def gather_as(self, index):
        def gather(data):
            self._data[index] = data
            self._barrier.wait(20)
            every = list(self._data)
            self._barrier.wait(20)
            return every

        return SimpleNamespace(size=self.size, gather=gather, together=1)


class Worker:
    """Takes rows as a runner does, and notes how many each program had."""

    def __init__(self, processes, count, rooms):
        rows = (Row((ReplicaParts([np.full(2, i, "f4")]),), False) for i in range(count))
        self.source, self.rooms = RowSource(rows, processes), rooms
        self.constant = ConstantRows(processes, RunAhead())
        self.programs, self.values = [], []

    def run(self):
        for room in itertools.cycle(self.rooms):
            if not self._run_call(room):
                return

    def _run_call(self, left):
        self.constant.begin_call(left)
        while left:
            wanted = partial(self.constant.wanted, room=left)
            rows, _ = self.source.take(wanted, frozenset())
            if not rows:
                return False
            rows = self.constant.complete(rows, self.source)
            if len(rows) == 1 and not rows[0].is_whole:
                prepare = lambda length: (lambda: length, lambda program: None)  # noqa: E731
                self.constant.note_alone(rows[0], 32, "kind", prepare)
            self.programs.append(len(rows))
            self.values += [int(np.max(row.batch[0][0])) for row in rows]
            self.constant.note_started()
            left -= len(rows)
        return True


@pytest.mark.parametrize("choice", ["", "always"])
def test_processes_decide_alike(as_on_gpus, monkeypatch, choice):
    """Also with hooks that leave them room for different numbers of steps, and data that end earlier."""
    monkeypatch.setenv("UNISONO_STEPS_TOGETHER", choice)
    monkeypatch.setattr(_constant_groups, "_ASK_EVERY", 1)
    exchange = Exchange(2)
    workers = [
        Worker(exchange.gather_as(0), 200, [1, 20, 13]),
        Worker(exchange.gather_as(1), 187, [50]),
    ]
    with ThreadPoolExecutor(2) as threads:
        for run in [threads.submit(worker.run) for worker in workers]:
            run.result(60)
    first, second = workers
    assert first.programs == second.programs
    # What is left of the longer data is computed by all.
    assert first.values == [*range(200)]
    assert second.values == [*range(187), *range(187, 200)]
    assert set(first.programs) == {1, 20}


def test_what_other_processes_do_not_know_is_not_used(as_on_gpus):
    """A worker that was started anew has no choices."""
    exchange = Exchange(2)

    def phase(index, choices):
        constant = ConstantRows(exchange.gather_as(index), RunAhead(), executables := Executables())
        _constant_rows._CHOICES[executables].update(choices)
        row = Row(ReplicaParts([np.zeros(2, "f4")]), False)
        constant.note_alone(row, 32, "kind", lambda length: None)
        (trial,) = constant._trials.values()
        return trial.phase

    row = Row(ReplicaParts([np.zeros(2, "f4")]), False)
    known = {(form_of(row.batch), "kind"): ("TOGETHER", 8)}
    alone = ConstantRows(Exchange(1).gather_as(0), RunAhead(), executables := Executables())
    _constant_rows._CHOICES[executables].update(known)
    for longest, expected in ((15, TrialPhase.TOGETHER), (16, TrialPhase.WARM_UP)):
        # Groups of an earlier loop may have been short because of its hooks.
        alone.begin_call(longest)
        assert alone._trial((form_of(row.batch), "kind"), 32).phase is expected
    for others, expected in ((known, TrialPhase.TOGETHER), ({}, TrialPhase.WARM_UP)):
        with ThreadPoolExecutor(2) as threads:
            runs = [threads.submit(phase, i, dict(c)) for i, c in enumerate((known, others))]
            assert [run.result(60) for run in runs] == [expected] * 2
