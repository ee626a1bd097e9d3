"""Training without the strategy or the workers that the program was given: one warning of each kind."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import keras

from unisono._errors import UnisonoError
from unisono._mesh import jax_runs
from unisono._system._environ import process_environ
from unisono.cluster_resolver._base import TFConfigClusterResolver
from unisono.cluster_resolver._siblings import find_tasks
from unisono.cluster_resolver._spec import ClusterSpec
from unisono.collectives._process_group import joined_group

if TYPE_CHECKING:
    from unisono.strategies._base import Strategy

_LOG = logging.getLogger("unisono")

_unused: weakref.WeakSet[Strategy] = weakref.WeakSet()
_said: set[str] = set()
#: The names of what this process has joined: "servers" once its strategy uses parameter servers.
_joined: set[str] = set()


def strategy_made(strategy: Strategy) -> None:
    """Note a strategy that computes nothing yet."""
    _unused.add(strategy)


def strategy_used(strategy: Strategy) -> None:
    """Note that a strategy computes: `fit` and the like of a model that it holds, or `run`."""
    _unused.discard(strategy)


def servers_joined() -> None:
    """Note that a strategy of this process uses the parameter servers of TF_CONFIG."""
    _joined.add("servers")


def check_fit(model: keras.Model, strategy: Strategy | None) -> None:
    """Warn where `fit` begins without the strategy that was made, or without the other workers.

    A model beside a strategy that has computed before is meant to be one, as for a comparison.
    """
    unused = next(iter(_unused), None) if strategy is None else None
    if unused is not None:
        _say(
            "scope",
            f"`fit` of {model.name!r} computes without a strategy, on one device: the model was created "
            f"outside of the scope of {unused!r}, which has computed nothing yet. Write\n"
            "    with strategy.scope():\n        model = ...\n        model.compile(...)",
        )
    elif strategy is None and (count := joined_group().size) > 1:
        _say(
            "apart",
            f"`fit` of {model.name!r} computes in each of the {count} workers by itself: the model was "
            "created outside of the scope of their strategy. To train it together, write\n"
            "    with strategy.scope():\n        model = ...\n        model.compile(...)",
        )
    elif strategy is None or strategy.process_group.size == 1:
        own = "It has no strategy" if strategy is None else f"{strategy!r} has the devices of one process"
        warn_alone(f"`fit` of {model.name!r} trains", own)


def strategy_of_process_made(name: str) -> None:
    """Warn where a strategy of one process is made in one of several tasks of Slurm, MPI, Ray or the like.

    TF_CONFIG's workers are those that `check_fit` looks at: an evaluator is right to train alone.
    """
    found = find_tasks(process_environ())
    if found is None or TFConfigClusterResolver.detect(process_environ()) or joined_group().size > 1:
        return
    sign, count = found
    _say(
        "tasks",
        f"{name} has the devices of this process alone, which is one of {count} tasks ({sign}): each of them "
        "trains a model of its own. That is right for a sweep. To train one model together, write\n"
        "    strategy = unisono.MultiWorkerMirroredStrategy()",
    )


def warn_alone(what: str = "JAX computed", why: str = "No strategy joined them") -> None:
    """Warn where TF_CONFIG names other workers and JAX computes in this process alone."""
    count = workers_named()
    if count > 1 and not _said and jax_runs() and jax.process_count() == 1:
        _say(
            "workers",
            f"{what} in this process alone, and TF_CONFIG names {count} workers: each runs the whole program "
            f"by itself. {why}. To train together, write\n"
            "    strategy = unisono.MultiWorkerMirroredStrategy()\n"
            "    with strategy.scope():\n        model = ...\n        model.compile(...)",
        )
    elif not _said and computes_apart_from_servers():
        _say(
            "servers",
            f"{what} in this process alone, and TF_CONFIG names {servers_named()} parameter servers: each "
            f"task runs the whole program by itself. {why}. To train with them, write\n"
            "    strategy = unisono.ParameterServerStrategy()\n"
            "    with strategy.scope():\n        model = ...\n        model.compile(...)",
        )


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


def _say(kind: str, text: str) -> None:
    if kind not in _said:
        _said.add(kind)
        _LOG.warning(text)
