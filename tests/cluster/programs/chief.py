"""What several workers do differently, and what they must do alike: one run of many checks.

python chief.py FOLDER          # writes FOLDER/worker-N.json
python chief.py FOLDER raises   # a callback of worker 1 raises in the second epoch
python chief.py FOLDER killed   # worker 1 is killed in the third epoch, and goes on when started again
python chief.py FOLDER killed 3 # ... with backups every three batches
"""

import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np

import unisono
from unisono.callbacks import BackupAndRestore

FOLDER = Path(sys.argv[1])
strategy = unisono.MultiWorkerMirroredStrategy()
WORKER = strategy.worker_index
L = keras.layers
rng = np.random.default_rng(0)
x = rng.normal(size=(40, 6)).astype("f4")
y = (x @ rng.normal(size=(6, 1)) + 0.1).astype("f4")


def model_of(layers=1, seed=0, strategy=strategy, metrics=("mae",)):
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), *[L.Dense(6) for _ in range(layers)], L.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=list(metrics))
    return model


def fit(model, **options):
    defaults = {"batch_size": 10, "epochs": 2, "verbose": 0}
    return model.fit(x, y, **(defaults | options)).history


def digest(model):
    values = [*model.get_weights(), *[np.asarray(v.numpy()) for v in model.optimizer.variables]]
    return hashlib.sha256(b"".join(np.ascontiguousarray(v).tobytes() for v in values)).hexdigest()


def weights(model):
    return np.concatenate([w.ravel() for w in model.get_weights()])


class Steps(keras.callbacks.Callback):
    """Counts, and calls a function of the worker in one hook."""

    def __init__(self, hook=None, do=None):
        super().__init__()
        self.batches, self.epochs, self._hook, self._do = 0, 0, hook, do

    def _call(self, hook, number):
        if hook == self._hook:
            self._do(self.model, number)

    def on_epoch_begin(self, epoch, logs=None):
        self._call("epoch begin", epoch)

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        self._call("batch end", batch)

    def on_epoch_end(self, epoch, logs=None):
        self.epochs += 1
        self._call("epoch end", epoch)


class Logger(keras.callbacks.Callback):
    """What a package such as W&B gives its users."""

    __module__ = "wandb.integration.keras"

    def __init__(self, path):
        super().__init__()
        self.path = path

    def _log(self, logs):
        self.path.parent.mkdir(exist_ok=True)
        with self.path.open("a") as file:
            file.write(f"{sorted(logs)}\n")

    def on_epoch_end(self, epoch, logs=None):
        self._log(logs)

    def on_test_end(self, logs=None):
        self._log(logs)


def writing():
    """Callbacks that write: to folders of each worker, to see who does, and to one path of all."""
    own, both = FOLDER / f"own-{WORKER}", FOLDER / "both"
    both.mkdir(exist_ok=True)
    steps = Steps()
    callbacks = [
        keras.callbacks.ModelCheckpoint(str(own / "{epoch}.weights.h5"), save_weights_only=True),
        keras.callbacks.ModelCheckpoint(str(both / "{epoch}.keras")),
        keras.callbacks.CSVLogger(str(both / "log.csv")),
        unisono.callbacks.TensorBoard(str(own / "tensorboard")),
        Logger(own / "logger"),
        steps,
    ]
    model = model_of()
    history = fit(model, verbose=1, validation_split=0.25, callbacks=callbacks)
    model.evaluate(x, y, verbose=1, callbacks=[Logger(own / "logger")])
    rows = model.predict(x, verbose=1)
    facts = {"history": history, "batches": steps.batches, "rows": len(rows), "hash": digest(model)}
    # What callbacks know of `fit`, after validation.
    return facts | {"epochs": steps.params["epochs"], "steps": steps.params["steps"]}


def deciding():
    """Callbacks that decide from logs, which are equal on all."""
    model = model_of()
    callbacks = [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.5 if epoch == 2 else rate),
        keras.callbacks.ReduceLROnPlateau("loss", patience=1, factor=0.5),
        keras.callbacks.EarlyStopping("loss", patience=3, restore_best_weights=True),
    ]
    history = fit(model, epochs=40, callbacks=callbacks)
    return {"history": history, "hash": digest(model)}


def differing():
    """Decisions by what differs between workers: all follow the chief."""

    def rate(model, epoch):
        model.optimizer.learning_rate = 0.01 + WORKER

    def stop(when):
        return lambda model, number: setattr(model, "stop_training", number >= when[WORKER])

    callbacks = {
        "rate at the end": Steps("epoch end", rate),
        "rate at the beginning": keras.callbacks.LearningRateScheduler(lambda e: 0.01 * (e + 1) + WORKER),
        "stop": Steps("epoch end", stop([2, 0])),
        "stop in the middle": Steps("batch end", stop([1, 9])),
        "only worker 1 stops": Steps("batch end", stop([9, 1])),
    }
    model = model_of()
    return {name: run(callback, model) for name, callback in callbacks.items()}


