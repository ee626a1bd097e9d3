"""Checkpoints, backups and evaluations in object stores: what is seen is complete, whatever has happened."""

import contextlib
import importlib.util
import logging
import os
import re
import tempfile
from pathlib import Path

import fsspec
import keras
import numpy as np
import pytest
from tests.object_stores import object_store, objects

import unisono
from unisono import (
    CheckpointError,
    CheckpointUnreadableError,
    InvalidArgumentError,
    MissingPackageError,
    UnsupportedError,
)
from unisono._summary import _event_files
from unisono._system._object_store import StorePath, place_of
from unisono.callbacks import BackupAndRestore
from unisono.checkpoint import (
    Checkpoint,
    CheckpointManager,
    latest_checkpoint,
    list_variables,
    mark_finished,
)
from unisono.checkpoint.commits import _commits, _uploads

_DATA = "data-0123abcd/facts.json"


@pytest.fixture(scope="module", params=["s3", "gs", "memory"])
def bucket(request):
    """The address of a bucket on a real server, or in a store that the library has no line for."""
    with object_store(request.param) as address:
        yield address


@pytest.fixture(scope="module")
def s3():
    """For what does not depend on the store."""
    with object_store("s3") as address:
        yield address


@pytest.fixture
def run(s3, request):
    """A directory that is empty."""
    return f"{s3}/{request.node.name.replace('[', '-').rstrip(']')}"


def put(address, content=b"x"):
    """Write an object, as another process does."""
    scheme, _, key = address.partition("://")
    fsspec.filesystem(scheme, use_listings_cache=False).pipe_file(key, content)


def commits(address):
    """The names of directories that hold objects."""
    return sorted({name.split("/")[0] for name in objects(address) if "/" in name})


def saved(run, *values):
    """A checkpoint of one variable that was saved with these values."""
    checkpoint = Checkpoint(v=keras.Variable(0.0))
    for value in values:
        checkpoint.v.assign(value)
        checkpoint.save(f"{run}/ckpt")
    return checkpoint


