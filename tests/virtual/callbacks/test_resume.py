"""A program that is started again with other data or other arguments: noticed, and said."""

import contextlib
import itertools
import re
import shutil

import keras
import numpy as np
import pytest

import unisono
from unisono import CheckpointMismatchError
from unisono.callbacks import BackupAndRestore
from unisono.callbacks._counting_train_function import mute
from unisono.data import Dataset
from unisono.training.groups._batch_policy import Mode


class Stop(keras.callbacks.Callback):
    """Ends a run as a failure would, after some batches of all."""

    def __init__(self, after):
        super().__init__()
        # An iterator: what cannot be kept in a backup.
        self._left = iter(range(after - 1))

    def on_train_batch_end(self, batch, logs=None):
        if next(self._left, None) is None:
            raise InterruptedError


ROWS = np.random.default_rng(0).normal(size=(40, 2)).astype("float32")


class Sequence(keras.utils.PyDataset):
    def __init__(self, x):
        super().__init__()
        self.x = x

    @property
    def num_batches(self):
        return 5

    def __getitem__(self, i):
        rows = self.x[8 * i : 8 * i + 8]
        return rows, rows[:, :1]


def arrays(x):
    return {"x": x, "y": x[:, :1], "batch_size": 8}


def weighted(x):
    return {"x": ROWS, "y": ROWS[:, :1], "batch_size": 8, "sample_weight": np.abs(x[:, 1])}


def dataset(x):
    return {"x": Dataset.from_tensor_slices((x, x[:, :1])).shuffle(40, seed=1).batch(8)}


def endless(x):
    return {"x": Dataset.from_tensor_slices((x, x[:, :1])).batch(8).repeat(), "steps_per_epoch": 4}


def unknown_size(x):
    return {"x": Dataset.from_tensor_slices((x, x[:, :1])).filter(lambda x, y: True).batch(8)}


def sequence(x):
    return {"x": Sequence(x)}


def in_order(x):
    return {"x": Sequence(x), "shuffle": False}


def generator(x):
    return {"x": (Sequence(x)[i % 5] for i in itertools.count()), "steps_per_epoch": 5, "shuffle": False}


def fit(directory, data, callbacks=(), save_freq=2, seed=0):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    backup = BackupAndRestore(directory, save_freq=save_freq)
    return model.fit(**data, epochs=3, verbose=0, callbacks=[*callbacks, backup])


def interrupted(directory, data, after, callbacks=(), **kwargs):
    with pytest.raises(InterruptedError):
        fit(directory, data, [*callbacks, Stop(after)], **kwargs)


#: A data set of unknown size ends with Keras' warning.
pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")

KINDS = [arrays, weighted, dataset, endless, unknown_size, sequence, in_order, generator]


@pytest.mark.parametrize(("save_freq", "after"), [(2, 4), ("epoch", 8)])
@pytest.mark.parametrize("make", KINDS)
def test_other_data_of_the_same_shape_are_noticed(tmp_path, caplog, make, save_freq, after):
    first, second = tmp_path / "first", tmp_path / "second"
    interrupted(first, make(ROWS), after, save_freq=save_freq)
    shutil.copytree(first, second)
    if make in (sequence, in_order, generator):
        # They may draw random numbers of their own.
        fit(first, make(ROWS + 1), [Stop(99)], save_freq=save_freq)
        assert "is not the one that was trained before" in caplog.text
    else:
        with pytest.raises(CheckpointMismatchError, match=r"same shapes with other values|another first"):
            fit(first, make(ROWS + 1), [Stop(99)], save_freq=save_freq)
    caplog.clear()
    fit(second, make(ROWS), [Stop(99)], save_freq=save_freq)
    assert caplog.text == ""


def test_data_sets_that_draw_random_numbers_of_their_own_go_on_with_a_warning(tmp_path, caplog):
    generator = np.random.default_rng()

    def make(x):
        noisy = Dataset.from_tensor_slices((x, x[:, :1])).map(lambda x, y: (x + generator.normal(), y))
        return {"x": noisy.batch(8)}

    interrupted(tmp_path, make(ROWS), 8)
    fit(tmp_path, make(ROWS), [Stop(99)])
    assert "is not the one that was trained before" in caplog.text


def test_arguments_of_callbacks_are_the_programs(tmp_path, caplog):
    def early(patience):
        return keras.callbacks.EarlyStopping("loss", patience=patience, start_from_epoch=9)

    interrupted(tmp_path, arrays(ROWS), 12, callbacks=[early(3)])
    callback = early(50)
    fit(tmp_path, arrays(ROWS), [callback, Stop(99)])
    assert callback.patience == 50
    assert (
        "EarlyStopping continues with the argument of the program: patience=50, in the backup 3."
        in caplog.text
    )


