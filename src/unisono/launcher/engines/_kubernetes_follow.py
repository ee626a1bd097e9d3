"""Follow a launch on Kubernetes until its end: its pods' logs and failures, and what it waits for.

Tests: tests/unit/launcher/engines/test_kubernetes.py.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from unisono._errors import ClusterError, InvalidArgumentError
from unisono.cluster_resolver._spec import Task
from unisono.launcher._plan import RunPaths
from unisono.launcher._run_files import BestEffort, Tail, size_of
from unisono.launcher.engines._kubernetes_api import ApiError, KubernetesApi
from unisono.launcher.engines._kubernetes_manifests import CONTAINER, Manifest
from unisono.launcher.engines._kubernetes_pods import Start, newest, starts_of
from unisono.launcher.terminal._console import Display

#: Seconds between two looks at the pods.
_POLL = 1.0
#: Seconds for which the API server may be away: the launch runs on without this process.
_PATIENCE = 300.0
#: Seconds for the rest of a log after the end of its container.
_REST_OF_LOG = 5.0
_OUT_OF_MEMORY = "OOMKilled"


@dataclasses.dataclass(frozen=True)
class SubmittedLaunch:
    """What is followed.

    Args:
        watched: the objects whose failure is that of the launch.
        deciding: the names of those whose success is that of the launch.
        restarts: how often a task may run out of memory: Kubernetes would start it again without end.
    """

    name: str
    selector: str
    watched: tuple[Manifest, ...]
    deciding: tuple[str, ...]
    shown: Task
    restarts: int


class Follower:
    """Shows what a launch does, and copies all logs into the log directory."""

    def __init__(
        self, api: KubernetesApi, followed: SubmittedLaunch, paths: RunPaths, screen: Display
    ) -> None:
        self._api, self._followed, self._paths, self._screen = api, followed, paths, screen
        self._files = BestEffort(screen.say, paths.root)
        self._copies: dict[tuple[str, int], threading.Thread] = {}
        self._ended: dict[tuple[str, int], Start] = {}
        self._said: set[str] = set()
        self._seen_at = time.monotonic()
        self._conditions: dict[str, dict[str, str]] = {}
        self._pods: list[Manifest] = []
        #: The newest start of each task, also of pods that are gone.
        self.newest: dict[Task, Start] = {}
        log = paths.log(followed.shown)
        with self._files.attempt():
            log.touch()
        screen.follow(followed.shown, Tail(log, size_of(log)))

    def follow(self, stop_requests: Callable[[], Sequence[int]]) -> str | None:
        """Wait for the end of a launch, or a request to stop.

        Returns:
            None when it has succeeded, else how it failed; empty where it was asked to stop.

        Raises:
            InvalidArgumentError: a container cannot be started.
            ClusterError: the launch cannot be seen any more.
        """
        while not stop_requests():
            if self._looked():
                failed = [held["Failed"] for held in self._conditions.values() if "Failed" in held]
                if failed or self._is_out_of_memory():
                    return failed[0] if failed else "a task has no memory left, again and again"
                if all({"Complete", "Completed"} & set(self._conditions[n]) for n in self._followed.deciding):
                    return None
            time.sleep(_POLL)
        return ""

    def drain(self, seconds: float, stop_requests: Callable[[], Sequence[int]]) -> None:
        """Wait until all pods are gone, with their logs; a second request to stop is obeyed at once."""
        self._followed = dataclasses.replace(self._followed, watched=())
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and len(stop_requests()) < 2:
            if self._looked() and not self._pods:
                return
            time.sleep(_POLL)

    def close(self) -> None:
        """Wait for the rest of the logs of containers that have ended."""
        deadline = time.monotonic() + _REST_OF_LOG
        for key, copy in self._copies.items():
            if key in self._ended:
                copy.join(max(0.0, deadline - time.monotonic()))
        self._screen.finish()

    def _looked(self) -> bool:
        """Look at the launch; return whether the API server has answered."""
        try:
            # The pods last: when a Job has ended, so have its pods.
            self._conditions = {
                o["metadata"]["name"]: self._api.conditions(o) for o in self._followed.watched
            }
            self._look_at_pods()
        except ApiError as error:
            away = time.monotonic() - self._seen_at
            if 400 <= error.status < 500:
                raise ClusterError(
                    f"The launch must stay in the cluster until its end. Received: {error}. Start it again: "
                    "a program with backups continues from the last one."
                ) from error
            if away > _PATIENCE:
                raise ClusterError(
                    f"Kubernetes' API server must be reached. Received: {error}, for {away:.0f} s. The "
                    "launch may go on without this program: see "
                    f"`kubectl get pods -l {self._followed.selector}`."
                ) from error
            self._say_once(f"unisono: Kubernetes does not answer, and is asked again: {error}")
            return False
        self._seen_at = time.monotonic()
        return True

    def _look_at_pods(self) -> None:
        self._pods = self._api.pods(self._followed.selector)
        every = [start for pod in self._pods for start in starts_of(pod)]
        self.newest |= newest(every)
        for start in every:
            if start.is_running or start.code is not None:
                self._copy(start)
            if start.code is not None and start.key not in self._ended:
                self._ended[start.key] = start
                if start.code:
                    self._screen.say(f"unisono: {start.task} {start.detail}")
            if start.is_hopeless:
                raise InvalidArgumentError(
                    f"The container of {start.task} must start. Received: {start.waits_for}. Write an "
                    "`--image` that the nodes can pull; see `kubectl describe pod`."
                )
            if start.waits_for:
                self._say_once(f"unisono: {start.task} waits: {start.waits_for}")

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._screen.say(text)

    def _is_out_of_memory(self) -> bool:
        times = [start.task for start in self._ended.values() if start.reason == _OUT_OF_MEMORY]
        return any(times.count(task) > self._followed.restarts for task in times)

    def _copy(self, start: Start) -> None:
        """Copy the log of a container in a thread of its own."""
        if start.key not in self._copies:
            path = self._paths.log(start.task)
            copy = threading.Thread(target=self._copy_log, args=(start.pod, path), daemon=True)
            self._copies[start.key] = copy
            copy.start()

    def _copy_log(self, pod: str, path: Path) -> None:
        since: int | None = None
        while True:
            last = time.monotonic()
            try:
                with self._files.attempt(), path.open("ab", buffering=0) as file:
                    for chunk in self._api.log(pod, CONTAINER, since):
                        file.write(chunk)
                        last = time.monotonic()
                return
            except ApiError as error:
                if error.status:  # the pod is gone
                    return
                # The connection was lost. Rather a line twice than one not at all.
                time.sleep(_POLL)
                since = int(time.monotonic() - last) + 1
