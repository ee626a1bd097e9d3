"""What processes tell each other before they compute together, and what follows from it: pure.

A message is a frame: four letters, a version, a length (these ten bytes are the same in every
version) and a JSON object. Every function decides from its arguments; `_preflight` carries it out.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import math
import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from unisono._errors import ClusterError, InvalidArgumentError, InvalidTypeError

# Re-exported for importers of this module.
from unisono.cluster.rendezvous._mismatch import differences as differences  # noqa: PLC0414
from unisono.cluster.rendezvous._mismatch import shortened

#: Raised when the meaning of a message changes.
VERSION = 3
#: The longest message, in bytes: what a stranger can make a process keep in memory.
MAX_BYTES = 1 << 20
#: Seconds that a process which process 0 knows waits beyond its own time for process 0's verdict,
#: so that all tell the same; process 0 may have started a little later.
GRACE_SECONDS = 5.0

#: A JSON object with a `"kind"`.
Message = Mapping[str, Any]

_MAGIC = b"UNIM"
_HEADER = struct.Struct(">4sHI")
_SCALARS = (str, int, float, bool, type(None))
#: Lines of a list in a message; a cluster may have a thousand processes.
_LINES = 16
_CHARACTERS = 120


class UnknownPeerError(ClusterError):
    """The other end of a connection is no process of this cluster."""


class OtherVersionError(UnknownPeerError):
    """The other end is Unisono, but of a version that speaks differently."""


def frame(message: Message) -> bytes:
    """Return a message as bytes.

    Raises:
        InvalidArgumentError: when it is longer than `MAX_BYTES`.
    """
    body = json.dumps(message).encode()
    if len(body) > MAX_BYTES:
        raise InvalidArgumentError(
            f"What a process tells the others must fit into {MAX_BYTES} bytes. Received: {len(body)} bytes. "
            "Tell a digest of a long text, such as `hashlib.sha256(text.encode()).hexdigest()`."
        )
    return _HEADER.pack(_MAGIC, VERSION, len(body)) + body


def take_frame(inbox: bytearray, limit: int = MAX_BYTES) -> dict[str, Any] | None:
    """Remove the first message from the bytes that have come, and return it.

    Args:
        inbox: the bytes so far; the message's are removed.
        limit: bytes that a message may have.

    Returns:
        The message, or None while it is not complete.

    Raises:
        OtherVersionError: when the sender is another version of Unisono.
        UnknownPeerError: as soon as the bytes cannot become a message.

    >>> inbox = bytearray(frame({"kind": "hello"}))
    >>> take_frame(inbox[:5]), take_frame(inbox)
    (None, {'kind': 'hello'})
    """
    if inbox[:4] != _MAGIC[: len(inbox)]:
        raise UnknownPeerError(f"it sent {bytes(inbox[:24])!r}, which is no message of Unisono")
    if len(inbox) < _HEADER.size:
        return None
    _, version, length = _HEADER.unpack_from(inbox)
    if version != VERSION:
        raise OtherVersionError(f"it speaks version {version} of the protocol, and this process {VERSION}")
    if length > limit:
        raise UnknownPeerError(f"it announced {length} bytes, and a message has at most {limit}")
    if len(inbox) < _HEADER.size + length:
        return None
    body = bytes(inbox[_HEADER.size : _HEADER.size + length])
    del inbox[: _HEADER.size + length]
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UnknownPeerError(f"its message is no JSON: {type(error).__name__}") from error
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise UnknownPeerError("its message is no object with a kind")
    return message


@dataclasses.dataclass(frozen=True)
class Member:
    """A process that has come, as it describes itself.

    Args:
        process_id: its number in the cluster, from 0.
        host: the name of its machine.
        pid: its number on that machine.
        token: random, made at the start of a meeting: tells two processes of one number apart.
        facts: what must be equal in all processes.
        address: from where it came, an IP address.
    """

    process_id: int
    host: str
    pid: int
    token: str
    facts: Mapping[str, Any]
    address: str = ""

    @property
    def generation(self) -> int | None:
        """How many times the cluster had been started anew, None where nobody counts."""
        generation = self.facts.get("generation")
        return generation if isinstance(generation, int) else None

    def __str__(self) -> str:
        return f"host {self.host}, pid {self.pid}"


def hello(member: Member) -> dict[str, Any]:
    """Return the message with which a process presents itself; its address the other end sees."""
    message = dataclasses.asdict(member)
    del message["address"]
    return {"kind": "hello", **message}


def read_hello(message: Mapping[str, Any], address: str) -> Member:
    """Return who presents itself with a message from an IP address.

    Raises:
        UnknownPeerError: when the message is no `hello`, or one of its fields has the wrong type.
    """
    keys = [field.name for field in dataclasses.fields(Member) if field.name != "address"]
    if message.get("kind") != "hello" or set(message) != {"kind", *keys}:
        raise UnknownPeerError(f"its first message is no greeting but {shortened(str(sorted(message)), 80)}")
    # bool is an int in Python, and no number of a process.
    numbers = all(type(message[key]) is int for key in ("process_id", "pid"))
    names = all(_is_name(message[key]) for key in ("host", "token"))
    if not (numbers and names) or facts_problem(message["facts"]):
        raise UnknownPeerError(f"its greeting cannot be used: {shortened(str(dict(message)), _CHARACTERS)}")
    return Member(**{key: message[key] for key in keys}, address=address)


def lines_of(message: Mapping[str, Any], key: str) -> list[str]:
    """Return a field of a message that is a list of texts.

    Raises:
        UnknownPeerError: when it is something else.
    """
    lines = message.get(key)
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise UnknownPeerError(f"its message has no {key}")
    return lines


def _is_name(value: object) -> bool:
    # Names are printed in logs, where control characters could pretend to be other lines.
    return isinstance(value, str) and 0 < len(value) <= 255 and value.isprintable()


def facts_problem(facts: object) -> str | None:
    """Return what is wrong with a process' facts, None when they can be compared.

    >>> facts_problem({"devices": [1]})
    "'devices' is of type list"
    """
    if not isinstance(facts, Mapping):
        return f"they are of type {type(facts).__name__}"
    for name, value in facts.items():
        if not _is_name(name):
            return f"{shortened(repr(name), 80)} is no name"
        if not isinstance(value, _SCALARS):
            return f"{name!r} is of type {type(value).__name__}"
    if "generation" in facts and type(facts["generation"]) is not int:
        return f"'generation' is {facts['generation']!r}"
    return None


def check_facts(facts: object) -> None:
    """Check what this process wants to tell.

    Raises:
        InvalidTypeError: when it is no flat dict of strings and numbers.
    """
    problem = facts_problem(facts)
    if problem:
        raise InvalidTypeError(
            "Facts must be a dict from names to strings and numbers, and a generation an integer. "
            f"Received: {problem}. Write `{{'jax': '0.10.2', 'devices': 2, 'generation': 0}}`."
        )


@dataclasses.dataclass(frozen=True)
class RendezvousState:
    """What process 0 knows of a meeting.

    Args:
        num_processes: how many there must be.
        address_of: the addresses of the first processes; of all where they are known.
        start_up: seconds for all to come.
        begun: when the meeting began, in seconds of a monotonic clock.
        here: the processes that are here, process 0 among them.
        may_differ: facts whose difference is a warning.
        left: the last that came as each process and went away again.
        notes: who was turned away, and why.
        newest: the newest generation that came, None where nobody counts.
    """

    num_processes: int
    address_of: tuple[str, ...]
    start_up: float
    begun: float
    here: Mapping[int, Member]
    may_differ: Collection[str] = ()
    left: Mapping[int, Member] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()
    newest: int | None = None


@dataclasses.dataclass(frozen=True)
class Listening:
    """What follows from an arrival.

    Args:
        meeting: what process 0 knows now.
        refused: why the one that came may not stay, None when it may.
        dismissed: who must leave because of it, and why; with process 0 the meeting ends.
    """

    meeting: RendezvousState
    refused: str | None = None
    dismissed: Mapping[int, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Proceed:
    """All are here and agree; `warnings` are differences that may be."""

    warnings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Abort:
    """The cluster cannot start: the error that every process raises."""

    text: str


def open_meeting(
    own: Member, num_processes: int, address_of: Sequence[str], start_up: float, begun: float
) -> RendezvousState:
    """Return the meeting in which process 0 waits for the others."""
    here = {own.process_id: own}
    return RendezvousState(num_processes, tuple(address_of), start_up, begun, here, newest=own.generation)


def arrive(meeting: RendezvousState, member: Member) -> Listening:
    """Decide what follows when a process presents itself."""
    if not 0 <= member.process_id < meeting.num_processes:
        return _refuse(meeting, member, _out_of_range(meeting, member))
    newest, own = meeting.newest, member.generation
    if newest is not None and own is not None and own < newest:
        return _refuse(meeting, member, _outdated(own, newest))
    dismissed = {
        process: _outdated(other.generation, own)
        for process, other in meeting.here.items()
        if own is not None and other.generation is not None and other.generation < own
    }
    here = {process: other for process, other in meeting.here.items() if process not in dismissed}
    first = here.get(member.process_id)
    # One process that comes again lost its connection.
    if first is not None and first.token != member.token:
        return _refuse(meeting, member, _twice(first, member))
    left = {process: other for process, other in meeting.left.items() if process != member.process_id}
    here[member.process_id] = member
    newest = own if newest is None or own is not None else newest
    return Listening(dataclasses.replace(meeting, here=here, left=left, newest=newest), dismissed=dismissed)


def leave(meeting: RendezvousState, process_id: int) -> RendezvousState:
    """Return the meeting after a process closed its connection; another may come in its place."""
    here = dict(meeting.here)
    left = {**meeting.left, process_id: here.pop(process_id)}
    return dataclasses.replace(meeting, here=here, left=left)


def turn_away(meeting: RendezvousState, note: str) -> RendezvousState:
    """Return the meeting with a note of somebody who could not take part; the last ones are kept."""
    notes = (*(other for other in meeting.notes if other != note), note)
    return dataclasses.replace(meeting, notes=notes[-_LINES:])


def verdict(meeting: RendezvousState, now: float) -> Proceed | Abort | None:
    """Decide whether the cluster can start; None while process 0 waits.

    Args:
        meeting: what process 0 knows.
        now: the time, in seconds of the clock of `meeting.begun`.
    """
    if len(meeting.here) < meeting.num_processes:
        late = now >= meeting.begun + meeting.start_up
        return Abort(missing_text(roster(meeting), meeting.start_up)) if late else None
    every = {process: member.facts for process, member in sorted(meeting.here.items())}
    firm = {p: {k: v for k, v in f.items() if k not in meeting.may_differ} for p, f in every.items()}
    soft = {p: {k: v for k, v in f.items() if k in meeting.may_differ} for p, f in every.items()}
    wrong = differences(firm)
    return Abort(_differ_text(meeting, wrong)) if wrong else Proceed(tuple(differences(soft)))


def roster(meeting: RendezvousState) -> list[str]:
    """Return lines that tell who is here, who is missing, and who was turned away."""
    here = [f"here: {_place(meeting, p)} ({member})" for p, member in sorted(meeting.here.items())]
    absent = [p for p in range(meeting.num_processes) if p not in meeting.here]
    missing = [f"missing: {_place(meeting, p)}{_went(meeting.left.get(p))}" for p in absent]
    return [*_cut(here), *_cut(missing), *meeting.notes]


def _place(meeting: RendezvousState, process: int) -> str:
    if process < len(meeting.address_of):
        return f"process {process} at {meeting.address_of[process]}"
    member = meeting.here.get(process)
    return f"process {process}" + (f" from {member.address}" if member and member.address else "")


def _went(member: Member | None) -> str:
    return (
        f", which came ({member}) and ended, or lost its connection, before all were here" if member else ""
    )


def _cut(lines: list[str]) -> list[str]:
    return lines if len(lines) <= _LINES else [*lines[:_LINES], f"… and {len(lines) - _LINES} more"]


def _refuse(meeting: RendezvousState, member: Member, text: str) -> Listening:
    note = f"turned away: process {member.process_id} ({member}): {text}"
    return Listening(turn_away(meeting, note), refused=text)


def _out_of_range(meeting: RendezvousState, member: Member) -> str:
    return (
        f"A process' number must be from 0 to {meeting.num_processes - 1} in a cluster of "
        f"{meeting.num_processes}. Received: process {member.process_id} ({member}). "
        "Give every process the same cluster, and a task of it, in TF_CONFIG."
    )


def _twice(first: Member, second: Member) -> str:
    return (
        f"Each process must have a number of its own. Received: process {first.process_id} twice, "
        f"{first} and {second}. Give each its own 'index' of the task in TF_CONFIG, or end the one "
        "that is left from an earlier run."
    )


def _outdated(own: int | None, newest: int | None) -> str:
    return (
        "A process must be of the newest generation of its cluster. Received: you are of generation "
        f"{own}, the cluster is at {newest}: end this process."
    )


def _differ_text(meeting: RendezvousState, wrong: list[str]) -> str:
    who = [f"{_place(meeting, p)} ({member})" for p, member in sorted(meeting.here.items())]
    return _listed("All processes of a cluster must be started alike. Received:", _cut(wrong), _cut(who))


def missing_text(lines: Sequence[str], start_up: float) -> str:
    """Return the error of a cluster that did not become complete in time.

    Args:
        lines: its `roster`.
        start_up: how long the processes waited, in seconds.
    """
    return _listed(
        f"All processes of a cluster must come within {start_up:g} s. Received:",
        lines,
        [
            "Start the missing ones, or read in their logs why they ended; "
            f"`Timeouts(start_up={2 * math.ceil(start_up)})` waits longer."
        ],
    )


def _listed(head: str, lines: Sequence[str], tail: Sequence[str]) -> str:
    return "\n".join([head, *(f"  - {line}" for line in lines), *tail])


def unreachable_text(address: str, trouble: str, attempts: int, start_up: float) -> str:
    """Return the error of a process that process 0 did not answer.

    Args:
        address: process 0's.
        trouble: what happened at the last attempt.
        attempts: how often it was tried.
        start_up: for how many seconds.
    """
    return (
        f"Process 0 must answer at its address within {start_up:g} s. Received: cannot reach {address}: "
        f"{trouble} ({attempts} attempts). Start process 0, see that its log shows no error and that no "
        f"firewall closes the port, or wait longer with `Timeouts(start_up={2 * math.ceil(start_up)})`."
    )


def other_version_text(address: str, problem: str) -> str:
    """Return the error of a process that meets another version of Unisono at an address."""
    return (
        "All processes of a cluster must speak one version of the start-up protocol. "
        f"Received: of {address}, {problem}. Install one version of unisono for every process."
    )


def pause(attempt: int) -> float:
    """Return how many seconds to wait after an attempt, counted from 0, to reach process 0."""
    return min(1.0, 0.05 * 1.5 ** min(attempt, 20))


def interfaces(host: str, resolved: Sequence[str], hosts: Collection[str]) -> tuple[str, ...]:
    """Return the IP addresses of which process 0 listens at the first that is its machine's.

    Args:
        host: of process 0's address.
        resolved: what the name means on this machine.
        hosts: of all processes; an empty name for those that are not known.

    Returns:
        IP addresses, none when it must listen at all interfaces.

    >>> interfaces("localhost", ["127.0.0.1"], ["localhost", "10.0.0.2"])
    ('127.0.0.1',)
    >>> interfaces("node1", ["127.0.1.1"], ["node1", "node2"])
    ()
    """
    if host == "localhost" or host.endswith(".localhost") or is_ip(host):
        return tuple(resolved)
    if all(other == host for other in hosts):
        return tuple(resolved)
    # Debian gives the machine's own name a loopback address, at which no other machine comes.
    return tuple(ip for ip in resolved if not ipaddress.ip_address(ip.partition("%")[0]).is_loopback)


def is_ip(host: str) -> bool:
    """Return whether a host is an IP address and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
