"""A launch on Kubernetes as a log folder: its history from its pods' states, its events from their files.

Tests: tests/unit/watch/test_pod_folder.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from unisono._errors import InvalidArgumentError
from unisono._system._environ import process_environ
from unisono.cluster_resolver._spec import Task
from unisono.launcher.engines._kubernetes_api import ApiError, KubernetesApi, refusal
from unisono.launcher.engines._kubernetes_manifests import (
    CONTAINER,
    JOBSET_LABEL,
    JOBSET_RESTARTS,
    LAUNCH_LABEL,
    Manifest,
    events_file,
)
from unisono.launcher.engines._kubernetes_pods import Start, cause_of, newest, starts_of
from unisono.watch._log_folder import LogFolder

#: Seconds between two looks at the pods, and between two attempts to read a pod that refuses.
_PERIOD, _RETRY = 1.0, 5.0
_HISTORY = "history.jsonl"


@dataclasses.dataclass
class PodEvents:
    """The events of a task, of all its pods after each other.

    Args:
        base: bytes that were read, and are not kept.
        offset: bytes of the file of the present pod that were received.
    """

    key: tuple[str, int] = ("", 0)
    stream: Any = None
    base: int = 0
    kept: bytearray = dataclasses.field(default_factory=bytearray)
    offset: int = 0
    retry_at: float = float("-inf")

    def close(self) -> None:
        """End the connection."""
        if self.stream is not None:
            self.stream.close()
        self.stream = None


class PodFolder:
    """The pods of a launch, read as a log folder.

    Args:
        launch: its name.

    Raises:
        InvalidArgumentError: the namespace has no such pods, or this user may not read them.
    """

    def __init__(self, api: KubernetesApi, launch: str) -> None:
        self._api, self._launch = api, launch
        self.name = f"{launch} on Kubernetes"
        self._history = bytearray()
        self._started: dict[Task, list[tuple[str, int]]] = {}
        self._ended: dict[tuple[str, int], Start] = {}
        self._events: dict[Task, PodEvents] = {}
        self._generation, self._has_quit = 0, False
        self._newest: dict[Task, Start] = {}
        self._next = float("-inf")
        # The pods of Kubeflow's own runtime have JobSet's label alone.
        self._selector, pods = "", []
        for label in (LAUNCH_LABEL, JOBSET_LABEL):
            self._selector = f"{label}={launch}"
            try:
                pods = api.pods(self._selector)
            except ApiError as error:
                raise refusal(error, "a request for the pods of a launch") from error
            if pods:
                break
        if not pods:
            raise InvalidArgumentError(
                f"A launch on Kubernetes must have pods. Received: {launch!r}, of which the namespace "
                f"{api.namespace!r} has none. Write `unisono watch k8s:NAMESPACE/NAME` with the name that "
                "`unisono launch --on kubernetes` has printed; `kubectl get pods -L unisono/launch` shows it."
            )
        began = min(_seconds(pod["metadata"].get("creationTimestamp")) for pod in pods)
        self._note("launched", began, None)

    def names(self, folder: str) -> Sequence[str]:
        """Return the names of the files in a folder below it."""
        return [f"{task.type}-{task.index}.jsonl" for task in self._events] if folder == "events" else []

    def size(self, name: str) -> int:
        """Return the bytes of a file; 0 where there is none."""
        if name == _HISTORY:
            self._refresh()
            return len(self._history)
        events = self._of(name)
        return 0 if events is None else events.base + len(events.kept)

    def read(self, name: str, start: int, most: int) -> bytes:
        """Return bytes of a file from a position on, of events each byte once; none where there are none."""
        if name == _HISTORY:
            return bytes(self._history[start : start + most])
        events = self._of(name)
        if events is None or start < events.base:
            return b""
        del events.kept[: start - events.base]
        events.base = start
        return bytes(events.kept[:most])

    def changed_at(self, name: str) -> float | None:
        """Return None: the events themselves say when they were written."""
        return None

    def close(self) -> None:
        """End the connections with the pods."""
        for events in self._events.values():
            events.close()

    def _of(self, name: str) -> PodEvents | None:
        job, _, index = name.removeprefix("events/").removesuffix(".jsonl").rpartition("-")
        return self._events.get(Task(job, int(index))) if index.isdecimal() else None

    def _refresh(self) -> None:
        """Look at the pods, and take what has been received of their events."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _PERIOD
        pods = None
        # What is known stays while the API server is away.
        with contextlib.suppress(ApiError):
            pods = self._api.pods(self._selector)
        if pods is not None:
            self._take_pods(pods)
        for task, start in self._newest.items():
            self._take_events(task, start)

    # --- the history ----------------------------------------------------------------------------

    def _take_pods(self, pods: list[Manifest]) -> None:
        claimed = {pod["metadata"]["uid"]: _has_claim(pod) for pod in pods}
        restarts = {
            pod["metadata"]["uid"]: int((pod["metadata"].get("labels") or {}).get(JOBSET_RESTARTS, 0))
            for pod in pods
        }
        every = [start for pod in pods for start in starts_of(pod)]
        for start in sorted(every, key=lambda each: (each.created, each.key[1])):
            self._take_start(start, restarts[start.key[0]], claimed[start.key[0]])
        self._newest |= newest(every)
        has_succeeded = self._has_succeeded()
        # A pod that has failed may be replaced, but not where all are deleted.
        if not self._has_quit and (has_succeeded or not pods):
            at = max((start.at for start in self._ended.values()), default=0.0)
            cause = cause_of(self._newest.values())
            # Unknown where the pods were deleted before their end was seen: by Ctrl-C, or quickly after it.
            code = 0 if has_succeeded else (cause.code or 1) if cause else None
            self._note("quit", at or time.time(), None, exit_code=code)
            self._has_quit = True

    def _take_start(self, start: Start, generation: int, has_claim: bool) -> None:
        began = self._started.setdefault(start.task, [])
        events = self._events.setdefault(start.task, PodEvents())
        if start.key not in began and (start.is_running or start.code is not None):
            before = [self._ended[key].at for key in began if key in self._ended]
            at = max([_seconds(start.created), *before])
            if generation > self._generation:
                self._generation = generation
                self._note("restart", at, None, detail="all pods")
            elif began:
                self._note("restart task", at, start.task, detail=f"pod {start.pod}")
            if began and not has_claim and began[-1][0] != start.key[0]:
                # Its volume is as old as the pod. The last line of the other one may be incomplete.
                events.offset = 0
                events.kept += b"\n"
            began.append(start.key)
            self._note("started", at, start.task, detail=start.pod)
        elif not began and start.task not in self._newest:
            self._note("created", _seconds(start.created), start.task)
        if start.code is not None and start.key not in self._ended:
            self._ended[start.key] = start
            name = "failed" if start.code else "ended"
            self._note(name, start.at or time.time(), start.task, start.detail, start.code)

    def _has_succeeded(self) -> bool:
        """Return whether all tasks have ended whose success is the launch's."""
        jobs = {task.type for task in self._newest}
        waits_for_workers = not {"ps", "chief"} <= jobs
        deciding = [t for t in self._newest if t.type != "ps" and (t.type != "worker" or waits_for_workers)]
        ended = [self._newest[task].code for task in deciding]
        return bool(ended) and not any(code != 0 for code in ended)

    def _note(
        self, name: str, at: float, task: Task | None, detail: str = "", exit_code: int | None = None
    ) -> None:
        record = {
            "event": name, "time": at, "task": None if task is None else str(task), "detail": detail,
            "generation": self._generation, "exit_code": exit_code,
        }  # fmt: skip
        self._history += json.dumps(record).encode() + b"\n"

    # --- the events -----------------------------------------------------------------------------

    def _take_events(self, task: Task, start: Start) -> None:
        events = self._events.setdefault(task, PodEvents())
        if start.key != events.key:
            events.close()
            events.key = start.key
        now = time.monotonic()
        if events.stream is None and start.is_running and now >= events.retry_at:
            events.retry_at = now + _RETRY
            file = events_file(self._launch, task.type, task.index)
            # `tail` ends by itself: it cannot write where this process has ended.
            command = ["tail", "-c", f"+{events.offset + 1}", "-F", file]
            try:
                events.stream = self._api.output(start.pod, CONTAINER, command)
            except ApiError as error:
                if error.status in (401, 403):
                    raise refusal(error, f"a request to read the events in the pod {start.pod}") from error
        if events.stream is None:
            return
        try:
            events.stream.update(timeout=0)
            data = events.stream.read_channel(1).encode()
            is_open = events.stream.is_open()
        except Exception:
            # Of the client and of the library below it, which name no common class: the connection is lost.
            data, is_open = b"", False
        events.kept += data
        events.offset += len(data)
        if not is_open:
            events.close()


def _seconds(text: str | None) -> float:
    return datetime.fromisoformat(text).timestamp() if text else 0.0


def _has_claim(pod: Manifest) -> bool:
    volumes = (pod.get("spec") or {}).get("volumes") or ()
    return any("persistentVolumeClaim" in volume for volume in volumes)


def pods_of_launch(where: str) -> LogFolder:
    """Return the pods of a launch.

    Args:
        where: `NAME` of the launch, in the namespace of `kubectl`'s context; or `NAMESPACE/NAME`.

    Raises:
        InvalidArgumentError: there are no such pods, or this user may not read them.
        BackendError: the client is not installed, or finds no way to the cluster.
    """
    namespace, _, name = where.rpartition("/")
    return PodFolder(KubernetesApi(process_environ(), namespace or None), name)
