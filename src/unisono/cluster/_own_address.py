"""Which of this host's addresses the other processes connect to, for gradients and for questions.

The host's own name is no answer: Debian and Ubuntu map it to 127.0.1.1, and of several networks it names one.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

from unisono._errors import InvalidArgumentError
from unisono.cluster.liveness._status_server import own_ip
from unisono.cluster.rendezvous._addresses import is_loopback, resolve
from unisono.cluster_resolver._spec import as_ip, with_port

#: Linux: the IPv4 address of an interface, of which the request holds the name.
_SIOCGIFADDR = 0x8915


def own_address(wanted: str, task: str, reached: str) -> str:
    """Return the IP address of this host to which the other processes connect.

    Args:
        wanted: what the user says: the name of an interface, a network such as `"10.0.0.0/24"`, or an IP
            address; empty where nothing is said.
        task: the host of this task in the description of the cluster; empty where that is not known.

    >>> own_address("", "localhost", "127.0.0.1"), own_address("127.0.0.0/8", "", "127.0.0.1")
    ('127.0.0.1', '127.0.0.1')
    """
    if wanted:
        return _wanted_address(wanted)
    route = own_ip(with_port(reached, 1))
    named = [ip for ip in _addresses_of(task) if is_loopback(ip) == is_loopback(route)]
    return choose(named, route, [ip for ip in named if _is_own(ip)])


def choose(named: Sequence[str], route: str, own: Sequence[str]) -> str:
    """Return the address of this task: the one it is given, where this host has it.

    Args:
        named: what the task's host resolves to, in the order of preference.
        route: this host's address on the way to process 0.
        own: those of `named` that this host has.

    >>> choose(["10.1.0.2"], "10.0.0.2", ["10.1.0.2"]), choose(["203.0.113.9"], "10.0.0.2", [])
    ('10.1.0.2', '10.0.0.2')
    """
    if route in named or not own:
        return route
    same = [ip for ip in own if (":" in ip) == (":" in route)]
    return (same or list(own))[0]


def _wanted_address(wanted: str) -> str:
    with contextlib.suppress(OSError, ValueError):
        if as_ip(wanted):
            ip = wanted
        elif "/" in wanted:
            network = ipaddress.ip_network(wanted, strict=False)
            ip = own_ip(with_port(str(network[min(1, network.num_addresses - 1)]), 1))
            if ipaddress.ip_address(ip) not in network:
                ip = ""
        else:
            ip = _address_of_interface(wanted)
        if ip and _is_own(ip):
            return ip
    names = ", ".join(name for _, name in socket.if_nameindex())
    raise InvalidArgumentError(
        "The interface over which processes connect must be one of this host's. Received: "
        f"{wanted!r} on {socket.gethostname()}, which has {names}. Write the name of one of them, an IP "
        "address of this host, or a network, the same text on all hosts, such as '10.0.0.0/24': in "
        "`CommunicationOptions(interface=…)`, `unisono launch --interface` or UNISONO_INTERFACE."
    )


def _address_of_interface(name: str) -> str:
    """The first IPv4 address of an interface of Linux, or else its first global IPv6 address."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        digits, _, _, scope, _, interface = line.split()
        if interface == name and scope == "00":
            return str(ipaddress.ip_address(bytes.fromhex(digits)))
    return ""


def _addresses_of(host: str) -> list[str]:
    try:
        return resolve(host.strip("[]")) if host else []
    except OSError:  # a name that only the other hosts can resolve
        return []


def _is_own(ip: str) -> bool:
    """Return whether this host has an IP address."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.bind((ip, 0))
        return True
    return False
