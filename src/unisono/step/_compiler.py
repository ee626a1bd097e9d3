"""From a pure step to a compiled one: jit with donation, a cache by signature, bounded run-ahead."""

from __future__ import annotations

import collections
import logging
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from unisono._mesh import ReplicaMesh
from unisono._reads import NOT_IN_A_STEP, read_by
from unisono._values import PerReplica
from unisono.cluster.liveness._heartbeat_file import Heartbeat
from unisono.cluster.liveness._in_flight import IN_FLIGHT
from unisono.data._batches import check_values
from unisono.step._call_signature import Call, Result
from unisono.step._explain import explain
from unisono.step._functional import Replicated, Slot, StatePlan, discarded, discover
from unisono.step._identity import identity_of
from unisono.step._interrupts import INTERRUPTS
from unisono.step._program import current_frame
from unisono.step._scope import StateScope

_LOG = logging.getLogger("unisono")

#: How many steps the host may be ahead of the devices. XLA's CPU collectives share one thread
#: pool with dispatch and deadlock when it fills (aborts seen at 40 steps, none at 16).
RUN_AHEAD = 16

#: Marks variables that hold the same on all workers. One that has a value for each replica may differ.
_IS_ALIKE = "_unisono_is_alike"

#: Programs kept for each strategy; the oldest is dropped, with the functions it holds.
_CACHE_SIZE = 256

#: Calls in which JAX may compile, and starts the program from Python code.
_CAREFUL_CALLS = 3

#: After so many programs for one function the log says why.
_MANY_PROGRAMS = 8


class RunAhead:
    """Holds the host back when it is too many steps ahead of the devices.

    Args:
        limit: how many unfinished steps are allowed.
    """

    def __init__(self, limit: int = RUN_AHEAD) -> None:
        self._limit = limit
        self._tokens: collections.deque[Any] = collections.deque()
        self._heart = Heartbeat.from_environ()
        self.waits = 0

    def started(self, token: Any) -> None:
        """Note a step that was started; wait for the one `limit` steps before it.

        Args:
            token: an output of the step that nothing donates.
        """
        self._tokens.append(token)
        IN_FLIGHT.started(token)
        self._heart.beat()
        if len(self._tokens) > self._limit:
            oldest = self._tokens.popleft()
            self.waits += not oldest.is_ready()
            # Also where it is ready: a step that failed is, and raises its error here.
            oldest.block_until_ready()


_RUN_AHEAD: dict[Any, RunAhead] = {}


def run_ahead_of(mesh: ReplicaMesh) -> RunAhead:
    """The bound that all programs on the devices of `mesh` share."""
    return _RUN_AHEAD.setdefault(mesh, RunAhead())


