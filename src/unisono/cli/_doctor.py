"""The command `unisono doctor`: print what is installed, which devices there are, and whether they work.

With `-n 2` or `--hosts a,b` it measures all-reduces between processes or hosts instead.

Tests: tests/unit/cli/test_machine_checks.py, tests/cluster/test_launch_doctor.py.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import functools
import importlib.metadata
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from unisono._errors import InvalidArgumentError, UnisonoError
from unisono._system._files import replace_file
from unisono.cli import _machine_checks as checks
from unisono.launcher.terminal._printable import as_message

#: The packages that must be installed.
_PACKAGES = ("unisono", "jax", "jaxlib", "keras", "numpy", "grain", "orbax-checkpoint")
#: Seconds after which the checks have hung: to start JAX and to compile the all-reduce takes a few.
_TIME_LIMIT = 120.0
#: Seconds for the measurement of links, the start of JAX included.
_LINKS_LIMIT = 300.0
#: Bytes that are measured at most; what a larger model takes is computed from them.
_MOST = 256 << 20
#: All-reduces of each size, of which the median counts, after one to compile.
_TIMES = 7


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    text: str
    ok: bool = True


def examine(directory: Path) -> list[Finding]:
    """Run all checks; a check that fails is a finding, not an error."""
    # A collective that hangs cannot be interrupted from Python: print where it hangs and exit.
    faulthandler.dump_traceback_later(_TIME_LIMIT, exit=True)
    try:
        return [
            _attempt("python", python_version),
            *(_attempt(name, functools.partial(importlib.metadata.version, name)) for name in _PACKAGES),
            _attempt("versions", checks.versions),
            _attempt("extras", checks.extras),
            _attempt("keras backend", _keras_backend),
            _attempt("devices", _devices),
            _attempt("GPUs", lambda: checks.gpus(_platform(), os.environ)),
            _attempt("shared memory", checks.shared_memory),
            _attempt("ports", checks.ports),
            _attempt("host name", checks.host_name),
            _attempt("cloud keys", lambda: checks.cloud_keys(os.environ, Path.home())),
            _attempt("cluster", lambda: cluster_text(dict(os.environ))),
            _attempt("all-reduce", _all_reduce),
            _attempt("file system", lambda: try_files(directory)),
        ]
    finally:
        faulthandler.cancel_dump_traceback_later()


def _attempt(name: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(name, check())
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, f"not installed; write `pip install {name}`", ok=False)
    except UnisonoError as error:
        return Finding(name, str(error), ok=False)
    except Exception as error:  # any error is a result of the check
        return Finding(name, f"{type(error).__name__}: {error}", ok=False)


def python_version() -> str:
    """Return Python's version, the platform and the number of cores."""
    return f"{platform.python_version()} on {platform.platform()}, {os.cpu_count()} cores"


def _keras_backend() -> str:
    from unisono._backend import require_jax

    require_jax()
    return "jax"


def _devices() -> str:
    from unisono._mesh import list_devices

    return list_devices()


def _platform() -> str:
    import jax

    return jax.default_backend()


def cluster_text(environ: Mapping[str, str]) -> str:
    """Return this process' task and its cluster, as the resolver understood them.

    Never the raw variables: the text is pasted into public issues, and they may hold secrets.

    Raises:
        InvalidArgumentError: when the cluster's variables cannot be used.

    >>> text = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'
    >>> cluster_text({"TF_CONFIG": text})
    "TFConfigClusterResolver: worker:0 is process 0 of 1 in {'worker': ['a:1']}"
    """
    from unisono.cluster_resolver._detect import resolve

    resolver = resolve(dict(environ))
    if resolver is None:
        return "none: no launcher has set the variables of a cluster"
    who = f"{resolver.task} is process {resolver.process_id} of {resolver.num_processes}"
    return f"{type(resolver).__name__}: {who} in {resolver.cluster_spec().as_dict()}"


def _sum_of(value: Any) -> Any:
    from unisono._context import get_replica_context
    from unisono._values import ReduceOp

    context: Any = get_replica_context()
    return context.all_reduce(ReduceOp.SUM, value)


def _all_reduce() -> str:
    from unisono.strategies._mirrored import MirroredStrategy

    strategy = MirroredStrategy()
    count = strategy.num_replicas_in_sync
    result = strategy.run(_sum_of, args=(1.0,))
    sums = [float(value) for value in strategy.local_results(result)]
    if any(value != count for value in sums):
        raise ArithmeticError(f"the sum of {count} ones is {sums}")
    return f"{count} replica{'s' * (count > 1)}, right"


