"""Signs that a process which trains alone should train with others: the texts of warnings.

Tests: tests/virtual/training/test_scope_warnings.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax

from unisono._errors import UnisonoError
from unisono._mesh import jax_runs
from unisono._system._environ import process_environ
from unisono.cluster_resolver._base import TFConfigClusterResolver
from unisono.cluster_resolver._siblings import find_tasks
from unisono.cluster_resolver._spec import ClusterSpec

#: The names of what this process has joined: "servers" once its strategy uses parameter servers.
_joined: set[str] = set()


def servers_joined() -> None:
    """Note that a strategy of this process uses the parameter servers of TF_CONFIG."""
    _joined.add("servers")


def warning_in_tasks(name: str) -> str | None:
    """Return the warning of a strategy of one process in one of several tasks of Slurm, MPI, Ray or the like.

    TF_CONFIG's workers are those that `fit` looks at: an evaluator is right to train alone.
    """
    found = find_tasks(process_environ())
    if found is None or TFConfigClusterResolver.detect(process_environ()):
        return None
    sign, count = found
    return (
        f"{name} has the devices of this process alone, which is one of {count} tasks ({sign}): each of them "
        "trains a model of its own. That is right for a sweep. To train one model together, write\n"
        "    strategy = unisono.MultiWorkerMirroredStrategy()"
    )


def warning_alone(what: str, why: str) -> str | None:
    """Return the warning where TF_CONFIG names other tasks and JAX computes in this process alone."""
    count = workers_named()
    if count > 1 and jax_runs() and jax.process_count() == 1:
        return (
            f"{what} in this process alone, and TF_CONFIG names {count} workers: each runs the whole program "
            f"by itself. {why}. To train together, write\n"
            "    strategy = unisono.MultiWorkerMirroredStrategy()\n"
            "    with strategy.scope():\n        model = ...\n        model.compile(...)"
        )
    if computes_apart_from_servers():
        return (
            f"{what} in this process alone, and TF_CONFIG names {servers_named()} parameter servers: each "
            f"task runs the whole program by itself. {why}. To train with them, write\n"
            "    strategy = unisono.ParameterServerStrategy()\n"
            "    with strategy.scope():\n        model = ...\n        model.compile(...)"
        )
    return None


def computes_apart_from_servers() -> bool:
    """Return whether JAX computes here, and no strategy uses the parameter servers that TF_CONFIG names."""
    return "servers" not in _joined and jax_runs() and servers_named() > 0


def servers_named(environ: Mapping[str, str] | None = None) -> int:
    """Return how many parameter servers this process should use; 0 where it is no chief and no worker.

    >>> cluster = '{"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}'
    >>> servers_named({"TF_CONFIG": f'{{"cluster": {cluster}, "task": {{"type": "chief"}}}}'})
    1
    """
    spec = _cluster_of_trainer(environ)
    return 0 if spec is None or "ps" not in spec.jobs else spec.num_tasks("ps")


def workers_named(environ: Mapping[str, str] | None = None) -> int:
    """Return how many workers should train together with this process; 0 where it is none of them.

    >>> workers_named({"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker"}}'})
    2
    >>> workers_named({})
    0
    """
    spec = _cluster_of_trainer(environ)
    return 0 if spec is None or "ps" in spec.jobs else spec.num_processes()


def _cluster_of_trainer(environ: Mapping[str, str] | None) -> ClusterSpec | None:
    """Return the cluster of TF_CONFIG where this process is its chief or a worker."""
    resolver = TFConfigClusterResolver(environ=environ)
    try:
        return resolver.cluster_spec() if resolver.task_type in ("chief", "worker") else None
    except UnisonoError:
        # A strategy that reads the same TF_CONFIG raises this error.
        return None
