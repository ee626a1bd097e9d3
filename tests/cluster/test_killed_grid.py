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
state_layout, apart = sys.argv[4], int(sys.argv[5])
outer = lambda: keras.optimizers.SGD(0.7, momentum=0.9)
strategy = unisono.MultiWorkerMirroredStrategy(
    sync=unisono.LocalUpdates(4, outer, fragments=2, overlap=1) if apart else None,
    devices_per_replica=size, state_layout=state_layout,
    layout_map={".*up/kernel": (None, "model"), ".*up/bias": ("model",), ".*down/kernel": ("model", None)},
)
processes = strategy.mesh.processes_per_replica
keras.utils.set_random_seed(0)
with strategy.scope():
    model = keras.Sequential([
        keras.Input((8,)),
        keras.layers.Dense(128, activation="relu", name="up"),
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
print("replicas", strategy.num_replicas_in_sync, "processes", processes)
print("weights", hashlib.sha256(b"".join(parts)).hexdigest(), flush=True)
"""


def weights_of(folder, workers, devices, layout, apart, kills):
    """Train on replicas of two devices; return the digest of the weights that all workers have printed."""
    folder.mkdir()
    flags = ["--workers", str(workers), "--devices-per-worker", str(devices), "--max-restarts", "1"]
    args = ["2", str(folder / "backup"), "kill" if kills else "no", layout, str(int(apart))]
    with launched(folder, TRAIN, *flags, args=args, forks=True) as run:
        assert run.end() == 0, run.err
        assert len(run.history("restart")) == kills
        logs = [run.log(f"worker:{i}") for i in range(workers)]
    assert "matches no variable" not in logs[0]
    assert f"replicas {workers * devices // 2} processes {max(1, 2 // devices)}" in logs[0]
    (weights,) = {re.findall(r"^weights (\w+)$", log, re.MULTILINE)[-1] for log in logs}
    return weights


@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("workers", "devices", "layout", "apart"),
    [
        pytest.param(2, 2, "mirrored", False, id="in a process"),
        pytest.param(2, 1, "mirrored", False, id="across two"),
        pytest.param(4, 1, "sharded", False, id="two across two each, sharded"),
        pytest.param(4, 1, "fully_sharded", False, id="two across two each, fully sharded"),
        pytest.param(4, 1, "mirrored", True, id="two across two each, apart"),
    ],
)
def test_killed_within_an_epoch(tmp_path, workers, devices, layout, apart):
    expected = weights_of(tmp_path / "undisturbed", workers, devices, layout, apart, kills=False)
    assert weights_of(tmp_path / "killed", workers, devices, layout, apart, kills=True) == expected
