"""`unisono launch --on kubernetes`: pods that Kubernetes starts, restarts and ends.

Tests: tests/unit/launcher/engines/test_kubernetes.py, tests/cluster/test_kubernetes.py.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from unisono._errors import BackendError, ClusterError, InvalidArgumentError
from unisono.cluster_resolver._spec import Task
from unisono.launcher._launch import environ, make_run_paths, stop_signals
from unisono.launcher._plan import RunPaths
from unisono.launcher._restart_policy import stopped_code
from unisono.launcher._run_files import BestEffort, Tail, size_of
from unisono.launcher.engines._engine import FunctionCall, Submission
from unisono.launcher.engines._kubernetes_api import ApiError, KubernetesApi, refusal
from unisono.launcher.engines._kubernetes_manifests import (
    CONTAINER,
    Manifest,
    deciding_jobs,
    launch_name,
    manifests,
    pod_selector,
)
from unisono.launcher.engines._kubernetes_pods import Start, cause_of, newest, starts_of
from unisono.launcher.engines._settings import KubernetesSettings
from unisono.launcher.terminal._console import BackgroundConsole, Console
from unisono.launcher.terminal._printable import prefixed

HONOURED = frozenset({"devices_per_worker", "interface"})

#: Seconds for pods to vanish after the end of their grace period.
_VANISH = 30.0
#: Seconds between two looks at the pods.
_POLL = 1.0
#: Seconds for which the API server may be away: the launch runs on without this process.
_PATIENCE = 300.0
#: Seconds for the rest of a log after the end of its container.
_REST_OF_LOG = 5.0
_OUT_OF_MEMORY = "OOMKilled"
#: Objects that stay: they hold the backups.
_KEPT = "PersistentVolumeClaim"


def render(submission: Submission[KubernetesSettings]) -> str:
    """Return the objects as YAML, for `kubectl apply`.

    Raises:
        InvalidArgumentError: a flag cannot be right.
    """
    objects = manifests(submission)
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as error:
        raise BackendError(
            f"Objects of Kubernetes must be written by PyYAML. Received: {error}. Install "
            "`unisono[kubernetes]`."
        ) from error
    text: str = yaml.safe_dump_all(objects, sort_keys=False, width=110)
    return text


def run(submission: Submission[KubernetesSettings]) -> int:
    """Create the objects, follow the launch, and delete them at its end.

    Raises:
        InvalidArgumentError: the cluster does not take the launch, or cannot start its containers.
        BackendError: the client is not installed, or finds no way to the cluster.
    """
    objects = manifests(submission)
    api = KubernetesApi(environ(), submission.settings.namespace)
    try:
        api.check_rights(objects)
    except ApiError as error:
        raise refusal(error, "the launch") from error
    paths = make_run_paths(submission.log_dir)
    screen = BackgroundConsole(Console(sys.stderr, sys.stdout))
    with closing(screen), stop_signals() as stops, _created(api, objects, screen.say) as delete:
        screen.say(
            f"unisono: {submission.program.text} runs on Kubernetes as {launch_name(submission)} in the "
            f"namespace {api.namespace}\n  logs: {paths.root}"
        )
        with closing(Follower(api, submission, objects, paths, screen)) as follower:
            failed = follower.follow(stops)
            if stops:
                delete()
                follower.drain(submission.options.grace + _VANISH, stops)
        starts = tuple(follower.newest.values())
        if stops:
            codes = [-1 if start.code is None else start.code for start in starts if start.task.type != "ps"]
            return stopped_code(stops[0], tuple(codes))
        if failed is None:
            return 0
        cause = cause_of(starts)
        screen.say("\n".join(filter(None, [f"unisono: {failed}" if failed else "", _report(cause)])))
        return cause.code or 1 if cause else 1


def call(submission: Submission[KubernetesSettings], function: FunctionCall) -> list[Any]:
    """Refuse: pods see what their image and their claims hold, and no folder of this machine."""
    name = getattr(function.fn, "__name__", "train")
    raise InvalidArgumentError(
        "Kubernetes must find a program in the image of its pods, and cannot be sent a function. Received: "
        f"on='kubernetes' with the function {name}. Write a script that calls it into the image, and "
        f"`unisono launch --on kubernetes --image … {name}.py`; `on` may be 'ray', 'slurm' or 'mpi'."
    )


@contextmanager
def _created(
    api: KubernetesApi, objects: Sequence[Manifest], say: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """Create objects, yield what deletes them, and delete them at the end, also after an error."""
    created: list[Manifest] = []

    def delete() -> None:
        while created:
            each = created.pop()
            try:
                api.delete(each)
            except ApiError as error:
                say(f"unisono: the {each['kind']} {each['metadata']['name']} stays in the cluster: {error}")

    try:
        for each in objects:
            try:
                api.create(each)
            except ApiError as error:
                if error.status == 409 and each["kind"] == _KEPT:
                    continue
                raise refusal(error, f"the {each['kind']} {each['metadata']['name']}") from error
            if each["kind"] != _KEPT:
                created.append(each)
        yield delete
    finally:
        delete()


def _report(cause: Start | None) -> str:
    if cause is None:
        return ""
    head = f"unisono: {cause.task} {cause.detail}; its pod was {cause.pod}"
    return f"{head}\n{prefixed(cause.task, cause.message)}".rstrip()


class Follower:
    """Shows what a launch does, and copies all logs into the log directory.

    Args:
        objects: those that were submitted.
    """

    def __init__(
        self,
        api: KubernetesApi,
        submission: Submission[KubernetesSettings],
        objects: Sequence[Manifest],
        paths: RunPaths,
        screen: BackgroundConsole,
    ) -> None:
        self._api, self._paths, self._screen = api, paths, screen
        self._selector = pod_selector(submission)
        #: How often a task may run out of memory: Kubernetes would start it again without end.
        self._restarts = submission.options.restarts
        name = launch_name(submission)
        deciding = {name, *(f"{name}-{job}" for job in deciding_jobs(submission.options))}
        #: The objects whose failure is the launch's, and the names of the ones whose success is.
        self._watched = [each for each in objects if each["kind"] in ("Job", "JobSet", "TrainJob")]
        self._deciding = deciding & {each["metadata"]["name"] for each in self._watched}
        self._files = BestEffort(screen.say, paths.root)
        self._copies: dict[tuple[str, int], threading.Thread] = {}
        self._ended: dict[tuple[str, int], Start] = {}
        self._said: set[str] = set()
        self._seen_at = time.monotonic()
        self._conditions: dict[str, dict[str, str]] = {}
        self._pods: list[Manifest] = []
        #: The newest start of each task, also of pods that are gone.
        self.newest: dict[Task, Start] = {}
        shown = Task("chief" if submission.options.chief else "worker", 0)
        log = paths.log(shown)
        with self._files.attempt():
            log.touch()
        screen.follow(shown, Tail(log, size_of(log)))

    def follow(self, stop_requests: Sequence[int]) -> str | None:
        """Wait for the end of a launch, or a request to stop.

        Returns:
            None when it has succeeded, else how it failed; empty where it was asked to stop.

        Raises:
            InvalidArgumentError: a container cannot be started.
            ClusterError: the launch cannot be seen any more.
        """
        while not stop_requests:
            if self._looked():
                failed = [held["Failed"] for held in self._conditions.values() if "Failed" in held]
                if failed or self._is_out_of_memory():
                    return failed[0] if failed else "a task has no memory left, again and again"
                if all({"Complete", "Completed"} & set(self._conditions[n]) for n in self._deciding):
                    return None
            time.sleep(_POLL)
        return ""

    def drain(self, seconds: float, stop_requests: Sequence[int]) -> None:
        """Wait until all pods are gone, with their logs; a second request to stop is obeyed at once."""
        self._watched = []
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and len(stop_requests) < 2:
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
            self._conditions = {o["metadata"]["name"]: self._api.conditions(o) for o in self._watched}
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
                    f"`kubectl get pods -l {self._selector}`."
                ) from error
            self._say_once(f"unisono: Kubernetes does not answer, and is asked again: {error}")
            return False
        self._seen_at = time.monotonic()
        return True

    def _look_at_pods(self) -> None:
        self._pods = self._api.pods(self._selector)
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
        return any(times.count(task) > self._restarts for task in times)

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
