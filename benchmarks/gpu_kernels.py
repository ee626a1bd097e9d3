"""Kernels of a step of small models, counted without a GPU: Unisono's `fit`, JAX by hand, plain Keras.

    pip install jax-cuda12-plugin jax-cuda12-pjrt    # in the version of JAX; without NVIDIA's libraries
    python benchmarks/gpu_kernels.py [--model transformer] [--xla NAME=VALUE] [--texts FOLDER]

XLA compiles the programs for one H200 from a description of it, as in `mock_gpus.py`, and what a step starts
is counted in its text. A loop within the step counts as often as it runs. Where nothing can be measured,
products are cuBLAS's (`xla_gpu_enable_triton_gemm=False`); the LSTM is Keras' loop over tokens, not cuDNN's.
"""

import argparse
import collections
import json
import os
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import _report
import mock_gpus

MODELS = ("mlp", "transformer", "cnn", "lstm")
ALONE, LOOP, HAND, PLAIN = "unisono, a step alone", "unisono, a step in the loop", "by hand", "plain Keras"
PROGRAMS = (ALONE, LOOP, HAND, PLAIN)
#: Triton's products are chosen by measurement.
OPTIONS = {"xla_gpu_enable_triton_gemm": "False"}
#: Operations of XLA's text for which a GPU starts nothing.
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id",
    "replica-id", "opt-barrier", "copy-done", "async-done", "domain", "add-dependency",
}  # fmt: skip
#: What XLA's programs call a computation by, and run as a part of it.
_CALLED = re.compile(r"(?:calls|to_apply|body)=%?([\w.-]+)")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ROOM = re.compile(r", s8\[\d+\]")
_NAME = re.compile(r'op_name="([^"]*)"')


def computations(text):
    """The computations of a module's text: by name the lines of their operations; and the entry's name."""
    found, entry, name = {}, None, None
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head and " = " not in line.split("{")[0]:
            name = head.group(2)
            found[name] = []
            entry = name if head.group(1) else entry
        elif line.startswith("}"):
            name = None
        elif name is not None and (match := mock_gpus._OPERATION.match(line)):
            found[name].append((*match.groups(), line))
    return found, entry


class Kernels:
    """What a computation starts.

    Args:
        text: of a scheduled module of HLO.
    """

    def __init__(self, text):
        self.computations, self.entry = computations(text)
        operations = (op for ops in self.computations.values() for op in ops)
        #: Without the room that a product needs to compute in.
        self.sizes = {op[0]: mock_gpus.size_of(_ROOM.sub("", op[1])) for op in operations}

    def body_of_loop(self):
        """The name of the body of the program's loop of steps, the loop that starts the most."""
        loops = [op for op in self.computations[self.entry] if op[2] == "while"]
        bodies = [_CALLED.search(op[4]).group(1) for op in loops]
        return max(bodies, key=lambda name: sum(times for _, times in self.of(name)))

    def of(self, name, times=1):
        """All operations that a computation starts, each with how often."""
        for operation in self.computations[name]:
            kind, line = operation[2], operation[4]
            if kind in FREE:
                continue
            called = _CALLED.search(line)
            if kind == "while":
                trips = _TRIPS.search(line)
                yield from self.of(called.group(1), times * int(trips.group(1) if trips else 1))
            elif kind == "call":
                yield from self.of(called.group(1), times)
            else:
                yield operation, times


def part_of(operation):
    """What a kernel belongs to, by the name that the trace gave its operation."""
    name, kind, line = operation[0], operation[2], operation[4]
    named = _NAME.search(line)
    traced = named.group(1) if named else ""
    if kind.startswith("copy") or not traced:
        return "copies" if kind.startswith("copy") or "copy" in name else "of XLA's own"
    for part, pattern in PARTS:
        if re.search(pattern, traced):
            return part
    return "forward"


#: Patterns of names, the first of which that is found counts.
PARTS = (
    ("random numbers", r"threefry|random_"),
    ("optimizer", r"optimizer|adam"),
    ("backward", r"transpose\("),
    ("forward", r"jvp\("),
)


def summary(text, is_loop):
    """The numbers of a program, as values for JSON."""
    kernels = Kernels(text)
    parts, moved = collections.Counter(), 0
    for operation, times in kernels.of(kernels.body_of_loop() if is_loop else kernels.entry):
        parts[part_of(operation)] += times
        read = sum(kernels.sizes.get(x, 0) for x in re.findall(r"%([\w.-]+)", operation[3].split(")")[0]))
        written = kernels.sizes[operation[0]]
        # Of the arrays from which rows are picked, the rows alone are read.
        moved += times * (written + (written if "gather" in operation[0] else read))
    return {"kernels": sum(parts.values()), "bytes": moved, "parts": dict(parts)}


def workload_of(model):
    """The workload of a small model, and its rows."""
    import workloads

    small = workloads.workload(f"small-{model}")
    return small, *small.data(workloads.BATCH * 320)


class _LoweredError(Exception):
    """Ends `fit` before a program runs."""


