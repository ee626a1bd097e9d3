"""`ParameterServerStrategy`: variables live on server tasks, workers compute, the chief runs the program."""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import jax
import keras

from unisono._checks import check_instance, checked_whole
from unisono._errors import ContextError, InvalidArgumentError, InvalidTypeError, UnsupportedError
from unisono._mesh import ReplicaMesh, resolve_devices
from unisono._system._program_end import expected_exit_code, note_exits, watch_program
from unisono.cluster._lone_task import servers_joined
from unisono.cluster.liveness._health import report_ready
from unisono.cluster_resolver._base import ClusterResolver
from unisono.cluster_resolver._detect import resolve
from unisono.parameter_server.chief._closures import Rules
from unisono.parameter_server.chief._epoch_callbacks import epoch_callbacks
from unisono.parameter_server.chief._job import Cluster, Job
from unisono.parameter_server.chief._partition import shard_bounds, shard_count
from unisono.parameter_server.chief._train_function import RemoteStatefulTrainFunction, RemoteTrainFunction
from unisono.parameter_server.chief._worker_datasets import RunningCalls
from unisono.parameter_server.programs._push_layout import PushLayout
from unisono.parameter_server.strategy._connect import connect
from unisono.parameter_server.strategy._roles import roles_of
from unisono.parameter_server.strategy._serve import service_of
from unisono.parameter_server.tables._sharded_variable import divide
from unisono.step._keras_internals import stored_dtype
from unisono.step._layout import CentralLayout
from unisono.step.variables._merge_rules import kind_of
from unisono.strategies._base import Arguments, Strategy
from unisono.strategies._one_device import OneDeviceStrategy
from unisono.strategies._replicated import ReplicatedStrategy
from unisono.training._scope_warnings import strategy_used
from unisono.training.stateful._form import is_stateful
from unisono.training.trainer._protocol import StepFunction
from unisono.training.trainer._trainer_step import TrainerTask

if TYPE_CHECKING:
    from unisono._lowering._executables import Executables
    from unisono.training.named_steps._protocol import ElementSource, NamedStep, StepRunner

#: The job of this process: a cluster serves one chief.
_JOB: list[Job] = []


