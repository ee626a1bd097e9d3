"""How fast `fit` is: the tutorial's MLP and two small CNNs on one and on two virtual CPU devices.

    python benchmarks/fit.py            # about ten minutes on two cores
    python benchmarks/fit.py --rounds 1 # a quick look
    python benchmarks/fit.py --only CNN # the cases of one model

Every case runs in processes of its own, in turns, so that a busy moment of the machine meets all
of them; the best epoch of each counts. Two virtual devices share the cores of one machine: this
measures what the library adds to a step, not how training scales.

The baselines on two devices get `PJRT_NPROC=4`, which Unisono sets by itself: with XLA's default
pool on two cores, `DataParallel` hangs in a collective and XLA aborts the process.

No callback looks at single batches here, so Unisono runs several steps in one program; "one by one"
has a callback that does. `steps_per_execution=40` is the same line of the same program for both:
Keras' own backend runs 40 steps from Python, Unisono one program that repeats the step. The CNNs, with
one and with three convolutions, run step by step: XLA compiles convolutions in a loop to slow code.
"""

import argparse
import json
import os
import subprocess
import sys

from _common import best, best_of_rounds, optax_mlp, report

TOGETHER = 40

#: Examples of an epoch, and the number of convolutions.
MLP, CNN1, CNN3 = (128 * 120, 0), (128 * 12, 1), (128 * 3, 3)

#: name: (devices, global batch, steps_per_execution[, model])
CASES = {
    "unisono, 2 devices": (2, 128, 1),
    "hand-written shard_map + Optax": (2, 128, 1),
    "keras.distribution.DataParallel": (2, 128, 1),
    "unisono, one by one": (2, 128, 1),
    "unisono, 40 steps": (2, 128, TOGETHER),
    "DataParallel, 40 steps": (2, 128, TOGETHER),
    "unisono, 2 devices, batch 127": (2, 127, 1),
    "unisono, 1 device": (1, 64, 1),
    "plain Keras fit, 1 device": (1, 64, 1),
    **{
        f"{who}, {name}": (devices, 64 * devices, 1, which)
        for name, which in (("CNN of 1", CNN1), ("CNN of 3", CNN3))
        for who, devices in (
            ("unisono, 2 devices", 2),
            ("DataParallel", 2),
            ("unisono, 1 device", 1),
            ("plain Keras", 1),
        )
    },
}

#: (what, case, baseline, at least)
CLAIMS = [
    ("Unisono / DataParallel", "unisono, 2 devices", "keras.distribution.DataParallel", 1.5),
    ("the same, one by one", "unisono, one by one", "keras.distribution.DataParallel", 1.0),
    ("the same, 40 steps per execution", "unisono, 40 steps", "DataParallel, 40 steps", 1.5),
    ("Unisono / hand-written loop", "unisono, 2 devices", "hand-written shard_map + Optax", 0.95),
    ("batch 127 / batch 128", "unisono, 2 devices, batch 127", "unisono, 2 devices", 0.8),
    ("Unisono / plain Keras, 1 device", "unisono, 1 device", "plain Keras fit, 1 device", 1.0),
    ("the same, CNN of 1 convolution", "unisono, 1 device, CNN of 1", "plain Keras, CNN of 1", 0.95),
    ("the same, CNN of 3", "unisono, 1 device, CNN of 3", "plain Keras, CNN of 3", 0.95),
    ("2 devices / DataParallel, CNN of 1", "unisono, 2 devices, CNN of 1", "DataParallel, CNN of 1", 0.95),
    ("the same, CNN of 3", "unisono, 2 devices, CNN of 3", "DataParallel, CNN of 3", 0.95),
    ("2 devices / plain Keras, CNN of 1", "unisono, 2 devices, CNN of 1", "plain Keras, CNN of 1", 0.95),
    ("the same, CNN of 3", "unisono, 2 devices, CNN of 3", "plain Keras, CNN of 3", 0.95),
]


def data(which):
    import numpy as np

    rng = np.random.default_rng(0)
    shape = (28, 28, 1) if which[1] else (784,)
    x = rng.random((which[0], *shape), dtype=np.float32)
    return x, rng.integers(0, 10, which[0]).astype(np.int32)


def model(steps, which):
    import keras

    layers = keras.layers
    if which[1]:
        first = [layers.Conv2D(32, 3, activation="relu") for _ in range(which[1])]
        hidden = [*first, layers.MaxPooling2D(), layers.Flatten(), layers.Dense(64, activation="relu")]
    else:
        hidden = [layers.Dense(256, activation="relu"), layers.Dense(128, activation="relu")]
    shape = (28, 28, 1) if which[1] else (784,)
    net = keras.Sequential([keras.Input(shape), *hidden, layers.Dense(10, activation="softmax")])
    net.compile(
        "adam",
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        steps_per_execution=steps,
    )
    return net


