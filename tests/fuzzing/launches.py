"""What launches, clouds and schedulers write: histories, events, and the environment of a process."""

import json
from types import SimpleNamespace

from hypothesis import strategies as st

from tests.fuzzing.changes import BYTE_CHANGES, SAME, TEXT_CHANGES, TEXTS, changed_bytes, changed_text
from unisono._backend import devices_asked_for
from unisono.cli import _timeline_page
from unisono.cluster._lone_task import find_siblings, find_tasks
from unisono.cluster._own_address import own_address
from unisono.cluster._watch_port import WATCHER, read_watch_keys
from unisono.cluster.liveness import _health
from unisono.cluster.liveness._heartbeat_file import _is_later
from unisono.cluster_resolver import _base, resolve
from unisono.cluster_resolver._kubernetes import KubernetesClusterResolver
from unisono.cluster_resolver._spec import ClusterSpec, Task
from unisono.launcher._launch import visible_gpus
from unisono.launcher._run_files import error_record, read_capacity
from unisono.launcher._stall_detector import read_step
from unisono.rpc._ports import ports_to_choose_from
from unisono.rpc._transport._keys import read_keys
from unisono.testing import FaultPlan, read_history
from unisono.watch._job_reader import JobReader
from unisono.watch._log_folder import LocalFolder
from unisono.watch._screen import screen_of


def _line(event, task=None, **others):
    fields = {"time": 1e9, "generation": 0, "pid": 7, "exit_code": None, "detail": "cold"}
    return fields | {"event": event, "task": task} | others


HISTORY = [
    _line("launched"),
    _line("started", "worker:0"),
    _line("failed", "worker:0", exit_code=1, time=1e9 + 3),
    _line("ended", "worker:0", exit_code=1, time=1e9 + 3),
    _line("ending", time=1e9 + 4),
    _line("started", "worker:0", generation=1, pid=8, time=1e9 + 5),
    _line("quit", exit_code=0, time=1e9 + 9, generation=1),
]
_SPAN = {"from": 1e9 + 6, "until": 1e9 + 7, "generation": 1}
EVENTS = [
    _SPAN | {"event": "compile"},
    _SPAN
    | {
        "event": "steps",
        "step": 5,
        "count": 5,
        "data": 0.1,
        "exchange": None,
        "rows": 40,
        "flops": 1e9,
        "peak": 1e12,
        "memory": 1e9,
    },
    _SPAN | {"event": "fit", "step": 0, "epochs": 2, "batches": 5, "epoch": 0, "config": [["loss", "mse"]]},
    _SPAN | {"event": "epoch", "step": 5, "epoch": 1, "batches": 5, "logs": {"loss": 0.5}},
    _SPAN | {"event": "logs", "step": 5, "logs": {"loss": 0.25}},
    _SPAN | {"event": "backup", "step": 5},
]
LAUNCH = {
    "title": "train.py",
    "max_restarts": 2,
    "restart_window_s": 600.0,
    "config": [["tasks", "1 worker"]],
}
LINES = st.lists(st.tuples(st.integers(0, 9), TEXT_CHANGES), max_size=2)


def changed_lines(lines, changes):
    """Lines of JSON, of which some are changed."""
    texts = [json.dumps(line).encode() for line in lines]
    for number, change in changes:
        i = number % len(texts)
        texts[i] = changed_text(json.dumps(lines[i]), change)
    return b"".join(text + b"\n" for text in texts)


class Timelines:
    """The folder of a launch, for `unisono timeline` and `unisono watch`."""

    cases = st.tuples(LINES, LINES, TEXT_CHANGES)
    unchanged = ([], [], SAME)

    def __init__(self, folder):
        self.folder = folder
        (folder / "events").mkdir()

    def run(self, case):
        (self.folder / "history.jsonl").write_bytes(changed_lines(HISTORY, case[0]))
        (self.folder / "events" / "worker-0.jsonl").write_bytes(changed_lines(EVENTS, case[1]))
        (self.folder / "launch.json").write_bytes(changed_text(json.dumps(LAUNCH), case[2]))
        _timeline_page.main(self.folder)
        job = JobReader(LocalFolder(self.folder)).refresh()
        json.dumps(job.to_json(), allow_nan=False)
        screen_of(job, 80, 24)


