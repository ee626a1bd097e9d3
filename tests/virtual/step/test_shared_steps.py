"""What the peer monitor of several workers receives of the steps of custom loops."""

import keras
import numpy as np
import pytest

import unisono
from unisono.collectives._process_group import SingleProcessGroup


class ListeningGroup(SingleProcessGroup):
    """Notes what it is told, and gives variables their first values."""

    def __init__(self):
        super().__init__()
        self.steps, self.first = [], []

    def note_step(self, kind, batches):
        self.steps.append((kind, [x.shape for x in batches[0]]))

    def equal_arrays(self, arrays, known, key, what, batch=None):
        self.first.append(len(arrays))
        return [np.full_like(v, 7) for v in arrays]


class Listening(unisono.MirroredStrategy):
    """A strategy whose steps are those of such a group."""

    def __init__(self):
        super().__init__(["cpu:0", "cpu:1"])
        self._group = ListeningGroup()


@pytest.fixture
def strategy():
    return Listening()


def test_steps_tell_of_their_variables_and_arrays(strategy):
    with strategy.scope():
        v = keras.Variable(np.zeros((3, 2), "f4"))
        w = keras.Variable(np.zeros((4,), "f4"))
    batch = next(iter(strategy.distribute_dataset([np.ones((4, 2), "f4")])))
    strategy.run(lambda b: v + b.sum(), args=(batch,))
    assert strategy.process_group.steps == [("run with variables (3, 2)", [(2, 2, 2)])]

    def replica(b):
        return keras.ops.sum(w) + keras.ops.sum(v) + b.sum()

    @unisono.function
    def both(b):
        return strategy.reduce("SUM", strategy.run(replica, args=(b,)), axis=None)

    assert float(both(batch)) == 2 * 7 * 10 + 8
    assert strategy.process_group.steps[1][0] in (
        "run with variables (4,), (3, 2)",
        "run with variables (3, 2), (4,)",
    )


def test_variables_get_first_values_once(strategy):
    with strategy.scope():
        v = keras.Variable(np.zeros((2,), "f4"))

    def step():
        v.assign_add(np.ones(2, "f4"))

    for _ in range(2):
        strategy.run(step)
    strategy.run(lambda: v * 2)
    assert v.numpy().tolist() == [9.0, 9.0]
    assert [n for n in strategy.process_group.first if n] == [1]


def test_values_of_single_replicas_are_their_own(strategy):
    with strategy.scope():
        v = unisono.Variable(1.0, synchronization="ON_READ", aggregation="SUM")
    strategy.run(lambda: v.assign_add(1.0))
    assert strategy.local_results(strategy.run(lambda: v.value)) == (2.0, 2.0)


def test_functions_of_this_process_alone_are_nobodys_business(strategy):
    @unisono.function
    def double(x):
        return 2 * x

    with strategy.scope():
        assert float(double(np.float32(2))) == 4
    assert not strategy.process_group.steps


def test_an_error_of_a_step_is_raised_as_it_is_explained(strategy, monkeypatch):
    group = strategy.process_group
    monkeypatch.setattr(group, "explain", lambda error: unisono.ClusterError("lost"))
    monkeypatch.setattr(group, "note_step", lambda kind, batches: (_ for _ in ()).throw(ValueError("Gloo")))
    with pytest.raises(unisono.ClusterError, match="lost") as info:
        strategy.run(lambda: 1)
    assert isinstance(info.value.__cause__, ValueError)
