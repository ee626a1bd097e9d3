"""`MultiWorkerMirroredStrategy`: synchronous training on the devices of several processes."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from unisono._errors import ClusterError, InvalidTypeError
from unisono._mesh import AXIS, ReplicaMesh, devices_of_all
from unisono._values import PerReplica, ReduceOp
from unisono.checkpoint._json_state import decode, encode
from unisono.checkpoint._rng_state import RandomState
from unisono.checkpoint._variable_paths import canonical_paths
from unisono.checkpoint.preemption import _handler
from unisono.checkpoint.preemption._save_consensus import PeriodicConsensus
from unisono.cluster import _distributed
from unisono.cluster._process_group import ProcessGroup, SingleProcessGroup
from unisono.cluster_resolver._base import ClusterResolver, TFConfigClusterResolver
from unisono.cluster_resolver._detect import resolve
from unisono.cluster_resolver._spec import Timeouts
from unisono.collectives._cross_device import (
    CommunicationOptions,
    CrossDeviceOps,
    PackedAllReduce,
)
from unisono.data._dataset import Dataset
from unisono.data._workers import (
    elements_of_workers,
    joined_batches,
    pipeline_of_worker,
    values_of_workers,
)
from unisono.step._keras_internals import is_validation, stored_value
from unisono.step._sharded_layout import Shards
from unisono.strategies._base import Strategy
from unisono.strategies._state_layout import layout_named
from unisono.strategies.multi_worker_fit._call_comparison import (
    are_within,
    facts_of,
    other_callbacks,
    size_of,
)
from unisono.strategies.multi_worker_fit._chief_callbacks import (
    DECISION_HOOKS,
    SameState,
    decision_hooks,
    is_chief_only,
    shared_decisions,
)
from unisono.strategies.multi_worker_fit._fit_summary import run_summary
from unisono.training._fit_extension import flat_callbacks


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
        state_layout: `"mirrored"`, or `"sharded"`: each device holds and updates its part of the
            optimizer's variables, which then take 1/n of the memory on each of n devices.

    Raises:
        InvalidArgumentError: for another `state_layout`.
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
        state_layout: str = "mirrored",
    ) -> None:
        _check_type("cluster_resolver", cluster_resolver, ClusterResolver)
        _check_type("communication_options", communication_options, CommunicationOptions)
        self._resolver = resolve() if cluster_resolver is None else cluster_resolver
        self._options = communication_options or CommunicationOptions()
        group: ProcessGroup = SingleProcessGroup()
        timeouts = timeouts or Timeouts()
        limit = self._options.timeout_seconds or timeouts.collective
        if self._resolver is not None:
            group = _distributed.join(self._resolver, timeouts, limit)
        super().__init__(ReplicaMesh(devices_of_all()), group)
        self._state_layout = layout_named(state_layout, self._mesh)
        spread = self._mesh.is_spread
        self._ops = PackedAllReduce(self._options, self._mesh.platform) if spread else CrossDeviceOps()
        if spread:
            _connect(self._mesh, group)
            _handler.make_consensus = lambda resolver: PeriodicConsensus(group.gather)
        self._begun: set[str] = set()
        self._said = ""
        self._worker = (group.index, group.size)

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
            explained = self.explain(error)
            if explained is None:
                raise
            raise explained from error

    def explain(self, error: BaseException) -> Exception | None:
        """Return an error that says which worker caused one of JAX; None for other errors."""
        return self._group.explain(error)

    def note_step(self, kind: str, batches: Sequence[Any]) -> None:
        """Note that a step begins; where its shapes are new they are compared with another worker's."""
        self._group.note_step(kind, batches)

    def note_state(
        self, key: Any, steps: int, state: Callable[[], tuple[Sequence[str], Sequence[Any]]]
    ) -> None:
        """Note that steps were started; now and then the state after them is compared between workers."""
        self._group.check_state(self._mesh, key, steps, state)

    def _compare(self, variables: Sequence[Any]) -> None:
        """Raise on all workers where the values of variables differ between them."""
        # Callbacks that run on one worker alone, such as `ModelCheckpoint`, read them after this.
        self._state_layout.gather(variables)
        variables = [v for v in variables if not isinstance(stored_value(v), Shards)]
        paths = canonical_paths(v.path for v in variables)
        self._group.compare_state(self._mesh, paths, [stored_value(v) for v in variables])

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | Sequence[int] | None) -> Any:
        """Combine a per-replica value into one array; see `Strategy.reduce`."""
        with self._meeting(value):
            return super().reduce(reduce_op, value, axis)

    def gather(self, value: Any, axis: int) -> Any:
        """Concatenate a per-replica value along `axis`; see `Strategy.gather`."""
        with self._meeting(value):
            return super().gather(value, axis)

    def reduce_over_workers(self, reduce_op: ReduceOp, value: Any) -> Any:
        """Combine a host value that each worker has; every worker must call it.

        Args:
            reduce_op: sum or mean over the workers.
            value: array or number of the same shape and type on all.

        Raises:
            ClusterError: on all workers, when shapes or types differ.
        """
        own = np.asarray(value)
        facts = json.dumps([own.dtype.str, own.shape]).encode()
        parts = [b.split(b"\n", 1) for b in self._group.gather(facts + b"\n" + own.tobytes())]
        if len({head for head, _ in parts}) > 1:
            raise ClusterError(
                "All workers must reduce values of one type and shape. Received, by worker: "
                f"{[head.decode() for head, _ in parts]}. Call `reduce_to` alike on each worker."
            )
        every = np.stack([np.frombuffer(data, own.dtype).reshape(own.shape) for _, data in parts])
        return jax.numpy.asarray(every.sum(0) if reduce_op is ReduceOp.SUM else every.mean(0))

    def _meeting(self, value: Any) -> contextlib.AbstractContextManager[None]:
        """Around a collective of a value, where it is one of all workers."""
        parts = jax.tree.leaves(value, is_leaf=lambda leaf: isinstance(leaf, PerReplica))
        shared = self._mesh.is_spread and any(isinstance(part, PerReplica) for part in parts)
        return self._group.collective() if shared else contextlib.nullcontext()

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
        return self._group.size

    @property
    def worker_index(self) -> int:
        """This process' number."""
        return self._group.index

    @property
    def is_chief(self) -> bool:
        """Whether this process writes checkpoints and prints for all."""
        return self._group.is_chief

    @property
    def worker_devices(self) -> tuple[Any, ...]:
        """This process' devices, in replica order."""
        return self._mesh.local_devices

    def same_on_all(self, values: Any, what: str, known: Sequence[bool], key: Any, batch: Any = None) -> Any:
        """Begin with the first worker's values: once for each call of `fit`, and for other steps once."""
        if not self._mesh.is_spread or what in self._begun:
            return None if all(known) else values
        self._begun.add(what)
        leaves, structure = jax.tree.flatten(values)
        rows = None if batch is None else jax.tree.leaves(batch)
        found = self._group.equal_arrays(leaves, known, (what, key), "The variables of the model", rows)
        return None if found is None else jax.tree.unflatten(structure, found)

    def first_values(self, values: Sequence[Any]) -> Sequence[Any]:
        """Return the first worker's values of variables that a custom loop uses for the first time."""
        if not values or not self._mesh.is_spread:
            return values
        return [jax.numpy.asarray(v) for v in self._group.broadcast_arrays(list(values))]

    def shared_pipeline(self, dataset: Any) -> Any:
        """Divide a `unisono.data.Dataset` by its `AutoShardPolicy`; other input is made by all alike."""
        if not self._mesh.is_spread or not isinstance(dataset, Dataset):
            return dataset
        return pipeline_of_worker(dataset, self._worker, self._group.from_chief, self._group.gather)

    @contextlib.contextmanager
    def together(
        self, model: Any, arguments: dict[str, Any], ahead: bool
    ) -> Iterator[tuple[dict[str, Any], bool]]:
        """Around `fit`: all workers begin alike, one of them writes, and decisions are shared.

        Args:
            model: whose `fit`.
            arguments: of `fit`, by name.
            ahead: whether steps may run ahead of the loop, as far as this worker knows.

        Yields:
            The arguments for this worker, and whether steps may run ahead on all of them.
        """
        callbacks = flat_callbacks(arguments["callbacks"])
        moments = decision_hooks(callbacks)
        random = _EncodedRandomState()
        others = json.dumps(other_callbacks(callbacks)).encode()
        own = bytes([ahead, *(m in moments for m in DECISION_HOOKS)]) + hashlib.sha256(others).digest()
        self._group.note_call("fit")
        every = self._group.require_same(facts_of(model, arguments), "A call of `fit`", own + random.digest())
        self._begun.discard("TRAIN")
        if any(
            e[len(DECISION_HOOKS) + 1 : len(own)] != every[0][len(DECISION_HOOKS) + 1 : len(own)]
            for e in every
        ):
            self._compare_callbacks(others)
        if any(e[len(own) :] != every[0][len(own) :] for e in every):
            random.take_over(self._group)
        changed = dict(arguments)
        self._say(arguments, callbacks)
        if not self.is_chief:
            changed["verbose"] = 0
            callbacks = [c for c in callbacks if not is_chief_only(c)]
        moments = {m for i, m in enumerate(DECISION_HOOKS, start=1) if any(e[i] for e in every)}
        callbacks = [SameState(self._compare), *callbacks]
        changed["callbacks"] = [
            *callbacks,
            shared_decisions(self._group.broadcast, callbacks, moments),
        ]
        yield changed, all(e[0] for e in every)

    def _compare_callbacks(self, own: bytes) -> None:
        """Refuse callbacks that other workers have, and not the chief; it may print or measure alone."""
        if not are_within([json.loads(data) for data in self._group.gather(own)]):
            self._group.require_same({"callbacks": "\n".join(json.loads(own))}, "A call of `fit`")

    def _say(self, arguments: dict[str, Any], callbacks: Sequence[Any]) -> None:
        """Say on the chief's screen what begins, unless `fit` is silent or has said it before."""
        if not self.is_chief or not arguments.get("verbose", "auto"):
            return
        data = {k: size_of(arguments[k]) for k in ("x", "validation_data") if arguments.get(k) is not None}
        counts = self.num_replicas_in_sync, self._group.size
        text = run_summary(arguments, callbacks, data, self._mesh.platform, *counts)
        if text != self._said:
            print(text, file=sys.stderr, flush=True)
        self._said = text

    def alike(
        self, original: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments of `evaluate` or `predict` for this worker, when all call it alike.

        Args:
            original: Keras' method.
            model: whose.
            args: of the call.
            kwargs: likewise.

        Raises:
            ClusterError: on all workers, when a size or a shape differs between them.
        """
        arguments = dict(inspect.signature(original).bind(model, *args, **kwargs).arguments)
        arguments.pop("self")
        # In `fit`, Keras evaluates with arguments that were compared when it began.
        if not is_validation(arguments.get("kwargs", {})):
            name = original.__name__
            self._group.note_call(name)
            self._group.require_same({"method": name, **facts_of(model, arguments)}, f"A call of `{name}`")
        if not self.is_chief:
            arguments["verbose"] = 0
        return {**arguments.pop("kwargs", {}), **arguments}

    def share_file(self, path: str) -> None:
        """On the chief: note that a file is complete. On the others: wait until it is, for all to read.

        A worker that writes elsewhere is not waited for: the others go on when the chief does.

        Args:
            path: of the file, as the program gives it.
        """
        self._group.share_file(path)

    def checkpoint_number(self, series: str, number: int) -> int:
        """Return the number of the next checkpoint of a series, which the chief chooses.

        Args:
            series: the path without the number.
            number: what this worker would choose; taken where the chief saves nothing here.
        """
        return self._group.checkpoint_number(series, number)

    def _join_elements(self, iterator: Iterator[Any], mesh: ReplicaMesh) -> Iterator[Any]:
        """Each worker's elements for its own replicas; all agree at each step on who has how many."""
        if not mesh.is_spread:
            return super()._join_elements(iterator, mesh)
        return elements_of_workers(iterator, mesh, self._group.are_alike, self._group.gather)

    def _join_rows(self, iterator: Iterator[Any], replicas: int) -> Iterator[Any]:
        """Global batches of the elements of all workers."""
        own = super()._join_rows(iterator, replicas)
        return joined_batches(own, self._group.gather) if self._mesh.is_spread else own

    def _join_values(self, values: list[Any]) -> Any:
        """Per-replica values of what each worker has for its own replicas."""
        if not self._mesh.is_spread:
            return super()._join_values(values)
        return values_of_workers(values, self._mesh, self._group.gather)

    def from_chief(self, make: Callable[[], bytes]) -> bytes:
        """Return on every worker what `make` gives on the first; its error is raised on all.

        Args:
            make: called on the first worker alone.

        Raises:
            ClusterError: on the others, when it raised on the first.
        """
        return self._group.from_chief(make)


def _connect(mesh: ReplicaMesh, group: ProcessGroup) -> None:
    """Let all devices meet once: Gloo connects them at their first collective, and gives up after 30 s.

    Later a worker may be loading data.
    """
    if len(mesh.local_devices) == 1 and mesh.platform == "cpu":
        return  # the processes have met, and have no other devices
    spec = mesh.sharded.spec
    total = jax.shard_map(
        lambda x: jax.lax.psum(x, AXIS), mesh=mesh.mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    with group.collective():
        jax.block_until_ready(jax.jit(total)(mesh.put(np.zeros(mesh.num_replicas, np.float32), mesh.sharded)))


class _EncodedRandomState:
    """The random state of this process, with which all shuffle alike."""

    def __init__(self) -> None:
        self._arrays: dict[str, np.ndarray] = {}
        self._facts = json.dumps(encode(RandomState().get_state(), self._arrays, "random")).encode()

    def digest(self) -> bytes:
        """32 bytes that tell whether two are equal."""
        state = hashlib.sha256(self._facts)
        for name in sorted(self._arrays):
            state.update(np.ascontiguousarray(self._arrays[name]).tobytes())
        return state.digest()

    def take_over(self, group: ProcessGroup) -> None:
        """Go on from the first worker's."""
        facts = json.loads(group.broadcast(self._facts))
        names = sorted(self._arrays)
        values = group.broadcast_arrays([self._arrays[n] for n in names])
        RandomState().set_state(decode(facts, dict(zip(names, values, strict=True))))


def _check_type(name: str, value: Any, kind: type) -> None:
    if value is not None and not isinstance(value, kind):
        raise InvalidTypeError(
            f"`{name}` must be a `{kind.__name__}`. Received: {name}={value!r}. Leave it out to read the "
            "environment, or pass an object of that class."
        )


#: TensorFlow's first name for it.
CollectiveAllReduceStrategy = MultiWorkerMirroredStrategy

__all__: Sequence[str] = ["CollectiveAllReduceStrategy", "MultiWorkerMirroredStrategy"]
