"""The state of a launch's pods, read from the API's objects; pure.

Tests: tests/unit/launcher/engines/test_kubernetes.py.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from unisono._system._signals import RESTART_WANTED
from unisono.cluster_resolver._spec import Task, read_index
from unisono.launcher._restart_policy import Failure, root_cause
from unisono.launcher.engines._kubernetes_manifests import (
    CONTAINER,
    INDEX_ANNOTATION,
    INDEX_LABEL,
    JOB_LABEL,
    Manifest,
)

#: Exit codes above it are signals'.
_SIGNALLED = 128
#: The line of a traceback that names the exception; notes may follow it.
_EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")
#: Reasons for which a container waits that do not pass by themselves.
_HOPELESS = ("CreateContainerConfigError", "ErrImageNeverPull", "ImagePullBackOff", "InvalidImageName")


@dataclasses.dataclass(frozen=True)
class Start:
    """One start of a task: a pod, or a container that was started again in its pod.

    Args:
        key: differs between all starts.
        created: when the pod was created, in RFC 3339.
        is_running: whether the container has begun and not ended.
        code: its exit code, None before its end.
        reason: why it ended, such as `"OOMKilled"`.
        message: the end of its log, where it failed.
        at: when it ended, in seconds since the epoch.
        waits_for: why it does not run yet; empty where there is nothing to say.
        is_hopeless: whether it will wait for ever.
    """

    task: Task
    pod: str
    key: tuple[str, int]
    created: str
    is_running: bool = False
    code: int | None = None
    reason: str = ""
    message: str = ""
    at: float = 0.0
    waits_for: str = ""
    is_hopeless: bool = False

    @property
    def failure(self) -> Failure | None:
        """How the task failed, None where it did not."""
        return None if self.code in (None, 0) else Failure(self.task, self.at, self.code or 1, self.detail)

    @property
    def detail(self) -> str:
        """How the task ended, in one line."""
        why = self.reason if self.reason not in ("", "Error", "Completed") else ""
        text = f"ended with exit code {self.code}" + (f" ({why})" if why else "")
        # What a process printed before a signal ended it says nothing of the signal.
        lines = self.message.strip().splitlines() if self.code not in (None, RESTART_WANTED) else []
        last = next(filter(_EXCEPTION.match, reversed(lines)), *lines[-1:]) if lines else ""
        return f"{text}: {last.strip()}" if last and (self.code or 0) <= _SIGNALLED else text


def starts_of(pod: Manifest) -> list[Start]:
    """Return the visible starts of a pod: the last ended one, and the present one.

    >>> metadata = {"name": "w-1-x", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z",
    ...     "labels": {"unisono/job": "worker", "apps.kubernetes.io/pod-index": "1"}}
    >>> state = {"name": "node", "restartCount": 0, "state": {"terminated": {"exitCode": 1, "reason": "Error",
    ...     "message": "ValueError: no data", "finishedAt": "1970-01-01T00:01:00Z"}}}
    >>> [start] = starts_of({"metadata": metadata, "status": {"containerStatuses": [state]}})
    >>> start.failure
    Failure(task=Task(type='worker', index=1), at=60.0, code=1,
        detail='ended with exit code 1: ValueError: no data')
    """
    metadata, status = pod["metadata"], pod.get("status", {})
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    index = read_index(annotations.get(INDEX_ANNOTATION, labels.get(INDEX_LABEL, "0")))
    # The pods of Kubeflow's own runtime are all workers.
    task = Task(labels.get(JOB_LABEL, "worker"), index or 0)
    start = Start(task, metadata["name"], (metadata["uid"], 0), metadata.get("creationTimestamp") or "")
    containers = [c for c in status.get("containerStatuses") or () if c["name"] == CONTAINER]
    if not containers:
        return [_before_start(start, status)]
    count, states = containers[0].get("restartCount", 0), containers[0].get("state") or {}
    starts = [_with_state(start, (metadata["uid"], count), states)]
    ended = (containers[0].get("lastState") or {}).get("terminated")
    if ended and count:
        starts.insert(0, _with_state(start, (metadata["uid"], count - 1), {"terminated": ended}))
    return starts


def _before_start(start: Start, status: Mapping[str, Any]) -> Start:
    """A pod that has no container yet, or never will: it was evicted, or waits for a node."""
    if status.get("phase") == "Failed":
        why = ": ".join(filter(None, [status.get("reason"), status.get("message")]))
        return dataclasses.replace(start, code=137, reason=why)
    for condition in status.get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return dataclasses.replace(start, waits_for=condition.get("message") or "a node")
    return start


def _with_state(start: Start, key: tuple[str, int], states: Mapping[str, Any]) -> Start:
    start = dataclasses.replace(start, key=key, is_running="running" in states)
    if ended := states.get("terminated"):
        at = ended.get("finishedAt")
        return dataclasses.replace(
            start,
            code=ended["exitCode"],
            reason=ended.get("reason") or "",
            message=ended.get("message") or "",
            at=datetime.fromisoformat(at).timestamp() if at else 0.0,
        )
    waiting = states.get("waiting") or {}
    reason = waiting.get("reason") or ""
    if reason in ("", "ContainerCreating", "PodInitializing", "CrashLoopBackOff"):
        return start
    text = ": ".join(filter(None, [reason, waiting.get("message")]))
    return dataclasses.replace(start, waits_for=text, is_hopeless=reason in _HOPELESS)


def newest(starts: Iterable[Start]) -> dict[Task, Start]:
    """Return the newest start of each task."""
    every: dict[Task, Start] = {}
    for start in sorted(starts, key=lambda s: (s.created, s.key[1])):
        every[start.task] = start
    return every


def cause_of(starts: Iterable[Start]) -> Start | None:
    """Return the start whose failure ended a launch, None where no failure is known."""
    failed = {start.failure: start for start in starts if start.failure and start.code != RESTART_WANTED}
    return failed[root_cause(failed)] if failed else None
