import os
import signal
import sys

import pytest
from tests.kubernetes import GROUPS, ApiServer
from tests.unit.launcher.engines.test_kubernetes_manifests import submission

from unisono._errors import BackendError, ClusterError, InvalidArgumentError
from unisono.launcher._options import LaunchOptions
from unisono.launcher.engines import _kubernetes
from unisono.launcher.engines._engine import Submission

pytest.importorskip("kubernetes")
NAME = "unisono-train"
FIRST, SECOND = f"{NAME}-worker-0", f"{NAME}-worker-1"
RUNNING = {"running": {}}
TWO = LaunchOptions(workers=2)


def ended(code, at="00:00:00", message="", reason="Error"):
    state = {"exitCode": code, "finishedAt": f"2026-01-01T{at}Z", "message": message}
    return {"terminated": state | {"reason": reason if code else "Completed"}}


def waiting(reason, message=""):
    return {"waiting": {"reason": reason, "message": message}}


DONE = ({FIRST: ended(0), SECOND: ended(0)}, {f"{NAME}-worker": {"Complete": ""}})
BEGINS = ({FIRST: RUNNING, SECOND: waiting("ContainerCreating")}, {})


def _use(config, monkeypatch):
    # The client reads KUBECONFIG when it is imported.
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(config))


@pytest.fixture(autouse=True)
def quick(monkeypatch, tuned):
    tuned(_kubernetes, _POLL=0.01)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


