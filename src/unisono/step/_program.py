"""A step that can be executed again up to any point where replicas or derivatives meet.

JAX differentiates functions and runs one program on all devices; users of tf.distribute write
tapes, and steps whose replicas have unequal batches. Both become functions by re-execution:
while a step is traced, everything up to a *meeting point* (a `tape.gradient`, or a collective
of replicas that are traced one by one) is run once more, with other values or for another
replica, and stopped there. XLA's common-subexpression pass removes what was repeated.

Tests: tests/virtual/step/test_tape.py, tests/virtual/step/test_uneven.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from unisono._context import Context, entered
from unisono._errors import ContextError
from unisono._reads import Reader, current_reader, read_by
from unisono._system._blocks import set_for_block
from unisono.step._scope import StateScope

if TYPE_CHECKING:
    import jax
    import keras


Operand = TypeVar("Operand")
Value = TypeVar("Value")

#: From where a batch is read: the instruction in each function on the stack.
CallSite: TypeAlias = tuple[tuple[CodeType, int], ...]


@dataclasses.dataclass(frozen=True)
class Substitution:
    """Other values for some variables, from the moment when a tape is entered.

    Args:
        tape: the number of the tape, counted from the start of the step.
    """

    tape: int
    values: tuple[tuple[keras.Variable, jax.Array], ...]


class _Stop(BaseException):
    """Ends a re-execution at its meeting point; not an `Exception`, so that no user code stops it."""

    def __init__(self, frame: ReplicaFrame, operand: object) -> None:
        super().__init__()
        self.frame, self.operand = frame, operand


@dataclasses.dataclass(eq=False)
class ReplicaFrame:
    """One execution of one replica's step.

    Args:
        run: the lockstep execution that this frame belongs to.
        index: which of the program's bodies is executed.
        stop: the meeting point to stop at; None runs to the end.
        reads: from where the body read a batch, for each one that it read.
    """

    run: Run
    index: int
    scope: StateScope
    stop: int | None = None
    meetings: int = 0
    tapes: int = 0
    watched: dict[tuple[int, int], jax.Array] = dataclasses.field(default_factory=dict)
    reads: list[object] = dataclasses.field(default_factory=list)

    def meet(self, operand: Operand, combine: Callable[[int, list[Operand]], list[Value]]) -> Value:
        """Bring the operands of all bodies together and return this body's result.

        Args:
            combine: gets the number of the meeting point and all operands; gives all results.
        """
        number = self.meetings
        self.meetings += 1
        # Combined before, when another body of this run got here, or before the tape was entered.
        if number not in self.run.known:
            if number == self.stop:
                raise _Stop(self, operand)
            operands = [
                # This body has its operand; the others are executed again up to this point.
                operand if i == self.index else self.run.operand_at(i, number)[0]
                for i in range(len(self.run.program.bodies))
            ]
            self.run.known[number] = combine(number, operands)
        result: Value = self.run.known[number][self.index]
        return result

    def enter_tape(self) -> int:
        """Count a tape and put in place the values that a derivative is taken at."""
        number = self.tapes
        self.tapes += 1
        # From here on: what came before the tape does not depend on these values.
        for substitution in self.run.substitutions[self.index]:
            if substitution.tape == number:
                for variable, value in substitution.values:
                    self.scope.state_mapping[id(variable)] = value
        return number


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The bodies of a step: one for all replicas together, or one for each.

    Args:
        bodies: functions without arguments.
        scopes: for each body, a function that makes its state as it is at the start.
        contexts: for each body, a function from its frame to the context to run in, or None
            to stay in the current one.
        reader: what the bodies read data from; None leaves it as it is.
    """

    bodies: Sequence[Callable[[], object]]
    scopes: Sequence[Callable[[], StateScope]]
    contexts: Sequence[Callable[[ReplicaFrame], Context | None]]
    reader: Reader | None = None


class Run:
    """One lockstep execution of a program's bodies.

    Args:
        substitutions: for each body, the values to take instead of its own.
        known: results of meeting points that need no second execution.
    """

    def __init__(
        self,
        program: Program,
        substitutions: Sequence[tuple[Substitution, ...]] | None = None,
        known: dict[int, list[Any]] | None = None,
    ) -> None:
        self.program = program
        self.substitutions = substitutions or [()] * len(program.bodies)
        self.known: dict[int, list[Any]] = known or {}

    def complete(self, index: int) -> tuple[Any, ReplicaFrame]:
        """Execute a body to its end; return what it returns, and its frame."""
        frame = ReplicaFrame(self, index, self.program.scopes[index]())
        with self._entered(frame):
            return self.program.bodies[index](), frame

    def operand_at(self, index: int, number: int) -> tuple[Any, ReplicaFrame]:
        """Execute a body up to a meeting point; return the operand it brings, and its frame."""
        frame = ReplicaFrame(self, index, self.program.scopes[index](), stop=number)
        with self._entered(frame):
            try:
                self.program.bodies[index]()
            except _Stop as stop:
                # Other runs may be nested in this one: their stop is not for this body.
                if stop.frame is frame:
                    return stop.operand, frame
                raise
        raise ContextError(
            "Every replica must call the same collectives in the same order. Received: replica "
            f"{index} ended without its collective number {number}. Do not put `all_reduce`, "
            "`all_gather`, `merge_call` or an optimizer step under an `if` that differs between replicas."
        )

    @contextlib.contextmanager
    def _entered(self, frame: ReplicaFrame) -> Iterator[None]:
        context = self.program.contexts[frame.index](frame)
        with (
            set_for_block(_FRAME, frame),
            contextlib.nullcontext() if context is None else entered(context),
            read_by(self.program.reader or current_reader()),
            frame.scope,
        ):
            yield


_FRAME: ContextVar[ReplicaFrame | None] = ContextVar("unisono_frame", default=None)


def current_frame() -> ReplicaFrame | None:
    """The execution that the running code is part of, or None outside a step."""
    return _FRAME.get()
