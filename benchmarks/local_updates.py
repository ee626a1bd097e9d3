"""`LocalUpdates` beside synchronous training of digits, on hosts with links of a given rate.

    python benchmarks/local_updates.py [--rate 100mbit] [--hosts 4] [--every 50] [--steps 2000]

The hosts are network namespaces of this machine, which root can make. Every run has the same model, rows,
order of rows and learning rates. Printed are the loss on all training rows and on rows that were held out,
steps a second after the first 250, and the bytes that host 0 sends in a step, counted at its interface.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).parents[1]))

BATCH, PER_EPOCH, TRAINED = 64, 250, 1472


def data(steps):
    """Training rows, held out rows, and the numbers of the rows of all batches."""
    import numpy as np
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x[order] / 16).astype("f4"), y[order].astype("i4")
    generator, rows = np.random.default_rng(1), BATCH * steps
    taken = np.concatenate([generator.permutation(TRAINED) for _ in range(-(-rows // TRAINED))])[:rows]
    return (x[:TRAINED], y[:TRAINED]), (x[TRAINED : TRAINED + 320], y[TRAINED : TRAINED + 320]), taken


def sent():
    """The bytes that this host has sent."""
    (line,) = (each for each in Path("/proc/self/net/dev").read_text().splitlines() if "eth0" in each)
    return int(line.split()[9])


def trained(strategy, steps):
    """Train a new model; return its losses, steps a second, and bytes a step."""
    import keras

    (x, y), held_out, taken = data(steps)
    keras.utils.set_random_seed(0)
    decay = keras.regularizers.L2(1e-3)
    with strategy.scope():
        layers = [
            keras.Input((64,)),
            keras.layers.Dense(1024, activation="relu", kernel_regularizer=decay),
            keras.layers.Dense(10, kernel_regularizer=decay),
        ]
        model = keras.Sequential(layers)
        rate = keras.optimizers.schedules.CosineDecay(0.003, steps)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(rate), loss)
    seconds, before = 0.0, 0
    for number, first in enumerate(range(0, steps, PER_EPOCH)):
        if number == 1:
            before = sent()
        rows = taken[BATCH * first : BATCH * (first + PER_EPOCH)]
        began = perf_counter()
        model.fit(x[rows], y[rows], batch_size=BATCH, shuffle=False, verbose=0)
        seconds += perf_counter() - began if number else 0.0
    nbytes = sent() - before
    losses = [model.evaluate(*rows, batch_size=BATCH, verbose=0) for rows in ((x, y), held_out)]
    return losses, (steps - PER_EPOCH) / seconds, nbytes / (steps - PER_EPOCH)


def run(every, steps):
    """What each worker runs."""
    import unisono

    def outer():
        import keras

        return keras.optimizers.SGD(OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)

    syncs = {"synchronous": None, "mean": unisono.LocalUpdates(every)}
    syncs["outer SGD"] = unisono.LocalUpdates(every, outer)
    strategies = {name: unisono.MultiWorkerMirroredStrategy(sync=sync) for name, sync in syncs.items()}
    for name, strategy in strategies.items():
        (loss, held_out), speed, nbytes = trained(strategy, steps)
        if strategy.is_chief:
            print(f"| {name} | {loss:.4f} | {held_out:.4f} | {speed:.1f} | {nbytes:.0f} |", flush=True)


#: Of the outer optimizer.
OUTER_RATE, OUTER_MOMENTUM = 0.9, 0.5


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--steps", type=int, default=2000)
    given = parser.parse_args()
    if "TF_CONFIG" in os.environ:
        run(given.every, given.steps)
        return
    from tests.cluster.host_tasks import PORT, Tasks
    from tests.hosts import Hosts, why_not

    if reason := why_not():
        sys.exit(reason)
    arguments = ["--every", given.every, "--steps", given.steps]
    with Hosts(given.hosts, given.rate) as hosts, tempfile.TemporaryDirectory(prefix="unisono-") as folder:
        workers = [f"{hosts.address(i)}:{PORT + i}" for i in range(given.hosts)]
        tasks = Tasks(hosts, Path(folder), {"worker": workers}, arguments, program=Path(__file__).absolute())
        codes = tasks.wait(1500)
        print("| | loss | held out | steps a second | bytes a step |\n|---|---|---|---|---|")
        print(tasks.log("worker", 0) if not any(codes) else tasks.text)


if __name__ == "__main__":
    main()
