"""The control plane with many tasks: what the chief receives, sends and computes.

    python benchmarks/many_tasks.py [--tasks 64 256 1024] [--launches 16 64]

The chief runs its real code over real sockets; the other tasks are threads of this process without JAX, which
do all that they do with the chief, and leave out what they do among themselves. CPU time is that of the
chief's threads alone. JAX's coordination service is a board in memory here: its messages are counted.

A launch starts real processes of `unisono launch`, whose program is empty, on this machine. Its CPU time is
the launcher's own, without the tasks'.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import io
import os
import resource
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path

from unisono.cluster._introduction import introduce
from unisono.cluster._program_digest import cluster_text
from unisono.cluster.liveness._peer_monitor import PeerMonitor
from unisono.cluster.liveness._status import WorkerStatus
from unisono.cluster.liveness._status_server import Peers, StatusServer
from unisono.cluster.rendezvous import _protocol
from unisono.cluster.rendezvous._client import rendezvous
from unisono.cluster.rendezvous._server import RendezvousServer
from unisono.cluster_resolver._spec import Timeouts
from unisono.launcher._launch import run_program
from unisono.launcher._options import LaunchOptions, UserProgram

#: Seconds for whatever is waited for: nothing here should take as long.
LIMIT = 120.0
#: Status servers of the stand-ins: each answers for its part of them.
SERVERS = 16
#: Seconds between the starts of two stand-ins.
APART = 0.002
#: Seconds for which all others wait at the end of their programs for the chief.
WAITS = 1.0


class Counted:
    """Messages and bytes that the chief has received and sent, and whom it has asked; answers are short."""

    def __init__(self):
        self.counts = collections.Counter()

    def received(self, size):
        """Count a message to the chief."""
        self.counts.update(messages=1, received=1, bytes=size)

    def sent(self, size):
        """Count a message of the chief."""
        self.counts.update(messages=1, sent=1, bytes=size)


class CountedRendezvous(RendezvousServer):
    """The chief's end of a rendezvous."""

    def __init__(self, listener, state):
        super().__init__(listener, state)
        self.counted = Counted()

    def _send(self, peer, data):
        self.counted.sent(len(data))
        super()._send(peer, data)

    def _admit(self, peer, member):
        self.counted.received(len(_protocol.frame(_protocol.hello(member))))
        super()._admit(peer, member)


class CountedServer(StatusServer):
    """The chief's port for its peers."""

    def __init__(self, status, secret):
        self.counted = Counted()
        super().__init__("127.0.0.1", status, secret)

    def _answer(self, inbox):
        size, answer = len(inbox), super()._answer(inbox)
        if answer is not None:
            self.counted.received(size)
            self.counted.sent(len(answer))
        return answer

    def cpu(self):
        """CPU seconds of its thread."""
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))


@dataclasses.dataclass(frozen=True)
class ChiefPeers(Peers):
    """How the chief reaches the others."""

    counted: Counted = dataclasses.field(default_factory=Counted)

    def _ask_at_once(self, text, kind, processes):
        self.counted.counts["asked"] += len(processes)
        for _ in processes:
            self.counted.sent(len(text))
            self.counted.received(0)
        return super()._ask_at_once(text, kind, processes)


class StandInPeers(Peers):
    """How a stand-in reaches the chief; it asks no other one."""

    @property
    def others(self):
        """The chief."""
        return [0]


class Board:
    """JAX's coordination service, in memory: counts what each process posts and reads."""

    def __init__(self):
        self.texts, self.changed, self.counts = {}, threading.Condition(), collections.Counter()

    def of(self, process):
        """What one process uses."""
        return BoardOf(self, process)


class BoardOf:
    """The board, for one process."""

    def __init__(self, board, process):
        self.board, self.process = board, process

    def post(self, key, text, seconds):
        """Post a text."""
        with self.board.changed:
            self.board.counts.update({self.process: 1, "bytes": len(text)})
            self.board.texts[key] = text
            self.board.changed.notify_all()

    def read(self, key, seconds):
        """Return a text, None where it was not posted in time."""
        with self.board.changed:
            self.board.changed.wait_for(lambda: key in self.board.texts, seconds)
            text = self.board.texts.get(key)
            self.board.counts.update({self.process: 1, "bytes": len(text or "")})
            return text


@dataclasses.dataclass
class Phase:
    """What a phase has cost the chief."""

    name: str
    counts: collections.Counter
    cpu: float
    wall: float


class Phases:
    """Measures one phase after the other: in the chief's thread, and in that of its status server."""

    def __init__(self):
        self.found = []

    @contextlib.contextmanager
    def phase(self, name, counted, server=None):
        """Measure what the block costs."""
        before = [collections.Counter(each.counts) for each in counted]
        cpu = time.thread_time() + (server.cpu() if server else 0.0)
        wall = time.perf_counter()
        yield
        wall = time.perf_counter() - wall
        cpu = time.thread_time() + (server.cpu() if server else 0.0) - cpu
        counts = collections.Counter()
        for each, earlier in zip(counted, before, strict=True):
            counts.update(each.counts)
            counts.subtract(earlier)
        self.found.append(Phase(name, counts, cpu, wall))


