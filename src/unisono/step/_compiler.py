"""The compiled steps of users' functions: the variables they carry, and a cache by signature."""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras

from unisono._features import load
from unisono._lowering._compiler_options import Executables
from unisono._mesh import ReplicaMesh
from unisono._system._task_reports import process_events
from unisono._types import PyTree, Tree
from unisono._values import PerReplica
from unisono.data._batches import check_values
from unisono.step._call_signature import Call, Result
from unisono.step._dispatch import CompiledStep, Started
from unisono.step._engines import UNSHARDED
from unisono.step._functional import ReplicatedStep, Slot, StatePlan, discover
from unisono.step._keras_internals import store_value, store_values, stored_value
from unisono.step._program import current_frame
from unisono.step._scope import StateScope
from unisono.step._value_handle import AgreedHandle, RowsHandle, ValueHandle, VariableValue
from unisono.step.variables._recorders import current_recorder, note_read

if TYPE_CHECKING:
    from unisono.step._replicas import Replicas

#: Marks variables that hold the same on all workers. One that has a value for each replica may differ.
_IS_ALIKE = "_unisono_is_alike"

#: In place of an array, which no variable holds.
_NOTHING = object()


class Entry:
    """A compiled step of a user's function, with the variables whose state it carries.

    Args:
        traced: from values of variables and arrays to results and new values.
        is_shared: whether all replicas take part, and not this process alone.
        executables: where an equal program may have been compiled; None to compile it.
    """

    def __init__(
        self,
        traced: Callable[[list[jax.Array], list[jax.Array]], tuple[object, list[jax.Array]]],
        plan: StatePlan,
        replicas: Replicas,
        is_shared: bool = True,
        executables: Executables | None = None,
    ) -> None:
        self.plan = plan
        self._is_shared = is_shared
        self._is_begun, self._steps = False, 0
        shapes = ", ".join(str(tuple(slot.variable.shape)) for slot in plan.slots)
        self._kind = f"run with variables {shapes}" if shapes else "run"
        self.replicas = replicas
        self._results: list[Result] = []
        # By slot: what the variable holds between steps, and the array on all devices that stands for it.
        self._held: list[object] = [_NOTHING] * len(plan.slots)
        self._arrays: list[Any] = [None] * len(plan.slots)
        #: By slot: what stands for a value on parameter servers, which stays there and is read for each step.
        self._elsewhere: dict[int, RowsHandle] = {}
        self._written = [(i, s) for i, s in enumerate(plan.slots) if s.written]
        self._read = [i for i, s in enumerate(plan.slots) if not s.written]
        # Asked of each variable in each step: 320 small variables have 962 slots.
        self._readers = [_reader_of(s) for s in plan.slots]
        mesh = replicas.mesh
        #: Those that are written, where each holds the very array that the program returns; else None.
        self._plain: list[keras.Variable] | None = None
        if not mesh.spans_processes and all(s.layout.holds_arrays for _, s in self._written):
            self._plain = [s.variable for _, s in self._written]
        is_written = [s.written for s in plan.slots]

        # Written state is donated, so that XLA updates it in place; what is only read is needed again.
        def pure(
            donated: list[jax.Array], kept: tuple[list[jax.Array], list[jax.Array]]
        ) -> tuple[list[jax.Array], list[jax.Array]]:
            reads, arrays = kept
            of_written, of_read = iter(donated), iter(reads)
            values = [next(of_written) if w else next(of_read) for w in is_written]
            result, new = traced(values, arrays)
            result = _laid_out(result, mesh)
            description, outputs = Result.parse(result)
            self._results.append(description)
            return outputs, new

        shardings = [s.layout.sharding for _, s in self._written]
        self.step = CompiledStep(
            pure, mesh, state_shardings=shardings, process_group=replicas.process_group,
            executables=executables, around=replicas.state_layout.compiling,
        )  # fmt: skip

    def arguments(self, call: Call) -> tuple[list[jax.Array], tuple[list[jax.Array], list[jax.Array]]]:
        """The donated and the kept arguments, on their devices."""
        if current_recorder() is not None:
            for slot in self.plan.slots:
                note_read(slot.variable)
        assigned: dict[int, VariableValue] = {}
        for i, (read, slot, held) in enumerate(zip(self._readers, self.plan.slots, self._held, strict=True)):
            # The same array as after the last step: nothing was assigned, and it is on all devices already.
            if (value := read(slot.variable)) is not held:
                assigned[i] = value
        if assigned:
            self._place_all(assigned)
        values = self.replicas.state_layout.fetch(self._arrays)
        written = [values[i] for i, _ in self._written]
        return written, ([values[i] for i in self._read], self.place_arrays(call))

    def __call__(self, call: Call) -> PyTree:
        done: list[Started[list[jax.Array], list[jax.Array]]] = []
        try:
            if self._is_shared:
                self.note(call)
                self._begin_alike()
            outputs, new = self.step(*self.arguments(call), done)
            self._store_all(new)
            done.clear()
            if self._is_shared:
                self._steps += 1
                self.replicas.process_group.check_state(self.replicas.mesh, self, self._steps, self._compared)
        except (RuntimeError, ValueError) as error:
            explained = self.replicas.process_group.explain(error)
            if explained is None:
                raise
            raise explained from error
        finally:
            if done:  # an interrupt came after the step had started
                self._store_all(done[0][1])
        return self._results[-1].rebuild(self.replicas.mesh.local_each(outputs))

    def note(self, call: Call) -> None:
        """Note that a step of all processes begins."""
        self.replicas.process_group.note_step(self._kind, (call.arrays,))

    def _compared(self) -> tuple[list[str], list[jax.Array]]:
        """Names and arrays of what all workers must hold alike after a step."""
        slots = [(i, s) for i, s in self._written if s.layout.spec == UNSHARDED]
        if self.replicas.mesh.processes_per_replica > 1:
            # Each process has its own parts of the others.
            slots = [(i, s) for i, s in slots if self._arrays[i].is_fully_replicated]
        return [s.variable.path for _, s in slots], [self._arrays[i] for i, _ in slots]

    def _store_all(self, new: Sequence[jax.Array]) -> None:
        """Store the new state in the variables."""
        if self._plain is not None and not self._elsewhere:
            arrays = self.replicas.state_layout.rest(new)
            for (i, _), value in zip(self._written, arrays, strict=True):
                self._arrays[i] = self._held[i] = value
            store_values(self._plain, arrays)
            return
        for (i, slot), value in zip(self._written, self.replicas.state_layout.rest(new), strict=True):
            if self._elsewhere and i in self._elsewhere:
                self._elsewhere[i].assigned(value)
                continue
            self._arrays[i] = value
            self._held[i] = held = slot.layout.hold(value)
            _store(slot, held)

    def _begin_alike(self) -> None:
        """Give variables that no step has used before the first worker's values."""
        if self._is_begun:
            return
        self._is_begun = True
        new = [s for s in self.plan.slots if not s.is_stacked and not hasattr(s.variable, _IS_ALIKE)]
        # Parameter servers have one value for all; of what is not sent, workers compare a token.
        pairs: list[tuple[Slot, Any]] = [(s, _reader_of(s)(s.variable)) for s in new]
        pairs = [p for p in pairs if isinstance(p[1], AgreedHandle) or not isinstance(p[1], ValueHandle)]
        given = [x.token if isinstance(x, AgreedHandle) else x for _, x in pairs]
        equal_arrays, unknown = self.replicas.process_group.equal_arrays, [False] * len(given)
        equal: Any = equal_arrays(given, unknown, self._kind, "The variables of the step") or ()
        for (slot, own), value in zip(pairs, equal, strict=True):
            agreed = own.agreed(value) if isinstance(own, AgreedHandle) else slot.layout.assigned(value)
            _store(slot, agreed)
            object.__setattr__(slot.variable, _IS_ALIKE, True)

    def _place_all(self, assigned: Mapping[int, VariableValue]) -> None:
        """Put what variables were assigned onto the devices; each has memory of its own there."""
        slots = self.plan.slots
        held = [read(slot.variable) for read, slot in zip(self._readers, slots, strict=True)]
        users = collections.Counter(map(id, held))
        for i, value in assigned.items():
            # Another variable's array, as after `target.assign(source)`: what is donated must be held once.
            is_shared = users[id(value)] > 1
            own = jnp.copy(value) if is_shared and isinstance(value, jax.Array) else value
            self._place(i, slots[i], own)

    def _place(self, number: int, slot: Slot, value: VariableValue) -> None:
        """Put what a variable holds onto the devices."""
        self._held[number] = _NOTHING  # what is written is donated: where the step fails, it is placed anew
        self._elsewhere.pop(number, None)
        if isinstance(value, RowsHandle):
            self._elsewhere[number] = value
            self._arrays[number] = slot.layout.place(value.whole())
            return
        array = slot.layout.place(value)
        # Placed once and kept, as no step replaces it.
        if not slot.written:
            self._held[number] = held = slot.layout.hold(array)
            _store(slot, held)
        self._arrays[number] = array

    def place_arrays(self, call: Call) -> list[jax.Array]:
        """Return the arrays of a call on their devices."""
        mesh = self.replicas.mesh
        # JAX takes longer to place what lies there already, or a number, than to start a small step.
        there = () if mesh.spans_processes else (float,)
        places = [mesh.sharded if split else mesh.replicated for split in call.split]
        return [
            x if type(x) in there or getattr(x, "sharding", None) == place else mesh.put(x, place)
            for x, place in zip(call.arrays, places, strict=True)
        ]


