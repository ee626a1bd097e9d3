"""Replicas that train apart between exchanges: what a phase is, who sees what, and that nothing is sent."""

import itertools
import re
from typing import NamedTuple

import keras
import numpy as np
import pytest

import unisono
from tests.support import devices
from tests.virtual.training._digits import crossentropy, digits
from unisono import LocalUpdates
from unisono.callbacks import BackupAndRestore
from unisono.checkpoint import Checkpoint
from unisono.sharding._shards import Shards
from unisono.step._dispatch import CompiledStep
from unisono.step._keras_internals import stored_value

pytestmark = pytest.mark.numbers

K = keras.optimizers


def outer():
    return K.SGD(0.7, momentum=0.9, nesterov=True)


def strategy_with(sync, replicas=2, **options):
    return unisono.MirroredStrategy(devices(replicas), sync=sync, **options)


def compiled(sync, optimizer=None, replicas=2, middle=list, **options):
    keras.utils.set_random_seed(3)
    with strategy_with(sync, replicas, **options).scope():
        layers = [
            keras.Input((64,)),
            keras.layers.Dense(16, activation="relu"),
            *middle(),
            keras.layers.Dense(10),
        ]
        model = keras.Sequential(layers)
        model.compile(optimizer or K.Adam(0.005), crossentropy(), metrics=["accuracy"])
    return model


def normal():
    return [keras.layers.BatchNormalization(momentum=0.5)]


def fitted(model, epochs=1, rows=512, batch_size=32, **options):
    x, y = digits()
    given = {"batch_size": batch_size, "epochs": epochs, "shuffle": False, "verbose": 0, **options}
    return model.fit(x[:rows], y[:rows], **given).history


def by_hand(model, shared, exchanges, outer_of=None, fragments=((0, 1, 2, 3),), rows=512, overlap=0):
    """Plain Keras models, one for each replica; returns the outer weights after each step.

    Args:
        shared: the weights at the beginning.
        exchanges: after how many steps which fragments are sent. All have arrived at the last of them.
        outer_of: makes the outer optimizer of a fragment; None for the mean.
        fragments: the places of the weights of each.
        rows: how many there are; 32 of them make a step, of which each of two replicas takes the half.
        overlap: how many steps later a fragment arrives.
    """
    x, y = digits()
    models = []
    for _ in range(2):
        own = keras.models.clone_model(model)
        own.compile(type(model.optimizer).from_config(model.optimizer.get_config()), crossentropy())
        own.set_weights(shared)
        models.append(own)
    weights = [keras.Variable(w) for w in shared]
    optimizers = [None if outer_of is None else outer_of() for _ in fragments]

    def arrive(number, sent):
        places = fragments[number]
        means = [np.mean([each[i] for each in sent], axis=0) for i in places]
        own = [weights[i] for i in places]
        if optimizers[number] is None:
            for variable, mean in zip(own, means, strict=True):
                variable.assign(mean)
        else:
            optimizers[number].apply([v.numpy() - m for v, m in zip(own, means, strict=True)], own)
        for each, before in zip(models, sent, strict=True):
            now = each.get_weights()
            for i in places:
                now[i] = weights[i].numpy() + (now[i] - before[i])
            each.set_weights(now)

    seen, running, last = {}, [], max(exchanges)
    for step in range(1, last + 1):
        begin = 32 * (step - 1)
        for replica, own in enumerate(models):
            half = slice(begin + 16 * replica, begin + 16 * replica + 16)
            # Of a batch that does not divide each replica takes all.
            taken = half if begin + 32 <= rows else slice(begin, rows)
            own.train_on_batch(x[taken], y[taken])
        while running and (step == last or running[0][0] + overlap == step):
            arrive(*running.pop(0)[1:])
        for number in exchanges.get(step, []):
            sent = [m.get_weights() for m in models]
            if overlap and step < last:
                running.append((step, number, sent))
            else:
                arrive(number, sent)
        seen[step] = [w.numpy() for w in weights]
    return seen


