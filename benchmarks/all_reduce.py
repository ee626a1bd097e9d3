"""An all-reduce alone, by size, hosts and link: the algorithms of the library beside torch's over Gloo.

    python benchmarks/all_reduce.py [--rates 100mbit 1gbit 10gbit] [--hosts 2 4] [--megabytes 0.1 1 10]
    python benchmarks/all_reduce.py --overlap    # beside work, in one program and in several

The hosts are network namespaces of this machine, which root can make. A cell is the median of some rounds, in
milliseconds; the bound is the time of 2 (n-1)/n of the bytes, which each host sends. `x4` is in four pieces.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

#: What is measured besides torch's: an algorithm of `unisono.collectives`, and the number of pieces.
WAYS = [("xla", 1), ("xla", 2), ("xla", 4), ("xla", 8), ("exchange", 1), ("ring", 1)]
ROUNDS = 5
#: Of the matrices of `--overlap`, and of the rows that they multiply.
LAYERS, WIDTH, ROWS = 8, 512, 4096


def median_ms(call, *args):
    """The median of some calls, after one that warms up; JAX's results are waited for."""
    wait = sys.modules["jax"].block_until_ready if "jax" in sys.modules else (lambda result: result)
    wait(call(*args))
    seconds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        wait(call(*args))
        seconds.append(time.perf_counter() - began)
    return 1000 * statistics.median(seconds)


class Group:
    """The hosts' processes in JAX, with one array for each on its first device, or on another."""

    def __init__(self, rank, hosts, devices=1):
        os.environ["KERAS_BACKEND"] = "jax"
        import jax

        from unisono.cluster._jax_internals import let_gloo_listen_at

        jax.config.update("jax_num_cpu_devices", devices)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address_of(0, 7001), hosts, rank)
        let_gloo_listen_at(address_of(rank))
        every = [[d for d in jax.devices() if d.process_index == p] for p in range(hosts)]
        self.meshes = [jax.sharding.Mesh([own[i] for own in every], ("hosts",)) for i in range(devices)]
        self.hosts = hosts

    def placed(self, value, mesh=0):
        """An array that is the same on all hosts."""
        import jax

        sharding = jax.sharding.NamedSharding(self.meshes[mesh], jax.sharding.PartitionSpec())
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    def program(self, fn, mesh=0):
        """A program that each host runs on its own values."""
        import jax

        spec = jax.sharding.PartitionSpec()
        mapped = jax.shard_map(fn, mesh=self.meshes[mesh], in_specs=spec, out_specs=spec, check_vma=False)
        return jax.jit(mapped)


