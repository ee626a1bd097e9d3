"""Evaluation beside training: two workers train, a third task evaluates each new checkpoint.

unisono launch -n 2 --evaluator --max-restarts 3 --log-dir run/launch examples/multi_worker_evaluator.py
cat run/launch/evaluator-0.log
tensorboard --logdir run/logs

All tasks run this program. Killed at any moment, training resumes at the exact next batch, and the
evaluator repeats nothing. Without a cluster it trains in one process.

Needs scikit-learn (`pip install scikit-learn`).
"""

import unisono  # before Keras, so that it runs on JAX
import keras

from _digits import load

strategy = unisono.MultiWorkerMirroredStrategy()  # of the evaluator: its own devices alone
keras.utils.set_random_seed(0)
train, test = load()

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8)),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])

if strategy.cluster_resolver.task_type == "evaluator":
    evaluator = unisono.SidecarEvaluator(model, test, "run/checkpoints", log_dir="run/logs")
    history = evaluator.start()  # until the launcher says that training has ended
    if history:
        step, best = max(history, key=lambda each: each[1]["accuracy"])
        print(f"The best of {len(history)}: step {step}, accuracy {best['accuracy']:.4f}")
else:
    save = keras.callbacks.ModelCheckpoint("run/checkpoints/{epoch:02d}.keras")
    backup = unisono.callbacks.BackupAndRestore("run/backup", save_freq="epoch")
    model.fit(*train, batch_size=50, epochs=5, callbacks=[save, backup], verbose=2)
