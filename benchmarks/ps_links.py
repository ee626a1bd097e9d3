"""Training with parameter servers on links of several rates: exact, and with 16 bits in one way and in both.

    python benchmarks/ps_links.py [--rates 100mbit 1gbit] [--workload mlp] [--rounds 3] [--workers 2]

A server, a chief and some workers have a host each: network namespaces of this machine, which root can make.
Workers make their own batches. Each round starts a cluster for each rate and option, which makes an epoch to
warm up and then one that counts. Bytes are those that the server's interface receives and sends.
"""

import argparse
import json
import os
import secrets
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.hosts import Hosts, why_not
from workloads import BATCH, workload

#: What is printed of an epoch's logs, besides bytes.
SHOWN = ("steps_per_second", "staleness", "pull_ms", "compute_ms", "push_ms")
TYPES = {
    "exact": {},
    "push": {"push_dtype": "bfloat16"},
    "push and pull": {"push_dtype": "bfloat16", "pull_dtype": "bfloat16"},
}
#: Steps of an epoch: some seconds.
STEPS = {"100mbit": 100, "1gbit": 400}
#: Seconds for a cluster to start and make its steps.
LIMIT = 300
PORT = 2222


def task(name, types, steps):
    """What each task runs; the chief prints the logs of its two epochs."""
    import unisono

    strategy = unisono.ParameterServerStrategy(**types)
    import keras

    case = workload(name)
    with strategy.scope():
        model = case.keras_model()
        model.compile("adam", case.loss())

    def dataset_fn():
        return (
            unisono.data.Dataset.from_tensor_slices(case.data(BATCH * 16)).repeat().batch(BATCH).prefetch(4)
        )

    def show(epoch, logs):
        print(json.dumps({key: float(logs[key]) for key in SHOWN}), flush=True)

    callback = keras.callbacks.LambdaCallback(on_epoch_end=show)
    model.fit(dataset_fn, steps_per_epoch=steps, epochs=2, verbose=0, callbacks=[callback])


def measured(rate, workers, given):
    """Run a cluster; return the logs of the epoch that counts, and megabytes pushed and pulled in a step."""
    names = ["ps", "chief", *["worker"] * workers]
    steps = STEPS.get(rate, 100)
    with Hosts(len(names), rate) as hosts, tempfile.TemporaryDirectory(prefix="unisono-links-") as folder:
        cluster = {}
        for i, job in enumerate(names):
            cluster.setdefault(job, []).append(f"{hosts.address(i)}:{PORT}")
        shared = {"UNISONO_CLUSTER_KEY": secrets.token_hex(32), "PJRT_NPROC": "1", "OMP_NUM_THREADS": "1"}
        processes = []
        for i, job in enumerate(names):
            config = {"cluster": cluster, "task": {"type": job, "index": names[:i].count(job)}}
            command = [sys.executable, __file__, "--task", json.dumps([*given, steps])]
            env = os.environ | shared | {"TF_CONFIG": json.dumps(config)}
            with open(Path(folder) / str(i), "w") as log:
                processes.append(hosts.start(i, *command, env=env, stdout=log, stderr=log))
        logs, traffic, deadline = [], [], time.monotonic() + LIMIT
        while len(logs) < 2:
            lines = (Path(folder) / "1").read_text().split("\n")[:-1]
            found = [json.loads(line) for line in lines if line.startswith("{")]
            traffic += [hosts.traffic(0)] * (len(found) - len(logs))
            logs = found
            if time.monotonic() > deadline or processes[1].poll():
                texts = [f"--- {job}\n{(Path(folder) / str(i)).read_text()}" for i, job in enumerate(names)]
                raise RuntimeError("no result\n" + "\n".join(texts))
            time.sleep(0.005)
        for process in processes:
            process.wait(LIMIT)
    pushed, pulled = ((b - a) / steps / 1e6 for a, b in zip(*traffic, strict=True))
    return logs[1] | {"pushed": pushed, "pulled": pulled}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=list(STEPS))
    parser.add_argument("--workload", default="mlp")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--task", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        task(*options.task)
        return
    if reason := why_not():
        sys.exit(reason)
    found = {}
    for _ in range(options.rounds):
        for rate in options.rates:
            for name, types in TYPES.items():
                run = measured(rate, options.workers, [options.workload, types])
                found.setdefault((rate, name), []).append(run)
                print(rate, name, run, file=sys.stderr, flush=True)
    columns = ["link", "16 bits", "steps/s", "of exact", "MB pushed", "MB pulled", *SHOWN[1:]]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for (rate, name), runs in found.items():
        speeds = [run[SHOWN[0]] for run in runs]
        ratios = [own / run[SHOWN[0]] for own, run in zip(speeds, found[rate, "exact"], strict=True)]
        middle = [statistics.median(run[key] for run in runs) for key in ("pushed", "pulled", *SHOWN[1:])]
        speed = f"{statistics.median(speeds):.1f} ({min(speeds):.1f} to {max(speeds):.1f})"
        cells = [rate, name, speed, f"{statistics.median(ratios):.2f}", *(f"{value:.2f}" for value in middle)]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
