"""The events of a job on actors of Ray, which are found by the name of the job.

Tests: tests/unit/watch/test_ray_folder.py, tests/cluster/test_ray_cluster.py.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from unisono._errors import ClusterError
from unisono._system._environ import process_environ
from unisono.watch._log_folder import LogFolder
from unisono.watch._server_folder import ServerFolder


def newest_launch(names: Sequence[str], job: str) -> str | None:
    """Return the newest launch of a job among names of actors, as `JOB/TIME/TASK`; None where none has it.

    >>> newest_launch(["train.py/01/worker-0", "train.py/02/worker-0", "other.py/03/worker-0"], "train.py")
    'train.py/02'
    """
    launches = (name.rpartition("/")[0] for name in names)
    return max((each for each in launches if each.rpartition("/")[0] == job), default=None)


def folders_of_launch(launch: str, address: str) -> list[LogFolder]:
    """Return the files of a launch, one folder for each actor; none where the cluster has no such actors.

    Args:
        launch: as `JOB/TIME`.
        address: of the cluster of Ray.

    Raises:
        ClusterError: no cluster is there.
    """
    ray = _connected(address)
    from unisono.ray._actors import NAMESPACE, ActorWatcher

    folders: list[LogFolder] = []
    for name in _names(ray):
        if name.rpartition("/")[0] != launch:
            continue
        try:
            actor = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:  # it has ended meanwhile
            continue
        # An actor that starts, or starts again, answers later.
        title = f"{launch.rpartition('/')[0]} on Ray"
        folders.append(ServerFolder(title, ActorWatcher(actor), must_answer=False))
    return folders


def folders_of_job(job: str) -> list[LogFolder]:
    """Return the files of the newest launch of a job, on the cluster of RAY_ADDRESS or of this machine.

    None where there is no such job, or no Ray.

    Raises:
        ClusterError: no cluster is at RAY_ADDRESS.
    """
    if not _has_ray():
        return []
    given = process_environ().get("RAY_ADDRESS")
    try:
        ray = _connected(given or "auto")
    except ClusterError:
        if given:
            raise
        return []
    launch = newest_launch(_names(ray), job)
    return [] if launch is None else folders_of_launch(launch, given or "auto")


def folders_of_places(places: Mapping[str, Any]) -> list[LogFolder]:
    """Return the files of the launch that `launch.json` names; none where its cluster is gone."""
    launch, address = places.get("launch"), places.get("address")
    if not isinstance(launch, str) or not isinstance(address, str) or not _has_ray():
        return []
    try:
        return folders_of_launch(launch, address)
    except ClusterError:
        # The launcher's history is there all the same.
        return []


def _has_ray() -> bool:
    return importlib.util.find_spec("ray") is not None


def _connected(address: str) -> Any:
    """Return the module `ray`, connected with a cluster."""
    import ray

    from unisono.ray import _engine

    if not ray.is_initialized():
        _engine.connect(address)
    return ray


def _names(ray: Any) -> list[str]:
    from unisono.ray._actors import NAMESPACE

    named = ray.util.list_named_actors(all_namespaces=True)
    return sorted(each["name"] for each in named if each["namespace"] == NAMESPACE)
