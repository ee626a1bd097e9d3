"""The `TensorBoard` callback: its files say what Keras' History says."""

import glob
import sys
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
from tests.event_files import read, scalars
from tests.support import count_host_reads

import unisono
from unisono import summary
from unisono.callbacks import TensorBoard

L = keras.layers


def data(rows=12):
    x = np.linspace(0, 1, rows * 4, dtype="f4").reshape(rows, 4)
    return x, (x.sum(-1, keepdims=True) > 2).astype("f4")


def build(*layers, replicas=2, **compile_with):
    keras.utils.set_random_seed(3)
    strategy = unisono.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), *layers, L.Dense(3), L.Dense(1, activation="sigmoid")])
        model.compile(**{"optimizer": "adam", "loss": "mse", "metrics": ["accuracy"], **compile_with})
    return model


def fit(model, callback, epochs=2, rows=12, **kwargs):
    x, y = data(rows)
    kwargs = {"batch_size": 4, "verbose": 0, "shuffle": False, "validation_data": (x[:4], y[:4]), **kwargs}
    return model.fit(x, y, epochs=epochs, callbacks=[callback], **kwargs).history


class Batches(keras.callbacks.Callback):
    """The numbers of each batch, as Keras gives them to callbacks."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(float(logs["loss"]))


def test_the_files_say_what_the_history_says(tmp_path):
    model = build()
    history = fit(model, TensorBoard(tmp_path), epochs=3)
    for key, values in history.items():
        part = "validation" if key.startswith("val_") else "train"
        found = scalars(tmp_path / part, f"epoch_{key.removeprefix('val_')}")
        assert [s for s, _ in found] == [0, 1, 2]
        np.testing.assert_allclose([v for _, v in found], values, rtol=1e-6)
    rate = float(model.optimizer.learning_rate)
    assert scalars(tmp_path / "train", "epoch_learning_rate") == [(i, rate) for i in range(3)]
    by_iteration = scalars(tmp_path / "validation", "evaluation_loss_vs_iterations")
    assert [s for s, _ in by_iteration] == [3, 6, 9]
    np.testing.assert_allclose([v for _, v in by_iteration], history["val_loss"], rtol=1e-6)
    assert set(read(tmp_path / "train")[0]) == {"epoch_loss", "epoch_accuracy", "epoch_learning_rate"}
    assert "tensorflow" not in sys.modules


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("update_freq", ["epoch", "batch", 1, 2, 100])
def test_batches(tmp_path, update_freq, replicas):
    model, batches = build(replicas=replicas), Batches()
    x, y = data()
    callbacks = [TensorBoard(tmp_path, update_freq=update_freq), batches]
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, shuffle=False, callbacks=callbacks)
    every = {"epoch": 1000, "batch": 1}.get(update_freq, update_freq)
    expected = [(i, v) for i, v in enumerate(batches.losses, 1) if i % every == 0]
    found = scalars(tmp_path / "train", "batch_loss")
    assert [s for s, _ in found] == [s for s, _ in expected]
    np.testing.assert_allclose([v for _, v in found], [v for _, v in expected], rtol=1e-6)
    assert len(scalars(tmp_path / "train", "batch_accuracy")) == len(expected)


def test_data_of_unknown_size_and_several_steps_in_one_program(tmp_path):
    model = build(steps_per_execution=2)
    x, y = data(20)
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[TensorBoard(tmp_path / "a", update_freq=2)])
    assert [s for s, _ in scalars(tmp_path / "a" / "train", "batch_loss")] == [2, 4, 7, 9, 10]
    model = build()
    batches = (data(4) for _ in range(5))
    with warnings.catch_warnings():
        # Of data that end where Keras did not know it; not after Keras 3.15.
        warnings.filterwarnings("ignore", "Your input ran out of data")
        model.fit(batches, verbose=0, shuffle=False, callbacks=[TensorBoard(tmp_path / "b", update_freq=1)])
    assert [s for s, _ in scalars(tmp_path / "b" / "train", "batch_loss")] == [1, 2, 3, 4, 5]


def test_the_callback_does_not_hold_up_the_devices(tmp_path):
    """Keras reads logs in another thread where every callback allows it."""

    def reads(rows, *callbacks):
        model = build()
        x, y = data(rows)
        with count_host_reads() as counted:
            model.fit(x, y, batch_size=4, verbose=0, callbacks=list(callbacks))
        # Waiting for a program that has more behind it holds no device up.
        return sum(name != "block_until_ready" for name in counted)

    def callback():
        return TensorBoard(tmp_path, update_freq=2)

    assert reads(80, callback()) - reads(40, callback()) == reads(80) - reads(40)
    assert TensorBoard(tmp_path).async_safe
    assert TensorBoard(tmp_path, update_freq=10).async_safe
    assert not TensorBoard(tmp_path, profile_batch=2).async_safe


def test_weights_as_histograms_and_images(tmp_path):
    model = build()
    fit(model, TensorBoard(tmp_path, histogram_freq=2, write_images=True), epochs=3)
    values, plugins = read(tmp_path / "train")
    paths = [w.path for w in model.weights]
    assert len(paths) == 4
    for path in paths:
        assert plugins[f"{path}/histogram"] == "histograms"
        assert [s for s, _ in values[f"{path}/histogram"]] == [0, 2]
    assert sum(plugin == "images" for plugin in plugins.values()) == 3  # One bias is a single number.
    last = values[f"{paths[0]}/histogram"][-1][1]
    kernel = model.get_weights()[0]
    assert last[:, 2].sum() == kernel.size
    np.testing.assert_allclose((last[0, 0], last[-1, 1]), (kernel.min(), kernel.max()), rtol=1e-6)


def test_speed_and_graph(tmp_path):
    fit(build(), TensorBoard(tmp_path, write_steps_per_second=True, write_graph=True, update_freq=1))
    values, plugins = read(tmp_path / "train")
    assert plugins["keras"] == "graph_keras_model"
    assert all(v > 0 for _, v in values["epoch_steps_per_second"])
    assert len(values["batch_steps_per_second"]) == 6


def test_tensorboard_draws_the_graph(tmp_path):
    import json

    from tensorboard.plugins.graph.keras_util import keras_model_to_graph_def

    fit(build(), TensorBoard(tmp_path, write_graph=True))
    text = read(tmp_path / "train")[0]["keras"][0][1].item()
    assert len(keras_model_to_graph_def(json.loads(text)).node) == 3


def test_embeddings_for_the_projector(tmp_path):
    from google.protobuf import text_format
    from tensorboard.plugins.projector.projector_config_pb2 import ProjectorConfig

    strategy = unisono.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), L.Embedding(5, 3), L.Flatten(), L.Dense(1)])
        model.compile("sgd", "mse")
    fit(model, TensorBoard(tmp_path, embeddings_freq=1), epochs=1)
    config = text_format.Parse((tmp_path / "projector_config.pbtxt").read_text(), ProjectorConfig())
    (entry,) = config.embeddings
    found = np.loadtxt(tmp_path / entry.tensor_path, delimiter="\t")
    np.testing.assert_allclose(found, model.layers[0].get_weights()[0], rtol=1e-6)


@pytest.mark.parametrize(("profile_batch", "first", "last"), [("2", 2, 2), ((2, 5), 2, 5)])
def test_a_profile_is_a_trace_file(tmp_path, monkeypatch, profile_batch, first, last):
    callback = TensorBoard(tmp_path, profile_batch=profile_batch)
    seen = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen.append(callback._profile._is_running)

    x, y = data()
    build().fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[callback, Watch()])
    assert seen == [first <= step <= last for step in range(1, 7)]
    assert glob.glob(str(tmp_path / "plugins" / "profile" / "*" / "*.xplane.pb"))


def test_a_profile_ends_with_training(tmp_path):
    fit(build(), TensorBoard(tmp_path, profile_batch=(2, 100)), epochs=1)
    assert glob.glob(str(tmp_path / "plugins" / "profile" / "*" / "*.xplane.pb"))


class Watched(L.Layer):
    def call(self, x):
        summary.scalar("watched", keras.ops.max(x))
        return x


def test_summaries_in_layers(tmp_path):
    model = build(Watched())
    for name in ("a", "b"):  # The program is compiled once and its values follow the callback.
        fit(model, TensorBoard(tmp_path / name, update_freq=2), epochs=2, rows=16)
        found = scalars(tmp_path / name / "train", "watched")
        assert [s for s, _ in found] == [2, 4, 6, 8]
        maxima = data(16)[0].reshape(4, -1).max(-1)
        assert all(v <= maxima[(s - 1) % 4] for s, v in found)
        assert [s for s, _ in scalars(tmp_path / name / "validation", "watched")] == [2]
    assert model.train_function.num_programs == 1
    fit(model, TensorBoard(tmp_path / "c"), epochs=1)
    assert scalars(tmp_path / "c" / "train", "watched") == []


def test_evaluate_alone(tmp_path):
    model = build()
    x, y = data()
    loss, _ = model.evaluate(x, y, batch_size=4, verbose=0, callbacks=[TensorBoard(tmp_path)])
    assert scalars(tmp_path / "validation", "evaluation_loss_vs_iterations") == [(0, np.float32(loss))]


def test_a_failed_fit_leaves_no_default_writer_to_the_next(tmp_path):
    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyError

    model, callback = build(), TensorBoard(tmp_path, update_freq=1)
    x, y = data()
    with pytest.raises(KeyError):
        model.fit(x, y, verbose=0, callbacks=[callback, Fail()])
    fit(model, callback, epochs=1)
    assert not summary.scalar("x", 1.0, step=1)
    assert [s for s, _ in scalars(tmp_path / "train", "epoch_loss")] == [0]


def test_two_callbacks(tmp_path):
    model = build(Watched())
    x, y = data()
    pair = [TensorBoard(tmp_path / name, update_freq=1) for name in "ab"]
    model.fit(x, y, batch_size=4, verbose=0, callbacks=pair)
    assert not summary.scalar("x", 1.0, step=1)
    for name, watched in (("a", 0), ("b", 3)):
        assert len(scalars(tmp_path / name / "train", "batch_loss")) == 3
        assert len(scalars(tmp_path / name / "train", "watched")) == watched


def test_only_the_chief_writes(tmp_path, monkeypatch):
    monkeypatch.setattr("unisono.callbacks._tensorboard.is_chief", lambda: False)
    wanted = {"histogram_freq": 1, "embeddings_freq": 1, "update_freq": 1, "profile_batch": 2}
    history = fit(build(Watched()), TensorBoard(tmp_path / "logs", write_graph=True, **wanted))
    assert len(history["loss"]) == 2
    assert not (tmp_path / "logs").exists()


def test_plain_keras_models_too(tmp_path):
    model = keras.Sequential([keras.Input((4,)), L.Dense(1)])
    model.compile("sgd", "mse")
    history = fit(model, TensorBoard(Path(tmp_path), update_freq="batch"))
    found = scalars(tmp_path / "train", "epoch_loss")
    np.testing.assert_allclose([v for _, v in found], history["loss"], rtol=1e-6)


ARGUMENTS = {
    "update_freq": [0, -1, "step", 1.5, True],
    "histogram_freq": [-1, 0.5, "epoch"],
    "embeddings_freq": [-1, None],
    "profile_batch": [-1, (5, 2), (0, 2), (1, 2, 3), "10;20", 1.5],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in ARGUMENTS.items() for v in values])
def test_arguments_are_checked(name, value):
    with pytest.raises(unisono.InvalidArgumentError, match=f"Received: {name}="):
        TensorBoard(**{name: value})


def test_the_map():
    assert unisono.callbacks.__all__ == sorted(set(unisono.callbacks.__all__))
    assert all(getattr(unisono.callbacks, name) is not None for name in unisono.callbacks.__all__)
    with pytest.raises(AttributeError, match="TensorBord"):
        unisono.callbacks.TensorBord  # noqa: B018
