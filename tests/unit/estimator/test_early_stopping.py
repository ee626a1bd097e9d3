"""Training ends by what evaluations have written to event files."""

import types

import numpy as np
import pytest
from tests.hook_loop import Loop

import unisono
from unisono.estimator import hooks as h


def write(directory, **metrics):
    """An evaluation: `s10=0.5` is a loss of 0.5 at step 10."""
    writer = unisono.summary.create_file_writer(str(directory))
    for step, value in metrics.items():
        writer.write("scalar", "loss", int(step[1:]), np.float32(value))
        writer.write("scalar", "accuracy", int(step[1:]), np.float32(1 - value))
    writer.close()


@pytest.fixture
def estimator(tmp_path):
    return types.SimpleNamespace(eval_dir=lambda: str(tmp_path))


def test_metrics_by_step(tmp_path):
    assert h.read_eval_metrics(str(tmp_path / "missing")) == {}
    write(tmp_path, s20=0.25, s10=0.5)
    write(tmp_path, s20=0.125)
    found = h.read_eval_metrics(str(tmp_path))
    assert found == {10: {"loss": 0.5, "accuracy": 0.5}, 20: {"loss": 0.125, "accuracy": 0.875}}
    assert list(found) == [10, 20]


def test_a_record_that_is_being_written_does_not_count(tmp_path):
    write(tmp_path, s10=0.5, s20=0.25)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    seen = set()
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        seen.add(tuple(h.read_eval_metrics(str(tmp_path))))
    assert seen == {(), (10,), (10, 20)}


HOOKS = {
    "higher": lambda e, **k: h.stop_if_higher_hook(e, "accuracy", 0.7, **k),
    "lower": lambda e, **k: h.stop_if_lower_hook(e, "loss", 0.3, **k),
    "no_increase": lambda e, **k: h.stop_if_no_increase_hook(e, "accuracy", 20, **k),
    "no_decrease": lambda e, **k: h.stop_if_no_decrease_hook(e, "loss", 20, **k),
}

#: Losses of evaluations, and which hooks end the training.
CASES = [
    ({}, []),
    ({"s10": 0.5, "s20": 0.4}, []),
    ({"s10": 0.5, "s20": 0.25}, ["higher", "lower"]),
    ({"s10": 0.5, "s20": 0.5, "s30": 0.5}, ["no_increase", "no_decrease"]),
    ({"s10": 0.5, "s20": 0.4, "s30": 0.45}, []),
    ({"s10": 0.2, "s20": 0.4, "s30": 0.45}, ["higher", "lower", "no_increase", "no_decrease"]),
]


@pytest.mark.parametrize(("metrics", "stopping"), CASES)
@pytest.mark.parametrize("name", HOOKS)
def test_when_training_ends(tmp_path, estimator, name, metrics, stopping):
    write(tmp_path, **metrics)
    hook = HOOKS[name](estimator, run_every_secs=None, run_every_steps=5)
    loop = Loop([hook]).run(10)
    assert loop.step == (1 if name in stopping else 10)


def test_early_evaluations_do_not_count(tmp_path, estimator):
    write(tmp_path, s10=0.2, s20=0.4)
    hook = h.stop_if_lower_hook(estimator, "loss", 0.3, min_steps=15, run_every_secs=None, run_every_steps=5)
    assert Loop([hook]).run(10).step == 10


def test_evaluations_that_come_while_training_runs(tmp_path):
    hook = h.stop_if_lower_hook(
        types.SimpleNamespace(eval_dir=None),
        "loss",
        0.3,
        str(tmp_path),
        run_every_secs=None,
        run_every_steps=5,
    )

    def evaluate(step):
        if step == 11:
            write(tmp_path, s11=0.1)
        return {}

    loop = Loop([hook])
    loop.run(30, evaluate)
    assert loop.groups == [1, 5, 5]


def test_mistakes(tmp_path, estimator):
    with pytest.raises(unisono.InvalidTypeError, match="should_stop_fn"):
        h.make_early_stopping_hook(estimator, True)
    with pytest.raises(unisono.InvalidTypeError, match="Estimator"):
        h.make_early_stopping_hook("estimator", lambda: True)
    with pytest.raises(unisono.InvalidArgumentError, match="Leave one"):
        h.stop_if_lower_hook(estimator, "loss", 1, run_every_secs=1, run_every_steps=1)
    write(tmp_path, s10=0.2)
    with pytest.raises(unisono.InvalidArgumentError, match=r"'los'.*\['accuracy', 'loss'\]"):
        Loop([h.stop_if_lower_hook(estimator, "los", 1)]).run(1)
