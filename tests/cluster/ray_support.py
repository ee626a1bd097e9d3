"""A cluster of Ray with two nodes on this machine, which leaves no process behind."""

import contextlib
import os
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest

from tests.cluster.launch_support import LIMIT, is_alive, until

#: Ray looks at its nodes this often, and gives them up after so many failures: 15 s by default.
HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 4,
}
#: Of each node: its object store, in bytes, is hardly more than Ray's least.
NODE = {
    "object_store_memory": 80_000_000,
    "include_dashboard": False,
    "num_gpus": 0,
    "resources": {"slot": 1},
}


def descendants(pid):
    """The processes that a process has started, and theirs, from /proc."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            text = path.read_text()
            parents.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(int(text.split()[0]))
    found, waiting = [], [pid]
    while waiting:
        waiting += (own := parents.get(waiting.pop(), []))
        found += own
    return found


class RayCluster:
    """Two nodes: the first one has two CPUs, so that it can take over the task of the second one.

    Args:
        folder: for its files.
    """

    def __init__(self, folder):
        import ray
        from ray.cluster_utils import Cluster

        self.ray, self._before = ray, set(descendants(os.getpid()))
        head = {**NODE, "num_cpus": 2, "_system_config": HEALTH, "temp_dir": folder}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address = self._cluster.address
        ray.init(address=self.address, log_to_driver=False)
        self.add_second_node()

    def add_second_node(self):
        """Start the second node, also after it was killed, and wait until all of both nodes is free."""
        self._second = self._cluster.add_node(wait=False, **NODE, num_cpus=1)
        until(lambda: self.free() == {"CPU": 3, "slot": 2}, "both nodes of Ray")

    def free(self):
        """The processors, and the places of one for each node, that Ray would give a task now."""
        return {name: self.ray.available_resources().get(name) for name in ("CPU", "slot")}

    @contextlib.contextmanager
    def second_node_killed_when(self, condition):
        """Kill the second node once a condition holds, while the body runs."""

        def kill():
            until(condition, "the time to kill the node")
            self._kill_second_node()

        killer = threading.Thread(target=kill)
        killer.start()
        yield
        killer.join()

    def _kill_second_node(self):
        """Kill its raylet and all that it has started."""
        (raylet,) = self._second.all_processes["raylet"]
        for pid in (raylet.process.pid, *descendants(raylet.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self):
        """End Ray, and check that it has ended."""
        started = set(descendants(os.getpid())) - self._before
        self.ray.shutdown()
        self._cluster.shutdown()
        deadline = time.monotonic() + LIMIT
        while (left := [pid for pid in started if is_alive(pid)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert not left, "processes of Ray were left behind"


@contextlib.contextmanager
def ray_cluster():
    """Start it with the environment of a user; the tests' own serves one process with eight devices."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PJRT_NPROC", raising=False)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # By default workers get what other processes leave: beside tests that compute, one test took 447 s.
        patch.setenv("RAY_worker_niceness", "0")
        # Actors without a GPU keep the variable that names none.
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        root = str(Path(__file__).parents[2])
        patch.setenv("PYTHONPATH", os.pathsep.join([os.environ["PYTHONPATH"], root]))
        # The names of sockets in it must be short.
        folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        # Where Ray writes the address of this cluster: by default in a folder that all clusters of the
        # machine share, and that is not there where Ray has never run.
        patch.setenv("RAY_TMPDIR", folder)
        Path(folder, "ray").mkdir()
        try:
            cluster = RayCluster(folder)
            try:
                yield cluster
            finally:
                cluster.close()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
