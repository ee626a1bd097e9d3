"""Checkpoints under every strategy: saved under one, restored under another or none."""

import contextlib
import logging
import shutil
import socket
import types

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from tests.virtual.training._digits import crossentropy, digits, mirrored

import unisono
from unisono import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointUnreadableError,
    InvalidArgumentError,
    InvalidTypeError,
)
from unisono.checkpoint import (
    Checkpoint,
    CheckpointManager,
    _arrays,
    _safetensors,
    _series,
    latest_checkpoint,
    list_variables,
    load_checkpoint,
)
from unisono.checkpoint._series import read_snapshot, write_snapshot
from unisono.checkpoint._snapshot import Snapshot
from unisono.checkpoint.commits._manifests import MANIFEST, make_manifest
from unisono.data import Dataset

L = keras.layers

STRATEGIES = {
    "none": lambda: None,
    "one": lambda: unisono.OneDeviceStrategy("cpu:0"),
    "mirrored 2": lambda: mirrored(2),
    "mirrored 3": lambda: mirrored(3),
    "central": lambda: unisono.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0"),
    "central, host": lambda: unisono.CentralStorageStrategy(["cpu:0", "cpu:1"], "host"),
}


def made(strategy, seed, units=16):
    keras.utils.set_random_seed(seed)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                L.Dense(units, activation="relu"),
                L.Dropout(0.2),
                L.BatchNormalization(),
                L.Dense(10),
            ]
        )
        model.compile("adam", crossentropy(), metrics=["accuracy"])
    return model


def fit(model, **kwargs):
    x, y = digits()
    return model.fit(x[:96], y[:96], batch_size=48, shuffle=False, verbose=0, **kwargs).history


def state(model):
    return [v.numpy() for v in (*model.variables, *model.optimizer.variables)]


