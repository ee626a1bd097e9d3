"""Tasks of a cluster with parameter servers, which a test starts one by one with a TF_CONFIG."""

import json
import os
import time

from tests import forked
from tests.cluster._workers import free_ports
from tests.cluster.launch_support import LIMIT


class TasksByHand:
    """The same script in some workers and parameter servers; worker 0 is the chief.

    Args:
        root: for the logs, and the directory in which the script runs.
        script: the program.
        count: of workers, and of parameter servers.
    """

    def __init__(self, root, script, count=2):
        self.root, self.script, self.processes = root, script, {}
        addresses = [f"localhost:{port}" for port in free_ports(2 * count)]
        self.cluster = {"worker": addresses[:count], "ps": addresses[count:]}

    def __enter__(self):
        for job, addresses in self.cluster.items():
            for index in range(len(addresses)):
                self.start(job, index)
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            process.kill()
            process.wait(LIMIT)

    def start(self, job, index):
        """Start a task, or start it again."""
        config = json.dumps({"cluster": self.cluster, "task": {"type": job, "index": index}})
        env = {**os.environ, "TF_CONFIG": config}
        command, log = [str(self.script)], self.log(job, index)
        self.processes[job, index] = forked.Program(command, self.root, log, env=env)

    def log(self, job, index):
        return self.root / f"{job}-{index}.log"

    def wait(self):
        """Return the exit code of each task."""
        deadline = time.monotonic() + LIMIT
        return {
            task: process.wait(max(1.0, deadline - time.monotonic()))
            for task, process in self.processes.items()
        }

    def text(self):
        """What all tasks wrote."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text()[-6000:]}" for path in sorted(self.root.glob("*.log"))
        )
