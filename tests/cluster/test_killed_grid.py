"""Replicas of several devices go on after a worker was killed, with the bits of an undisturbed run."""

import re

import pytest

from tests.cluster.launch_support import launched

TRAIN = """
import hashlib
import keras
import numpy as np
import unisono

size, folder, kills = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "kill"
strategy = unisono.MultiWorkerMirroredStrategy(
    devices_per_replica=size,
    layout_map={".*up/kernel": (None, "model"), ".*up/bias": ("model",), ".*down/kernel": ("model", None)},
)
assert (strategy.mesh.processes_per_replica > 1) == (strategy.num_replicas_in_sync == 1)
keras.utils.set_random_seed(0)
with strategy.scope():
    model = keras.Sequential([
        keras.Input((8,)),
        keras.layers.Dense(32, activation="relu", name="up"),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(4, name="down"),
    ])
    model.compile(keras.optimizers.Adam(0.01), "mse")
x = np.random.default_rng(0).normal(size=(44, 8)).astype("float32")


class Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        # In the middle of the second epoch of six batches, the last of four rows.
        if kills and me == "worker:1" and generation == 0 and int(model.optimizer.iterations) >= 9:
            os.kill(os.getpid(), signal.SIGKILL)


backup = unisono.callbacks.BackupAndRestore(folder, save_freq=2, delete_checkpoint=False)
model.fit(x, x[:, :4], batch_size=8, epochs=3, verbose=0, callbacks=[backup, Kill()])
parts = [np.asarray(v).tobytes() for v in (*model.variables, *model.optimizer.variables)]
print("weights", hashlib.sha256(b"".join(parts)).hexdigest(), flush=True)
"""


def weights_of(folder, size, devices, kills):
    """Train on two workers, and return the digest of the weights that both have printed."""
    folder.mkdir()
    flags = ["--workers", "2", "--devices-per-worker", str(devices), "--max-restarts", "1"]
    args = [str(size), str(folder / "backup"), "kill" if kills else "no"]
    with launched(folder, TRAIN, *flags, args=args, forks=True) as run:
        assert run.end() == 0, run.err
        assert len(run.history("restart")) == kills
        assert "matches no variable" not in run.log("worker:0")
        found = {re.findall(r"^weights (\w+)$", run.log(f"worker:{i}"), re.MULTILINE)[-1] for i in range(2)}
    (weights,) = found
    return weights


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("devices", [pytest.param(2, id="in a process"), pytest.param(1, id="across two")])
def test_killed_within_an_epoch(tmp_path, devices):
    expected = weights_of(tmp_path / "undisturbed", 2, devices, kills=False)
    assert weights_of(tmp_path / "killed", 2, devices, kills=True) == expected
