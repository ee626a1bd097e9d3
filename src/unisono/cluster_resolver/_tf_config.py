"""TF_CONFIG, or Vertex AI's CLUSTER_SPEC: the text of one environment variable -> a checked record; pure."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from typing import Any

from unisono._errors import InvalidArgumentError
from unisono._system._json import parse_json
from unisono.cluster_resolver._spec import JOBS, ClusterSpec, job_hint, read_index, read_jobs, shortened

#: Vertex AI's names of the jobs; `master` is also TensorFlow 1's name:
#: https://docs.cloud.google.com/vertex-ai/docs/training/distributed-training
_OTHER_NAMES = {
    "master": "chief",
    "workerpool0": "chief",
    "workerpool1": "worker",
    "workerpool2": "ps",
    "workerpool3": "evaluator",
}
_KEYS = ("cluster", "sparseCluster", "task", "rpc_layer", "environment", "session_master")
#: So many problems are said.
_MOST = 20
#: A longer one is no slip; to compare it would take long.
_LONGEST_KEY = 40
_STRINGS = ("rpc_layer", "environment", "session_master")
_EXAMPLE = (
    '{"cluster": {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}, "task": {"type": "worker", "index": 0}}'
)


@dataclasses.dataclass(frozen=True)
class TFConfig:
    """The contents of TF_CONFIG, with None for missing ones.

    Args:
        cluster: the addresses of all tasks, maybe none.
        rpc_layer: the protocol, such as `"grpc"`.
        environment: where the cluster runs.
        session_master: an address that `master()` returns instead of the task's.
    """

    cluster: ClusterSpec
    task_type: str | None = None
    task_id: int | None = None
    rpc_layer: str | None = None
    environment: str | None = None
    session_master: str | None = None


def variable_of(environ: Mapping[str, str]) -> str:
    """Return the name of the variable that describes the cluster: TF_CONFIG, or else Vertex AI's.

    >>> variable_of({"CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a:1"], "workerpool1": ["b:1"]}}'})
    'CLUSTER_SPEC'
    """
    # Other platforms have a variable of this name, too; and a job of one replica has no second pool. What is
    # cut off is read, for its error: it may have had one.
    text = environ.get("CLUSTER_SPEC", "")
    is_vertex = '"workerpool1"' in text or ('"workerpool' in text and not _is_json(text))
    return "CLUSTER_SPEC" if is_vertex and not environ.get("TF_CONFIG", "").strip() else "TF_CONFIG"


def _is_json(text: str) -> bool:
    try:
        parse_json(text)
    except ValueError:
        return False
    return True


def read_tf_config(
    text: str | None, task_type: str | None = None, task_id: int | None = None, variable: str = "TF_CONFIG"
) -> TFConfig:
    """Read TF_CONFIG.

    Args:
        text: the variable's value; None or blank where it is not set.
        task_type: the job of this process, instead of the one in the text.
        task_id: its index, instead of the one in the text.
        variable: its name, for messages.

    >>> read_tf_config('{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": "1"}}')
    TFConfig(cluster=ClusterSpec({'worker': ['a:1', 'b:1']}), task_type='worker', task_id=1,
        rpc_layer=None, environment=None, session_master=None)
    """
    config, problems = _load(text)
    cluster, wrong = _read_cluster(config)
    problems += wrong
    own_type, own_id, wrong = _read_task(config.get("task", {}), task_type, task_id)
    problems += wrong
    # Only for what could be read: one mistake is not reported twice.
    if not problems:
        problems = _membership(cluster, own_type, own_id)
    strings = {key: config.get(key) for key in _STRINGS}
    problems += [f"{k!r} must be a string" for k, v in strings.items() if not isinstance(v, str | None)]
    if problems:
        given = {"task_type": task_type, "task_id": task_id}
        arguments = "".join(f", {name}={value!r}" for name, value in given.items() if value is not None)
        raise InvalidArgumentError(
            f"{variable} must describe the cluster and this task: {_first_of(problems)}. "
            f"Received: {variable}={shortened(text or '')!r}{arguments}. "
            f"Write, for the first of two workers: export TF_CONFIG='{_EXAMPLE}'"
        )
    return TFConfig(cluster, own_type, own_id, **strings)


def _first_of(problems: list[str]) -> str:
    """Return problems as one text: the first of them, where there are many or they are long."""
    more = f"; and {len(problems) - _MOST} more" if len(problems) > _MOST else ""
    return "; ".join(shortened(problem) for problem in problems[:_MOST]) + more


def _load(text: str | None) -> tuple[dict[str, Any], list[str]]:
    # Some launchers set it to an empty text for a single process.
    if text is None or not text.strip():
        return {}, []
    try:
        config = parse_json(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        return {}, [f"it must be JSON, but cannot be read at {where} ({error.msg})"]
    except ValueError as error:
        return {}, [f"it must be JSON, but cannot be read ({error})"]
    if not isinstance(config, dict):
        return {}, [f"it must be a JSON object, not {_kind(config)}"]
    return config, [hint for key in config if (hint := _misspelt(key))]


def _misspelt(key: str) -> str | None:
    """Launchers add keys of their own; a key that looks like a known one is a slip."""
    if len(key) > _LONGEST_KEY:
        return None
    known = {k.lower(): k for k in _KEYS}
    close = difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.8)
    return f"{key!r} must be written {known[close[0]]!r}" if close and key not in _KEYS else None


def _kind(value: object) -> str:
    names = {list: "a list", str: "a string", dict: "an object", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _read_cluster(config: dict[str, Any]) -> tuple[ClusterSpec, list[str]]:
    if "cluster" in config and "sparseCluster" in config:
        return ClusterSpec({}), ["it must have one of 'cluster' and 'sparseCluster', not both"]
    # Kubeflow's elastic TFJob lists only the worker itself and the parameter servers:
    # {"sparseCluster": {"worker": {"3": "host:port"}, "ps": [...]}}.
    key = "sparseCluster" if "sparseCluster" in config else "cluster"
    jobs = config.get(key, {})
    if not isinstance(jobs, dict):
        return ClusterSpec({}), [f"{key!r} must be an object of jobs, not {_kind(jobs)}"]
    read, problems = read_jobs({_own_name(job, jobs): tasks for job, tasks in jobs.items()})
    return (ClusterSpec({}) if problems else ClusterSpec(read)), problems


def _own_name(job: Any, jobs: Mapping[Any, Any]) -> Any:
    """The name that a job has here, unless there is another one of this name."""
    if not isinstance(job, str):
        return job
    name = _OTHER_NAMES.get(job, job)
    return job if name in jobs else name


def _read_task(
    task: object, task_type: str | None, task_id: int | None
) -> tuple[str | None, int | None, list[str]]:
    problems = []
    if not isinstance(task, dict):
        problems.append(f"'task' must be an object, not {_kind(task)}")
        task = {}
    kind = _own_name(task.get("type"), {}) if task_type is None else task_type
    number = task.get("index") if task_id is None else task_id
    index = None if number is None else read_index(number)
    if kind is not None and kind not in JOBS:
        problems.append(
            f"the task's type must be one of {', '.join(JOBS)}, not {kind!r}{job_hint(str(kind))}"
        )
    if number is not None and index is None:
        problems.append(f"the task's index must be an integer from 0, not {number!r}")
    return kind, index, problems


def _membership(cluster: ClusterSpec, kind: str | None, index: int | None) -> list[str]:
    if not cluster or kind is None:
        return []
    if kind not in cluster:
        # The evaluator computes alone, and launchers leave it out of the cluster.
        outside = kind == "evaluator"
        return (
            [] if outside else [f"the task's type {kind!r} is not in the cluster, which has {cluster.jobs}"]
        )
    indices = cluster.task_indices(kind)
    if index is not None and index not in indices:
        return [f"the task's index {index} is not in the cluster, whose {kind!r} indices are {indices}"]
    return []
