"""`unisono launch --on kubernetes`: pods that Kubernetes starts, restarts and ends.

Tests: tests/unit/launcher/engines/test_kubernetes.py, tests/cluster/test_kubernetes.py.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from unisono._errors import BackendError, InvalidArgumentError
from unisono.cluster_resolver._spec import Task
from unisono.launcher._launch import environ, make_run_paths, stop_signals
from unisono.launcher._restart_policy import stopped_code
from unisono.launcher.engines._engine import FunctionCall, Submission
from unisono.launcher.engines._kubernetes_api import ApiError, KubernetesApi, refusal
from unisono.launcher.engines._kubernetes_follow import Follower, SubmittedLaunch
from unisono.launcher.engines._kubernetes_manifests import (
    Manifest,
    deciding_jobs,
    launch_name,
    manifests,
    pod_selector,
)
from unisono.launcher.engines._kubernetes_pods import Start, cause_of
from unisono.launcher.engines._settings import KubernetesSettings
from unisono.launcher.terminal._console import BackgroundConsole, Console

HONOURED = frozenset({"devices_per_worker", "interface"})

#: Seconds for pods to vanish after the end of their grace period.
_VANISH = 30.0
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
    followed = _followed(submission, objects)
    screen = BackgroundConsole(Console(sys.stderr, sys.stdout))
    with closing(screen), stop_signals() as stops, _created(api, objects, screen.say) as delete:
        screen.say(
            f"unisono: {submission.program.text} runs on Kubernetes as {followed.name} in the namespace "
            f"{api.namespace}\n  logs: {paths.root}"
        )
        with closing(Follower(api, followed, paths, screen)) as follower:
            failed = follower.follow(lambda: tuple(stops))
            if stops:
                delete()
                follower.drain(submission.options.grace + _VANISH, lambda: tuple(stops))
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


def _followed(submission: Submission[KubernetesSettings], objects: Sequence[Manifest]) -> SubmittedLaunch:
    name, options = launch_name(submission), submission.options
    watched = tuple(each for each in objects if each["kind"] in ("Job", "JobSet", "TrainJob"))
    deciding = {name, *(f"{name}-{job}" for job in deciding_jobs(options))}
    names = tuple(each["metadata"]["name"] for each in watched if each["metadata"]["name"] in deciding)
    shown = Task("chief" if options.chief else "worker", 0)
    return SubmittedLaunch(name, pod_selector(submission), watched, names, shown, options.restarts)


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
    return f"unisono: {cause.task} {cause.detail}; its pod was {cause.pod}\n{cause.message}".rstrip()
