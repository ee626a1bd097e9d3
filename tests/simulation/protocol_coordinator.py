"""The proxy between a worker and JAX's service in process 0, which the service's end must not end.

Real: `CoordinatorProxy`, the proof of the gate, and the check whose connection one is. A stub: gRPC is a
client that sends lines, and the service answers each of them, behind a gate of a few lines. The service
starts late, is killed or stopped, its machine is lost, connections are reset. Promised, and checked:

- each line arrives once, whole and in order, and so does its answer, until the service ends;
- when the service ends the client's connection stays open, and what it sends is no error;
- nothing of another program reaches the service; who does not know the secret is rejected;
- when the client closes, or the proxy, sockets are gone.

Tests: tests/unit/test_simulated_cluster.py.
"""

import types

import pytest

from tests.simulation._sockets import Network, SocketDoors
from tests.simulation._world import SETTING
from unisono.cluster import _coordinator_proxy as proxy_module
from unisono.cluster._coordinator_gate import NONCE_BYTES, PROOF_BYTES, proof_of
from unisono.cluster._coordinator_proxy import CoordinatorProxy

_PORT = 4000
_SECRET = "secret"
#: Lines of a client, and bytes of each.
_LINES, _BYTES = 6, 600
#: Seconds after which sockets are gone: a proxy may be connecting.
_ENDS_WITHIN = 40.0


def _exactly(sock, count):
    """Return so many bytes; fewer at the end of a connection."""
    data = b""
    while len(data) < count and (piece := sock.recv(count - len(data))):
        data += piece
    return data


def _is_to_itself(sock):
    """Return whether a socket is connected to itself, which may happen where no listener is left."""
    return sock.getsockname() == sock.getpeername()


class _Job:
    """A service and a worker with its proxy."""

    def __init__(self, world, network):
        self.world, self.network = world, network
        self.first, self.node = network.host("node0"), network.host("node1")
        self.secret = "another one" if world.choose(6, SETTING) == 1 else _SECRET
        self.starts_after = world.pick((0.0, 2.0, 60.0), SETTING)
        self.received = []
        self.service = self.proxy = self.worker = None
        self.is_harmed = False
        #: Whether each client's connection was open at its end.
        self.done = []

    # --- process 0 -----------------------------------------------------------------------------------

    def serve(self):
        """Be the gate and the service."""
        listener = self.network.create_server((self.first.ip, _PORT))
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                self.world.sleep(0.1)
                continue
            self.world.spawn(lambda sock=sock: self.answer(sock), "serves")

    def answer(self, sock):
        """Let a process in, and answer its lines."""
        nonce = self.world.identities.randbytes(NONCE_BYTES)
        try:
            sock.sendall(nonce)
            if _exactly(sock, PROOF_BYTES) != proof_of(_SECRET, nonce):
                sock.close()
                return
            lines = []
            self.received.append(lines)
            while len(line := _exactly(sock, _BYTES)) == _BYTES:
                lines.append(line)
                sock.sendall(line[::-1])
        except OSError:
            pass
        sock.close()

    # --- the worker ----------------------------------------------------------------------------------

    def work(self):
        """Use the service through a proxy."""
        proxy = self.proxy = CoordinatorProxy(f"{self.first.ip}:{_PORT}", _SECRET)
        _, _, port = proxy.address.rpartition(":")
        self.address = "127.0.0.1", int(port)
        clients = 1 + self.world.choose(2)
        for number in range(clients):
            self.world.spawn(lambda number=number: self.ask(number), f"client {number}")
        closes_early = self.world.choose(2)
        while len(self.done) < clients:
            self.world.sleep(0.5)
            if closes_early and self.received and not self.proxy._is_closed:
                # As JAX's start has ended: open connections are kept.
                proxy.close()
        if not proxy._is_closed:
            proxy.close()
        end = self.world.now + _ENDS_WITHIN
        while (left := self.network.sockets_of(self.worker)) and self.world.now < end:
            self.world.sleep(0.5)
        # What is sent to a lost machine waits for many minutes where buffers are full.
        self.world.check(
            not left or self.first.is_down,
            lambda: f"A proxy's sockets are closed. Left open: {left}\n{self.world.stacks()}",
        )

    def ask(self, number):
        """Send lines, and read the answers."""
        world = self.world
        try:
            sock = self.network.create_connection(self.address, 5.0)
        except OSError:
            # The proxy has no descriptor, or is closed.
            self.done.append(number)
            return
        sock.settimeout(5.0)
        if _is_to_itself(sock):
            sock.close()
            self.done.append(number)
            return
        answered, what = 0, ""
        try:
            for place in range(_LINES):
                line = b"%02d%02d" % (number, place) + bytes([65 + place]) * (_BYTES - 4)
                sock.sendall(line)
                found = _exactly(sock, _BYTES)
                if not found:
                    what = "closed"
                    break
                world.check(found == line[::-1], lambda found=found: f"An answer is whole: {found[:40]}")
                answered += 1
                world.sleep(world.uniform(0.0, 1.0))
        except TimeoutError:
            what = "silent"
        except OSError as error:
            what = repr(error)
        is_disturbed = self.is_harmed or world.faults or world._stall
        if not is_disturbed and self.starts_after < 5.0 and self.secret == _SECRET:
            # A closed proxy rejects those that it has not accepted, another one those that are too many.
            may_be_rejected = self.proxy._is_closed or proxy_module._CONNECTIONS == 1
            is_served = answered == _LINES or (not answered and may_be_rejected)
            world.check(is_served, f"Lines are answered: {answered}, {what}.")
        if answered and self.is_harmed and not world.faults["reset"]:
            # The service has ended: its client sees silence.
            world.check(what in ("", "silent"), f"The end of the service closes nothing. Received: {what}")
            what = self.send_on(sock) if what else ""
            is_kept = what != "closed" or world.faults["reset"]
            world.check(is_kept, "What is sent after the end of the service closes nothing.")
        sock.close()
        self.done.append(number)

    def send_on(self, sock):
        """Send to a service that has ended, and read; return what is found."""
        try:
            for _ in range(2):
                sock.sendall(b"a" * 100)
                self.world.sleep(1.0)
            return "" if sock.recv(1) else "closed"
        except TimeoutError:
            return "silent"
        except OSError:
            return "closed"

    def intrude(self):
        """Be another program of this machine, which sends bytes to the proxy."""
        try:
            with self.network.create_connection(self.address, 5.0) as sock:
                if _is_to_itself(sock):
                    return
                sock.sendall(b"X" * _BYTES)
                sock.settimeout(20.0)
                found = sock.recv(10)
                self.world.check(not found, f"Another program gets nothing. Received: {found}")
        except OSError:
            return

    def judge(self):
        """Check what the service has received."""
        self.world.check(
            self.secret == _SECRET or not self.received, "Who has another secret reaches no service."
        )
        for lines in self.received:
            numbers = [(line[:2], int(line[2:4])) for line in lines if line[:1] != b"a"]
            self.world.check(
                [place for _, place in numbers] == list(range(len(numbers)))
                and len({number for number, _ in numbers}) <= 1,
                lambda numbers=numbers: f"Lines arrive once, in order, those of the worker: {numbers}",
            )


