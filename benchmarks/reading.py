"""What reading a model's step from its trace costs of its first step, on two virtual devices.

    python benchmarks/reading.py [--models resnet50 gpt2 deep150] [--profile]

Each number comes from a process of its own. The first step is read, traced, compiled and run; CPU time is
that of all threads, wall time beside it. `own step` is the same model with its own `train_step`, which is
read whole, with the gradients. ResNet-50 gets images of 64x64, GPT-2 has four of its twelve layers and 128
tokens.
"""

import argparse
import cProfile
import functools
import os
import pstats
import subprocess
import sys
import time

from workloads import deep, gpt2, resnet50

MODELS = {
    "resnet50": (functools.partial(resnet50.workload, size=64), 4),
    "gpt2": (functools.partial(gpt2.workload, layers=4, tokens=128), 4),
    "deep150": (functools.partial(deep.workload, 150), 64),
}


def with_own_step(model):
    """Return a model of the same layers with a `train_step` as Keras' guide for JAX writes it."""
    import jax
    import keras

    class OwnStep(keras.Model):
        def train_step(self, state, data):
            trainable, non_trainable, optimizer, metrics = state
            x, y, *_ = data

            def loss_of(trainable, non_trainable):
                y_pred, non_trainable = self.stateless_call(trainable, non_trainable, x, training=True)
                return self.compute_loss(x, y, y_pred), non_trainable

            (loss, non_trainable), found = jax.value_and_grad(loss_of, has_aux=True)(trainable, non_trainable)
            trainable, optimizer = self.optimizer.stateless_apply(optimizer, found, trainable)
            return {"loss": loss}, (trainable, non_trainable, optimizer, metrics)

    return OwnStep(model.inputs, model.outputs)


def task(name, own, profile):
    """Train one step of a model in this process; print CPU and wall seconds of the reading, and of all."""
    os.environ["KERAS_BACKEND"] = "jax"
    import unisono  # isort: skip
    import keras

    from unisono.training.trainer._trainer_step import TrainerStep

    make, rows = MODELS[name]
    workload = make()
    keras.utils.set_random_seed(0)
    with unisono.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = workload.keras_model()
        model = with_own_step(model) if own else model
        model.compile("adam", workload.loss())
    x, y = workload.data(rows)
    read, spent = TrainerStep.read, []
    profiler = cProfile.Profile()

    def timed(*args):
        began = time.process_time(), time.perf_counter()
        if profile:
            profiler.enable()
        found = read(*args)
        profiler.disable()
        spent.extend([time.process_time() - began[0], time.perf_counter() - began[1]])
        print("together:" if found.mixes else "apart", found.mixes, file=sys.stderr)
        return found

    TrainerStep.read = timed
    began = time.process_time(), time.perf_counter()
    model.train_on_batch(x, y)
    print(*spent, time.process_time() - began[0], time.perf_counter() - began[1])
    if profile:
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("cumulative").print_stats(60)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--profile", action="store_true", help="show where the reading's time goes")
    parser.add_argument("--task", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.task:
        name, own = options.task
        return task(name, own == "own step", options.profile)
    columns = "model", "step", "reading, CPU s", "first step, CPU s", "share", "wall s", "share"
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|", flush=True)
    for name in options.models:
        for step in ("fit", "own step"):
            command = [sys.executable, __file__, "--task", name, step]
            command += ["--profile"] * options.profile
            errors = None if options.profile else subprocess.DEVNULL
            told = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=errors, text=True)
            cpu, wall, whole_cpu, whole_wall = map(float, told.stdout.split()[-4:])
            shares = [f"{cpu / whole_cpu:.0%}", f"{wall / whole_wall:.0%}"]
            cells = name, step, f"{cpu:.2f}", f"{whole_cpu:.2f}", shares[0], f"{whole_wall:.1f}", shares[1]
            print("| " + " | ".join(cells) + " |", flush=True)
    return None


if __name__ == "__main__":
    main()
