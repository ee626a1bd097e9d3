"""`unisono.launch`: call a function in several processes of this machine, from a notebook or a script."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono.cluster_resolver._spec import ClusterSpec
from unisono.launcher._function_call import (
    call_folder,
    raise_failure,
    read_results,
    time_limit,
    write_call,
)
from unisono.launcher._launch import cores, environ, job_description, visible_gpus
from unisono.launcher._options import LaunchOptions, UserProgram
from unisono.launcher._plan import RunPaths, base_environment
from unisono.launcher._supervisor import Launch, Supervisor
from unisono.launcher.engines._engine import FunctionCall, call_on
from unisono.launcher.terminal._console import Console

Value = TypeVar("Value")

#: Seconds between SIGTERM and SIGKILL: a notebook waits for them after an interrupt.
_GRACE = 3.0


def launch(
    fn: Callable[..., Value],
    workers: int | None = None,
    args: Sequence[object] = (),
    devices_per_worker: int | None = None,
    timeout: float | None = None,
    cluster: Mapping[str, Any] | ClusterSpec | None = None,
    *,
    on: Literal["slurm", "mpi", "ray"] | None = None,
    **options: Any,
) -> list[Value]:
    """Call a function in new processes that form a cluster, and return its results.

    Every process has its TF_CONFIG, so that `MultiWorkerMirroredStrategy()` in the function finds its peers.
    The processes are new interpreters, so JAX may run in this process already. Worker 0's output is shown
    here; with `cluster` that of all tasks.

    Args:
        fn: the function; also one that is defined in a notebook or inside another function.
        workers: the number of processes on this machine, 2 by default. With `cluster` it follows from that;
            with `on` it is by default as many as `unisono launch --on` has.
        args: the arguments of the function, the same in each process.
        devices_per_worker: the number of virtual CPU devices of each process, 1 by default on this machine.
        timeout: seconds after which all processes are killed; None for no limit.
        cluster: a dict from each job to the addresses of servers that run `unisono serve`: the processes run
            there. None for this machine.
        on: the engine that runs the processes: `"slurm"`, `"mpi"` or `"ray"`. None for this machine.
        options: with `cluster`: `max_restarts`, `elastic`, `wait` (seconds for servers that train for another
            client), `lease` and `server_timeout`, see docs/standalone.md. With `on`: the flags of `unisono
            launch --on`, with underscores, see docs/clusters.md.

    Returns:
        The results of the function, in the order of the workers; with `cluster` and `on` the chief's first.

    Raises:
        InvalidTypeError: when `fn` is not callable.
        InvalidArgumentError: when a number is out of range, `fn` or `args` cannot be pickled, or the engine
            refuses.
        ClusterError: when a server is in use or does not answer, or a worker died without an exception, or
            did not return within `timeout`.
        Exception: the exception of the function in the worker that failed first.

    >>> import os
    >>> launch(lambda x: x + 1, workers=1, args=(41,))
    [42]
    """
    if not callable(fn):
        raise InvalidTypeError(
            f"`fn` must be a function. Received: fn={fn!r}. Write `unisono.launch(train, workers=2)`."
        )
    if on is not None:
        if cluster is not None:
            raise InvalidArgumentError(
                f"The processes must run in one place. Received: on={on!r} and `cluster`. Leave one out."
            )
        given = {"workers": workers, "devices_per_worker": devices_per_worker, **options}
        return call_on(on, FunctionCall(fn, args, timeout), given)
    if cluster is not None:
        if workers is not None:
            raise InvalidArgumentError(
                f"With `cluster` the number of workers is that of its servers. Received: workers={workers}. "
                "Leave `workers` out."
            )
        # The extra `cluster`, which a launch on this machine does not need.
        from unisono.standalone._client import call_on_cluster

        return call_on_cluster(
            cluster, fn, args, devices_per_worker=devices_per_worker, timeout=timeout, **options
        )
    if options:
        raise InvalidTypeError(f"These options need `cluster` or `on`. Received: {', '.join(options)}.")
    local = LaunchOptions(
        workers=2 if workers is None else workers,
        devices_per_worker=1 if devices_per_worker is None else devices_per_worker,
        grace=_GRACE,
        stall_timeout=0.0,
    )
    with call_folder() as root:
        paths = RunPaths(root)
        program = write_call(root, fn, tuple(args))
        outcome = Supervisor(_description(local, paths, program, timeout)).run()
        if outcome.failure is not None:
            raise_failure(outcome, paths)
        return read_results(paths, outcome.plan)


def _description(
    options: LaunchOptions, paths: RunPaths, program: UserProgram, timeout: float | None
) -> Launch:
    # Unisono may have set the size of XLA's thread pool for this process; the workers compute their own.
    own = {name: value for name, value in environ().items() if name != "PJRT_NPROC"}
    gpus = visible_gpus(own)
    return Launch(
        options,
        paths,
        base_environment(own, options, options.workers, cores(), paths, len(gpus)),
        lambda plan, task: job_description(plan, task, program),
        Console(None, sys.stdout),
        time_limit(timeout),
        gpus=gpus,
    )
