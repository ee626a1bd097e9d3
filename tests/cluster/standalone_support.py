"""Servers of standalone clients on this machine, and what they are doing."""

import contextlib
import os
import signal
import subprocess
import sys
import time

from unisono.rpc._calls import RequestNumbers
from unisono.rpc._frames import Frame
from unisono.rpc._ops import Op
from unisono.rpc._transport._client import RpcClient
from unisono.standalone._protocol import CLIENT, LIMIT, SERVER, read_standalone_keys

#: Seconds until something is taken to hang, on however busy a machine.
SECONDS = 180.0
KEY = "5e" * 32
NUMBERS = RequestNumbers()


class Served:
    """A process that runs `unisono serve`.

    Args:
        root: for its files and its log.
        flags: of the command.
        spares: processes that it keeps ready.
    """

    def __init__(self, root, *flags, spares=1):
        self.root, self.flags, self.spares = root, flags, spares
        root.mkdir(parents=True, exist_ok=True)
        self.address = ""
        self.start()

    def start(self):
        """Start it, again at the same address, and wait until it listens."""
        at = ["--address", self.address] if self.address else list(self.flags)
        command = [sys.executable, "-m", "unisono", "serve", *at, "--spares", str(self.spares)]
        log = self.root / "serve.log"
        environ = {**os.environ, "UNISONO_CLUSTER_KEY": KEY}
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [*command, "--dir", str(self.root / "files")], stderr=file, env=environ, cwd=self.root
            )
        until(lambda: "serving at " in log.read_text() or self.process.poll() is not None)
        assert self.process.poll() is None, log.read_text()
        self.address = log.read_text().partition("serving at ")[2].partition(";")[0]

    def status(self):
        """What it says of itself."""
        keys = read_standalone_keys({"UNISONO_CLUSTER_KEY": KEY}, CLIENT)
        rpc_client = RpcClient(SERVER, self.reached_at, keys, LIMIT)
        try:
            return rpc_client.call(Frame(Op.STATUS, NUMBERS.next()), SECONDS).meta
        finally:
            rpc_client.close()

    @property
    def reached_at(self):
        """Where a client on this machine finds it."""
        return self.address.replace("0.0.0.0", "127.0.0.1")

    def tasks(self):
        """The ids of its processes, without spare ones and the reaper."""
        return {pid for pid in children_of(self.process.pid) if b"_task.py" in command_of(pid)}

    def kill(self):
        """End it as a machine that loses power does."""
        self.process.kill()
        self.process.wait()

    def close(self):
        """End it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(SECONDS) in (0, -signal.SIGKILL)


def children_of(pid):
    """The ids of the processes that a process has started."""
    found = set()
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
            found |= {int(each) for each in file.read().split()}
    return found


def command_of(pid):
    """The command of a process; empty where it has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()
    return b""


def until(condition, seconds=SECONDS):
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.05)


def is_alive(pid):
    """Whether a process runs."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"
    return False