def test_other_callbacks_begin_anew(tmp_path, caplog):
    interrupted(tmp_path, arrays(ROWS), 12, callbacks=[keras.callbacks.TerminateOnNaN()])
    early = keras.callbacks.EarlyStopping("loss", patience=50)
    assert fit(tmp_path, arrays(ROWS), [early]).epoch == [0, 1, 2]
    assert "which start without one: keras.src.callbacks.early_stopping.EarlyStopping." in caplog.text
    assert "which this `fit` lacks: keras.src.callbacks.terminate_on_nan.TerminateOnNaN, " in caplog.text


def test_a_callback_that_is_gone_is_named_alone(tmp_path, caplog):
    interrupted(tmp_path, arrays(ROWS), 12, callbacks=[keras.callbacks.TerminateOnNaN()])
    fit(tmp_path, arrays(ROWS), [Stop(99)])
    assert "which this `fit` lacks: keras.src.callbacks.terminate_on_nan.TerminateOnNaN." in caplog.text
    assert "start without one" not in caplog.text


def test_hooks_of_a_lambda_callback_are_called_again_after_it_was_mute():
    seen = []
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    unmute = mute([callback])
    callback.on_train_batch_end(0, {})
    unmute()
    callback.on_train_batch_end(1, {})
    assert seen == [1]


