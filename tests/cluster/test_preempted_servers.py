"""SIGTERM to a cluster with parameter servers: the chief saves, and the others are there until it has."""

import re
import signal

from tests.cluster.launch_support import LIMIT, launched, until
from tests.cluster.tasks_by_hand import TasksByHand
from unisono.rpc._transport._local import socket_directory

#: Stops in a batch until the signal has been sent; prints where it began.
SCRIPT = """
import logging, os, sys, time
import keras
import numpy as np
import unisono
logging.basicConfig(level=logging.WARNING)

class Wait(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if not os.path.exists("went"):
            first = int(self.model.optimizer.iterations)
            open("first", "w").write(str(first))
            os.rename("first", "waits")
            while not os.path.exists("went"):
                time.sleep(0.02)

strategy = unisono.ParameterServerStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
x = np.ones((400, 3), "float32")
backup = unisono.callbacks.BackupAndRestore("backup", save_before_preemption=True)
model.fit(x, x[:, :1], batch_size=4, epochs=100, callbacks=[backup, Wait()], verbose=0)
"""


def batches_at_the_signal(root, send):
    """Return after how many batches the chief was, when `send` sent the signal."""
    waits, went = root / "waits", root / "went"
    until(waits.exists, "the first batch")
    batches = int(waits.read_text())
    send()
    went.touch()
    return batches


def test_the_chief_saves_before_servers_and_workers_end(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(SCRIPT)
    # As Kubernetes and Slurm do: all tasks get it at once.
    with TasksByHand(tmp_path, "train.py", count=1) as tasks:
        everyone = list(tasks.processes.values())
        begun = batches_at_the_signal(
            tmp_path, lambda: [process.send_signal(signal.SIGTERM) for process in everyone]
        )
        assert begun < 100
        assert set(tasks.wait().values()) == {42}, tasks.text()
    assert list((tmp_path / "backup").glob("backup-*"))
    # A launcher: the same program continues, and is asked to end, too.
    (tmp_path / "waits").unlink()
    (tmp_path / "went").unlink()
    monkeypatch.chdir(tmp_path)
    with launched(tmp_path, SCRIPT, "-n", "1", "--ps", "1", "--chief", "--spares", "0", forks=True) as run:
        again = batches_at_the_signal(tmp_path, lambda: run.send(signal.SIGTERM))
        assert run.process.wait(LIMIT) == 42, run.err
    assert again > begun
    ports = re.findall(r"127\.0\.0\.1:(\d+)", run.err.partition("threads per task")[0])
    assert len(ports) == 3
    # Nor those of tasks that SIGTERM has ended.
    assert [path for path in socket_directory().iterdir() if any(port in path.name for port in ports)] == []
    ended = [event["task"] for event in run.history("ended")]
    assert ended[0] == "chief:0"