def test_what_is_saved_is_restored_and_replaced_and_copied(bucket, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = f"{bucket}/one"
    assert latest_checkpoint(run) is None
    checkpoint = saved(run, 3.0, 4.0)
    assert latest_checkpoint(run) == f"{run}/ckpt-2"
    assert list_variables(run) == [("v", [])]
    checkpoint.restore(f"{run}/ckpt-1")
    assert float(checkpoint.v.value) == 3.0
    # A commit at the same path takes the place of the one before, of which nothing is left.
    assert checkpoint.write(f"{run}/ckpt-2") == f"{run}/ckpt-2"
    checkpoint.v.assign(0.0)
    checkpoint.restore(f"{run}/ckpt-2")
    assert float(checkpoint.v.value) == 3.0
    assert len(objects(f"{run}/ckpt-2")) == 4
    assert os.listdir(tmp_path) == []
    # A copy that other programs have made is a checkpoint, too.
    scheme, _, key = run.partition("://")
    fsspec.filesystem(scheme, use_listings_cache=False).get(f"{key}/ckpt-1", str(tmp_path), recursive=True)
    checkpoint.v.assign(0.0)
    checkpoint.restore(tmp_path / "ckpt-1")
    assert float(checkpoint.v.value) == 3.0


def test_a_manager_keeps_the_newest_and_passes_over_what_is_damaged(bucket, caplog):
    run = f"{bucket}/kept"
    for name in ("ckpt-notes.txt", "ckpt-7.log/part", "other/ckpt-9/MANIFEST.json"):
        put(f"{run}/{name}")
    checkpoint = Checkpoint(v=keras.Variable(0.0))
    with CheckpointManager(checkpoint, run, max_to_keep=2) as manager:
        for value in (1.0, 2.0, 3.0):
            checkpoint.v.assign(value)
            manager.save()
        assert manager.checkpoints == [f"{run}/ckpt-2", f"{run}/ckpt-3"]
    assert commits(run) == ["ckpt-2", "ckpt-3", "ckpt-7.log", "other"]
    (data,) = [name for name in objects(f"{run}/ckpt-3") if name.endswith(".safetensors")]
    put(f"{run}/ckpt-3/{data}", b"cut")
    with CheckpointManager(checkpoint, run) as manager, caplog.at_level(logging.WARNING, logger="unisono"):
        assert manager.restore_or_initialize() == f"{run}/ckpt-2"
    assert "arrays.safetensors has 3 bytes instead of" in caplog.text
    assert float(checkpoint.v.value) == 2.0
    with pytest.raises(CheckpointError, match=rf"{run}/ckpt-3, where data-.*arrays.safetensors has 3 bytes"):
        checkpoint.restore(f"{run}/ckpt-3")


def test_checkpoints_of_some_hours_are_kept(run):
    checkpoint = Checkpoint(v=keras.Variable(0.0))
    with CheckpointManager(checkpoint, run, 1, keep_checkpoint_every_n_hours=0.0) as manager:
        # The store dates objects by the second, and the first may seem to be older than the manager.
        manager._began -= 1.0
        for _ in range(3):
            manager.save()
        assert manager.checkpoints == [f"{run}/ckpt-{n}" for n in (1, 2, 3)]
    assert ".ckpt.preserved" in objects(run)


def test_what_an_upload_has_left_is_not_seen_and_deleted_by_the_next_process(run):
    saved(run, 1.0)
    for name in (f"ckpt-2/{_DATA}", f"ckpt-11/{_DATA}", "ckpt-12/of the user", f"ckpt-1/{_DATA}"):
        put(f"{run}/{name}")
    assert latest_checkpoint(run) == f"{run}/ckpt-1"
    with CheckpointManager(Checkpoint(v=keras.Variable(2.0)), run) as manager:
        assert manager.checkpoints == [f"{run}/ckpt-1"]
        # A name that is there is not used again.
        assert manager.save() == f"{run}/ckpt-13"
    assert commits(run) == ["ckpt-1", "ckpt-12", "ckpt-13"]
    # Of a commit that is there everything is deleted with it.
    _commits.delete_commit(place_of(f"{run}/ckpt-1"))
    assert commits(run) == ["ckpt-12", "ckpt-13"]


def test_a_process_that_was_replaced_commits_and_deletes_nothing(run, monkeypatch):
    checkpoint = saved(run, 1.0, 2.0)
    before = objects(run)
    upload = StorePath.upload

    def interrupted(path, file):
        upload(path, file)
        # Another process begins, while this one is at it.
        put(f"{run}/.writer", b"process 4711 of another")

    monkeypatch.setattr(StorePath, "upload", interrupted)
    with pytest.raises(CheckpointError, match="process 4711 of another has begun to write after this one"):
        checkpoint.save(f"{run}/ckpt")
    assert objects(run) == before
    monkeypatch.undo()
    # Not a second time either, and it does not delete what its successor may need.
    with pytest.raises(CheckpointError, match="process 4711"):
        checkpoint.save(f"{run}/ckpt")
    with pytest.raises(CheckpointError, match="process 4711"):
        _commits.delete_commit(place_of(f"{run}/ckpt-1"))
    assert objects(run) == before


def test_a_process_that_was_replaced_sweeps_nothing(run):
    """It has claimed the directory, and not swept it yet, when its successor claims it and uploads."""
    _commits.check_place(place_of(run), writes=True)
    put(f"{run}/.writer", b"process 4711 of another")
    put(f"{run}/ckpt-1/{_DATA}")
    before = objects(run)
    with pytest.raises(CheckpointError, match="process 4711 of another has begun to write after this one"):
        saved(run, 1.0)
    assert objects(run) == before


def test_of_two_that_write_one_name_the_first_stays(run, monkeypatch):
    """The other one has looked for the name before, and read `.writer` before it was overwritten."""
    directory = place_of(run)

    def write(folder):
        (folder / "a").write_text("own")
        other = _uploads.make_manifest(folder)[1].encode()
        put(f"{run}/c-1/MANIFEST.json", other)

    with pytest.raises(CheckpointError, match=r"FileExistsError.*c-1"):
        _commits.write_commit(directory, "c-1", write)


def test_an_answer_that_was_lost_does_not_make_a_commit_fail(run, monkeypatch):
    write = StorePath.write_bytes

    def lost(path, content, **options):
        write(path, content, **options)
        if path.name == "MANIFEST.json":
            raise OSError("the connection was closed")

    monkeypatch.setattr(StorePath, "write_bytes", lost)
    saved(run, 5.0)
    assert latest_checkpoint(run) == f"{run}/ckpt-1"


def test_a_store_that_gives_back_other_bytes_is_noticed_by_the_first_save(run, monkeypatch):
    download = StorePath.download

    def damaged(path, file):
        download(path, file)
        file.write_bytes(file.read_bytes()[:-1] + b"?")

    monkeypatch.setattr(StorePath, "download", damaged)
    with pytest.raises(CheckpointUnreadableError, match="has other contents than were written"):
        saved(run, 1.0)
    assert objects(run) == [".writer"]


class _Stop(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise KeyboardInterrupt


def _fit(callbacks):
    keras.utils.set_random_seed(1)
    with unisono.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    x = np.arange(60, dtype="float32").reshape(20, 3) / 60
    history = model.fit(x, x[:, :1], epochs=4, batch_size=6, verbose=0, callbacks=callbacks)
    return model.get_weights(), history.history


def test_a_fit_that_was_ended_resumes_from_its_backup(bucket):
    run = f"{bucket}/fit"
    expected, history = _fit([])
    with pytest.raises(KeyboardInterrupt):
        _fit([BackupAndRestore(run), _Stop()])
    assert commits(run) == ["backup-1", "backup-2"]
    found, resumed = _fit([BackupAndRestore(run)])
    assert resumed == history
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert objects(run) == []


def test_an_evaluator_follows_a_bucket(run, tmp_path, capsys):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile("sgd", "mse")
    with CheckpointManager(Checkpoint(model=model), run) as manager:
        for step in (3, 8):
            manager.save(step)
    data = np.ones((4, 2)), np.ones(4)
    found = unisono.SidecarEvaluator(model, data, run, max_evaluations=1).start()
    assert found == [(8, {"loss": 1.0})]
    assert "evaluations-evaluator.json" in objects(run)
    model.optimizer.iterations.assign(9)
    model.save(tmp_path / "model-9.keras")
    put(f"{run}/model-9.keras", (tmp_path / "model-9.keras").read_bytes())
    mark_finished(run)
    # What was evaluated is known to the next one.
    found = unisono.SidecarEvaluator(model, data, run).start()
    assert found == [(9, {"loss": 1.0})]


def test_a_store_that_cannot_be_used_is_an_error_that_names_path_and_cause(s3):
    checkpoint = Checkpoint(v=keras.Variable(1.0))
    with pytest.raises(CheckpointError, match=r"no-such-bucket/run.*bucket does not exist"):
        CheckpointManager(checkpoint, "s3://no-such-bucket/run")
    with pytest.raises(CheckpointError, match=r"bucket does not exist: 's3://no-such-bucket/run'"):
        checkpoint.save("s3://no-such-bucket/run/ckpt")
    with pytest.raises(CheckpointError, match="A checkpoint must exist to be restored"):
        checkpoint.restore(f"{s3}/absent/ckpt-1")
    assert latest_checkpoint(f"{s3}/absent") is None
    with pytest.raises(CheckpointError, match="bucket does not exist"):
        latest_checkpoint("s3://no-such-bucket/run")


@pytest.mark.parametrize("address", ["s3://bucket//run", "gs://bucket/a/../run", "s3:///run/.", "s3:////"])
def test_parts_that_a_client_would_not_find_again_are_an_error(address):
    with pytest.raises(InvalidArgumentError, match=re.escape(repr(address))):
        place_of(address)


@pytest.mark.parametrize("address", [Path("s3://bucket/run"), "S3://bucket/run", "s3:/bucket/run"])
def test_what_is_nearly_an_address_is_an_error_with_the_address(address):
    with pytest.raises(
        InvalidArgumentError, match=rf"{re.escape(repr(address))}\. Write `'s3://bucket/run'`"
    ):
        place_of(address)


def test_an_address_without_a_bucket_is_an_error_with_one():
    with pytest.raises(InvalidArgumentError, match=r"Received: 's3://'\. Write `'s3://bucket/run-7'`"):
        place_of("s3://")


def test_a_store_that_does_not_answer_is_an_error_and_no_damage(run, monkeypatch):
    checkpoint = saved(run, 1.0)

    def closed(*args, **options):
        raise ConnectionError("nothing listens there")

    monkeypatch.setattr(fsspec.filesystem("s3", use_listings_cache=False), "get_file", closed)
    with pytest.raises(CheckpointError, match=r"must answer.*nothing listens there: .*/ckpt-1/data-"):
        checkpoint.restore(f"{run}/ckpt-1")
    with CheckpointManager(checkpoint, run) as manager:
        # Not "all damaged", and not a beginning from scratch.
        with pytest.raises(CheckpointError, match=r"must answer.*nothing listens there"):
            manager.restore_or_initialize()


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"s3://b/run.*s3fs.*unisono\[s3\]"):
        BackupAndRestore("s3://b/run")
    with pytest.raises(MissingPackageError, match=r"gs://b/run.*gcsfs.*unisono\[gcs\]"):
        place_of("gs://b/run")
    with pytest.raises(MissingPackageError, match=r"az://b/run.*package `fsspec`"):
        place_of("az://b/run")


@pytest.mark.skipif(importlib.util.find_spec("adlfs") is not None, reason="adlfs is installed")
def test_the_package_for_another_store_is_named():
    with pytest.raises(
        MissingPackageError, match=r"az://b/run.*Install adlfs.*Write: pip install adlfs"
    ) as e:
        BackupAndRestore("az://b/run")
    assert e.value.name == "adlfs"
    with pytest.raises(UnsupportedError, match=r"http://host/run"):
        place_of("http://host/run")


def test_a_full_disk_is_named_as_that_of_the_machine(run, monkeypatch):
    def full(folder):
        raise OSError(28, os.strerror(28))

    with pytest.raises(CheckpointError, match=r"a full one, at /.*, from where s3://"):
        _commits.write_commit(place_of(run), "c-1", full)


@pytest.mark.parametrize("strategy", [None, unisono.OneDeviceStrategy("cpu:0")])
def test_keras_saves_and_loads_models_there(run, strategy):
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((3, 2), "float32")
    expected = model.predict(x, verbose=0)
    model.save(f"{run}/model.keras")
    keras.saving.save_model(model, filepath=f"{run}/folder", zipped=False)
    model.save_weights(filepath=f"{run}/w.weights.h5")
    assert [name for name in objects(run) if "/" not in name] == ["model.keras", "w.weights.h5"]
    assert "folder/config.json" in objects(run)
    for loaded in (
        keras.models.load_model(f"{run}/model.keras"),
        keras.saving.load_model(filepath=f"{run}/folder"),
    ):
        np.testing.assert_array_equal(loaded.predict(x, verbose=0), expected)
    model.set_weights([np.zeros_like(w) for w in model.get_weights()])
    model.load_weights(f"{run}/w.weights.h5")
    np.testing.assert_array_equal(model.predict(x, verbose=0), expected)
    with pytest.raises(InvalidArgumentError, match=rf"{run}/model.keras, which exists"):
        model.save(f"{run}/model.keras", overwrite=False)


def test_tensorboard_writes_there(bucket):
    run = f"{bucket}/logs"
    table = keras.layers.Embedding(5, 2, name="words")
    model = keras.Sequential([keras.Input((1,)), table, keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((8, 1), "float32")
    seen = []
    at_end = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(read_scalars(run)))
    board = unisono.callbacks.TensorBoard(run, profile_batch=1, embeddings_freq=1)
    model.fit(x, x, batch_size=4, epochs=2, verbose=0, validation_data=(x, x), callbacks=[board, at_end])
    names = objects(run)
    assert {"projector_config.pbtxt", "embeddings/words.tsv"} <= set(names)
    assert [name for name in names if name.endswith(".xplane.pb")]
    # It is there while training runs.
    assert [sorted(found) for found in seen] == [[0], [0, 1]]
    assert {"epoch_loss", "epoch_learning_rate"} <= set(read_scalars(run)[1])


def read_scalars(run):
    """The scalars of the training's event file."""
    (name,) = objects(f"{run}/train")
    with tempfile.TemporaryDirectory() as folder:
        place_of(f"{run}/train/{name}").download(Path(folder) / name)
        return _event_files.read_scalars(folder)


def test_a_log_that_cannot_be_written_is_named(run, monkeypatch, caplog):
    with pytest.raises(
        InvalidArgumentError, match=r"can be made and written.*s3://no-such-bucket.*not exist"
    ):
        unisono.summary.create_file_writer("s3://no-such-bucket/logs")
    writer = unisono.summary.create_file_writer(run)
    with monkeypatch.context() as patch:
        patch.setattr(StorePath, "write_bytes", lambda *args: (_ for _ in ()).throw(OSError("no answer")))
        writer.write("scalar", "loss", 1, np.float32(2.0))
        writer.flush()
    assert "could not be written. no answer" in caplog.text
    writer.close()
    (name,) = objects(run)
    assert b"loss" in place_of(f"{run}/{name}").read_bytes()


def test_exported_models_lie_there(bucket):
    run = f"{bucket}/exported"
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    x = np.ones((3, 2), "float32")
    expected = model.predict(x, verbose=0)
    put(f"{run}/served/of the last time")
    with pytest.raises(InvalidArgumentError, match=rf"one with 'manifest.json'.*{run}/served"):
        unisono.export.export(model, f"{run}/served")
    place_of(f"{run}/served/of the last time").unlink()
    for _ in range(2):
        path = unisono.export.export(model, f"{run}/served")
        np.testing.assert_allclose(unisono.export.load(path)(x), expected, rtol=1e-6)
        # What another artefact had besides is not there after the next one.
        put(f"{run}/served/old")
    assert str(path) == f"{run}/served"
    unisono.export.export(model, f"{run}/model.keras")
    np.testing.assert_array_equal(
        keras.models.load_model(f"{run}/model.keras").predict(x, verbose=0), expected
    )
    unisono.export.export_saved_model(model, f"{run}/whole")
    loaded = unisono.export.load_from_saved_model(f"{run}/whole")
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), expected)
    unisono.export.export(model, f"{run}/served")
    assert "served/old" not in objects(run)