#: Of 16 steps: two phases of six, and one of four, which the epoch's end ends.
PHASES = {6: [0], 12: [0], 16: [0]}


def assert_same_weights(found, wanted, **tolerance):
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, **(tolerance or {"rtol": 2e-4, "atol": 2e-6}))


class Seen(keras.callbacks.Callback):
    """Notes weights at the ends of batches and of the epoch, and writes a file in the middle of a phase."""

    def __init__(self, path):
        super().__init__()
        self.weights, self.path = [], path

    def on_train_batch_end(self, batch, logs=None):
        self.weights.append(self.model.get_weights()[0])
        if batch == 9:
            self.model.save(self.path)

    def on_epoch_end(self, epoch, logs=None):
        self.at_end = self.model.get_weights()[0]


class Trained(NamedTuple):
    """A model after one epoch of 16 steps, and what was seen meanwhile."""

    model: keras.Model
    before: list
    seen: Seen
    history: dict
    validated: tuple


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    seen = Seen(str(tmp_path_factory.mktemp("local") / "model.keras"))
    model = compiled(LocalUpdates(6, outer))
    before, validated = model.get_weights(), tuple(each[512:640] for each in digits())
    return Trained(model, before, seen, fitted(model, callbacks=[seen], validation_data=validated), validated)


# --- what a phase is ----------------------------------------------------------------------------------


def test_phases_are_those_of_one_keras_model_for_each_replica(trained):
    """Of 16 steps: two phases of six, and one of four, which the epoch's end ends. Slots stay apart."""
    model = trained.model
    assert_same_weights(model.get_weights(), by_hand(model, trained.before, PHASES, outer_of=outer)[16])
    slots = [v for v in model.optimizer.variables if v.name.endswith("momentum") and "kernel" in v.name]
    assert len(slots) == 2
    for slot in slots:
        assert isinstance(stored_value(slot), Shards)
        first, second = np.asarray(slot)
        assert np.abs(first - second).max() > 1e-4
    assert int(model.optimizer.iterations) == 16


@pytest.mark.exhaustive
def test_without_an_outer_optimizer_all_continue_from_the_mean():
    """The same path, which ends with a mean in place of an update; one of two differs in this alone."""
    model = compiled(LocalUpdates(6))
    before = model.get_weights()
    fitted(model)
    assert_same_weights(model.get_weights(), by_hand(model, before, PHASES)[16])


def test_one_step_and_no_outer_optimizer_is_synchronous_training():
    """Bit for bit, for any optimizer: it takes the same path."""
    found, wanted = compiled(LocalUpdates(1)), compiled(None)
    assert fitted(found) == fitted(wanted)
    assert_same_weights(found.get_weights(), wanted.get_weights(), rtol=0, atol=0)


