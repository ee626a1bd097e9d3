"""A stateful step as a pure function of its state and data, for all replicas.

`discover` runs a step once without computing, to learn which variables it reads and writes.
`ReplicatedStep` is then the pure function: one `jax.shard_map` body where the replicas have equal
shapes, and the replicas traced in turn where they have not.

Tests: tests/virtual/step/test_compiler.py, tests/virtual/step/test_uneven.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import keras

from unisono._context import Context, OneReplica, ReplicaEngine
from unisono._errors import ContextError
from unisono._reads import NOT_IN_A_STEP
from unisono._types import PyTree
from unisono._values import PerReplica
from unisono.step._call_signature import Call, CallArray, Output, regroup
from unisono.step._engines import SHARDED, UNSHARDED, SpmdEngine, TurnEngine
from unisono.step._layout import StateLayout, VariableLayout
from unisono.step._program import Program, ReplicaFrame, Run
from unisono.step._scope import StateScope, discovering
from unisono.step.variables._merge_rules import Merge, kind_of, localize, merge_all, merge_in_turn, merge_rule

if TYPE_CHECKING:
    from unisono.step._replicas import Replicas


@dataclasses.dataclass(frozen=True)
class Slot:
    """A variable of a step: how its copies merge, whether the step writes it, and how it lies."""

    variable: keras.Variable
    rule: Merge
    written: bool
    layout: VariableLayout

    @property
    def is_stacked(self) -> bool:
        """Whether the variable has one value per replica between steps."""
        return self.rule is Merge.STACK


@dataclasses.dataclass(frozen=True)
class StatePlan:
    """The variables of a step, in the order in which its program takes their values."""

    slots: tuple[Slot, ...] = ()

    @classmethod
    def from_scopes(cls, scopes: Sequence[StateScope], layout: StateLayout) -> StatePlan:
        """Make the plan of a step from what its replicas touched."""
        seen: dict[int, keras.Variable] = {}
        written: set[int] = set()
        by_replica: set[int] = set()
        for scope in scopes:
            seen.update(scope.seen)
            written.update(scope.written)
            by_replica.update(scope.written_by_replica)
        return cls(tuple(_slot(v, k in written, k in by_replica, layout) for k, v in seen.items()))

    @classmethod
    def from_cross_replica(cls, scope: StateScope, layout: StateLayout) -> StatePlan:
        """Make the plan of a function that runs outside the replicas."""
        for key in scope.copies:
            scope.seen[key]._promote(len(scope.copies[key]))
        # Nothing to merge: this code runs once, outside of the replicas.
        slots = (_slot(v, key in scope.written, False, layout) for key, v in scope.seen.items())
        return cls(tuple(slots))

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables."""
        return [slot.variable for slot in self.slots]

    def check_known(self, scope: StateScope) -> None:
        """Raise when a step touched a variable that was not there when it was planned."""
        known = {id(v) for v in self.variables}
        for key, variable in scope.seen.items():
            if key not in known:
                raise ContextError(
                    "A step may create a variable once, and then uses it again. Received: "
                    f"{variable.path!r}, created anew when the step was traced again. Create it before the "
                    "step, or keep it in an object that lives longer (`if self.v is None: self.v = "
                    "unisono.Variable(0.)`)."
                )


def _slot(variable: keras.Variable, written: bool, by_replica: bool, layout: StateLayout) -> Slot:
    # What an optimizer writes is equal on all replicas, since it is made of reduced gradients.
    rule = merge_rule(kind_of(variable)) if by_replica else Merge.KEEP
    # A variable that has copies keeps them, also in a step that only reads it.
    if getattr(variable, "stored_copies", None) is not None:
        rule = Merge.STACK
    return Slot(variable, rule, written, layout.of(variable, is_stacked=rule is Merge.STACK))


