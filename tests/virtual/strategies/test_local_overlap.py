"""Fragments that are sent beside the next steps: the numbers, what the programs exchange, and how it ends."""

import keras
import numpy as np
import pytest

import unisono
from tests.support import devices
from tests.virtual.strategies.test_local_updates import (
    SeenAll,
    Stop,
    assert_same_bits,
    assert_same_weights,
    by_hand,
    collectives,
    compiled,
    fitted,
    normal,
    outer,
)
from unisono import LocalUpdates
from unisono._mesh import ReplicaMesh, resolve_devices
from unisono.callbacks import BackupAndRestore
from unisono.collectives._process_group import SingleProcessGroup
from unisono.local_updates._local_layout import LocalLayout
from unisono.step._dispatch import CompiledStep
from unisono.step._layout import Phases

pytestmark = pytest.mark.numbers

K = keras.optimizers


def test_numbers_are_those_of_a_delayed_exchange():
    """Callbacks see what has arrived. Steps that run in groups, which end there, have the same bits."""
    model, seen = compiled(LocalUpdates(6, outer, overlap=2)), SeenAll()
    before = model.get_weights()
    fitted(model, callbacks=[seen])
    wanted = by_hand(model, before, {6: [0], 12: [0], 16: [0]}, outer_of=outer, overlap=2)
    for step in range(1, 16):
        assert_same_weights(seen.weights[step - 1], wanted[step])
    assert_same_weights(model.get_weights(), wanted[16])
    changed = [np.any(a[0] != b[0]) for a, b in zip([before, *seen.weights], seen.weights, strict=False)]
    assert [i + 1 for i in range(17) if changed[i]] == [8, 14, 17]
    other = compiled(LocalUpdates(6, outer, overlap=2))
    fitted(other)
    assert_same_bits(model, other)


@pytest.mark.parametrize(
    ("every", "overlap", "outer_of", "exchanges"),
    [
        # An epoch ends while the second fragment is sent.
        (5, 3, None, {2: [0], 5: [1], 7: [0], 10: [1], 12: [0], 15: [1], 16: [0, 1]}),
        # Until its own next turn.
        pytest.param(
            4, 4, outer, {2: [0], 4: [1], 6: [0], 8: [1], 10: [0], 12: [1], 14: [0], 16: [1, 0]},
            marks=pytest.mark.exhaustive,
        ),
    ],
)  # fmt: skip
def test_fragments_arrive_in_their_order(every, overlap, outer_of, exchanges):
    model = compiled(LocalUpdates(every, outer_of, fragments=2, overlap=overlap))
    before = model.get_weights()
    fitted(model)
    wanted = by_hand(model, before, exchanges, outer_of, fragments=((0,), (1, 2, 3)), overlap=overlap)
    assert_same_weights(model.get_weights(), wanted[16])


def test_metrics_and_moving_statistics_are_those_of_all_replicas():
    """Zero learning rates: every number is that of synchronous training. All compute the last batch."""
    found = compiled(LocalUpdates(6, overlap=True), K.SGD(0.0), middle=normal)
    wanted = compiled(None, K.SGD(0.0), middle=normal)
    history, exact = fitted(found, 2, 515), fitted(wanted, 2, 515)
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(history[name], exact[name], rtol=1e-5)
    assert_same_weights(found.get_weights(), wanted.get_weights(), rtol=1e-4, atol=1e-5)


def test_programs_exchange_nothing_but_at_the_end_of_an_epoch(monkeypatch):
    """Those of steps, of what is sent and of what has arrived. In one process the sum is not a message."""
    found, jaxpr_of = [], CompiledStep.jaxpr

    def noted(self, *arguments):
        found.append(list(collectives(self.lower(*arguments).compile().as_text())))
        return jaxpr_of(self, *arguments)

    monkeypatch.setattr(CompiledStep, "jaxpr", noted)
    fitted(compiled(LocalUpdates(4, outer, overlap=2), middle=normal), rows=256)
    assert len({id(each) for each in found}) >= 5
    (exchanging,) = (each for each in found if each)
    assert all(in_branch for in_branch, _ in exchanging)


class Sets(keras.callbacks.Callback):
    """Changes the weights while a fragment is sent."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 4:
            self.model.set_weights([w + 1 for w in self.model.get_weights()])


def test_weights_that_a_callback_sets_are_not_changed_by_what_was_sent_before():
    model = compiled(LocalUpdates(4, overlap=2), K.SGD(0.0))
    before = model.get_weights()
    fitted(model, callbacks=[Sets()])
    assert_same_weights(model.get_weights(), [w + 1 for w in before], rtol=0, atol=0)


class Fails(keras.callbacks.Callback):
    """Fails in the second epoch, while a fragment is sent."""

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations == 27:
            raise Stop


def test_a_run_that_resumes_has_the_same_bits(tmp_path):
    backup = lambda: BackupAndRestore(str(tmp_path / "backup"))  # noqa: E731
    new = lambda: compiled(LocalUpdates(5, outer, fragments=2, overlap=2), middle=normal)  # noqa: E731
    failed, whole = new(), new()
    with pytest.raises(Stop):
        fitted(failed, 3, callbacks=[backup(), Fails()])
    history = fitted(new_model := new(), 3, callbacks=[backup()])
    assert history == fitted(whole, 3)
    assert_same_bits(new_model, whole)


def test_arguments_are_checked():
    for overlap in (0, 5, 1.5, "yes"):
        text = rf"`overlap` must be.*={overlap!r}, every=4.*overlap=2"
        with pytest.raises(unisono.InvalidArgumentError, match=text):
            LocalUpdates(4, overlap=overlap)
    assert [LocalUpdates(50, fragments=k, overlap=True).overlap for k in (1, 5, 50)] == [25, 5, 1]
    assert repr(LocalUpdates(4, fragments=2, overlap=True)) == "LocalUpdates(4, fragments=2, overlap=1)"
    assert not LocalUpdates(1, overlap=True)._is_synchronous
    with pytest.raises(unisono.InvalidArgumentError, match="must hold its whole state"):
        unisono.MirroredStrategy(devices(2), sync=LocalUpdates(2, overlap=1), state_layout="sharded")


def test_a_later_strategy_of_workers_has_no_device_for_exchanges():
    mesh = ReplicaMesh(resolve_devices(devices(2)))
    # As in a worker whose devices are not all of the mesh.
    vars(mesh)["local_devices"] = mesh.devices[:1]
    with pytest.raises(unisono.BackendError, match="Make this strategy first"):
        LocalLayout(mesh, SingleProcessGroup(), LocalUpdates(4, overlap=True), Phases())