class Notes(keras.callbacks.Callback):
    """Notes what it sees; a backup has it."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_epoch_begin(self, epoch, logs=None):
        self.seen.append(epoch)

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(float(logs["loss"]))

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append({name: float(value) for name, value in logs.items()})


SHARED = {
    # Five batches: epochs of two, two and one.
    "arrays": lambda: {"x": ROWS, "y": ROWS[:, :1], "batch_size": 8, "steps_per_epoch": 2},
    # Four batches, of 32 rows, because the others are for validation.
    "split": lambda: {
        "x": ROWS,
        "y": ROWS[:, :1],
        "batch_size": 8,
        "steps_per_epoch": 2,
        "validation_split": 0.2,
    },
    "sequence": lambda: {"x": Sequence(ROWS), "steps_per_epoch": 2},
    "dataset": lambda: {**dataset(ROWS), "steps_per_epoch": 2},
    # As many steps as there are batches, and one more.
    "whole": lambda: {"x": ROWS, "y": ROWS[:, :1], "steps_per_epoch": 4},
    "too many": lambda: {**dataset(ROWS), "steps_per_epoch": 6},
}


@pytest.mark.parametrize(
    ("name", "replicas"),
    [
        ("arrays", 0),
        ("arrays", 2),
        ("split", 0),
        ("sequence", 2),
        ("dataset", 2),
        ("whole", 0),
        ("too many", 2),
    ],
)
def test_epochs_that_share_an_iteration_over_their_data(tmp_path, capsys, name, replicas):
    """A run that was ended after any batch has the bits, the logs and the validations of another."""
    make = SHARED[name]
    keras.utils.set_random_seed(1)
    devices = [f"cpu:{i}" for i in range(replicas)]
    with unisono.MirroredStrategy(devices).scope() if replicas else contextlib.nullcontext():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1), keras.layers.Dropout(0.5)])
        model.compile("adam", "mse")
    # Built, so that each run begins with the same state.
    model.fit(ROWS[:8], ROWS[:8, :1], verbose=0)
    start = [v.numpy() for v in model.variables + model.optimizer.variables]

    def run(directory, after, save_freq, verbose=0):
        for variable, value in zip(model.variables + model.optimizer.variables, start, strict=True):
            variable.assign(value)
        keras.utils.set_random_seed(1)
        begun = []
        notes = Notes()
        note = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: begun.append(epoch + 1))
        data = {"validation_data": (ROWS[:9], ROWS[:9, :1]), "validation_freq": 2, **make()}
        if "validation_split" in data:
            del data["validation_data"]
        backup = BackupAndRestore(directory, save_freq=save_freq, asynchronous=False)
        with pytest.raises(InterruptedError) if after < 99 else contextlib.nullcontext():
            model.fit(**data, epochs=5, verbose=verbose, callbacks=[notes, note, backup, Stop(after)])
        return notes.seen, model.get_weights(), begun

    expected, weights, _ = run(tmp_path / "whole", 99, "epoch")
    for after, save_freq in [(3, 1), (4, 1), (6, 1), (7, "epoch")]:
        directory = tmp_path / str(after)
        run(directory, after, save_freq)
        capsys.readouterr()
        seen, found, begun = run(directory, 99, save_freq, verbose=1)
        assert seen == expected
        for a, b in zip(found, weights, strict=True):
            np.testing.assert_array_equal(a, b)
        # None of the epochs before the backup; of the one in which it was made, the rest.
        shown = [int(n) for n in re.findall(r"Epoch (\d)/5", capsys.readouterr().out)]
        assert shown == list(range(shown[0], 6))
        assert begun in (shown, shown[1:])
        assert len(begun) < 5


def test_a_program_may_have_another_number_of_steps_that_fits(tmp_path):
    def run(directory, steps, save_freq="epoch", stop=(), units=1):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(units)])
        model.compile("adam", "mse", steps_per_execution=steps)
        # While one is being written in the background, the next would wait for an odd batch.
        backup = BackupAndRestore(directory, save_freq=save_freq, asynchronous=False)
        with pytest.raises(InterruptedError) if stop else contextlib.nullcontext():
            model.fit(**arrays(ROWS[:32]), steps_per_epoch=4, epochs=3, verbose=0, callbacks=[backup, *stop])
        return model.get_weights()

    expected = run(tmp_path / "whole", 1)
    for save_freq in ("epoch", 2):
        run(tmp_path / str(save_freq), 1, save_freq, [Stop(7)])
        for a, b in zip(run(tmp_path / str(save_freq), 2, save_freq), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
    run(tmp_path / "other", 1, 1, [Stop(7)])
    with pytest.raises(CheckpointMismatchError, match="steps_per_execution=4"):
        run(tmp_path / "other", 4, 4)
    # Of another model: a `fit` restores no parts.
    with pytest.raises(
        CheckpointMismatchError, match=r"bias has shape \(3,\)[^`]*, or delete .*other to start"
    ):
        run(tmp_path / "other", 1, 1, units=3)


def test_steps_of_an_epoch_in_data_of_unknown_size_are_an_error(tmp_path):
    class Endless(Sequence):
        num_batches = None

    with pytest.raises(unisono.InvalidArgumentError, match="known where an epoch begins"):
        fit(tmp_path, {"x": Endless(ROWS), "steps_per_epoch": 2})


class TrainsItself(keras.callbacks.Callback):
    """Trains on other batches after the second batch of an epoch."""

    is_busy = False

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1 and not self.is_busy:
            self.is_busy = True
            self.model.fit(ROWS[:8], ROWS[:8, :1], batch_size=4, verbose=0)
            self.model.train_on_batch(ROWS[:4], ROWS[:4, :1])
            self.is_busy = False


def test_batches_of_a_fit_within_fit_are_not_those_of_the_run(tmp_path):
    def trained(after):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        others = [TrainsItself(), BackupAndRestore(tmp_path, save_freq=2), Stop(after)]
        model.fit(**arrays(ROWS), shuffle=False, epochs=2, verbose=0, callbacks=others)
        return model

    expected = trained(99)
    with pytest.raises(InterruptedError):
        # Two batches, three within, and one more.
        trained(6)
    found = trained(99)
    assert int(found.optimizer.iterations) == int(expected.optimizer.iterations) == 16
    np.testing.assert_array_equal(found.layers[0].kernel, expected.layers[0].kernel)


class SetsRate(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.1 / (1 + int(self.model.optimizer.iterations))


def test_what_a_callback_sets_after_a_batch_is_in_the_backup(tmp_path):
    def rates(after):
        history = []
        note = keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs: history.append(float(note.model.optimizer.learning_rate))
        )
        fit(tmp_path, arrays(ROWS), [SetsRate(), note, Stop(after)])
        return history

    expected = rates(99)
    interrupted(tmp_path, arrays(ROWS), 3, [SetsRate(), keras.callbacks.LambdaCallback()])
    np.testing.assert_array_equal(rates(99), expected[2:])


@pytest.mark.parametrize(("rows", "size"), [(13, 5), (11, 4)])
def test_a_run_that_resumes_before_a_ragged_last_batch_has_the_bits_of_another(tmp_path, rows, size):
    """It takes this batch for what it is, and not for one of the usual size."""
    x = np.random.default_rng(0).normal(size=(rows, 33)).astype("float32")

    def weights(after):
        keras.utils.set_random_seed(0)
        with unisono.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
            model = keras.Sequential(
                [keras.Input((33,)), keras.layers.Dense(64, "tanh"), keras.layers.Dense(1)]
            )
            model.compile("adam", "mse")
        backup = BackupAndRestore(tmp_path, save_freq=2)
        model.fit(x, x[:, :1], batch_size=size, epochs=2, verbose=0, callbacks=[backup, Stop(after)])
        modes = {key.mode for key in model.train_function._programs}
        assert modes == {Mode.WHOLE, Mode.PADDED if size % 2 else Mode.SPLIT}
        return model.get_weights()

    expected = weights(99)
    with pytest.raises(InterruptedError):
        weights(3)
    for a, b in zip(weights(99), expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("save_freq", [7, "epoch"])
@pytest.mark.parametrize("make", [arrays, sequence])
@pytest.mark.parametrize("seed", [0, 1])
def test_batches_come_in_the_order_of_a_run_that_began_late(tmp_path, caplog, make, save_freq, seed):
    """Since 3.16 Keras takes as seed how many epochs `fit` has done, counted from `initial_epoch`."""
    data = {**make(ROWS), "initial_epoch": 1}
    expected = fit(tmp_path / "whole", data, [Stop(99)], save_freq, seed)
    interrupted(tmp_path, data, 9, save_freq=save_freq, seed=seed)
    resumed = fit(tmp_path, data, [Stop(99)], save_freq, seed)
    assert resumed.history == expected.history
    assert caplog.text == ""
