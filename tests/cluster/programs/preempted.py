"""Train, get SIGTERM in a step, and go on when started again: one run for each line of standard input.

A line is JSON: `{"how": name, "folder": dir or null, "result": file, "wait": [worker, step] or null}`,
and for a cluster `"addresses"`. A worker that shall wait stays in its step until the signal has come: it
prints its process id. Each worker of a run is a process of its own, forked after the imports and before
JAX starts. A line on standard output says with which codes they ended.
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import jax
import keras
import numpy as np
from orbax.checkpoint import v1  # noqa: F401 (so that the forked processes need not import it)
from sklearn.datasets import load_digits

import unisono
from unisono.callbacks import BackupAndRestore
from unisono.checkpoint import Checkpoint, CheckpointManager, PreemptionCheckpointHandler, TerminationConfig

STEPS_PER_EPOCH, EPOCHS = 6, 4
L = keras.layers
#: What the test reads; others, such as Gloo, also print to standard output.
words = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
#: The steps of this process, and in which one it waits.
here, waits_in = [], []


def wait_for_sigterm(step):
    """Stay in this step until the signal has come."""
    here.append(step)
    if step not in waits_in:
        return
    # The signal writes into a pipe as it arrives, whichever thread of the process it meets.
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer)
    print(os.getpid(), file=words, flush=True)
    os.read(reader, 1)
    signal.set_wakeup_fd(before)


def model_of(strategy):
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                L.Dense(24, activation="relu"),
                L.Dropout(0.3),
                L.BatchNormalization(),
                L.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
        model.optimizer.build(model.trainable_variables)
    return model, loss


def data():
    digits = load_digits()
    x, y = (digits.data[:300] / 16).astype("f4"), digits.target[:300].astype("i4")
    return unisono.data.Dataset.from_tensor_slices((x, y)).shuffle(200, seed=1).batch(50)


class Wait(keras.callbacks.Callback):
    steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        wait_for_sigterm(self.steps)


def train_with_fit(strategy, folder):
    model, _ = model_of(strategy)
    callbacks = [Wait()]
    if folder:
        callbacks.append(BackupAndRestore(Path(folder, "backup"), 0, save_before_preemption=True))
    model.fit(data(), epochs=EPOCHS, verbose=0, callbacks=callbacks)
    return model


def train_in_a_loop(strategy, folder, *, scope, config=None):
    model, loss_fn = model_of(strategy)
    iterator = iter(data().repeat())
    checkpoint = Checkpoint(model=model, data=iterator)

    def train_step(inputs):
        x, y = inputs
        with unisono.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @unisono.function
    def distributed(inputs):
        strategy.run(train_step, args=(inputs,))

    def step():
        done = handler.total_run_calls + 1
        for batch in strategy.distribute_dataset([next(iterator)]):
            distributed(batch)
        wait_for_sigterm(done)

    # Never closed: a program that ends must end.
    manager = CheckpointManager(checkpoint, folder or "not there")
    handler = PreemptionCheckpointHandler(strategy.cluster_resolver, manager, termination_config=config)
    total = STEPS_PER_EPOCH * EPOCHS
    if scope:
        with handler.watch_preemption_scope():
            while handler.total_run_calls < total:
                step()
                handler.save_checkpoint_if_preempted()
    else:
        for _ in range(handler.total_run_calls, total):
            handler.run(step)
    return model


TRAIN = {
    "fit": train_with_fit,
    "run": lambda s, f: train_in_a_loop(s, f, scope=False),
    "scope": lambda s, f: train_in_a_loop(
        s, f, scope=True, config=TerminationConfig(exit_fn=lambda: sys.exit(7))
    ),
}


def train(how, folder, result, strategy):
    keras.utils.set_random_seed(3)
    model = TRAIN[how](strategy, folder)
    state = [*model.get_weights(), *[v.numpy() for v in model.optimizer.variables]]
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(v).tobytes() for v in state))
    Path(result).write_text(json.dumps({"state": digest.hexdigest(), "steps": here}))


def work(worker, how, folder, result, wait=None, addresses=()):
    """One worker of a run."""
    if wait and wait[0] == worker:
        waits_in.append(wait[1])
    if addresses:
        task = {"type": "worker", "index": worker}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
        strategy = unisono.MultiWorkerMirroredStrategy()
    else:
        strategy = unisono.MirroredStrategy(["cpu:0", "cpu:1"])
    train(how, folder, f"{result}-{worker}", strategy)


def main():
    for line in sys.stdin:
        run = json.loads(line)
        children = []
        for worker in range(len(run.get("addresses", [0]))):
            children.append(os.fork())
            if not children[-1]:
                work(worker, **run)
                return
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print("ended", *codes, file=words, flush=True)


if __name__ == "__main__":
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    main()
