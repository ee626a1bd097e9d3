"""The chief's signs of life."""

import threading

from tests.support import LIMIT

from unisono._errors import ClusterError
from unisono.cluster_resolver._spec import Task
from unisono.parameter_server.server._heartbeats import ChiefHeartbeats
from unisono.rpc._loopback import LoopbackNetwork
from unisono.rpc._ops import Op


def test_all_tasks_get_signs_also_where_one_is_away():
    network, got = LoopbackNetwork(), [threading.Event(), threading.Event()]

    class Away:
        def send(self, frame, timeout):
            raise ClusterError("it was closed")

    def handler(event):
        def handle(client, frame):
            if (frame.op, frame.generation) == (Op.HEARTBEAT, 7):
                event.set()
            return frame.answer(Op.OK)

        return handle

    for i, event in enumerate(got):
        network.rpc_server(str(i), handler(event)).start()
    rpc_clients = [network.rpc_client(Task("ps", i), str(i)) for i in range(2)]
    heartbeats = ChiefHeartbeats([Away(), *rpc_clients], 7, every=0.01)
    assert all(event.wait(LIMIT) for event in got)
    heartbeats.close()
    heartbeats._thread.join(LIMIT)
    assert not heartbeats._thread.is_alive()
