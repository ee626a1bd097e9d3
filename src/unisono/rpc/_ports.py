"""Ports of Unisono's own choice, from UNISONO_PORTS, which a firewall lets through."""

from __future__ import annotations

import errno
import random
import re
import socket
from collections.abc import Mapping

from unisono._errors import ClusterError, InvalidArgumentError
from unisono._system._environ import process_environ

VARIABLE = "UNISONO_PORTS"
#: The port 0: the system chooses.
_ANY = range(1)


def ports_to_choose_from(otherwise: range = _ANY, environ: Mapping[str, str] | None = None) -> range:
    """Return the ports of UNISONO_PORTS.

    >>> ports_to_choose_from(environ={"UNISONO_PORTS": "40000-40099"})
    range(40000, 40100)
    """
    text = (process_environ() if environ is None else environ).get(VARIABLE)
    if not text:
        return otherwise
    match = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text)
    first, last = map(int, match.groups()) if match else (0, 0)
    if not 0 < first <= last < 1 << 16:
        raise InvalidArgumentError(
            f"{VARIABLE} must be the first and the last port of a range. Received: {text!r}. Write "
            f"`export {VARIABLE}=40000-40099`."
        )
    return range(first, last + 1)


def in_random_order(ports: range) -> list[int]:
    """Return ports so that programs side by side try different ones first."""
    # Not from the global generator, which two programs may have seeded alike.
    return random.SystemRandom().sample(ports, len(ports))


def listen(ip: str, backlog: int | None = None) -> socket.socket:
    """Return a socket that listens at a port of UNISONO_PORTS, or of the system's choice.

    Raises:
        ClusterError: no port of the range is free.
        OSError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    ports = ports_to_choose_from()
    for port in in_random_order(ports):
        try:
            return socket.create_server((ip, port), family=family, backlog=backlog)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or ports == _ANY:
                raise
    raise ClusterError(
        f"A port of {VARIABLE} must be free on {ip}. Received: {ports[0]}-{ports[-1]}, all in use. Write a "
        "larger range, with three ports or more for each task of this host."
    )
