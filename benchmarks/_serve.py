"""A process of the suite: starts one peer, then does what lines on stdin name, and answers in JSON on stdout.

The first answer is `{"seconds": …}` from the start of this program to the end of its first step. `_harness`
starts it.
"""

import time

BEGAN = time.perf_counter()

import importlib
import json
import os
import sys

from peers import PEERS, Place
from workloads import workload


def answer(stream, **values):
    print(json.dumps(values), file=stream, flush=True)


def peak_memory():
    """The most memory so far, in bytes: that in use on the first device, or resident memory on CPUs."""
    import resource

    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    # A peer of another framework has not imported it.
    devices = sys.modules["jax"].local_devices() if "jax" in sys.modules else []
    if devices and devices[0].platform != "cpu":
        return devices[0].memory_stats()["peak_bytes_in_use"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def timed(peer, action):
    """Do an action once.

    Returns:
        Its seconds, CPU seconds and rows, and the peak of memory after it.

    Raises:
        RuntimeError: If it did not make the optimizer steps that it stands for.
    """
    run, rows = peer.actions[action]
    steps = peer.training.get(action)
    before = peer.steps() if steps else 0
    cpu, start = time.process_time(), time.perf_counter()
    run()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    made = peer.steps() - before if steps else None
    if made != steps:
        raise RuntimeError(f"{action!r} must make {steps} steps. Received: {made}")
    return {"seconds": seconds, "cpu": cpu, "rows": rows, "peak": peak_memory()}


def main():
    # Whatever libraries print must not come between the answers.
    stream = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    given = json.loads(sys.argv[1])
    name = given.pop("peer")
    place = Place(**(given | {"workload": workload(given["workload"])}))
    module, arguments = PEERS[name]
    peer = importlib.import_module(f"peers.{module}").start(place, **arguments)
    peer.first()
    answer(stream, seconds=time.perf_counter() - BEGAN)
    settled = set()
    for line in sys.stdin:
        action = line.strip()
        if action not in settled:
            settled.add(action)
            peer.settle(action)
        answer(stream, **timed(peer, action))
    stream.close()
    # Group members that end at different times can wait for each other at exit: nothing is left to save.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
