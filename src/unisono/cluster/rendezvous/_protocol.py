"""The messages of a rendezvous, and the decisions that follow from them: pure.

A message is a frame: four letters, a version, a length (these ten bytes are the same in every
version) and a JSON object. Every function decides from its arguments; `_server` and `_client` carry it out.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from unisono._errors import ClusterError, InvalidArgumentError
from unisono.cluster.rendezvous._mismatch import differences, shortened
from unisono.cluster_resolver._spec import split_address

#: Raised when the meaning of a message changes.
VERSION = 4
#: The longest message, in bytes: what an unknown peer can make a process keep in memory. A roster of a
#: thousand processes, of which 16 are listed, has 4 KiB.
MAX_BYTES = 1 << 20
#: Seconds beyond its own time for which a connected process waits for process 0's decision, so that all raise
#: the same error; process 0 may have started a little later.
GRACE_SECONDS = 5.0

#: Seconds after which each process that waits says for what, once: a line within ten.
REMIND_SECONDS = 8.0

#: A JSON object with a `"kind"`.
Message = Mapping[str, Any]

_MAGIC = b"UNIM"
_HEADER = struct.Struct(">4sHI")
_SCALARS = (str, int, float, bool, type(None))
#: Lines of a list in a message: a cluster may have a thousand processes.
_MAX_LINES = 16
_MAX_CHARACTERS = 120


class UnknownPeerError(ClusterError):
    """The other end of a connection is not a process of this cluster."""


class OtherVersionError(UnknownPeerError):
    """The other end is Unisono, but uses another version of the protocol."""


def frame(message: Message) -> bytes:
    """Return a message as bytes."""
    body = json.dumps(message).encode()
    if len(body) > MAX_BYTES:
        raise InvalidArgumentError(
            f"A message between processes must fit into {MAX_BYTES} bytes. Received: {len(body)} bytes. "
            "Send a digest of a long text, such as `hashlib.sha256(text.encode()).hexdigest()`."
        )
    return _HEADER.pack(_MAGIC, VERSION, len(body)) + body


def take_frame(inbox: bytearray, limit: int = MAX_BYTES) -> dict[str, Any] | None:
    """Remove the first message from the bytes received so far, and return it.

    Raises:
        OtherVersionError: when the sender uses another version of the protocol.
        UnknownPeerError: as soon as the bytes cannot become a message.

    >>> inbox = bytearray(frame({"kind": "hello"}))
    >>> take_frame(inbox[:5]), take_frame(inbox)
    (None, {'kind': 'hello'})
    """
    if inbox[:4] != _MAGIC[: len(inbox)]:
        raise UnknownPeerError(f"it sent {bytes(inbox[:24])!r}, which is not a message of Unisono")
    if len(inbox) < _HEADER.size:
        return None
    _, version, length = _HEADER.unpack_from(inbox)
    # Before the length, which is the only other thing that every version has in common.
    if version != VERSION:
        raise OtherVersionError(f"it uses version {version} of the protocol, this process version {VERSION}")
    if length > limit:
        raise UnknownPeerError(f"it announced {length} bytes, and a message has at most {limit}")
    if len(inbox) < _HEADER.size + length:
        return None
    body = bytes(inbox[_HEADER.size : _HEADER.size + length])
    del inbox[: _HEADER.size + length]
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UnknownPeerError(f"its message is not JSON: {type(error).__name__}") from error
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise UnknownPeerError("its message is not an object with a kind")
    return message


@dataclasses.dataclass(frozen=True)
class Member:
    """A process that has connected, as it describes itself.

    Args:
        process_id: its number in the cluster, from 0.
        token: random, made when it begins its rendezvous: distinguishes two processes of one number.
        config: what must be equal in all processes.
    """

    process_id: int
    host: str
    pid: int
    token: str
    config: Mapping[str, Any]
    address: str = ""

    @property
    def generation(self) -> int | None:
        """The cluster's restart count; None without a supervisor."""
        generation = self.config.get("generation")
        return generation if isinstance(generation, int) else None

    def __str__(self) -> str:
        return f"host {self.host}, pid {self.pid}"


