import re
import shlex
from pathlib import Path

import pytest
import yaml
from tests.kubernetes import pods_of
from typer.testing import CliRunner

from unisono._errors import InvalidArgumentError
from unisono.cli._app import app
from unisono.cluster_resolver import resolve
from unisono.launcher._options import LaunchOptions, UserProgram
from unisono.launcher.engines import _kubernetes
from unisono.launcher.engines._engine import Submission
from unisono.launcher.engines._kubernetes_manifests import KINDS, manifests, pod_selector
from unisono.launcher.engines._settings import KubernetesSettings
from unisono.rpc._transport._keys import keys_of

PAGE = Path(__file__).parents[4] / "docs" / "kubernetes.md"
#: The published schemas: Kubeflow's package has those of all groups but `apps`.
PREFIXES = {
    "v1": "IoK8sApiCoreV1",
    "batch/v1": "IoK8sApiBatchV1",
    "jobset.x-k8s.io/v1alpha2": "JobsetV1alpha2",
    "trainer.kubeflow.org/v1alpha1": "TrainerV1alpha1",
}
SHAPES = {
    "workers": LaunchOptions(workers=3),
    "restarts": LaunchOptions(workers=2, max_restarts=3, devices_per_worker=2, grace=90, interface="eth0"),
    "chief": LaunchOptions(workers=1, chief=True, evaluator=True),
    "servers": LaunchOptions(workers=2, ps=2, chief=True),
}
FULL = {
    "resource": ("cpu=4", "memory=16Gi", "nvidia.com/gpu=1"),
    "storage": "100Gi",
    "topology": "topology.kubernetes.io/zone",
    "selector": ("pool=gpu",),
    "namespace": "lab",
}
EVERY = pytest.mark.parametrize(
    ("kind", "shape", "settings"),
    [(kind, shape, settings) for kind in KINDS for shape in SHAPES for settings in ({}, FULL)],
)


def submission(kind="job", shape="workers", program=("train.py", "--lr", "0.1"), **settings):
    if not isinstance(shape, LaunchOptions):
        shape = SHAPES[shape]
    settings = {"image": "ghcr.io/team/train:1", "kind": kind} | settings
    return Submission(shape, UserProgram(program[0], program[1:]), None, KubernetesSettings(**settings))


def of_kind(objects, kind):
    return [each for each in objects if each["kind"] == kind]


def jobs_of(objects):
    """The specs of all Jobs, by the name of their job."""
    plain = {o["metadata"]["name"].rpartition("-")[2]: o["spec"] for o in of_kind(objects, "Job")}
    sets = [o["spec"] for o in of_kind(objects, "JobSet")]
    sets += [o["spec"]["template"]["spec"] for o in of_kind(objects, "TrainingRuntime")]
    return plain | {job["name"]: job["template"]["spec"] for each in sets for job in each["replicatedJobs"]}


def through_schema(manifest):
    """An object as the published schema knows it: without unknown fields. A wrong type is an error."""
    kubernetes, kubeflow = (
        pytest.importorskip("kubernetes.client"),
        pytest.importorskip("kubeflow_trainer_api.models"),
    )
    prefix = PREFIXES.get(manifest["apiVersion"])
    if prefix is None:
        model = getattr(kubernetes, "V1" + manifest["kind"])
        return kubernetes.ApiClient().sanitize_for_serialization(model.from_dict(manifest))
    return getattr(kubeflow, prefix + manifest["kind"]).from_dict(manifest).to_dict()


@EVERY
def test_objects_are_those_of_the_published_schemas(kind, shape, settings):
    for each in manifests(submission(kind, shape, **settings)):
        assert through_schema(each) == each


def test_the_schemas_find_an_unknown_field_and_a_wrong_type():
    for each in [o for kind in KINDS for o in manifests(submission(kind, "servers")) if "spec" in o]:
        unknown = each | {"spec": each["spec"] | {"backoff": 1}}
        assert through_schema(unknown) == each
    [job] = of_kind(manifests(submission()), "Job")
    with pytest.raises(ValueError, match="completions"):
        through_schema(job | {"spec": job["spec"] | {"completions": "two"}})


@EVERY
def test_each_pod_finds_itself_in_the_cluster(kind, shape, settings):
    request = submission(kind, shape, **settings)
    options, pods = request.options, pods_of(manifests(request))
    counts = {"chief": int(options.chief), "worker": options.workers, "ps": options.ps}
    counts["evaluator"] = int(options.evaluator)
    assert len(pods) == sum(counts.values())
    label, _, value = pod_selector(request).partition("=")
    assert all(pod.labels[label] == value for pod in pods)
    hosts = {}
    for pod in pods:
        found = resolve(dict(pod.env))
        assert type(found).__name__ in ("TFConfigClusterResolver", "JaxClusterResolver")
        assert pod.command == ["python", "train.py", "--lr", "0.1"]
        hosts[found.task_type, found.task_id] = pod.host
        if found.task_type in ("chief", "worker"):
            assert found.num_processes == options.workers + options.chief
    assert {job: sum(task[0] == job for task in hosts) for job in counts} == counts
    spec = resolve(dict(pods[0].env)).cluster_spec()
    for job in spec:
        for index in spec.task_indices(job):
            assert spec.task_address(job, index).rpartition(":")[0] == hosts[job, index]


