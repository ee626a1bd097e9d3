"""XLA and Gloo for `LocalUpdates`: programs are NumPy, and what workers send takes its time.

A program runs at once on its worker, takes copies, and spoils what it was given as donated. A program on the
devices for exchanges runs in a thread of its own, one after the other: its results are arrays that will come.

Tests: tests/unit/test_simulated_local.py.
"""

import contextlib
import dataclasses
import types

import jax
import numpy as np
import pytest

from tests.simulation._world import ACTIVE, Violation
from unisono.collectives import _packing
from unisono.collectives._process_group import SingleProcessGroup
from unisono.local_updates import _exchange_beside_steps, _local_layout, _local_phase, _local_training
from unisono.step.variables import _merge_rules

#: The only device of a worker, and its device for exchanges.
_DEVICE = "cpu:0"
#: What stands in memory that a program has taken.
_SPOILED = -7777


# --- arrays ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Part:
    data: np.ndarray
    device: str = _DEVICE


class Array(np.ndarray):
    """An array on a device."""

    @property
    def addressable_shards(self):
        return [_Part(self)]

    @property
    def at(self):
        return _Places(self)


class _Places:
    def __init__(self, array, key=None):
        self._array, self._key = array, key

    def __getitem__(self, key):
        return _Places(self._array, key)

    def set(self, value):
        new = placed(self._array)
        new[self._key] = value
        return new


def placed(value):
    """Return a copy on a device."""
    return np.array(value).view(Array)


class Coming:
    """An array of a program that may still run; who reads it waits."""

    def __init__(self, running, number):
        self._running, self._number = running, number

    def __array__(self, dtype=None, copy=None):
        return np.array(self._running.result()[self._number], dtype)


class _Running:
    """A program that was started."""

    def __init__(self, body):
        self.body, self._waiters = body, []
        self._found = self._error = None
        self._is_done = False

    def run(self):
        try:
            self._found = self.body()
        except RuntimeError as error:
            self._error = error
        self._is_done = True
        while ACTIVE.world.wake(self._waiters):
            pass

    def result(self):
        while not self._is_done:
            ACTIVE.world.block(self._waiters, None, "what the others have sent")
        if self._error is not None:
            raise self._error
        return self._found


class _Queue:
    """A device for exchanges: one program after the other."""

    def __init__(self):
        self._programs, self._waiters, self._fiber = [], [], None

    def start(self, body):
        running = _Running(body)
        self._programs.append(running)
        if self._fiber is None:
            self._fiber = ACTIVE.world.spawn(self._work, "exchange")
        else:
            ACTIVE.world.wake(self._waiters)
        return running

    def _work(self):
        while True:
            while not self._programs:
                ACTIVE.world.block(self._waiters, None, "a program")
            self._programs.pop(0).run()


# --- what workers send -------------------------------------------------------------------------------------


class Wires:
    """The connections between the workers of a generation; each keeps its order, as TCP does."""

    def __init__(self, world, size):
        self.world, self.size = world, size
        self._slowest = world.pick((0.05, 0.5, 5.0), "setting")
        self._inbox, self._closed = [{} for _ in range(size)], [set() for _ in range(size)]
        self._waiters, self._last = [[] for _ in range(size)], {}
        self._counts, self._broken = {}, {}

    def join(self, rank, process):
        """Note the process of a worker."""
        process.at_end(lambda: self._close(rank))

    def cut(self, one, other):
        """Lose the connection between two workers."""
        self.world.note("part", f"worker{one}", f"worker{other}", "connection lost")
        for source, target in ((one, other), (other, one)):
            self._closed[target].add(source)
            self._wake(target)

    def gather(self, channel, rank, value):
        """Return what all have sent as their next message of a channel.

        Raises:
            RuntimeError: where a connection to one that has not sent it is lost.
        """
        if (channel, rank) in self._broken:
            raise RuntimeError(self._broken[channel, rank])
        number = self._counts.get((channel, rank), 0)
        self._counts[channel, rank] = number + 1
        key = channel, number
        self._inbox[rank].setdefault(key, {})[rank] = value
        for other in range(self.size):
            if other != rank:
                text = f"{channel} #{number}"
                self._send(rank, other, text, lambda to=other: self._deliver(key, rank, to, value))
        while len(found := self._inbox[rank][key]) < self.size:
            missing = set(range(self.size)) - set(found)
            if lost := sorted(missing & self._closed[rank]):
                text = f"Gloo all-reduce failed: Connection closed by peer, worker {lost[0]}"
                # For good, as Gloo's context is.
                self._broken[channel, rank] = text
                raise RuntimeError(text)
            self.world.block(self._waiters[rank], None, f"{channel} #{number}")
        found = self._inbox[rank].pop(key)
        return [found[each] for each in range(self.size)]

    def all_reduce(self, channel, rank, values):
        """Return the sums over all."""
        every = self.gather(channel, rank, [np.array(x) for x in values])
        kinds = {tuple((x.shape, x.dtype) for x in each) for each in every}
        if len(kinds) > 1:
            raise Violation(f"Workers must add up the same arrays. Received: {kinds}")
        return [sum(parts[1:], parts[0]) for parts in zip(*every, strict=True)]

    def _send(self, source, target, text, arrive):
        at = max(
            self._last.get((source, target), 0.0), self.world.now + self.world.uniform(0.0, self._slowest)
        )
        self._last[source, target] = at
        self.world.counts["messages"] += 1

        def arrived():
            self.world.note("message", f"worker{source}", f"worker{target}", text)
            arrive()

        self.world.call_later(at - self.world.now, arrived)

    def _deliver(self, key, source, target, value):
        if source not in self._closed[target]:
            self._inbox[target].setdefault(key, {})[source] = value
            self._wake(target)

    def _close(self, rank):
        def closed(target):
            self._closed[target].add(rank)
            self._wake(target)

        for other in range(self.size):
            if other != rank:
                self._send(rank, other, "end", lambda to=other: closed(to))

    def _wake(self, rank):
        while self.world.wake(self._waiters[rank]):
            pass


