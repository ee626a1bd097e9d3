"""The tutorial on five strategies: `fit`, a custom loop, fine-tuning, and its wrong example.

Its clusters are in tests/cluster/test_seed_programs.py.
"""

import re

import numpy as np
import pytest

import unisono
from tests.virtual.seeds import strategies_tutorial as tutorial
from tests.virtual.seeds.programs import run

#: Fewer than the eight virtual devices, which would take turns on the cores.
TWO = {"MirroredStrategy()": 'MirroredStrategy(["cpu:0", "cpu:1"])'}
FIT = tutorial.DEVICES + tutorial.MODEL + tutorial.FIT


def test_fit(monkeypatch, tmp_path, capsys):
    names = run(FIT, monkeypatch, tmp_path, TWO)
    output = capsys.readouterr().out
    assert "Num GPUs Available: 0\nNumber of devices: 2\n" in output
    # 512 images by 64 for each of two devices.
    assert "Epoch 5/5" in output
    assert "4/4" in output
    assert f"Evaluation accuracy: {names['eval_accuracy']:.3f}" in output
    assert names["eval_accuracy"] > 0.7


def test_a_tpu_follows_the_same_pattern(monkeypatch, tmp_path, capsys):
    devices = {"TPUClusterResolver()": 'TPUClusterResolver(devices=["cpu:0", "cpu:1"])'}
    names = run(
        tutorial.DEVICES + tutorial.TPU + tutorial.MODEL + tutorial.FIT,
        monkeypatch,
        tmp_path,
        {**devices, "epochs=5": "epochs=1"},
    )
    assert "Number of TPU devices: 2" in capsys.readouterr().out
    assert isinstance(names["strategy"], unisono.TPUStrategy)
    assert len(names["strategy"].experimental_local_results(names["model"].weights[0])) == 2


def test_a_custom_loop(monkeypatch, tmp_path, capsys):
    """With prefetched batches, and twice with the same seeds."""
    program = tutorial.SEEDS + tutorial.CUSTOM_LOOP
    dataset = "dist_dataset = strategy"
    sizes = {**TWO, "epochs = 5": "epochs = 3", dataset: tutorial.PREFETCH.strip() + "\n" + dataset}
    outputs = []
    for _ in range(2):
        run(program, monkeypatch, tmp_path, sizes)
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert re.search(r"^Epoch 1, Step 0, Loss: 2\.\d{4}$", outputs[0], re.MULTILINE)
    ends = re.findall(r"Epoch \d, Loss: (\S+), Accuracy: (\S+)", outputs[0])
    losses, accuracies = zip(*((float(a), float(b)) for a, b in ends), strict=True)
    assert losses[0] > losses[1] > losses[2]
    assert accuracies[2] > 0.7


@pytest.mark.exhaustive  # `examples/transfer_learning.py` runs in every `make test`, with a smaller base
def test_transfer_learning_with_resnet(monkeypatch, tmp_path):
    names = run(
        tutorial.TRANSFER_LEARNING,
        monkeypatch,
        tmp_path,
        {
            **TWO,
            "weights='imagenet'": "weights=None",
            "(224, 224": "(32, 32",
            "32 *": "4 *",
            "epochs=5": "epochs=1",
        },
    )
    base = names["base_model"]
    for start, frozen in zip(names["start"], names["frozen"], strict=True):
        np.testing.assert_array_equal(start, frozen)
    for head, kept in zip(names["head"], names["kept"], strict=True):
        np.testing.assert_array_equal(head, kept)
    # The last ten layers are trained, statistics among them, and no other one.
    tuned = {w.path for layer in base.layers[-10:] for w in layer.weights}
    assert len(tuned) > 10
    for before, weight in zip(names["frozen"], base.weights, strict=True):
        assert np.array_equal(before, weight.numpy()) == (weight.path not in tuned), weight.path


def test_the_wrong_example_is_an_error_and_the_right_one_trains(monkeypatch, tmp_path):
    start = tutorial.SEEDS + tutorial.CREATE_MODEL
    with pytest.raises(unisono.ScopeError, match="created outside of the scope"):
        run(start + tutorial.TOO_LATE, monkeypatch, tmp_path)
    data = "train_dataset = tf.data.Dataset.from_tensor_slices((np.ones((8, 2)), np.ones((8, 1)))).batch(8)\n"
    names = run(
        start + tutorial.IN_TIME + data + tutorial.CHECKPOINTS,
        monkeypatch,
        tmp_path,
        {**TWO, "/tmp/checkpoint": str(tmp_path / "checkpoint")},
    )
    # With the ending that Keras 3 demands.
    assert (tmp_path / "checkpoint.weights.h5").is_file()
    assert int(names["model"].optimizer.iterations.numpy()) == 1


def test_mixed_precision(monkeypatch, tmp_path):
    """The first exercise: the example with MNIST."""
    import keras

    try:
        names = run(tutorial.MIXED_PRECISION + FIT, monkeypatch, tmp_path, {**TWO, "epochs=5": "epochs=2"})
    finally:
        keras.config.set_dtype_policy("float32")
    model = names["model"]
    assert {layer.compute_dtype for layer in model.layers} == {"float16"}
    assert {weight.dtype for weight in model.weights} == {"float32"}
    assert type(model.optimizer).__name__ == "LossScaleOptimizer"
    assert names["eval_accuracy"] > 0.4