def _laid_out(result: Tree, mesh: ReplicaMesh) -> Tree:
    """Fix where a step's results lie, so that each process holds what it may look at."""

    def place(leaf: object) -> PyTree:
        if isinstance(leaf, PerReplica) and leaf.stacked is not None:
            return PerReplica.from_stacked(mesh.lay_out(leaf.stacked, mesh.sharded))
        return jax.tree.map(
            lambda x: mesh.lay_out(x, mesh.replicated) if isinstance(x, jax.Array) else x, leaf
        )

    placed: Tree = jax.tree.map(place, result, is_leaf=lambda leaf: isinstance(leaf, PerReplica))
    return placed


def _reader_of(slot: Slot) -> Callable[[keras.Variable], VariableValue]:
    """Return what reads the array that the variable of a slot holds; a C function, since steps call it."""
    return operator.attrgetter("stored_copies") if slot.is_stacked else stored_value


def _store(slot: Slot, value: VariableValue) -> None:
    # Not `assign`, which converts and checks what was computed for this very variable.
    if slot.is_stacked:
        slot.variable.stored_copies = value
    else:
        store_value(slot.variable, value)


class StepCompiler:
    """Runs functions once per replica, compiled once per signature.

    Args:
        replicas: that run the functions.
        warns: whether to say what a user's function may be given by mistake: many signatures, whole batches.
        examine: called with each new step, before it is compiled.
    """

    def __init__(
        self,
        replicas: Replicas,
        warns: bool = True,
        examine: Callable[[ReplicatedStep], object] = lambda step: None,
    ) -> None:
        self._replicas, self._warns, self._examine = replicas, warns, examine
        self._programs = load("programs of steps")(replicas, warns)

    @property
    def num_programs(self) -> int:
        """How many programs were compiled and are kept."""
        return len(self._programs)

    def run(self, fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> PyTree:
        """Call `fn` once per replica and return what it returns, regrouped."""
        call = Call.parse(args, kwargs)
        check_values(args, "args")
        check_values(kwargs, "kwargs")
        frame = current_frame()
        if frame is not None:
            return self._run_inside(fn, call, frame.scope)
        try:
            process_events().stepped()
            return self.entry(fn, call)(call)
        except Exception as error:
            load("explanation of an error")(error, fn, "`strategy.run`")
            raise

    def entry(self, fn: Callable[..., object], call: Call) -> Entry:
        """The compiled step for a function and a call's signature."""
        entry: Entry = self._programs.entry(fn, call, self._build)
        return entry

    def _build(self, fn: Callable[..., object], call: Call) -> Entry:
        if any(isinstance(x, jax.core.Tracer) for x in (jnp.zeros(()), *call.arrays)):
            raise load("mistake")("step in jit")
        plan = self._discover(fn, call, None)
        step = ReplicatedStep(self._replicas, fn, call, plan)
        if self._replicas.num_replicas_in_sync > 1:
            self._examine(step)
        return Entry(step, plan, self._replicas)

    def _discover(self, fn: Callable[..., object], call: Call, parent: StateScope | None) -> StatePlan:
        step = ReplicatedStep(self._replicas, fn, call, parent=parent)
        discover(lambda arrays: step([], arrays), call.arrays)
        layout = self._replicas.state_layout
        plan = StatePlan.from_scopes(step.scopes, layout)
        planned = ReplicatedStep(self._replicas, fn, call, plan, parent)
        if layout.decide_step(plan, lambda *given: planned(*given)[1], call.arrays):
            plan = StatePlan.from_scopes(step.scopes, layout)
        if self._warns and (replicas := self._replicas.num_replicas_in_sync) > 1:
            load("check for whole batches")(fn, call, plan, replicas)
        # Inside a `unisono.function` the plan of the function does this.
        if parent is None:
            for slot in plan.slots:
                if slot.is_stacked:
                    slot.variable._promote(self._replicas.num_replicas_in_sync)
        return plan

    def _run_inside(self, fn: Callable[..., object], call: Call, scope: StateScope) -> PyTree:
        """Run as a part of the program of a `unisono.function`."""
        scope.replicas.add(self._replicas)
        plan = self._discover(fn, call, scope)
        values = [_value_in(s, scope, self._replicas.num_replicas_in_sync) for s in plan.slots]
        result, new = ReplicatedStep(self._replicas, fn, call, plan)(values, call.arrays)
        # The step has merged these values; the function around must not merge them again.
        with scope.synced():
            for slot, value in zip((s for s in plan.slots if s.written), new, strict=True):
                if slot.is_stacked:
                    scope.set_copies(slot.variable, value)
                else:
                    scope.add_update((slot.variable, slot.layout.enter(value, in_replica=False)))
        return result


def _value_in(slot: Slot, scope: StateScope, replicas: int) -> jax.Array:
    """The value of a variable in the function around a step."""
    if not slot.is_stacked:
        return slot.layout.leave(scope.get_current_value(slot.variable), in_replica=False)
    copies = scope.get_copies(slot.variable)
    if copies is None:
        value = scope.get_current_value(slot.variable)
        copies = jnp.broadcast_to(value, (replicas, *value.shape))
    return copies
