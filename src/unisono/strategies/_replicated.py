"""`ReplicatedStrategy`: replicas run one compiled program on a mesh of devices.

Tests: tests/virtual/strategies/test_contract.py, tests/virtual/strategies/test_recipe.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import jax
import keras

from unisono._checks import check_instance
from unisono._context import current
from unisono._errors import InvalidArgumentError
from unisono._features import load
from unisono._mesh import ReplicaMesh, check_alike, ensure_collectives_can_run
from unisono._types import PyTree, UserValue
from unisono._values import IndexedSlices, PerReplica, ReduceOp
from unisono.collectives._cross_device import CrossDeviceOps, own_ops
from unisono.collectives._process_group import ProcessGroup
from unisono.data._sharding import InputContext, InputOptions, ValueContext
from unisono.step._layout import StateLayout, Synchronization
from unisono.step._replicas import Replicas
from unisono.strategies._base import Arguments, Strategy
from unisono.training._scope_warnings import strategy_used
from unisono.training._step_form import is_stateful
from unisono.training.trainer._protocol import StepFunction
from unisono.training.trainer._trainer_function import TrainerFunction
from unisono.training.trainer._trainer_step import TrainerTask

if TYPE_CHECKING:
    from unisono._lowering._compiler_options import Executables
    from unisono._system._literals import StateLayoutName
    from unisono.data._distribute import DistributedDataset
    from unisono.step._compiler import StepCompiler
    from unisono.training.named_steps._protocol import ElementSource, NamedStep, StepRunner


#: The names of state layouts; the first is that of strategies by default.
LAYOUTS: tuple[StateLayoutName, ...] = ("mirrored", "sharded", "fully_sharded")


def mesh_of(devices: tuple[jax.Device, ...], devices_per_replica: int) -> ReplicaMesh:
    """Return the mesh of some devices, of which each replica has so many."""
    if devices_per_replica == 1:
        return ReplicaMesh(devices)
    return load("replicas of several devices")(devices, devices_per_replica)  # type: ignore[no-any-return]


def layout_of(
    name: str,
    ops: CrossDeviceOps,
    sync: Synchronization | None,
    mesh: ReplicaMesh,
    group: ProcessGroup,
    layout_map: object = None,
) -> StateLayout:
    """Return the layout that a strategy's arguments ask for.

    Args:
        name: `state_layout`.
        ops: how the strategy reduces gradients, perhaps compressed.
        layout_map: how variables are cut over the devices of a replica.

    Raises:
        InvalidArgumentError: for another name, or one that does not go with `sync`.
        InvalidTypeError: when `sync` is something else than `LocalUpdates`.
        BackendError: where workers have no device for exchanges beside the steps.
    """
    if name not in LAYOUTS:
        raise InvalidArgumentError(
            '`state_layout` must be "mirrored", "sharded" or "fully_sharded". Received: '
            f'state_layout={name!r}. Write `state_layout="sharded"` for optimizer state in parts on the '
            'devices, "fully_sharded" for weights in parts, too.'
        )
    if sync is not None:
        hint = "Write `sync=unisono.LocalUpdates(every=50)`, or leave it out."
        check_instance(sync, "sync", load("class LocalUpdates"), hint)
    if mesh.devices_per_replica > 1 or layout_map is not None:
        make_layout: Callable[..., StateLayout] = load("layout of a replica's devices")
        return make_layout(mesh, layout_map, ops, name, sync, group)
    is_mirrored = name == LAYOUTS[0]
    layout = StateLayout(mesh) if is_mirrored else load(f"{name.replace('_', ' ')} layout")(mesh, group)
    layout = ops._layout(layout, mesh, group)
    return layout if sync is None else sync._layout(layout, mesh, group)


class ReplicatedStrategy(Strategy):
    """A strategy whose steps are compiled for a mesh of devices, with a replica on each.

    A subclass decides which devices compute, where the state lies between steps (`state_layout`), and how
    values of replicas are reduced (`cross_device_ops`); what a step *is*, is the same for all of them.

    Args:
        mesh: the devices that compute, in replica order.
        process_group: the processes that train together; this one alone by default.

    >>> from unisono.spi import ReplicaMesh, resolve_devices
    >>> ReplicatedStrategy(ReplicaMesh(resolve_devices(["cpu:0", "cpu:1"]))).num_replicas_in_sync
    2
    """

    def __init__(self, mesh: ReplicaMesh, process_group: ProcessGroup | None = None) -> None:
        check_alike(mesh.devices)
        ensure_collectives_can_run(mesh.devices)
        self._mesh = mesh
        super().__init__(process_group)
        self._state_layout = StateLayout(mesh)

    # --- what a strategy decides ---------------------------------------------------------

    @functools.cached_property
    def cross_device_ops(self) -> CrossDeviceOps:
        """How an all-reduce between the replicas is done; by XLA's own."""
        return own_ops(self._mesh.platform)

    @property
    def state_layout(self) -> StateLayout:
        """Where variables rest between steps, and how gradients are reduced."""
        return self._state_layout

    @property
    def _joins_rows(self) -> bool:
        """Whether rows that depend on each other are computed by one program over all devices.

        Otherwise every replica computes all of them: between processes XLA's own messages for each array
        take longer, and state in parts is for programs that run once per replica.
        """
        return self._mesh.local_devices == self._mesh.devices and self.state_layout.is_whole

    @functools.cached_property
    def _replicas(self) -> Replicas:
        """What steps know of this strategy."""
        return Replicas(
            self._mesh, self._group, self.state_layout, self.cross_device_ops, self, self._joins_rows
        )

    def explain(
        self, model: keras.Model, data: PyTree = None, print_fn: Callable[[str], object] = print
    ) -> None:
        """Print how each layer, state, loss and metric of a model is computed on the replicas, and why.

        Each part is read from the trace of the model's step; nothing is computed.

        Args:
            model: compiled for its training step, else that of `predict` is explained.
            data: `x`, or a tuple `(x, y)` or `(x, y, sample_weight)` of arrays with a few rows; without
                targets losses and metrics are left out. None takes the shapes of the model's inputs.
            print_fn: gets the table as text.

        Raises:
            InvalidArgumentError: the shapes of the model's inputs are not known, and no data is given.

        >>> import keras, unisono
        >>> strategy = unisono.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="dense")])
        >>> strategy.explain(model)
        part     on 2 replicas                 because
        1 layer  by each replica for its rows  each row depends on itself
        output   by each replica for its rows  each row depends on itself
        """
        from unisono.training._explanation import explanation

        print_fn(explanation(model, self._replicas, data))

    def make_trainer_function(self, model: keras.Model, task: TrainerTask) -> StepFunction:
        """Return what runs compiled steps on the mesh."""
        if task is TrainerTask.TRAIN:
            function = self.state_layout.phases.make_train_function(model, self._replicas)
            if function is not None:
                return function
        if is_stateful(model, task):
            stateful: StepFunction = load("steps in TensorFlow's form")(model, self._replicas, task)
            return stateful
        return TrainerFunction(model, self._replicas, task)

    def make_step_runner(
        self, step: NamedStep, source: ElementSource, executables: Executables | None = None
    ) -> StepRunner:
        """Return what runs the named steps of a loop such as an Estimator's.

        Args:
            step: of one replica.
            source: makes the elements, each for one replica.
            executables: programs of earlier loops.
        """
        # Loads Grain, which a strategy by itself does not need.
        from unisono.training.named_steps._replica_runner import ReplicaStepRunner

        strategy_used(self)
        return ReplicaStepRunner(self, step, source, executables)

    # --- what follows from the mesh ----------------------------------------------------------

    @property
    def _replicated(self) -> ReplicatedStrategy:
        """This strategy."""
        return self

    @property
    def mesh(self) -> ReplicaMesh:
        """The devices that compute."""
        return self._mesh

    @property
    def num_replicas_in_sync(self) -> int:
        return self._mesh.num_replicas

    @property
    def worker_devices(self) -> tuple[jax.Device, ...]:
        return self._mesh.local_devices

    @property
    def parameter_devices(self) -> tuple[jax.Device, ...]:
        return self._mesh.devices

    @functools.cached_property
    def _compiler(self) -> StepCompiler:
        """What compiles the steps of `run`; `fit` does without it."""
        from unisono.step._compiler import StepCompiler

        return StepCompiler(self._replicas, examine=load("reading of a step of `run`"))

    @property
    def num_programs(self) -> int:
        """How many programs `run` has compiled and keeps."""
        return self._compiler.num_programs

    def _gather_state(self, variables: Iterable[keras.Variable]) -> None:
        """Gather what lies in parts on several workers; see `step._layout.StateLayout.gather`."""
        self.state_layout.gather(variables)

    @functools.cached_property
    def _eager(self) -> ModuleType:
        """Operations on values of replicas outside of steps; `fit` does without them."""
        from unisono.step import _per_replica_ops

        return _per_replica_ops

    def _run(self, fn: Callable[..., object], args: Sequence[object], kwargs: Arguments) -> UserValue:
        return self._compiler.run(fn, args, kwargs)

    def _reduced(self, op: ReduceOp, leaf: PyTree, axis: int | Sequence[int] | None) -> PyTree:
        with self._collective_of(leaf):
            if axis is None and isinstance(leaf, PerReplica) and self.cross_device_ops._has_implementation:
                return self.cross_device_ops.reduce(op, leaf)
            return self._eager.reduce(op, leaf, axis, self._mesh, self._group)

    def _collective_of(self, leaf: PyTree) -> contextlib.AbstractContextManager[None]:
        """Surround the reduction of a value: of one that is the same on all replicas it is no collective."""
        is_shared = isinstance(leaf, (IndexedSlices, PerReplica))
        return self._group.collective() if is_shared else contextlib.nullcontext()

    def _gathered(self, leaf: PyTree, axis: int) -> PyTree:
        with self._collective_of(leaf):
            return self._eager.gather(leaf, axis, self._mesh, self._group)

    def _local(self, value: PyTree) -> tuple[PyTree, ...]:
        results: tuple[PyTree, ...] = self._eager.local_results(value, self._mesh)
        return results

    @property
    def _input_group(self) -> ProcessGroup:
        return self._group.of_replicas(self._mesh.processes_per_replica)

    def _split(self, dataset: object, options: InputOptions | None = None) -> DistributedDataset:
        # Imported where it is used: `fit` with arrays does without Grain and Orbax, which take 0.4 s.
        from unisono.data._distribute import SplitDataset

        pipeline = self._shared_pipeline(dataset)
        return SplitDataset(pipeline, self._mesh, options=options, check_iterable_here=_not_in_replica)

    def _from_function(
        self, dataset_fn: Callable[[InputContext], Iterable[object]], options: InputOptions
    ) -> DistributedDataset:
        from unisono.data._distribute import FunctionDataset

        return FunctionDataset(dataset_fn, self._mesh, options, _not_in_replica, self._input_group)

    def _values_from_function(self, value_fn: Callable[[ValueContext], object]) -> PyTree:
        replicas = self.num_replicas_in_sync
        values = [value_fn(ValueContext(i, replicas)) for i in self._mesh.local_replicas]
        if replicas == 1:
            return values[0]
        from unisono.data._workers import values_of_workers

        return values_of_workers(values, self._mesh, self._input_group)

    def __repr__(self) -> str:
        # The devices of all processes: the name is the same in the logs of each.
        return f"{type(self).__name__}({', '.join(map(str, self._mesh.devices))})"


def _not_in_replica() -> None:
    context = current()
    if context is not None and context.replica is not None:
        raise InvalidArgumentError(
            "A distributed dataset must be iterated outside of the replicas. Received: iteration inside "
            "the function given to `strategy.run`. Pass the batch to `run` as an argument."
        )
