"""What a process reports of itself, also while its main thread is blocked in a collective: pure."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Iterator, Mapping

from unisono.cluster.rendezvous._protocol import Message
from unisono.collectives._process_group import ProgramToken

#: Steps, and files, that are remembered. The host runs at most 16 steps ahead of the devices, which wait for
#: each other: a peer never asks about a step that is much older.
_REMEMBERED = 256

#: A kind of step, and the shapes of its arrays; None at the end of the data.
Step = tuple[str, tuple[tuple[int, ...], ...] | None]

#: How the text of a `fit`, `evaluate` or `predict` call begins; their arguments are compared in a collective.
CALL = "a call of "

#: A step that reads a variable whose parts lie on all workers.
READ = "a read of variables in parts"

#: What the answer to each kind of question holds.
_STATE: dict[str, tuple[type, ...]] = {
    "steps": (int,),
    "step": (str, type(None)),
    "collectives_begun": (int,),
    "in_flight": (int, type(None)),
    "finished": (bool,),
}
_ANSWERS: dict[str, dict[str, tuple[type, ...]]] = {
    "state": _STATE,
    "abort": _STATE,
    "end": _STATE,
    "step": {"reached": (bool,), "step": (str, type(None)), "steps": (int,), "finished": (bool,)},
    "file": {"done": (bool,)},
    "checkpoint_number": {"done": (bool,), "number": (int, type(None))},
}


#: Numbers of programs and collectives.
_NUMBERS = itertools.count()


class InFlight:
    """What is in flight. Written by the threads that compute, read by the watchdog's.

    >>> in_flight = InFlight()
    >>> in_flight.oldest is None
    True
    >>> with in_flight.collective():
    ...     in_flight.oldest is None
    False
    """

    def __init__(self) -> None:
        self._program: tuple[int, ProgramToken] | None = None
        self._concurrent: tuple[tuple[int, ProgramToken], ...] = ()
        self._collectives: dict[int, None] = {}

    def note_program(self, token: ProgramToken) -> None:
        """Note that a step was dispatched. Devices run steps in order: the last one is enough."""
        self._program = next(_NUMBERS), token

    def note_concurrent_program(self, token: ProgramToken) -> None:
        """Note a program beside the steps, which may finish before them or after them.

        >>> import jax
        >>> in_flight = InFlight()
        >>> in_flight.note_concurrent_program(jax.numpy.zeros(()).block_until_ready())
        >>> in_flight.oldest is None
        True
        """
        running = (entry for entry in self._concurrent if not _is_ready(entry[1]))
        self._concurrent = (*running, (next(_NUMBERS), token))

    @contextlib.contextmanager
    def collective(self) -> Iterator[None]:
        """Surround a blocking call that returns only when all processes have made it."""
        number = next(_NUMBERS)
        self._collectives[number] = None
        try:
            yield
        finally:
            del self._collectives[number]

    @property
    def oldest(self) -> int | None:
        """The number of a program or collective that has not finished; None where nothing is in flight.

        While this process makes no progress the number stays the same.
        """
        program = self._program
        if program is not None and not _is_ready(program[1]):
            return program[0]
        for number, token in self._concurrent:
            if not _is_ready(token):
                return number
        # A copy: another thread may enter or leave a collective meanwhile.
        return next(iter(self._collectives.copy()), None)


def _is_ready(token: ProgramToken) -> bool:
    try:
        return bool(token.is_ready())
    except RuntimeError:
        # JAX's answer for a deleted array: a later step took the buffer over, so its program is done.
        return True


@dataclasses.dataclass
class WorkerStatus:
    """The progress of a process.

    Args:
        collectives_begun: how many steps and host collectives it has begun.
        steps: how many steps it has begun.
        abort_reason: why it must end; empty as long as it need not.
        is_finished: whether its program has reached its end.
        end: what process 0 has found at the end of all programs: which did not reach it, empty where all
            did; None until then.
        sees_ends: whether a collective fails by itself where a process ends: between CPUs, after the first
            one, which connects the processes: the kernel closes its connections. NCCL may wait for ever.
    """

    collectives_begun: int = 0
    steps: int = 0
    abort_reason: str = ""
    is_finished: bool = False
    end: str | None = None
    has_end: threading.Event = dataclasses.field(default_factory=threading.Event)
    in_flight: InFlight = dataclasses.field(default_factory=InFlight)
    sees_ends: bool = True
    _last_steps: collections.deque[Step] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_REMEMBERED)
    )
    _files: collections.deque[tuple[int, str]] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=_REMEMBERED)
    )
    #: Per series, the numbers of its checkpoints in order.
    _numbers: dict[str, list[int]] = dataclasses.field(default_factory=lambda: collections.defaultdict(list))

    def begin_step(self, step: Step) -> bool:
        """Note a step; return whether it differs from the previous one.

        >>> status = WorkerStatus()
        >>> status.begin_step(("train", ((8, 3),))), status.begin_step(("train", ((8, 3),)))
        (True, False)
        """
        differs = not self._last_steps or self._last_steps[-1] != step
        self.steps += 1
        self.collectives_begun += 1
        self._last_steps.append(step)
        return differs

    def note_file(self, path: str) -> None:
        """Note that a file is complete."""
        self._files.append((self.collectives_begun, path))

    def note_number(self, series: str, number: int) -> None:
        """Note the number of the next checkpoint of a series."""
        self._numbers[series].append(number)

    def num_checkpoints(self, series: str) -> int:
        """Return how many checkpoints of a series have a number."""
        return len(self._numbers[series])

    def answer(self, question: Message) -> dict[str, object]:
        """Return the answer to a peer's question.

        Args:
            question: `"state"`; `"step"` with a number from 1; `"file"` with a path, or
                `"checkpoint_number"` with a series and an index, both with the asker's count of collectives;
                `"abort"` with a reason, which ends this process; or `"end"`, with who is missing there.

        >>> status = WorkerStatus()
        >>> status.answer({"kind": "step", "number": 1})
        {'kind': 'step', 'reached': False, 'step': None, 'steps': 0, 'finished': False}
        >>> status.begin_step(("train", ((8, 3), (8,))))
        True
        >>> status.answer({"kind": "step", "number": 1})
        {'kind': 'step', 'reached': True, 'step': 'train on (8, 3), (8,)', 'steps': 1, 'finished': False}
        """
        kind = question.get("kind")
        if kind == "step":
            number = question.get("number")
            reached = isinstance(number, int) and number <= self.steps
            step = self._describe_number(number) if isinstance(number, int) and reached else None
            progress = {"steps": self.steps, "finished": self.is_finished}
            return {"kind": kind, "reached": reached, "step": step, **progress}
        if kind == "file":
            written = (question.get("collectives_begun"), question.get("path")) in self._files
            return {"kind": kind, "done": written or self._has_passed(question)}
        if kind == "checkpoint_number":
            known, index = self._numbers.get(str(question.get("series")), []), question.get("index")
            chosen = known[index] if isinstance(index, int) and 0 <= index < len(known) else None
            return {"kind": kind, "done": chosen is not None or self._has_passed(question), "number": chosen}
        if kind == "abort":
            # The first reason counts: later ones are mostly its consequences.
            self.abort_reason = self.abort_reason or str(question.get("reason"))
        if kind == "end":
            self.end = str(question.get("missing"))
            self.has_end.set()
        return {
            "kind": "state",
            "steps": self.steps,
            "step": self._describe_number(self.steps),
            "collectives_begun": self.collectives_begun,
            "in_flight": self.in_flight.oldest,
            "finished": self.is_finished,
        }

    def _has_passed(self, question: Message) -> bool:
        """Whether this process has continued beyond the collective at which the asker waits."""
        at = question.get("collectives_begun")
        return self.is_finished or (isinstance(at, int) and self.collectives_begun > at)

    def _describe_number(self, number: int) -> str | None:
        """The text of the step with a number, None where it is forgotten."""
        back = self.steps - number
        if number <= 0 or back >= len(self._last_steps):
            return None
        return describe_step(self._last_steps[-1 - back])


def answer_problem(kind: str, message: Mapping[str, object]) -> str | None:
    """Return which part an answer lacks, None when it is complete.

    >>> answer_problem("file", {"kind": "file", "done": 1})
    "its answer has no usable 'done'"
    """
    for name, types in _ANSWERS[kind].items():
        # By its exact type: bool is an int in Python.
        if type(message.get(name)) not in types:
            return f"its answer has no usable {name!r}"
    return None


def describe_step(step: Step) -> str:
    """Return a step as text.

    >>> describe_step(("train", ((8, 3), (8,)))), describe_step(("train", None))
    ('train on (8, 3), (8,)', 'train: the end of the data')
    >>> describe_step(("a call of `fit`", ()))
    'a call of `fit`'
    """
    kind, shapes = step
    if shapes is None:
        return f"{kind}: the end of the data"
    return f"{kind} on {', '.join(map(str, shapes))}" if shapes else kind
