"""Steps per second with parameter servers: a chief, two workers, one server, batches of 64 rows.

    python benchmarks/parameter_server.py [--rounds 3] [--models mlp wide]
    python benchmarks/parameter_server.py --light 1,1 8,1 64,8 [--updates 2000] [--bytes 65536]

Each round starts a cluster of Unisono on this machine, then one of TensorFlow where it is installed. A
cluster makes some steps to warm up, and is then timed over as many asynchronous steps as take some seconds.
The optimizer is Adam.

With `--light`, numbers of workers and servers: the real chief and the real servers, and workers without JAX,
all in one process, that pull all values and push an update of all. So the messages are counted, and the
updates that the chief's CPU time would allow.
"""

import argparse
import contextlib
import functools
import importlib.util
import json
import multiprocessing
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from _harness import free_ports

from unisono.cluster_resolver._spec import Task
from unisono.parameter_server.server._client import ServerClient
from unisono.parameter_server.server._server import VariableServer
from unisono.parameter_server.server._store import VariableStore
from unisono.parameter_server.chief._closures import Rules
from unisono.parameter_server.chief._workers import RunRequest, WorkerPool
from unisono.parameter_server.state._push import Push
from unisono.parameter_server.worker._batched_reply import BatchedReply
from unisono.rpc._ops import Op
from unisono.rpc._transport._client import RpcClient
from unisono.rpc._transport._server import RpcServer

HERE = Path(__file__).parent
#: name: (hidden layers, steps to warm up, steps that are timed, claimed steps per second)
MODELS = {
    "mlp": ([256], 300, 1500, 600),
    "wide": ([4096, 4096], 10, 60, 17),
}
#: At least so many times the steps per second of TensorFlow.
RATIO = 2.5
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
    command = [sys.executable, "-m", "unisono", "launch", "-n", "2", "--ps", "1", "--chief"]
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
    """Run one cluster; return the steps per second that its chief measured."""
    return measured(framework, model)["steps_per_second"]


def measured(framework, model):
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
            return json.loads(line[line.index("{") :])
    raise RuntimeError(f"{framework}, {model}: no result\n" + "\n".join(text.splitlines()[-20:]))


# --- light tasks -------------------------------------------------------------------------------


def serve(pipe):
    """A parameter server: the real one, in memory, until the pipe says that it is over."""
    server = VariableServer(VariableStore())
    rpc_server = RpcServer("127.0.0.1:0", server.handle)
    rpc_server.start()
    pipe.send(rpc_server.address)
    pipe.recv()
    pipe.send((dict(server.counts), time.process_time()))
    pipe.recv()
    rpc_server.close()