class ParameterServerStrategy(ReplicatedStrategy):
    """Variables live on parameter servers, workers compute steps beside each other, the chief coordinates.

    The program runs on the chief: a task of the job `chief`, or worker 0, which then computes, too. In the
    other workers and in parameter servers the constructor does not return: it serves the chief, and ends the
    process when the chief's program ends. Each worker pulls the values that it needs, computes gradients,
    and pushes them; the servers run the optimizer. An update is applied once, also where a worker is lost
    and its step runs again.

    Without a cluster variables live on the CPU and all devices of this machine compute, as under
    `CentralStorageStrategy`.

    Args:
        cluster_resolver: describes the cluster; None reads the environment, such as TF_CONFIG.
        variable_partitioner: divides variables over servers along their first axis, such as one of
            `unisono.partitioners`; a function of `shape` and `dtype` that returns the number of parts along
            each axis. None leaves each variable whole, as does a strategy without a cluster.
        max_staleness: how many other updates may be applied between a step's pull and its own update; None
            for no bound. With 0 the numbers are those of one device.
        push_dtype: `"bfloat16"` or `"float16"`, in which gradients in float32 of 8 KiB and more travel to the
            servers, in half the bytes; None for float32. In float16, numbers beyond 65,504 are infinite.
            Without a cluster nothing travels.
        pull_dtype: likewise, in which the weights that a step trains travel to its worker, which computes
            with the rounded values. The servers keep and update them in float32: `evaluate`, `predict`,
            checkpoints and `save` read these.

    Raises:
        InvalidArgumentError: the cluster has no `ps` or `worker`, or more than one chief; or `max_staleness`
            is negative; or `push_dtype` or `pull_dtype` is another type.
        InvalidTypeError: an argument has another type.

    >>> ParameterServerStrategy().cluster_resolver is None
    True
    """

    _resolver: ClusterResolver | None = None

    #: Whether variables live on parameter servers, and not in this process.
    has_cluster = False

    #: The state is elsewhere after each step.
    runs_ahead = False

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Callable[..., Any] | None = None,
        *,
        max_staleness: int | None = None,
        push_dtype: str | None = None,
        pull_dtype: str | None = None,
    ) -> None:
        _check(cluster_resolver, variable_partitioner, max_staleness)
        _check_types(push_dtype, pull_dtype)
        resolver = resolve() if cluster_resolver is None else cluster_resolver
        spec = None if resolver is None else resolver.cluster_spec()
        if resolver is not None and spec:
            self._resolver = resolver
            roles = roles_of(spec, resolver.task)
            if not roles.is_chief and not roles.is_evaluator:
                sys.exit(service_of(roles).join())
            if _JOB:
                raise ContextError(
                    "A process must have one `ParameterServerStrategy` of its cluster. Received: a second "
                    "one. Use the first one for all models."
                )
            if not roles.is_evaluator:
                note_exits()
                # Here, and not in `__new__`: a subclass of the user decides what this constructor is given.
                self.__class__ = _cluster_form_of(type(self))
                form = cast("ClusterForm", self)
                rules = Rules(max_staleness)
                cluster = connect(roles)
                ClusterForm.__init__(form, cluster, rules, variable_partitioner, push_dtype, pull_dtype)
                report_ready()
                return
        super().__init__(ReplicaMesh(resolve_devices(None)))
        home = jax.sharding.SingleDeviceSharding(self.parameter_devices[0])
        self._state_layout = CentralLayout(self._mesh, home)

    @property
    def job(self) -> Job:
        """What the chief does with the cluster.

        Raises:
            UnsupportedError: in the local form.
        """
        raise UnsupportedError(
            "A coordinator needs a cluster with parameter servers and workers. Received: a "
            "`ParameterServerStrategy` without a cluster. Start the program with "
            "`unisono launch -n 2 --ps 1 --chief`, or call the step with `strategy.run`."
        )

    @functools.cached_property
    def parameter_devices(self) -> tuple[jax.Device, ...]:
        """The device on which variables live without a cluster."""
        return resolve_devices(["cpu:0"])

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """What describes the cluster; None without one."""
        return self._resolver

    @property
    def of_servers(self) -> Callable[[], Strategy]:
        """Makes this strategy in each task of a remote cluster."""
        return ParameterServerStrategy

    def end(self) -> None:
        """End the job: workers and parameter servers exit with 0. The end of the program does it, too."""

    def __reduce__(self) -> tuple[type[ReplicatedStrategy], tuple[str]]:
        # In a function that goes to workers: there it stands for the worker's own devices.
        return OneDeviceStrategy, ("cpu:0",)


