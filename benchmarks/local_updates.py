"""`LocalUpdates` beside synchronous training of digits or text, on hosts with links of a given rate.

    python benchmarks/local_updates.py [--rate 100mbit] [--hosts 4] [--every 50] [--steps 2000]
    python benchmarks/local_updates.py --task text --hosts 0 --every 10 --steps 1000
    python benchmarks/local_updates.py --overlap --hosts 2 --hidden 8192 --every 20 --steps 1000

`--task text`: a transformer of two layers predicts characters of Python's own language reference.
`--hosts 0`: on four devices of this process, for the losses alone.
`--overlap`: in place of synchronous training and of the mean, exchanges beside the steps.
The hosts are network namespaces of this machine, which root can make. Every run has the same model, rows,
order of rows and learning rates. Printed are the loss on training rows and on rows that were held out,
steps a second after the first 250, and the bytes that host 0 sends in a step, counted at its interface.
"""

import argparse
import functools
import os
import sys
import tempfile
from pathlib import Path
from time import perf_counter

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from workloads.gpt2 import keras_model

BATCH, PER_EPOCH = 64, 250
#: Characters of a row of text; of its transformer.
LENGTH, WIDTH, LAYERS, HEADS = 32, 32, 2, 2


def digits():
    """Training rows and held out rows."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return (x / 16).astype("f4"), y.astype("i4"), 1472, 320


def text():
    """The same of characters, of which each row has the next ones as labels."""
    import numpy as np
    from pydoc_data.topics import topics

    written = "\n".join(topics[name] for name in sorted(topics))
    _, codes = np.unique(list(written), return_inverse=True)
    rows = len(codes) // LENGTH - 1
    x, y = (codes[i : i + rows * LENGTH].reshape(rows, LENGTH).astype("i4") for i in (0, 1))
    return x, y, rows - 1024, 1024


def split(rows, steps):
    """Training rows, held out rows, and the numbers of the rows of all batches."""
    import numpy as np

    x, y, trained, held_out = rows
    order = np.random.default_rng(0).permutation(len(x))
    x, y = x[order], y[order]
    generator, count = np.random.default_rng(1), BATCH * steps
    taken = np.concatenate([generator.permutation(trained) for _ in range(0, count, trained)])[:count]
    return (
        (x[:trained], y[:trained]),
        (x[trained : trained + held_out], y[trained : trained + held_out]),
        taken,
    )


def sent():
    """The bytes that this host has sent; 0 where there are none."""
    if "TF_CONFIG" not in os.environ:
        return 0
    (line,) = (each for each in Path("/proc/self/net/dev").read_text().splitlines() if "eth0" in each)
    return int(line.split()[9])


def mlp(hidden):
    """A model of digits."""
    import keras

    decay = keras.regularizers.L2(1e-3)
    layers = [
        keras.Input((64,)),
        keras.layers.Dense(hidden, activation="relu", kernel_regularizer=decay),
        keras.layers.Dense(10, kernel_regularizer=decay),
    ]
    return keras.Sequential(layers)


def transformer(_):
    """A model of characters."""
    return keras_model(LAYERS, WIDTH, HEADS, LENGTH, 128)


#: Rows, model and learning rate.
TASKS = {"digits": (digits, mlp, 0.003), "text": (text, transformer, 0.01)}


def trained(task, strategy, steps, hidden):
    """Train a new model; return its losses, steps a second, and bytes a step."""
    import keras

    rows_of, model_of, rate = TASKS[task]
    (x, y), held_out, taken = split(rows_of(), steps)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = model_of(hidden)
        decay = keras.optimizers.schedules.CosineDecay(rate, steps)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(decay), loss)
    seconds, before = 0.0, 0
    for number, first in enumerate(range(0, steps, PER_EPOCH)):
        if number == 1:
            before = sent()
        rows = taken[BATCH * first : BATCH * (first + PER_EPOCH)]
        began = perf_counter()
        model.fit(x[rows], y[rows], batch_size=BATCH, shuffle=False, verbose=0)
        seconds += perf_counter() - began if number else 0.0
    nbytes = sent() - before
    losses = [model.evaluate(*rows, batch_size=BATCH, verbose=0) for rows in ((x[:2048], y[:2048]), held_out)]
    return losses, (steps - PER_EPOCH) / seconds, nbytes / (steps - PER_EPOCH)


def run(task, every, steps, hidden, overlap):
    """What each worker runs."""
    import unisono

    def outer():
        import keras

        return keras.optimizers.SGD(OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)

    syncs = {"synchronous": None, "mean": unisono.LocalUpdates(every)}
    if overlap:
        # First: only the first strategy of a program can make a device for exchanges.
        syncs = {
            f"outer SGD, {steps} steps beside an exchange": unisono.LocalUpdates(every, outer, overlap=steps)
            for steps in (max(1, every // 2), every)
        }
    syncs["outer SGD"] = unisono.LocalUpdates(every, outer)
    if task == "text":
        # Of the digits' model one weight has most of the bytes.
        syncs["outer SGD, 5 fragments"] = unisono.LocalUpdates(every, outer, fragments=5)
    if "TF_CONFIG" in os.environ:
        strategy_with = unisono.MultiWorkerMirroredStrategy
    else:
        strategy_with = functools.partial(unisono.MirroredStrategy, [f"cpu:{i}" for i in range(4)])
    strategies = {name: strategy_with(sync=sync) for name, sync in syncs.items()}
    for name, strategy in strategies.items():
        (loss, held_out), speed, nbytes = trained(task, strategy, steps, hidden)
        if strategy.is_chief:
            print(f"| {name} | {loss:.4f} | {held_out:.4f} | {speed:.1f} | {nbytes:.0f} |", flush=True)


TITLE = "| | loss | held out | steps a second | bytes a step |\n|---|---|---|---|---|"
#: Of the outer optimizer.
OUTER_RATE, OUTER_MOMENTUM = 0.9, 0.5


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--task", default="digits", choices=list(TASKS))
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--hidden", type=int, default=1024, help="units of the digits' model")
    parser.add_argument("--overlap", action="store_true")
    given = parser.parse_args()
    if not given.hosts:
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
        print(TITLE)
    if "TF_CONFIG" in os.environ or not given.hosts:
        run(given.task, given.every, given.steps, given.hidden, given.overlap)
        return
    from tests.cluster.host_tasks import PORT, Tasks
    from tests.hosts import Hosts, why_not

    if reason := why_not():
        sys.exit(reason)
    arguments = ["--task", given.task, "--every", given.every, "--steps", given.steps]
    arguments += ["--hidden", given.hidden, *["--overlap"] * given.overlap]
    with Hosts(given.hosts, given.rate) as hosts, tempfile.TemporaryDirectory(prefix="unisono-") as folder:
        workers = [f"{hosts.address(i)}:{PORT + i}" for i in range(given.hosts)]
        tasks = Tasks(hosts, Path(folder), {"worker": workers}, arguments, program=Path(__file__).absolute())
        codes = tasks.wait(1500)
        print(TITLE)
        print(tasks.log("worker", 0) if not any(codes) else tasks.text)


if __name__ == "__main__":
    main()