def _own_descriptors(network):
    """Return what a proxy gets in place of `os`, and of the ends of a descriptor."""

    def sockets():
        return {sock.fileno(): sock for sock in network.sockets_of(network.world.current.process)}

    def ends(number):
        sock = sockets().get(number)
        # Here a server may accept before its client knows that it is connected.
        return (sock._local, sock._remote) if sock is not None and sock._remote else None

    return types.SimpleNamespace(listdir=lambda path: list(map(str, sockets()))), ends


def coordinator(world):
    """A worker uses JAX's service through its proxy, and outlives it."""
    world.settle()
    world.limit = 600.0
    network = Network(
        world,
        late=world.pick((0.0, 0.01), SETTING),
        reset=world.pick((0.0, 0.0, 0.01), SETTING),
        buffer=world.pick((1 << 16, 512), SETTING),
        is_short=bool(world.choose(2, SETTING)),
    )
    world.faults_left = world.choose(4, SETTING)
    with SocketDoors(network, ["unisono.cluster._coordinator_proxy"]), pytest.MonkeyPatch.context() as patch:
        fake, ends = _own_descriptors(network)
        patch.setattr(proxy_module, "os", fake)
        patch.setattr(proxy_module, "_ends_of_descriptor", ends)
        patch.setattr(proxy_module, "_CONNECTIONS", world.pick((32, 1), SETTING))
        job = _Job(world, network)
        patch.setattr(proxy_module, "proof_of", lambda secret, nonce: proof_of(job.secret, nonce))
        job.worker = job.node.process("worker", job.work)
        world.sleep(job.starts_after)
        job.service = job.first.process("service", job.serve)
        network.descriptors = world.pick((0.0, 0.03), SETTING)
        while not job.worker.wait(world.uniform(0.2, 3.0)):
            if job.proxy is not None and hasattr(job, "address") and world.choose(3) == 1:
                job.node.process("stranger", job.intrude)
            if world.fault(0.2, "end of the service"):
                job.is_harmed = True
                world.pick(
                    (job.service.kill, lambda: network.lose(job.first), lambda: job.service.pause(9.0))
                )()
        if job.worker.error is not None:
            raise job.worker.error
        job.judge()


PROTOCOLS = {"coordinator": coordinator}
