"""The objects that run a launch on Kubernetes, as dicts; pure but for the cluster's key.

Each pod is one task. It finds its cluster in TF_CONFIG, in which the kubelet replaces `$(UNISONO_TASK_INDEX)`
by the pod's index:
https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from unisono._errors import InvalidArgumentError
from unisono._system._signals import RESTART_WANTED
from unisono.cluster.liveness._health import HEALTH_VARIABLE, LIVE, READY
from unisono.cluster_resolver._base import START_UP_VARIABLE
from unisono.cluster_resolver._spec import Task
from unisono.launcher._options import LaunchOptions
from unisono.launcher._plan import POOLS, LaunchPlan, RunPaths, base_environment, tasks_of
from unisono.launcher.engines._engine import Submission
from unisono.launcher.engines._engine_task import OF_A_SUPERVISOR
from unisono.launcher.engines._settings import KubernetesSettings
from unisono.rpc._transport._keys import FILE_VARIABLE, VARIABLE, new_secret

#: An object as Kubernetes' API takes it.
Manifest = dict[str, Any]

#: Labels of pods: the launch they belong to, and their job.
LAUNCH_LABEL, JOB_LABEL = "unisono/launch", "unisono/job"
#: The index of a pod: of an indexed Job; of a StatefulSet, since Kubernetes 1.28.
INDEX_ANNOTATION, INDEX_LABEL = "batch.kubernetes.io/job-completion-index", "apps.kubernetes.io/pod-index"
#: JobSet's label on its pods, also on a TrainJob's.
JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
#: JobSet's label with the number of the set's restarts, which is the generation of its tasks.
JOBSET_RESTARTS = "jobset.sigs.k8s.io/restart-attempt"

#: Every pod has an address of its own, so that all have the same port.
_PORT, _HEALTH_PORT = 2222, 2223
#: Where the claim is mounted; without one, a directory that lives as long as its pod.
MOUNT = "/unisono"
#: Seconds that a worker waits for the others: pods start minutes apart where an image must be pulled.
_START_UP = 600
#: Ended by SIGKILL or SIGTERM: preempted.
_PREEMPTED = (137, 143)
#: The group that may write to volumes; docker/Dockerfile has this user.
GROUP = 1000
#: Container name that Kubeflow Trainer requires.
CONTAINER = "node"
_FOR_EVER = 2**31 - 1
_EVENTS = "UNISONO_EVENTS"

_FIXED_SIZE = (
    "Write `-n 2 --max-restarts 3`; for another size end the launch and start it with another `-n`: "
    "`BackupAndRestore` continues with any number of workers"
)

#: Kinds of submissions: an indexed Job for each job; a JobSet; a TrainJob of Kubeflow Trainer.
KINDS = ("job", "jobset", "trainjob")
#: Names of pods, with the job and the index behind it, have 63 characters at most.
_LONGEST_NAME = 40
_NAME = re.compile(f"(?=.{{1,{_LONGEST_NAME}}}$)[a-z]([-a-z0-9]*[a-z0-9])?")
#: The host of a registry has a dot or a port, and a name is in lower case.
_IMAGE = re.compile(
    r"((localhost|[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+)(:[0-9]+)?/|[A-Za-z0-9-]+:[0-9]+/)?"
    r"[a-z0-9]+([._/-]+[a-z0-9]+)*(:\w[\w.-]{0,127})?(@sha256:[0-9a-f]{64})?",
    re.ASCII,
)
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?([EPTGM]i?|Ki|k|m)?")
_LABEL = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?", re.ASCII)
_RESOURCE = re.compile(f"{_LABEL.pattern}={_QUANTITY.pattern}", re.ASCII)
_SELECTOR = re.compile(f"{_LABEL.pattern}=([A-Za-z0-9]([\\w.-]*[A-Za-z0-9])?)?", re.ASCII)


def manifests(submission: Submission[KubernetesSettings]) -> list[Manifest]:
    """Return the objects of a launch, in the order in which they are created: the pods' last.

    Raises:
        InvalidArgumentError: a setting cannot be right; the message names the flag.
    """
    return _Rendering(submission).objects()


def launch_name(submission: Submission[KubernetesSettings]) -> str:
    """Return the name of a launch, which its objects have.

    >>> from unisono.launcher._options import LaunchOptions, UserProgram
    >>> program, settings = UserProgram("src/Train_it.py"), KubernetesSettings("app")
    >>> launch_name(Submission(LaunchOptions(), program, None, settings))
    'unisono-train-it'
    """
    program = submission.program
    stem = program.target.rpartition(".")[2] if program.is_module else PurePath(program.target).stem
    slug = re.sub("[^a-z0-9]+", "-", f"unisono-{stem.lower()}")[:_LONGEST_NAME].strip("-")
    return submission.settings.name or slug


def pod_selector(submission: Submission[KubernetesSettings]) -> str:
    """Return the label by which the pods of a launch are found."""
    label = LAUNCH_LABEL if (submission.settings.kind or "job") == "job" else JOBSET_LABEL
    return f"{label}={launch_name(submission)}"


def events_file(launch: str, job: str, index: int | str) -> str:
    """Return the file in a pod in which its task says what it does.

    >>> events_file("unisono-train", "worker", 1)
    '/unisono/unisono-train-worker-1.jsonl'
    """
    return f"{MOUNT}/{launch}-{job}-{index}.jsonl"


def deciding_jobs(options: LaunchOptions) -> list[str]:
    """Return the jobs whose success is the launch's: with servers and a chief, the chief's.

    >>> deciding_jobs(LaunchOptions(ps=1, chief=True)), deciding_jobs(LaunchOptions(ps=1))
    (['chief'], ['worker'])
    """
    jobs = {task.type: None for task in tasks_of(options, options.workers)}
    return [job for job in jobs if job != "ps" and not (job == "worker" and options.ps and options.chief)]


class _Rendering:
    """The objects of one launch."""

    def __init__(self, submission: Submission[KubernetesSettings]) -> None:
        settings = submission.settings
        self._options, self._program = submission.options, submission.program
        self._kind, self._name = settings.kind or "job", launch_name(submission)
        _check(settings, self._options, self._kind, self._name)
        self._settings = settings
        self._resources, self._selector = _pairs(settings.resource), _pairs(settings.selector)
        self._claim = settings.claim or (self._name if settings.storage else None)
        self._counts: dict[str, int] = {}
        for task in tasks_of(self._options, self._options.workers):
            self._counts[task.type] = task.index + 1
        #: Workers cannot go on without each other, and start again together where the engine can do that.
        self._is_gang = self._kind != "job" and not self._options.ps

    def objects(self) -> list[Manifest]:
        """Return all objects."""
        every = []
        if self._settings.storage:
            every.append(self._storage())
        if self._needs_runtime and self._options.ps:
            every.append(self._object("v1", "Secret", stringData={"key": new_secret()}))
        return every + {"job": self._plain, "jobset": self._jobset, "trainjob": self._trainjob}[self._kind]()

    def _object(self, version: str, kind: str, name: str | None = None, **parts: Any) -> Manifest:
        metadata = {"name": name or self._name, "labels": {LAUNCH_LABEL: self._name}}
        if self._settings.namespace:
            metadata["namespace"] = self._settings.namespace
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **parts}

    def _storage(self) -> Manifest:
        size = {"requests": {"storage": self._settings.storage}}
        spec = {"accessModes": ["ReadWriteMany"], "resources": size}
        return self._object("v1", "PersistentVolumeClaim", self._claim, spec=spec)

    def _plain(self) -> list[Manifest]:
        """A headless service for the pods' names, an indexed Job for each job, a StatefulSet for servers."""
        labels = {LAUNCH_LABEL: self._name}
        service = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels,
            "ports": [{"name": "tasks", "port": _PORT, "protocol": "TCP"}],
        }
        every = [self._object("v1", "Service", spec=service)]
        for job in self._counts:
            name = f"{self._name}-{job}"
            if job == "ps":
                labels = {LAUNCH_LABEL: self._name, JOB_LABEL: job}
                spec = {
                    "replicas": self._counts[job],
                    "serviceName": self._name,
                    "podManagementPolicy": "Parallel",
                    "selector": {"matchLabels": labels},
                    "template": self._pod(job, "Always"),
                }
                every.append(self._object("apps/v1", "StatefulSet", name, spec=spec))
            else:
                every.append(self._object("batch/v1", "Job", name, spec=self._job(job)))
        return every

    def _jobset(self) -> list[Manifest]:
        return [self._object("jobset.x-k8s.io/v1alpha2", "JobSet", spec=self._jobset_spec())]

    def _jobset_spec(self) -> Manifest:
        """The set of all jobs; its controller makes the headless service."""
        network = {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": self._name}
        success = {"operator": "All", "targetReplicatedJobs": deciding_jobs(self._options)}
        spec: Manifest = {"network": network, "successPolicy": success}
        if self._is_gang:
            preempted = {
                "name": "preempted",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
            }
            spec["failurePolicy"] = {"maxRestarts": self._options.restarts, "rules": [preempted]}
        jobs = []
        for job in self._counts:
            template: Manifest = {"spec": self._job(job)}
            if job == "worker" and self._settings.topology:
                exclusive = {"alpha.jobset.sigs.k8s.io/exclusive-topology": self._settings.topology}
                template["metadata"] = {"annotations": exclusive}
            jobs.append({"name": job, "replicas": 1, "template": template})
        return {**spec, "replicatedJobs": jobs}

    def _trainjob(self) -> list[Manifest]:
        """A TrainJob, on Kubeflow's runtime where that can express the launch."""
        group, spec = "trainer.kubeflow.org", {}
        reference = {"apiGroup": group, "kind": "ClusterTrainingRuntime", "name": "jax-distributed"}
        every = []
        if self._needs_runtime:
            reference |= {"kind": "TrainingRuntime", "name": self._name}
            template = {"template": {"spec": self._jobset_spec()}}
            every.append(self._object(f"{group}/v1alpha1", "TrainingRuntime", spec=template))
        else:
            spec["trainer"] = {
                "numNodes": self._options.workers,
                "image": self._settings.image,
                "command": self._command(),
                "env": _env(self._variables("worker")),
                "resourcesPerNode": self._limits("worker"),
            }
        return [*every, self._object(f"{group}/v1alpha1", "TrainJob", spec={"runtimeRef": reference, **spec})]

    @property
    def _needs_runtime(self) -> bool:
        """Return whether Kubeflow's runtime for JAX is too little: it has workers alone, and no restarts."""
        asked = self._options.restarts, self._claim, self._settings.topology, self._selector
        return self._kind != "trainjob" or set(self._counts) != {"worker"} or any(asked)

    def _job(self, job: str) -> Manifest:
        """An indexed Job, whose pods keep their names when they are replaced."""
        count = self._counts[job]
        spec: Manifest = {"completionMode": "Indexed", "completions": count, "parallelism": count}
        if job == "ps":
            # A server that fails starts again in its pod, which keeps its address and its directory. The
            # chief gives up by itself where that does not help.
            return {**spec, "backoffLimit": _FOR_EVER, "template": self._pod(job, "OnFailure")}
        if self._is_gang:
            spec["backoffLimit"] = 0
        else:
            spec |= {"backoffLimitPerIndex": self._options.restarts, "maxFailedIndexes": 0}
        # A Job that fails by this policy is a set that starts again, without being counted.
        action = "FailJob" if self._is_gang else "Ignore"
        codes = {"containerName": CONTAINER, "operator": "In", "values": [RESTART_WANTED, *_PREEMPTED]}
        rules = [
            {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": action, "onExitCodes": codes},
        ]
        return {**spec, "podFailurePolicy": {"rules": rules}, "template": self._pod(job, "Never")}

    def _pod(self, job: str, restart_policy: str) -> Manifest:
        claim = {"persistentVolumeClaim": {"claimName": self._claim}} if self._claim else {"emptyDir": {}}
        container = {
            "name": CONTAINER,
            "image": self._settings.image,
            "command": self._command(),
            "env": [*self._task_variables(job), *_env(self._variables(job))],
            "resources": self._limits(job),
            # The end of the log of a container that failed becomes a part of the pod's state.
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": [{"name": "unisono", "mountPath": MOUNT}],
            **self._probes(),
        }
        spec: Manifest = {
            "restartPolicy": restart_policy,
            "terminationGracePeriodSeconds": math.ceil(self._options.grace),
            # Linux discards SIGTERM for the first process of a container that has no handler: not the first
            # one, then.
            "shareProcessNamespace": True,
            "securityContext": {"fsGroup": GROUP, "fsGroupChangePolicy": "OnRootMismatch"},
            "containers": [container],
            "volumes": [{"name": "unisono", **claim}],
        }
        if self._kind == "job":
            spec["subdomain"] = self._name
        if self._selector:
            spec["nodeSelector"] = dict(self._selector)
        if self._settings.topology and self._kind == "job" and job == "worker":
            spec["affinity"] = self._affinity(self._settings.topology)
        return {"metadata": {"labels": {LAUNCH_LABEL: self._name, JOB_LABEL: job}}, "spec": spec}

    def _probes(self) -> Manifest:
        """Return the kubelet's probes; Services forward to pods that are not ready, too."""
        port = self._settings.health_port or _HEALTH_PORT
        live, ready = (
            {"httpGet": {"path": path, "port": port}, "timeoutSeconds": 10} for path in (LIVE, READY)
        )
        return {
            # For ever: what comes before the strategy is the program's own, and may take hours.
            "startupProbe": {**live, "periodSeconds": 5, "failureThreshold": _FOR_EVER},
            "readinessProbe": {**ready, "periodSeconds": 5},
            # A compiler leaves the thread that answers running, but may use all cores for minutes.
            "livenessProbe": {**live, "periodSeconds": 30, "failureThreshold": 30},
        }

    def _affinity(self, topology: str) -> Manifest:
        """Workers on nodes with one value of a label, on which no workers of other launches are."""
        own = {"matchLabels": {LAUNCH_LABEL: self._name, JOB_LABEL: "worker"}}
        workers = {"key": JOB_LABEL, "operator": "In", "values": ["worker"]}
        others = {"key": LAUNCH_LABEL, "operator": "NotIn", "values": [self._name]}
        selectors = {"podAffinity": own, "podAntiAffinity": {"matchExpressions": [workers, others]}}
        return {
            name: {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {"labelSelector": selector, "topologyKey": topology}
                ]
            }
            for name, selector in selectors.items()
        }

    def _command(self) -> list[str]:
        program = self._program
        words = ["python", *(["-m"] if program.is_module else []), program.target, *program.args]
        # Kubernetes replaces `$(NAME)`, and `$$` by `$`.
        return [word.replace("$", "$$") for word in words]

    def _limits(self, job: str) -> Manifest:
        """The resources of a pod; accelerators, whose names have a domain, are for those that compute."""
        own = {name: n for name, n in self._resources.items() if job != "ps" or "/" not in name}
        return {"limits": own, "requests": dict(own)} if own else {}

    def _task_variables(self, job: str) -> Iterator[Manifest]:
        """The variables that say who the pod is, of which later ones use earlier ones."""
        source = f"metadata.annotations['{INDEX_ANNOTATION}']"
        if job == "ps" and self._kind == "job":
            source = f"metadata.labels['{INDEX_LABEL}']"
        yield _from("UNISONO_TASK_INDEX", "fieldRef", fieldPath=source)
        if self._is_gang:
            restarts = f"metadata.labels['{JOBSET_RESTARTS}']"
            yield _from("UNISONO_GENERATION", "fieldRef", fieldPath=restarts)
        task = {"type": job, "index": "$(UNISONO_TASK_INDEX)"}
        config = json.loads(self._plan.environment(Task(job, 0))["TF_CONFIG"])
        yield {"name": "TF_CONFIG", "value": json.dumps({**config, "task": task})}
        if self._options.ps:
            # Not a file: a user other than root could not read it if its owner alone may.
            yield _from(VARIABLE, "secretKeyRef", name=self._name, key="key")

    @property
    def _plan(self) -> LaunchPlan:
        infix = "" if self._kind == "job" else "-0"
        tasks = tasks_of(self._options, self._options.workers)
        hosts = {task: f"{self._name}-{task.type}{infix}-{task.index}.{self._name}" for task in tasks}
        addresses = {task: f"{host}:{_PORT}" for task, host in hosts.items()}
        return LaunchPlan(0, addresses, RunPaths(Path(MOUNT) / self._name), self._options)

    def _variables(self, job: str) -> dict[str, str]:
        """The variables of a task that are the same for all tasks of its job."""
        cpu = self._resources.get("cpu", "")
        base = base_environment({}, self._options, 1, int(cpu) if cpu.isdecimal() else 1, self._plan.paths)
        # Without a whole number of cores, the libraries ask the machine.
        unknown = set() if cpu.isdecimal() else {*POOLS, "PJRT_NPROC"}
        every = base | self._plan.environment(Task(job, 0)) | {START_UP_VARIABLE: str(_START_UP)}
        if self._needs_runtime:
            every[_EVENTS] = events_file(self._name, job, "$(UNISONO_TASK_INDEX)")
            every[HEALTH_VARIABLE] = str(self._settings.health_port or _HEALTH_PORT)
        left_out = {"TF_CONFIG", FILE_VARIABLE, "UNISONO_GENERATION", *OF_A_SUPERVISOR, *unknown}
        left_out -= {_EVENTS} if self._needs_runtime else set()
        if not self._needs_runtime:
            # Their directory is not mounted.
            left_out |= {name for name, value in every.items() if value.startswith(MOUNT)}
        return {name: value for name, value in sorted(every.items()) if name not in left_out}


def _env(variables: Mapping[str, str]) -> list[Manifest]:
    return [{"name": name, "value": value} for name, value in variables.items()]


def _from(variable: str, source: str, **where: str) -> Manifest:
    return {"name": variable, "valueFrom": {source: where}}


def _pairs(texts: tuple[str, ...]) -> dict[str, str]:
    return dict(text.split("=", 1) for text in texts)


def _check(settings: KubernetesSettings, options: LaunchOptions, kind: str, name: str) -> None:
    """Check what can be checked without the cluster; the error names the first flag that is wrong."""
    elastic = options.elastic and "{}:{}".format(*options.elastic)
    checks: list[tuple[str, str, Iterable[str | None], re.Pattern[str], str]] = [
        ("image", "the name of an image", [settings.image], _IMAGE, "ghcr.io/team/train:1"),
        ("kind", f"one of {', '.join(KINDS)}", [kind], re.compile("|".join(KINDS)), "jobset"),
        ("name", f"lower-case letters, digits and hyphens, at most {_LONGEST_NAME}", [name], _NAME, "digits"),
        ("namespace", "the name of a namespace", _given(settings.namespace), _NAME, "research"),
        ("resource", "a name and a quantity", settings.resource, _RESOURCE, "nvidia.com/gpu=1"),
        ("claim", "the name of a PersistentVolumeClaim", _given(settings.claim), _NAME, "backups"),
        ("storage", "a quantity", _given(settings.storage), _QUANTITY, "100Gi"),
        ("topology", "a label of nodes", _given(settings.topology), _LABEL, "topology.kubernetes.io/zone"),
        ("selector", "a label of nodes and its value", settings.selector, _SELECTOR, "pool=gpu"),
        (
            "elastic",
            "left out: TF_CONFIG of each pod names all pods",
            _given(elastic),
            re.compile("(?!)"),
            "",
        ),
    ]
    for flag, what, values, pattern, example in checks:
        for value in values:
            if not pattern.fullmatch(value or ""):
                advice = f"Write `--{flag} {example}`" if example else _FIXED_SIZE
                raise InvalidArgumentError(
                    f"`--{flag}` must be {what}. Received: {value!r} with `--on kubernetes`. {advice}."
                )


def _given(value: str | None) -> list[str | None]:
    return [] if value is None else [value]
