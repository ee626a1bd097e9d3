"""Tasks of a cluster on several hosts of this machine, and what one device computes in their place."""

import functools
import json
import re
import time
from pathlib import Path

from tests import forked
from tests.cluster.standalone_support import KEY

PROGRAM = Path(__file__).parent / "programs" / "two_hosts.py"
#: Seconds until something is taken to hang, on however busy a machine.
LIMIT = 300.0
#: Of other tests' servers, no program on these hosts' networks.
PORT = 2222


@functools.cache
def single_device_weights():
    """The sum of the weights' absolute values on one device, without a strategy."""
    import keras
    import numpy as np

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(64), keras.layers.Dense(4)])
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(320, 4)).astype("float32")
    model.fit(x, x, epochs=2, batch_size=8, shuffle=False, verbose=0)
    return float(sum(np.abs(w).sum(dtype="float64") for w in model.get_weights()))


def weights(text):
    """The sums that a program has printed."""
    return [float(each) for each in re.findall(r"weights (\S+)", text)]


class Tasks:
    """The program in the tasks of a cluster, task by task on the host of its address.

    Args:
        hosts: the hosts.
        root: for the logs.
        cluster: as in TF_CONFIG.
        args: of the program.
        own: of single tasks: (job, index) -> `args`, `host`, `clock` or `cluster`.
        program: what they run.
        variables: more environment.
    """

    def __init__(self, hosts, root, cluster, args=(), own=None, program=PROGRAM, **variables):
        self.hosts, self.root, self.cluster, self.args = hosts, root, cluster, args
        self.own, self.program, self.variables = own or {}, program, variables
        self.logs, self.processes = {}, {}
        for job, addresses in cluster.items():
            for index in range(len(addresses)):
                self.start(job, index)

    def start(self, job, index):
        """Start a task, or start it again, with a new log."""
        own = {"args": (), "clock": 0.0, "cluster": self.cluster} | self.own.get((job, index), {})
        host = own["host"] if "host" in own else self._host(self.cluster[job][index])
        config = json.dumps({"cluster": own["cluster"], "task": {"type": job, "index": index}})
        log = self.logs[job, index] = self.root / f"{job}-{index}-{len(list(self.root.glob('*.log')))}.log"
        self.processes[job, index] = forked.Program(
            [str(self.program), *map(str, [*self.args, *own["args"]])], self.root, log,
            env=forked.environment(**{"TF_CONFIG": config, "UNISONO_CLUSTER_KEY": KEY} | self.variables),
            host=self.hosts.holder(host), clock=own["clock"],
        )  # fmt: skip

    def _host(self, address):
        name = address.rpartition(":")[0].strip("[]")
        return next(i for i in range(len(self.hosts)) if name in self._names(i))

    def _names(self, i):
        return {f"h{i}", *(self.hosts.address(i, n, v) for n in range(2) for v in (4, 6))}

    def wait(self, seconds=LIMIT):
        """Return the exit codes, and end what still runs after a while."""
        deadline = time.monotonic() + seconds
        try:
            return [each.wait(max(1.0, deadline - time.monotonic())) for each in self.processes.values()]
        finally:
            for process in self.processes.values():
                process.kill()

    def log(self, job, index):
        """What a task wrote."""
        return self.logs[job, index].read_text()

    @property
    def text(self):
        """What all tasks wrote."""
        return "\n".join(f"--- {log.name}\n{log.read_text()[-6000:]}" for log in self.logs.values())
