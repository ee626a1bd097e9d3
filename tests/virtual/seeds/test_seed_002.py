"""The Keras tutorial of TensorFlow 2.0: callbacks, checkpoints, export."""

import os
import re

import pytest

from tests.virtual.seeds import documents
from tests.virtual.seeds.programs import run
from unisono import tf

#: Sizes.
SMALL = {
    "BATCH_SIZE_PER_REPLICA = 64": "BATCH_SIZE_PER_REPLICA = 16",
    "epochs=10": "epochs=3",
    "epoch < 3": "epoch < 1",
    "epoch >= 3 and epoch < 7": "epoch >= 1 and epoch < 2",
}


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_the_keras_tutorial(monkeypatch, tmp_path, capsys):
    names = run(documents.KERAS_TUTORIAL, monkeypatch, tmp_path, SMALL)
    output = capsys.readouterr().out
    count = names["strategy"].num_replicas_in_sync
    assert count > 1
    assert f"Number of devices: {count}\n" in output
    assert (names["num_train_examples"], names["num_test_examples"]) == (512, 128)
    # A batch is the global one.
    assert f"{512 // (16 * count)}/{512 // (16 * count)}" in output
    rates = re.findall(r"Learning rate for epoch (\d) is (\S+)", output)
    assert [(int(epoch), round(float(rate), 9)) for epoch, rate in rates] == [(1, 1e-3), (2, 1e-4), (3, 1e-5)]
    # With the ending that Keras 3 demands.
    files = [f"ckpt_{epoch}.weights.h5" for epoch in (1, 2, 3)]
    assert sorted(os.listdir(tmp_path / "training_checkpoints")) == files
    assert tf.train.latest_checkpoint("training_checkpoints").endswith(files[-1])
    assert list((tmp_path / "logs").rglob("events.out.tfevents.*"))
    # The trained model, the one loaded without the scope and the one loaded with it.
    evaluated = re.findall(r"Eval loss: (\S+), Eval Accuracy: (\S+)", output)
    first, *others = [[round(float(x), 4) for x in pair] for pair in evaluated]
    assert others == [first, first]
    for name, copies in (("unreplicated_model", 1), ("replicated_model", count)):
        kernel = names[name].layers[0].kernel
        assert len(names["strategy"].experimental_local_results(kernel)) == copies