class SmallFiles:
    """A task's error, step and heartbeat; the capacity; a plan of faults, and what it recorded."""

    cases = st.tuples(TEXT_CHANGES, BYTE_CHANGES, TEXTS)
    unchanged = (SAME, [], "3")

    def __init__(self, folder):
        self.folder = folder
        self.plan = FaultPlan().kill("worker:1", 3).to_json()
        self.error = json.dumps({"at": 1.0, "code": 1, "summary": "x", "traceback": "y"})
        self.record = json.dumps(
            {"task": "worker:0", "generation": 0, "step": 1, "time": 1.0, "weights": "9"}
        )

    def run(self, case):
        change, in_bytes, text = case
        error_record(changed_text(self.error, change))
        path = self.folder / "file"
        path.write_bytes(changed_bytes(b"17 1700000000.5\n", in_bytes))
        assert read_step(path) >= -1
        path.write_bytes(changed_bytes(b"3\n", in_bytes))
        read_capacity(path)
        _is_later(text.strip(), "3")
        _is_later("3", text)
        (self.folder / "worker.jsonl").write_bytes(changed_text(self.record, change) + b"\n")
        for read in (
            lambda: FaultPlan.from_json(changed_text(self.plan, change).decode(errors="replace")),
            lambda: read_history(self.folder),
        ):
            checked(read)


def checked(read):
    """Call a function that may say what is wrong with what it reads."""
    try:
        return read()
    except ValueError as error:
        if type(error).__module__ != "unisono":
            raise


CONFIG = {
    "cluster": {"worker": ["a:1", "b:1"], "chief": ["c:1"], "ps": ["d:1"], "evaluator": ["e:1"]},
    "task": {"type": "worker", "index": 0},
    "rpc_layer": "grpc",
    "environment": "cloud",
    "session_master": "a:1",
    "model_dir": "/run",
}
VERTEX = {"cluster": {"workerpool0": ["a:1"], "workerpool1": ["b:1"]}, "task": {"type": "workerpool1"}}


class TFConfigs:
    """TF_CONFIG, and Vertex AI's CLUSTER_SPEC."""

    cases = st.tuples(st.booleans(), TEXT_CHANGES)
    unchanged = (False, SAME)

    def __init__(self, folder):
        pass

    def run(self, case):
        name, config = ("CLUSTER_SPEC", VERTEX) if case[0] else ("TF_CONFIG", CONFIG)
        text = changed_text(json.dumps(config), case[1]).decode(errors="surrogateescape")
        ask({name: text})


def ask(environ):
    """Ask all that a strategy asks of the environment of a process."""
    find_siblings(environ)
    find_tasks(environ)
    resolver = resolve(dict(environ))
    if resolver is None:
        return
    spec, _ = resolver.cluster_spec(), resolver.task
    assert isinstance(spec, ClusterSpec)
    assert 0 <= resolver.process_id < max(1, resolver.num_processes)
    _ = resolver.coordinator_address, resolver.environment, resolver.master(), resolver.rpc_layer


