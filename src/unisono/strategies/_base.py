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
from unisono._values import IndexedSlices, PerReplica, ReduceOp
from unisono.cluster._process_group import ProcessGroup, SingleProcessGroup
from unisono.collectives._cross_device import CrossDeviceOps
from unisono.data._distribute import (
    DistributedDataset,
    FunctionDataset,
    SplitDataset,
    joined_rows,
    per_replica_elements,
)
from unisono.data._sharding import InputContext, InputOptions, ValueContext
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

    @property
    def is_chief(self) -> bool:
        """Whether this process writes and prints for all."""
        return True

    def shared_pipeline(self, dataset: Any) -> Any:
        """Return the pipeline with which this worker makes the global batches; as it is where it is alone.

        Args:
            dataset: any input.
        """
        return dataset

    def same_on_all(self, values: Any, what: str, known: Sequence[bool], key: Any, batch: Any = None) -> Any:
        """Return the first worker's values on every worker; as they are where there is one.

        Args:
            values: pytree of arrays that a step is about to begin with.
            what: the step: one may begin with what it ended with the last time.
            known: for each array, whether it is what the step ended with.
            key: which step that was, the same on workers that took the same steps.
            batch: what the step begins with, the same on all workers; pytree of host arrays.

        Returns:
            The values; None where they are what all workers' last step ended with.
        """
        return None if all(known) else values

    def first_values(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return the first worker's values of variables that are used for the first time.

        Args:
            values: this worker's.
        """
        return values

    def note_step(self, kind: str, batches: Sequence[Any]) -> None:
        """Note that a step of all replicas begins: all workers must have batches of the same shapes.

        Args:
            kind: what the step does.
            batches: pytrees of arrays; none at the end of the data.
        """

    def note_state(
        self, key: Any, steps: int, state: Callable[[], tuple[Sequence[str], Sequence[Any]]]
    ) -> None:
        """Note that steps of all replicas were started: all workers must hold the same state then.

        Args:
            key: whose steps.
            steps: how many in all.
            state: gives names and arrays of the state after them.
        """

    def share_file(self, path: str) -> None:
        """Wait, on all workers but the first, until the first has written the file at `path`."""

    def checkpoint_number(self, series: str, number: int) -> int:
        """Return the number of the next checkpoint of a series: of several workers the first chooses it.

        Args:
            series: the path without the number.
            number: what this worker would choose.
        """
        return number

    def explain(self, error: BaseException) -> Exception | None:
        """Return an error that says which worker caused one of JAX; None for other errors.

        Args:
            error: any.
        """
        return None

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
    def process_group(self) -> ProcessGroup:
        """The processes that train together."""
        return self._group

    @property
    def worker_devices(self) -> tuple[Any, ...]:
        """The devices that compute, in replica order."""
        return self._mesh.devices

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
        """
        check_same_strategy(self)
        install()
        strategy_used(self)
        with entered(Context(self)):
            yield self

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
        if axis is None and isinstance(leaf, PerReplica) and self.cross_device_ops.has_implementation:
            return self.cross_device_ops.reduce(op, leaf)
        return results.reduce(op, leaf, axis, self._mesh)

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
            lambda leaf: results.gather(leaf, axis, self._mesh),
            value,
            is_leaf=lambda leaf: isinstance(leaf, (IndexedSlices, PerReplica)),
        )

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
            self._join_elements,
            self._join_rows,
            self._worker,
        )

    #: Whether several steps of `fit` may run in one program, without the state coming back between them.
    runs_ahead = True

    #: The number of this worker, and how many there are.
    _worker = (0, 1)

    def _join_elements(self, iterator: Iterator[Any], mesh: ReplicaMesh) -> Iterator[Any]:
        """Per-replica batches of successive elements."""
        return per_replica_elements(iterator, mesh)

    def _join_rows(self, iterator: Iterator[Any], replicas: int) -> Iterator[Any]:
        """Global batches of successive elements, for `fit`."""
        return joined_rows(iterator, replicas)

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
        return self._join_values(values) if replicas > 1 else values[0]

    def _join_values(self, values: list[Any]) -> Any:
        """Per-replica values of those of this process' replicas."""
        return jax.tree.map(lambda *leaves: PerReplica(leaves), *values)

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
