"""Chiefs that begin at the same moment, without a launcher that numbers their starts.

Tests: tests/unit/test_simulation.py.
"""

import shutil
import tempfile
from pathlib import Path

from tests.simulation._network import SimulatedNetwork
from tests.simulation._world import SETTING
from tests.simulation.protocol_servers import memory_folder
from unisono._errors import ClusterError, ContextError, InvalidArgumentError
from unisono.cluster_resolver._spec import Task
from unisono.parameter_server.server._client import ServerClient
from unisono.parameter_server.server._durable import DurableStore
from unisono.parameter_server.server._server import VariableServer
from unisono.parameter_server.state._create import NewVariable
from unisono.parameter_server.state._variables import StoredSpec

#: What a chief that was replaced may get.
_REPLACED = (ClusterError, ContextError, InvalidArgumentError)


class RivalChiefs:
    """Servers that are killed and started again, and chiefs that do not know of each other."""

    def __init__(self, world, folder):
        self.world, self.folder = world, folder
        self.network = SimulatedNetwork(
            world, is_lossy=lambda address: True, loss=0.02, repeat=0.05, late=0.05
        )
        self.servers = 1 + world.choose(2, SETTING)
        self.risk = world.pick((0.0, 0.02), SETTING)
        self.is_over = False
        #: By chief: the generation that it has begun.
        self.begun = {}
        self.chiefs = []
        world.faults_left = world.choose(4, SETTING)

    def serve(self, index):
        """Be a server."""
        durable = DurableStore(self.folder / f"ps{index}", log_bytes=1 << 16, interval=None)
        server = VariableServer(durable.store, durable)
        self.network.rpc_server(f"ps{index}", server.handle).start()
        server.ended.wait()

    def keep(self, index):
        """Start a server again when it was killed."""
        while not self.is_over:
            process = self.world.process(f"ps{index}", lambda: self.serve(index))
            process.risk = self.risk
            process.wait()
            if process.error is not None:
                raise process.error
            self.world.sleep(self.world.uniform(0.1, 2.0))

    def lead(self, chief):
        """Begin a job."""
        clients = [
            self.network.rpc_client(Task("ps", i), f"ps{i}", Task("chief", 0)) for i in range(self.servers)
        ]
        client = ServerClient(clients)
        self.world.sleep(self.world.uniform(0.0, self.world.pick((0.02, 1.0))))
        generation = client.begin_job(0)
        self.world.check(
            generation not in self.begun.values(),
            lambda: f"Two chiefs have generation {generation}: {self.begun}",
        )
        self.begun[chief] = generation
        while not all(n in self.begun or each.is_dead for n, each in enumerate(self.chiefs)):
            self.world.sleep(0.1)
        is_last = generation == max(self.begun.values())
        news = [NewVariable(StoredSpec("w", (2,), "float32"))]
        try:
            for server in range(self.servers):
                client.create_variables(server, news)
        except _REPLACED as error:
            text = f"The last chief leads. It got: {error}"
            self.world.check(not is_last, text)
        else:
            self.world.check(is_last, f"Chief {chief} leads, too: {self.begun}")

    def run(self):
        """Let chiefs begin, and look who leads."""
        world = self.world
        for index in range(self.servers):
            world.spawn(lambda index=index: self.keep(index), f"keeps {index}")
        for number in range(2 + world.choose(2, SETTING)):
            self.chiefs.append(world.process(f"chief{number}", lambda number=number: self.lead(number)))
        for chief in self.chiefs:
            world.check(chief.wait(900.0), lambda: f"A chief begins, or ends.\n{world.stacks()}")
            if not isinstance(chief.error, (*_REPLACED, type(None))):
                raise chief.error
        world.check(self.begun, "One of several chiefs leads.")
        self.is_over = True


def chiefs(world):
    """Two or three chiefs begin at the same moment: one leads, and each of the others is told so."""
    world.settle()
    folder = Path(tempfile.mkdtemp(prefix="unisono-sim-", dir=memory_folder()))
    try:
        RivalChiefs(world, folder).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


PROTOCOLS = {"chiefs": chiefs}