def hello(member: Member) -> dict[str, Any]:
    """Return the first message of a process; its address is seen by the other end."""
    message = dataclasses.asdict(member)
    del message["address"]
    return {"kind": "hello", **message}


def read_hello(message: Message, address: str) -> Member:
    """Return the process that sent a hello from an IP address."""
    keys = [field.name for field in dataclasses.fields(Member) if field.name != "address"]
    if message.get("kind") != "hello" or set(message) != {"kind", *keys}:
        raise UnknownPeerError(f"its first message is not a hello but {shortened(str(sorted(message)), 80)}")
    # By the exact type: bool is an int in Python.
    numbers = all(type(message[key]) is int for key in ("process_id", "pid"))
    names = all(_is_name(message[key]) for key in ("host", "token"))
    if not (numbers and names) or config_problem(message["config"]):
        raise UnknownPeerError(f"its hello cannot be used: {shortened(str(dict(message)), _MAX_CHARACTERS)}")
    return Member(**{key: message[key] for key in keys}, address=address)


def read_lines(message: Message, key: str) -> list[str]:
    """Return a field of a message that is a list of texts."""
    lines = message.get(key)
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise UnknownPeerError(f"its message has no {key}")
    return lines


def _is_name(value: object) -> bool:
    # Names are printed in logs, where control characters could pretend to be other lines.
    return isinstance(value, str) and 0 < len(value) <= 255 and value.isprintable()


def config_problem(config: object) -> str | None:
    """Return why a configuration cannot be compared, None when it can.

    >>> config_problem({"devices": [1]})
    "'devices' is of type list"
    """
    if not isinstance(config, Mapping):
        return f"it is of type {type(config).__name__}"
    for name, value in config.items():
        if not _is_name(name):
            return f"{shortened(repr(name), 80)} is not a name"
        if not isinstance(value, _SCALARS):
            return f"{name!r} is of type {type(value).__name__}"
    if "generation" in config and type(config["generation"]) is not int:
        return f"'generation' is {config['generation']!r}"
    return None


