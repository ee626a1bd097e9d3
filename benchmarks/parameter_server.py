"""Steps per second with parameter servers: a chief, two workers, one server, batches of 64 rows.

    python benchmarks/parameter_server.py [--rounds 3] [--models mlp wide]

Each round starts a cluster of Unisono on this machine, then one of TensorFlow where it is installed. A
cluster makes some steps to warm up, and is then timed over as many asynchronous steps as take some seconds.
The optimizer is Adam.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from _harness import free_ports

HERE = Path(__file__).parent
#: name: (hidden layers, steps to warm up, steps that are timed, claimed steps per second)
MODELS = {
    "mlp": ([256], 300, 1500, 600),
    "wide": ([4096, 4096], 10, 60, 17),
}
BATCH = 64
#: Seconds for a cluster to start and make its steps.
LIMIT = 180


def started(command, output, **variables):
    """Start a process in a session of its own, with its output in a file."""
    with open(output, "w") as out:
        return subprocess.Popen(
            command, env=os.environ | variables, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )


def unisono_cluster(arguments, folder):
    """Start the cluster as users do; return its processes and the file with the chief's output."""
    command = [sys.executable, "-m", "unisono.cli", "launch", "-n", "2", "--ps", "1", "--chief"]
    program = [str(HERE / "peers" / "ps_unisono.py"), arguments]
    return [
        started([*command, "--log-dir", str(folder / "logs"), *program], folder / "chief")
    ], folder / "chief"


def tensorflow_cluster(arguments, folder):
    """Start the tasks by TF_CONFIG; return their processes, the chief's first."""
    tasks = [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0)]
    cluster = {}
    for (job, _), port in zip(tasks, free_ports(len(tasks)), strict=True):
        cluster.setdefault(job, []).append(f"127.0.0.1:{port}")
    processes = []
    for job, index in tasks:
        config = {"cluster": cluster, "task": {"type": job, "index": index}}
        command = [sys.executable, str(HERE / "peers" / "ps_tensorflow.py"), arguments]
        output = folder / (job if job == "chief" else f"{job}-{index}")
        processes.append(started(command, output, TF_CONFIG=json.dumps(config)))
    return processes, folder / "chief"


CLUSTERS = {"Unisono": unisono_cluster, "TensorFlow": tensorflow_cluster}


def steps_per_second(framework, model):
    """Run one cluster; return what its chief measured.

    Raises:
        RuntimeError: If the chief failed or took too long, with the end of its output.
    """
    hidden, warm, steps, _ = MODELS[model]
    with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
        processes, output = CLUSTERS[framework](json.dumps([hidden, BATCH, warm, steps]), Path(folder))
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                processes[0].wait(LIMIT)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
            time.sleep(0.5)
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        text = output.read_text()
    for line in text.splitlines():
        if '{"steps_per_second"' in line:
            return json.loads(line[line.index("{") :])["steps_per_second"]
    raise RuntimeError(f"{framework}, {model}: no result\n" + "\n".join(text.splitlines()[-20:]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    options = parser.parse_args()
    frameworks = list(CLUSTERS)
    try:
        version("tensorflow")
    except PackageNotFoundError:
        frameworks.remove("TensorFlow")
        print("TensorFlow is not installed: only Unisono is measured.")
    measured = {}
    for model in options.models:
        for _ in range(options.rounds):
            for framework in frameworks:
                measured.setdefault((model, framework), []).append(steps_per_second(framework, model))
    print("| model | framework | steps/s, median (lowest to highest) | against TensorFlow | claim |")
    print("|---|---|---|---|---|")
    for (model, framework), values in measured.items():
        middle = statistics.median(values)
        peer = measured.get((model, "TensorFlow"))
        ratio = f"{middle / statistics.median(peer):.2f}" if peer and framework == "Unisono" else ""
        claim = f"at least {MODELS[model][3]}" if framework == "Unisono" else ""
        spread = f"{middle:.1f} ({min(values):.1f} to {max(values):.1f})"
        print(f"| {model} | {framework} | {spread} | {ratio} | {claim} |")


if __name__ == "__main__":
    main()