def of_fit(model, together):
    """The program that `fit` runs, lowered for CUDA.

    Args:
        together: whether its steps run in a loop.
    """
    import keras

    import unisono
    from unisono.step._dispatch import CompiledStep

    found, x, y = workload_of(model)
    os.environ["UNISONO_STEPS_TOGETHER"] = "always" if together else "never"
    lowered = []

    def call(self, donated, kept, *_, **__):
        lowered.append(self._compiled.trace(donated, kept).lower(lowering_platforms=("cuda",)))
        raise _LoweredError

    original, CompiledStep.__call__ = CompiledStep.__call__, call
    try:
        keras.utils.clear_session()
        with unisono.MirroredStrategy(["cpu:0"]).scope():
            trained = found.keras_model()
            trained.compile("adam", found.loss(), metrics=["accuracy"])
        trained.fit(x, y, batch_size=64, verbose=0)
    except _LoweredError:
        pass
    finally:
        CompiledStep.__call__ = original
    return lowered[0]


def by_hand(model):
    """A step around Keras' model, as a careful user of JAX writes it (`peers/keras_by_hand.py`)."""
    import jax
    import jax.numpy as jnp
    import keras

    found, x, y = workload_of(model)
    keras.utils.clear_session()
    made, loss_fn, optimizer = found.keras_model(), found.loss(), keras.optimizers.Adam()
    optimizer.build(made.trainable_variables)

    def loss_of(trainable, other, x, y):
        outputs, other = made.stateless_call(trainable, other, x, training=True)
        return loss_fn(y, outputs), (jnp.mean(outputs.argmax(-1) == y), other)

    def step(state, x, y):
        trainable, other, slots = state
        (loss, (accuracy, other)), grads = jax.value_and_grad(loss_of, has_aux=True)(trainable, other, x, y)
        trainable, slots = optimizer.stateless_apply(slots, grads, trainable)
        return (trainable, other, slots), (loss, accuracy)

    variables = made.trainable_variables, made.non_trainable_variables, optimizer.variables
    state = tuple([jnp.asarray(v) for v in group] for group in variables)
    traced = jax.jit(step, donate_argnums=0).trace(state, x[:64], y[:64])
    return traced.lower(lowering_platforms=("cuda",))


def plain(model):
    """Keras' own step."""
    import jax
    import keras

    found, x, y = workload_of(model)
    keras.utils.clear_session()
    trained = found.keras_model()
    trained.compile("adam", found.loss(), metrics=["accuracy"])
    trained.train_on_batch(x[:64], y[:64])
    state = [[v.value for v in group] for group in (
        trained.trainable_variables, trained.non_trainable_variables, trained.optimizer.variables,
        trained.metrics_variables,
    )]  # fmt: skip
    traced = jax.jit(trained.train_step, donate_argnums=0).trace(tuple(state), (x[:64], y[:64]))
    return traced.lower(lowering_platforms=("cuda",))


LOWERED = {
    ALONE: lambda model: of_fit(model, False),
    LOOP: lambda model: of_fit(model, True),
    HAND: by_hand,
    PLAIN: plain,
}


def measure(model, programs, xla, texts):
    """Print a line of JSON for each program of a model."""
    from unisono._mesh import ReplicaMesh

    # The library decides by the platform of the devices.
    ReplicaMesh.platform = "gpu"
    for program in programs:
        text, _ = mock_gpus.compiled_for_gpus(LOWERED[program](model), 1, xla)
        if texts:
            (Path(texts) / f"{model}-{program.replace(' ', '-').replace(',', '')}.txt").write_text(text)
        counts = {"model": model, "program": program, **summary(text, program == LOOP)}
        print(json.dumps(counts), flush=True)


def lines_of(options, model):
    """What a process has counted for a model."""
    env = os.environ | {"KERAS_BACKEND": "jax", "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, __file__, "--child", "--model", model, "--programs", *options.programs]
    command += [f"--xla={k}={v}" for k, v in options.xla]
    command += ["--texts", options.texts] if options.texts else []
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, text=True, check=False, timeout=mock_gpus.LIMIT
    )
    if done.returncode:
        sys.exit(f"gpu_kernels.py: the process of {model} ended with {done.returncode}: see above.")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def table(found):
    """The counts as a Markdown table."""
    lines = [["model", "step", "kernels", "KiB read and written", "of them"]]
    for each in found:
        parts = ", ".join(f"{number} {part}" for part, number in sorted(each["parts"].items()))
        cells = [each["model"], each["program"], f"{each['kernels']:,}", f"{each['bytes'] / 1024:,.0f}"]
        lines.append([*cells, parts])
    return _report.markdown(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    parser.add_argument(
        "--xla", type=lambda text: tuple(text.split("=", 1)), action="append", default=[],
        metavar="NAME=VALUE", help="an option of XLA's compiler; may be given several times",
    )  # fmt: skip
    parser.add_argument("--texts", metavar="FOLDER", help="where XLA's programs are written")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        mock_gpus.start(1)
        mock_gpus.check_plugin()
        for model in options.model:
            measure(model, options.programs, OPTIONS | dict(options.xla), options.texts)
        return
    print(table([line for model in options.model for line in lines_of(options, model)]))


if __name__ == "__main__":
    main()
