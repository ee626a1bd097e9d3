"""The processes of a cluster exchange their addresses, and find out who cannot be reached, before they train.

All of them compute the same text from what all have posted, so that the log of each one shows it.

Tests: tests/unit/cluster/test_introduction.py, tests/cluster/test_two_hosts.py.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from unisono._errors import ClusterError
from unisono.cluster.liveness._status_server import AbsentError, EndedError, Peers

#: The ports that the kernel gives to programs which do not ask for one, as Gloo.
_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


class TextBoard(Protocol):
    """Where processes post texts for each other."""

    def post(self, key: str, text: str) -> None: ...

    def read(self, key: str, seconds: float) -> str | None: ...


def introduce(board: TextBoard, peers: Peers, seconds: float) -> Peers:
    """Exchange the addresses of all processes, and check that each one reaches each other one.

    Args:
        peers: of this process, with its own address at its place.

    Returns:
        The peers with the addresses of all.

    Raises:
        ClusterError: in every process, when one is missing or cannot reach another one.
    """
    every = _exchange(board, peers, "listens", peers.addresses[peers.own], seconds)
    peers = dataclasses.replace(peers, addresses=tuple(every))
    answers = peers.ask_all({"kind": "state"}, peers.others)
    failures = {p: _reason(answer) for p, answer in answers.items() if isinstance(answer, AbsentError)}
    found = _exchange(board, peers, "misses", json.dumps(failures), seconds + peers.timeout)
    if lines := unreachable(peers, [json.loads(text) for text in found]):
        board.post(_key("read", peers.own), "")
        # The board ends with the first process: the others must have read it.
        for process in peers.others if peers.own == 0 else []:
            board.read(_key("read", process), peers.timeout)
        raise ClusterError(unreachable_text(lines))
    return peers


def _key(what: str, process: int) -> str:
    return f"unisono/{what}/{process}"


def _reason(error: AbsentError) -> str:
    # A process that has published its address runs: a machine of the same address refuses in its place.
    return "the connection is refused" if isinstance(error, EndedError) else str(error)


def _exchange(board: TextBoard, peers: Peers, what: str, text: str, seconds: float) -> list[str]:
    board.post(_key(what, peers.own), text)
    found = [board.read(_key(what, process), seconds) for process in range(len(peers.names))]
    missing = [name for name, text in zip(peers.names, found, strict=True) if text is None]
    if missing:
        raise ClusterError(
            f"All workers must introduce themselves within {seconds:g} s. Received: nothing from "
            f"{', '.join(missing[:16])}, asked for at {peers.names[0]}. The log of the worker that ended or "
            "stopped says why."
        )
    return [text for text in found if text is not None]


def unreachable(peers: Peers, failures: Sequence[dict[str, str]]) -> list[str]:
    """Return a sentence for each connection that could not be made.

    Args:
        failures: of each process: the numbers of those that it did not reach, and why.
    """
    return [
        f"{peers.names[i]} does not reach {peers.addresses[int(j)]}, "
        f"which {peers.names[int(j)]} has published: {why}"
        for i, found in enumerate(failures)
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