class LightWorker:
    """A worker without JAX: for each closure it pulls all values, and pushes an update of all."""

    def __init__(self, servers, ids, size):
        self.client = ServerClient([RpcClient(Task("ps", i), a) for i, a in enumerate(servers)])
        self.ids, self.update = ids, np.full(size // len(servers) // 4, 1e-6, np.float32)
        self.done, self.waiting = 0, queue.SimpleQueue()
        self.rpc_server = RpcServer("127.0.0.1:0", self.handle)
        self.rpc_server.start()
        threading.Thread(target=self.work, daemon=True).start()

    def handle(self, client, frame):
        """Answer what the chief asks; closures later."""
        if frame.op is not Op.RUN:
            return None if frame.op is Op.HEARTBEAT else frame.answer(Op.OK, {"incarnation": "1"})
        self.waiting.put((client, frame))
        return None

    def work(self):
        """Run closures one after the other."""
        while True:
            client, frame = self.waiting.get()
            joint = None
            if "closures" in frame.meta:
                joint = BatchedReply(frame, functools.partial(self.rpc_server.reply, client))
            for each in [frame] if joint is None else joint.closures():
                self.run(each.meta["closure"], frame.meta["watermark"])
                answer = each.answer(Op.RESULT, {"plan": "light"})
                if joint is None:
                    self.rpc_server.reply(client, answer)
                else:
                    joint.add(each.meta["closure"], answer)

    def run(self, closure, watermark):
        """One step: its changes count once, as those of real workers."""
        pulled = self.client.pull(self.ids)
        self.client.take_until(pulled)
        pulled.result(LIMIT)
        sent = []
        for server, variable in self.ids:
            meta, arrays = Push(closure, watermark, adds=((variable, self.update),)).encode()
            sent.append(self.client.send(server, Op.PUSH, meta, arrays))
        for each in sent:
            self.client.take_until(each)
            each.result(LIMIT)
        self.done += 1


def work(pipe, count, servers, ids, size):
    """Some light workers, in one process, until the pipe says that it is over."""
    workers = [LightWorker(servers, ids, size) for _ in range(count)]
    pipe.send([worker.rpc_server.address for worker in workers])
    pipe.recv()
    pipe.send(([worker.done for worker in workers], time.process_time()))
    pipe.recv()


def light_cluster(workers, servers, updates, size):
    """Run updates on light workers; return a row of the table: rates, bytes, fairness and CPU time."""
    context = multiprocessing.get_context("spawn")
    processes = []

    def started(function, *arguments):
        ours, theirs = context.Pipe()
        process = context.Process(target=function, args=(theirs, *arguments), daemon=True)
        process.start()
        processes.append((process, ours))
        return ours

    pipes = [started(serve) for _ in range(servers)]
    addresses = [pipe.recv() for pipe in pipes]
    chief = ServerClient([RpcClient(Task("ps", i), address) for i, address in enumerate(addresses)])
    generation = chief.begin_job(0)
    form = {"shape": [size // servers // 4], "dtype": "float32", "kind": "dense"}
    ids = []
    for i in range(servers):
        made = chief.call(i, Op.CREATE, {"variables": [{"name": f"w{i}", **form, "fill": 0.0}]})
        ids.append((i, made.meta["ids"][0]))
    pipe = started(work, workers, addresses, ids, size)
    clients = [RpcClient(Task("worker", i), address) for i, address in enumerate(pipe.recv())]
    pool = WorkerPool(clients, Rules(), lambda request, form: None, generation)
    pool.start()
    while pool.queue.num_workers < workers:
        time.sleep(0.01)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(updates):
        pool.queue.schedule(RunRequest("light"))
    pool.queue.join()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    every = []
    for _, each in processes:
        each.send("count")
        every.append(each.recv())
    pool.close()
    chief.close()
    for process, each in processes:
        each.send("end")
        process.join(LIMIT)
    *of_servers, (done, _) = every
    received = [counts["bytes received"] + counts["bytes sent"] for counts, _ in of_servers]
    assert sum(done) == updates, done
    return {
        "updates/s": f"{updates / wall:.0f}",
        "chief's CPU an update": f"{1e6 * cpu / updates:.0f} µs",
        "chief alone": f"{updates / cpu:.0f}/s",
        "a server's bytes an update": f"{statistics.mean(received) / updates:,.0f}",
        "servers' CPU an update": f"{1e6 * sum(seconds for _, seconds in of_servers) / updates:.0f} µs",
        "updates by worker": f"{min(done)} to {max(done)}",
    }


def show_light(options):
    """Print a table of clusters of light tasks."""
    for i, (workers, servers) in enumerate(options.light):
        found = light_cluster(workers, servers, options.updates, options.bytes)
        if i == 0:
            print(f"| workers | servers | {' | '.join(found)} |\n|---|---|{'---|' * len(found)}")
        print(f"| {workers} | {servers} | {' | '.join(found.values())} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--light", nargs="+", type=lambda text: tuple(map(int, text.split(","))))
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--bytes", type=int, default=1 << 16)
    options = parser.parse_args()
    if options.light:
        show_light(options)
        return
    frameworks = list(CLUSTERS)
    # Not by the package's name: `tensorflow-cpu` has another one.
    if importlib.util.find_spec("tensorflow") is None:
        frameworks.remove("TensorFlow")
        print("TensorFlow is not installed: only Unisono is measured.")
    rates = {}
    for model in options.models:
        for _ in range(options.rounds):
            for framework in frameworks:
                rates.setdefault((model, framework), []).append(steps_per_second(framework, model))
    print("| model | framework | steps/s, median (lowest to highest) | against TensorFlow | claim |")
    print("|---|---|---|---|---|")
    for (model, framework), values in rates.items():
        middle = statistics.median(values)
        peer = rates.get((model, "TensorFlow"))
        ratio = f"{middle / statistics.median(peer):.2f}" if peer and framework == "Unisono" else ""
        claim = f"at least {MODELS[model][3]}, a ratio of {RATIO}" if framework == "Unisono" else ""
        spread = f"{middle:.1f} ({min(values):.1f} to {max(values):.1f})"
        print(f"| {model} | {framework} | {spread} | {ratio} | {claim} |")


if __name__ == "__main__":
    main()
