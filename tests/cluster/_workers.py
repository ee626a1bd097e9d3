"""A cluster of worker processes for tests: free ports, a log for each, ended by their own ids."""

import json
import os
import socket
import subprocess
import sys
import time


def free_ports(count):
    """Ports that are free now; all are held until the last is found, so that none comes twice."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


class Workers:
    """The same command in several processes, with TF_CONFIG.

    Args:
        folder: for the logs.
        command: what every worker runs, after the interpreter.
        count: how many workers.
        devices: virtual CPU devices of each.
        env: more variables.
    """

    def __init__(self, folder, command, count=2, devices=1, env=None):
        self.logs = [folder / f"worker-{i}.log" for i in range(count)]
        addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
        self.processes = []
        for i, log in enumerate(self.logs):
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": i}}
            own = dict(os.environ, TF_CONFIG=json.dumps(config), UNISONO_DEVICES_PER_WORKER=str(devices))
            own |= {"KERAS_BACKEND": "jax", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
            own.pop("PJRT_NPROC", None)
            own |= {k: v.format(worker=i) for k, v in (env or {}).items()}
            with log.open("w") as stream:
                process = subprocess.Popen(
                    [sys.executable, *(part.format(worker=i) for part in command)],
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    env=own,
                )
            self.processes.append(process)

    def wait(self, seconds):
        """The exit codes; all processes are ended when the time is over, or soon after one fails."""
        deadline = time.monotonic() + seconds
        while any(p.poll() is None for p in self.processes) and time.monotonic() < deadline:
            if any(p.poll() for p in self.processes):
                deadline = min(deadline, time.monotonic() + 15)
            time.sleep(0.05)
        self.kill()
        return [p.wait(10) for p in self.processes]

    def kill(self):
        """End those that still run."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()

    def text(self):
        """The logs of all workers."""
        return "\n".join(f"--- {log.name}\n{log.read_text()[-6000:]}" for log in self.logs)