@pytest.fixture
def hang_ups():
    """SIGHUP has its meaning: `nohup` makes its programs ignore it, and a launch among them."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def launched(tmp_path, monkeypatch):
    """Run a launch against a stand-in; return its exit code."""

    def run(api, shape=TWO, **settings):
        with api.serving(tmp_path) as config:
            _use(config, monkeypatch)
            request = submission(settings.pop("kind", "job"), shape, **settings)
            logs = tmp_path / "logs"
            return _kubernetes.run(Submission(request.options, request.program, logs, request.settings))

    return run


def test_the_chiefs_output_is_shown_and_all_logs_are_kept(launched, tmp_path, capfd):
    api = ApiServer(moments=[({}, {}), BEGINS, ({FIRST: RUNNING, SECOND: RUNNING}, {}), DONE])
    api.logs = {FIRST: b"epoch 1\nepoch 2\n", SECOND: b"quiet\n"}
    assert launched(api) == 0
    out, err = capfd.readouterr()
    assert out == "[worker:0] epoch 1\n[worker:0] epoch 2\n"
    assert err.startswith(
        "unisono: train.py --lr 0.1 runs on Kubernetes as unisono-train in the namespace lab"
    )
    assert (tmp_path / "logs" / "worker-0.log").read_bytes() == api.logs[FIRST]
    assert (tmp_path / "logs" / "worker-1.log").read_bytes() == api.logs[SECOND]
    assert not api.objects
    assert [each["kind"] for each in api.deleted] == ["Job", "Service"]


class CutLogs(ApiServer):
    """The connection of a log is lost after its first line, once."""

    asked = 0

    def log_of(self, pod):
        self.asked += 1
        yield b"epoch %d\n" % self.asked
        if self.asked == 1:
            raise ConnectionAbortedError


def test_a_log_goes_on_after_a_lost_connection(launched, capfd):
    api = CutLogs(moments=[({FIRST: RUNNING}, {})] * 20 + [DONE])
    assert launched(api) == 0
    assert capfd.readouterr().out == "[worker:0] epoch 1\n[worker:0] epoch 2\n"


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_a_set_ends_with_its_own_condition(launched, kind):
    done = {f"{NAME}-{'worker' if kind == 'jobset' else 'node'}-0-0": ended(0)}
    condition = "Completed" if kind == "jobset" else "Complete"
    api = ApiServer(moments=[(done, {NAME: {condition: ""}})])
    assert launched(api, LaunchOptions(), kind=kind) == 0


def test_servers_end_with_the_chief(launched):
    shape = LaunchOptions(workers=1, ps=1, chief=True)
    api = ApiServer(moments=[({f"{NAME}-chief-0": ended(0)}, {f"{NAME}-chief": {"Complete": ""}})])
    assert launched(api, shape, storage="1Gi") == 0
    assert [each["kind"] for each in api.deleted] == ["StatefulSet", "Job", "Job", "Service", "Secret"]
    # It has the backups: the next launch finds it.
    assert [kind for kind, _ in api.objects] == ["PersistentVolumeClaim"]
    assert launched(api, shape, storage="1Gi") == 0


def test_the_root_cause_is_last(launched, capfd):
    lost = "ClusterError: worker 0 of 2 lost worker 1 at 10.0.0.2:2222: its process has ended"
    log = "Traceback …\nValueError: no data\nSome frames are not shown.\n"
    pods = {FIRST: ended(1, "00:00:00", lost), SECOND: ended(3, "00:00:01", log)}
    api = ApiServer(moments=[BEGINS, (pods, {f"{NAME}-worker": {"Failed": "an index has failed"}})])
    assert launched(api) == 3
    err = capfd.readouterr().err
    assert f"unisono: worker:0 ended with exit code 1: {lost}" in err
    assert err.endswith(
        "unisono: an index has failed\nunisono: worker:1 ended with exit code 3: ValueError: no data; "
        f"its pod was {SECOND}\n[worker:1] Traceback …\n[worker:1] ValueError: no data\n"
        "[worker:1] Some frames are not shown.\n"
    )
    assert not api.objects


def test_a_task_that_runs_again_is_no_cause(launched, capfd):
    again = {"name": "node", "restartCount": 1, "state": RUNNING, "lastState": ended(5)}
    pods = {FIRST: {"phase": "Running", "containerStatuses": [again]}, SECOND: ended(6, "00:00:09")}
    api = ApiServer(moments=[(pods, {f"{NAME}-worker": {"Failed": ""}})])
    assert launched(api) == 6
    assert "unisono: worker:0 ended with exit code 5\n" in capfd.readouterr().err


def test_a_pod_that_was_evicted_has_no_container(launched, capfd):
    evicted = {"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory."}
    moment = ({FIRST: evicted, SECOND: RUNNING}, {f"{NAME}-worker": {"Failed": ""}})
    assert launched(ApiServer(moments=[moment])) == 137
    err = capfd.readouterr().err
    assert "worker:0 ended with exit code 137 (Evicted: The node was low on memory.)" in err


def test_a_task_without_memory_ends_the_launch(launched, capfd):
    api = ApiServer(moments=[({FIRST: ended(137, reason="OOMKilled"), SECOND: RUNNING}, {})])
    assert launched(api) == 137
    assert "worker:0 ended with exit code 137 (OOMKilled); its pod was" in capfd.readouterr().err


def test_pods_that_wait_are_named_once(launched, capfd):
    full = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": full}
    waits = {FIRST: RUNNING, SECOND: {"conditions": [condition]}}
    assert launched(ApiServer(moments=[(waits, {}), (waits, {}), DONE])) == 0
    assert capfd.readouterr().err.count(f"unisono: worker:1 waits: {full}\n") == 1


def test_an_image_that_cannot_be_pulled_ends_the_launch(launched):
    pods = {FIRST: waiting("ErrImagePull", "not found")}
    pods[SECOND] = waiting("ImagePullBackOff", "manifest unknown")
    api = ApiServer(moments=[BEGINS, (pods, {})])
    with pytest.raises(InvalidArgumentError, match=r"worker:1 must start.*manifest unknown.*`--image`"):
        launched(api)
    assert not api.objects


@pytest.mark.parametrize(
    ("number", "code", "expected"),
    [(signal.SIGINT, 42, 130), (signal.SIGTERM, 42, 42), (signal.SIGTERM, 1, 143), (signal.SIGHUP, 0, 129)],
)
@pytest.mark.usefixtures("hang_ups")
def test_a_signal_deletes_the_job_and_waits_for_its_pods(launched, number, code, expected):
    def at(look):
        if look == 2:
            os.kill(os.getpid(), number)

    api = ApiServer(at=at)
    api.moments = [BEGINS, ({FIRST: ended(code), SECOND: ended(0)}, {})]
    assert launched(api) == expected
    assert [each["kind"] for each in api.deleted] == ["Job", "Service"]


def test_a_server_that_is_away_for_a_moment_is_asked_again(launched, tuned, capfd):
    refused = iter([True, True])
    api = ApiServer(moments=[BEGINS, DONE], unavailable=lambda: next(refused, False))
    assert launched(api) == 0
    assert capfd.readouterr().err.count("unisono: Kubernetes does not answer, and is asked again") == 1
    tuned(_kubernetes, _PATIENCE=0.05)
    with pytest.raises(ClusterError, match=r"must be reached.*pods -l unisono/launch=unisono-train"):
        launched(ApiServer(moments=[BEGINS], unavailable=lambda: True))


@pytest.mark.parametrize(
    ("verb", "resource", "named"),
    [
        ("list", "pods", "list pods"),
        ("get", "pods/log", "get pods/log"),
        ("create", "jobs", "create jobs.batch"),
        ("delete", "services", "delete services"),
    ],
)
def test_a_right_that_is_missing_is_named_before_anything_starts(launched, verb, resource, named):
    api = ApiServer(denied=[(verb, resource)])
    with pytest.raises(InvalidArgumentError, match=f"may not {named} in the namespace 'lab'.*--namespace"):
        launched(api)
    assert not api.objects
    assert not api.deleted


def test_what_the_cluster_refuses_leaves_nothing_behind(launched):
    with pytest.raises(InvalidArgumentError, match=r'namespaces "nowhere" not found.*--namespace'):
        launched(ApiServer(), namespace="nowhere")
    api = ApiServer(groups=[g for g in GROUPS if "jobset" not in g])
    with pytest.raises(InvalidArgumentError, match=r"the JobSet unisono-train.*could not find.*--kind job"):
        launched(api, LaunchOptions(ps=1), kind="jobset")
    assert [each["kind"] for each in api.deleted] == ["Secret"]
    api.objects["Job", f"{NAME}-worker"] = {"kind": "Job", "metadata": {"name": f"{NAME}-worker"}}
    with pytest.raises(InvalidArgumentError, match=r"already exists.*another `--name`"):
        launched(api)
    assert [kind for kind, _ in api.objects] == ["Job"]


def test_a_machine_without_a_cluster(tmp_path, monkeypatch):
    _use(tmp_path / "none", monkeypatch)
    with pytest.raises(BackendError, match="Kubernetes must have a configuration"):
        _kubernetes.run(submission())
    monkeypatch.setitem(sys.modules, "kubernetes.config", None)
    with pytest.raises(BackendError, match=r"Install `unisono\[kubernetes\]`"):
        _kubernetes.run(submission())
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(BackendError, match=r"Install `unisono\[kubernetes\]`"):
        _kubernetes.render(submission())


def test_a_server_that_is_not_there(tmp_path, monkeypatch):
    with ApiServer().serving(tmp_path) as config:
        _use(config, monkeypatch)
    with pytest.raises(InvalidArgumentError, match=r"must take the launch.*kubectl cluster-info"):
        _kubernetes.run(submission())