def run(callback, model):
    model.optimizer.learning_rate = 0.01
    steps = Steps()
    history = fit(model, epochs=4, callbacks=[callback, steps])
    rate = float(model.optimizer.learning_rate)
    return {"epochs": len(history["loss"]), "batches": steps.batches, "rate": rate, "hash": digest(model)}


def beginning():
    """Different initial weights: the chief's count, and the result is that of one device."""
    model = model_of(3, seed=WORKER)
    start = model.get_weights()
    history = fit(model, shuffle=False, epochs=3)
    plain = model_of(3, strategy=unisono.OneDeviceStrategy("cpu:0"))
    plain.set_weights(start)
    expected = fit(plain, shuffle=False, epochs=3)
    shuffled = model_of(3, seed=WORKER)
    fit(shuffled)
    return {
        "start": float(sum(w.sum() for w in start)),
        "hash": digest(model),
        "shuffled": digest(shuffled),
        "difference": float(np.abs(weights(model) - weights(plain)).max()),
        "losses": [history["loss"], expected["loss"]],
    }


def travelling():
    """Sums around a ring, and by what stands in for NCCL here: the numbers are those of an exchange."""
    found = {}
    for name in ("AUTO", "RING", "NCCL"):
        options = unisono.CommunicationOptions(implementation=name, bytes_per_pack=64)
        other = unisono.MultiWorkerMirroredStrategy(communication_options=options)
        model = model_of(3, strategy=other)
        fit(model)
        found[name] = [weights(model).tolist(), digest(model)]
    return found


def saving():
    """Every worker saves to the same path, and to one of its own."""
    model = model_of()
    fit(model)
    folder = FOLDER / "saved"
    for name in ("all", f"own-{WORKER}"):
        model.save(folder / f"{name}.keras")
        keras.saving.save_model(model, folder / f"{name}-function.keras")
        keras.saving.save_weights(model, folder / f"{name}-function.weights.h5")
        model.save(folder / f"{name}-folder", zipped=False)
        model.save_weights(folder / f"{name}.weights.h5")
        unisono.export.export(model, folder / f"{name}.stablehlo")
        unisono.export.export(model, folder / f"{name}-exported.keras")
        unisono.experimental.export_saved_model(model, folder / f"{name}-saved-model")
    # Nobody comes here before the chief has written.
    again = {
        "keras": keras.saving.load_model(folder / "all.keras").predict(x, verbose=0),
        "function": keras.saving.load_model(folder / "all-function.keras").predict(x, verbose=0),
        "folder": keras.saving.load_model(folder / "all-folder").predict(x, verbose=0),
        "stablehlo": unisono.export.load(folder / "all.stablehlo")(x),
        "exported": keras.saving.load_model(folder / "all-exported.keras").predict(x, verbose=0),
    }
    rows = model.predict(x, verbose=0)
    other = model_of(seed=1)
    for weights_file in ("all", "all-function"):
        other.load_weights(folder / f"{weights_file}.weights.h5")
        again[weights_file] = other.predict(x, verbose=0)
    with strategy.scope():
        again["in the scope"] = keras.saving.load_model(folder / "all.keras").predict(x, verbose=0)
    return {name: float(np.abs(np.asarray(value) - rows).max()) for name, value in again.items()}


def committing():
    """Every worker saves checkpoints: into one directory, and into one of its own."""
    model, other = model_of(), model_of(seed=1)
    checkpoint = unisono.checkpoint.Checkpoint(model=model)
    again = unisono.checkpoint.Checkpoint(model=other)
    found = {}
    for name in (f"commits-{WORKER}", "commits"):
        if WORKER:
            # The first has saved before this one looks for the newest number.
            time.sleep(1)
        manager = unisono.checkpoint.CheckpointManager(checkpoint, FOLDER / name, max_to_keep=2)
        paths = [manager.save()]
        fit(model)
        paths += [manager.save(), manager.save(), manager.save(checkpoint_number=30), manager.save()]
        expected = digest(model)
        manager.close()
        exists = os.path.exists(paths[-1])
        fit(model)
        found[name.replace(str(WORKER), "own")] = {
            "paths": [os.path.basename(path) for path in paths],
            "exists": exists,
            "restored": os.path.basename(manager.restore_or_initialize() or "none"),
            "same": digest(model) == expected,
        }
    single = checkpoint.save(FOLDER / "one commit")
    fit(other)
    again.restore(single)
    # With the first worker alone: the others do not wait.
    if WORKER == 0:
        unisono.checkpoint.CheckpointManager(checkpoint, FOLDER / "chief's", asynchronous=False).save()
    return {**found, "one": digest(other) == digest(model), "hash": digest(model)}


