"""A launch on Kubernetes that is watched by its name."""

import contextlib

import pytest
from tests.kubernetes import ApiServer
from tests.unit.launcher.engines.test_kubernetes import (
    FIRST,
    NAME,
    RUNNING,
    SECOND,
    TWO,
    _use,
    ended,
    waiting,
)
from tests.unit.launcher.engines.test_kubernetes_manifests import submission
from tests.unit.watch.test_server_folder import line

from unisono._errors import InvalidArgumentError
from unisono.launcher.engines._kubernetes_manifests import events_file, manifests
from unisono.watch import _pod_folder
from unisono.watch._places import find_job
from unisono.watch.web._page_reader import PageReader

pytest.importorskip("kubernetes")
FILES = [events_file(NAME, "worker", index) for index in range(2)]
BOTH = {FIRST: RUNNING, SECOND: RUNNING}


@pytest.fixture
def watched(tmp_path, monkeypatch, tuned):
    """Start a stand-in with a launch of two workers; return it and a function that gives a reader."""
    tuned(_pod_folder, _PERIOD=0.0, _RETRY=0.0)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with contextlib.ExitStack() as stack:

        def watch(*moments, name=f"k8s:{NAME}", **settings):
            api = ApiServer(moments=[(states, {}) for states in moments], **settings)
            for each in manifests(submission("job", TWO)):
                api.objects[each["kind"], each["metadata"]["name"]] = each
            _use(stack.enter_context(api.serving(tmp_path)), monkeypatch)
            reader = find_job(name)
            stack.callback(reader.folder.close)
            return api, reader

        yield watch


def until(look, holds):
    """Look again and again; what the client has received is there after some looks."""
    for _ in range(500):
        if holds(seen := look()):
            return seen
    raise AssertionError(seen)


def steps(job):
    return [(task.name, task.state, task.step) for task in job.tasks]


def test_steps_are_read_from_the_pods_as_they_grow(watched):
    api, reader = watched(BOTH)
    api.files[FIRST, FILES[0]] = bytearray((line(1) + "\n").encode())
    api.files[SECOND, FILES[1]] = bytearray((line(2) + "\n").encode())
    job = until(reader.refresh, lambda job: [task.step for task in job.tasks] == [1, 2])
    assert (job.title, job.state, steps(job)[0]) == (f"{NAME} on Kubernetes", "runs", ("worker:0", "runs", 1))
    api.files[SECOND, FILES[1]] += (line(5) + "\n").encode()
    until(reader.refresh, lambda job: [task.step for task in job.tasks] == [1, 5])
    # Each byte once.
    assert reader.folder.read("events/worker-1.jsonl", 0, 1000) == b""


def test_a_pod_that_has_failed_is_a_fault_and_its_end_an_exit_code(watched):
    failed = {FIRST: RUNNING, SECOND: ended(1, message="ValueError: no data")}
    _, reader = watched(BOTH, BOTH, failed, {})
    assert steps(reader.refresh()) == [("worker:0", "starts", None), ("worker:1", "starts", None)]
    job = reader.refresh()
    assert [(f.kind, f.task, f.text) for f in job.faults] == [
        ("failure", "worker:1", "ended with exit code 1: ValueError: no data")
    ]
    assert job.exit_code is None
    # The objects were deleted.
    job = reader.refresh()
    assert (job.state, job.exit_code) == ("failed", 1)


def test_pods_that_are_deleted_before_their_end_is_seen(watched):
    _, reader = watched(BOTH, BOTH, {})
    assert reader.refresh().state == "starts"
    job = reader.refresh()
    assert (job.state, job.exit_code) == ("ended", None)


def test_pods_that_wait_have_not_begun_and_all_that_have_succeeded_are_the_end(watched):
    done = {FIRST: ended(0, "00:01:00"), SECOND: ended(0, "00:02:00")}
    _, reader = watched({FIRST: waiting("ContainerCreating")}, {FIRST: waiting("ContainerCreating")}, done)
    job = reader.refresh()
    assert (job.state, steps(job)) == ("starts", [("worker:0", "starts", None)])
    job = reader.refresh()
    assert (job.state, job.exit_code, job.now - job.started) == ("ended", 0, 120.0)


def test_what_cannot_be_watched_is_named(watched):
    with pytest.raises(InvalidArgumentError, match="'nothing', of which the namespace 'lab' has none"):
        watched(BOTH, name="k8s:nothing")
    with pytest.raises(InvalidArgumentError, match="cannot list pods"):
        watched(BOTH, denied=[("list", "pods")])
    _, reader = watched(BOTH, denied=[("get", "pods/exec")])
    with pytest.raises(InvalidArgumentError, match=f"read the events in the pod {FIRST}.*403"):
        reader.refresh()


def test_a_page_shows_steps_that_were_read_in_several_pieces(watched):
    api, reader = watched(BOTH)
    api.files[FIRST, FILES[0]] = bytearray("".join(line(i + 1) + "\n" for i in range(3000)).encode())
    until(reader.refresh, lambda job: job.step == 3000)
    row = PageReader(reader).read()["timeline"]["worker:0"]
    assert row["steps"]
