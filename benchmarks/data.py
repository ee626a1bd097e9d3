"""How well a slow input hides behind the steps: a map that takes about as long as a step.

    python benchmarks/data.py            # about two minutes on two cores
    python benchmarks/data.py --rounds 1 # a quick look

The map converts a batch of bytes to numbers with NumPy work that takes about as long as a step, like
decoding. Pipeline and step alone are measured too: where all of the shorter hides behind the longer,
`fit` runs at the rate of the slower of them, which is the ideal of the last column. A machine whose
devices are its own cores cannot reach it: both want the same cores.

Every case runs in processes of its own, in turns; the best epoch of each counts.
"""

import argparse
import json
import os
import subprocess
import sys
import time

BATCH, BATCHES, EPOCHS = 128, 60, 4
#: Passes over a batch in the map; chosen so that it takes about as long as a step.
WORK = 36

CASES = (
    "pipeline alone",
    "step alone",
    "plain Keras, in line",
    "unisono, map",
    "unisono, map in 2 threads",
    "unisono, map, prefetch(2)",
)
ALONE = CASES[:2]


def data():
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (BATCH * BATCHES, 784), dtype=np.uint8)
    return x, rng.integers(0, 10, len(x)).astype(np.int32)


def decode(x, y):
    """What stands for decoding; NumPy gives other threads their turn while it computes."""
    import numpy as np

    x = x.astype(np.float32) / 255
    for _ in range(WORK):
        x = np.sqrt(x * x + 1e-3)
    return x, y


def model():
    import keras

    net = keras.Sequential(
        [
            keras.Input((784,)),
            keras.layers.Dense(512, activation="relu"),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    net.compile("adam", "sparse_categorical_crossentropy")
    return net


def pipeline(case):
    from unisono.data import Dataset

    dataset = Dataset.from_tensor_slices(data()).batch(BATCH)
    dataset = dataset.map(decode, num_parallel_calls=2 if "threads" in case else None)
    return dataset.prefetch(2) if "prefetch" in case else dataset


def best(epoch):
    """The result of the fastest of several epochs, after one that compiles."""
    epoch()
    found = []
    for _ in range(EPOCHS):
        start = time.perf_counter()
        split = epoch()
        found.append((time.perf_counter() - start, split))
    seconds, split = min(found, key=lambda one: one[0])
    return {"rate": BATCHES / seconds, **split}


def pipeline_alone(case):
    dataset = pipeline(case)

    def epoch():
        for _ in dataset:
            pass
        return {}

    return best(epoch)


def unisono_fit(case):
    import unisono

    with unisono.OneDeviceStrategy("cpu:0").scope():
        net = model()
    timer = unisono.callbacks.StepTimer()
    if case == "step alone":
        x, y = decode(*data())
        options = {"x": x, "y": y, "batch_size": BATCH, "shuffle": False}
    else:
        options = {"x": pipeline(case)}

    def epoch():
        logs = net.fit(**options, epochs=1, verbose=0, callbacks=[timer]).history
        return {name: logs[name][0] for name in ("data_ms", "step_ms")}

    return best(epoch)


def plain(case):
    import keras

    x, y = data()

    class InLine(keras.utils.PyDataset):
        def __len__(self):
            return BATCHES

        def __getitem__(self, i):
            rows = slice(i * BATCH, (i + 1) * BATCH)
            return decode(x[rows], y[rows])

    net, source = model(), InLine()

    def epoch():
        net.fit(source, epochs=1, verbose=0, shuffle=False)
        return {}

    return best(epoch)


def run(case):
    if case == "pipeline alone":
        return pipeline_alone(case)
    return plain(case) if case.startswith("plain") else unisono_fit(case)


def measure(rounds):
    """The best of each case, over rounds in which all cases take turns."""
    env = {**os.environ, "KERAS_BACKEND": "jax"}
    found = {}
    for _ in range(rounds):
        for case in CASES:
            command = [sys.executable, os.path.abspath(__file__), "--case", case]
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=True)
            result = json.loads(done.stdout.splitlines()[-1])
            found[case] = max(found.get(case, result), result, key=lambda one: one["rate"])
    return found


def report(found):
    ideal = min(found[case]["rate"] for case in ALONE)
    heads = ("batches/s", "to the ideal", "data_ms", "step_ms")
    print(f"| {'case':26} | " + " | ".join(f"{h:>12}" for h in heads) + " |")
    print(f"|{'-' * 28}|" + "|".join("-" * 14 for _ in heads) + "|")
    for case, one in found.items():
        cells = [f"{one['rate']:.1f}", f"{one['rate'] / ideal:.2f}"]
        cells += [f"{one[name]:.2f}" if name in one else "" for name in heads[2:]]
        print(f"| {case:26} | " + " | ".join(f"{c:>12}" for c in cells) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", choices=CASES, help="run one case in this process and print its result")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(run(options.case)))
    else:
        report(measure(options.rounds))


if __name__ == "__main__":
    main()