def by_jax(rank, hosts, sizes):
    """Milliseconds by size and way."""
    import jax.numpy as jnp
    import numpy as np

    from unisono.collectives._reduce import ALGORITHMS

    group = Group(rank, hosts)

    def reducer(algorithm, pieces):
        def reduce(x):
            return jnp.concatenate(ALGORITHMS[algorithm](list(jnp.split(x, pieces)), "hosts", hosts))

        return group.program(reduce)

    found = {}
    for size in sizes:
        x = group.placed(np.ones(int(size * 1e6) // 32 * 8, "float32"))
        for algorithm, pieces in WAYS:
            reduce = reducer(algorithm, pieces)
            found[f"{size} {name_of(algorithm, pieces)}"] = median_ms(reduce, x)
    return found


def by_torch(rank, hosts, sizes):
    """Milliseconds by size."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # Else Gloo listens where the host's own name leads: on Debian at 127.0.1.1.
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    address = f"tcp://{address_of(0, 7001)}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=hosts)
    arrays = {size: torch.ones(int(size * 1e6) // 32 * 8) for size in sizes}
    return {f"{size} torch": median_ms(dist.all_reduce, x) for size, x in arrays.items()}


def beside_work(rank, hosts, _):
    """Milliseconds of a step's work and of its all-reduce: alone, in one program, and in two programs."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax

    group = Group(rank, hosts, devices=2)
    rows = group.placed(np.ones((ROWS, WIDTH), "float32"))
    random = np.random.default_rng(0)
    matrices = [random.normal(0, 0.04, (WIDTH, WIDTH)).astype("float32") for _ in range(LAYERS)]
    here, there = ([group.placed(m, mesh) for m in matrices] for mesh in (0, 1))

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x * x)

    def total(arrays):
        flat = lax.psum(jnp.concatenate([a.ravel() for a in arrays]), "hosts")
        return [a.reshape(WIDTH, WIDTH) for a in jnp.split(flat, LAYERS)]

    @jax.custom_vjp
    def summed(w):
        return w

    summed.defvjp(lambda w: (w, None), lambda _, g: (lax.psum(g, "hosts"),))
    work = group.program(jax.grad(loss))
    send, send_there = group.program(total), group.program(total, mesh=1)
    at_end = group.program(lambda w, x: total(jax.grad(loss)(w, x)))
    in_backward = group.program(jax.grad(lambda w, x: loss([summed(m) for m in w], x)))
    calls = {
        "work": lambda: work(here, rows),
        "all-reduce": lambda: send(here),
        "one program, at the end": lambda: at_end(here, rows),
        "one program, where each gradient is ready": lambda: in_backward(here, rows),
        "two programs on one device": lambda: (work(here, rows), send(here)),
        "two programs on two devices": lambda: (work(here, rows), send_there(there)),
    }
    return {name: median_ms(call) for name, call in calls.items()}


KINDS = {"jax": by_jax, "torch": by_torch, "overlap": beside_work}


def address_of(host, port=None):
    """The address of a host, with a port where one is given."""
    return f"10.88.0.{host + 1}" + (f":{port}" if port else "")


def name_of(algorithm, pieces):
    """The name of a way."""
    return algorithm if pieces == 1 else f"{algorithm} x{pieces}"


def measured(kind, hosts, rate, sizes):
    """What host 0 has measured; empty where the processes fail."""
    from tests.hosts import Hosts

    with Hosts(hosts, rate) as machines:
        words = [
            sys.executable,
            __file__,
            "--task",
            kind,
            "--hosts",
            str(hosts),
            "--megabytes",
            *map(str, sizes),
        ]
        tasks = [
            machines.start(i, *words, "--rank", str(i), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for i in range(hosts)
        ]
        output, errors = tasks[0].communicate(timeout=600)
        if tasks[0].returncode or not output:
            lines = errors.decode(errors="replace").splitlines() or ["nothing printed"]
            print(f"{kind}: exit code {tasks[0].returncode}: {lines[-1]}", file=sys.stderr)
            return {}
        return json.loads(output.splitlines()[-1])


def print_overlap(rate):
    """Print how work and an all-reduce of its gradients go together."""
    megabytes = 4e-6 * LAYERS * WIDTH * WIDTH
    print(f"{LAYERS} layers of {WIDTH}, {ROWS} rows, {megabytes:.1f} MB, two hosts, {rate}")
    for name, ms in measured("overlap", 2, rate, []).items():
        print(f"{name:45} {ms:8.0f} ms")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", "10gbit"])
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--megabytes", nargs="*", type=float, default=[0.1, 1.0, 10.0])
    parser.add_argument("--overlap", action="store_true")
    parser.add_argument("--task", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.task:
        print(json.dumps(KINDS[given.task](given.rank, given.hosts[0], given.megabytes)), flush=True)
        # Without a barrier at the end, at which a slow host would be waited for.
        os._exit(0)
    from links import seconds_of

    from tests.hosts import why_not

    if reason := why_not():
        sys.exit(reason)
    if given.overlap:
        print_overlap(given.rates[0])
        return
    ways = [*(name_of(*way) for way in WAYS), "torch"]
    print(f"{'hosts':5} {'link':8} {'MB':>6} {'bound':>8} " + "".join(f"{way:>10}" for way in ways))
    for hosts in given.hosts:
        for rate in given.rates:
            found = {
                k: v
                for kind in ("jax", "torch")
                for k, v in measured(kind, hosts, rate, given.megabytes).items()
            }
            for size in given.megabytes:
                bound = 1000 * seconds_of(size * 1e6, rate, hosts)
                cells = "".join(f"{found.get(f'{size} {way}', float('nan')):10.1f}" for way in ways)
                print(f"{hosts:5} {rate:8} {size:6} {bound:8.1f} {cells}", flush=True)


if __name__ == "__main__":
    main()
