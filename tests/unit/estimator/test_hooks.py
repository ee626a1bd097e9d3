"""Each hook by itself, in a loop without a model."""

import logging
import types

import jax.numpy as jnp
import numpy as np
import pytest
from tests.event_files import scalars
from tests.hook_loop import Loop

import unisono
from unisono.estimator import hooks as h
from unisono.estimator._collections import RecordedSummary
from unisono.estimator._train_op import ModelCall, entered_call
from unisono.estimator.hooks import _timer
from unisono.estimator.hooks._summaries import write_summaries


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets."""
    now = types.SimpleNamespace(time=1000.0)
    monkeypatch.setattr(_timer.time, "monotonic", lambda: now.time)
    return now


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "unisono")
    return lambda: [r.message for r in caplog.records if r.name == "unisono"]


# --- timers --------------------------------------------------------------------------------------


def test_a_timer_of_steps():
    timer = h.SecondOrStepTimer(every_steps=3)
    assert timer.should_trigger_for_step(7)
    assert timer._steps_until(7) == 1
    assert timer.update_last_triggered_step(7) == (None, None)
    assert [timer.should_trigger_for_step(s) for s in (7, 8, 9, 10, 11)] == [False, False, False, True, True]
    assert [timer._steps_until(s) for s in (7, 8, 10)] == [3, 2, 1]
    seconds, steps = timer.update_last_triggered_step(11)
    assert seconds >= 0
    assert (steps, timer.last_triggered_step()) == (4, 11)


def test_a_timer_of_seconds_asks_again_in_time(clock):
    timer = h.SecondOrStepTimer(every_secs=10)
    timer.update_last_triggered_step(0)
    assert timer._steps_until(0) == 1
    clock.time += 1
    assert not timer.should_trigger_for_step(10)
    assert timer._steps_until(10) == 10  # no more than were measured
    assert timer._steps_until(60) == 60
    assert timer._steps_until(1000) == 100
    clock.time += 8
    assert timer._steps_until(60) == 3  # half of the 6.7 steps of a second
    clock.time -= 8
    clock.time += 9
    assert timer.should_trigger_for_step(11)
    assert timer._steps_until(11) == 1
    assert timer.update_last_triggered_step(11) == (10.0, 11)


@pytest.mark.parametrize("arguments", [{}, {"every_secs": 1, "every_steps": 1}])
def test_a_timer_needs_one_of_both(arguments):
    with pytest.raises(unisono.InvalidArgumentError, match="Leave one"):
        h.SecondOrStepTimer(**arguments)


# --- values --------------------------------------------------------------------------------------


def test_values_are_logged_at_the_first_step_and_every_n(lines):
    loop = Loop([h.LoggingTensorHook({"l": "loss", "a": "loss"}, every_n_iter=10)], start=3).run(25)
    assert loop.groups == [1, 10, 10, 4]
    assert [line.partition(" (")[0] for line in lines()] == [f"a = -{n}.0, l = -{n}.0" for n in (4, 14, 24)]


def test_values_are_logged_at_the_end_alone(lines):
    assert Loop([h.LoggingTensorHook(["loss"], at_end=True)]).run(150).groups == [100, 50]
    assert lines() == ["loss = -150.0"]


def test_values_are_logged_by_a_formatter_and_by_the_clock(clock, lines):
    def pace(step):
        clock.time = 1000 + step
        return {}

    hook = h.LoggingTensorHook(["loss"], every_n_secs=3, formatter=lambda v: f"<{v['loss']}>")
    Loop([hook]).run(12, pace)
    assert lines() == ["<-1.0>", "<-5.0>", "<-9.0>"]


def test_an_array_of_a_model_fn_is_logged_by_its_name(lines):
    with entered_call(ModelCall("train", None, None)) as call:
        x = jnp.float32(1)
        hook = h.LoggingTensorHook({"x": x}, every_n_iter=1)
    Loop([hook], exposed=call.exposed).run(1, lambda step: {"_logged": jnp.float32(7)})
    assert lines() == ["x = 7.0"]


@pytest.mark.parametrize(
    "arguments", [{}, {"every_n_iter": 1, "every_n_secs": 1}, {"every_n_iter": 0}, {"every_n_iter": -1}]
)
def test_when_to_log_must_be_said(arguments):
    with pytest.raises(unisono.InvalidArgumentError, match="every_n_iter"):
        h.LoggingTensorHook(["loss"], **arguments)


def test_steps_per_second_are_recorded(tmp_path, clock, lines):
    def pace(step):
        clock.time = 1000 + step / 2
        return {}

    loop = Loop([h.StepCounterHook(10, output_dir=str(tmp_path))], start=3).run(25, pace)
    assert loop.groups == [1, 10, 10, 4]
    assert scalars(tmp_path, "global_step/sec") == [(14, 2.0), (24, 2.0)]
    assert lines() == ["global_step/sec: 2"] * 2


def test_a_loss_that_is_not_a_number():
    def nan(step):
        return {"loss": jnp.float32(np.nan if step >= 110 else 0)}

    with pytest.raises(h.NanLossDuringTrainingError, match=r"NaN loss during training\."):
        Loop([h.NanTensorHook("loss")]).run(1000, nan)
    loop = Loop([h.NanTensorHook("loss", fail_on_nan_loss=False)])
    assert loop.run(1000, nan).step == 200


def test_final_values_are_those_of_the_last_step():
    hook = h.FinalOpsHook({"l": "loss", "s": "global_step"})
    Loop([hook]).run(3)
    assert hook.final_ops_values == {"l": -3.0, "s": 3}


# --- checkpoints -----------------------------------------------------------------------------------


class Listener(h.CheckpointSaverListener):
    def __init__(self, stop_at=None):
        self.calls, self.stop_at = [], stop_at

    def begin(self):
        self.calls.append("begin")

    def before_save(self, session, step):
        self.calls.append(f"before {step}")

    def after_save(self, session, step):
        self.calls.append(f"after {step}")
        return step == self.stop_at

    def end(self, session, step):
        self.calls.append(f"end {step}")


def test_checkpoints_and_listeners(lines):
    listener = Listener()
    hook = h.CheckpointSaverHook("/model", save_steps=10, listeners=[listener])
    loop = Loop([hook], start=5).run(24)
    assert loop.saved == [5, 15, 25, 29]
    saves = [f"{when} {step}" for step in (5, 15, 25, 29) for when in ("before", "after")]
    assert listener.calls == ["begin", *saves, "end 29"]
    assert lines()[0] == "Saving checkpoints for 5 into /model."


def test_a_listener_ends_the_training():
    first, second = Listener(stop_at=10), Listener()
    loop = Loop([h.CheckpointSaverHook("/model", save_steps=10, listeners=[first, second])]).run(50)
    assert loop.step == 10
    assert loop.saved == [0, 10]
    assert second.calls == first.calls


def test_checkpoints_by_the_clock(clock):
    def pace(step):
        clock.time = 1000 + step
        return {}

    assert Loop([h.CheckpointSaverHook("/model", save_secs=3)]).run(7, pace).saved == [0, 3, 6, 7]


def test_the_estimator_saves_by_itself():
    with pytest.raises(unisono.InvalidArgumentError, match="saver"):
        h.CheckpointSaverHook("/model", save_steps=1, saver=object())
    with pytest.raises(unisono.UnsupportedError, match="in training"):
        h.HookSession().save()


def test_evaluations_in_between():
    calls = []
    estimator = types.SimpleNamespace(evaluate=lambda *args, **kwargs: calls.append((args, kwargs)))
    hook = h.InMemoryEvaluatorHook(estimator, "input_fn", steps=2, name="n", every_n_iter=10)
    loop = Loop([hook]).run(24)
    assert loop.saved == [0, 10, 20, 24]
    assert [kwargs["checkpoint_path"] for _, kwargs in calls] == ["ckpt-0", "ckpt-10", "ckpt-20", "ckpt-24"]
    assert calls[0] == (("input_fn",), {"steps": 2, "hooks": None, "checkpoint_path": "ckpt-0", "name": "n"})
    with pytest.raises(unisono.InvalidArgumentError, match="every_n_iter"):
        h.InMemoryEvaluatorHook(estimator, "input_fn", every_n_iter=0)


# --- ends and waits ----------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{}, {"num_steps": 1, "last_step": 1}])
def test_where_to_stop_must_be_said(arguments):
    with pytest.raises(unisono.InvalidArgumentError, match="One of the two"):
        h.StopAtStepHook(**arguments)


def test_stop_at_a_step_that_is_past_runs_one():
    assert Loop([h.StopAtStepHook(last_step=3)], start=5).run(10).step == 6


def test_waiting_for_a_step_is_an_error_where_none_would_come():
    assert Loop([h.GlobalStepWaiterHook(5)], start=5).run(2).step == 7
    with pytest.raises(unisono.UnsupportedError, match="wait for ever"):
        Loop([h.GlobalStepWaiterHook(5)], start=4).run(2)


def test_feeding_names_what_to_write():
    with pytest.raises(unisono.UnsupportedError, match="input_fn"):
        h.FeedFnHook(dict)


# --- summaries ---------------------------------------------------------------------------------------


def test_summaries_of_a_model_fn(tmp_path):
    summaries = [
        RecordedSummary("scalar", "loss_1", "loss"),
        RecordedSummary("text", "note", "", text="a *note*"),
    ]
    hook = h.SummarySaverHook(save_steps=10, output_dir=str(tmp_path))
    loop = Loop([hook], start=3, summaries=summaries).run(25)
    assert loop.groups == [1, 10, 10, 4]
    assert scalars(tmp_path, "loss_1") == [(4, -4.0), (14, -14.0), (24, -24.0)]


def test_chosen_summaries_alone(tmp_path):
    one, two = RecordedSummary("scalar", "one", "loss"), RecordedSummary("scalar", "two", "other")
    hook = h.SummarySaverHook(save_steps=1, output_dir=str(tmp_path), summary_op=[one])
    Loop([hook], summaries=[one, two]).run(1)
    assert scalars(tmp_path, "one") == [(1, -1.0)]
    assert scalars(tmp_path, "two") == []
    with pytest.raises(unisono.InvalidArgumentError, match="summary_op"):
        h.SummarySaverHook(save_steps=1, summary_op="loss")


def test_all_kinds_are_written(tmp_path):
    writer = unisono.summary.create_file_writer(str(tmp_path))
    kinds = [
        RecordedSummary("histogram", "h", "x"),
        RecordedSummary("image", "i", "y", options={"max_outputs": 1}),
    ]
    write_summaries(writer, kinds, {"x": jnp.arange(3.0), "y": jnp.ones((2, 4, 4, 1))}, 5)
    writer.close()
    from tests.event_files import read

    values, plugins = read(tmp_path)
    assert plugins == {"h": "histograms", "i": "images"}
    assert [step for step, _ in values["h"]] == [5]
    assert len(values["i"][0][1]) == 3  # width, height, one picture


def test_a_profile_is_of_one_step(tmp_path, monkeypatch, lines):
    calls = []
    monkeypatch.setattr("jax.profiler.start_trace", lambda path: calls.append(path))
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: calls.append("stop"))
    loop = Loop([h.ProfilerHook(save_steps=10, output_dir=str(tmp_path))]).run(25)
    assert calls == [str(tmp_path), "stop"] * 2
    assert loop.groups == [1, 8, 1, 9, 1, 5]
    assert lines()[0] == f"Saving a profile of step 10 into {tmp_path}."
