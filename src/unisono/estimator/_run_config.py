"""`RunConfig`: how an Estimator trains, where it saves, and which task of a cluster this process is.

Source: https://github.com/tensorflow/estimator (tensorflow_estimator/python/estimator/run_config.py)
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from unisono._checks import whole_number
from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono._system._object_store import place_of
from unisono.cluster_resolver._base import TFConfigClusterResolver
from unisono.cluster_resolver._spec import ClusterSpec
from unisono.spi import process_environ

if TYPE_CHECKING:
    from unisono.strategies._base import Strategy

_BOTH_CHECKPOINTS = "`save_checkpoints_steps` and `save_checkpoints_secs` cannot be both set."

#: Seconds between two checkpoints, where nothing is said.
_SECONDS = 600

#: A test of a value that is not None, and its words.
_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model_dir": (bool, "non-empty"),
    "save_summary_steps": (lambda n: n >= 0, ">= 0"),
    "save_checkpoints_steps": (lambda n: n >= 0, ">= 0"),
    "save_checkpoints_secs": (lambda n: n >= 0, ">= 0"),
    "keep_checkpoint_max": (lambda n: n >= 0, ">= 0"),
    "keep_checkpoint_every_n_hours": (lambda n: n > 0, "> 0"),
    "log_step_count_steps": (lambda n: n > 0, "> 0"),
    "tf_random_seed": (lambda n: whole_number(n, -(2**63)) is not None, "an integer"),
    "experimental_max_worker_delay_secs": (lambda n: whole_number(n, -(2**63)) is not None, "an integer"),
    "session_creation_timeout_secs": (lambda n: n > 0, "> 0"),
    "protocol": (lambda p: p in ("grpc", "grpc+verbs"), "grpc or grpc+verbs"),
}


class TaskType:
    """The jobs of a cluster.

    >>> TaskType.CHIEF
    'chief'
    """

    MASTER = "master"
    PS = "ps"
    WORKER = "worker"
    CHIEF = "chief"
    EVALUATOR = "evaluator"


@dataclasses.dataclass(frozen=True)
class DistributeConfig:
    """On what an Estimator trains and evaluates.

    Args:
        train_distribute: the strategy of training.
        eval_distribute: the strategy of evaluation; None evaluates on one device.
        remote_cluster: addresses of servers by job, a dict or `ClusterSpec`: `train_and_evaluate` then runs
            there, and this process is their client.

    >>> DistributeConfig().remote_cluster is None
    True
    """

    train_distribute: Strategy | None = None
    eval_distribute: Strategy | None = None
    remote_cluster: Mapping[str, Any] | ClusterSpec | None = None


class RunConfig:
    """The configuration of an `Estimator`.

    TF_CONFIG gives the cluster and the task of this process.

    Args:
        model_dir: directory of checkpoints and event files; None for the Estimator's, or a temporary one.
        tf_random_seed: with which initial values, dropout and shuffles begin; None for other ones each time.
        save_summary_steps: steps between two summaries; 0 or None for none.
        save_checkpoints_steps: steps between two checkpoints.
        save_checkpoints_secs: seconds between two checkpoints; 600 where neither is given. None for both
            saves none.
        session_config: accepted for TensorFlow's signature, as are `device_fn`, `protocol`,
            `experimental_max_worker_delay_secs`, `session_creation_timeout_secs` and
            `checkpoint_save_graph_def`: there are no sessions and no graph.
        keep_checkpoint_max: how many checkpoints are kept; 0 or None for all.
        keep_checkpoint_every_n_hours: of the other checkpoints one in so many hours is kept, too.
        log_step_count_steps: steps between two lines with the loss, and steps per second; None for none.
        train_distribute: the strategy of `train`.
        device_fn: as `session_config`.
        protocol: as `session_config`.
        eval_distribute: the strategy of `evaluate`.
        experimental_distribute: a `DistributeConfig`, in place of the two strategies.
        experimental_max_worker_delay_secs: as `session_config`.
        session_creation_timeout_secs: as `session_config`.
        checkpoint_save_graph_def: as `session_config`.

    Raises:
        InvalidArgumentError: for a value that cannot be used, both of steps and seconds between checkpoints,
            or a strategy that is given twice.

    >>> config = RunConfig(tf_random_seed=1, save_checkpoints_steps=100)
    >>> config.replace(keep_checkpoint_max=2).save_checkpoints_steps
    100
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        tf_random_seed: int | None = None,
        save_summary_steps: int | None = 100,
        save_checkpoints_steps: object = ...,
        save_checkpoints_secs: object = ...,
        session_config: object = None,
        keep_checkpoint_max: int | None = 5,
        keep_checkpoint_every_n_hours: float = 10000,
        log_step_count_steps: int | None = 100,
        train_distribute: Strategy | None = None,
        device_fn: object = None,
        protocol: str | None = None,
        eval_distribute: Strategy | None = None,
        experimental_distribute: DistributeConfig | None = None,
        experimental_max_worker_delay_secs: int | None = None,
        session_creation_timeout_secs: float = 7200,
        checkpoint_save_graph_def: bool = True,
    ) -> None:
        values = {name: value for name, value in locals().items() if name != "self"}
        unset = [values[n] is ... for n in ("save_checkpoints_steps", "save_checkpoints_secs")]
        if unset[0]:
            values["save_checkpoints_steps"] = None
        if unset[1]:
            values["save_checkpoints_secs"] = _SECONDS if unset[0] else None
        self._values: dict[str, Any] = values
        self._check()
        self._task = _EnvironTask.from_environ()
        # The evaluator is no part of the cluster.
        if self.train_distribute is None and self.cluster_spec and "chief" not in self.cluster_spec.jobs:
            raise InvalidArgumentError(
                'If "cluster" is set in TF_CONFIG, it must have one "chief" node. Received: the jobs '
                f"{self._task.cluster.jobs}. Name one of the workers 'chief', or pass `train_distribute`."
            )
        self._take_model_dir(process_environ().get("TF_CONFIG"))

    def _check(self) -> None:
        values = self._values
        if values["save_checkpoints_steps"] is not None and values["save_checkpoints_secs"] is not None:
            raise InvalidArgumentError(
                f"{_BOTH_CHECKPOINTS} Received: {values['save_checkpoints_steps']} steps and "
                f"{values['save_checkpoints_secs']} seconds. Leave one of them out."
            )
        for name, (is_good, words) in _CHECKS.items():
            if values[name] is not None and not is_good(values[name]):
                raise InvalidArgumentError(f"{name} should be {words}. Received: {name}={values[name]!r}.")
        if values["model_dir"] is not None:
            values["model_dir"] = os.fspath(values["model_dir"])
            place_of(values["model_dir"])
        both = values["experimental_distribute"]
        if both is None:
            return
        if not isinstance(both, DistributeConfig):
            raise InvalidTypeError(
                f"`experimental_distribute` must be a DistributeConfig. Received: {type(both).__name__}."
            )
        for name in ("train_distribute", "eval_distribute"):
            if values[name] is not None and getattr(both, name) is not None:
                raise InvalidArgumentError(
                    f"Either `{name}` or `experimental_distribute.{name}` may be set. Received: both. Leave "
                    "one of them out."
                )

    def _take_model_dir(self, text: str | None) -> None:
        """Use the `model_dir` of TF_CONFIG, where there is one."""
        own = json.loads(text).get("model_dir") if text and text.strip() else None
        if own is None:
            return
        if not own or not isinstance(own, str):
            raise InvalidArgumentError(
                f"model_dir in TF_CONFIG should be non-empty, and a text. Received: {repr(own)[:200]}. Write "
                '`"model_dir": "/shared/run"`.'
            )
        if self.model_dir is not None and self.model_dir != own:
            raise InvalidArgumentError(
                "`model_dir` provided in RunConfig construct, if set, must have the same value as the "
                f"model_dir in TF_CONFIG. Received: {self.model_dir!r} and {own!r}. Leave one of them out."
            )
        self._values["model_dir"] = own

    def __getattr__(self, name: str) -> Any:
        values = vars(self).get("_values", {})
        if name not in values:
            raise AttributeError(f"A RunConfig has no {name!r}; it has {sorted(values)}.")
        return values[name]

    def replace(self, **changes: object) -> RunConfig:
        """Return a configuration with other values for some arguments.

        Args:
            changes: by name.

        Raises:
            InvalidArgumentError: a name is no argument of the constructor.
        """
        for name, value in changes.items():
            if name not in self._values:
                raise InvalidArgumentError(
                    f"Replacing {name!r} is not supported. Received: {name}={value!r}. Allowed "
                    f"properties are {list(self._values)}."
                )
        new = copy.copy(self)
        new._values = {**self._values, **changes}
        pair = ("save_checkpoints_steps", "save_checkpoints_secs")
        for name, other in (pair, pair[::-1]):
            if changes.get(name) is not None and other not in changes:
                new._values[other] = None
        new._check()
        return new

    def _arguments(self) -> dict[str, Any]:
        """Return the constructor's arguments by name."""
        return dict(self._values)

    # --- the strategies --------------------------------------------------------------------------

    @property
    def train_distribute(self) -> Strategy | None:
        """The strategy of training, wherever it was given."""
        return self._strategy("train_distribute")

    @property
    def eval_distribute(self) -> Strategy | None:
        """The strategy of evaluation, wherever it was given."""
        return self._strategy("eval_distribute")

    def _strategy(self, name: str) -> Strategy | None:
        both = self._values["experimental_distribute"]
        strategy: Strategy | None = self._values[name] or (both and getattr(both, name))
        return strategy

    @property
    def remote_cluster(self) -> ClusterSpec | None:
        """The servers on which `train_and_evaluate` runs; None for this process."""
        both = self._values["experimental_distribute"]
        given = both and both.remote_cluster
        return None if given is None else ClusterSpec(given)

    # --- the cluster -------------------------------------------------------------------------------

    @property
    def cluster_spec(self) -> ClusterSpec:
        """The cluster of TF_CONFIG; empty for one process, and for the evaluator."""
        return ClusterSpec({}) if self.task_type == TaskType.EVALUATOR else self._task.cluster

    @property
    def task_type(self) -> str:
        """The job of this process."""
        return self._task.job

    @property
    def task_id(self) -> int:
        """The number of this process in its job."""
        return self._task.index

    @property
    def is_chief(self) -> bool:
        """True if this process writes checkpoints: the chief, or else the first worker."""
        if not self._task.cluster:
            return self.task_type != TaskType.EVALUATOR
        first = TaskType.CHIEF if TaskType.CHIEF in self._task.cluster.jobs else TaskType.WORKER
        return (self.task_type, self.task_id) == (first, 0)

    @property
    def num_ps_replicas(self) -> int:
        """How many parameter servers there are."""
        return self._count(TaskType.PS)

    @property
    def num_worker_replicas(self) -> int:
        """How many processes train, the chief among them."""
        if self.task_type == TaskType.EVALUATOR:
            return 0
        return self._count(TaskType.WORKER) + self._count(TaskType.CHIEF) if self._task.cluster else 1

    @property
    def global_id_in_cluster(self) -> int | None:
        """The number of this process in the cluster: chief, workers, parameter servers; None for others."""
        if self.task_type == TaskType.EVALUATOR:
            return None
        if not self._task.cluster:
            return 0
        before = 0
        for job in (TaskType.CHIEF, TaskType.WORKER, TaskType.PS):
            if job == self.task_type:
                return before + self.task_id
            before += self._count(job)
        return None

    @property
    def master(self) -> str:
        """The address of this task; empty for one process, and for the evaluator."""
        cluster = self.cluster_spec
        if not cluster or sum(cluster.num_tasks(job) for job in cluster.jobs) == 1:
            return ""
        return f"grpc://{cluster.task_address(self.task_type, self.task_id)}"

    @property
    def evaluation_master(self) -> str:
        """Empty: the evaluator computes by itself."""
        return ""

    @property
    def service(self) -> Mapping[str, Any] | None:
        """The entry `service` of TF_CONFIG."""
        return self._task.service

    def _count(self, job: str) -> int:
        cluster = self.cluster_spec
        return cluster.num_tasks(job) if cluster and job in cluster.jobs else 0


@dataclasses.dataclass(frozen=True)
class _EnvironTask:
    """Which task this process is."""

    cluster: ClusterSpec
    job: str
    index: int
    service: Mapping[str, Any] | None = None

    @classmethod
    def from_environ(cls) -> _EnvironTask:
        resolver, text = TFConfigClusterResolver(), process_environ().get("TF_CONFIG")
        cluster = resolver.cluster_spec()
        service = json.loads(text).get("service") if text and text.strip() else None
        if service is not None and not isinstance(service, dict):
            raise InvalidTypeError(
                f'If "service" is set in TF_CONFIG, it must be a dict. Received: {type(service).__name__}.'
            )
        for field, value in {"type": resolver.task_type, "index": resolver.task_id}.items():
            if cluster and value is None:
                raise InvalidArgumentError(
                    f'If "cluster" is set in TF_CONFIG, task {field} must be set. Received: a TF_CONFIG '
                    'without it. Write `"task": {"type": "worker", "index": 0}`.'
                )
        return cls(cluster, resolver.task_type or TaskType.WORKER, resolver.task_id or 0, service)
