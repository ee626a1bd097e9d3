"""Training steps compiled for 2, 8 and 64 GPUs on a machine with one: XLA's program for each state layout.

    python benchmarks/mock_gpus.py [--gpus 2 8 64] [--workload transformer]
    python benchmarks/mock_gpus.py --platform cpu --gpus 2 8    # virtual CPU devices, to try this program

JAX' option `jax_mock_gpu_topology` adds GPUs that are not there, one to each process: a collective of these
does nothing, but programs, schedules and memory are as in the whole cluster. A process for each number of
GPUs compiles the step of each layout, and the table counts in its text:

- collectives, and the bytes of their results on a GPU;
- pairs of a start and an end, and how many of them have computation in between, which hides the exchange;
- what the program's arguments and temporary buffers take on a GPU.

It needs an NVIDIA GPU, and no part of it has run on one yet.
"""

import argparse
import collections
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import _report

MIB = 2**20
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
#: The bits of numbers of XLA's types.
_BITS = re.compile(r"(?:bf|f|s|u|c)(\d+)")
_SHAPE = re.compile(r"\b(pred|(?:bf|f|s|u|c)\d+)\w*\[([\d,]*)\]")
_OPERATION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*?[\])}]) ([a-z][a-z\d-]*)\((.*)")
#: Operations that compute; the others name, order or copy values.
_WORK = (
    "fusion",
    "custom-call",
    "dot",
    "convolution",
    "while",
    "conditional",
    "call",
    "reduce",
    "sort",
    "scatter",
)
#: Seconds for the programs of one number of GPUs.
LIMIT = 1800


@dataclasses.dataclass
class Collectives:
    """The collectives of a compiled program.

    Args:
        counts: by kind, how many there are.
        result_bytes: of all of them, on one device.
        pairs: those with a start and an end.
        hidden: pairs with computation in between.
    """

    counts: dict
    result_bytes: int = 0
    pairs: int = 0
    hidden: int = 0

    @classmethod
    def of(cls, text):
        """Count in the text of a scheduled module of HLO."""
        found, started, work = cls(collections.Counter()), {}, 0
        for line in text.splitlines():
            match = _OPERATION.match(line)
            if match is None:
                continue
            name, shape, operation, operands = match.groups()
            kind = operation.removesuffix("-start").removesuffix("-done")
            work += operation in _WORK
            if kind not in KINDS:
                continue
            if operation.endswith("-start"):
                started[name] = work
            else:
                # A start has its operands in its type, too.
                found.counts[kind] += 1
                found.result_bytes += size_of(shape)
            if operation.endswith("-done"):
                before = started.pop(re.search(r"%?([\w.-]+)\)", operands).group(1))
                found.pairs += 1
                found.hidden += work > before
        return found


def size_of(shape):
    """The bytes of a type of HLO, such as `(f32[2,3]{1,0}, bf16[])`."""
    total = 0
    for kind, sizes in _SHAPE.findall(shape):
        bits = int(_BITS.match(kind).group(1)) if kind != "pred" else 8
        total += math.prod(int(size) for size in filter(None, sizes.split(","))) * bits // 8
    return total


def compiled_step(workload, layout, devices):
    """The compiled training step of a workload on all devices."""
    import keras
    import workloads

    from unisono._mesh import ReplicaMesh
    from unisono.strategies._replicated import ReplicatedStrategy, layout_of
    from unisono.training.trainer._lowered_step import lowered_step

    class Whole(ReplicatedStrategy):
        """Devices of other processes, too, as if this process were all of them."""

        def __init__(self):
            super().__init__(ReplicaMesh(tuple(devices)))
            self._state_layout = layout_of(layout, self.cross_device_ops, None, self._mesh, self._group)

    keras.utils.clear_session()
    chosen = workloads.workload(workload)
    with Whole().scope():
        model = chosen.keras_model()
        model.compile("adam", chosen.loss(), metrics=["accuracy"])
    return lowered_step(model, *chosen.data(workloads.BATCH * len(devices))).compile()


def measure(workload, layout, devices):
    """A line of the table, as values for JSON."""
    step = compiled_step(workload, layout, devices)
    plan, found = step.memory_analysis(), Collectives.of(step.as_text())
    values = vars(found) | {"gpus": len(devices), "layout": layout}
    return values | {"arguments": plan.argument_size_in_bytes, "temporary": plan.temp_size_in_bytes}


def start(platform, count):
    """Start JAX with that many devices, and return them."""
    import jax

    if platform == "cpu":
        jax.config.update("jax_num_cpu_devices", count)
    else:
        # Without the variables of a cluster: this process is the first of the pretended ones.
        jax.config.update("jax_mock_gpu_topology", f"1x{count}x1")
    devices = jax.devices(platform)
    if len(devices) != count:
        raise SystemExit(f"mock_gpus.py: JAX must show {count} devices. Received: {devices}.")
    return devices


def check_gpu():
    """End with one sentence where there is no NVIDIA GPU, or a JAX without support for it."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.gpu import machine

    try:
        machine.gpus()
    except machine.MissingError as error:
        sys.exit(f"mock_gpus.py: it needs one NVIDIA GPU. {error}")
    command = [sys.executable, "-c", "import jax; jax.devices('gpu')"]
    if subprocess.run(command, capture_output=True, check=False, timeout=LIMIT).returncode:
        sys.exit("mock_gpus.py: JAX must compute on the GPU. Install it: pip install 'unisono[cuda13]'.")


def lines_of(options, count):
    """What a process with that many devices has measured."""
    command = [sys.executable, __file__, "--child", "--platform", options.platform, "--gpus", str(count)]
    env = os.environ | {"KERAS_BACKEND": "jax", "TF_CPP_MIN_LOG_LEVEL": "3", "PJRT_NPROC": str(2 * count)}
    env |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(
        [*command, "--workload", options.workload],
        env=env, stdout=subprocess.PIPE, text=True, check=False, timeout=LIMIT,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"mock_gpus.py: the process with {count} devices ended with {done.returncode}: see above.")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def table(found):
    """The measured values as a Markdown table."""
    head = ["GPUs", "layout", "collectives", "MiB of their results", "pairs, with work between"]
    lines = [[*head, "arguments, MiB", "temporary, MiB"]]
    for each in found:
        kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(each["counts"].items())) or "none"
        sizes = [f"{each[name] / MIB:,.1f}" for name in ("result_bytes", "arguments", "temporary")]
        pairs = f"{each['pairs']}, {each['hidden']}"
        lines.append([str(each["gpus"]), each["layout"], kinds, sizes[0], pairs, *sizes[1:]])
    return _report.markdown(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--workload", default="transformer", help="a name in benchmarks/workloads")
    parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        (count,) = options.gpus
        import unisono  # noqa: F401
        from unisono.strategies._replicated import LAYOUTS

        devices = start(options.platform, count)
        for layout in LAYOUTS:
            print(json.dumps(measure(options.workload, layout, devices)), flush=True)
        return
    if options.platform == "gpu":
        check_gpu()
    print(table([line for count in options.gpus for line in lines_of(options, count)]))


if __name__ == "__main__":
    main()