def try_files(directory: Path) -> str:
    """Write, sync, rename and read a file, as checkpoints do."""
    if not directory.is_dir():
        raise InvalidArgumentError(
            f"The directory must exist. Received: --dir {directory}. Write `mkdir -p {directory}`, or "
            "`--dir` with the directory of your backups."
        )
    with tempfile.TemporaryDirectory(dir=directory, prefix="unisono-doctor-") as folder:
        path = Path(folder) / "file"
        for text in ("first", "second"):
            replace_file(path, text, durable=True)
            if path.read_text() != text:
                raise OSError(f"{path} does not hold what was written to it")
    return f"write, fsync, rename and read work in {directory}"


def as_text(findings: list[Finding]) -> str:
    r"""Return the findings for an issue, one line each; failed checks are marked.

    >>> as_text([Finding("jax", "0.10"), Finding("disk", "full", ok=False)])
    'ok     jax   0.10\nWRONG  disk  full'
    """
    width = max(len(f.name) for f in findings)
    return "\n".join(f"{'ok   ' if f.ok else 'WRONG'}  {f.name:{width}}  {f.text}" for f in findings)


def as_json(findings: list[Finding]) -> str:
    """Return the findings as JSON."""
    return json.dumps({f.name: {"ok": f.ok, "text": f.text} for f in findings}, indent=2)


def measure(sizes: Sequence[int]) -> list[float]:
    """Return how long all-reduces of so many bytes take, in seconds; called in each process.

    They run as in a step, with the same strategy, algorithm and packing.
    """
    import jax
    import numpy as np

    from unisono.cluster.strategy._multi_worker import MultiWorkerMirroredStrategy

    strategy = MultiWorkerMirroredStrategy()
    medians = []
    for size in sizes:
        # On the devices already, as gradients are.
        value = jax.numpy.asarray(np.ones(max(1, size // 4), np.float32))
        seconds = []
        for _ in range(_TIMES + 1):
            began = perf_counter()
            jax.block_until_ready(strategy.local_results(strategy.run(_sum_of, args=(value,))))
            seconds.append(perf_counter() - began)
        medians.append(statistics.median(seconds[1:]))
    return medians


def between(workers: int | None, hosts: Sequence[str], model_mb: float) -> list[Finding]:
    """Measure an all-reduce between processes of this machine, or of hosts; compute a model's.

    Raises:
        InvalidArgumentError: fewer than two processes or hosts, or no size.
        ClusterError: a server does not answer, or a process has ended.
    """
    from unisono.cli._launch_function import launch

    count = len(hosts) if workers is None else workers
    if count < 2 or model_mb <= 0:
        raise InvalidArgumentError(
            "Links are measured between at least two processes or hosts, for a model of more than 0 MB. "
            f"Received: {count} of them, {model_mb:g} MB. Write `-n 2`, `--hosts a,b` or `--model 100`."
        )
    size = int(model_mb * 1e6)
    sizes = [4, min(size, _MOST)]
    where: dict[str, Any] = {"workers": workers}
    if hosts:
        where = {"cluster": {"worker": [h if ":" in h else f"{h}:2222" for h in hosts]}}
    every = launch(measure, args=(sizes,), timeout=_LINKS_LIMIT, **where)
    # All wait for the slowest.
    latency, measured = (max(seconds) for seconds in zip(*every, strict=True))
    speed = sizes[1] / max(measured - latency, 1e-9)
    seconds = latency + size / speed
    link = f"{1e3 * latency:.3g} ms for 4 bytes, {speed / 1e9:.3g} GB/s for {sizes[1] / 1e6:g} MB"
    model = f"{1e3 * seconds:.3g} ms for {model_mb:g} MB of gradients, once a step"
    return [Finding("link", link), Finding("all-reduce of a model", model)]


def main(
    directory: Path,
    machine: bool,
    workers: int | None = None,
    hosts: Sequence[str] = (),
    model_mb: float = 100.0,
) -> int:
    """Run the checks, or measure links, and print the findings; return 1 where a check failed."""
    is_link = workers is not None or bool(hosts)
    try:
        findings = between(workers, hosts, model_mb) if is_link else examine(directory)
    except UnisonoError as error:
        findings = [Finding("link", str(error), ok=False)]
    sys.stdout.write((as_json(findings) if machine else as_message(as_text(findings))) + "\n")
    return 0 if all(f.ok for f in findings) else 1
