"""A simulated ZeroMQ and its kernel fail as real ones do; the transport holds, and mistakes are found."""

import errno
import socket

import pytest
import zmq
from tests.simulation._descriptors import Machine
from tests.simulation._primitives import simulated
from tests.simulation._runner import run_many, run_one
from tests.simulation._world import Violation, World
from tests.simulation._zeromq import ZeroMQ
from tests.simulation.mistakes_transport import MISTAKES
from tests.simulation.protocols import protocols

#: Mistakes, and the schedules that show them.
PLANTED = {
    "a thread that takes answers is not told of a failure": 20,
    "the clients' thread takes nothing after another one has": 20,
}


def in_world(body, **options):
    """Run `body(world, machine)` as a process of a quiet world."""
    world = World(0, choices=[])

    def main():
        machine = Machine(world, **options)
        process = world.process("one", lambda: body(world, machine))
        process.wait()
        if process.error is not None:
            raise process.error

    return world.run(main)


def test_a_file_that_is_passed_ends_a_call_and_bytes_come_in_order():
    def body(world, machine):
        system, sockets = machine.of_os(), machine.of_socket()
        one, other = sockets.socketpair()
        memory = system.memfd_create("m")
        system.ftruncate(memory, 10)
        one.send(b"abc")
        one.sendmsg([b"def"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, [memory])])
        one.send(b"ghi")
        system.close(memory)
        piece = bytearray(100)
        size, ancillary, _, _ = other.recvmsg_into([piece], 100, 0)
        assert piece[:size] == b"abcdef"
        ((_, _, numbers),) = ancillary
        assert system.fstat(int.from_bytes(numbers, "little")).st_size == 10
        assert other.recv(100) == b"ghi"
        other.send(b"left")
        one.send(b"before")
        one.close()
        # What was sent before is read first; what was left unread resets the connection.
        assert other.recv(100) == b"before"
        with pytest.raises(ConnectionResetError):
            other.recv(100)
        assert other.recv(100) == b""
        with pytest.raises(BrokenPipeError):
            other.send(b"x")

    in_world(body)


def test_a_number_that_is_closed_twice_is_found():
    def body(world, machine):
        number = machine.of_os().eventfd(0)
        machine.close(number)
        machine.close(number)

    with pytest.raises(Violation, match="is not open"):
        in_world(body)


def test_a_dealer_sends_when_it_is_connected_and_a_router_knows_who_has_gone():
    def body(world, machine):
        library = ZeroMQ(world, machine)
        context = library.module.Context()
        router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        router.router_mandatory = True
        router.bind("tcp://10.0.0.1:1")
        dealer.sndhwm, router.rcvhwm = 2, 2
        with pytest.raises(zmq.Again):
            dealer.send_multipart([b"early"])
        dealer.connect("tcp://10.0.0.1:1")
        world.sleep(1.0)
        # In the receiver's queue, on the way, and in the sender's queue.
        for number in range(2 + library.wire + 2):
            dealer.send_multipart([b"%d" % number])
            world.sleep(0.1)
        with pytest.raises(zmq.Again):
            dealer.send_multipart([b"late"])
        name, first = router.recv_multipart()
        assert first.bytes == b"0"
        dealer.close()
        world.sleep(1.0)
        with pytest.raises(zmq.ZMQError) as caught:
            router.send_multipart([name.bytes, b"x"])
        assert caught.value.errno == errno.EHOSTUNREACH
        # What had left before the end arrives.
        assert router.recv_multipart()[1].bytes == b"1"
        router.close()
        context.term()

    in_world(body)


def test_the_transport_holds():
    protocol = protocols()["transport"]
    with simulated() as look:
        tally, failures = run_many(protocol, range(15), look)
    assert not failures, failures[0].text()
    assert sum(tally.faults.values()) > 5


@pytest.mark.parametrize("name", PLANTED)
def test_planted_mistakes_are_found(name):
    (mistake,) = (mistake for mistake in MISTAKES if mistake.name == name)
    protocol = protocols()["transport"]
    with simulated() as look, mistake.planted():
        _, failures = run_many(protocol, range(PLANTED[name]), look)
    assert failures, f"not found: {name}"
    with simulated():
        assert run_one(protocol, failures[0].seed).error is None
