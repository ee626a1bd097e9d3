"""Which ports Unisono takes where a firewall lets only some through."""

import errno
import socket

import pytest

from unisono import ClusterError, InvalidArgumentError
from unisono.launcher._processes import free_ports
from unisono.rpc import _ports
from unisono.rpc._transport._local import free_port


@pytest.fixture
def pair(monkeypatch):
    """Two ports side by side that no program uses, as UNISONO_PORTS."""
    for first in _ports.in_random_order(range(20_000, 30_000)):
        try:
            for port in (first, first + 1):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            monkeypatch.setenv(_ports.VARIABLE, f"{first}-{first + 1}")
            return {first, first + 1}
    return None


def test_ports_are_taken_from_the_range_until_none_is_free(pair):
    first = _ports.listen("127.0.0.1")
    with first, _ports.listen("127.0.0.1") as second:
        assert {first.getsockname()[1], second.getsockname()[1]} == pair
        with pytest.raises(ClusterError, match=r"A port of UNISONO_PORTS must be free on 127\.0\.0\.1"):
            _ports.listen("127.0.0.1")
        with pytest.raises(ClusterError, match=f"1 ports from {min(pair)} to {max(pair)} must be free"):
            free_ports(1)
    assert set(free_ports(2)) == pair
    assert free_port() in pair


def test_without_a_range_the_system_chooses():
    with _ports.listen("127.0.0.1") as one, _ports.listen("127.0.0.1") as other:
        assert one.getsockname() != other.getsockname()
    with pytest.raises(OSError, match="assign"):
        _ports.listen("192.0.2.1")


@pytest.mark.parametrize("text", ["40000", "a-b", "0-10", "200-100", "1-65536", "-"])
def test_what_is_no_range_is_an_error(text):
    with pytest.raises(InvalidArgumentError, match=r"first and the last port of a range\. Received: "):
        _ports.ports_to_choose_from(environ={_ports.VARIABLE: text})
