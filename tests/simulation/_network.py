"""A network for the project's loopback transport: it delays, loses, repeats, reorders and cuts.

`SimulatedNetwork` is a `LoopbackNetwork`: its clients and servers, which pack, parse and expire, are the
project's own. A client and a server belong to the process that makes them. Answers are taken by one thread in
each process, as in `rpc/_transport`.

Tests: tests/unit/test_simulation.py.
"""

import contextlib
import dataclasses

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
        last_words: the probability that a process is killed as it sends a request to a lossy server, where it
            is late.
        full: the probability that a connection to a server that is not lossy takes no more for up to
            `latest` seconds. If it is lost meanwhile, what waits is sent on the next one.
        delay: seconds that a message takes at most, when nothing happens to it.
        is_lossy: whether messages to and from a server may be lost, repeated and reordered one by one. Others
            are those of TCP: in order, once, and lost with their connection only.
    """

    def __init__(
        self,
        world,
        loss=0.0,
        repeat=0.0,
        late=0.0,
        cut=0.0,
        full=0.0,
        last_words=0.0,
        delay=0.05,
        latest=15.0,
        is_lossy=lambda address: True,
    ):
        super().__init__()
        self._lock = contextlib.nullcontext()
        self._is_lossy = is_lossy
        #: When the last message of a connection arrives, by client and direction.
        self._last = {}
        #: The clients whose connections are lost, and that have not noticed.
        self._broken = {}
        #: What clients could not send yet.
        self._unsent = {}
        self.world = world
        self.full, self.last_words = full, last_words
        self.loss, self.repeat, self.late, self.cut, self.delay, self.latest = (
            loss,
            repeat,
            late,
            cut,
            delay,
            latest,
        )
        #: The operation whose requests and answers often lose their connection, and how often.
        self.aim, self.aimed_at = None, 0.0
        #: The requests of this operation, by client and number.
        self._aimed = set()
        #: Who cannot reach whom, and until when.
        self._parted = {}
        self._processes = {}
        self._connections = {}
        #: When requests went out, by client and number, and when clients noticed that a connection was lost.
        self.sent_at, self.noticed_at = {}, []

    def part(self, one, other, seconds, both=True):
        """Cut the network between two processes, by name, in one direction or both."""
        for pair in [(one, other), (other, one)][: 1 + both]:
            self._parted[pair] = max(self._parted.get(pair, 0.0), self.world.now + seconds)
        self.world.note("part", one, other, f"parted for {seconds:.1f} s")

    def cut_off(self, address):
        """Lose the connections with a server."""
        for rpc_client in list(self._rpc_clients.values()):
            if rpc_client.address == address:
                self._reset(rpc_client, self.delay)

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
        # As when a whole machine is lost: heartbeats of the transport find out.
        is_late = self.world.fault(0.3, "unnoticed end")
        for rpc_client in list(self._rpc_clients.values()):
            if rpc_client.address == rpc_server.address:
                self._reset(rpc_client, 30.0 if is_late else self.delay)

    def _reset(self, rpc_client, within):
        """Lose a connection: what is under way on it is lost, and the client notices."""
        # What a server answers on the connection that was lost reaches nobody.
        if self._rpc_clients.pop(rpc_client.client.connection, None) is None:
            return  # closed
        self._connections[rpc_client] += 1
        rpc_client.client = dataclasses.replace(rpc_client.client, connection=b"%d" % next(self._numbers))
        self._rpc_clients[rpc_client.client.connection] = rpc_client
        process = self._processes[rpc_client]
        # What is sent until the client notices goes nowhere, too.
        connection = self._connections[rpc_client]

        def notice():
            if self._broken.get(rpc_client, (None,))[0] == connection:
                del self._broken[rpc_client]
                self.noticed_at.append((rpc_client, self.world.now))
                rpc_client._pending.fail_sent("the connection was lost")

        def tell():
            if not process.is_dead:
                _put(process.own["answers"], notice)

        self._broken[rpc_client] = connection, tell
        self.world.call_later(self.world.uniform(0.0, within, DELAY), tell)

    def _open(self, rpc_server):
        super()._open(rpc_server)
        # A machine that is there again resets connections that it does not know.
        for rpc_client, (_, tell) in list(self._broken.items()):
            if rpc_client.address == rpc_server.address:
                self.world.call_later(self.world.uniform(0.0, self.delay, DELAY), tell)

    def _ask(self, rpc_client, frame):
        if rpc_client in self._unsent:
            self._unsent[rpc_client].append(frame)
            return
        rpc_server = self._rpc_servers.get(rpc_client.address)
        if rpc_server is None:
            self._early.setdefault(rpc_client.address, []).append((rpc_client, frame))
            return
        if not self._is_lossy(rpc_client.address) and self.world.fault(self.full, "full"):
            self._unsent[rpc_client] = [frame]
            self.world.call_later(
                self.world.uniform(0.0, self.latest, DELAY), lambda: self._flush(rpc_client)
            )
            return
        if not rpc_client._pending.mark_sent(frame.request):
            return
        self.sent_at.setdefault((rpc_client, frame.request), self.world.now)
        if frame.op is self.aim:
            self._aimed.add((rpc_client, frame.request))
        parts = self._packed(frame)

        def deliver():
            # The server that is there now: one that was started again may get what was sent to the one
            # before.
            found = self._rpc_servers.get(rpc_client.address)
            if found is None:
                return False
            _put(found._inbox, (rpc_client.client, parts))
            return True

        self._carry(rpc_client, self._processes[rpc_client], self._processes[rpc_server], frame, deliver)

    def _packed(self, frame):
        """Return the parts of a message, as they arrive."""
        return _through_bytes(frame)

    def _flush(self, rpc_client):
        """Send what has waited for room."""
        waiting = self._unsent.pop(rpc_client)
        if not self._processes[rpc_client].is_dead:
            for frame in waiting:
                self._ask(rpc_client, frame)

    def _answer(self, client, frame):
        rpc_client = self._rpc_clients.get(client.connection)
        if rpc_client is None:
            return
        parts = self._packed(frame)
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
        is_lossy = self._is_lossy(rpc_client.address)
        cut = self.aimed_at if (rpc_client, frame.request) in self._aimed else self.cut
        delay = world.uniform(0.0, self.delay, DELAY)
        until = self._parted.get((source.name, target.name), 0.0)
        if rpc_client in self._broken:
            copies = 0
        elif not is_lossy:
            if until > world.now:
                delay += until - world.now
            elif world.fault(self.late, "late"):
                delay += world.uniform(0.0, self.latest, DELAY)
            elif world.fault(cut, "cut"):
                self._reset(rpc_client, self.delay)
                copies = 0
            key = rpc_client, source
            # Not at the same time: rounding would change the order.
            delay = max(delay, self._last.get(key, 0.0) - world.now + 1e-6)
            self._last[key] = world.now + delay
        elif until > world.now:
            # TCP sends it again when the network is back, if it has not given up before.
            if world.fault(0.5, "loss"):
                copies = 0
            delay += until - world.now
        elif source is self._processes[rpc_client] and world.fault(self.last_words, "last words"):
            delay += world.uniform(0.0, self.latest, DELAY)
            world.call_later(0.0, source.kill)
        elif world.fault(self.loss, "loss"):
            copies = 0
        elif world.fault(self.repeat, "repeat"):
            copies = 2
        elif world.fault(self.late, "late"):
            delay += world.uniform(0.0, self.latest, DELAY)
        elif world.fault(cut, "cut"):
            self._reset(rpc_client, self.delay)
            copies = 0
        if not copies:
            world.note("lost", source.name, target.name, text)
        connection, sent_at = self._connections[rpc_client], world.now

        def arrive(is_kept=False):
            is_there = (is_kept or connection == self._connections[rpc_client]) and deliver()
            if world.is_recorded:
                kind = "message" if is_there else "lost"
                world.note(kind, source.name, target.name, f"{text} (sent {sent_at:.3f})")

        if copies:
            world.call_later(delay, arrive)
        if copies > 1:
            # Some that a client has repeated wait in a queue, and are sent on its next connection.
            is_kept = is_lossy and target is not self._processes[rpc_client] and bool(world.choose(2, DELAY))
            later = delay + world.uniform(0.0, self.latest / 2, DELAY)
            world.call_later(later, lambda: arrive(is_kept))


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
