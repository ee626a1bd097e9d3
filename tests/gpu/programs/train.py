"""Trains a small model in a process of its own, and writes its weights and losses.

The argument is JSON: `devices`, a list of names; `out`, a file; `epochs`; `save` and `restore`, checkpoints
or null.
"""

import json
import sys

given = json.loads(sys.argv[1])

import unisono

strategy = unisono.MirroredStrategy(given["devices"])

import jax
import keras
import numpy as np

L = keras.layers
rng = np.random.default_rng(0)
x, tokens = rng.normal(size=(41, 8, 8, 3)).astype("f4"), rng.integers(0, 20, (41, 6))
y = rng.integers(0, 5, 41)

keras.utils.set_random_seed(1)
with strategy.scope():
    # What GPUs compute with atomic additions: derivatives of convolutions, pooling and embeddings.
    image, text = keras.Input((8, 8, 3)), keras.Input((6,), dtype="int32")
    seen = L.BatchNormalization(synchronized=True)(L.Conv2D(16, 3, padding="same", activation="relu")(image))
    seen = L.GlobalAveragePooling2D()(L.MaxPooling2D()(seen))
    read = L.GlobalAveragePooling1D()(L.Embedding(20, 16)(text))
    model = keras.Model([image, text], L.Dense(5)(L.Concatenate()([seen, read])))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])

checkpoint = unisono.checkpoint.Checkpoint(model=model)
if given["restore"]:
    checkpoint.restore(given["restore"])
restored = [np.asarray(v) for v in model.variables]
# 41 rows in batches of 8: the last batch has one row.
history = model.fit([x, tokens], y, batch_size=8, epochs=given["epochs"], verbose=0, shuffle=False).history
if given["save"]:
    checkpoint.write(given["save"])
memory = strategy.mesh.devices[0].memory_stats() or {}
np.savez(
    given["out"],
    platform=strategy.mesh.platform,
    default=jax.default_backend(),
    memory=[memory.get("bytes_limit", 0), memory.get("bytes_in_use", 0)],
    losses=history["loss"],
    predictions=model.predict([x, tokens], verbose=0),
    **{f"restored {i}": v for i, v in enumerate(restored)},
    **{f"weight {i}": np.asarray(v) for i, v in enumerate(model.variables)},
)
