"""Replicas that train apart resume within a phase: with the same bits, or as if it had ended there."""

import signal

import keras
import numpy as np
import pytest

from tests.virtual.strategies.test_local_updates import (
    Stop,
    assert_same_bits,
    assert_same_weights,
    by_hand,
    compiled,
    fitted,
    normal,
    outer,
)
from unisono import LocalUpdates
from unisono.callbacks import BackupAndRestore

pytestmark = pytest.mark.numbers


class Ends(keras.callbacks.Callback):
    """Ends a run within a phase: as a failure would, or by a notice of preemption; or never."""

    def __init__(self, how, after):
        super().__init__()
        self._how, self._after = how, after

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations == self._after:
            if self._how == "failure":
                raise Stop
            signal.raise_signal(signal.SIGTERM)

    def get_state(self):
        return {}

    def set_state(self, state):
        """When it ends is an argument."""


def backup(folder):
    # Also after step 15 of 16, where a phase of five ends; what ends later is found as it was there.
    return BackupAndRestore(folder, 3, save_before_preemption=True, asynchronous=False)


def layers():
    return [*normal(), keras.layers.Dropout(0.1)]


#: A phase of five steps ends after 5, 10, 15 and 16 of an epoch; the second epoch begins with step 17.
SYNCS = {
    "plain": LocalUpdates(5, outer),
    "mean": LocalUpdates(5),
    "fragments": LocalUpdates(5, outer, fragments=2),
    "overlap": LocalUpdates(5, outer, overlap=4),
    "fragments, overlap": LocalUpdates(5, outer, fragments=2, overlap=2),
}


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("plain", "preemption"),
        ("fragments, overlap", "failure"),
        *(
            pytest.param(name, how, marks=pytest.mark.exhaustive)
            for name in SYNCS
            for how in ("preemption", "failure")
            if (name, how) not in [("plain", "preemption"), ("fragments, overlap", "failure")]
        ),
    ],
)
def test_a_run_that_resumes_within_a_phase_has_the_same_bits(tmp_path, name, how):
    """What replicas have of their own, and what is being sent, is in the backup."""
    new = lambda: compiled(SYNCS[name], middle=layers)  # noqa: E731
    with pytest.raises((Stop, SystemExit)):
        fitted(new(), 3, callbacks=[backup(tmp_path), Ends(how, 24)])
    resumed, whole = new(), new()
    history = fitted(resumed, 3, callbacks=[backup(tmp_path), Ends(how, 0)])
    assert history == fitted(whole, 3)
    assert_same_bits(resumed, whole)


class First(keras.callbacks.Callback):
    """Notes the weights before the first step, and ends the run there."""

    def on_train_batch_begin(self, batch, logs=None):
        self.weights = self.model.get_weights()
        raise Stop


@pytest.mark.parametrize(
    ("name", "exchanges", "fragments"),
    [
        ("fragments, overlap", {2: [0], 5: [1], 7: [0], 8: [0, 1]}, ((0,), (1, 2, 3))),
        pytest.param("plain", {5: [0], 8: [0]}, ((0, 1, 2, 3),), marks=pytest.mark.exhaustive),
        pytest.param("mean", {5: [0], 8: [0]}, ((0, 1, 2, 3),), marks=pytest.mark.exhaustive),
        pytest.param("overlap", {5: [0], 8: [0]}, ((0, 1, 2, 3),), marks=pytest.mark.exhaustive),
        pytest.param(
            "fragments", {2: [0], 5: [1], 7: [0], 8: [0, 1]}, ((0,), (1, 2, 3)), marks=pytest.mark.exhaustive
        ),
    ],
)
@pytest.mark.parametrize("replicas", [1, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_on_another_number_of_replicas_the_phase_ends_where_it_was_saved(
    tmp_path, name, exchanges, fragments, replicas
):
    """Nothing that two replicas have learned is lost: the exchange is computed from what they had."""
    sync = SYNCS[name]
    model = compiled(sync)
    before = model.get_weights()
    with pytest.raises(SystemExit):
        fitted(model, callbacks=[backup(tmp_path), Ends("preemption", 8)])
    first = First()
    with pytest.raises(Stop):
        fitted(compiled(sync, replicas=replicas), callbacks=[backup(tmp_path), first])
    made = None if name == "mean" else outer
    wanted = by_hand(model, before, exchanges, made, fragments, rows=512, overlap=sync.overlap)
    assert_same_weights(first.weights, wanted[8])
    assert np.abs(first.weights[0] - before[0]).max() > 1e-3


class Sets(Ends):
    """Sets a weight in the same batch in which the run is ended."""

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations == self._after:
            kernel = self.model.trainable_variables[0]
            kernel.assign(np.ones(kernel.shape))
        super().on_train_batch_end(batch, logs)


def test_a_weight_that_was_set_before_a_backup_is_found_on_another_number_of_replicas(tmp_path):
    """No replica has trained it since then: it has no rows."""
    with pytest.raises(SystemExit):
        fitted(compiled(SYNCS["mean"]), callbacks=[backup(tmp_path), Sets("preemption", 8)])
    first = First()
    with pytest.raises(Stop):
        fitted(compiled(SYNCS["mean"], replicas=1), callbacks=[backup(tmp_path), first])
    np.testing.assert_array_equal(first.weights[0], np.ones_like(first.weights[0]))