#: By platform, what it sets in one of two processes.
PLATFORMS = [
    {"SLURM_PROCID": "1", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
     "SLURM_STEP_NUM_TASKS": "2", "SLURM_GPUS_ON_NODE": "2", "SLURM_NODEID": "1", "SLURM_LOCALID": "0",
     "CUDA_VISIBLE_DEVICES": "0,1", "SLURM_NTASKS": "2", "SLURM_NNODES": "2"},
    {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
    {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"},
    {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_SIZE": "2"},
    {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"},
    {"PET_MASTER_ADDR": "a", "PET_MASTER_PORT": "29500", "PET_NNODES": "2", "PET_NODE_RANK": "1"},
    {"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "a", "SM_NUM_GPUS": "8", "UNISONO_PORT": "2222"},
    {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2",
     "SKYPILOT_NUM_GPUS_PER_NODE": "1", "UNISONO_PORT": "2222"},
    {"JOB_COMPLETION_INDEX": "1", "JOBSET_NAME": "a", "KUBERNETES_SERVICE_HOST": "10.0.0.1"},
    {"RANK": "1", "WORLD_SIZE": "2", "VC_WORKER_NUM": "2", "LWS_GROUP_SIZE": "2"},
]  # fmt: skip


class Platforms:
    """The variables of Slurm, MPI, JAX, Kubeflow, SageMaker, SkyPilot and Kubernetes; and its pods."""

    cases = st.tuples(
        st.integers(0, len(PLATFORMS) - 1),
        st.lists(st.tuples(st.integers(0, 9), st.none() | TEXTS | BYTE_CHANGES), min_size=1, max_size=3),
    )
    unchanged = (0, [])

    def __init__(self, folder):
        pass

    def run(self, case):
        which, changes = case
        environ = dict(PLATFORMS[which])
        for number, change in changes:
            name = list(PLATFORMS[which])[number % len(PLATFORMS[which])]
            if isinstance(change, list):
                text = changed_bytes(PLATFORMS[which][name].encode(), change)
                environ[name] = text.decode(errors="surrogateescape")
            elif change is None:
                environ.pop(name, None)
            else:
                environ[name] = change
        pods = [
            SimpleNamespace(
                metadata=SimpleNamespace(name=name),
                status=SimpleNamespace(phase="Running", pod_ip=environ.get(name)),
            )
            for name in environ
        ]
        client = SimpleNamespace(list_pod_for_all_namespaces=lambda **_: SimpleNamespace(items=pods))
        checked_pods = KubernetesClusterResolver(override_client=client)
        try:
            ask(environ)
        finally:
            checked(checked_pods.cluster_spec)


class Variables:
    """The variables of Unisono."""

    cases = (
        TEXTS | st.text(max_size=20) | st.binary(max_size=9).map(lambda b: b.decode(errors="surrogateescape"))
    )
    unchanged = "1"

    def __init__(self, folder):
        self.key_file = folder / "key"

    def run(self, text):
        own, spec = Task("worker", 0), ClusterSpec({"worker": ["a:1"]})
        self.key_file.write_bytes(text.encode(errors="replace"))
        self.key_file.chmod(0o600)
        devices_asked_for({"JAX_NUM_CPU_DEVICES": text})
        devices_asked_for({"XLA_FLAGS": f"--xla_force_host_platform_device_count={text}"})
        visible_gpus({"CUDA_VISIBLE_DEVICES": text})
        environ = {"UNISONO_X": text, "UNISONO_PORTS": text, _health.HEALTH_VARIABLE: text}
        readers = [
            lambda: _base.whole_of("UNISONO_X", environ),
            lambda: ports_to_choose_from(environ=environ),
            lambda: own_address(text, "localhost", "127.0.0.1"),
            lambda: read_keys({"UNISONO_CLUSTER_KEY": text}, own, spec),
            lambda: read_keys({"UNISONO_CLUSTER_KEY_FILE": str(self.key_file)}, own, spec),
            lambda: read_keys({"UNISONO_CLUSTER_KEY_FILE": text}, own, spec),
            lambda: read_watch_keys({"UNISONO_WATCH_KEY": text}, WATCHER),
            lambda: read_watch_keys({"UNISONO_WATCH_KEY_FILE": text}, WATCHER),
            lambda: _with(environ, lambda: _base.seconds_of("UNISONO_X", 3.0)),
            lambda: _with(environ, _health.process_health.__wrapped__),
        ]
        for read in readers:
            checked_cluster(read)


def checked_cluster(read):
    """As `checked`; a key that cannot be used is a `ClusterError`."""
    try:
        checked(read)
    except RuntimeError as error:
        if type(error).__module__ != "unisono":
            raise


def _with(environ, call):
    """Call a function with another environment; nothing listens."""
    before = _base.process_environ, _health.process_environ, _health.HealthServer
    _base.process_environ = _health.process_environ = lambda: environ
    _health.HealthServer = lambda port: None
    try:
        return call()
    finally:
        _base.process_environ, _health.process_environ, _health.HealthServer = before
