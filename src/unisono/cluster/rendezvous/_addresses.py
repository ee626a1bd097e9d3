"""Where process 0 listens, and where it is reached.

Tests: tests/unit/cluster/test_protocol.py.
"""

from __future__ import annotations

import collections
import ipaddress
import socket
import threading
from collections.abc import Callable, Collection, Iterable, Sequence

from unisono.cluster_resolver._spec import as_ip


def interfaces(host: str, resolved: Sequence[str], hosts: Collection[str]) -> tuple[str, ...]:
    """Return the IP addresses to try for process 0: it listens on the first that its machine has.

    Args:
        resolved: the IP addresses of that name, as this machine resolves it.
        hosts: of all processes; an empty name for those that are not known.

    Returns:
        IP addresses, none when it must listen on all interfaces.

    >>> interfaces("localhost", ["127.0.0.1"], ["localhost", "10.0.0.2"])
    ('127.0.0.1',)
    >>> interfaces("node1", ["127.0.1.1"], ["node1", "node2"])
    ()
    """
    if host == "localhost" or host.endswith(".localhost") or as_ip(host):
        return tuple(resolved)
    if all(other == host for other in hosts):
        return tuple(resolved)
    # Debian maps the machine's own name to 127.0.1.1, which no other machine can reach:
    # https://www.debian.org/doc/manuals/debian-reference/ch05.en.html
    return tuple(ip for ip in resolved if not is_loopback(ip))


def reached_address(listening: str, arrivals: Sequence[str]) -> str:
    """Return the IP address at which the other processes reach process 0.

    Args:
        listening: the IP address at which it listens, `"0.0.0.0"` or `"::"` for all interfaces.
        arrivals: its own end of each process' connection.

    Returns:
        The address at which most of those on other machines arrived; a loopback address where there are none.

    >>> reached_address("::", ["::ffff:127.0.1.1", "::ffff:10.0.0.1"])
    '10.0.0.1'
    >>> reached_address("127.0.0.1", ["127.0.0.1"])
    '127.0.0.1'
    """
    if listening not in ("0.0.0.0", "::"):
        return listening
    plain = [ip.removeprefix("::ffff:") for ip in arrivals]
    counted = collections.Counter([ip for ip in plain if not is_loopback(ip)] or plain)
    return counted.most_common(1)[0][0] if counted else listening


def resolve(host: str) -> list[str]:
    """Return the IP addresses of a host, in the order of preference.

    Raises:
        OSError: the name cannot be resolved.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_loopback(ip: str) -> bool:
    """Return whether only this machine reaches an IP address."""
    return ipaddress.ip_address(ip.partition("%")[0]).is_loopback


class UnknownNames:
    """The names of hosts that this machine cannot resolve, looked up in a thread: a lookup may be slow.

    Args:
        hosts: names and IP addresses of the hosts; addresses need no lookup.
        say: is given each name that was not found, in that thread.

    >>> UnknownNames(["10.0.0.1", "localhost"]).names
    ()
    """

    def __init__(self, hosts: Iterable[str], say: Callable[[str], object] = lambda name: None) -> None:
        self._say = say
        wanted = [host for host in dict.fromkeys(hosts) if host != "localhost" and not as_ip(host)]
        #: Those without an address so far.
        self.names: tuple[str, ...] = ()
        if wanted:
            threading.Thread(target=self._look, args=(wanted,), name="unisono-names", daemon=True).start()

    def _look(self, wanted: Sequence[str]) -> None:
        for name in wanted:
            try:
                resolve(name)
            except socket.gaierror:
                self.names = (*self.names, name)
                self._say(name)
            except OSError:
                # The lookup itself has failed, which says nothing about the name.
                continue