@dataclasses.dataclass(frozen=True, eq=False)
class ReplicatedStep:
    """A step on all replicas, as a pure function; may be traced inside any JAX transformation.

    Args:
        call: its arguments; their arrays are passed at each call.
        plan: its variables; without one, values are those that the variables hold.
        parent: the state of the function around the step, if it is called inside one.
        scopes: filled with each replica's state when traced.
    """

    replicas: Replicas
    fn: Callable[..., object]
    call: Call
    plan: StatePlan | None = None
    parent: StateScope | None = None
    scopes: list[StateScope] = dataclasses.field(default_factory=list)

    def __call__(
        self, values: list[jax.Array], arrays: Sequence[CallArray]
    ) -> tuple[PyTree, list[jax.Array]]:
        """Return what the step returns, regrouped, and the new values of the written variables.

        Args:
            values: one for each slot of the plan; stacked where the slot is.
        """
        self.scopes.clear()
        if self.call.is_ragged:
            return self._in_turn(values, arrays)
        return self._together(values, arrays)

    def _together(
        self, values: list[jax.Array], arrays: Sequence[CallArray]
    ) -> tuple[PyTree, list[jax.Array]]:
        slots = self.plan.slots if self.plan else ()
        mesh, count = self.replicas.mesh, self.replicas.num_replicas_in_sync
        outputs: list[Output] = []

        def body(
            values: list[jax.Array], arrays: Sequence[CallArray]
        ) -> tuple[list[jax.Array], list[CallArray], list[jax.Array]]:
            engine: ReplicaEngine = OneReplica()
            if count > 1:
                engine = SpmdEngine(count, self.replicas.cross_device_ops)
            out, own, mirrored, new = self.one_replica(engine, values, arrays)
            # Python objects leave a trace only as a side effect; a jitted function returns arrays alone.
            outputs.append(out)
            # A leading axis, along which `shard_map` puts the replicas' rows together.
            return ([x[None] for x in own] if count > 1 else own), mirrored, new

        state_specs = [s.layout.spec for s in slots]
        written_specs = [p for p, s in zip(state_specs, slots, strict=True) if s.written]
        array_specs = [SHARDED if split else UNSHARDED for split in self.call.split]
        if count > 1:
            in_specs, out_specs = (state_specs, array_specs), (SHARDED, UNSHARDED, written_specs)
            body = mesh.on_replicas(body, in_specs, out_specs)
        own, mirrored, new = body(values, arrays)
        given = [PerReplica.from_stacked(x) for x in own] if count > 1 else own
        return outputs[-1].rebuild(given, mirrored), new

    def one_replica(
        self, engine: ReplicaEngine, values: list[jax.Array], arrays: Sequence[CallArray]
    ) -> tuple[Output, list[jax.Array], list[CallArray], list[jax.Array]]:
        """Run the step of one replica: the body of `jax.shard_map`.

        Args:
            values: of the plan's variables, as they lie in the program.
            arrays: of the call; split ones with a leading axis of this replica's part.

        Returns:
            What its output is made of, the arrays of it that are this replica's own, those that all replicas
            have, and the merged new values of the written variables.
        """
        slots = self.plan.slots if self.plan else ()
        start = [
            localize(s.rule, v[0] if s.is_stacked else s.layout.enter(v, engine.num_replicas > 1), engine)
            for s, v in zip(slots, values, strict=True)
        ]
        outputs: list[Output] = []

        def code(values: list[Any]) -> tuple[PyTree, list[jax.Array]]:
            out, own, mirrored, new = self._on_values(engine, values, arrays)
            outputs.append(out)
            return (own, mirrored), new

        layout = self.replicas.state_layout
        (own, mirrored), new = layout.run_replica([s.variable for s in slots], start, code)
        return outputs[-1], own, mirrored, new

    def _on_values(
        self, engine: ReplicaEngine, start: list[Any], arrays: Sequence[CallArray]
    ) -> tuple[Output, list[jax.Array], list[CallArray], list[jax.Array]]:
        """Run the step of one replica on what its code sees of the variables; see `one_replica`."""
        slots = self.plan.slots if self.plan else ()
        args, kwargs = self.call.rebuild(arrays, lambda _, part: part[0][0])
        context = self.replicas.context(engine)
        program = Program(
            [lambda: self.fn(*args, **kwargs)],
            [lambda: StateScope(zip((s.variable for s in slots), start, strict=True), parent=self.parent)],
            [lambda _: context],
            NOT_IN_A_STEP,
        )
        result, frame = Run(program).complete(0)
        self.scopes.append(frame.scope)
        self._check(frame.scope)
        written = [s for s in slots if s.written]
        copies = [frame.scope.state_mapping[id(s.variable)] for s in written]
        merged = merge_all([s.rule for s in written], copies, engine)
        in_replica = engine.num_replicas > 1
        new = [
            m[None] if s.is_stacked else s.layout.leave(m, in_replica)
            for s, m in zip(written, merged, strict=True)
        ]
        return *Output.parse(result), new

    def _in_turn(
        self, values: list[jax.Array], arrays: Sequence[CallArray]
    ) -> tuple[PyTree, list[jax.Array]]:
        """The replicas one after the other in one program, meeting at their collectives."""
        slots = self.plan.slots if self.plan else ()
        run = Run(self._turn_program(slots, values, arrays))
        outcomes = [run.complete(i) for i in range(self.replicas.num_replicas_in_sync)]
        self.scopes.extend(frame.scope for _, frame in outcomes)
        for scope in self.scopes:
            self._check(scope)
        present = [not self.call.is_empty(i) for i in range(len(self.scopes))]
        # Fresh scopes: the state as it was before the step, for the replicas whose writes do not count.
        starts = [run.program.scopes[i]() for i in range(len(self.scopes))]
        new = []
        for slot in (s for s in slots if s.written):
            # What a replica without rows wrote may be NaN, and counts for nothing.
            kept = [there or slot.rule is Merge.SEED for there in present]
            chosen = [e if k else s for e, s, k in zip(self.scopes, starts, kept, strict=True)]
            copies = [scope.state_mapping[id(slot.variable)] for scope in chosen]
            new.append(slot.layout.leave(merge_in_turn(slot.rule, copies, present), in_replica=False))
        return regroup([Output.parse(result) for result, _ in outcomes]), new

    def _check(self, scope: StateScope) -> None:
        if self.plan is not None:
            self.plan.check_known(scope)

    def _turn_program(
        self, slots: Sequence[Slot], values: list[jax.Array], arrays: Sequence[CallArray]
    ) -> Program:
        def body_of(i: int) -> Callable[[], object]:
            args, kwargs = self.call.rebuild(arrays, lambda _, part: part[i] if len(part) > 1 else part[0][i])
            return lambda: self.fn(*args, **kwargs)

        def scope_of(i: int) -> Callable[[], StateScope]:
            engine = _ReplicaNumber(i, self.replicas.num_replicas_in_sync)
            start = [
                localize(s.rule, v[i] if s.is_stacked else s.layout.enter(v, in_replica=False), engine)
                for s, v in zip(slots, values, strict=True)
            ]
            pairs = list(zip((s.variable for s in slots), start, strict=True))
            return lambda: StateScope(pairs, parent=self.parent)

        def context_of(frame: ReplicaFrame) -> Context:
            engine = TurnEngine(frame, self.replicas.cross_device_ops, self.call.is_empty(frame.index))
            return self.replicas.context(engine)

        replicas = range(self.replicas.num_replicas_in_sync)
        return Program(
            [body_of(i) for i in replicas],
            [scope_of(i) for i in replicas],
            [context_of for _ in replicas],
            NOT_IN_A_STEP,
        )


@dataclasses.dataclass(frozen=True)
class _ReplicaNumber(OneReplica):
    """A replica known by its number alone, for placing its state."""

    replica_id: int
    num_replicas: int


def discover(step: Callable[[list[jax.Array]], object], arrays: Sequence[CallArray]) -> None:
    """Run a step without computing, and initialize the variables that it creates.

    Args:
        step: gets traced stand-ins for `arrays`. Its result may hold objects that JAX cannot return.
    """

    def without_result(arrays: list[Any]) -> None:
        step(arrays)

    # The outer scope closes outside the trace, so that Keras initializes new variables eagerly.
    with keras.StatelessScope(), discovering():
        jax.eval_shape(without_result, list(arrays))
