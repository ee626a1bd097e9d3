"""`MultiWorkerMirroredStrategy`: synchronous training on the devices of several processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from unisono._errors import ClusterError, InvalidTypeError
from unisono._mesh import ReplicaMesh, devices_of_all
from unisono.checkpoint import _preemption
from unisono.checkpoint._agreement import AskAll
from unisono.checkpoint._names import canonical_paths
from unisono.checkpoint._random import RandomState
from unisono.cluster import _bootstrap
from unisono.cluster._resolve import resolve
from unisono.cluster._resolvers import ClusterResolver, TFConfigClusterResolver
from unisono.cluster._spec import Timeouts
from unisono.collectives._cross_device import (
    CommunicationOptions,
    CrossDeviceOps,
    PackedAllReduce,
)
from unisono.data._dataset import Dataset
from unisono.data._distribute import DistributedDataset
from unisono.data._sharding import InputOptions
from unisono.data._workers import elements_of_workers, pipeline_of_worker
from unisono.strategies._base import Strategy
from unisono.training._callbacks import SharedDecisions, is_chief_only
from unisono.training._companion import flat_callbacks


class MultiWorkerMirroredStrategy(Strategy):
    """Every device of every worker holds a copy of every variable; gradients are all-reduced.

    The same program runs on every worker, with the same *global* batches: each worker computes its
    part of them. Initial values come from the first worker. Without a cluster it is a
    `MirroredStrategy` of this process.

    Args:
        cluster_resolver: who the workers are. None reads TF_CONFIG, Slurm's, MPI's or JAX's
            variables.
        communication_options: how gradients travel, and how long a collective may take.
        timeouts: how long workers wait for each other.

    Raises:
        InvalidTypeError: when an argument has another type.
        BackendError: JAX has started before.
        ClusterError: a worker is missing, or its program differs.

    >>> MultiWorkerMirroredStrategy().num_workers
    1
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        timeouts: Timeouts | None = None,
    ) -> None:
        _check_type("cluster_resolver", cluster_resolver, ClusterResolver)
        _check_type("communication_options", communication_options, CommunicationOptions)
        self._resolver = resolve() if cluster_resolver is None else cluster_resolver
        self._options = communication_options or CommunicationOptions()
        self._membership = _bootstrap.Membership(0, 1)
        timeouts = timeouts or Timeouts()
        limit = self._options.timeout_seconds or timeouts.collective
        if self._resolver is not None:
            self._membership = _bootstrap.join(self._resolver, timeouts, limit)
        super().__init__(ReplicaMesh(devices_of_all()))
        spread = self._mesh.is_spread
        self._ops = PackedAllReduce(self._options) if spread else CrossDeviceOps()
        if spread:
            _preemption.make_agreement = lambda resolver: AskAll(_bootstrap.gather_bytes)
        self._begun: set[str] = set()
        self._worker = (self._membership.process_id, self._membership.num_processes)

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Make this strategy current.

        Raises:
            ClusterError: another worker ended, or did not come to a collective in time.
        """
        try:
            with super().scope():
                yield self
        except (RuntimeError, ValueError) as error:
            cause = _of_peers(error) if self._mesh.is_spread else None
            if cause is None:
                raise
            raise ClusterError(
                "All workers must stay until all are done. Received: worker "
                f"{self.worker_index} of {self.num_workers} lost another one ({cause[:300]}). The log of the "
                "worker that ended or stopped first says why; `unisono launch --max-restarts 3` starts all "
                "again."
            ) from error

    @property
    def cross_device_ops(self) -> CrossDeviceOps:
        """Few large buckets; replicas of one worker reduce first."""
        return self._ops

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """What describes the cluster; without one, a resolver whose `task_type` is None."""
        return self._resolver or TFConfigClusterResolver()

    @property
    def num_workers(self) -> int:
        """How many processes compute."""
        return self._membership.num_processes

    @property
    def worker_index(self) -> int:
        """This process' number."""
        return self._membership.process_id

    @property
    def is_chief(self) -> bool:
        """Whether this process writes checkpoints and prints for all."""
        return self._membership.is_chief

    @property
    def worker_devices(self) -> tuple[Any, ...]:
        """This process' devices, in replica order."""
        return self._mesh.local_devices

    def same_on_all(self, values: Any, what: str) -> Any:
        """Begin with the first worker's values: once for each call of `fit`, and for other steps once."""
        if not self._mesh.is_spread or what in self._begun:
            return values
        self._begun.add(what)
        leaves, structure = jax.tree.flatten(values)
        facts = {f"variable {i}": f"{x.shape} {x.dtype}" for i, x in enumerate(leaves)}
        _bootstrap.require_same(facts, "The variables of the model")
        return jax.tree.unflatten(structure, _bootstrap.broadcast_arrays(leaves))

    def shared_pipeline(self, dataset: Any) -> Any:
        """Divide a `unisono.data.Dataset` by its `AutoShardPolicy`; other input is made by all alike."""
        if not self._mesh.is_spread or not isinstance(dataset, Dataset):
            return dataset
        return pipeline_of_worker(dataset, self._worker, self.from_chief, _bootstrap.gather_bytes)

    def distribute_dataset(self, dataset: Any, options: InputOptions | None = None) -> DistributedDataset:
        """Split the global batches of any iterable over the replicas; see `Strategy.distribute_dataset`."""
        return super().distribute_dataset(self.shared_pipeline(dataset), options)

    experimental_distribute_dataset = distribute_dataset

    @contextlib.contextmanager
    def together(self, model: Any, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Around `fit`: all workers begin alike, one of them writes, and decisions are shared.

        Args:
            model: whose `fit`.
            arguments: of `fit`, by name.

        Yields:
            The arguments for this worker.
        """
        _bootstrap.require_same(_facts_of(model, arguments), "A call of `fit`")
        self._begun.discard("TRAIN")
        _same_random_state()
        changed = dict(arguments)
        callbacks = flat_callbacks(arguments["callbacks"])
        if not self.is_chief:
            changed["verbose"] = 0
            callbacks = [c for c in callbacks if not is_chief_only(c)]
        changed["callbacks"] = [*callbacks, SharedDecisions(_bootstrap.broadcast_bytes, callbacks)]
        yield changed

    def _join_elements(self, iterator: Iterator[Any], mesh: ReplicaMesh) -> Iterator[Any]:
        """Each worker's elements for its own replicas; all agree at each step on who has how many."""
        if not mesh.is_spread:
            return super()._join_elements(iterator, mesh)
        return elements_of_workers(iterator, mesh, _bootstrap.are_alike, _bootstrap.gather_bytes)

    def from_chief(self, make: Callable[[], bytes]) -> bytes:
        """Return on every worker what `make` gives on the first; its error is raised on all.

        Args:
            make: called on the first worker alone.

        Raises:
            ClusterError: on the others, when it raised on the first.
        """
        error: BaseException | None = None
        answer = b""
        if self.is_chief:
            try:
                answer = b"+" + make()
            except Exception as caught:
                error, answer = caught, b"-" + str(caught).encode()
        answer = _bootstrap.broadcast_bytes(answer)
        if error is not None:
            raise error
        if answer[:1] == b"-":
            raise ClusterError(
                f"The first worker must succeed for all. Received there: {answer[1:].decode()}"
            )
        return answer[1:]


def _facts_of(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """What a call of `fit` must have in common on all workers."""
    names = (
        "batch_size",
        "epochs",
        "initial_epoch",
        "steps_per_epoch",
        "validation_steps",
        "validation_freq",
    )
    facts = {name: repr(arguments[name]) for name in (*names, "shuffle", "class_weight", "validation_split")}
    for name in ("x", "y", "sample_weight", "validation_data"):
        leaves = jax.tree.leaves(arguments[name])
        shapes = [str(np.shape(a)) if hasattr(a, "shape") else type(a).__name__ for a in leaves]
        facts[name] = f"{type(arguments[name]).__name__} {' '.join(shapes)}"
    paths = canonical_paths(v.path for v in model.variables)
    rows = zip(paths, model.variables, strict=True)
    facts["model"] = "\n".join(f"{path} {tuple(v.shape)} {v.dtype}" for path, v in rows)
    facts["callbacks"] = "\n".join(type(c).__name__ for c in flat_callbacks(arguments["callbacks"]))
    return facts


def _same_random_state() -> None:
    """Shuffle alike: the first worker's random state on all."""
    import json

    from unisono.checkpoint._facts import decode, encode

    arrays: dict[str, Any] = {}
    state = RandomState()
    facts = encode(state.get_state(), arrays, "random")
    facts = json.loads(_bootstrap.broadcast_bytes(json.dumps(facts).encode()))
    names = sorted(arrays)
    values = _bootstrap.broadcast_arrays([arrays[n] for n in names])
    state.set_state(decode(facts, dict(zip(names, values, strict=True))))


#: What errors of JAX say that tell of another process.
_PEERS = ("Gloo", "onnection closed by peer", "onnection reset by peer", "collective", "Collective")


def _of_peers(error: BaseException) -> str | None:
    """What an error, or one that it came from, says of another process; None where none does.

    The state of a step that failed on the devices is gone, and what tries to save it fails as well.
    """
    seen: BaseException | None = error
    while seen is not None:
        if any(word in str(seen) for word in _PEERS):
            return str(seen)
        seen = seen.__cause__ or seen.__context__
    return None


def _check_type(name: str, value: Any, kind: type) -> None:
    if value is not None and not isinstance(value, kind):
        raise InvalidTypeError(
            f"`{name}` must be a `{kind.__name__}`. Received: {name}={value!r}. Leave it out to read the "
            "environment, or pass an object of that class."
        )


#: TensorFlow's first name for it.
CollectiveAllReduceStrategy = MultiWorkerMirroredStrategy

__all__: Sequence[str] = ["CollectiveAllReduceStrategy", "MultiWorkerMirroredStrategy"]
