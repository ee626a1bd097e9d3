"""Hooks are called between groups of steps, as often as they need it."""

import jax.numpy as jnp
import keras
import numpy as np
import pytest
from tests.hook_loop import Loop

import unisono
from unisono.estimator._collections import RecordedSummary
from unisono.estimator.hooks import (
    HookRunner,
    HookSession,
    SessionRunArgs,
    SessionRunHook,
    StopAtStepHook,
)


class Recorder(SessionRunHook):
    """Writes down what it is called for."""

    def __init__(self, fetches="loss"):
        self.fetches, self.calls = fetches, []

    def begin(self):
        self.calls.append("begin")

    def after_create_session(self, session, coord):
        self.calls.append(("created", session.global_step))

    def before_run(self, run_context):
        return SessionRunArgs(self.fetches)

    def after_run(self, run_context, run_values):
        self.calls.append(run_values.results)

    def end(self, session):
        self.calls.append(("end", session.global_step))


def test_a_hook_of_the_user_is_called_for_each_step():
    hook = Recorder()
    loop = Loop([hook], start=5).run(3)
    assert loop.groups == [1, 1, 1]
    assert hook.calls == ["begin", ("created", 5), -6.0, -7.0, -8.0, ("end", 8)]


def test_a_hook_that_overrides_neither_is_not_waited_for():
    class Ends(SessionRunHook):
        ended = None

        def end(self, session):
            self.ended = session.global_step

    hook = Ends()
    assert Loop([hook]).run(250).groups == [100, 100, 50]
    assert hook.ended == 250


def test_fetches_have_the_structure_that_was_asked_for():
    variable = keras.Variable([1.0, 2.0], name="w")
    loss = jnp.float32(0)
    hook = Recorder({"a": "loss:0", "b": [loss, "global_step", None], "v": variable, "w": "net/w:0"})
    loop = Loop([hook], exposed={"loss": loss}, variable={"net/w": variable}.get).run(1)
    got = hook.calls[2]
    assert got["a"] == -1.0
    assert got["b"] == [-1.0, 1, None]
    assert isinstance(got["b"][1], np.int64)
    np.testing.assert_array_equal(got["v"], [1, 2])
    np.testing.assert_array_equal(got["w"], [1, 2])
    assert loop.runner.session.run("loss") == -1.0


def test_an_operation_has_no_value():
    hook = Recorder([object(), RecordedSummary("text", "t", "", text="x")])
    with pytest.raises(unisono.InvalidArgumentError, match="before it"):
        HookSession({"loss": jnp.zeros(())}).run("loss")
    assert HookSession().run(object()) is None
    assert Loop([hook]).run(1).groups == [1]


def test_an_unknown_name_is_an_error_that_lists_the_known_ones():
    with pytest.raises(
        unisono.InvalidArgumentError, match=r"'acuracy'; there are 'loss', 'other', 'global_step'"
    ):
        Loop([Recorder("acuracy")]).run(1)


def test_an_array_that_was_not_exposed_is_an_error():
    with pytest.raises(unisono.InvalidArgumentError, match=r"tf.identity"):
        Loop([Recorder(jnp.float32(3))]).run(1)


def test_feeding_is_an_error():
    class Feeds(SessionRunHook):
        def before_run(self, run_context):
            return SessionRunArgs("loss", feed_dict={"x": 1})

    with pytest.raises(unisono.UnsupportedError, match="input_fn"):
        Loop([Feeds()]).run(1)
    with pytest.raises(unisono.UnsupportedError, match="input_fn"):
        HookSession().run("loss", {"x": 1})


def test_wrong_hooks_and_wrong_answers():
    with pytest.raises(unisono.InvalidTypeError, match="SessionRunHook"):
        HookRunner([print])

    class Wrong(SessionRunHook):
        def before_run(self, run_context):
            return "loss"

    with pytest.raises(unisono.InvalidTypeError, match="SessionRunArgs"):
        Loop([Wrong()]).run(1)


def test_a_step_must_return_what_hooks_ask_for():
    runner = HookRunner([Recorder("other")], HookSession({"other": jnp.zeros(())}))
    runner.before_step(0)
    assert runner.wanted == {"other"}
    with pytest.raises(unisono.InvalidArgumentError, match="other"):
        runner.after_step({"loss": 0.0})


def test_the_number_of_steps_is_known_without_a_value_of_the_step():
    runner = HookRunner([Recorder(["loss", "global_step"])], HookSession(exposed={"loss": jnp.zeros(())}))
    runner.before_step(0)
    assert runner.wanted == {"loss"}
    runner.after_step({"loss": 3.0, "global_step": 1})
    assert runner.hooks[0].calls == [[3.0, 1]]


def test_a_request_to_stop_ends_the_loop_after_all_hooks_were_called():
    class Stops(SessionRunHook):
        def after_run(self, run_context, run_values):
            assert not run_context.stop_requested
            run_context.request_stop()

    hook = Recorder()
    loop = Loop([Stops(), hook]).run(5)
    assert loop.groups == [1]
    assert hook.calls[2:] == [-1.0, ("end", 1)]


@pytest.mark.parametrize("hook", [StopAtStepHook(num_steps=130), StopAtStepHook(last_step=135)])
def test_groups_end_at_the_last_step(hook):
    loop = Loop([hook], start=5).run(1000)
    assert loop.groups == [100, 30]


def test_a_loop_whose_data_end_within_a_group():
    hook = Recorder()
    hook.steps_until_next = lambda global_step: 10
    runner = HookRunner([hook], HookSession({"loss": jnp.zeros(())}))
    assert runner.before_step(0) == 10
    contexts = []
    hook.after_run = lambda context, values: contexts.append(context.steps)
    runner.after_step({"loss": 1.0, "global_step": 4})
    assert contexts == [4]
