"""What `unisono plan` predicts beside what is measured: memory on eight devices, and steps between two hosts.

    python benchmarks/plan.py [--devices 8] [--workloads mlp cnn transformer deep50]
    python benchmarks/plan.py --links [--workloads mlp cnn]

Memory: a plan compiles for one and for two devices and scales. Measured are the arrays of the first device
after a step of `fit` on all, and what XLA plans for the program of all.

Links: network namespaces of this machine, which root can make. A plan takes its step of one device from the
fastest link, less the exchange there, because two processes share this machine's cores.
"""

import argparse
import gc
import os
import sys
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")
sys.path.insert(0, str(Path(__file__).parents[1]))

import unisono  # isort: skip
from workloads import BATCH, workload

from unisono.cli import _model_plan
from unisono.strategies._replicated import LAYOUTS
from unisono.training.trainer._lowered_step import lowered_step

RATES = ("10gbit", "1gbit", "100mbit")


def make_model():
    """The workload that the variable names, compiled: this file is the model of a plan, too."""
    chosen = workload(os.environ["PLANNED"])
    model = chosen.keras_model()
    model.compile("adam", chosen.loss(), metrics=["accuracy"])
    return model


def make_batch(rows):
    return workload(os.environ["PLANNED"]).data(rows)


def options(devices, link="10gbit", step=0.0):
    rate = _model_plan.parse_rate(link)
    return _model_plan.PlanOptions(__file__, devices, BATCH, 0, rate, None, step)


def held():
    import jax

    gc.collect()
    shards = [s for array in jax.live_arrays() for s in array.addressable_shards]
    return sum(s.data.nbytes for s in shards if s.device.id == 0)


def needed(layout, devices):
    """The bytes of state on the first device after a step, and what the step needs besides."""
    import keras

    strategy = unisono.MirroredStrategy([f"cpu:{i}" for i in range(devices)], state_layout=layout)
    before = held()
    x, y = make_batch(BATCH * devices)
    with strategy.scope():
        model = make_model()
    model.fit(x, y, batch_size=len(y), verbose=0)
    state = held() - before
    plan = lowered_step(model, x, y).compile().memory_analysis()
    keras.backend.clear_session()
    return state, plan.temp_size_in_bytes


def memory(name, devices):
    os.environ["PLANNED"] = name
    # First, as it decides how many virtual devices there are.
    measured = {layout: needed(layout, devices) for layout in LAYOUTS}
    size = _model_plan.examine(options(devices))
    for layout in LAYOUTS:
        state, temporary = measured[layout]
        planned = size.state_of(layout, devices), size.temporary[layout]
        cells = "".join(
            f"{p / 1e6:10.2f} {m / 1e6:10.2f} {p / m:6.2f}"
            for p, m in (*zip(planned, (state, temporary), strict=True), (sum(planned), state + temporary))
        )
        print(f"{name:12} {layout:14}{cells}", flush=True)


def links(name):
    from links import gradients_of, measured

    nbytes, step = gradients_of(name), None
    for rate in RATES:
        ms, sent = measured("unisono", name, rate, 2, 3)
        exchange = 1000 * nbytes / _model_plan.parse_rate(rate)
        step = ms - exchange if step is None else step
        size = _model_plan.ModelSize(nbytes, nbytes, 0, 0, {"mirrored": 0}, {"one": 0, "mirrored": 0}, None)
        row = _model_plan.plan_rows(size, options(2, rate, step / 1000))[1]
        cells = f"{1000 * row.seconds:10.1f} {ms:10.1f} {1000 * row.seconds / ms:6.2f}"
        print(
            f"{name:12} {rate:14}{cells}{row.sent / 1e6:10.2f} {sent / 1e6:10.2f} {row.sent / sent:6.2f}",
            flush=True,
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--workloads", nargs="+", default=["mlp", "cnn", "transformer", "deep50"])
    parser.add_argument("--links", action="store_true")
    given = parser.parse_args()
    columns = ("state MB", "step MB", "peak MB") if not given.links else ("ms a step", "MB sent")
    first, second = ("workload", "layout") if not given.links else ("workload", "link")
    print(f"{first:12} {second:14}" + "".join(f"{c:>10} {'measured':>10} {'ratio':>6}" for c in columns))
    for name in given.workloads:
        links(name) if given.links else memory(name, given.devices)


if __name__ == "__main__":
    main()
