"""When steps run together in a loop of constant length."""

import json
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

import unisono
from unisono.training.groups import _constant_groups
from unisono.training.groups._constant_groups import GroupTrial, TrialPhase, best_length, first_phase


class Thread:
    """Compiles when it is told to."""

    def __init__(self):
        self.waiting = []

    def submit(self, compile_):
        future = Future()
        self.waiting.append((compile_, future))
        return future

    def run(self):
        compile_, future = self.waiting.pop()
        try:
            future.set_result(compile_())
        except Exception as error:
            future.set_exception(error)


@pytest.fixture
def thread(monkeypatch):
    thread = Thread()
    monkeypatch.setattr(_constant_groups, "_in_thread", thread.submit)
    return thread


class Steps:
    """Takes steps of 1 ms, one by one, as a train function does."""

    def __init__(self, trial, compile_=lambda: "program"):
        self.trial, self.compile, self.now, self.epoch = trial, compile_, 0.0, object()
        self.used, self.prepared = [], []

    def prepare(self, length):
        self.prepared.append(length)
        return self.compile, self.used.append

    def take(self, steps, is_idle=True, seconds=0.001):
        for _ in range(steps):
            self.now += seconds
            self.trial.note_step(self.epoch, is_idle, self.now)
            self.trial.advance(self.prepare)
        return self.trial.phase


ALONE = SimpleNamespace(size=1)


def test_a_group_has_the_length_by_which_an_epoch_is_the_fewest_programs():
    def programs(steps, length):
        return max(n // length + n % length for n in (steps, steps - 1))

    for steps in range(2, 300):
        fewest = min(programs(steps, length) for length in range(1, 33))
        assert programs(steps, best_length(32, steps)) == fewest
    assert best_length(8, 5, multiple=10) == 10
    assert best_length(32, 5) == 4
    assert best_length(32, 1) == 1


@pytest.mark.parametrize(("together", "phase"), [(0.0002, TrialPhase.TOGETHER), (0.002, TrialPhase.ALONE)])
def test_the_faster_form_is_kept(thread, together, phase):
    steps = Steps(GroupTrial(ALONE, 10))
    assert steps.take(32) is TrialPhase.MEASURE
    assert steps.take(32) is TrialPhase.COMPILE
    assert steps.prepared == [10]
    # However long that takes, nothing waits.
    assert steps.take(1000) is TrialPhase.COMPILE
    assert not steps.used
    thread.run()
    assert steps.take(1) is TrialPhase.TRY
    assert steps.used == ["program"]
    # The first one loads the program.
    for seconds in (5.0, 10 * together, 10 * together + 0.001):
        assert steps.trial.phase is TrialPhase.TRY
        steps.trial.note_group(seconds)
    assert steps.trial.phase is phase


def test_where_long_steps_keep_the_devices_behind_no_loop_is_compiled(thread):
    steps = Steps(GroupTrial(ALONE, 10))
    assert steps.take(64, is_idle=False, seconds=0.02) is TrialPhase.ALONE
    assert not steps.prepared


def test_short_steps_are_tried_also_where_the_devices_are_behind(thread):
    """A thread of XLA's launches their kernels one by one, so that no device is ready."""
    steps = Steps(GroupTrial(ALONE, 10))
    assert steps.take(64, is_idle=False) is TrialPhase.COMPILE
    assert steps.prepared == [10]


def test_a_compilation_leaves_no_thread_behind():
    compiled = _constant_groups._in_thread(lambda: threading.current_thread())
    compiled.result(10).join(10)
    assert not compiled.result().is_alive()


def test_the_time_between_two_epochs_is_no_step():
    steps = Steps(GroupTrial(ALONE, 10))
    steps.take(40)
    steps.epoch = object()
    steps.take(1, seconds=100.0)
    steps.take(10)
    assert max(steps.trial._alone) < 0.01


def test_a_program_that_does_not_compile_is_not_used(thread, caplog):
    def fail():
        raise MemoryError("too large")

    steps = Steps(GroupTrial(ALONE, 10), fail)
    steps.take(64)
    thread.run()
    assert steps.take(1) is TrialPhase.ALONE
    assert "too large" in caplog.text


def test_processes_decide_alike(thread):
    """By what all of them have found: here the other one is slower in groups, and compiles for longer."""
    others = {"idle": True, "compiled": [False, False], "times": [0.001, 0.004]}

    def gather(data):
        own = json.loads(data)
        if isinstance(own, bool):
            return [data, json.dumps(others["idle"]).encode()]
        is_time = not isinstance(own[0], bool)
        return [data, json.dumps(others["times" if is_time else "compiled"]).encode()]

    steps = Steps(GroupTrial(SimpleNamespace(size=2, gather=gather), 10))
    assert steps.take(64) is TrialPhase.COMPILE
    thread.run()
    assert steps.take(640) is TrialPhase.COMPILE
    others["compiled"] = [True, False]
    assert steps.take(64) is TrialPhase.TRY
    for _ in range(3):
        steps.trial.note_group(0.002)
    assert steps.trial.phase is TrialPhase.ALONE
    others["idle"] = False
    steps = Steps(GroupTrial(SimpleNamespace(size=2, gather=gather), 10))
    assert steps.take(64) is TrialPhase.ALONE


def test_the_environment_decides(monkeypatch):
    for chosen, phase in (
        ("always", TrialPhase.TOGETHER),
        ("never", TrialPhase.ALONE),
        ("", TrialPhase.WARM_UP),
    ):
        monkeypatch.setenv(_constant_groups.SWITCH, chosen)
        assert first_phase() is phase
    monkeypatch.setenv(_constant_groups.SWITCH, "yes")
    with pytest.raises(unisono.InvalidArgumentError, match="must be `always` or `never`"):
        first_phase()
