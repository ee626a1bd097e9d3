"""When a custom loop is saved and ended: steps, words of the end, a clock that the test moves."""

import gc
import os
import signal
import sys
import threading
import time

import keras
import numpy as np
import pytest

import unisono
from unisono import CheckpointError, ContextError, InvalidArgumentError, InvalidTypeError
from unisono.checkpoint import (
    Checkpoint,
    CheckpointManager,
    PreemptionCheckpointHandler,
    TerminationConfig,
)
from unisono.checkpoint.preemption import _handler, _watcher
from unisono.cluster_resolver import SimpleClusterResolver


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


# --- the handler, with words given by a test ------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(_handler.time, "monotonic", clock)
    return clock


def handler_of(folder, value, **config):
    return PreemptionCheckpointHandler(None, Checkpoint(value=value), folder, TerminationConfig(**config))


def counted(handler, value, steps):
    for _ in range(handler.total_run_calls, steps):
        handler.run(value.assign_add, 1)


def test_after_sigterm_the_step_is_ended_saved_and_restored(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    value = keras.Variable(0)

    def step():
        value.assign_add(1)
        if value == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            value.assign_add(10)

    with handler_of(tmp_path, value) as handler:
        with pytest.raises(SystemExit) as ended:
            [handler.run(step) for _ in range(9)]
        assert ended.value.code == 42
    assert signal.getsignal(signal.SIGTERM) == before
    again = keras.Variable(0)
    with handler_of(tmp_path, again) as handler:
        assert (int(again), handler.total_run_calls) == (13, 3)
        counted(handler, again, 5)
    assert (int(again), handler.total_run_calls) == (15, 5)


def test_run_hands_arguments_and_results_through_and_counts_no_failure(tmp_path):
    with handler_of(tmp_path, keras.Variable(0)) as handler:
        assert handler.run(lambda a, *, b: a - b, 5, b=2) == 3
        with pytest.raises(ZeroDivisionError):
            handler.run(lambda: 1 / 0)
        assert handler.total_run_calls == 1


def test_with_a_grace_period_it_is_saved_twice(tmp_path, clock):
    ended, value = [], keras.Variable(0)
    with handler_of(tmp_path, value, grace_period=30, exit_fn=lambda: ended.append(int(value))) as handler:
        counted(handler, value, 1)
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(20):
            clock.now += 2
            handler.run(value.assign_add, 1)
            saved = len(list(tmp_path.iterdir()))
            assert saved == (1 if not ended else 2)
            if ended:
                break
    # Steps take 2 s: twice agreement and step are 8 s before the end, which is 30 s after the word.
    assert ended == [12]
    again = keras.Variable(0)
    with handler_of(tmp_path, again) as handler:
        assert int(again) == handler.total_run_calls == 12


def test_the_loop_goes_on_where_exit_fn_returns_and_hears_the_next_word(tmp_path):
    ended, value = [], keras.Variable(0)
    with handler_of(tmp_path, value, exit_fn=lambda: ended.append(int(value))) as handler:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
            handler.run(value.assign_add, 1)
            handler.run(value.assign_add, 1)
            saved = sorted(int(path.name.rpartition("-")[2]) for path in tmp_path.glob("preemption-*"))
    assert ended == [1, 3, 5]
    # A damaged one is passed over for the one before.
    assert len(saved) == 2


def test_all_save_after_the_agreed_step(tmp_path, monkeypatch):
    class OneLater:
        """As a cluster does: another process wanted at step 2, and all learn of it a step later."""

        asked, begun, delay = [], [], 0.0

        def begin(self, step):
            self.begun.append(step)

        def agree(self, step, wanted, *, is_last=False):
            self.asked.append((step, wanted))
            return 4 if step in (2, 3, 4) else None

        def finish(self):
            self.finished = True

    ended, value = [], keras.Variable(0)
    resolver = SimpleClusterResolver(
        unisono.cluster_resolver.ClusterSpec({"worker": ["a:1", "b:1"]}), task_type="worker", task_id=1
    )
    monkeypatch.setattr(_handler, "make_consensus", lambda given: OneLater() if given is resolver else None)
    config = TerminationConfig(exit_fn=lambda: ended.append(int(value)))
    checkpoint = Checkpoint(value=value)
    with PreemptionCheckpointHandler(resolver, checkpoint, tmp_path, config) as handler:
        counted(handler, value, 6)
    assert ended == [4]
    assert OneLater.asked == [(step, False) for step in range(1, 7)]
    assert OneLater.begun == [0]
    assert handler._agreement.finished
    # The chief writes.
    assert not list(tmp_path.iterdir())


def test_save_fn_gets_the_arguments_of_the_call(tmp_path):
    saved, value = [], keras.Variable(0)

    def save(*args, **kwargs):
        saved.append((args, kwargs))
        manager.save()

    manager = CheckpointManager(Checkpoint(value=value), tmp_path)
    handler = PreemptionCheckpointHandler(None, manager, termination_config=TerminationConfig(save_fn=save))
    with handler, handler.watch_preemption_scope():
        handler.save_checkpoint_if_preempted("early")
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit):
            handler.save_checkpoint_if_preempted("late", a=1)
    assert saved == [(("late",), {"a": 1})]
    assert len(manager.checkpoints) == 1


