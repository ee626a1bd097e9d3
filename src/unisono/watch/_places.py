"""The place of a job: a folder, the newest one, servers, or a name.

Tests: tests/unit/watch/test_places.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unisono._errors import InvalidArgumentError
from unisono._system._environ import process_environ
from unisono.cluster.liveness._task_events import read_events
from unisono.watch._job_reader import JobReader
from unisono.watch._log_folder import LocalFolder

#: The files by which a log folder is recognised.
_MARKS = ("history.jsonl", "launch.json", "events")
_ADDRESS = re.compile(r"[^\s/,]+:[0-9]{1,5}")
_KUBERNETES = "k8s:"
#: Bytes that hold the last line of a history.
_LAST_BYTES = 1 << 14
_HOW = "Write `unisono watch LOGDIR` with the folder that `unisono launch` has printed"


def _is_address(where: str) -> bool:
    return all(_ADDRESS.fullmatch(each) for each in where.split(","))


def is_log_folder(path: Path) -> bool:
    """Return whether a launch has written into a folder."""
    return any((path / mark).exists() for mark in _MARKS)


def log_folders(near: Path, temporary: Path | None = None) -> list[Path]:
    """Return the log folders in a folder, and those that launches have made by default; the newest first."""
    own = Path(tempfile.gettempdir()) if temporary is None else temporary
    candidates = [near, *_below(near), *(path for path in _below(own) if path.name.startswith("unisono-"))]
    return sorted(
        {path.resolve() for path in candidates if is_log_folder(path)}, key=_last_write, reverse=True
    )


def _below(folder: Path) -> Iterator[Path]:
    try:
        entries = [entry for entry in os.scandir(folder) if entry.is_dir()]
    except OSError:
        return
    # The temporary folder also has folders of other people.
    yield from (Path(entry.path) for entry in entries if entry.stat().st_uid == os.getuid())


def _last_write(path: Path) -> float:
    times = [mark.stat().st_mtime for mark in map(path.joinpath, _MARKS) if mark.exists()]
    return max(times, default=0.0)


def _launch_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads((path / "launch.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _places_of(path: Path) -> dict[str, Any]:
    """Return how the servers of a launch are found, where its tasks write elsewhere."""
    places = _launch_record(path).get("servers")
    return places if isinstance(places, dict) else {}


def mark_of_launch(path: Path) -> str:
    """Return the last line of a page that shows what the tasks of a launch have written on actors of Ray.

    "" where a launch writes into its log folder alone, of which a page can be made again at any time.
    """
    launch = _places_of(path).get("launch")
    if not isinstance(launch, str):
        return ""
    return f"<!-- with the steps of launch {hashlib.sha256(launch.encode()).hexdigest()[:16]} -->"


def _job_names(path: Path) -> set[str]:
    names = _launch_record(path).get("title"), str(_places_of(path).get("launch", "")).rpartition("/")[0]
    return {name for name in names if isinstance(name, str) and name}


def _has_quit(path: Path) -> bool:
    try:
        with (path / "history.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return False
    return any(event.get("event") == "quit" for event in read_events(lines[-1:]))


def reader_of(path: Path) -> JobReader:
    """Return a reader of a log folder, and of the actors of Ray on which its tasks run."""
    own = LocalFolder(path)
    places = _places_of(path)
    if places.get("kind") == "ray" and not _has_quit(path):
        from unisono.watch import _ray_folder, _server_folder

        if actors := _ray_folder.folders_of_places(places):
            return JobReader(_server_folder.JoinedFolder([own, *actors]))
    return JobReader(own)


def find_job(where: str | None, key: Path | None = None) -> JobReader:
    """Return a reader of a job.

    Args:
        where: a log folder, `HOST:PORT` of a worker or a server or several of them, the name of a job,
            `k8s:NAME` of a launch on Kubernetes; None for the newest log folder here or in the temporary
            folder.
        key: the file of the key for an address; None for the key in the environment.

    Raises:
        InvalidArgumentError: there is no such job.
        ClusterError: a worker or server does not answer, or has another key; no cluster of Ray is at
            RAY_ADDRESS.
    """
    is_address = where is not None and not Path(where).is_dir() and _is_address(where)
    if key is not None and not is_address:
        raise InvalidArgumentError(
            f"`--key` belongs to the address of a worker or a server. Received: {where or 'no address'}. "
            "Write `unisono watch --key FILE HOST:PORT`, or leave out `--key`."
        )
    if where is None:
        folders = log_folders(Path.cwd())
        if not folders:
            raise InvalidArgumentError(
                "A launch must have written a log folder here, or in the temporary folder. Received: none in "
                f"{Path.cwd()} and {tempfile.gettempdir()}. {_HOW}."
            )
        return reader_of(folders[0])
    path = Path(where)
    if path.is_dir():
        if not is_log_folder(path):
            raise InvalidArgumentError(
                f"A log folder must hold the history or the events of a launch. Received: {where!r}, which "
                f"has neither. {_HOW}."
            )
        return reader_of(path)
    if where.startswith(_KUBERNETES):
        from unisono.watch._pod_folder import pods_of_launch

        return JobReader(pods_of_launch(where.removeprefix(_KUBERNETES)))
    if is_address:
        from unisono.watch._address_folder import folder_at

        return JobReader(folder_at(where.split(","), key))
    for folder in log_folders(Path.cwd()):
        if where in _job_names(folder):
            return reader_of(folder)
    from unisono.launcher.engines._slurm_job import folder_of_job

    if (shared := folder_of_job(where)) is not None:
        return JobReader(LocalFolder(shared))
    from unisono.watch import _ray_folder, _server_folder

    if actors := _ray_folder.folders_of_job(where):
        return JobReader(_server_folder.JoinedFolder(actors))
    cluster = process_environ().get("RAY_ADDRESS") or "RAY_ADDRESS names none"
    raise InvalidArgumentError(
        "The job must be a log folder, HOST:PORT of a worker or server, k8s:NAME of a launch on Kubernetes, "
        f"or the name of a job. Received: {where!r}, which is no folder, and no job has this name, neither "
        f"near here, nor in Slurm, nor on a cluster of Ray ({cluster}). {_HOW}."
    )
