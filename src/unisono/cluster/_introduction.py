"""The processes of a cluster exchange their addresses, and find out who cannot be reached, before they train.

All of them compute the same text from what all have posted, so that the log of each one shows it.

Tests: tests/unit/cluster/test_introduction.py, tests/cluster/test_two_hosts.py.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from unisono._errors import ClusterError
from unisono.cluster._jax_internals import Board
from unisono.cluster.liveness._status_server import AbsentError, EndedError, Peers, UnreachableError

#: Seconds for each text, also when the time is over: those that were posted are not called missing.
_LEAST_SECONDS = 1.0
#: Missing processes that an error names.
_MOST_NAMED = 16
#: Seconds for which the others wait longer than process 0, which says who is missing.
_GRACE_SECONDS = _MOST_NAMED * _LEAST_SECONDS + 5.0
#: The ports that the kernel gives to programs which do not ask for one, as Gloo.
_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def introduce(board: Board, peers: Peers, seconds: float) -> Peers:
    """Exchange the addresses of all processes, and check that each one reaches each other one.

    Raises:
        ClusterError: in every process, when one is missing or cannot reach another one.
    """
    found = _exchange(board, peers, "listens", peers.addresses[peers.own], seconds)
    every = tuple(found[process] for process in range(len(peers.names)))
    peers = dataclasses.replace(peers, addresses=every)
    failures = {p: _reason(error) for p, error in _not_reached(peers, seconds).items()}
    # Most have none, of which nothing is sent.
    text = json.dumps(failures) if failures else ""
    found = _exchange(board, peers, "misses", text, seconds + 2 * peers.timeout)
    if lines := unreachable(peers, {process: json.loads(text) for process, text in found.items()}):
        _end_with_all(board, peers, "misses", peers.others)
        raise ClusterError(unreachable_text(lines))
    return peers


def _not_reached(peers: Peers, seconds: float) -> dict[int, AbsentError]:
    """Return who does not answer, and why; one that accepts connections may be busy, and has more time."""
    deadline = time.monotonic() + seconds
    found: dict[int, AbsentError] = {}
    asked = peers.others
    while asked:
        answers = peers.ask_all({"kind": "state"}, asked)
        absent = {p: answer for p, answer in answers.items() if isinstance(answer, AbsentError)}
        final = AbsentError if time.monotonic() >= deadline else (EndedError, UnreachableError)
        asked = [process for process, error in absent.items() if not isinstance(error, final)]
        found |= {p: error for p, error in absent.items() if p not in asked}
    return found


def _key(what: str, process: int | str) -> str:
    return f"unisono/{what}/{process}"


def _reason(error: AbsentError) -> str:
    # A process that has published its address runs: a machine of the same address refuses in its place.
    return "the connection is refused" if isinstance(error, EndedError) else str(error)


def _exchange(board: Board, peers: Peers, what: str, text: str, seconds: float) -> dict[int, str]:
    """Return the texts of all processes that have one.

    Process 0 reads them, and posts one text of all for the others: so the board has a few messages for each
    process, and not one for each pair.
    """
    deadline = time.monotonic() + seconds
    board.post(_key(what, peers.own), text, seconds)
    if peers.own:
        joint = board.read(_key(what, "of all"), seconds + _GRACE_SECONDS)
        if joint is None:
            raise _missing_error(peers, [0], seconds)
        found, missing = json.loads(joint)
    else:
        found, missing = _collect(board, peers, what, deadline)
        board.post(_key(what, "of all"), json.dumps([found, missing]), seconds)
    if missing:
        _end_with_all(board, peers, what, [int(process) for process in found])
        raise _missing_error(peers, missing, seconds)
    return {int(process): text for process, text in found.items() if text}


def _collect(board: Board, peers: Peers, what: str, deadline: float) -> tuple[dict[str, str], list[int]]:
    """Read the texts of all processes; return those that are there, and the processes without."""
    found: dict[str, str] = {}
    missing: list[int] = []
    for process in range(len(peers.names)):
        # Each that is missing takes a second: where many are, the first ones will do for an error.
        if len(missing) < _MOST_NAMED:
            text = board.read(_key(what, process), max(_LEAST_SECONDS, deadline - time.monotonic()))
            if text is None:
                missing.append(process)
            else:
                found[str(process)] = text
    return found, missing


def _missing_error(peers: Peers, missing: Sequence[int], seconds: float) -> ClusterError:
    return ClusterError(
        f"All workers must introduce themselves within {seconds:g} s. Received: nothing from "
        f"{', '.join(peers.names[process] for process in missing)}, asked for at {peers.names[0]}. The log "
        "of the worker that ended or stopped says why."
    )


def _end_with_all(board: Board, peers: Peers, what: str, others: Sequence[int]) -> None:
    """Let process 0, with which the board ends, wait until the others have read what it has posted."""
    board.post(_key(f"read {what}", peers.own), "", peers.timeout)
    deadline = time.monotonic() + peers.timeout
    for process in others if peers.own == 0 else []:
        board.read(_key(f"read {what}", process), max(0.01, deadline - time.monotonic()))


def unreachable(peers: Peers, failures: Mapping[int, dict[str, str]]) -> list[str]:
    """Return a sentence for each connection that could not be made."""
    return [
        f"{peers.names[i]} does not reach {peers.addresses[int(j)]}, "
        f"which {peers.names[int(j)]} has published: {why}"
        for i, found in failures.items()
        for j, why in found.items()
    ]


def unreachable_text(lines: Sequence[str]) -> str:
    """Return the error of processes that do not reach each other, with what to write."""
    return (
        "Every worker must be able to connect to every other one. "
        f"Received: {'; '.join(lines[:16])}. {how_to_connect()}"
    )


def how_to_connect() -> str:
    """Return what to write where processes do not reach each other."""
    ports = "-".join(_PORTS.read_text().split()) if _PORTS.exists() else "of outgoing connections"
    return (
        "Name the network that connects the hosts, such as UNISONO_INTERFACE=eth0 or "
        "`CommunicationOptions(interface='10.0.0.0/24')`, or write their addresses in it in TF_CONFIG; and "
        f"let the hosts connect to each other's ports {ports} (`sysctl net.ipv4.ip_local_port_range`)."
    )
