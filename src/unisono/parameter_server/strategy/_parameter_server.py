"""`ParameterServerStrategy`: variables live on server tasks, workers compute, the chief runs the program."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import jax
import keras

from unisono._checks import check_instance, checked_whole
from unisono._errors import ContextError, InvalidArgumentError, InvalidTypeError, UnsupportedError
from unisono._mesh import resolve_devices
from unisono._system._program_end import note_exits
from unisono.cluster.liveness._health import report_ready
from unisono.cluster_resolver._base import ClusterResolver
from unisono.cluster_resolver._detect import resolve
from unisono.parameter_server.chief._closures import Rules
from unisono.parameter_server.chief._fit_callbacks import EpochNumbers
from unisono.parameter_server.chief._job import Job
from unisono.parameter_server.strategy._forms import ClusterForm, StrategyForm, connect, show_progress
from unisono.parameter_server.strategy._roles import roles_of
from unisono.parameter_server.strategy._serve import serve_and_exit
from unisono.strategies._base import Arguments, Strategy
from unisono.strategies._one_device import OneDeviceStrategy
from unisono.strategies._replicated import ReplicatedStrategy
from unisono.training.trainer._protocol import StepFunction
from unisono.training.trainer._trainer_step import TrainerTask

if TYPE_CHECKING:
    from unisono._lowering._compiler_options import Executables
    from unisono.training.named_steps._protocol import ElementSource, NamedStep, StepRunner


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

    #: The state is elsewhere after each step.
    _runs_ahead = False

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Callable[..., Any] | None = None,
        *,
        max_staleness: int | None = None,
        push_dtype: Literal["bfloat16", "float16"] | None = None,
        pull_dtype: Literal["bfloat16", "float16"] | None = None,
    ) -> None:
        _check(cluster_resolver, variable_partitioner, max_staleness)
        _check_types(push_dtype, pull_dtype)
        resolver = resolve() if cluster_resolver is None else cluster_resolver
        spec = None if resolver is None else resolver.cluster_spec()
        self._resolver = resolver if spec else None
        roles = roles_of(spec, resolver.task) if resolver is not None and spec else None
        if roles is None or roles.is_evaluator:
            self._form = StrategyForm()
        elif roles.is_chief:
            if ClusterForm.running:
                raise ContextError(
                    "A process must have one `ParameterServerStrategy` of its cluster. Received: a second "
                    "one. Use the first one for all models."
                )
            note_exits()
            rules = Rules(max_staleness)
            self._form = ClusterForm(connect(roles), rules, variable_partitioner, push_dtype, pull_dtype)
            show_progress(roles)
            report_ready()
        else:
            serve_and_exit(roles)
        super().__init__(self._form.mesh)
        self._state_layout = self._form.state_layout

    @property
    def _has_cluster(self) -> bool:
        """Whether variables live on parameter servers, and not in this process."""
        return self._form.job is not None

    @property
    def _workers_make_data(self) -> bool:
        """Whether a function as data of `fit` is called on the workers."""
        return self._has_cluster

    @property
    def _job(self) -> Job:
        """What the chief does with the cluster.

        Raises:
            UnsupportedError: without a cluster.
        """
        if self._form.job is None:
            raise UnsupportedError(
                "A coordinator needs a cluster with parameter servers and workers. Received: a "
                "`ParameterServerStrategy` without a cluster. Start the program with "
                "`unisono launch -n 2 --ps 1 --chief`, or call the step with `strategy.run`."
            )
        return self._form.job

    @property
    def _numbers(self) -> EpochNumbers | None:
        return None if self._form.calls is None else self._form.calls.numbers

    @functools.cached_property
    def parameter_devices(self) -> tuple[jax.Device, ...]:
        """The device on which variables live without a cluster."""
        return resolve_devices(["cpu:0"])

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """What describes the cluster; None without one."""
        return self._resolver

    @property
    def _of_servers(self) -> Callable[[], Strategy]:
        """Makes this strategy in each task of a remote cluster."""
        return ParameterServerStrategy

    def _variable_created(self, variable: keras.Variable) -> None:
        """Divide a variable that was made in the scope, where the partitioner wants it."""
        self._form.variable_created(variable)

    def make_trainer_function(self, model: keras.Model, task: TrainerTask) -> StepFunction:
        """Return what runs compiled steps here, or sends each batch to a worker."""
        return self._form.trainer_function(self, model, task)

    def make_step_runner(
        self, step: NamedStep, source: ElementSource, executables: Executables | None = None
    ) -> StepRunner:
        """Return what runs steps here, or schedules them on workers, which make their data."""
        return self._form.step_runner(self, step, source, executables)

    @property
    def _own_callbacks(self) -> list[keras.callbacks.Callback]:
        """What adds speed, staleness and bytes to the logs of epochs."""
        return [] if self._numbers is None else [self._numbers]

    @property
    def _numbers_of_workers(self) -> Mapping[str, float]:
        """Speed, staleness and bytes of each worker in the last epoch of the `fit` that runs now."""
        return {} if self._numbers is None else self._numbers.of_workers

    def _around_method(self) -> contextlib.AbstractContextManager[None]:
        """Surround a call of `fit` and the like: its steps are left where it raises."""
        calls = self._form.calls
        return super()._around_method() if calls is None else calls.around_method()

    def _around_fit(
        self, model: keras.Model, arguments: Arguments, ahead: bool
    ) -> contextlib.AbstractContextManager[tuple[Arguments, bool]]:
        """Surround `fit`: a function as `x` or `validation_data` makes a dataset on each worker."""
        calls = self._form.calls
        return super()._around_fit(model, arguments, ahead) if calls is None else calls.around_fit(arguments)

    @contextlib.contextmanager
    def _around_test(
        self, model: keras.Model, name: str, arguments: Arguments, ahead: bool
    ) -> Iterator[tuple[Arguments, bool]]:
        """Surround `evaluate` or `predict`: a function as `x` makes a dataset on each worker."""
        calls = self._form.calls
        if calls is None:
            yield arguments, ahead
            return
        with calls.around_test(name, arguments) as changed:
            yield changed, False

    def end(self) -> None:
        """End the job: workers and parameter servers exit with 0. The end of the program does it, too."""
        self._form.end()

    def __reduce__(self) -> tuple[type[ReplicatedStrategy], tuple[str]]:
        # In a function that goes to workers: there it stands for the worker's own devices.
        return OneDeviceStrategy, ("cpu:0",)


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