def test_a_word_after_the_last_step_is_heard_at_the_end_of_the_block(tmp_path):
    def loop(after):
        with handler.watch_preemption_scope():
            handler.save_checkpoint_if_preempted()
            os.kill(os.getpid(), signal.SIGTERM)
            after()

    with handler_of(tmp_path, keras.Variable(0)) as handler:
        with pytest.raises(SystemExit):
            loop(int)
        with pytest.raises(ZeroDivisionError):
            loop(lambda: 1 / 0)
    assert len(list(tmp_path.iterdir())) == 1


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_a_thread_asks_the_users_function(tmp_path, tuned):
    tuned(_watcher, _POLL_SECONDS=0.01)
    before, answers = signal.getsignal(signal.SIGTERM), iter([False, False, True])
    value = keras.Variable(0)
    with handler_of(tmp_path, value, termination_watcher_fn=lambda: next(answers)) as handler:
        assert signal.getsignal(signal.SIGTERM) == before
        wait_for(lambda: handler._notice.at is not None)
        with pytest.raises(SystemExit):
            counted(handler, value, 1)
    assert next(answers, "nobody asks after yes") == "nobody asks after yes"


def test_an_error_of_the_users_function_is_raised_by_the_next_step(tmp_path):
    with handler_of(tmp_path, keras.Variable(0), termination_watcher_fn=lambda: 1 / 0) as handler:
        wait_for(lambda: handler._notice.error is not None)
        with pytest.raises(ZeroDivisionError):
            handler.run(int)
        handler.run(int)


def test_closing_ends_the_thread(tmp_path, tuned):
    tuned(_watcher, _POLL_SECONDS=0.01)

    def polling():
        return [t for t in threading.enumerate() if t.name == "unisono-preemption"]

    with handler_of(tmp_path, keras.Variable(0), termination_watcher_fn=lambda: False):
        assert polling()
    wait_for(lambda: not polling())


# --- the signal's old answer --------------------------------------------------------------------