def test_phases_of_one_step_of_descent_are_synchronous_up_to_rounding():
    """The mean of weights after a step is a step by the mean of gradients, also with momentum."""
    found = compiled(LocalUpdates(1, lambda: K.SGD(1.0)), K.SGD(0.1, momentum=0.9))
    wanted = compiled(None, K.SGD(0.1, momentum=0.9))
    history, exact = fitted(found, 2), fitted(wanted, 2)
    assert_same_weights(found.get_weights(), wanted.get_weights(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(history["loss"], exact["loss"], rtol=1e-5)
    # Predictions are those of the same weights, and counted in the same way.
    assert history["accuracy"] == exact["accuracy"]


@pytest.mark.exhaustive
def test_a_learning_rate_of_the_outer_optimizer_may_follow_a_schedule():
    """It counts phases, each of which has as many steps as an epoch here."""
    schedule = lambda: K.SGD(K.schedules.PiecewiseConstantDecay([1], [1.0, 0.0]))  # noqa: E731
    model = compiled(LocalUpdates(16, schedule))
    fitted(model)
    before = model.get_weights()
    # Phase 1 still has the first rate; from phase 2 on it is zero, and nothing is learned.
    fitted(model)
    middle = model.get_weights()
    fitted(model)
    assert np.abs(before[0] - middle[0]).max() > 0
    assert_same_weights(model.get_weights(), middle, rtol=0, atol=0)


#: Three fragments of the four weights, phases of six steps and one of five, and what is exchanged when. The
#: epoch's end exchanges what was trained since: the second fragment's turn has just been.
FRAGMENTS = ((0,), (2,), (1, 3))
TURNS = {2: [0], 4: [1], 6: [2], 8: [0], 10: [1], 12: [2], 14: [0], 16: [1, 0, 2]}


class SeenAll(keras.callbacks.Callback):
    """Notes all weights at the ends of batches and of the epoch."""

    def __init__(self):
        super().__init__()
        self.weights = []

    def on_train_batch_end(self, batch, logs=None):
        self.weights.append(self.model.get_weights())

    def on_epoch_end(self, epoch, logs=None):
        self.weights.append(self.model.get_weights())


def test_fragments_take_turns():
    """Each is exchanged in every phase, and callbacks see the outer weights of its last exchange."""
    model, seen = compiled(LocalUpdates(6, outer, fragments=3)), SeenAll()
    before = model.get_weights()
    fitted(model, callbacks=[seen])
    wanted = by_hand(model, before, TURNS, outer_of=outer, fragments=FRAGMENTS)
    # The last batch's end comes before the end of the epoch.
    for end in TURNS:
        assert_same_weights(seen.weights[end - (end < 16)], wanted[end])
    changed = [
        [i for i in range(4) if np.any(old[i] != new[i])]
        for old, new in itertools.pairwise([before, *seen.weights])
    ]
    turns = [[], [0], [], [2], [], [1, 3]]
    assert changed == [*turns, *turns, *turns[:4], [0, 1, 3]]


@pytest.mark.exhaustive
def test_fragments_without_an_outer_optimizer_continue_from_the_mean():
    """Also with a batch that does not divide, which all replicas compute."""
    model = compiled(LocalUpdates(6, fragments=3), K.SGD(0.1))
    before = model.get_weights()
    fitted(model, rows=515)
    turns = {**TURNS, 16: [1], 17: [0, 1, 2]}
    wanted = by_hand(model, before, turns, fragments=FRAGMENTS, rows=515)
    assert_same_weights(model.get_weights(), wanted[17])


COLLECTIVE = re.compile(
    r"(?:\[(\d*)\]\S*)? (?:all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)\("
)


def collectives(program):
    """Whether each operation that exchanges something is in a branch, as XLA compiled it, and its size."""
    computations = re.split(r"^}", program, flags=re.MULTILINE)
    branches = set(re.findall(r"%([\w.-]+)", " ".join(re.findall(r"_computations?=[^=]*", program))))
    for text in computations:
        name = re.search(r"^(?:ENTRY )?%([\w.-]+) \(", text, flags=re.MULTILINE)
        for size in COLLECTIVE.findall(text):
            yield name[1] in branches, int(size or 1)


def test_steps_exchange_nothing_but_where_a_phase_ends(monkeypatch):
    """All that a program of training exchanges is in the branch for the end of a phase."""
    found, jaxpr_of = [], CompiledStep.jaxpr

    def noted(self, *arguments):
        found.extend(collectives(self.lower(*arguments).compile().as_text()))
        return jaxpr_of(self, *arguments)

    monkeypatch.setattr(CompiledStep, "jaxpr", noted)
    layers = lambda: [*normal(), keras.layers.Dropout(0.1)]  # noqa: E731
    for sync in (LocalUpdates(8, outer), LocalUpdates(8, outer, fragments=3), None):
        found.clear()
        fitted(compiled(sync, middle=layers), rows=32)
        assert {in_branch for in_branch, _ in found} == {sync is not None}
        if sync is not None:
            # Of 1242 numbers 1024 are one weight. The program of the epoch's end has the same exchanges.
            assert {size for _, size in found} == ({1278} if sync.fragments == 1 else {1024, 160, 94})


# --- what is seen outside of the steps ----------------------------------------------------------------


def test_callbacks_files_and_validation_see_the_outer_weights(trained):
    model, before, seen, history, validated = trained
    expected = [before[0]] * 5 + [seen.weights[5]] * 6 + [seen.weights[11]] * 5
    for found, wanted in zip(seen.weights, expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert np.abs(seen.weights[5] - before[0]).max() > 1e-3
    # The epoch's end ends the phase before validation.
    assert np.abs(seen.at_end - seen.weights[-1]).max() > 1e-3
    np.testing.assert_array_equal(seen.at_end, model.get_weights()[0])
    exact = model.evaluate(*validated, verbose=0, return_dict=True, batch_size=32)
    assert history["val_loss"][0] == pytest.approx(exact["loss"], rel=1e-6)
    # The file holds a plain model, with the first replica's slots.
    loaded = keras.models.load_model(seen.path)
    np.testing.assert_array_equal(loaded.get_weights()[0], seen.weights[5])
    assert [v.shape for v in loaded.optimizer.variables[2:4]] == [(64, 16)] * 2
    assert np.abs(np.asarray(loaded.optimizer.variables[2])).max() > 0


def test_metrics_and_moving_statistics_are_those_of_all_replicas():
    """Zero learning rates: every number is that of synchronous training, whatever a phase is."""
    found = compiled(LocalUpdates(7), K.SGD(0.0), middle=normal)
    wanted = compiled(None, K.SGD(0.0), middle=normal)
    # The last batch has 3 rows, which all replicas compute, and which count once.
    history, exact = fitted(found, 2, 515), fitted(wanted, 2, 515)
    for name in ("loss", "accuracy"):
        np.testing.assert_allclose(history[name], exact[name], rtol=1e-5)
    assert_same_weights(found.get_weights(), wanted.get_weights(), rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
def test_rows_that_never_divide_are_computed_by_all(caplog):
    model = compiled(LocalUpdates(4), K.SGD(0.1))
    found = fitted(model, rows=90, batch_size=15)
    exact = fitted(compiled(None, K.SGD(0.1), replicas=1), rows=90, batch_size=15)
    np.testing.assert_allclose(found["loss"], exact["loss"], rtol=1e-5)
    assert "15 rows does not divide over 2 replicas, which train apart" in caplog.text


# --- checkpoints --------------------------------------------------------------------------------------


def state_of(model):
    return [np.asarray(v) for v in [*model.variables, *model.optimizer.variables]]


def assert_same_bits(one, other):
    for a, b in zip(state_of(one), state_of(other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_checkpoint_holds_slots_of_all_replicas_and_the_outer_optimizer(tmp_path):
    model, other = compiled(LocalUpdates(6, outer)), compiled(LocalUpdates(6, outer))
    fitted(model)
    path = Checkpoint(model=model).write(str(tmp_path / "checkpoint"))
    Checkpoint(model=other).restore(path)
    assert fitted(model) == fitted(other)
    assert_same_bits(model, other)
    # With more replicas each new one continues from the slots of an old one.
    more = compiled(LocalUpdates(6, outer), replicas=4)
    Checkpoint(model=more).restore(path)
    slot = next(v for v in more.optimizer.variables if v.name.endswith("momentum"))
    rows = np.asarray(slot)
    assert rows.shape == (4, 64, 16)
    np.testing.assert_array_equal(rows[:2], rows[2:])
    assert np.abs(rows[0] - rows[1]).max() > 0


class Stop(Exception):
    """Raised in place of a failure."""


class Fails(keras.callbacks.Callback):
    """Fails within a phase."""

    def on_train_batch_end(self, batch, logs=None):
        if self.model.optimizer.iterations == 27:
            raise Stop


@pytest.mark.parametrize(("fragments", "save_freq"), [(1, 3), (2, "epoch")])
def test_a_run_that_resumes_has_the_same_bits(tmp_path, fragments, save_freq):
    """Backups wait for the end of a phase, and change nothing of what is trained."""
    backup = lambda freq: BackupAndRestore(str(tmp_path), save_freq=freq)  # noqa: E731
    new = lambda: compiled(LocalUpdates(5, outer, fragments=fragments), middle=normal)  # noqa: E731
    with pytest.raises(Stop):
        fitted(new(), 3, callbacks=[backup(save_freq), Fails()])
    resumed, whole = new(), new()
    assert fitted(resumed, 3, callbacks=[backup(save_freq)]) == fitted(whole, 3)
    assert_same_bits(resumed, whole)


def test_a_file_of_keras_has_one_row_from_which_all_replicas_continue(trained, tmp_path):
    path = str(tmp_path / "file.keras")
    trained.model.save(path)
    with strategy_with(LocalUpdates(6, outer)).scope():
        other = keras.models.load_model(path)
    slots = [
        np.asarray(next(v for v in m.optimizer.variables if v.name.endswith("momentum")))
        for m in (trained.model, other)
    ]
    np.testing.assert_array_equal(slots[1], np.broadcast_to(slots[0][0], slots[0].shape))


# --- what does not go together ------------------------------------------------------------------------


def test_arguments_are_checked():
    with pytest.raises(unisono.InvalidArgumentError, match=r"`every` must be a number of steps.*every=0"):
        LocalUpdates(0)
    for fragments in (0, 3, 1.5):
        with pytest.raises(unisono.InvalidArgumentError, match=rf"from 1 to `every`.*={fragments}, every=2"):
            LocalUpdates(2, fragments=fragments)
    with pytest.raises(unisono.InvalidTypeError, match=r"`outer_optimizer` must be .*'sgd'"):
        LocalUpdates(2, "sgd")
    with pytest.raises(unisono.InvalidTypeError, match=r"`sync` must be a `LocalUpdates`. Received: sync=8"):
        strategy_with(8)
    for options in ({"state_layout": "sharded"}, {"cross_device_ops": unisono.CompressedAllReduce()}):
        with pytest.raises(
            unisono.InvalidArgumentError, match=r"must hold its whole state.*LocalUpdates\(2\)"
        ):
            strategy_with(LocalUpdates(2), **options)
    assert repr(LocalUpdates(3, outer)) == "LocalUpdates(3, outer_optimizer=...)"


def test_what_cannot_train_apart_is_rejected():
    for change, text in (
        ({"optimizer": K.Adam(use_ema=True)}, "use_ema"),
        ({"optimizer": K.LossScaleOptimizer(K.SGD())}, "mixed_bfloat16"),
    ):
        with pytest.raises(unisono.InvalidArgumentError, match=text):
            fitted(compiled(LocalUpdates(2), **change))
    with pytest.raises(unisono.InvalidArgumentError, match=r"fragments=5\) for 4 weights"):
        fitted(compiled(LocalUpdates(5, fragments=5)))
    one = outer()
    with pytest.raises(unisono.InvalidArgumentError, match=r"makes a new one at each call.*sgd"):
        fitted(compiled(LocalUpdates(5, lambda: one, fragments=2)))
    model = compiled(LocalUpdates(2))
    model.run_eagerly = True
    with pytest.raises(unisono.InvalidArgumentError, match="must be compiled"):
        fitted(model)


def test_a_custom_loop_is_told_what_to_do():
    strategy = strategy_with(LocalUpdates(2))
    with strategy.scope():
        weight, optimizer = keras.Variable(1.0), K.Adam()

    def step():
        with unisono.GradientTape() as tape:
            loss = weight**2
        optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])

    with pytest.raises(unisono.ContextError, match=r"must be trained by `fit`.*strategy.run"):
        strategy.run(step)
