"""Calls: requests with deadlines to a server that answers at once, later, wrongly or not at all.

Real: `PendingCalls`, `RequestNumbers`, messages, the loopback's clients and servers. Promised, and checked:

- an answer is its own request's;
- a request ends by its deadline, whatever happens, or when its connection is lost or its client is closed;
- without a fault no request fails;
- what was answered, given up or lost holds no bytes, and no more bytes are in flight than allowed.

Tests: tests/unit/test_simulation.py.
"""

import numpy as np

from tests.simulation import _primitives as sim
from tests.simulation._network import SimulatedNetwork
from tests.simulation._world import SETTING
from unisono._errors import ClusterError
from unisono.cluster_resolver._spec import Task
from unisono.rpc._calls import PeerLostError, RequestNumbers
from unisono.rpc._frames import Frame
from unisono.rpc._ops import Op

#: Seconds that a request may end after its deadline.
_SLACK = 0.5
_BUDGET = 400


def calls(world):
    """Two clients send requests to a server that is killed and started again."""
    world.settle()
    clients = 1 + world.choose(2, SETTING)
    world.faults_left = world.choose(4, SETTING)
    network = SimulatedNetwork(
        world,
        loss=world.pick((0.0, 0.1), SETTING),
        repeat=world.pick((0.0, 0.1), SETTING),
        late=world.pick((0.0, 0.1), SETTING),
        cut=world.pick((0.0, 0.1), SETTING),
        latest=6.0,
    )
    risk = world.pick((0.0, 0.02), SETTING)
    is_over = []

    def serve():
        later = sim.SimpleQueue()
        rpc_server = None

        def handle(client, frame):
            kind = frame.meta["kind"]
            if kind == "raise":
                raise ValueError(str(frame.meta["text"]))
            if kind == "later":
                later.put((client, frame.answer(Op.OK, dict(frame.meta), frame.arrays)))
                return None
            return frame.answer(Op.OK, dict(frame.meta), frame.arrays)

        rpc_server = network.rpc_server("server", handle)
        rpc_server.start()
        while not is_over:
            try:
                client, answer = later.get(timeout=1.0)
            except sim.queue.Empty:
                continue
            world.sleep(world.uniform(0.0, 0.5))
            rpc_server.reply(client, answer)

    def keep():
        while not is_over:
            process = world.process("server", serve)
            process.risk = risk
            process.wait()
            if process.error is not None:
                raise process.error
            world.sleep(world.uniform(0.0, 2.0))

    sim.Thread(target=keep, name="watches the server").start()
    processes = [world.process(f"client{i}", lambda i=i: _ask(world, network, i)) for i in range(clients)]
    for process in processes:
        world.check(process.wait(120.0), lambda: f"Clients end.\n{world.stacks()}")
        if process.error is not None:
            raise process.error
    is_over.append(True)


def _ask(world, network, index):
    client = network.rpc_client(Task("ps", 0), "server", Task("worker", index))
    pending = client._pending
    pending._budget = _BUDGET
    numbers = RequestNumbers()
    threads = []
    closes = world.choose(6) == 1

    def one(place):
        world.sleep(world.uniform(0.0, 1.0))
        kind = world.pick(("now", "later", "raise"))
        timeout = world.pick((10.0, 3.0, 0.2))
        text = f"{index}/{place}"
        array = np.full(world.pick((1, 16)), place, "float32")
        frame = Frame(Op.STATUS, numbers.next(), 0, {"kind": kind, "text": text}, [array])
        began = world.now
        # A thread may be slow.
        has_stalled = world._stall > 0
        slack = _SLACK + 6.0 * has_stalled
        is_call = world.choose(2)
        error = answer = None
        try:
            if is_call:
                answer = client.call(frame, timeout)
            else:
                sent = client.send(frame, timeout)
                world.check(
                    pending.bytes_in_flight <= _BUDGET,
                    lambda: f"At most {_BUDGET} bytes are in flight: {pending.bytes_in_flight}.",
                )
                if world.choose(3) == 1 and not sent.done():
                    again = client.send(frame, timeout)
                    if again is not sent:
                        # The first one has ended with its connection, and this is a request of its own.
                        network.sent_at[client, frame.request] = world.now
                        # Its answer is on the way from the server's thread.
                        world.sleep(0.01 + 3.0 * (world._stall > 0))
                        world.check(sent.done(), "A request that waits keeps its future.")
                        again.exception(timeout + slack)
                answer = sent.result(timeout + slack + began - world.now)
        except PeerLostError as raised:
            error = raised
        except ClusterError as raised:
            error = raised
        except TimeoutError:
            world.check(False, f"A request ends by its deadline of {timeout} s.")
        took = world.now - began
        world.check(took <= timeout + slack, f"A request took {took:.3f} s of {timeout:g} s.")
        sent_at = network.sent_at.get((client, frame.request), world.now)
        for lost, at in network.noticed_at:
            if lost is client and sent_at < at:
                why = f"A request must end with its connection, not {world.now - at:.3f} s later."
                world.check(world.now <= at + slack, why)
        if error is not None:
            may_fail = world.faults or closes or timeout < 3 or has_stalled
            world.check(may_fail, lambda: f"Nothing was lost, and a request fails: {error}")
            return
        world.check(not (closes and is_closed), "A client that was closed sends nothing.")
        if kind == "raise":
            world.check(
                answer.meta == {"kind": "ValueError", "text": text}, f"An error is its own: {answer.meta}"
            )
        else:
            found = answer.meta.get("text"), answer.arrays[0].tolist()
            world.check(found == (text, array.tolist()), f"An answer is its own: {found}, not {text}")

    is_closed = []
    for place in range(4):
        thread = sim.Thread(target=one, args=(place,), name=f"request {place}")
        threads.append(thread)
        thread.start()
    if closes:
        world.sleep(world.uniform(0.0, 1.0))
        client.close()
        try:
            client.send(Frame(Op.STATUS, numbers.next(), 0, {"kind": "now", "text": "late"}), 1.0)
        except ClusterError:
            pass
        else:
            world.check(False, "A client that was closed takes no request.")
    for thread in threads:
        thread.join()
    world.check(
        not pending._waiting and pending.bytes_in_flight == 0,
        lambda: f"Nothing is held: {len(pending._waiting)} requests, {pending.bytes_in_flight} bytes.",
    )


PROTOCOLS = {"calls": calls}
