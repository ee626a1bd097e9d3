"""`Strategy`: where variables live, which devices compute, and how values are reduced."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax
import keras

from unisono._backend import require_jax
from unisono._context import Context, check_same_strategy, current, entered, require_cross_replica
from unisono._errors import ContextError, InvalidArgumentError
from unisono._mesh import ReplicaMesh, ensure_collectives_can_run
from unisono._types import PyTree, UserValue
from unisono._values import IndexedSlices, PerReplica, ReduceOp
from unisono.cluster._process_group import ProcessGroup, SingleProcessGroup
from unisono.collectives._cross_device import CrossDeviceOps
from unisono.data._dataset import Dataset
from unisono.data._distribute import (
    DistributedDataset,
    FunctionDataset,
    SplitDataset,
)
from unisono.data._sharding import InputContext, InputOptions, ValueContext
from unisono.data._workers import pipeline_of_worker, values_of_workers
from unisono.step import _per_replica_ops as results
from unisono.step._compiler import StepCompiler
from unisono.step._layout import MirroredLayout, StateLayout
from unisono.strategies._deprecated import DeprecatedMethods
from unisono.strategies._extended import StrategyExtended
from unisono.strategies._options import check_run_options
from unisono.training._bind import install
from unisono.training._scope_warnings import strategy_made, strategy_used
from unisono.training.trainer._protocol import StepFunction
from unisono.training.trainer._trainer_function import TrainerFunction
from unisono.training.trainer._trainer_step import TrainerTask

require_jax()

#: Arguments of a method of Keras, by name.
Arguments = dict[str, UserValue]


class Strategy(DeprecatedMethods):
    """How a model is trained on many devices; base of all strategies.

    A strategy says only where the state lies between steps, which devices compute, and how
    values of replicas are reduced; what a step *is*, is the same for all of them.

    Args:
        mesh: the devices that compute, in replica order.
        process_group: the processes that train together; this one alone by default.
    """

    is_default = False

    def __init__(self, mesh: ReplicaMesh, process_group: ProcessGroup | None = None) -> None:
        ensure_collectives_can_run(mesh.devices)
        self._mesh = mesh
        self._group = process_group or SingleProcessGroup()
        # What this strategy's models have begun with values that all processes hold.
        self._begun: set[str] = set()
        self._state_layout: StateLayout = MirroredLayout(mesh)
        self._compiler = StepCompiler(self)
        self._extended = StrategyExtended(self)
        if not self.is_default:
            # From now on `fit` of a model that is made outside of the scope can be noticed.
            install()
            strategy_made(self)

    # --- what a strategy decides ---------------------------------------------------------

    @property
    @abc.abstractmethod
    def cross_device_ops(self) -> CrossDeviceOps:
        """How an all-reduce between the replicas is done."""

    @property
    def state_layout(self) -> StateLayout:
        """Where variables rest between steps, and how gradients are reduced."""
        return self._state_layout

    def make_trainer_function(self, model: keras.Model, task: TrainerTask) -> StepFunction:
        """Return what `fit`, `evaluate` or `predict` of a model call for each batch."""
        return TrainerFunction(model, self, task)

    #: Whether several steps of `fit` may run in one program, without the state coming back between them.
    runs_ahead = True

    def around_fit(
        self, model: keras.Model, arguments: Arguments, ahead: bool
    ) -> contextlib.AbstractContextManager[tuple[Arguments, bool]]:
        """Surround a call of `fit` on this process.

        Args:
            model: whose `fit`.
            arguments: of `fit`, by name.
            ahead: whether steps may run ahead of Keras' loop.

        Returns:
            A context manager that yields the arguments for this process, and whether steps may run ahead.
        """
        return contextlib.nullcontext((arguments, ahead))

    def prepare_call(
        self,
        method: Callable[..., PyTree],
        model: keras.Model,
        args: tuple[UserValue, ...],
        kwargs: Arguments,
    ) -> tuple[tuple[UserValue, ...], Arguments]:
        """Return the arguments of a call of `evaluate` or `predict` for this process.

        Args:
            method: Keras' method.
            model: whose.
            args: of the call.
            kwargs: likewise.
        """
        return args, kwargs

    @property
    def parameter_devices(self) -> tuple[Any, ...]:
        """The devices on which variables live between steps."""
        return self._mesh.devices

    # --- what every strategy is ------------------------------------------------------------

    @property
    def mesh(self) -> ReplicaMesh:
        """The devices that compute."""
        return self._mesh

    @property
    def is_chief(self) -> bool:
        """Whether this process writes and prints for all."""
        return self._group.is_chief

    @property
    def process_group(self) -> ProcessGroup:
        """The processes that train together."""
        return self._group

    @property
    def worker_devices(self) -> tuple[Any, ...]:
        """This process' devices that compute, in replica order."""
        return self._mesh.local_devices

    @property
    def num_replicas_in_sync(self) -> int:
        """How many replicas' gradients are aggregated together."""
        return self._mesh.num_replicas

    @property
    def cluster_resolver(self) -> Any | None:
        """What describes the cluster; None for strategies of one machine."""
        return None

    @property
    def extended(self) -> StrategyExtended:
        """Less common operations, under tf.distribute's name for them."""
        return self._extended

    @property
    def num_programs(self) -> int:
        """How many programs `run` has compiled and keeps."""
        return self._compiler.num_programs

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Make this strategy current: variables, models and metrics made inside belong to it.

        Raises:
            ContextError: inside a replica.
            MixedStrategyError: inside the scope of another strategy.
            ClusterError: another worker ended, or did not reach a collective in time.
        """
        check_same_strategy(self)
        install()
        strategy_used(self)
        try:
            with entered(Context(self)):
                yield self
        except (RuntimeError, ValueError) as error:
            explained = self._group.explain(error)
            if explained is None:
                raise
            raise explained from error

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """Call `fn` once per replica, each with its own part of the per-replica arguments.

        Args:
            fn: the step of one replica. It is compiled: once for each signature.
            args: positional arguments; `PerReplica` values, also nested, are taken apart.
            kwargs: keyword arguments, likewise.
            options: `RunOptions`, which change nothing.

        Returns:
            What `fn` returns, each array as the `PerReplica` of all replicas' arrays (the bare
            array where there is one replica); other objects as they are; `Mirrored` values once.

        Raises:
            ContextError: when called inside a replica.
        """
        require_cross_replica("strategy.run")
        check_run_options(options)
        install()
        strategy_used(self)
        return self._compiler.run(fn, args, kwargs or {})

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None) -> Any:
        """Combine a per-replica value into one array.

        Args:
            reduce_op: sum or mean.
            value: what `run` returned: a `PerReplica`, or a pytree of them.
            axis: None combines element by element. An int or a tuple also reduces these
                dimensions of each replica's array; a mean then divides by the true number of
                elements, so that replicas of unequal size count right.

        Returns:
            An array, or a pytree of arrays.

        Raises:
            InvalidArgumentError: for the sum of a value that is the same on all replicas, or
                unequal shapes without an `axis`.
            ContextError: inside a replica.
        """
        require_cross_replica("strategy.reduce")
        op = ReduceOp.parse(reduce_op)
        return jax.tree.map(
            lambda leaf: self._reduced(op, leaf, axis),
            value,
            is_leaf=lambda leaf: isinstance(leaf, (IndexedSlices, PerReplica)),
        )

    def _reduced(self, op: ReduceOp, leaf: Any, axis: int | Sequence[int] | None) -> Any:
        with self._collective_of(leaf):
            if axis is None and isinstance(leaf, PerReplica) and self.cross_device_ops.has_implementation:
                return self.cross_device_ops.reduce(op, leaf)
            return results.reduce(op, leaf, axis, self._mesh, self._group)

    def _collective_of(self, leaf: Any) -> contextlib.AbstractContextManager[None]:
        """Around the reduction of a value: of one that is the same on all replicas it is no collective."""
        is_shared = isinstance(leaf, (IndexedSlices, PerReplica))
        return self._group.collective() if is_shared else contextlib.nullcontext()

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate a per-replica value along `axis`, in replica order.

        Args:
            value: a `PerReplica` of arrays of rank 1 or more; sizes may differ along `axis`
                alone. Other values are returned as they are.
            axis: the dimension to join.

        Raises:
            InvalidArgumentError: for scalars, or shapes that differ elsewhere.
            ContextError: inside a replica.
        """
        require_cross_replica("strategy.gather")
        return jax.tree.map(
            lambda leaf: self._gathered(leaf, axis),
            value,
            is_leaf=lambda leaf: isinstance(leaf, (IndexedSlices, PerReplica)),
        )

    def _gathered(self, leaf: Any, axis: int) -> Any:
        with self._collective_of(leaf):
            return results.gather(leaf, axis, self._mesh, self._group)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the values of this machine's replicas as a tuple.

        Args:
            value: a `PerReplica`, or a pytree of them, which gives a tuple of pytrees. A variable of
                this strategy gives the copy of each replica. Another value gives a tuple of it alone.
        """
        return results.local_results(value, self._mesh)

    def distribute_dataset(self, dataset: Any, options: InputOptions | None = None) -> DistributedDataset:
        """Split the batches of any iterable over the replicas.

        Args:
            dataset: gives batches of the *global* size: arrays or nested structures of them.
                The rows of a batch are split in parts whose sizes differ by one at most.
            options: how.

        Returns:
            An iterable of structures of `PerReplica`.
        """
        return self._split(dataset, options)

    def _split(self, dataset: Any, options: InputOptions | None = None) -> DistributedDataset:
        pipeline = self.shared_pipeline(dataset)
        return SplitDataset(pipeline, self._mesh, options=options, check_iterable_here=_not_in_replica)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Make the input from a function of the `InputContext`; batches are *per replica*.

        Args:
            dataset_fn: returns an iterable of batches of one replica. Successive batches go to
                successive replicas.
            options: with `InputReplicationMode.PER_REPLICA`, `dataset_fn` is called for each replica.
        """
        options = options or InputOptions()
        return FunctionDataset(
            dataset_fn,
            self._mesh,
            options,
            _not_in_replica,
            self._group,
        )

    def shared_pipeline(self, dataset: Any) -> Any:
        """Return the pipeline with which this worker makes the global batches.

        A `unisono.data.Dataset` is divided by its `AutoShardPolicy` between several workers.

        Args:
            dataset: any input; another one than a `Dataset` is returned as it is.
        """
        return pipeline_of_worker(dataset, self._group) if isinstance(dataset, Dataset) else dataset

    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Return the `PerReplica` of what `value_fn` gives for each replica.

        Args:
            value_fn: gets a `ValueContext` with the replica's number; on several workers it is called
                for the worker's own replicas, and returns arrays, numbers or strings, also nested.

        Returns:
            A `PerReplica` for each value of the structure that `value_fn` returns; with one replica, what
            it returns.
        """
        replicas = self.num_replicas_in_sync
        values = [value_fn(ValueContext(i, replicas)) for i in self._mesh.local_replicas]
        return values_of_workers(values, self._mesh, self._group) if replicas > 1 else values[0]

    # --- one begin for all processes ---------------------------------------------------------

    def same_on_all(
        self, values: PyTree, what: str, known: Sequence[bool], key: object, batch: PyTree = None
    ) -> PyTree:
        """Return the first process' values on every process: once for each call of `fit`, else once.

        Args:
            values: pytree of arrays with which a step is about to begin.
            what: the step: one may begin with what it ended with the last time.
            known: for each array, whether it is what the step ended with.
            key: which step that was, the same on processes that took the same steps.
            batch: what the step begins with, the same on all processes; pytree of host arrays.

        Returns:
            The values; None where they are what the last step of all processes ended with.
        """
        if what in self._begun:
            return None if all(known) else values
        self._begun.add(what)
        leaves, structure = jax.tree.flatten(values)
        rows = None if batch is None else jax.tree.leaves(batch)
        found = self._group.equal_arrays(leaves, known, (what, key), "The variables of the model", rows)
        return None if found is None else jax.tree.unflatten(structure, found)

    def begin_again(self, what: str) -> None:
        """Let the next step begin with the first process' values.

        Args:
            what: the step, as in `same_on_all`.
        """
        self._begun.discard(what)

    # tf.distribute's other names for the same.
    experimental_local_results = local_results
    unwrap = local_results
    experimental_distribute_dataset = distribute_dataset
    experimental_distribute_datasets_from_function = distribute_datasets_from_function
    experimental_distribute_values_from_function = distribute_values_from_function
    experimental_run_v2 = run

    def __copy__(self) -> NoReturn:
        raise _not_copied("copy.copy(strategy)")

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        # A variable, or a program's settings, may be copied; the copy belongs to the same strategy.
        if memo:
            return self
        raise _not_copied("copy.deepcopy(strategy)")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(str(d) for d in self._mesh.devices)})"


def _not_copied(call: str) -> ContextError:
    return ContextError(
        f"A strategy cannot be copied: its variables know one object. Received: {call}. "
        "Use the strategy itself."
    )


def _not_in_replica() -> None:
    context = current()
    if context is not None and context.replica is not None:
        raise InvalidArgumentError(
            "A distributed dataset must be iterated outside of the replicas. Received: iteration inside "
            "the function given to `strategy.run`. Pass the batch to `run` as an argument."
        )