class ClusterForm(ParameterServerStrategy):
    """A `ParameterServerStrategy` on the chief of a cluster.

    Args:
        partitioner: divides variables; None for whole ones.
        push_dtype: the type in which large gradients are pushed; None for that of their variables.
        pull_dtype: likewise of the weights that steps train.
    """

    has_cluster = True

    #: A function as data of `fit` is called on the workers.
    workers_make_data = True

    def __init__(
        self,
        cluster: Cluster,
        rules: Rules,
        partitioner: Callable[..., Any] | None = None,
        push_dtype: str | None = None,
        pull_dtype: str | None = None,
    ) -> None:
        # One replica: what the chief traces is what one worker computes.
        ReplicatedStrategy.__init__(self, ReplicaMesh(self.parameter_devices))
        self._state_layout = PushLayout(self._mesh, push_dtype)
        self._partitioner = partitioner
        self._job = Job(cluster, rules, push_dtype, pull_dtype)
        self._calls = RunningCalls(self._job)
        _JOB.append(self._job)
        servers_joined()
        watch_program()
        atexit.register(self._end)

    @property
    def job(self) -> Job:
        """What the chief does with the cluster."""
        return self._job

    def variable_created(self, variable: keras.Variable) -> None:
        """Divide a variable that was made in the scope, where the partitioner wants it."""
        # What belongs to a random generator stays on the chief.
        if self._partitioner is None or kind_of(variable).is_seed:
            return
        shape = tuple(variable.shape)
        shards = shard_count(self._partitioner, shape, stored_dtype(variable), variable.path)
        if shards > 1:
            divide(variable, shard_bounds(shape[0], shards))

    def make_trainer_function(self, model: keras.Model, task: TrainerTask) -> StepFunction:
        """Return what sends each batch to a worker."""
        made = RemoteStatefulTrainFunction if is_stateful(model, task) else RemoteTrainFunction
        return made(model, self, task, self._job, self._calls)

    def make_step_runner(
        self, step: NamedStep, source: ElementSource, executables: Executables | None = None
    ) -> StepRunner:
        """Return what schedules steps on workers, which make their data."""
        from unisono.parameter_server.chief._step_runner import RemoteStepRunner

        strategy_used(self)
        return RemoteStepRunner(self, step, source)

    @property
    def own_callbacks(self) -> list[keras.callbacks.Callback]:
        """What adds speed, staleness and bytes to the logs of epochs."""
        return [] if self._calls.numbers is None else [self._calls.numbers]

    @property
    def numbers_of_workers(self) -> Mapping[str, float]:
        """Speed, staleness and bytes of each worker in the last epoch of the `fit` that runs now."""
        return {} if self._calls.numbers is None else self._calls.numbers.of_workers

    @contextlib.contextmanager
    def around_method(self) -> Iterator[None]:
        """Surround a call of `fit` and the like: its steps are left where it raises."""
        with self._calls.around_method(), self._job.around_call():
            yield

    @contextlib.contextmanager
    def around_fit(
        self, model: keras.Model, arguments: Arguments, ahead: bool
    ) -> Iterator[tuple[Arguments, bool]]:
        """Surround `fit`: a function as `x` or `validation_data` makes a dataset on each worker."""
        with epoch_callbacks(arguments["callbacks"]), self._calls.around_fit(arguments) as changed:
            yield changed, False

    def around_test(self, name: str, arguments: Arguments) -> contextlib.AbstractContextManager[Arguments]:
        """Surround `evaluate` or `predict`: a function as `x` makes a dataset on each worker."""
        return self._calls.around_test(name, arguments)

    def end(self) -> None:
        """End the job: workers and parameter servers exit with 0. The end of the program does it, too."""
        self._end(code=0)

    def _end(self, code: int | None = None) -> None:
        self._job.end(expected_exit_code() if code is None else code)
        if self._job in _JOB:
            _JOB.remove(self._job)
        atexit.unregister(self._end)


@functools.cache
def _cluster_form_of(kind: type[ParameterServerStrategy]) -> type[ClusterForm]:
    """Return the cluster's form of a class: of its name, and with the methods that a user has overridden."""
    bases = (ClusterForm,) if kind is ParameterServerStrategy else (kind, ClusterForm)
    return type(kind.__name__, bases, {"__module__": kind.__module__, "__doc__": kind.__doc__})


def _check(resolver: object, partitioner: object, max_staleness: object) -> None:
    check_instance(
        resolver, "cluster_resolver", ClusterResolver, "Leave it out to read TF_CONFIG, or write "
        "`unisono.cluster_resolver.SimpleClusterResolver(spec, task_type='chief', task_id=0)`.",
    )  # fmt: skip
    if partitioner is not None and not callable(partitioner):
        raise InvalidTypeError(
            "`variable_partitioner` must be a function of `shape` and `dtype`. "
            f"Received: {partitioner!r}. Write `unisono.partitioners.FixedShardsPartitioner(2)`."
        )
    if max_staleness is not None:
        hint = "Leave it out for no bound; with 0 steps run one by one."
        checked_whole(max_staleness, "max_staleness", 0, hint)


def _check_types(push_dtype: object, pull_dtype: object) -> None:
    checked = [("push_dtype", push_dtype, "push gradients"), ("pull_dtype", pull_dtype, "pull weights")]
    for name, dtype, what in checked:
        if dtype not in (None, "bfloat16", "float16"):
            raise InvalidArgumentError(
                f"`{name}` must be 'bfloat16' or 'float16'. "
                f"Received: {dtype!r}. Leave it out to {what} as they are."
            )