def test_preemption_and_saved_state_are_not_counted():
    [plain] = jobs_of(manifests(submission("job", "restarts"))).values()
    ignored, by_code = plain["podFailurePolicy"]["rules"]
    assert ignored == {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }
    assert by_code["action"] == "Ignore"
    assert by_code["onExitCodes"] == {"containerName": "node", "operator": "In", "values": [42, 137, 143]}
    assert (plain["backoffLimitPerIndex"], plain["maxFailedIndexes"]) == (3, 0)


@pytest.mark.parametrize("kind", ["jobset", "trainjob"])
def test_workers_of_a_set_start_again_together(kind):
    objects = manifests(submission(kind, "restarts"))
    [job] = jobs_of(objects).values()
    assert job["backoffLimit"] == 0
    assert {rule["action"] for rule in job["podFailurePolicy"]["rules"]} == {"FailJob"}
    spec = objects[0]["spec"] if kind == "jobset" else objects[0]["spec"]["template"]["spec"]
    [rule] = spec["failurePolicy"]["rules"]
    assert spec["failurePolicy"]["maxRestarts"] == 3
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    assert {pod.env["UNISONO_GENERATION"] for pod in pods_of(objects)} == {"0"}


@pytest.mark.parametrize("kind", KINDS)
def test_servers_share_a_key_and_start_again_in_their_pods(kind):
    objects = manifests(submission(kind, "servers", resource=("cpu=2", "nvidia.com/gpu=1")))
    assert objects[0]["kind"] == "Secret"
    pods = pods_of(objects)
    [key] = {pod.env["UNISONO_CLUSTER_KEY"] for pod in pods}
    spec = resolve(dict(pods[0].env)).cluster_spec()
    assert keys_of(key, resolve(dict(pods[0].env)).task, spec)
    servers = [o["spec"] for o in of_kind(objects, "StatefulSet")] or [jobs_of(objects)["ps"]]
    pod = servers[0]["template"]["spec"]
    assert pod["restartPolicy"] == ("Always" if kind == "job" else "OnFailure")
    [container] = pod["containers"]
    assert container["resources"] == {"limits": {"cpu": "2"}, "requests": {"cpu": "2"}}
    assert (
        next(p for p in pods if "-ps-" in p.name).env["UNISONO_PS_DIRECTORY"]
        == "/unisono/unisono-train/servers"
    )
    worker = jobs_of(objects)["worker"]["template"]["spec"]["containers"][0]
    assert worker["resources"]["limits"] == {"cpu": "2", "nvidia.com/gpu": "1"}


def test_what_kubeflows_runtime_can_express_needs_no_other():
    assert [each["kind"] for each in manifests(submission("trainjob", "workers"))] == ["TrainJob"]
    for shape, settings in (("restarts", {}), ("servers", {}), ("workers", {"claim": "backups"})):
        *_, runtime, job = manifests(submission("trainjob", shape, **settings))
        assert runtime["kind"] == job["spec"]["runtimeRef"]["kind"] == "TrainingRuntime"


