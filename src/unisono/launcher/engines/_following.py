"""What the terminal shows of a job elsewhere: the chief's log, and last why it failed.

Tests: tests/unit/launcher/engines/test_slurm_job.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from unisono.cluster_resolver._spec import Task
from unisono.launcher._plan import RunPaths
from unisono.launcher._restart_policy import Failure, root_cause
from unisono.launcher._run_files import last_lines, read_error

_RECORD = re.compile(r"g(\d+)-(\w+)-(\d+)\.json")


def recorded_failures(paths: RunPaths, generation: int) -> list[Failure]:
    """Return what the tasks of a generation have written of the exceptions that ended them."""
    found = []
    for path in sorted((paths.root / "errors").glob(f"g{generation}-*.json")):
        match, record = _RECORD.fullmatch(path.name), read_error(path)
        if match is not None and record is not None:
            task = Task(match[2], int(match[3]))
            found.append(Failure(task, record["at"], record["code"], record["summary"]))
    return found


def first_failure(paths: RunPaths, generation: int, engine: Iterable[Failure]) -> Failure | None:
    """Return the failure that caused the others, None where there is none.

    Args:
        engine: what the engine says, the first at first; it does not know what was raised.
    """
    said = [Failure(f.task, math.inf, f.code, f.detail) for f in engine][:1]
    failures = [*recorded_failures(paths, generation), *said]
    return root_cause(failures) if failures else None


def failure_report(paths: RunPaths, generation: int, engine: Iterable[Failure]) -> str:
    """Return why a job failed, with the traceback of the first failure at the end."""
    first = first_failure(paths, generation, engine)
    if first is None:
        return ""
    log = paths.log(first.task)
    record = read_error(paths.error(first.task, generation)) if first.at < math.inf else None
    detail = record["traceback"] if record is not None and record["traceback"] else last_lines(log, 0)
    head = f"unisono: {first.task} {first.detail}, in generation {generation}; its log is {log}"
    return "\n".join(filter(None, [head, detail.rstrip()]))
