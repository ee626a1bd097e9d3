"""Hosts on this machine behave as machines on a network do."""

import subprocess
import sys

import pytest

from tests.hosts import Hosts, require_hosts

SERVER = """
import socket
server = socket.create_server(("::", 5000), family=socket.AF_INET6, dualstack_ipv6=True)
print("listening", flush=True)
while True:
    server.accept()[0].sendall(b"x" * 100_000)
"""
CLIENT = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], 5000), float(sys.argv[2])) as sock:
        received = 0
        while data := sock.recv(1 << 16):
            received += len(data)
    print(received)
except OSError as error:
    print(type(error).__name__)
"""


@pytest.fixture(scope="module")
def hosts():
    require_hosts()
    with Hosts(2, rate="100mbit", switches=2) as found:
        server = found.start(1, sys.executable, "-c", SERVER, stdout=subprocess.PIPE)
        server.stdout.readline()
        yield found
        server.kill()
        server.communicate()


def ask(hosts, address, seconds=20.0):
    return hosts.run(0, sys.executable, "-c", CLIENT, address, seconds).strip()


def test_a_host_has_its_own_name_which_only_it_can_reach(hosts):
    assert hosts.run(1, "hostname").strip() == "h1"
    assert hosts.run(1, "getent", "hosts", "h1").split() == ["127.0.1.1", "h1"]
    assert ask(hosts, "127.0.1.1") == "ConnectionRefusedError"


@pytest.mark.parametrize(("switch", "version"), [(0, 4), (1, 4), (1, 6)])
def test_hosts_reach_each_other_on_each_switch(hosts, switch, version):
    before = hosts.traffic(0, switch)[0]
    assert ask(hosts, hosts.address(1, switch, version)) == "100000"
    assert 100_000 < hosts.traffic(0, switch)[0] - before < 120_000


def test_packets_are_lost_one_way_and_for_some_ports(hosts):
    at = hosts.address(1), hosts.address(1, version=6)
    with hosts.dropped(0, 1):
        assert [ask(hosts, each, 0.5) for each in at] == ["TimeoutError"] * 2
    with hosts.dropped(0, 1, "5000-5010"):
        assert [ask(hosts, each, 0.5) for each in at] == ["TimeoutError"] * 2
    with hosts.dropped(0, 1, "6000-7000"), hosts.dropped(1, 0, "6000-7000"):
        assert [ask(hosts, each) for each in at] == ["100000"] * 2


def test_a_host_is_unplugged(hosts):
    with hosts.unplugged(0):
        assert ask(hosts, hosts.address(1), 0.5) == "TimeoutError"
    assert ask(hosts, hosts.address(1)) == "100000"