def test_modules_lie_there(run):
    from unisono import tf

    class Scale(tf.Module):
        def __init__(self):
            self.factor = tf.Variable(3.0)

        @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
        def __call__(self, x):
            return x * self.factor

    tf.saved_model.save(Scale(), run)
    assert float(tf.saved_model.load(run)(np.ones(2, "float32"))[1]) == 3.0


def test_data_is_saved_and_cached_there(bucket):
    Dataset = unisono.data.Dataset
    run, made = f"{bucket}/data", []

    def counted():
        made.append(1)
        yield from (1, 2, 3)

    data = Dataset.from_generator(counted, output_signature=unisono.data.TensorSpec((), "int32"))
    with pytest.raises(InvalidArgumentError, match="needs a directory that save wrote"):
        Dataset.load(f"{run}/saved")
    data.save(f"{run}/saved")
    assert [int(x) for x in Dataset.load(f"{run}/saved")] == [1, 2, 3]
    cached = data.cache(f"{run}/cache")
    next(iter(cached))
    # Not before it is complete.
    assert [name for name in objects(run) if "saved" not in name] == []
    for _ in range(2):
        assert [int(x) for x in cached] == [1, 2, 3]
    count = len(made)
    assert [int(x) for x in data.cache(f"{run}/cache")] == [1, 2, 3]
    assert len(made) == count
    assert [name for name in objects(run) if "saved" not in name] == ["cache"]