def test_a_collected_handler_leaves_the_old_answer(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    handler = handler_of(tmp_path, keras.Variable(0))
    assert signal.getsignal(signal.SIGTERM) != before
    del handler
    gc.collect()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.fixture
def heard():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    yield heard
    signal.signal(signal.SIGTERM, before)


def test_what_was_set_later_stays_and_may_restore_ours(tmp_path, heard):
    handler = handler_of(tmp_path, keras.Variable(0))
    ours = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    handler.close()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    signal.signal(signal.SIGTERM, ours)
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard == [signal.SIGTERM]


def test_the_old_answer_is_given_once_when_all_is_saved(tmp_path, heard):
    counts = []
    signal.signal(signal.SIGTERM, lambda number, frame: counts.append(len(list(tmp_path.iterdir()))))
    with handler_of(tmp_path, keras.Variable(0)) as handler:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            handler.run(int)
    assert (ended.value.code, counts) == (42, [1])


def test_the_old_answer_does_not_change_the_exit_code(tmp_path, heard):
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(3))
    with handler_of(tmp_path, keras.Variable(0)) as handler:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit) as ended:
            handler.run(int)
    assert ended.value.code == 42


def test_closed_in_another_thread_it_passes_the_signal_on(tmp_path, heard):
    handler = handler_of(tmp_path, keras.Variable(0))
    thread = threading.Thread(target=handler.close)
    thread.start()
    thread.join()
    os.kill(os.getpid(), signal.SIGTERM)
    assert heard == [signal.SIGTERM]
    handler.run(int)


def test_a_handler_that_cannot_restore_watches_nothing(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with handler_of(tmp_path, keras.Variable(0), exit_fn=lambda: None) as handler:
        os.kill(os.getpid(), signal.SIGTERM)
        handler.run(int)
    other = keras.Variable(np.zeros(3))
    with pytest.raises(CheckpointError, match="has shape"):
        handler_of(tmp_path, other)
    assert signal.getsignal(signal.SIGTERM) == before


# --- errors ----------------------------------------------------------------------------------


def test_outside_of_the_main_thread(tmp_path):
    errors = []

    def make():
        try:
            handler_of(tmp_path, keras.Variable(0))
        except ContextError as error:
            errors.append(str(error))
        handler_of(tmp_path, keras.Variable(0), termination_watcher_fn=lambda: False).close()

    thread = threading.Thread(target=make, name="theirs")
    thread.start()
    thread.join()
    assert "main thread. Received: thread 'theirs'" in errors[0]


def resolver_of(**jobs):
    return SimpleClusterResolver(unisono.cluster_resolver.ClusterSpec(jobs), task_type="worker", task_id=0)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda c: (None, c), InvalidArgumentError, "Received: checkpoint_dir=None"),
        (lambda c: (None, c, ""), InvalidArgumentError, "Received: checkpoint_dir=''"),
        (lambda c: (None, "c", "d"), InvalidTypeError, "Received: str"),
        (lambda c: (None, CheckpointManager(c, "a"), "b"), InvalidArgumentError, "checkpoint_dir='b', and a"),
        (
            lambda c: (resolver_of(worker=["a:1"], ps=["b:1"]), c, "d"),
            InvalidArgumentError,
            "a cluster with parameter servers",
        ),
        (
            lambda c: (resolver_of(worker=["a:1", "b:1"]), c, "d"),
            unisono.ClusterError,
            "Received: num_processes=2",
        ),
    ],
)
def test_bad_arguments(make, error, message):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(error, match=message):
        PreemptionCheckpointHandler(*make(Checkpoint(value=keras.Variable(0))))
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_name_of_the_counter_is_taken(tmp_path):
    checkpoint = Checkpoint(value=keras.Variable(0), total_run_calls=3)
    with pytest.raises(InvalidArgumentError, match="Received: 'total_run_calls' twice"):
        PreemptionCheckpointHandler(None, checkpoint, tmp_path)


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"grace_period": -1}, InvalidArgumentError),
        ({"grace_period": float("nan")}, InvalidArgumentError),
        ({"exit_fn": 42}, InvalidTypeError),
        ({"save_fn": "save"}, InvalidTypeError),
        ({"termination_watcher_fn": True}, InvalidTypeError),
    ],
)
def test_a_bad_config(config, error):
    with pytest.raises(error, match=f"Received: {next(iter(config))}="):
        TerminationConfig(**config)