class CompiledStep:
    """A pure function compiled for a mesh, with its state donated.

    Args:
        fn: from `(donated, kept)` to `(outputs, state)`; both pytrees of arrays.
        mesh: the devices.
        state_shardings: where the new state goes; a pytree prefix, or None.
        in_specs: with `out_specs`, run `fn` in `jax.shard_map`: once per replica.
        out_specs: the counterpart for `(outputs, state)`.
    """

    def __init__(
        self,
        fn: Callable[[Any, Any], tuple[Any, Any]],
        mesh: ReplicaMesh,
        state_shardings: Any = None,
        in_specs: Any = None,
        out_specs: Any = None,
    ) -> None:
        self._run_ahead = run_ahead_of(mesh)
        if in_specs is not None and mesh.num_replicas > 1:
            fn = jax.shard_map(fn, mesh=mesh.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

        @INTERRUPTS.interruptible
        def with_token(donated: Any, kept: Any) -> Any:
            # The token is ready when the step is done; the other outputs may be donated on.
            with read_by(NOT_IN_A_STEP):
                return *fn(donated, kept), jnp.zeros((), jnp.int8)

        # A debugged step is run again op by op after a NaN was found, which needs its inputs.
        self._donates = not any(getattr(jax.config, name) for name in ("jax_debug_nans", "jax_debug_infs"))
        self._compiled = jax.jit(
            with_token,
            donate_argnums=(0,) if self._donates else (),
            out_shardings=(None, state_shardings, None),
        )
        self._careful: float | None = None

    def __call__(self, donated: Any, kept: Any, done: list[Any] | None = None) -> tuple[Any, Any]:
        """Start the step; returns before it is done.

        Args:
            donated: the state; deleted when the step starts.
            kept: what the step only reads.
            done: becomes `[(outputs, state, token)]` when the step starts, also where an exception such
                as `KeyboardInterrupt` follows: nothing else holds the state then.
        """
        if not self._donates:
            return self._guarded(donated, kept)
        done = [] if done is None else done
        given, kept_of_one = (_without_aliases(donated, kept),), (kept,)
        # On CPUs the call itself may wait for the other workers.
        with IN_FLIGHT.together():
            if self._careful is None or self._careful > 0:
                self._start_carefully(given, kept_of_one, done)
            else:
                # One instruction: Python handles a signal before it or after it.
                done[:] = map(self._compiled, given, kept_of_one)
        outputs, state, token = done[0]
        self._run_ahead.started(token)
        return outputs, state

    def _start_carefully(self, given: tuple[Any], kept: tuple[Any], done: list[Any]) -> None:
        """Start the step where JAX does it in Python code: at first, and always if it has side effects."""
        with INTERRUPTS.put_off():
            if self._careful is None:
                effects = self.jaxpr(*given, *kept).effects
                self._careful = math.inf if effects else _CAREFUL_CALLS
            done[:] = map(self._compiled, given, kept)
            self._careful -= 1

    def _guarded(self, donated: Any, kept: Any) -> tuple[Any, Any]:
        """Run the step and look for NaNs in all that it computed.

        JAX's own guard runs the step again op by op, which never ends inside `shard_map`.
        """
        looks_for_infs = getattr(jax.config, "jax_debug_infs")  # noqa: B009 (JAX's types lack it)
        with jax.debug_nans(False), jax.debug_infs(False):
            outputs, state, _ = self._compiled(donated, kept)
            for path, value in jax.tree_util.tree_leaves_with_path((outputs, state)):
                if not jnp.issubdtype(value.dtype, jnp.inexact):
                    continue
                bad = ~jnp.isfinite(value) if looks_for_infs else jnp.isnan(value)
                if bool(bad.any()):
                    raise FloatingPointError(
                        "A step must compute numbers only. Received: NaN in (outputs, state)"
                        f"{jax.tree_util.keystr(path)}, shape {value.shape}. State is as it was before. "
                        "Compile the model with `run_eagerly=True` to see the first operation."
                    )
        return outputs, state

    def jaxpr(self, donated: Any, kept: Any) -> Any:
        """The traced program; calling it later with such arguments does not trace it again."""
        return self._compiled.trace(donated, kept).jaxpr

    def lower(self, donated: Any, kept: Any) -> Any:
        """JAX's lowered program, for looking into it."""
        return self._compiled.lower(donated, kept)


def _without_aliases(donated: Any, kept: Any) -> Any:
    """Copy arrays that are donated twice, or donated and kept: two variables may share one array."""
    leaves, structure = jax.tree.flatten(donated)
    seen = {id(x) for x in jax.tree.leaves(kept)}
    if len({id(x) for x in leaves} | seen) == len(leaves) + len(seen):
        return donated
    single = []
    for leaf in leaves:
        single.append(jnp.copy(leaf) if id(leaf) in seen else leaf)
        seen.add(id(leaf))
    return jax.tree.unflatten(structure, single)


class Entry:
    """A compiled step of a user's function, with the variables whose state it carries.

    Args:
        traced: from values of variables and arrays to results and new values.
        plan: which variables.
        strategy: on whose replicas.
        is_shared: whether all replicas take part, and not this process alone.
    """

    def __init__(
        self,
        traced: Callable[..., tuple[Any, list[Any]]],
        plan: StatePlan,
        strategy: Any,
        is_shared: bool = True,
    ) -> None:
        self.plan = plan
        self._is_shared = is_shared
        self._is_begun = False
        self._steps = 0
        shapes = ", ".join(str(tuple(slot.variable.shape)) for slot in plan.slots)
        self._kind = f"run with variables {shapes}" if shapes else "run"
        self._strategy = strategy
        self._results: list[Result] = []
        # Variable -> what it holds between steps, and the array on all devices that stands for it.
        self._last: dict[int, tuple[Any, Any]] = {}
        mesh = strategy.mesh
        written = [s for s in plan.slots if s.written]
        is_written = [s.written for s in plan.slots]

        def pure(donated: list[Any], kept: Any) -> tuple[list[Any], list[Any]]:
            reads, arrays = kept
            of_written, of_read = iter(donated), iter(reads)
            values = [next(of_written) if w else next(of_read) for w in is_written]
            result, new = traced(values, arrays)
            if mesh.is_spread:
                result = _laid_out(result, mesh)
            description, outputs = Result.parse(result)
            self._results.append(description)
            return outputs, new

        shardings = [mesh.sharded if s.is_stacked else mesh.replicated for s in written]
        self.step = CompiledStep(pure, mesh, state_shardings=shardings)

    def arguments(self, call: Call) -> tuple[list[Any], tuple[list[Any], list[Any]]]:
        """The donated and the kept arguments, on their devices."""
        slots = self.plan.slots
        values = self._strategy.fetch_state([self._placed(s) for s in slots])
        written = [v for v, s in zip(values, slots, strict=True) if s.written]
        reads = [v for v, s in zip(values, slots, strict=True) if not s.written]
        return written, (reads, self._place_arrays(call))

    def __call__(self, call: Call) -> Any:
        done: list[Any] = []
        try:
            if self._is_shared:
                self._strategy.note_step(self._kind, (call.arrays,))
                self._begin_alike()
            outputs, new = self.step(*self.arguments(call), done)
            self._store_all(new)
            done.clear()
            if self._is_shared and self._strategy.mesh.is_spread:
                self._steps += 1
                self._strategy.note_state(self, self._steps, self._compared)
        except (RuntimeError, ValueError) as error:
            explained = self._strategy.explain(error)
            if explained is None:
                raise
            raise explained from error
        finally:
            if done:  # an interrupt came after the step had started
                self._store_all(done[0][1])
        mesh = self._strategy.mesh
        return self._results[-1].rebuild([mesh.local(x) for x in outputs] if mesh.is_spread else outputs)

    def _compared(self) -> tuple[list[str], list[Any]]:
        """Names and arrays of what all workers must hold alike after a step."""
        slots = [s for s in self.plan.slots if s.written and not s.is_stacked]
        return [s.variable.path for s in slots], [self._last[id(s.variable)][1] for s in slots]

    def _store_all(self, new: list[Any]) -> None:
        """Store the new state in the variables."""
        mesh = self._strategy.mesh
        slots = [s for s in self.plan.slots if s.written]
        for slot, value in zip(slots, self._strategy.store_state(new), strict=True):
            held = mesh.local(value)
            _store(slot, held)
            self._last[id(slot.variable)] = held, value

    def _begin_alike(self) -> None:
        """Give variables that no step has used before the first worker's values."""
        if self._is_begun:
            return
        self._is_begun = True
        new = [s for s in self.plan.slots if not s.is_stacked and not hasattr(s.variable, _IS_ALIKE)]
        values = self._strategy.first_values([_stored(s) for s in new])
        for slot, value in zip(new, values, strict=True):
            _store(slot, value)
            object.__setattr__(slot.variable, _IS_ALIKE, True)

    def _placed(self, slot: Slot) -> Any:
        value = _stored(slot)
        held, placed = self._last.get(id(slot.variable), (None, None))
        if held is value:
            return placed
        mesh = self._strategy.mesh
        placed = mesh.put(value, mesh.sharded if slot.is_stacked else mesh.replicated)
        if not slot.written:
            held = value if mesh.is_spread else placed
            _store(slot, held)
            self._last[id(slot.variable)] = held, placed
        return placed

    def _place_arrays(self, call: Call) -> list[Any]:
        mesh = self._strategy.mesh
        return [
            x
            if split and getattr(x, "sharding", None) == mesh.sharded
            else mesh.put(x, mesh.sharded if split else mesh.replicated)
            for x, split in zip(call.arrays, call.split, strict=True)
        ]


def _laid_out(result: Any, mesh: ReplicaMesh) -> Any:
    """Fix where a step's results lie, so that each process holds what it may look at."""

    def place(leaf: Any) -> Any:
        if isinstance(leaf, PerReplica) and leaf.stacked is not None:
            return PerReplica.from_stacked(jax.lax.with_sharding_constraint(leaf.stacked, mesh.sharded))
        return jax.tree.map(
            lambda x: jax.lax.with_sharding_constraint(x, mesh.replicated) if isinstance(x, jax.Array) else x,
            leaf,
        )

    return jax.tree.map(place, result, is_leaf=lambda leaf: isinstance(leaf, PerReplica))


def _stored(slot: Slot) -> Any:
    return slot.variable.stored_copies if slot.is_stacked else slot.variable._value


def _store(slot: Slot, value: Any) -> None:
    # Not `assign`, which converts and checks what was computed for this very variable.
    if slot.is_stacked:
        slot.variable.stored_copies = value
    else:
        slot.variable._value = value


class StepCompiler:
    """Runs functions once per replica, compiled once per signature.

    Args:
        strategy: whose replicas; gives `mesh`, `num_replicas_in_sync`, `cross_device_ops`,
            `fetch_state` and `store_state`.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self._entries: collections.OrderedDict[Hashable, Entry] = collections.OrderedDict()
        #: Code of functions that change what they close over: each function is a step of its own.
        self._changing: set[Any] = set()
        self._programs_of: collections.Counter[Any] = collections.Counter()

    @property
    def num_programs(self) -> int:
        """How many programs were compiled and are kept."""
        return len(self._entries)

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call `fn` once per replica and return what it returns, regrouped."""
        call = Call.parse(args, kwargs)
        check_values(args, "args")
        check_values(kwargs, "kwargs")
        frame = current_frame()
        if frame is not None:
            return self._run_inside(fn, call, frame.scope)
        try:
            return self.entry(fn, call)(call)
        except Exception as error:
            explain(error, fn, "`strategy.run`")
            raise

    def entry(self, fn: Callable[..., Any], call: Call) -> Entry:
        """The compiled step for a function and a call's signature."""
        code, same = getattr(fn, "__code__", None), identity_of(fn)
        key = (fn if code in self._changing else same, call.signature)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._build(fn, call)
            if identity_of(fn) != same:
                # It changes what it closes over, as one does that makes its model in the first call.
                self._changing.add(code)
                key = (fn, call.signature)
            self._entries[key] = entry
            self._note_program(fn)
            if len(self._entries) > _CACHE_SIZE:
                self._entries.popitem(last=False)
        return entry

    def _build(self, fn: Callable[..., Any], call: Call) -> Entry:
        plan = self._discover(fn, call, None)
        return Entry(Replicated(self._strategy, fn, call, plan), plan, self._strategy)

    def _discover(self, fn: Callable[..., Any], call: Call, parent: StateScope | None) -> StatePlan:
        step = Replicated(self._strategy, fn, call, parent=parent)
        discover(lambda arrays: discarded(step([], arrays)), call.arrays)
        plan = StatePlan.from_scopes(step.scopes)
        if parent is None:
            for slot in plan.slots:
                if slot.is_stacked:
                    slot.variable.promote(self._strategy.num_replicas_in_sync)
        return plan

    def _run_inside(self, fn: Callable[..., Any], call: Call, scope: StateScope) -> Any:
        """Run as a part of the program of a `unisono.function`."""
        scope.strategies.add(self._strategy)
        plan = self._discover(fn, call, scope)
        values = [_value_in(s, scope, self._strategy.num_replicas_in_sync) for s in plan.slots]
        result, new = Replicated(self._strategy, fn, call, plan)(values, call.arrays)
        with scope.synced():
            for slot, value in zip((s for s in plan.slots if s.written), new, strict=True):
                if slot.is_stacked:
                    scope.set_copies(slot.variable, value)
                else:
                    scope.add_update((slot.variable, value))
        return result

    def _note_program(self, fn: Callable[..., Any]) -> None:
        name = getattr(fn, "__qualname__", repr(fn))
        self._programs_of[name] += 1
        if self._programs_of[name] == _MANY_PROGRAMS:
            _LOG.warning(
                "%s was compiled %d times: a program depends on the shapes of arrays and on the values "
                "of Python ints, bools and strings, also of those that it closes over. Pass what changes as "
                "an argument, as numpy arrays.",
                name,
                _MANY_PROGRAMS,
            )


def _value_in(slot: Slot, scope: StateScope, replicas: int) -> Any:
    """The value of a variable in the function around a step."""
    if not slot.is_stacked:
        return scope.get_current_value(slot.variable)
    copies = scope.get_copies(slot.variable)
    if copies is None:
        value = scope.get_current_value(slot.variable)
        copies = jnp.broadcast_to(value, (replicas, *value.shape))
    return copies
