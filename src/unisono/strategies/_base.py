"""`Strategy`: the programming model that all strategies share; it knows of no devices.

Tests: tests/virtual/strategies/test_contract.py, tests/unit/training/test_trainer_protocol.py.
"""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, Self

import jax
import keras

from unisono._backend import require_jax
from unisono._checks import check_instance, takes_arguments
from unisono._context import Context, check_same_strategy, entered, require_cross_replica
from unisono._errors import ContextError, InvalidTypeError, UnisonoError, UnsupportedError
from unisono._features import load
from unisono._reads import DataSet
from unisono._types import PyTree, UserValue
from unisono._values import IndexedSlices, PerReplica, ReduceOp
from unisono.collectives._process_group import ProcessGroup, SingleProcessGroup
from unisono.data._sharding import InputContext, InputOptions, ValueContext
from unisono.strategies._deprecated import DeprecatedMethods
from unisono.strategies._options import RunOptions, WorkerTerms
from unisono.training._bind import wrap_keras
from unisono.training._binding import bind, check_no_distribution
from unisono.training._scope_warnings import scope_method, strategy_made, strategy_used
from unisono.training.trainer._protocol import StepFunction
from unisono.training.trainer._trainer_step import TrainerTask

if TYPE_CHECKING:
    from unisono._system._literals import ReduceOpName
    from unisono.cluster_resolver._base import ClusterResolver
    from unisono.data._distribute import DistributedDataset
    from unisono.strategies._extended import StrategyExtended
    from unisono.strategies._replicated import ReplicatedStrategy

# Before the first scope: with another backend Keras would create variables that no strategy can hold.
require_jax()

#: What to write for the options of `run`.
_OF_RUN = "Write `strategy.run(fn, args=(x,), options=unisono.RunOptions())`, or leave it out."

#: Arguments of a method of Keras, by name.
Arguments = dict[str, UserValue]