def assert_same(a, b):
    for x, y in zip(state(a), state(b), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A trained model of each strategy and its checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoints")
    found = {}
    for name in ("none", "mirrored 2", "central, host"):
        model = made(STRATEGIES[name](), 1)
        fit(model)
        found[name] = model, Checkpoint(model=model).save(folder / name)
    return found


@pytest.mark.parametrize("restored_under", STRATEGIES)
@pytest.mark.parametrize("saved_under", ["none", "mirrored 2", "central, host"])
def test_what_was_saved_under_one_strategy_is_restored_under_another(trained, saved_under, restored_under):
    original, path = trained[saved_under]
    model = made(STRATEGIES[restored_under](), 2)
    assert Checkpoint(model=model).restore(path) == {}
    assert_same(model, original)
    fit(model)


def test_training_goes_on_as_if_it_had_not_been_interrupted(tmp_path):
    whole, first = made(mirrored(2), 1), made(mirrored(2), 1)
    fit(whole, epochs=3)
    fit(first, epochs=1)
    path = Checkpoint(model=first).save(tmp_path / "c")
    second = made(mirrored(2), 9)
    Checkpoint(model=second).restore(path)
    fit(second, epochs=3, initial_epoch=1)
    assert_same(second, whole)


def test_saving_does_not_disturb_training_and_sees_one_moment(tmp_path):
    """The next step donates the arrays that are being written."""
    disturbed, plain = made(mirrored(2), 1), made(mirrored(2), 1)
    with CheckpointManager(Checkpoint(model=disturbed), tmp_path, max_to_keep=2) as manager:
        moments = []
        for _ in range(4):
            fit(disturbed)
            moments.append(state(disturbed))
            manager.save()
            fit(plain)
    assert_same(disturbed, plain)
    assert [p.rsplit("-")[-1] for p in manager.checkpoints] == ["3", "4"]
    for number, moment in ((3, moments[2]), (4, moments[3])):
        model = made(None, 5)
        Checkpoint(model=model).restore(tmp_path / f"ckpt-{number}")
        for a, b in zip(state(model), moment, strict=True):
            np.testing.assert_array_equal(a, b)


def test_every_difference_is_named_and_nothing_is_restored(trained):
    _, path = trained["mirrored 2"]
    keras.utils.set_random_seed(3)
    other = keras.Sequential([keras.Input((64,)), L.Dense(8), L.Dense(10), L.Dense(3, name="head")])
    other.compile("sgd", "mse")
    before = state(other)
    with pytest.raises(CheckpointMismatchError) as error:
        Checkpoint(model=other).restore(path)
    text = str(error.value)
    for line in (
        "missing in the checkpoint: model/weights/head/kernel",
        "only in the checkpoint: model/weights/batch_normalization/gamma",
        "model/weights/dense/kernel has shape (64, 8), in the checkpoint (64, 16)",
        "only in the checkpoint: model/optimizer/dense/kernel/momentum",
        "Nothing was restored",
    ):
        assert line in text
    for a, b in zip(before, state(other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_another_dtype_is_a_difference(trained):
    original, path = trained["none"]

    def half(layer):
        return type(layer).from_config(layer.get_config() | {"dtype": "bfloat16"})

    model = keras.models.clone_model(original, clone_function=half)
    with pytest.raises(CheckpointMismatchError, match="has dtype bfloat16, in the checkpoint float32"):
        Checkpoint(model=model).restore(path)


def test_a_part_alone_must_be_asked_for(trained):
    original, path = trained["none"]
    keras.utils.set_random_seed(3)
    model = keras.Sequential.from_config(original.get_config())
    with pytest.raises(CheckpointMismatchError, match="only in the checkpoint: model/optimizer/iteration"):
        Checkpoint(model=model).restore(path)
    Checkpoint(model=model).restore(path, parts=["model/weights"])
    for a, b in zip(model.get_weights(), original.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_tutorials_way_with_the_optimizer_named_apart(tmp_path):
    model = made(mirrored(2), 1)
    fit(model)
    path = Checkpoint(optimizer=model.optimizer, model=model).save(tmp_path / "c")
    again = made(mirrored(2), 2)
    again.optimizer.build(again.trainable_variables)
    Checkpoint(optimizer=again.optimizer, model=again).restore(path)
    assert_same(again, model)


def test_iterators_values_metrics_and_steps_travel_together(tmp_path):
    def pipeline():
        return Dataset.range(100).shuffle(50, seed=4).batch(7).repeat()

    iterator, step = iter(pipeline()), keras.Variable(3, dtype="int32")
    metric = keras.metrics.Mean()
    metric.update_state([1.0, 4.0])
    params = {"w": jnp.arange(4.0), "n": 2}
    for _ in range(20):
        next(iterator)
    path = Checkpoint(step=step, data=iterator, metrics=[metric], params=params).save(tmp_path / "c")
    expected = [next(iterator).tolist() for _ in range(5)]
    later, counter, mean = iter(pipeline()), keras.Variable(0, dtype="int32"), keras.metrics.Mean()
    values = Checkpoint(step=counter, data=later, metrics=[mean], params=None).restore(path)
    assert [next(later).tolist() for _ in range(5)] == expected
    assert int(counter.value) == 3
    assert float(mean.result()) == 2.5
    np.testing.assert_array_equal(values["params"]["w"], np.arange(4.0))
    assert int(values["params"]["n"]) == 2


ON_READ = unisono.VariableSynchronization.ON_READ


@pytest.mark.parametrize(
    ("aggregation", "copies", "restored"),
    [
        ("SUM", [3.0, 4.0], [3.5, 3.5]),
        ("MEAN", [3.0, 4.0], [3.5, 3.5]),
        ("ONLY_FIRST_REPLICA", [3.0, 4.0], [3.0, 3.0]),
    ],
)
def test_variables_with_a_copy_for_each_replica_have_one_value_in_a_checkpoint(
    tmp_path, aggregation, copies, restored
):
    """tf.distribute: a sum is saved as the sum, and restored as its parts."""

    def variable(replicas):
        strategy = mirrored(replicas)
        with strategy.scope():
            v = unisono.Variable(
                0.0, synchronization=ON_READ, aggregation=unisono.VariableAggregation[aggregation]
            )
        return strategy, v

    strategy, v = variable(2)
    strategy.run(lambda x: v.assign(x[0]), args=(unisono.PerReplica([np.float32([c]) for c in copies]),))
    path = Checkpoint(v=v).save(tmp_path / "c")
    _, again = variable(2)
    Checkpoint(v=again).restore(path)
    assert [float(c) for c in again.values] == restored
    _, three = variable(3)
    Checkpoint(v=three).restore(path)
    np.testing.assert_allclose(float(three.value), float(v.value), rtol=1e-6)


def test_copies_without_an_aggregation_come_back_one_by_one(tmp_path):
    def variable(replicas):
        strategy = mirrored(replicas)
        with strategy.scope():
            return strategy, unisono.Variable(0.0, aggregation=unisono.VariableAggregation.NONE)

    strategy, v = variable(2)
    strategy.run(lambda x: v.assign(x[0]), args=(unisono.PerReplica([np.float32([1]), np.float32([2])]),))
    path = Checkpoint(v=v).save(tmp_path / "c")
    other, again = variable(2)
    other.run(lambda x: again.assign(x[0]), args=(unisono.PerReplica([np.float32([0]), np.float32([0])]),))
    Checkpoint(v=again).restore(path)
    assert [float(c) for c in again.values] == [1, 2]


@pytest.mark.parametrize("synchronization", ["on_write", "on_read"])
def test_copies_that_differ_and_variables_of_one_value(tmp_path, synchronization):
    """As in TensorFlow: the first copy for one value, and one value for each copy."""
    two, three = mirrored(2), mirrored(3)
    options = {"aggregation": "none", "synchronization": synchronization}

    def variable(strategy=None):
        with contextlib.nullcontext() if strategy is None else strategy.scope():
            return unisono.Variable([0.0, 0.0], **options)

    def assign(v, *values):
        of_each = unisono.PerReplica([np.float32([[x, -x]]) for x in values])
        two.run(lambda x: v.assign(x[0]), args=(of_each,))

    v = variable(two)
    assign(v, 1, 2)
    apart = Checkpoint(v=v).save(tmp_path / "apart")
    for plain in (keras.Variable([0.0, 0.0]), variable(), variable(mirrored(1))):
        Checkpoint(v=plain).restore(apart)
        np.testing.assert_array_equal(plain.value, [1, -1])
    # Before the first step that gives it copies.
    again = variable(two)
    Checkpoint(v=again).restore(apart)
    np.testing.assert_array_equal(two.run(lambda: again.value * 2).values, [[2, -2], [4, -4]])
    one = Checkpoint(v=plain).save(tmp_path / "one")
    Checkpoint(v=again).restore(one)
    np.testing.assert_array_equal(again.values, [[1, -1], [1, -1]])
    with pytest.raises(CheckpointMismatchError, match=r"v has shape \(3, 2\), in the checkpoint \(2, 2\)"):
        Checkpoint(v=variable(three)).restore(apart)
    # Copies are not taken for an array of that shape, nor one for copies.
    with pytest.raises(CheckpointMismatchError, match=r"\(2, 2\), in the checkpoint \(2,\)"):
        Checkpoint(v=keras.Variable(np.zeros((2, 2), "f4"))).restore(apart)
    whole = Checkpoint(v=keras.Variable(np.zeros((2, 2), "f4"))).save(tmp_path / "whole")
    with pytest.raises(CheckpointMismatchError, match=r"\(2,\), in the checkpoint \(2, 2\)"):
        Checkpoint(v=keras.Variable([0.0, 0.0])).restore(whole)


def test_a_manager_falls_back_and_says_so(tmp_path, caplog):
    model = made(mirrored(2), 1)
    with CheckpointManager(Checkpoint(model=model), tmp_path) as manager:
        fit(model)
        manager.save(7)
        good = state(model)
        fit(model)
        manager.save(9)
    for file in (tmp_path / "ckpt-9").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:-3])
    later = made(mirrored(2), 2)
    with CheckpointManager(Checkpoint(model=later), tmp_path) as manager:
        assert manager.restore_or_initialize() == str(tmp_path / "ckpt-7")
    assert "ckpt-9" in caplog.text
    for a, b in zip(state(later), good, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_manager_gives_no_number_twice_and_deletes_what_dead_writers_left(tmp_path):
    left = tmp_path / f".ckpt-1.{socket.gethostname()}@{2**30}.00000000.partial"
    left.mkdir()
    with CheckpointManager(Checkpoint(step=keras.Variable(1)), tmp_path) as manager:
        assert not left.exists()
        manager.save()
        manager.wait()
        shutil.rmtree(tmp_path / "ckpt-1")
        assert manager.save() == str(tmp_path / "ckpt-2")


def test_a_manager_without_checkpoints_initializes(tmp_path):
    called = []
    step = keras.Variable(1)
    with CheckpointManager(Checkpoint(step=step), tmp_path, init_fn=lambda: called.append(1)) as manager:
        assert manager.restore_or_initialize() is None
        assert manager.latest_checkpoint is None
    assert called == [1]


def test_errors_of_the_thread_are_raised_by_the_next_call(tmp_path):
    step = keras.Variable(1)
    manager = CheckpointManager(Checkpoint(step=step), tmp_path)
    manager.save(1)
    manager.wait()
    (tmp_path / "ckpt-2").mkdir()
    manager.save(2)
    with pytest.raises(CheckpointError, match="ckpt-2, which exists"):
        manager.wait()
    manager.close()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Checkpoint().save("x"), "Received: no objects"),
        (lambda: CheckpointManager(Checkpoint(a=1), "x", max_to_keep=0), "Received: max_to_keep=0"),
        (lambda: Checkpoint(model=keras.Sequential([L.Dense(1)])).save("x"), "which is not built"),
        (lambda: Checkpoint(half=types.SimpleNamespace(get_state=dict)).save("x"), "SimpleNamespace at half"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises((InvalidArgumentError, InvalidTypeError), match=message):
        make()


def test_a_manager_of_what_is_no_directory(tmp_path):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match="need a directory that can be read and written"):
            CheckpointManager(Checkpoint(step=keras.Variable(1)), place)


def test_restoring_what_is_not_there():
    with pytest.raises(CheckpointError, match="where there is no directory"):
        Checkpoint(step=keras.Variable(1)).restore("/tmp/unisono-not-there")


def test_a_snapshot_takes_one_copy_of_what_lies_on_every_device():
    model = made(mirrored(4), 1)
    fit(model)
    for value in jax.tree.leaves(dict(Checkpoint(model=model)._snapshot().arrays)):
        assert len(value.devices()) == 1


def test_save_appends_the_number_and_write_does_not(tmp_path):
    """As in TensorFlow."""
    checkpoint = Checkpoint(step=keras.Variable(1))
    paths = [checkpoint.save(tmp_path / "ckpt") for _ in range(2)]
    assert paths == [str(tmp_path / "ckpt-1"), str(tmp_path / "ckpt-2")]
    assert checkpoint.save_counter == 2
    assert checkpoint.write(tmp_path / "exact") == str(tmp_path / "exact")
    checkpoint.step.assign(5)
    checkpoint.write(tmp_path / "exact")
    other = Checkpoint(step=keras.Variable(0))
    other.restore(tmp_path / "exact")
    assert int(other.step) == 5
    (tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="folder, which exists"):
        checkpoint.write(tmp_path / "folder")
    # One that a process was replacing when it died has its name again.
    (tmp_path / "exact").rename(tmp_path / f".exact.{socket.gethostname()}@{2**30}.00000000.replaced")
    assert other.restore(tmp_path / "exact") is not None
    # Another program goes on counting.
    assert Checkpoint(step=keras.Variable(1)).save(tmp_path / "ckpt") == str(tmp_path / "ckpt-3")


def test_the_newest_checkpoint_of_a_directory(tmp_path):
    assert latest_checkpoint(tmp_path / "absent") is None
    assert latest_checkpoint(tmp_path) is None
    (tmp_path / "ckpt-99").mkdir()
    (tmp_path / "notes.txt").write_text("")
    assert latest_checkpoint(tmp_path) is None
    (tmp_path / "ckpt-99").rmdir()
    checkpoint = Checkpoint(step=keras.Variable(1))
    for _ in range(11):
        newest = checkpoint.save(tmp_path / "ckpt")
        assert latest_checkpoint(str(tmp_path)) == newest
    # What has a higher number and no manifest is not a complete one.
    (tmp_path / "ckpt-99").mkdir()
    assert latest_checkpoint(tmp_path) == newest
    (tmp_path / "ckpt-99").rmdir()
    exact = checkpoint.write(tmp_path / "exact")
    assert latest_checkpoint(tmp_path) == exact


def test_a_manager_waits_for_the_checkpoint_that_is_being_written(tmp_path):
    model = made(None, 1)
    with CheckpointManager(Checkpoint(model=model), tmp_path) as manager:
        for _ in range(3):
            path = manager.save()
            assert manager.latest_checkpoint == path
        newest = manager.save()
        # Also one that another object of this program began.
        assert latest_checkpoint(tmp_path) == newest
        newest = manager.save()
        other = CheckpointManager(Checkpoint(model=model), tmp_path)
        assert other.latest_checkpoint == newest
        assert manager.checkpoints[-1] == newest


def test_reading_without_the_objects(tmp_path):
    params = {"w": jnp.arange(3.0)}
    path = Checkpoint(v=keras.Variable([[1.0, 2.0]]), n=keras.Variable(7), params=params).save(tmp_path / "c")
    assert list_variables(path) == [("n", []), ("v", [1, 2])]
    reader = load_checkpoint(tmp_path)
    assert reader.get_variable_to_dtype_map()["n"] == np.int32
    assert reader.get_tensor("v").tolist() == [[1, 2]]
    assert not reader.has_tensor("w")
    with pytest.raises(CheckpointError, match="it has"):
        reader.get_tensor("w")


UNUSUAL = [
    "run[1]",
    "layers=[64,64]",
    "a*b",
    "q?",
    "back\\slash",
    "[!a]",
    "**",
    "gs:",
    "x\ny",
    "ünï",
    "\udcff",
]


def test_every_path_can_be_saved_to_and_restored_from(tmp_path):
    v = keras.Variable(3.0)
    for name in UNUSUAL:
        path = Checkpoint(v=v).save(tmp_path / name / f"ckpt {name}")
        with CheckpointManager(Checkpoint(v=v), tmp_path / name / "inner", checkpoint_name=name) as manager:
            saved = manager.save()
        for place in (path, saved):
            v.assign(0.0)
            Checkpoint(v=v).restore(place)
            assert float(v.value) == 3.0, name
        assert manager.restore_or_initialize() == saved
        assert latest_checkpoint(tmp_path / name) == path


def test_checkpoints_that_lack_their_root_file_are_read(tmp_path):
    """Earlier versions wrote them below paths with `[`, where Orbax found no store to join."""
    v, w = keras.Variable(3.0), keras.Variable([1.0, 2.0])
    path = Checkpoint(v=v, w=w).save(tmp_path / "c")
    state = tmp_path / "c-1" / "arrays" / "state"
    (state / "manifest.ocdbt").unlink()
    shutil.rmtree(state / "d")
    (tmp_path / "c-1" / "MANIFEST.json").unlink()
    (tmp_path / "c-1" / MANIFEST).write_text(make_manifest(tmp_path / "c-1")[1])
    v.assign(0.0)
    w.assign([0.0, 0.0])
    Checkpoint(v=v, w=w).restore(path)
    assert float(v.value) == 3.0
    assert w.numpy().tolist() == [1, 2]


@pytest.mark.parametrize("broken", ["unreadable", "other values"])
def test_a_first_save_that_cannot_be_read_back_fails(tmp_path, monkeypatch, caplog, broken):
    def load(folder):
        if broken == "unreadable":
            raise CheckpointError("no such array")
        return {"v": np.float32(4)}

    v = keras.Variable(3.0)
    monkeypatch.setattr(_series, "load_arrays", load)
    with pytest.raises(CheckpointUnreadableError, match="must be readable after it was written"):
        Checkpoint(v=v).save(tmp_path / "c")
    manager = CheckpointManager(Checkpoint(v=v), tmp_path)
    manager.save()
    with pytest.raises(CheckpointUnreadableError):
        manager.close()
    assert list(tmp_path.iterdir()) == []
    model = made(None, 1)
    backup = unisono.callbacks.BackupAndRestore(tmp_path)
    fit(model, epochs=2, callbacks=[backup])
    assert backup.saved == 0
    # Training is worth more than a backup: each is read back, and said to be of no use.
    said = "could not be written, and training continues without it. A checkpoint must be readable after it"
    assert sum(said in text for text in caplog.messages) == 2


@pytest.mark.parametrize(("level", "is_told"), [("INFO", False), ("DEBUG", True)])
def test_orbax_tells_of_its_work_at_debug_alone(tmp_path, caplog, level, is_told):
    from orbax import checkpoint

    log = logging.getLogger("absl")
    with caplog.at_level(level, logger="absl"):
        _arrays.save_arrays(tmp_path, {"a": np.ones(2)})
        _arrays.load_arrays(tmp_path)
        assert bool(caplog.records) == is_told
        # What the user does with absl and Orbax is told as ever.
        log.info("of the user")
        checkpoint.PyTreeCheckpointHandler()
    assert len(caplog.records) >= 2


def test_arrays_in_one_file_and_those_that_it_cannot_hold(tmp_path):
    """Types that safetensors lacks are beside it, by Orbax; no type is lost."""
    arrays = {
        "a": np.arange(6, dtype="float32").reshape(2, 3),
        "b/[*]": np.array([1 + 2j]),
        "c": np.zeros((0, 3), "int8"),
        "d": np.float64(1.5),
    }
    path = write_snapshot(
        tmp_path, "one", Snapshot(arrays, {"states": {}, "values": {}}), read_back=True, in_one_file=True
    )
    assert list(_safetensors.load(path / "arrays.safetensors")) == ["a", "d"]
    found = read_snapshot(path).arrays
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize(("reason", "tries"), [("NOT_FOUND: state/d/a8925d", 2), ("INVALID_ARGUMENT", 1)])
def test_a_save_in_which_tensorstore_loses_a_file_is_repeated(tmp_path, monkeypatch, caplog, reason, tries):
    from unisono.checkpoint import _arrays

    save, calls = _arrays._save, []

    def fails_first(folder, arrays):
        calls.append(folder)
        if len(calls) == 1:
            left = folder.with_name("arrays.orbax-checkpoint-tmp")
            left.mkdir()
            (left / "part").write_text("half")
            raise ValueError(reason)
        save(folder, arrays)

    monkeypatch.setattr(_arrays, "_save", fails_first)
    if tries == 1:
        with pytest.raises(ValueError, match=reason):
            _arrays.save_arrays(tmp_path, {"w": np.ones(3, "f4")})
    else:
        _arrays.save_arrays(tmp_path, {"w": np.ones(3, "f4")})
        assert "once more" in caplog.text
        assert not list(tmp_path.glob("*tmp*"))
        np.testing.assert_array_equal(_arrays.load_arrays(tmp_path)["w"], np.ones(3))
    assert len(calls) == tries


def test_a_backup_needs_no_orbax(tmp_path, monkeypatch):
    """Where all types are common ones; Orbax takes 40 ms for a small model."""
    monkeypatch.setattr(_arrays, "_save", None)
    snapshot = Snapshot({"a": np.ones(3)}, {"states": {}, "values": {}})
    write_snapshot(tmp_path, "one", snapshot, read_back=True, in_one_file=True)
    assert not (tmp_path / "one" / "arrays").exists()
