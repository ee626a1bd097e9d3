"""Two workers train weights that lie in parts; then the first one alone saves them.

python saves_alone.py FILE
"""

import sys

import unisono

strategy = unisono.MultiWorkerMirroredStrategy(state_layout="fully_sharded")

import keras
import numpy as np

x = np.random.default_rng(0).normal(size=(64, 6)).astype("f4")
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
model.fit(x, x.sum(1), batch_size=32, verbose=0)
if strategy.worker_index == 0:
    model.save(sys.argv[1])
