"""Two workers train, and once more until worker 1 is silent.

python peers.py FOLDER       # it is stopped
python peers.py FOLDER gone  # and its machine takes no connections: what others send to it is dropped
"""

import gc
import os
import signal
import socket
import sys
from pathlib import Path

import unisono
from unisono.cluster.liveness._status_server import StatusServer

GONE = sys.argv[2:] == ["gone"]
strategy = unisono.MultiWorkerMirroredStrategy(
    communication_options=unisono.CommunicationOptions(timeout_seconds=600.0 if GONE else 10.0),
    timeouts=unisono.cluster_resolver.Timeouts(heartbeat=1.0 if GONE else 10.0),
)

import keras
import numpy as np

folder = Path(sys.argv[1])
WORKER = strategy.worker_index

x = np.random.default_rng(0).normal(size=(64, 6)).astype("f4")
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile("adam", "mse")


def disappear():
    """Linux drops what comes to a port where nobody takes the calls that wait."""
    presence = next(thing for thing in gc.get_objects() if isinstance(thing, StatusServer))
    presence.close()
    address = ("127.0.0.1", presence.port)
    held = [socket.create_server(address, backlog=0)]
    while True:
        held.append(socket.socket())
        held[-1].settimeout(1.0)
        try:
            held[-1].connect(address)
        except TimeoutError:
            return held


class Stop(keras.callbacks.Callback):
    """Worker 1 is stopped after step 5."""

    def on_train_batch_end(self, batch, logs=None):
        (folder / f"step-{WORKER}").write_text(str(batch))
        if WORKER == 1 and batch == 5:
            held = disappear() if GONE else []
            (folder / "silent").write_text(str(len(held)))
            os.kill(os.getpid(), signal.SIGSTOP)


for callbacks in ([], [Stop()]):
    model.fit(x, x.sum(1), batch_size=1, verbose=0, callbacks=callbacks)
    (folder / f"trained-{WORKER}-{len(callbacks)}").touch()