def with_fit(net, batch, which, callbacks=()):
    x, y = data(which)
    callbacks = list(callbacks)
    return best(lambda: net.fit(x, y, batch_size=batch, epochs=1, verbose=0, callbacks=callbacks), len(x))


def one_by_one(devices, batch, steps, which=MLP):
    return unisono_fit(devices, batch, steps, which, looks=True)


def unisono_fit(devices, batch, steps, which=MLP, looks=False):
    import unisono

    strategy = unisono.MirroredStrategy([f"cpu:{i}" for i in range(devices)])
    with strategy.scope():
        net = model(steps, which)
    if not looks:
        return with_fit(net, batch, which)
    import keras

    return with_fit(
        net, batch, which, [keras.callbacks.LambdaCallback(on_train_batch_begin=lambda i, logs: None)]
    )


def data_parallel(devices, batch, steps, which=MLP):
    import jax

    jax.config.update("jax_num_cpu_devices", devices)
    import keras

    keras.distribution.set_distribution(keras.distribution.DataParallel())
    return with_fit(model(steps, which), batch, which)


def plain(devices, batch, steps, which=MLP):
    return with_fit(model(steps, which), batch, which)


def hand_written(devices, batch, steps):
    """What a careful JAX user writes: shard_map, one pmean, donation, bounded run-ahead."""
    import jax

    jax.config.update("jax_num_cpu_devices", devices)
    import numpy as np
    import optax
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    x, y = data(MLP)
    mesh = Mesh(np.array(jax.devices()), ("replica",))
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("replica"))
    params, optimizer, loss_of = optax_mlp([784, 256, 128, 10])

    def step(params, state, x, y):
        (loss, accuracy), grads = jax.value_and_grad(loss_of, has_aux=True)(params, x, y)
        grads, loss, accuracy = jax.lax.pmean((grads, loss, accuracy), "replica")
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, accuracy

    specs = (P(), P(), P("replica"), P("replica"))
    sharded = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    compiled = jax.jit(sharded, donate_argnums=(0, 1))
    carried = list(jax.device_put((params, optimizer.init(params)), whole))
    rng = np.random.default_rng(1)

    def epoch():
        order = rng.permutation(len(x))
        for number, start in enumerate(range(0, len(x), batch)):
            rows = order[start : start + batch]
            *carried[:], loss, _ = compiled(*carried, *jax.device_put((x[rows], y[rows]), split))
            if number % 16 == 15:
                loss.block_until_ready()
        loss.block_until_ready()

    return best(epoch, len(x))


RUNNERS = {
    "unisono, 2 devices": unisono_fit,
    "unisono, 2 devices, batch 127": unisono_fit,
    "unisono, one by one": one_by_one,
    "unisono, 1 device": unisono_fit,
    "hand-written shard_map + Optax": hand_written,
    "keras.distribution.DataParallel": data_parallel,
    "unisono, 40 steps": unisono_fit,
    "DataParallel, 40 steps": data_parallel,
    "plain Keras fit, 1 device": plain,
}
for name in CASES.keys() - RUNNERS.keys():
    kinds = {"unisono": unisono_fit, "DataParallel": data_parallel, "plain Keras": plain}
    RUNNERS[name] = kinds[name.split(",")[0]]


#: The packages that baselines need besides JAX and Keras.
NEEDS = {"hand-written shard_map + Optax": "optax"}


def run(case):
    """The rate of a case, measured in a process of its own."""
    env = {k: v for k, v in os.environ.items() if k not in ("PJRT_NPROC", "NPROC", "XLA_FLAGS")}
    env["KERAS_BACKEND"] = "jax"
    if RUNNERS[case] in (hand_written, data_parallel):
        env["PJRT_NPROC"] = str(max(os.cpu_count() or 1, 4))
    command = [sys.executable, os.path.abspath(__file__), "--case", case]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="run only the cases whose name contains this")
    parser.add_argument("--case", choices=CASES, help="run one case in this process and print its rate")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(RUNNERS[options.case](*CASES[options.case])))
        return
    cases = [case for case in CASES if options.only in case]
    report(best_of_rounds(options.rounds, cases, run, NEEDS), CLAIMS, NEEDS)


if __name__ == "__main__":
    main()