class Batches(keras.utils.PyDataset):
    """So many batches."""

    def __init__(self, count):
        super().__init__()
        self._count = count

    def __len__(self):
        return self._count

    def __getitem__(self, index):
        return x[:10]


def mismatches():
    """Calls of `fit` that differ between workers, and what each is told."""
    other = model_of(1 + WORKER)
    same = model_of()
    frozen, eager, active = model_of(), model_of(), model_of()
    frozen.layers[0].trainable = not WORKER
    eager.run_eagerly = bool(WORKER)
    active.layers[0].activation = (keras.activations.relu, keras.activations.tanh)[WORKER]
    weighted, clipped = model_of(), model_of()
    weighted.compile("adam", (lambda y, p: keras.ops.mean(y - p), lambda y, p: keras.ops.mean(p - y))[WORKER])
    clipped.compile(keras.optimizers.Adam(0.1, clipnorm=1.0 + WORKER), "mse")
    calls = {
        "trainable": lambda: fit(frozen),
        "eager": lambda: fit(eager),
        "activation": lambda: fit(active),
        "loss": lambda: fit(weighted),
        "optimizer": lambda: fit(clipped),
        "batch_size": lambda: fit(same, batch_size=10 + WORKER),
        "epochs": lambda: fit(same, epochs=2 + WORKER),
        "shapes": lambda: same.fit(x[: 40 - WORKER], y[: 40 - WORKER], verbose=0),
        "model": lambda: fit(other),
        "callbacks": lambda: fit(same, callbacks=[Steps()] * WORKER),
        "backups": lambda: fit(same, callbacks=[BackupAndRestore(FOLDER / "m", 2 + WORKER)]),
        "evaluate": lambda: same.evaluate(x, y, batch_size=10 + WORKER, verbose=0),
        "predict": lambda: same.predict(x[: 40 - WORKER], verbose=0),
        "steps": lambda: same.predict(x, batch_size=10, steps=2 + WORKER, verbose=0),
        "batches": lambda: same.predict(Batches(4 + WORKER), verbose=0),
        "method": lambda: (same.predict if WORKER else same.evaluate)(x, verbose=0),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except unisono.ClusterError as error:
            found[name] = str(error)
    # What prints and measures may be on the chief alone.
    alone = [] if WORKER else [Steps(), keras.callbacks.CSVLogger(FOLDER / "alone.csv")]
    fit(same, callbacks=alone)
    return {**found, "after": digest(same)}


def diverging():
    """What one worker changes by itself: all are told, and which variable it was."""

    def on_worker_1(change):
        return Steps("batch end", lambda model, batch: change(model) if WORKER == 1 and batch == 1 else None)

    def rate(model):
        model.optimizer.learning_rate = 0.5

    def weights(model):
        model.layers[-1].bias.assign([3.0])

    def loop():
        with strategy.scope():
            optimizer = keras.optimizers.SGD(0.01)
            layer = L.Dense(1)
            layer.build((None, 6))

        def step(x, y):
            with unisono.GradientTape() as tape:
                loss = keras.ops.mean((layer(x) - y) ** 2)
            optimizer.apply_gradients([(tape.gradient(loss, [layer.kernel])[0], layer.kernel)])

        for batch in range(16):
            if WORKER == 1 and batch == 3:
                layer.kernel.assign(np.ones((6, 1)))
            strategy.run(step, args=(x[:10], y[:10]))

    calls = {
        "rate": lambda: fit(model_of(), callbacks=[on_worker_1(rate)]),
        "weights": lambda: fit(model_of(), callbacks=[on_worker_1(weights)]),
        "data": lambda: model_of().fit(x + WORKER, y, verbose=0),
        "order": lambda: model_of().fit(((x[i], y[i]) for i in [slice(WORKER, 10 + WORKER)]), verbose=0),
        "loop": loop,
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
        except unisono.ClusterError as error:
            found[name] = str(error)
    return found


def collectives():
    """How many collectives the host makes: in a `fit` of a small and a large model, and in other methods."""
    found = []
    for layers in (1, 11):
        model = model_of(layers)
        found.append(counted(lambda model=model: fit(model, validation_split=0.25)))
    calls = {
        "evaluate": lambda size: model.evaluate(x, y, batch_size=size, verbose=0),
        "predict": lambda size: model.predict(x, batch_size=size, verbose=0),
        "train_on_batch": lambda size: model.train_on_batch(x[:size], y[:size]),
        "test_on_batch": lambda size: model.test_on_batch(x[:size], y[:size]),
        "predict_on_batch": lambda size: model.predict_on_batch(x[:size]),
    }
    for call in calls.values():
        call(10)
    # 4 and 20 batches; batches of two sizes.
    sizes = {name: [counted(lambda c=call, s=size: c(s)) for size in (10, 2)] for name, call in calls.items()}
    return {"fit": found, **sizes}


def again():
    """A second `fit`, whose state all workers hold already, and what is sent when worker 1 does not."""

    def disturbed(model):
        model.set_weights([w + 1 for w in model.get_weights()])

    def slower(model):
        model.optimizer.learning_rate = 0.5

    def shuffled(model):
        np.random.seed(7)

    found = {}
    for name, change in {"none": None, "weights": disturbed, "rate": slower, "random": shuffled}.items():
        model = model_of()
        fit(model)
        if change is not None and WORKER == 1:
            change(model)
        count = counted(lambda model=model: fit(model, epochs=3))
        found[name] = [count, digest(model)]
    callbacks = {
        "scheduler": keras.callbacks.LearningRateScheduler(lambda epoch: 0.01),
        "stopping": keras.callbacks.EarlyStopping("loss", patience=9),
        "lambda": keras.callbacks.LambdaCallback(on_train_begin=lambda logs: None),
        # Only worker 1 does something where an epoch begins.
        "one": keras.callbacks.LambdaCallback(**({"on_epoch_begin": lambda e, logs: None} if WORKER else {})),
    }
    for name, callback in callbacks.items():
        found[name] = counted(lambda c=callback: fit(model, epochs=3, callbacks=[c]))
    return found


def counted(call):
    before = strategy.process_group.num_collectives
    call()
    return strategy.process_group.num_collectives - before


def backing_up():
    """How many collectives the host makes in a `fit` with backups, by how often they are made."""
    found = []
    for every in (0, 1, "auto"):
        model, before = model_of(), strategy.process_group.num_collectives
        backup = BackupAndRestore(FOLDER / f"every-{every}", every)
        fit(model, callbacks=[backup])
        found.append([strategy.process_group.num_collectives - before, backup.saved])
    return found


class Epochs(keras.callbacks.Callback):
    """Looks at no batch, so that steps run ahead; calls a function where an epoch begins."""

    def __init__(self, do):
        super().__init__()
        self._do = do

    def on_epoch_begin(self, epoch, logs=None):
        self._do(self.model, epoch)


def killed(every="epoch", kill=False):
    """Train with backups in a directory of all; worker 1 is killed once."""

    def end(model, epoch):
        mark = FOLDER / "killed"
        if kill and WORKER == 1 and epoch == 2 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    model = model_of()
    # Under the launcher the default would be as often as a measured share of training allows.
    backup = BackupAndRestore(FOLDER / "backup", save_freq=every, asynchronous=False)
    fit(model, epochs=4, callbacks=[backup, Epochs(end)])
    assert model.train_function.num_programs == 1
    return {"hash": digest(model), "saved": backup.saved}


def resuming():
    """Keras' own backups, which the chief alone restores: all begin at its epoch, with its weights."""

    def fail(model, epoch):
        if epoch == 2:
            raise KeyboardInterrupt

    backup = keras.callbacks.BackupAndRestore(str(FOLDER / "keras-backup"))
    try:
        fit(model_of(), epochs=4, callbacks=[backup, Steps("epoch begin", fail)])
    except KeyboardInterrupt:
        model, steps = model_of(), Steps()
    fit(model, epochs=4, callbacks=[backup, steps])
    return {"epochs": steps.epochs, "hash": digest(model)}


def raising():
    """Worker 1 fails; worker 0 must not wait for ever."""

    def fail(model, epoch):
        if WORKER == 1 and epoch == 1:
            raise RuntimeError("this callback fails")

    fit(model_of(), epochs=200, callbacks=[Steps("epoch begin", fail)])


if sys.argv[2:] == ["raises"]:
    raising()
elif sys.argv[2:3] == ["killed"]:
    result = killed(*map(int, sys.argv[3:]), kill=True)
    (FOLDER / f"worker-{WORKER}.json").write_text(json.dumps(result))
else:
    checks = (
        writing,
        deciding,
        differing,
        beginning,
        travelling,
        saving,
        committing,
        mismatches,
        diverging,
        collectives,
        again,
        backing_up,
        killed,
        resuming,
    )
    result = {check.__name__: check() for check in checks}
    (FOLDER / f"worker-{WORKER}.json").write_text(json.dumps(result))