class Engine:
    """How a replica exchanges values inside of a program."""

    is_empty = False

    def __init__(self, wires, rank, channel):
        self._wires, self.replica_id, self._channel = wires, rank, channel
        self.num_replicas = wires.size

    def all_reduce(self, op, tree):
        leaves, kind = jax.tree.flatten(tree)
        return jax.tree.unflatten(kind, self._wires.all_reduce(self._channel, self.replica_id, leaves))

    def smallest(self, value):
        every = self._wires.gather(self._channel, self.replica_id, np.array(value))
        return min(every)


class Mesh:
    """The replicas, or the devices for exchanges: one of each worker."""

    devices_per_replica, spans_processes = 1, True
    replicated, sharded = "replicated", "sharded"
    local_devices = (_DEVICE,)

    def __init__(self, size, rank, queue=None):
        self.num_replicas, self.rank, self.queue = size, rank, queue

    def put(self, value, sharding):
        if sharding == self.sharded:
            # Of the rows of all replicas its own.
            return placed(np.asarray(value)[self.rank][None])
        return [placed(x) for x in value] if isinstance(value, list) else placed(value)

    def put_own(self, value):
        return placed(value)[None]

    def local(self, value):
        return value

    def local_each(self, values):
        return values


class Group(SingleProcessGroup):
    """The processes that train together."""

    def __init__(self, wires, rank):
        super().__init__()
        self._index, self._size, self._is_chief = rank, wires.size, rank == 0
        self._wires = wires

    def gather(self, data):
        return self._wires.gather("group", self._index, data)


class Replicas:
    """What a train function has of its strategy."""

    cross_device_ops = None

    def __init__(self, wires, rank):
        self.engine = Engine(wires, rank, "replicas")
        self.engine_beside = Engine(wires, rank, "exchange")
        self.process_group, self.mesh = Group(wires, rank), Mesh(wires.size, rank)
        self.num_replicas_in_sync = wires.size
        self.exchange_mesh = Mesh(wires.size, rank, _Queue())
        self.state_layout = None

    def same_on_all(self, values, name, known, key, batch):
        return None if all(known) else values


# --- programs ----------------------------------------------------------------------------------------------


class Program:
    """A compiled step."""

    def __init__(self, fn, mesh, state_shardings=None, in_specs=None, out_specs=None, process_group=None):
        self._fn, self._queue = fn, mesh.queue

    def __call__(self, donated, kept, done=None, is_result=False):
        if self._queue is not None:
            return self._start(kept)
        given = jax.tree.map(placed, donated)
        for taken in jax.tree.leaves(donated):
            taken[...] = _SPOILED
        outputs, state = self._fn(given, kept)
        outputs, state = jax.tree.map(placed, (outputs, state))
        if done is not None:
            done[:] = [(outputs, state, None)]
        return outputs, state

    def _start(self, kept):
        rows = jax.tree.map(placed, kept)

        def body():
            (sums, agreed), _ = self._fn((), rows)
            return [*sums, agreed]

        running, count = self._queue.start(body), len(rows[0])
        coming = [Coming(running, i) for i in range(count + 1)]
        return (coming[:count], coming[count]), ()


class _NumPy:
    """`jax.numpy`."""

    def __getattr__(self, name):
        return getattr(np, name)

    @staticmethod
    def broadcast_to(value, shape):
        return placed(np.broadcast_to(value, shape))


def _own(name):
    return ACTIVE.world.current.process.own[name]


@contextlib.contextmanager
def programs():
    """Let the modules of `LocalUpdates` have these programs."""
    lax = types.SimpleNamespace(
        cond=lambda is_due, yes, no, given: yes(given) if is_due else no(given),
        dynamic_slice_in_dim=lambda x, start, size, axis: x[..., start : start + size],
        pmin=lambda value, axis: _own("replicas").engine_beside.smallest(value),
    )
    stub = types.SimpleNamespace(
        lax=lax,
        tree=jax.tree,
        jit=lambda fn: fn,
        device_put=lambda value, device: jax.tree.map(placed, value),
        make_array_from_single_device_arrays=lambda shape, sharding, rows: rows[0],
    )

    def spread(mesh, rules):
        engine = _own("replicas").engine
        return lambda shared: [
            placed(_merge_rules.localize(rule, x, engine)[None])
            for rule, x in zip(rules, shared, strict=True)
        ]

    def rows_in_parts(mesh, group, rows):
        every = group.gather([np.array(x) for x in rows])
        return [np.concatenate(parts) for parts in zip(*every, strict=True)]

    with pytest.MonkeyPatch.context() as patches:
        for module in (
            _local_layout,
            _local_training,
            _exchange_beside_steps,
            _local_phase,
            _merge_rules,
            _packing,
        ):
            patches.setattr(module, "jnp", _NumPy())
        for module in (_local_training, _exchange_beside_steps, _packing):
            patches.setattr(module, "jax", stub)
        # Hidden from a compiler.
        patches.setattr(
            _packing, "_starts", lambda bucket, sizes: [sum(sizes[:i]) for i in range(len(sizes))]
        )
        for module in (_local_training, _exchange_beside_steps):
            patches.setattr(module, "CompiledStep", Program)
        patches.setattr(_local_layout, "_spread", spread)
        patches.setattr(_local_training, "rows_in_parts", rows_in_parts)
        patches.setattr(
            _exchange_beside_steps, "SpmdEngine", lambda processes, ops: _own("replicas").engine_beside
        )
        yield
