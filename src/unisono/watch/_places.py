"""The place of a job: a folder, the newest one, servers, or a name.

Tests: tests/unit/watch/test_places.py.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from unisono._errors import InvalidArgumentError
from unisono.watch._job_reader import JobReader
from unisono.watch._log_folder import LocalFolder

#: The files by which a log folder is recognised.
_MARKS = ("history.jsonl", "launch.json", "events")
_ADDRESS = re.compile(r"[^\s/,]+:[0-9]{1,5}")
_HOW = "Write `unisono watch LOGDIR` with the folder that `unisono launch` has printed"


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


def _job_name(path: Path) -> str | None:
    try:
        record = json.loads((path / "launch.json").read_bytes())
    except (OSError, ValueError):
        return None
    name = record.get("title") if isinstance(record, dict) else None
    return name if isinstance(name, str) else None


def find_job(where: str | None) -> JobReader:
    """Return a reader of a job.

    Args:
        where: a log folder, `HOST:PORT` of a server or several of them, the name of a job; None for the
            newest log folder here or in the temporary folder.

    Raises:
        InvalidArgumentError: there is no such job.
        ClusterError: a server does not answer, or has another key.
    """
    if where is None:
        folders = log_folders(Path.cwd())
        if not folders:
            raise InvalidArgumentError(
                "A launch must have written a log folder here, or in the temporary folder. Received: none in "
                f"{Path.cwd()} and {tempfile.gettempdir()}. {_HOW}."
            )
        return JobReader(LocalFolder(folders[0]))
    path = Path(where)
    if path.is_dir():
        if not is_log_folder(path):
            raise InvalidArgumentError(
                f"A log folder must hold the history or the events of a launch. Received: {where!r}, which "
                f"has neither. {_HOW}."
            )
        return JobReader(LocalFolder(path))
    if all(_ADDRESS.fullmatch(each) for each in where.split(",")):
        from unisono.watch._server_folder import folder_of_servers

        return JobReader(folder_of_servers(where.split(",")))
    for folder in log_folders(Path.cwd()):
        if _job_name(folder) == where:
            return JobReader(LocalFolder(folder))
    from unisono.launcher.engines._slurm_job import folder_of_job

    if (shared := folder_of_job(where)) is not None:
        return JobReader(LocalFolder(shared))
    raise InvalidArgumentError(
        f"The job must be a log folder, HOST:PORT of a server, or the name of a job. Received: {where!r}, "
        f"which is no folder, and no job has this name. {_HOW}."
    )