def test_an_estimator_has_its_directory_there(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x, y = np.arange(12, dtype="float32").reshape(6, 2), np.ones((6, 1), "float32")

    def model_fn(features, labels, mode):
        output = keras.layers.Dense(1)(features["x"])
        if mode == unisono.estimator.ModeKeys.PREDICT:
            return unisono.estimator.EstimatorSpec(mode, {"output": output})
        loss = keras.ops.mean((output - labels) ** 2)
        train_op = unisono.estimator.train.GradientDescentOptimizer(0.001).minimize(loss)
        return unisono.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    def estimator():
        return unisono.estimator.Estimator(model_fn, run)

    estimator().train(lambda: ({"x": x}, y), steps=2)
    again = estimator()
    assert again.latest_checkpoint() == f"{run}/model.ckpt-2"
    again.train(lambda: ({"x": x}, y), max_steps=3)
    assert again.evaluate(lambda: ({"x": x}, y), steps=1)["global_step"] == 3
    receiver = unisono.estimator.build_raw_serving_input_receiver_fn({"x": x[:1]})
    exporter = unisono.estimator.LatestExporter("served", receiver, exports_to_keep=1)
    for _ in range(2):
        where = exporter.export(again, f"{run}/export/served", again.latest_checkpoint(), {}, False)
    found = unisono.export.load(where)({"x": x})["output"]
    predicted = [p["output"] for p in again.predict(lambda: iter([({"x": x}, None)]))]
    np.testing.assert_allclose(found, predicted, rtol=1e-5)
    assert {name.split("/")[2] for name in objects(run) if name.startswith("export/")} == {
        where.rpartition("/")[2]
    }
    assert os.listdir(tmp_path) == []
