"""A cluster of worker processes for tests: free ports, a log for each, ended by their own ids."""

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time

from tests import forked

#: Seconds that the others have to end by themselves when one has failed.
AFTER_A_FAILURE = 60.0
#: Below those from which systems take the ports of outgoing connections: between the choice of a
#: port and its use, nobody gets it by chance.
PORTS = range(10_000, 32_000)


def free_ports(count, host="127.0.0.1"):
    """Ports that are free now; all are held until the last is found, so that none comes twice."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = []
    with contextlib.ExitStack() as held:
        # Seeds that tests set must not make two test runs choose the same ports.
        for port in random.SystemRandom().sample(PORTS, len(PORTS)):
            if len(found) == count:
                return found
            sock = held.enter_context(socket.socket(family))
            with contextlib.suppress(OSError):
                sock.bind((host, port))
                found.append(port)
    raise AssertionError(f"{count} free ports are needed, and {len(found)} were found")


class Workers:
    """The same command in several processes, with TF_CONFIG.

    Args:
        folder: for the logs.
        command: what every worker runs, after the interpreter: a script, or `-m pytest`.
        count: how many workers.
        devices: virtual CPU devices of each.
        env: more variables; a list has one value for each worker.
    """

    def __init__(self, folder, command, count=2, devices=1, env=None):
        self.logs = [folder / f"worker-{i}.log" for i in range(count)]
        addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
        self.processes, self._starts = [], []
        for i in range(count):
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": i}}
            own = dict(os.environ, TF_CONFIG=json.dumps(config), UNISONO_DEVICES_PER_WORKER=str(devices))
            own |= {"KERAS_BACKEND": "jax", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
            own.pop("PJRT_NPROC", None)
            for name, value in (env or {}).items():
                own[name] = value.format(worker=i) if isinstance(value, str) else value[i]
            self._starts.append(([part.format(worker=i) for part in command], own))
            self.processes.append(self._start(i))

    def _start(self, i):
        command, env = self._starts[i]
        if command[0] != "-m":
            return forked.Program(command, os.getcwd(), self.logs[i], env=env)
        with self.logs[i].open("a") as stream:
            command = [sys.executable, *command]
            return subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, env=env)

    def wait_with_restarts(self, seconds, most):
        """Start each that fails again, with its old TF_CONFIG; return each one's exit codes."""
        deadline = time.monotonic() + seconds
        codes = [[] for _ in self.processes]
        try:
            while time.monotonic() < deadline and any(found[-1:] != [0] for found in codes):
                for i, process in enumerate(self.processes):
                    if codes[i][-1:] == [0] or process.poll() is None:
                        continue
                    codes[i].append(process.poll())
                    if process.poll() and len(codes[i]) <= most:
                        self.processes[i] = self._start(i)
                time.sleep(0.05)
        finally:
            self.kill()
        return codes

    def wait(self, seconds):
        """The exit codes; all processes are ended when the time is over, or a while after one fails."""
        deadline = time.monotonic() + seconds
        try:
            while any(p.poll() is None for p in self.processes) and time.monotonic() < deadline:
                if any(p.poll() for p in self.processes):
                    deadline = min(deadline, time.monotonic() + AFTER_A_FAILURE)
                time.sleep(0.05)
        finally:
            self.kill()
        return [p.wait(AFTER_A_FAILURE) for p in self.processes]

    def kill(self):
        """End those that still run."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()

    def text(self):
        """The logs of all workers."""
        return "\n".join(f"--- {log.name}\n{log.read_text()[-6000:]}" for log in self.logs)
