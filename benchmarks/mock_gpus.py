"""Training steps compiled for 2, 8 and 64 GPUs on a machine without any: XLA's program for each state layout.

    pip install jax-cuda12-plugin jax-cuda12-pjrt    # in the version of JAX; without NVIDIA's libraries
    python benchmarks/mock_gpus.py [--gpus 2 8 64] [--workload transformer]
    python benchmarks/mock_gpus.py --platform cpu --gpus 2 8    # virtual CPU devices, to try this program
    python benchmarks/mock_gpus.py --gpus 8 --devices-per-replica 2    # replicas of two GPUs

The step is traced on as many virtual CPU devices, which the library takes for GPUs, and lowered for CUDA.
XLA then compiles it for a topology of H200s (`jax.experimental.topologies`), of 8 in each host, from a
description of the GPU. Kernels that are chosen by measurement on a GPU are chosen by rules instead;
collectives, the schedule and memory are as for the real devices. A process for each number of GPUs compiles
the step of each layout; with `--devices-per-replica` that of replicas which share the weights as the model's
program says. The table counts in its text:

- collectives, and the bytes of their results on a GPU;
- pairs of a start and an end, and how many of them have computation in between, which hides the exchange;
- what the program's arguments and temporary buffers take on a GPU.
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
#: The GPU, in XLA's text for it (`GpuTargetConfigProto`): the numbers that CUDA gives for an H200.
TARGET = """
gpu_device_info {
  name: "NVIDIA H200" device_vendor: "NVIDIA Corporation"
  cuda_compute_capability { major: 9 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000 device_memory_size: 151397597184 l2_cache_size: 52428800
  threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  device_address_bits: 64 ecc_enabled: true
  driver_version: "12.8.0" runtime_version: "12.8.0" compile_time_toolkit_version: "12.8.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
device_description_str: "NVIDIA H200"
"""
#: GPUs that NVLink connects.
GPUS_OF_HOST = 8
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


def lowered_for(workload, layout, devices, target, per_replica=1):
    """The lowered training step of a workload on all devices, with as many rows for each.

    Args:
        target: the platform, in JAX' words: `"cuda"` or `"cpu"`.
        per_replica: how many devices a replica has.
    """
    import keras
    import workloads

    from unisono._mesh import ReplicaMesh
    from unisono.strategies._replicated import ReplicatedStrategy, layout_of, mesh_of
    from unisono.step._dispatch import CompiledStep
    from unisono.training.trainer._lowered_step import lowered_step

    if target == "cuda":
        # The library decides by the platform of the devices.
        ReplicaMesh.platform = "gpu"
        CompiledStep.lower = lambda self, *args: self._compiled.trace(*args).lower(
            lowering_platforms=("cuda",)
        )

    class Whole(ReplicatedStrategy):
        """The strategy of these devices, with a layout."""

        def __init__(self):
            super().__init__(mesh_of(tuple(devices), per_replica))
            self._state_layout = layout_of(layout, self.cross_device_ops, None, self._mesh, self._group)

    keras.utils.clear_session()
    chosen = workloads.workload(workload)
    with Whole().scope():
        model = chosen.keras_model()
        model.compile("adam", chosen.loss(), metrics=["accuracy"])
    return lowered_step(model, *chosen.data(workloads.BATCH * len(devices)))


def topology_of(count):
    """A topology of that many GPUs, of at most 8 in each host."""
    from jax.experimental import topologies

    hosts = -(-count // GPUS_OF_HOST)
    return topologies.get_topology_desc(
        "", "cuda", target_config=TARGET, topology=f"1x{hosts}x{count // hosts}"
    )


def compiled_for_gpus(lowered, count, xla):
    """The text and the memory of a program that was lowered for CUDA on other devices.

    Args:
        xla: options of XLA's compiler, by name.
    """
    import jax
    import numpy as np
    from jax._src import compiler

    devices = topology_of(count).devices
    order = np.arange(count).reshape(1, count)
    options = compiler.get_compile_options(1, count, order, xla, backend=devices[0].client)
    options.executable_build_options.use_spmd_partitioning = True
    options.executable_build_options.use_shardy_partitioner = jax.config.jax_use_shardy_partitioner
    executables = compiler.xc.DeviceList(tuple(devices))
    module = lowered.compiler_ir("stablehlo")
    done = devices[0].client.compile(module, executable_devices=executables, compile_options=options)
    (program,) = done.hlo_modules()
    return program.to_string(), done.get_compiled_memory_stats()


def measure(workload, layout, devices, platform, xla, per_replica=1):
    """A line of the table, as values for JSON."""
    lowered = lowered_for(workload, layout, devices, "cuda" if platform == "gpu" else "cpu", per_replica)
    if platform == "gpu":
        text, plan = compiled_for_gpus(lowered, len(devices), xla)
    else:
        step = lowered.compile()
        text, plan = step.as_text(), step.memory_analysis()
    name = layout if per_replica == 1 else f"{layout}, {per_replica} a replica"
    values = vars(Collectives.of(text)) | {"gpus": len(devices), "layout": name}
    return values | {"arguments": plan.argument_size_in_bytes, "temporary": plan.temp_size_in_bytes}


def start(count):
    """Start JAX with that many virtual devices, and return them."""
    import jax

    jax.config.update("jax_num_cpu_devices", count)
    return jax.devices("cpu")


def check_plugin():
    """End with one sentence where XLA cannot compile for CUDA."""
    try:
        topology_of(2)
    except Exception as error:
        text = str(error).splitlines()[0]
        sys.exit(
            f"mock_gpus.py: it needs XLA's compiler for CUDA, and no GPU. {text} Install what belongs to "
            "this JAX: pip install jax-cuda12-plugin jax-cuda12-pjrt, without NVIDIA's libraries."
        )


def lines_of(options, count):
    """What a process with that many devices has measured."""
    command = [sys.executable, __file__, "--child", "--platform", options.platform, "--gpus", str(count)]
    env = os.environ | {"KERAS_BACKEND": "jax", "TF_CPP_MIN_LOG_LEVEL": "3", "PJRT_NPROC": str(2 * count)}
    env |= {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [
            *command, "--workload", options.workload, *(f"--xla={k}={v}" for k, v in options.xla),
            "--devices-per-replica", str(options.devices_per_replica),
        ],
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
    parser.add_argument(
        "--xla", type=lambda text: tuple(text.split("=", 1)), action="append", default=[],
        metavar="NAME=VALUE", help="an option of XLA's compiler; may be given several times",
    )  # fmt: skip
    parser.add_argument("--devices-per-replica", type=int, default=1, metavar="N")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        (count,) = options.gpus
        import unisono  # noqa: F401
        from unisono.strategies._replicated import LAYOUTS

        devices = start(count)
        if options.platform == "gpu":
            check_plugin()
        per_replica = options.devices_per_replica
        for layout in LAYOUTS if per_replica == 1 else LAYOUTS[:1]:
            found = measure(
                options.workload, layout, devices, options.platform, dict(options.xla), per_replica
            )
            print(json.dumps(found), flush=True)
        return
    print(table([line for count in options.gpus for line in lines_of(options, count)]))


if __name__ == "__main__":
    main()
