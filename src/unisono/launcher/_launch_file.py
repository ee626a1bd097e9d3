"""The file `launch.json` of a log folder: what was launched, for those who look at it from outside."""

from __future__ import annotations

import json
import shlex
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from unisono._system._files import replace_file
from unisono.launcher._options import LaunchOptions
from unisono.launcher._plan import RunPaths


def write_launch_file(
    paths: RunPaths, options: LaunchOptions, title: str, servers: Mapping[str, str] | None = None
) -> None:
    """Write what is launched.

    Args:
        title: the program in short; an empty text stands for the program of this process.
        servers: where the tasks write their events, if not in this folder; for `unisono watch`.

    Raises:
        OSError: the file cannot be written.
    """
    own = Path(sys.argv[0]).name
    own = "unisono" if own == "__main__.py" else own
    counts = {"chief": int(options.chief), "worker": options.workers, "ps": options.ps}
    counts["evaluator"] = int(options.evaluator)
    devices = options.devices_per_worker
    restarts = "none" if not options.restarts else f"{options.restarts} in {options.window / 60:g} minutes"
    config = {
        "tasks": ", ".join(_count(count, job) for job, count in counts.items() if count),
        "workers": f"{options.elastic[0]} to {options.elastic[1]}" if options.elastic else None,
        "devices of a task": None if devices is None else str(devices),
        "restarts": restarts,
        "log folder": str(paths.root),
    }
    record = {
        "title": title or own,
        "command": shlex.join([own, *sys.argv[1:]]),
        "host": socket.gethostname(),
        "max_restarts": options.restarts,
        "restart_window_s": options.window,
        "config": [[name, value] for name, value in config.items() if value is not None],
        **({"servers": dict(servers)} if servers else {}),
    }
    replace_file(paths.launch, json.dumps(record, indent=1) + "\n", durable=False)


def _count(count: int, job: str) -> str:
    return f"{count} {job}" if count == 1 or job == "ps" else f"{count} {job}s"