def stand_in(process, addresses, config, board, servers, statuses, met):
    """What a task does with its chief, from its start to its end."""
    # One after the other: all threads share one interpreter with the chief.
    time.sleep(process * APART)
    agreed = rendezvous(process, len(addresses), addresses, config, Timeouts(start_up=LIMIT))
    own = servers[process % SERVERS]
    at = tuple(f"127.0.0.1:{own.port}" if i == process else "" for i in range(len(addresses)))
    names = tuple(f"worker {i}" for i in range(len(addresses)))
    peers = introduce(board.of(process), StandInPeers(process, at, names, agreed.secret, LIMIT), LIMIT)
    monitor = PeerMonitor(statuses[process % SERVERS], peers, LIMIT)
    met.wait()
    absent = monitor.find_absent()
    met.wait()
    return absent, monitor.wait_for_shutdown(LIMIT)


def control_plane(count):
    """Run a cluster of some tasks from its start to its end; return the phases, and the board's counts."""
    phases, board, met = Phases(), Board(), threading.Barrier(count)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1024))
        port = listener.getsockname()[1]
        # As in TF_CONFIG, where each task has an address of its own.
        addresses = [f"127.0.0.1:{port}", *(f"10.0.0.1:{i}" for i in range(1, count))]
        config = {"generation": 0, "jax": "0.10.2", "cluster": cluster_text({"worker": addresses})}
        secret = "0" * 32
        statuses = [WorkerStatus() for _ in range(SERVERS)]
        servers = [StatusServer("127.0.0.1", status, secret) for status in statuses]
        for server in servers:
            stack.callback(server.close)
        chief = CountedServer(WorkerStatus(), secret)
        stack.callback(chief.close)
        pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(count))
        ended = [
            pool.submit(stand_in, i, addresses, config, board, servers, statuses, met)
            for i in range(1, count)
        ]
        own = _protocol.Member(0, "here", os.getpid(), "0", {**config, "num_processes": count})
        state = _protocol.open_rendezvous(own, count, addresses, LIMIT, time.monotonic())
        server = stack.enter_context(CountedRendezvous(listener, state))
        with phases.phase("arrival and fingerprints", [server.counted]):
            server.run({"coordinator": addresses[0], "secret": secret})
        at = (f"127.0.0.1:{chief.port}", *[""] * (count - 1))
        names = tuple(f"worker {i}" for i in range(count))
        peers = ChiefPeers(0, at, names, secret, LIMIT)
        counted = [peers.counted, chief.counted]
        with phases.phase("introduction", counted, chief):
            peers = introduce(board.of(0), peers, LIMIT)
        monitor = PeerMonitor(chief._status, peers, LIMIT)
        met.wait(LIMIT)
        with phases.phase("one check of all by all", counted, chief):
            assert not monitor.find_absent()
            met.wait(LIMIT)
        with phases.phase(f"{WAITS:g} s of waiting at the end", counted, chief):
            time.sleep(WAITS)
            while not all(status.is_finished for status in statuses[:count]):
                time.sleep(0.01)
        with phases.phase("end", counted, chief):
            assert monitor.wait_for_shutdown(LIMIT) is None
            assert all(each.result(LIMIT) == ({}, None) for each in ended)
    return phases.found, board.counts


def launch(count):
    """Launch so many empty tasks; return the launcher's own CPU seconds, the tasks' and the seconds."""
    with tempfile.TemporaryDirectory(prefix="unisono-many-") as folder:
        program = Path(folder) / "empty.py"
        program.write_text("")
        children = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        cpu, wall = time.process_time(), time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            code = run_program(LaunchOptions(workers=count), UserProgram(str(program)), Path(folder) / "logs")
        assert code == 0
        children = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - children
        return time.process_time() - cpu, children, time.perf_counter() - wall


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tasks", nargs="+", type=int, default=[64, 256, 1024])
    parser.add_argument("--launches", nargs="*", type=int, default=[16, 64])
    given = parser.parse_args()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    threading.stack_size(256 << 10)
    print("| tasks | phase | messages at the chief | a task | bytes a task | chief's CPU | a task | time |")
    print("|---|---|---|---|---|---|---|---|")
    for count in given.tasks:
        phases, board = control_plane(count)
        for phase in phases:
            messages, size = phase.counts["messages"], phase.counts["bytes"]
            print(
                f"| {count} | {phase.name} | {messages} | {messages / count:.1f} | {size / count:.0f} | "
                f"{phase.cpu:.2f} s | {1e6 * phase.cpu / count:.0f} µs | {phase.wall:.2f} s |"
            )
        board_row = f"| {count} | board: process 0; each other | {board[0]}; {board[1]} | |"
        print(f"{board_row} {board['bytes'] / count:.0f} | | | |", flush=True)
    for i, count in enumerate(given.launches):
        if i == 0:
            print("\n| tasks | launcher's CPU | a task | the tasks' CPU | time |\n|---|---|---|---|---|")
        cpu, children, wall = launch(count)
        print(
            f"| {count} | {cpu:.2f} s | {1000 * cpu / count:.1f} ms | {children:.1f} s | {wall:.1f} s |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