@dataclasses.dataclass(frozen=True)
class RendezvousState:
    """What process 0 knows of a rendezvous.

    Args:
        address_of: the addresses of the first processes; of all where they are known.
        began_at: when the rendezvous began, in seconds of a monotonic clock.
        disconnected: the last process of each number that lost its connection again.
        rejections: which connections were rejected, and why.
        newest: the newest generation that has connected, None without a supervisor.
        unknown_names: of hosts, which process 0's machine cannot resolve.
    """

    num_processes: int
    address_of: tuple[str, ...]
    start_up: float
    began_at: float
    connected: Mapping[int, Member]
    disconnected: Mapping[int, Member] = dataclasses.field(default_factory=dict)
    rejections: tuple[str, ...] = ()
    newest: int | None = None
    unknown_names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Admission:
    """The decision about a process that has sent its hello.

    Args:
        rejected: why the process is rejected, None when it is admitted.
        evicted: the processes that must end because of it, and why; with process 0 the rendezvous ends.
    """

    state: RendezvousState
    rejected: str | None = None
    evicted: Mapping[int, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Proceed:
    """All are connected and agree."""


@dataclasses.dataclass(frozen=True)
class Abort:
    """The cluster cannot start: the error that every process raises."""

    reason: str


def open_rendezvous(
    own: Member, num_processes: int, address_of: Sequence[str], start_up: float, began_at: float
) -> RendezvousState:
    """Return the state in which process 0 waits for the others."""
    connected = {own.process_id: own}
    return RendezvousState(
        num_processes, tuple(address_of), start_up, began_at, connected, newest=own.generation
    )


def admit(state: RendezvousState, member: Member) -> Admission:
    """Decide about a process that has sent its hello."""
    if not 0 <= member.process_id < state.num_processes:
        return _reject(state, member, _out_of_range_text(state, member))
    newest, own = state.newest, member.generation
    if newest is not None and own is not None and own < newest:
        return _reject(state, member, _outdated_text(own, newest))
    # Only the first process of a newer generation finds older ones: the others need not look through all.
    is_newer = own is not None and newest is not None and own > newest
    evicted = {
        process: _outdated_text(other.generation, own)
        for process, other in (state.connected.items() if is_newer else ())
        if own is not None and other.generation is not None and other.generation < own
    }
    connected = dict(state.connected)
    for process in evicted:
        del connected[process]
    first = connected.get(member.process_id)
    # With the same token it is the same process, which lost its connection and retries.
    if first is not None and first.token != member.token:
        return _reject(state, member, _duplicate_text(first, member))
    disconnected = dict(state.disconnected)
    disconnected.pop(member.process_id, None)
    connected[member.process_id] = member
    newest = own if newest is None or own is not None else newest
    after = dataclasses.replace(state, connected=connected, disconnected=disconnected, newest=newest)
    return Admission(after, evicted=evicted)


def disconnect(state: RendezvousState, process_id: int) -> RendezvousState:
    """Return the state after a process lost its connection; another may connect in its place."""
    connected = dict(state.connected)
    disconnected = {**state.disconnected, process_id: connected.pop(process_id)}
    return dataclasses.replace(state, connected=connected, disconnected=disconnected)


def note_rejection(state: RendezvousState, note: str) -> RendezvousState:
    """Return the state with a note of a rejected connection; the last few are kept."""
    notes = (*(other for other in state.rejections if other != note), note)
    return dataclasses.replace(state, rejections=notes[-_MAX_LINES:])


def outcome(state: RendezvousState, now: float) -> Proceed | Abort | None:
    """Decide whether the cluster can start; None while process 0 waits."""
    if len(state.connected) < state.num_processes:
        late = now >= state.began_at + state.start_up
        return Abort(missing_text(roster(state), state.start_up)) if late else None
    configs = {process: member.config for process, member in sorted(state.connected.items())}
    wrong = differences(configs)
    return Abort(_mismatch_text(state, wrong)) if wrong else Proceed()


def roster(state: RendezvousState) -> list[str]:
    """Return lines that list which processes are connected, missing, and rejected."""
    count, known = state.num_processes, state.connected
    present = filter(known.__contains__, range(count))
    connected = (f"connected: {_name(state, p)} ({known[p]})" for p in present)
    absent = itertools.filterfalse(known.__contains__, range(count))
    ended = state.disconnected
    missing = (f"missing: {_name(state, p)}{_departure(ended.get(p))}{_unknown(state, p)}" for p in absent)
    return [*_first(connected, len(known)), *_first(missing, count - len(known)), *state.rejections]


def _name(state: RendezvousState, process: int) -> str:
    if process < len(state.address_of):
        return f"process {process} at {state.address_of[process]}"
    member = state.connected.get(process)
    return f"process {process}" + (f" from {member.address}" if member and member.address else "")


def _unknown(state: RendezvousState, process: int) -> str:
    if not state.unknown_names or process >= len(state.address_of):
        return ""
    is_unknown = split_address(state.address_of[process])[0] in state.unknown_names
    return ", a name that the machine of process 0 does not know" if is_unknown else ""


def _departure(member: Member | None) -> str:
    if member is None:
        return ""
    return f", which connected ({member}), and ended or lost its connection before all were connected"


def _first(lines: Iterable[str], count: int) -> list[str]:
    """Return the first of so many lines; the others are not even made."""
    more = [f"… and {count - _MAX_LINES} more"] if count > _MAX_LINES else []
    return [*itertools.islice(lines, _MAX_LINES), *more]


def _reject(state: RendezvousState, member: Member, reason: str) -> Admission:
    note = f"rejected: process {member.process_id} ({member}): {reason}"
    return Admission(note_rejection(state, note), rejected=reason)


def _out_of_range_text(state: RendezvousState, member: Member) -> str:
    return (
        f"A process number must be from 0 to {state.num_processes - 1} in a cluster of "
        f"{state.num_processes}. Received: process {member.process_id} ({member}). "
        "Give every process the same cluster in TF_CONFIG, and a task of it."
    )


def _duplicate_text(first: Member, second: Member) -> str:
    return (
        f"Each process must have a number of its own. Received: process {first.process_id} twice, "
        f"{first} and {second}. Give each its own task 'index' in TF_CONFIG, or end the one that is left "
        "from an earlier run."
    )


def _outdated_text(own: int | None, newest: int | None) -> str:
    return (
        "A process must be of the newest generation of its cluster. Received: this process is of generation "
        f"{own}, the cluster is at {newest}. End this process: it was replaced."
    )


def _mismatch_text(state: RendezvousState, wrong: list[str]) -> str:
    who = (f"{_name(state, p)} ({member})" for p, member in sorted(state.connected.items()))
    head = "All processes of a cluster must be started with the same configuration. Received:"
    return _listed(head, _first(wrong, len(wrong)), _first(who, len(state.connected)))


def missing_text(lines: Sequence[str], start_up: float) -> str:
    """Return the error of a cluster that is not complete in time."""
    return _listed(
        f"All processes of a cluster must connect within {start_up:g} s. Received:",
        lines,
        [
            "Start the missing ones, or find in their logs why they ended; "
            f"`Timeouts(start_up={2 * math.ceil(start_up)})` waits longer."
        ],
    )


def overdue_text(lines: Sequence[str], start_up: float) -> str:
    """Return the error of a process whose time is over, by the last roster that it has received."""
    if any(line.startswith("missing") for line in lines):
        return missing_text(lines, start_up)
    head = (
        f"Process 0 must send what it decides within {start_up + GRACE_SECONDS:g} s. Received: nothing since "
        "this roster, though all have connected:"
    )
    return _listed(
        head, lines, ["See the log of process 0, and whether this process or that one was stopped."]
    )


def _listed(head: str, lines: Sequence[str], tail: Sequence[str]) -> str:
    return "\n".join([head, *(f"  - {line}" for line in lines), *tail])


def unreachable_text(address: str, trouble: str, attempts: int, start_up: float) -> str:
    """Return the error of a process that process 0 did not answer."""
    return (
        f"Process 0 must answer at its address within {start_up:g} s. Received: cannot reach {address}: "
        f"{trouble} ({attempts} attempts). Start process 0, check that its log shows no error and that no "
        f"firewall blocks the port, or wait longer with `Timeouts(start_up={2 * math.ceil(start_up)})`."
    )


def waiting_text(address: str, trouble: str, remaining: float) -> str:
    """Return the line of a process that does not reach process 0 and tries again."""
    return (
        f"Waiting for process 0, the first task of the cluster: {address} cannot be reached ({trouble}). It "
        f"is tried for another {remaining:.0f} s. See that it has started, and whether its address is right: "
        "the host of the first task in TF_CONFIG, `getent hosts` for a name, the firewall for a port."
    )


def absent_text(process: int, lines: Sequence[str]) -> str:
    """Return the line of a process that waits for others.

    Args:
        process: its number.
        lines: of the roster.
    """
    missing = "; ".join(line for line in lines if line.startswith("missing"))
    return f"Process {process} waits for all processes to connect; {missing or 'process 0 compares them'}"


def unknown_name_text(name: str) -> str:
    """Return the line about the host of another process, whose name is not known."""
    return (
        f"The name {name!r} of a host of the cluster is not known on this machine, at least not yet. See "
        f"`getent hosts {name}`; write the name as it is, or its IP address, into TF_CONFIG of every task."
    )


def other_version_text(address: str, problem: str) -> str:
    """Return the error of a process that found another version of Unisono at an address."""
    return (
        "All processes of a cluster must use one version of the start-up protocol. "
        f"Received: the process at {address}: {problem}. Install one version of unisono for every process."
    )


def retry_delay(attempt: int) -> float:
    """Return how many seconds to wait after a failed attempt, counted from 0, to reach process 0.

    The delay grows to a second: processes of one launcher find each other at once, and a thousand processes
    that wait for a late process 0 do not flood its machine.
    """
    return min(1.0, 0.05 * 1.5 ** min(attempt, 20))
