"""What `unisono doctor -n 2` and `--hosts a,b` measure: all-reduces between processes and between hosts.

They are those of a step: the same strategy, algorithm and packing. So the numbers are what a training gets.

Tests: tests/cluster/test_launch_doctor.py.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from time import perf_counter
from typing import Any

from unisono._errors import InvalidArgumentError

#: Seconds for all, the start of JAX included.
_TIME_LIMIT = 300.0
#: Bytes that are measured at most; what a larger model takes is computed from them.
_MOST = 256 << 20
#: All-reduces of each size, of which the median counts, after one that compiles.
_TIMES = 7


def measure(sizes: Sequence[int]) -> list[float]:
    """Return how long all-reduces of so many bytes take, in seconds; called in each process."""
    import jax
    import numpy as np

    from unisono._context import get_replica_context
    from unisono._values import ReduceOp
    from unisono.strategies._multi_worker import MultiWorkerMirroredStrategy

    strategy = MultiWorkerMirroredStrategy()

    def reduce(value: Any) -> Any:
        context: Any = get_replica_context()
        return context.all_reduce(ReduceOp.SUM, value)

    found = []
    for size in sizes:
        # On the devices already, as gradients are.
        value = jax.numpy.asarray(np.ones(max(1, size // 4), np.float32))
        seconds = []
        for _ in range(_TIMES + 1):
            began = perf_counter()
            jax.block_until_ready(strategy.local_results(strategy.run(reduce, args=(value,))))
            seconds.append(perf_counter() - began)
        found.append(statistics.median(seconds[1:]))
    return found


def between(workers: int | None, hosts: Sequence[str], model_mb: float) -> tuple[str, str]:
    """Return what an all-reduce takes between processes of this machine, or of hosts; and one of a model.

    Args:
        workers: the number of processes on this machine; None for `hosts`.
        hosts: `host` or `host:port` of servers that run `unisono serve`.

    Raises:
        InvalidArgumentError: fewer than two processes or hosts, or no size.
        ClusterError: a server does not answer, or a process has ended.
    """
    from unisono._launch_function import launch

    count = len(hosts) if workers is None else workers
    if count < 2 or model_mb <= 0:
        raise InvalidArgumentError(
            "An exchange needs two processes and a model. Received: "
            f"{count} of the first, {model_mb:g} MB. Write `-n 2`, `--hosts a,b` or `--model 100`."
        )
    size = int(model_mb * 1e6)
    sizes = [4, min(size, _MOST)]
    where: dict[str, Any] = {"workers": workers}
    if hosts:
        where = {"cluster": {"worker": [h if ":" in h else f"{h}:2222" for h in hosts]}}
    every = launch(measure, args=(sizes,), timeout=_TIME_LIMIT, **where)
    # All wait for the slowest.
    latency, measured = (max(seconds) for seconds in zip(*every, strict=True))
    speed = sizes[1] / max(measured - latency, 1e-9)
    seconds = latency + size / speed
    return (
        f"{1e3 * latency:.3g} ms for 4 bytes, {speed / 1e9:.3g} GB/s for {sizes[1] / 1e6:g} MB",
        f"{1e3 * seconds:.3g} ms for {model_mb:g} MB of gradients, once a step",
    )
