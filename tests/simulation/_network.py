"""A network for the project's loopback transport: it delays, loses, repeats, reorders and cuts.

`SimulatedNetwork` is a `LoopbackNetwork`: its clients and servers, which pack, parse and expire, are the
project's own. A client and a server belong to the process that makes them. Answers are taken by one thread in
each process, as in `rpc/_transport`.

Tests: tests/unit/test_simulation.py.
"""

import contextlib

from tests.simulation import _primitives as sim
from tests.simulation._world import DELAY
from unisono.rpc._frames import Frame, FrameError
from unisono.rpc._loopback import LoopbackNetwork, _through_bytes


class SimulatedNetwork(LoopbackNetwork):
    """Messages between processes of a world.

    Args:
        loss: the probability that a message is lost; `repeat`: that it comes twice; `late`: that it is late
        by
            up to `latest` seconds; `cut`: that the connection is lost while it is on its way.
        delay: seconds that a message takes at most, when nothing happens to it.
    """

    def __init__(self, world, loss=0.0, repeat=0.0, late=0.0, cut=0.0, delay=0.05, latest=15.0):
        super().__init__()
        self._lock = contextlib.nullcontext()
        self.world = world
        self.loss, self.repeat, self.late, self.cut, self.delay, self.latest = (
            loss,
            repeat,
            late,
            cut,
            delay,
            latest,
        )
        #: Who cannot reach whom, and until when.
        self._parted = {}
        self._processes = {}
        self._connections = {}

    def part(self, one, other, seconds, both=True):
        """Cut the network between two processes, by name, in one direction or both."""
        for pair in [(one, other), (other, one)][: 1 + both]:
            self._parted[pair] = max(self._parted.get(pair, 0.0), self.world.now + seconds)
        self.world.note("part", one, other, f"parted for {seconds:.1f} s")

    # --- what LoopbackNetwork does -------------------------------------------------------------------

    def rpc_server(self, address, handler):
        """Return a server of the present process."""
        rpc_server = super().rpc_server(address, handler)
        process = self._processes[rpc_server] = self.world.current.process
        process.at_end(lambda: self._lost(rpc_server))
        return rpc_server

    def rpc_client(self, task, address, own=None):
        """Return a client of the present process."""
        rpc_client = super().rpc_client(task, address, own)
        process = self._processes[rpc_client] = self.world.current.process
        self._connections[rpc_client] = 0
        if "answers" not in process.own:
            answers = process.own["answers"] = sim.SimpleQueue()
            sim.Thread(target=_take_answers, args=(answers,), name="answers", daemon=True).start()
        return rpc_client

    def _leave(self, rpc_server):
        if self._rpc_servers.get(rpc_server.address) is rpc_server:
            self._lost(rpc_server)

    def _lost(self, rpc_server):
        """Let clients notice the end of a server: at once, or only as no answer comes."""
        if self._rpc_servers.get(rpc_server.address) is not rpc_server:
            return
        del self._rpc_servers[rpc_server.address]
        if self.world.fault(0.3, "unnoticed end"):
            return
        for rpc_client in list(self._rpc_clients.values()):
            if rpc_client.address == rpc_server.address:
                self._reset(rpc_client)

    def _reset(self, rpc_client):
        """Lose a connection: what is under way on it is lost, and the client notices."""
        self._connections[rpc_client] += 1
        answers = self._processes[rpc_client].own["answers"]
        self.world.call_later(
            self.world.uniform(0.0, self.delay, DELAY),
            lambda: _put(answers, lambda: rpc_client._pending.fail_sent("the connection was lost")),
        )

    def _ask(self, rpc_client, frame):
        rpc_server = self._rpc_servers.get(rpc_client.address)
        if rpc_server is None:
            self._early.setdefault(rpc_client.address, []).append((rpc_client, frame))
            return
        if not rpc_client._pending.mark_sent(frame.request):
            return
        parts = _through_bytes(frame)

        def deliver():
            # The server that is there now: one that was started again may get what was sent to the one
            # before.
            found = self._rpc_servers.get(rpc_client.address)
            if found is None:
                return False
            _put(found._inbox, (rpc_client.client, parts))
            return True

        self._carry(rpc_client, self._processes[rpc_client], self._processes[rpc_server], frame, deliver)

    def _answer(self, client, frame):
        rpc_client = self._rpc_clients.get(client.connection)
        if rpc_client is None:
            return
        parts = _through_bytes(frame)
        process = self._processes[rpc_client]

        def settle():
            with contextlib.suppress(FrameError):
                rpc_client._pending.settle(Frame.parse(parts))

        def deliver():
            if process.is_dead:
                return False
            _put(process.own["answers"], settle)
            return True

        self._carry(rpc_client, self.world.current.process, process, frame, deliver)

    def _carry(self, rpc_client, source, target, frame, deliver):
        world = self.world
        world.counts["messages"] += 1
        text = _text(frame) if world.is_recorded else ""
        copies = 1
        delay = world.uniform(0.0, self.delay, DELAY)
        until = self._parted.get((source.name, target.name), 0.0)
        if until > world.now:
            # TCP sends it again when the network is back, if it has not given up before.
            if world.fault(0.5, "loss"):
                copies = 0
            delay += until - world.now
        elif world.fault(self.loss, "loss"):
            copies = 0
        elif world.fault(self.repeat, "repeat"):
            copies = 2
        elif world.fault(self.late, "late"):
            delay += world.uniform(0.0, self.latest, DELAY)
        elif world.fault(self.cut, "cut"):
            self._reset(rpc_client)
            copies = 0
        if not copies:
            world.note("lost", source.name, target.name, text)
        connection, sent_at = self._connections[rpc_client], world.now

        def arrive():
            is_there = connection == self._connections[rpc_client] and deliver()
            if world.is_recorded:
                kind = "message" if is_there else "lost"
                world.note(kind, source.name, target.name, f"{text} (sent {sent_at:.3f})")

        for copy in range(copies):
            world.call_later(delay + copy * world.uniform(0.0, self.latest / 2, DELAY), arrive)


def _take_answers(answers):
    while True:
        answers.get()()


def _put(queue, item):
    """Put an item from the scheduler, where nothing may give way."""
    queue.queue.append(item)
    if queue._getters:
        queue._getters[0].world.wake(queue._getters)


def _text(frame):
    meta = frame.meta
    shown = [f"{k} {meta[k]}" for k in ("closure", "kind", "applied", "count", "incarnation") if k in meta]
    return f"{frame.op.name} #{frame.request & 0xFFFF:x}{' ' if shown else ''}{', '.join(shown)}"