class Strategy(DeprecatedMethods, abc.ABC):
    """How a model is trained on many devices; base of all strategies.

    User code means the same under every strategy, so that the public methods are written here, once, with
    their checks. A strategy whose replicas run one program on a mesh of devices derives from
    `ReplicatedStrategy`, which has all that follows. Another one must override

    - `num_replicas_in_sync` and `worker_devices`, to report what computes,
    - `make_trainer_function`: what Keras' loop calls for each batch.

    It may override `_around_fit`, `_around_test`, `_around_method`, `_runs_ahead`,
    `_workers_make_data`, `_own_callbacks`, `_numbers_of_workers`, `_gather_state`, `_of_servers`,
    `parameter_devices` and `cluster_resolver`, and those of `_run`, `_reduced`, `_gathered`, `_local`,
    `_split`, `_from_function` and `_values_from_function` that it supports; the others raise an
    `UnsupportedError`. It never overrides `scope`, `run`, `reduce`, `gather`, `local_results`,
    `distribute_dataset` and its sisters, `extended` and the deprecated methods, whose aliases would call
    these here.

    Args:
        process_group: the processes that train together; this one alone by default.

    >>> import unisono
    >>> strategy = unisono.MirroredStrategy(["cpu:0", "cpu:1"])
    >>> isinstance(strategy, Strategy), strategy.num_replicas_in_sync
    (True, 2)
    """

    _is_default = False

    def __init__(self, process_group: ProcessGroup | None = None) -> None:
        self._group = process_group or SingleProcessGroup()
        if not self._is_default:
            # From now on `fit` of a model that is made outside of the scope can be noticed.
            wrap_keras()
            strategy_made(self)

    # --- what a strategy decides ---------------------------------------------------------

    @property
    @abc.abstractmethod
    def num_replicas_in_sync(self) -> int:
        """How many replicas' gradients are aggregated together."""

    @property
    @abc.abstractmethod
    def worker_devices(self) -> tuple[jax.Device, ...]:
        """This process' devices that compute, in replica order."""

    @abc.abstractmethod
    def make_trainer_function(self, model: keras.Model, task: TrainerTask) -> StepFunction:
        """Return what `fit`, `evaluate` or `predict` of a model call for each batch."""

    @property
    def _replicated(self) -> ReplicatedStrategy | None:
        """The strategy on whose mesh programs are compiled: this one, or None where it has no mesh."""
        return None

    @property
    def _of_servers(self) -> Callable[[], Strategy] | None:
        """What makes a remote cluster's strategy in each of its tasks; None where this one has no such."""
        return None

    #: What was asked of each worker when this strategy was made.
    _terms = WorkerTerms()

    def _with_terms(self, num_devices: int = 0, shards_input: bool = False) -> Self:
        """Ask something of each worker; return this strategy.

        Args:
            num_devices: how many devices each must have; 0 for those that there are.
            shards_input: whether an `input_fn`'s elements are divided between them.
        """
        self._terms = WorkerTerms(num_devices, shards_input)
        return self

    #: Whether several steps of `fit` may run in one program, without the state coming back between them.
    _runs_ahead = True

    @property
    def _own_callbacks(self) -> list[keras.callbacks.Callback]:
        """Callbacks that a call of `fit` gets before the user's."""
        return []

    @property
    def _numbers_of_workers(self) -> Mapping[str, float]:
        """What is known of each worker in the last epoch of `fit`, by `worker_0/name`, for TensorBoard."""
        return {}

    @property
    def _workers_make_data(self) -> bool:
        """Whether a function as data of `fit` is called on other processes, and not here."""
        return False

    def _around_fit(
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

    def _around_method(self) -> contextlib.AbstractContextManager[None]:
        """Surround a call of `fit`, `evaluate`, `predict`, `train_on_batch` or one of its sisters."""
        return contextlib.nullcontext()

    def _around_test(
        self, model: keras.Model, name: str, arguments: Arguments, ahead: bool
    ) -> contextlib.AbstractContextManager[tuple[Arguments, bool]]:
        """Surround a call of `evaluate` or `predict` on this process.

        Args:
            model: whose.
            name: of the method.
            arguments: that were given, by name.
            ahead: whether steps may run ahead of Keras' loop.

        Returns:
            As `_around_fit` does.
        """
        return contextlib.nullcontext((arguments, ahead))

    def _gather_state(self, variables: Iterable[keras.Variable]) -> None:
        """Let one of several workers alone read variables until the next step; all of them must call it.

        Args:
            variables: any.
        """

    @property
    def parameter_devices(self) -> tuple[jax.Device, ...]:
        """The devices on which variables live between steps."""
        return self.worker_devices

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """What describes the cluster; None for strategies of one machine."""
        return None

    # --- what replicas do: a strategy without one of these raises an error at its use -------------

    def _run(self, fn: Callable[..., object], args: Sequence[object], kwargs: Arguments) -> UserValue:
        """Call `fn` once per replica; see `run`."""
        raise self._unsupported("run")

    def _reduced(self, op: ReduceOp, leaf: PyTree, axis: int | Sequence[int] | None) -> PyTree:
        """Return one value of all replicas combined; see `reduce`."""
        raise self._unsupported("reduce")

    def _gathered(self, leaf: PyTree, axis: int) -> PyTree:
        """Return one value of all replicas joined; see `gather`."""
        raise self._unsupported("gather")

    def _local(self, value: PyTree) -> tuple[PyTree, ...]:
        """Return the values of this machine's replicas; see `local_results`."""
        raise self._unsupported("local_results")

    def _split(self, dataset: object, options: InputOptions | None = None) -> DistributedDataset:
        """Return global batches, split over the replicas; see `distribute_dataset`."""
        raise self._unsupported("distribute_dataset")

    def _from_function(
        self, dataset_fn: Callable[[InputContext], Iterable[object]], options: InputOptions
    ) -> DistributedDataset:
        """Return the replicas' own batches; see `distribute_datasets_from_function`."""
        raise self._unsupported("distribute_datasets_from_function")

    def _values_from_function(self, value_fn: Callable[[ValueContext], object]) -> PyTree:
        """Return the replicas' own values; see `distribute_values_from_function`."""
        raise self._unsupported("distribute_values_from_function")

    def _unsupported(self, name: str) -> UnsupportedError:
        """Return the error for an operation that this strategy does not have.

        Args:
            name: of a member of the strategy.
        """
        return UnsupportedError(
            f"`strategy.{name}` needs a strategy that runs replicas on a mesh of devices. Received: a "
            f"{type(self).__name__}. Train with `fit`, or take a `MirroredStrategy`."
        )

    # --- what every strategy is ------------------------------------------------------------

    @property
    def is_chief(self) -> bool:
        """Whether this process writes and prints for all."""
        return self._group.is_chief

    @property
    def process_group(self) -> ProcessGroup:
        """The processes that train together."""
        return self._group

    @functools.cached_property
    def extended(self) -> StrategyExtended:
        """Less common operations, under tf.distribute's name for them."""
        from unisono.strategies._extended import StrategyExtended

        return StrategyExtended(self)

    def _variable_created(self, variable: keras.Variable) -> None:
        """Take note of a variable that was made in the scope.

        Args:
            variable: just made.
        """

    @scope_method
    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Make this strategy current: variables, models and metrics made inside belong to it.

        Raises:
            ContextError: inside a replica.
            MixedStrategyError: inside the scope of another strategy, or of a `keras.distribution`.
            InvalidArgumentError: this worker has another number of devices than its constructor asked for.
            ClusterError: another worker ended, or did not reach a collective in time.
        """
        check_same_strategy(self)
        check_no_distribution()
        self._terms.check(len(self.worker_devices))
        wrap_keras()
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
        fn: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
        options: RunOptions | None = None,
    ) -> UserValue:
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
            InvalidTypeError: `fn` is no function, or does not take these arguments.
        """
        require_cross_replica("strategy.run")
        check_instance(options, "options", RunOptions, _OF_RUN)
        wrap_keras()
        strategy_used(self)
        try:
            return self._run(fn, args, dict(kwargs or {}))
        except TypeError as error:
            # Afterwards, since the check takes longer than the start of a small step.
            if isinstance(error, UnisonoError) or takes_arguments(fn, len(args), *(kwargs or {})):
                raise
            raise InvalidTypeError(
                f"`strategy.run` needs a function, and in `args` what it takes. Received: {fn!r:.200} with "
                f"{len(args)} positional arguments: {error}. Write `strategy.run(step, args=(x, y))`."
            ) from None

    def reduce(
        self, reduce_op: ReduceOp | ReduceOpName, value: PyTree, axis: int | Sequence[int] | None
    ) -> PyTree:
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

    def gather(self, value: PyTree, axis: int) -> PyTree:
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

    def local_results(self, value: PyTree) -> tuple[PyTree, ...]:
        """Return the values of this machine's replicas as a tuple.

        Args:
            value: a `PerReplica`, or a pytree of them, which gives a tuple of pytrees. A variable of
                this strategy gives the copy of each replica. Another value gives a tuple of it alone.
        """
        return self._local(value)

    def distribute_dataset(self, dataset: object, options: InputOptions | None = None) -> DistributedDataset:
        """Split the batches of any iterable over the replicas.

        Args:
            dataset: gives batches of the *global* size: arrays or nested structures of them.
                The rows of a batch are split in parts whose sizes differ by one at most.
            options: how.

        Returns:
            An iterable of structures of `PerReplica`.
        """
        return self._split(dataset, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Iterable[object]], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Make the input from a function of the `InputContext`; batches are *per replica*.

        Args:
            dataset_fn: returns an iterable of batches of one replica. Successive batches go to
                successive replicas.
            options: with `InputReplicationMode.PER_REPLICA`, `dataset_fn` is called for each replica.

        Raises:
            InvalidTypeError: `dataset_fn` is no function of one argument.
        """
        if not takes_arguments(dataset_fn, 1):
            raise InvalidTypeError(
                "`dataset_fn` must be a function of the `InputContext`. Received: "
                f"{dataset_fn!r:.200}. Write `lambda context: dataset`, or `distribute_dataset(dataset)`."
            )
        return self._from_function(dataset_fn, options or InputOptions())

    @property
    def _input_group(self) -> ProcessGroup:
        """The processes that make input; those that feed the same replicas are one."""
        return self._group

    def _shared_pipeline(self, dataset: object) -> UserValue:
        """Return the pipeline with which this worker makes the global batches.

        A `unisono.data.Dataset` is divided by its `AutoShardPolicy` between several workers.

        Args:
            dataset: any input; another one than a `Dataset` is returned as it is.
        """
        if not isinstance(dataset, DataSet):
            return dataset
        # Imported with the first data set alone: Grain and Orbax take 0.4 s.
        from unisono.data._dataset import Dataset
        from unisono.data._workers import pipeline_of_worker

        return pipeline_of_worker(dataset, self._input_group) if isinstance(dataset, Dataset) else dataset

    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], object]) -> PyTree:
        """Return the `PerReplica` of what `value_fn` gives for each replica.

        Args:
            value_fn: gets a `ValueContext` with the replica's number; on several workers it is called
                for the worker's own replicas, and returns arrays, numbers or strings, also nested.

        Returns:
            A `PerReplica` for each value of the structure that `value_fn` returns; with one replica, what
            it returns.
        """
        return self._values_from_function(value_fn)

    # tf.distribute's other names for the same.
    experimental_local_results = local_results
    unwrap = local_results
    experimental_distribute_dataset = distribute_dataset
    experimental_distribute_datasets_from_function = distribute_datasets_from_function
    experimental_distribute_values_from_function = distribute_values_from_function
    experimental_run_v2 = run

    def __enter__(self) -> NoReturn:
        raise load("mistake")("with a strategy", type(self).__name__)

    def __exit__(self, *error: object) -> None: ...

    def __copy__(self) -> NoReturn:
        raise _not_copied("copy.copy(strategy)")

    def __deepcopy__(self, memo: dict[int, object]) -> Strategy:
        # A variable, or a program's settings, may be copied; the copy belongs to the same strategy.
        if memo:
            return self
        raise _not_copied("copy.deepcopy(strategy)")

    def __getstate__(self) -> NoReturn:
        raise ContextError(
            "A strategy belongs to its process. Received: pickle of one, as of a function that uses it from "
            "outside. Create the strategy inside of the function that is sent."
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(str, self.worker_devices))})"


def _not_copied(call: str) -> ContextError:
    return ContextError(
        f"A strategy cannot be copied: its variables know one object. Received: {call}. "
        "Use the strategy itself."
    )


def hold(model: keras.Model, strategy: Strategy) -> None:
    """Let a strategy run the methods of a compiled model that no strategy holds."""
    wrap_keras()
    bind(model, strategy)