def test_the_claim_is_mounted_in_all_pods():
    [claim, *objects] = manifests(submission("jobset", "chief", storage="5Gi"))
    assert claim["spec"]["resources"]["requests"]["storage"] == "5Gi"
    for job in jobs_of(objects).values():
        pod = job["template"]["spec"]
        assert pod["volumes"] == [
            {"name": "unisono", "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]}}
        ]
        assert pod["containers"][0]["volumeMounts"] == [{"name": "unisono", "mountPath": "/unisono"}]
    mounted = jobs_of(manifests(submission(claim="backups")))["worker"]["template"]["spec"]["volumes"]
    assert mounted[0]["persistentVolumeClaim"] == {"claimName": "backups"}


def test_workers_have_a_part_of_the_topology_for_themselves():
    [job] = jobs_of(manifests(submission(topology="rack"))).values()
    affinity = job["template"]["spec"]["affinity"]
    for each in ("podAffinity", "podAntiAffinity"):
        [term] = affinity[each]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert term["topologyKey"] == "rack"
    [jobset] = manifests(submission("jobset", topology="rack"))
    [workers] = jobset["spec"]["replicatedJobs"]
    annotations = workers["template"]["metadata"]["annotations"]
    assert annotations == {"alpha.jobset.sigs.k8s.io/exclusive-topology": "rack"}


def test_variables_follow_the_options_and_the_cores():
    [pod, _] = pods_of(manifests(submission("job", "restarts", resource=("cpu=4",))))
    assert pod.env["OMP_NUM_THREADS"] == "4"
    assert pod.env["UNISONO_DEVICES_PER_WORKER"] == "2"
    assert (pod.env["UNISONO_GRACE"], pod.env["UNISONO_START_UP"]) == ("90", "600")
    assert pod.env["UNISONO_INTERFACE"] == "eth0"
    [pod, *_] = pods_of(manifests(submission("trainjob")))
    assert not {"OMP_NUM_THREADS", "UNISONO_FENCE", "UNISONO_LAUNCH", "TF_CONFIG"} & set(pod.env)


@EVERY
def test_each_container_is_probed_where_its_task_answers(kind, shape, settings):
    objects = manifests(submission(kind, shape, **settings, health_port=4000))
    pods = pods_of(objects)
    if kind == "trainjob" and [each["kind"] for each in objects] == ["TrainJob"]:
        # Kubeflow's own runtime has the containers.
        assert not any(pod.probes for pod in pods)
        assert not any("UNISONO_HEALTH_PORT" in pod.env for pod in pods)
        return
    for pod in pods:
        asked = {name: probe["httpGet"] for name, probe in pod.probes.items()}
        assert asked == {
            "startupProbe": {"path": "/livez", "port": 4000},
            "readinessProbe": {"path": "/healthz", "port": 4000},
            "livenessProbe": {"path": "/livez", "port": 4000},
        }
        assert pod.env["UNISONO_HEALTH_PORT"] == "4000"
        # Longer than any compilation, and a program that never answers is not ended.
        assert (
            pod.probes["livenessProbe"]["periodSeconds"] * pod.probes["livenessProbe"]["failureThreshold"]
            >= 900
        )
        assert pod.probes["startupProbe"]["failureThreshold"] == 2**31 - 1


def test_the_port_for_probes_is_one():
    with pytest.raises(InvalidArgumentError, match=r"`--health-port` must be .*Received: 65536"):
        submission(health_port=65536)


def test_arguments_reach_the_program_as_they_are():
    args = ("train.py", "$(HOME)", "$$", "a b", "'")
    [pod, *_] = pods_of(manifests(submission(program=args)))
    assert pod.command == ["python", *args]


def test_yaml_is_the_objects():
    request = submission("jobset", "chief", **FULL)
    assert list(yaml.safe_load_all(_kubernetes.render(request))) == manifests(request)


COMMANDS = re.findall(r"^unisono (launch --on kubernetes .*--print.*)$", PAGE.read_text(), re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_document_print_valid_objects(command):
    done = CliRunner().invoke(app, shlex.split(command))
    assert done.exit_code == 0, done
    objects = list(yaml.safe_load_all(done.stdout))
    assert [through_schema(each) for each in objects] == objects
    assert pods_of(objects)


def test_the_document_has_a_command_for_each_kind():
    flags = [re.search(r"--kind (\w+)", command) for command in COMMANDS]
    assert {flag[1] if flag else "job" for flag in flags} == set(KINDS)


@pytest.mark.parametrize(
    ("flag", "settings"),
    [
        ("image", {"image": None}),
        ("image", {"image": "my image:1"}),
        ("image", {"image": "Team/train"}),
        ("kind", {"kind": "deployment"}),
        ("name", {"name": "Train"}),
        ("name", {"name": "x" * 41}),
        ("namespace", {"namespace": "a b"}),
        ("resource", {"resource": ("cpu=4", "gpu")}),
        ("resource", {"resource": ("nvidia.com/gpu=many",)}),
        ("claim", {"claim": "/data"}),
        ("storage", {"storage": "big"}),
        ("topology", {"topology": "a zone"}),
        ("selector", {"selector": ("pool",)}),
    ],
)
def test_a_flag_that_cannot_be_right_is_named(flag, settings):
    wrong = next(iter(settings.values()))
    wrong = wrong[-1] if isinstance(wrong, tuple) else wrong
    with pytest.raises(
        InvalidArgumentError, match=rf"`--{flag}` must be .*{re.escape(repr(wrong))}.*Write `--{flag} "
    ):
        _kubernetes.render(submission(**settings))


def test_an_elastic_launch_is_refused():
    with pytest.raises(InvalidArgumentError, match=r"`--elastic` must be left out.*'2:4'.*`-n 2 --max-"):
        _kubernetes.render(submission(shape=LaunchOptions(workers=4, elastic=(2, 4))))


@pytest.mark.parametrize(
    "image",
    ["app", "app:1", "localhost:5000/a/b:v1.2_x", "ghcr.io/team/app@sha256:" + "0f" * 32, "a/b__c-d.e"],
)
def test_names_of_images(image):
    assert manifests(submission(image=image))
