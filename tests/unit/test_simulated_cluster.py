"""A simulated TCP fails as real ones do; the rendezvous and the peers hold on it, and mistakes are found."""

import errno
import selectors
import socket

import pytest
from tests.simulation._primitives import simulated
from tests.simulation._runner import run_many, run_one
from tests.simulation._sockets import Network, Selector
from tests.simulation._world import ORDER, World
from tests.simulation.mistakes_cluster import MISTAKES
from tests.simulation.mistakes_coordinator import MISTAKES as OF_COORDINATOR
from tests.simulation.protocols import protocols

PROTOCOLS = ("rendezvous", "peers", "coordinator")
#: Mistakes, and the schedules that show them.
PLANTED = {
    "a message is thought to arrive whole": 20,
    "the socket of a failed attempt stays open": 20,
    "a process gives up at the first attempt": 20,
    "another program at the address ends a process": 40,
    "a process that is stopped counts as a lost machine": 60,
    "a connection that is reset counts as an end": 40,
    "other programs of the machine get through": 40,
    "what is sent after the service's end is an error": 40,
}


def between(body, **options):
    """Run `body(network, client, accept)` on one machine, which is connected to another one's listener."""
    world = World(0, choices=[])

    def main():
        network = Network(world, **options)
        near, far = network.host("near"), network.host("far")
        accepted, listeners = [], []

        def serve():
            listeners.append(network.create_server(("", 4711)))
            accepted.append(listeners[0].accept()[0])
            world.sleep(100.0)

        def ask():
            world.sleep(1.0)
            sock = network.create_connection(("far", 4711), 5.0)
            world.sleep(1.0)
            body(network, sock, accepted[0], server)

        server = far.process("server", serve)
        client = near.process("client", ask)
        client.wait()
        if client.error is not None:
            raise client.error
        return network.sockets_of(client)

    return world.run(main)


def test_bytes_arrive_in_order_and_the_end_after_them():
    def body(network, sock, other, server):
        sock.sendall(b"abc")
        sock.sendall(b"def")
        sock.shutdown(socket.SHUT_WR)
        network.world.sleep(1.0)
        assert (bytes(other._inbox), other._has_ended) == (b"abcdef", True)
        sock.close()
        assert sock.fileno() == -1

    assert between(body) == []


def test_a_full_connection_takes_no_more():
    def body(network, sock, other, server):
        sock.setblocking(False)
        assert sock.send(b"x" * 100) == 10
        with pytest.raises(BlockingIOError):
            sock.send(b"x")
        assert network.sockets_of(network.world.current.process) == [sock]

    # The kernel closes what a process has left open.
    assert between(body, buffer=10) == []


def test_a_killed_process_refuses_and_resets():
    def body(network, sock, other, server):
        sock.sendall(b"never read")
        network.world.sleep(1.0)
        server.kill()
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
        with pytest.raises(ConnectionRefusedError):
            network.create_connection(("far", 4711), 5.0)

    between(body)


def test_a_machine_that_is_lost_is_silent():
    def body(network, sock, other, server):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        network.lose(server.own["host"])
        with pytest.raises(TimeoutError):
            network.create_connection(("far", 4711), 2.0)
        sock.settimeout(None)
        with pytest.raises(TimeoutError) as error:
            sock.recv(1)
        assert error.value.errno == errno.ETIMEDOUT

    between(body)


def test_a_stopped_process_is_connected_to_by_its_kernel():
    def body(network, sock, other, server):
        server.pause(50.0)
        with network.create_connection(("far", 4711), 2.0) as second:
            second.settimeout(3.0)
            with pytest.raises(TimeoutError):
                second.recv(1)

    between(body)


def test_a_cut_in_one_direction_delays_what_is_sent():
    def body(network, sock, other, server):
        world = network.world
        network.part(sock.host, other.host, 20.0, both=False)
        sock.sendall(b"late")
        world.sleep(19.0)
        assert not other._inbox
        world.sleep(12.0)
        assert other._inbox == b"late"

    between(body)


def test_two_threads_wait_at_one_socket():
    def body(network, sock, other, server):
        found, world = [], network.world
        world.spawn(lambda: found.append(sock.recv(3)), "reads")
        world.spawn(lambda: sock.sendall(b"a" * 40), "writes")
        world.sleep(1.0)
        # Who was woken last goes on first.
        world._order, world.choose = 1.0, lambda n, kind=None: n - 1 if kind == ORDER else 0
        received = b""
        while len(received) < 40:
            received += other.recv(100)
        other.sendall(b"abc")
        network.world.sleep(1.0)
        assert found == [b"abc"]

    between(body, buffer=16)


def test_a_shutdown_wakes_who_waits():
    def body(network, sock, other, server):
        found = []

        def accept():
            with pytest.raises(OSError, match="Invalid argument"):
                listener.accept()
            found.append("listener")

        listener = network.create_server(("", 4712))
        network.world.spawn(accept, "accepts")
        network.world.spawn(lambda: found.append(sock.recv(3)), "reads")
        network.world.sleep(1.0)
        listener.shutdown(socket.SHUT_RDWR)
        sock.shutdown(socket.SHUT_RDWR)
        network.world.sleep(1.0)
        assert found == ["listener", b""]

    between(body)


def test_a_selector_says_which_socket_is_ready():
    def body(network, sock, other, server):
        with Selector(network) as selector:
            selector.register(sock, selectors.EVENT_READ, "data")
            assert selector.select(1.0) == []
            other.send(b"x")
            ((key, mask),) = selector.select(1.0)
            assert (key.data, mask) == ("data", selectors.EVENT_READ)

    between(body)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_protocols_hold(name):
    protocol = protocols()[name]
    with simulated() as look:
        tally, failures = run_many(protocol, range(40), look)
    for failure in failures:
        pytest.fail(f"{name}, seed {failure.seed}: {failure.text()}")
    assert tally.schedules == 40
    assert sum(tally.faults.values()) > 20


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PROTOCOLS)
def test_protocols_hold_with_many_faults(name):
    protocol = protocols()[name]
    with simulated() as look:
        _, failures = run_many(protocol, range(1000, 1200), look)
    assert not failures, failures[0].text()


@pytest.mark.parametrize("name", PLANTED)
def test_planted_mistakes_are_found(name):
    (mistake,) = [m for m in (*MISTAKES, *OF_COORDINATOR) if m.name == name]
    protocol = protocols()[mistake.protocols[0]]
    with simulated() as look, mistake.planted():
        _, failures = run_many(protocol, range(PLANTED[name]), look)
    assert failures
    # Without the mistake the same seed holds.
    with simulated():
        assert run_one(protocol, failures[0].seed).error is None
