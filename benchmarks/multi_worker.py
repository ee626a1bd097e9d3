"""How fast two workers train: the MLP of the tutorial, batch 64 on each of two processes over Gloo.

    pip install torch                            # for one of the baselines
    python benchmarks/multi_worker.py            # about three minutes on two cores
    python benchmarks/multi_worker.py --rounds 1

Every case runs in two processes of its own, in turns, so that a busy moment of the machine meets
all of them; the best epoch of each counts. The two processes share the cores of one machine, so
this measures what the library and its communication cost, not how training scales.
"""

import argparse
import itertools
import json
import os
import socket
import subprocess
import sys

from _common import best, best_of_rounds, optax_mlp, report

WORKERS = 2
BATCH = 64
EXAMPLES = WORKERS * BATCH * 100
SIZES = [784, 256, 128, 10]


def data():
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.random((EXAMPLES, SIZES[0]), dtype=np.float32)
    return x, rng.integers(0, 10, EXAMPLES).astype(np.int32)


def unisono_fit(rank, port):
    import unisono

    strategy = unisono.MultiWorkerMirroredStrategy()
    import keras

    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((784,)),
                keras.layers.Dense(256, activation="relu"),
                keras.layers.Dense(128, activation="relu"),
                keras.layers.Dense(10, activation="softmax"),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    x, y = data()
    return best(lambda: model.fit(x, y, batch_size=WORKERS * BATCH, epochs=1, verbose=0), EXAMPLES)


def hand_written(rank, port):
    """What a careful JAX user writes: shard_map, gradients and metrics in one flat bucket, donation."""
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", WORKERS, rank, cluster_detection_method="deactivate")
    import numpy as np
    import optax
    from jax.flatten_util import ravel_pytree
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    x, y = data()
    mesh = Mesh(np.array(jax.devices()), ("replica",))
    params, optimizer, loss_of = optax_mlp(SIZES)

    def step(params, state, x, y):
        (loss, accuracy), grads = jax.value_and_grad(loss_of, has_aux=True)(params, x, y)
        flat, unravel = ravel_pytree((grads, loss, accuracy))
        grads, loss, accuracy = unravel(jax.lax.pmean(flat, "replica"))
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss, accuracy

    specs = (P(), P(), P("replica"), P("replica"))
    sharded = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    compiled = jax.jit(sharded, donate_argnums=(0, 1))

    def everywhere(value):
        value = np.asarray(value)
        return jax.make_array_from_callback(value.shape, NamedSharding(mesh, P()), lambda i: value[i])

    def split(array):
        return jax.make_array_from_process_local_data(NamedSharding(mesh, P("replica")), array)

    carried = list(jax.tree.map(everywhere, (params, optimizer.init(params))))
    rng = np.random.default_rng(1)

    def epoch():
        order = rng.permutation(EXAMPLES)
        for number, start in enumerate(range(0, EXAMPLES, WORKERS * BATCH)):
            rows = order[start : start + WORKERS * BATCH][rank * BATCH : (rank + 1) * BATCH]
            *carried[:], loss, _ = compiled(*carried, split(x[rows]), split(y[rows]))
            if number % 16 == 15:
                loss.block_until_ready()
        loss.block_until_ready()

    return best(epoch, EXAMPLES)


def torch_ddp(rank, port):
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORKERS)
    torch.manual_seed(0)
    layers = []
    for a, b in itertools.pairwise(SIZES):
        layers += [torch.nn.Linear(a, b), torch.nn.ReLU()]
    model = DistributedDataParallel(torch.nn.Sequential(*layers[:-1]))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    loss_fn = torch.nn.CrossEntropyLoss()
    x, y = (torch.from_numpy(a) for a in data())
    y = y.long()
    generator = torch.Generator().manual_seed(1)

    def epoch():
        order = torch.randperm(EXAMPLES, generator=generator)
        right = torch.zeros(())
        for start in range(0, EXAMPLES, WORKERS * BATCH):
            rows = order[start : start + WORKERS * BATCH][rank * BATCH : (rank + 1) * BATCH]
            optimizer.zero_grad(set_to_none=True)
            logits = model(x[rows])
            loss_fn(logits, y[rows]).backward()
            optimizer.step()
            right += (logits.detach().argmax(-1) == y[rows]).float().mean()

    rate = best(epoch, EXAMPLES)
    dist.destroy_process_group()
    return rate


CASES = {
    "unisono": unisono_fit,
    "hand-written JAX, one bucket": hand_written,
    "torch DistributedDataParallel": torch_ddp,
}

#: The packages that baselines need besides JAX and Keras.
NEEDS = {"hand-written JAX, one bucket": "optax", "torch DistributedDataParallel": "torch"}

#: (what, case, baseline, at least)
CLAIMS = [
    ("Unisono / torch DDP", "unisono", "torch DistributedDataParallel", 1.5),
    ("Unisono / hand-written JAX", "unisono", "hand-written JAX, one bucket", 0.95),
]


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def run(case):
    """The first worker's rate."""
    ports = free_ports(WORKERS)
    cluster = {"worker": [f"127.0.0.1:{p}" for p in ports]}
    processes = []
    for rank in range(WORKERS):
        env = {k: v for k, v in os.environ.items() if k not in ("PJRT_NPROC", "NPROC", "XLA_FLAGS")}
        env |= {"KERAS_BACKEND": "jax", "OMP_NUM_THREADS": "1"}
        if CASES[case] is unisono_fit:
            env["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})
        command = [sys.executable, os.path.abspath(__file__), "--case", case, "--rank", str(rank)]
        command += ["--port", str(ports[0])]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
    outputs = [p.communicate(timeout=300)[0] for p in processes]
    if any(p.returncode for p in processes):
        raise SystemExit(f"{case!r} failed: {[p.returncode for p in processes]}")
    return json.loads(outputs[0].splitlines()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=CASES, help="measure one case alone")
    parser.add_argument("--case", choices=CASES, help="run one worker of a case in this process")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(CASES[options.case](options.rank, options.port)), flush=True)
        return
    cases = [options.only] if options.only else list(CASES)
    report(best_of_rounds(options.rounds, cases, run, NEEDS), CLAIMS, NEEDS)


if __name__ == "__main__":
    main()
