"""The ports of workers for `unisono watch`, and those who watch: jobs that restart, end and are lost.

Real: `WatchPort` with its keys and files, `folder_at`, `WorkerFolder`, `WatchedWorker`, `JobReader`. Stubs:
what a task computes, and the writer of its events, which writes lines in pieces. Promised, and checked:

- a watcher has each byte of a task's events once and in its order, also after lost connections, restarts, and
  where the file begins again;
- who has asked a task for its end before it closes its port is told it, with the code and all events;
- a job counts as ended well where each task has said so alone, and as over a minute after its end at most;
- a look at a job does not wait; the first one ends within its bound, also with an error, which says what to
  write; who has another key is told nothing of the job;
- a task whose port, file or folder cannot be used trains on;
- who has closed has no connection; a task that has ended well leaves no file of events.

Tests: tests/unit/test_simulated_launches.py.
"""

import contextlib
import io
import json
import os
import shutil
import socket
import sys

import pytest

from tests.simulation import _primitives as sim
from tests.simulation._disk import Disk
from tests.simulation._file_doors import ROOT, FileDoors, Machine
from tests.simulation._network import SimulatedNetwork
from tests.simulation._primitives import _StandInModule
from tests.simulation._world import SETTING, Violation
from unisono._errors import ClusterError
from unisono.cluster import _watch_port
from unisono.rpc._calls import PeerRejectedError
from unisono.rpc._transport._keys import VARIABLE, WATCH_VARIABLES
from unisono.watch import _address_folder, _worker_folder
from unisono.watch._job_reader import JobReader
from unisono.watch._log_folder import ReceivedBytes

_KEY, _OTHER = "5e" * 32, "a7" * 32
_STEP = 1.0
#: Seconds in which a job is found: two keys are tried, and the first answers of all are waited for.
_FIRST = (
    2 * _address_folder._FIRST_SECONDS + _worker_folder._ANSWER_SECONDS + 1 + _worker_folder._OTHERS_SECONDS
)
#: Seconds after the end of a job in which it counts as over, for each watcher.
_OVER = _worker_folder._GONE + 2 * _worker_folder._LOST + 5.0
_KINDS = (
    "kill task", "raise", "pause task", "cut off", "part", "rotate", "removed", "full", "pause watcher",
    "kill watcher", "port", "rotate", "rotate",
)  # fmt: skip


class _Events:
    """What `process_events` gives, of the process that runs."""

    def __init__(self, job):
        self._job = job

    def __call__(self):
        return self._job.world.current.process.own["events"]

    def cache_clear(self):
        """Do nothing: the writer of a process asks for its file when it writes."""


class _Writer:
    """Writes the events of a process: lines in pieces, each at the end of the file that is there."""

    def __init__(self, job, task, environ):
        self._job, self._task, self._environ = job, task, environ
        self.lines, self._is_over = [], False

    def step(self, number, generation):
        """Note a step."""
        now = self._job.world.wall
        line = {"event": "steps", "from": now - _STEP, "until": now, "step": number, "count": 1}
        line |= {"generation": generation, "data": None, "exchange": None, "text": "ä" * self._job.length}
        self.lines.append(json.dumps(line, ensure_ascii=False).encode() + b"\n")

    def flush(self):
        """Write what there is; where that fails, no more."""
        lines, self.lines = self.lines, []
        path = self._environ["UNISONO_EVENTS"]
        parts = self._job.written.setdefault((self._task, path.rpartition("/")[2]), [])
        try:
            for line in lines if not self._is_over else ():
                middle = 1 + self._job.world.choose(len(line) - 1)
                for piece in (line[:middle], line[middle:]):
                    with open(path, "ab", buffering=0) as file:
                        if file.seek(0, io.SEEK_END) == 0 and (not parts or parts[-1]):
                            parts.append(bytearray())
                        # Of this file, also where it is removed meanwhile; a look may be between the two.
                        part = parts[-1]
                        part.extend(piece)
                        try:
                            file.write(piece)
                        except OSError:
                            del part[-len(piece) :]
                            raise
        except OSError:
            self._is_over = True


class _Task:
    """A task, which may be started again at its address."""

    def __init__(self, job, name, address):
        self.job, self.world, self.name, self.address = job, job.world, name, address
        self.process = self.port = None
        self.raises = False

    def start(self, environ):
        self.raises, self.code = False, None
        self.process = self.job.machine.process(self.name, lambda: self._run(environ))

    def _run(self, environ):
        job, world, own = self.job, self.world, self.world.current.process.own
        own["environ"], own["events"] = environ, _Writer(job, self.name, environ)
        own["error"] = None
        tasks = dict(job.tasks)
        # A key or a folder that cannot be used is an error at the start.
        port = self.port = _watch_port.WatchPort(self.name, tasks)
        # The others are waited for.
        world.sleep(world.uniform(0.0, 2.0))
        job.every_server.discard(self.address)
        port.listen(self.address.rpartition(":")[0])
        code, number = 0, 0
        while number < job.total:
            world.sleep(_STEP)
            if self.raises:
                code, own["error"] = 1, ValueError("no data")
                break
            if any(t.code or (t.code is None and t.process.is_dead) for t in job.running):
                code, own["error"] = 1, RuntimeError("Gloo: Connection closed by peer")
                break
            number += 1
            own["events"].step(number, int(environ.get("UNISONO_GENERATION", 0)))
            if world.choose(2):
                own["events"].flush()
        job.codes[world.current.process.pid] = self.code = code
        job.first_end = min(job.first_end, world.now)
        port.end(code, world.pick(("", "asked to end")) if code == 0 else "")
        port.end(1)
        job.check_port(self, environ, code)


class _Server:
    """The server of a port: who waits for the end is told it."""

    def __init__(self, job, address, handle, keys):
        self._job, self._handle = job, handle
        self.waits, self.secret, self._is_closing = {}, keys.secret, False
        self._server = job.network.rpc_server(address, self._handled)
        self.address = address

    def start(self):
        self._job.world.give_way()
        if self._job.world.faults_left and self.address in self._job.taken:
            raise ClusterError("another program listens there")
        self._server.start()
        self._job.servers[self.address] = self
        self._job.every_server.add(self.address)

    def _handled(self, client, frame):
        if client.connection in self._job.strangers or self._is_closing:
            return None
        is_until = frame.meta.get("until") == "end"
        if is_until:
            self.waits[client.connection] = frame
        answer = self._handle(client, frame)
        if is_until and answer is not None:
            self.waits.pop(client.connection, None)
        return answer

    def reply(self, client, answer):
        self.waits.pop(client.connection, None)
        # Many bytes are read for each.
        self._job.world.sleep(self._job.world.uniform(0.0, 0.05))
        self._server.reply(client, answer)

    def close(self):
        # It takes no more, and what it has answered arrives: see `RpcServer._wait_for_answers`.
        self._is_closing = True
        self._job.world.sleep(0.1)
        self._server.close()
        if self._job.servers.get(self.address) is self:
            del self._job.servers[self.address]
            self._job.fail_unless(
                len(self.waits) <= self._job.most_untold,
                f"{len(self.waits)} that have asked {self.address} for the end are not told it.",
            )


class _Client:
    """A client of a port: rejected where the keys differ."""

    def __init__(self, job, task, address, keys=None, limit=0):
        self._job, self._world, self._task, self._address = job, job.world, task, address
        self._secret = None if keys is None else keys.secret
        self._client = job.network.rpc_client(task, address)
        if self._secret != bytes.fromhex(_KEY):
            job.strangers.add(self._client.client.connection)

    def _rejection(self):
        server = self._job.servers.get(self._address)
        if server is None or server.secret == self._secret:
            return None
        return PeerRejectedError(f"{self._address} has another key.", "it has another key")

    def call(self, frame, timeout):
        self._world.sleep(self._world.uniform(0.0, 0.1))
        if (error := self._rejection()) is not None:
            raise error
        return self._client.call(frame, timeout)

    def send(self, frame, timeout=None):
        if self._rejection() is None:
            return self._client.send(frame, timeout)
        future = sim.Future()

        def fail():
            self._world.sleep(0.1)
            future.set_exception(self._rejection() or ClusterError("the connection was lost"))

        self._world.spawn(fail, "rejection")
        return future

    def close(self):
        self._client.close()


class _Watcher:
    """Somebody who runs `unisono watch`."""

    def __init__(self, job, number):
        self.job, self.world, self.name = job, job.world, f"watcher{number}"
        self.shown = None
        world = self.world
        self.environ = world.pick(
            (
                *[{WATCH_VARIABLES[0]: _KEY}] * 7, {WATCH_VARIABLES[0]: _KEY, VARIABLE: _OTHER},
                {WATCH_VARIABLES[0]: _OTHER}, {WATCH_VARIABLES[0]: _OTHER, VARIABLE: _OTHER}, {},
            ),
            SETTING,
        )  # fmt: skip
        self.has_key = self.environ.get(WATCH_VARIABLES[0]) == _KEY
        self.process = job.machine.process(self.name, self._run)

    def _run(self):
        world, job = self.world, self.job
        world.current.process.own["environ"] = self.environ
        world.sleep(world.uniform(0.0, 1.3 * _STEP * job.total))
        addresses = list(dict(job.tasks).values())
        addresses = world.pick((addresses[:1], addresses[-1:], addresses))
        while True:
            began = world.now
            try:
                folder = _address_folder.folder_at(addresses)
            except ClusterError as error:
                self._check_error(str(error), world.now - began)
                self._check_closed()
                if not self.has_key or job.is_over:
                    return
                world.sleep(2.0)
                continue
            break
        job.fail_unless(self.has_key, f"{self.name} has another key, and finds the job.")
        seconds = world.now - began
        job.fail_unless(seconds <= _FIRST + job.slack, f"A job is found after {seconds} s.")
        reader, found_at = JobReader(folder), world.now
        pause = world.pick((1.0, 0.5, 3.0))
        while not job.is_over or world.now < job.over_at + _OVER + job.slack:
            self._look(reader, folder)
            if job.is_over and self.shown.is_over:
                break
            world.sleep(pause if not job.is_over else 2.0)
        shown = self.shown
        job.fail_unless(shown.is_over, f"A job that has ended {shown.state}: {shown.tasks}")
        if self.shown.exit_code == 0:
            self._check_all_events(folder)
        elif not world.faults and found_at < job.first_end - 1.0 - job.slack and not job.most_untold:
            job.fail_unless(False, f"A job has ended well, and shown are {self.shown.faults}.")
        folder.close()
        self._check_closed()

    def _check_error(self, text, seconds):
        job = self.job
        job.fail_unless(seconds <= _FIRST + job.slack, f"An error is raised after {seconds} s: {text}")
        is_of_key = "key" in text and ("--key" in text or "another key" in text)
        job.fail_unless(
            is_of_key or self.environ != {}, f"Who has no key must be told so, and is told {text!r}"
        )
        job.fail_unless(_KEY not in text and _OTHER not in text, f"A key must not be shown, as in {text!r}")
        if is_of_key and self.has_key:
            job.fail_unless(False, f"The key is right, and the error says {text!r}")

    def _check_closed(self):
        network, own = self.job.network, self.world.current.process
        left = [c.address for c in network._rpc_clients.values() if network._processes.get(c) is own]
        self.job.fail_unless(not left, f"Connections with {left} are left.")

    def _look(self, reader, folder):
        job, world, began = self.job, self.world, self.world.now
        paused = world.current.process.own.get("paused", 0.0)
        self.shown = reader.refresh()
        slack = job.slack + world.current.process.own.get("paused", 0.0) - paused
        job.fail_unless(world.now - began <= 0.1 + slack, f"A look takes {world.now - began} s.")
        for task, worker in folder._by_task.items():
            self._check_events(task, worker)
        if self.shown.exit_code == 0:
            codes = {task: job.codes.get(pid) for task, pid in folder._pids.items()}
            job.fail_unless(not any(c != 0 for c in codes.values()), f"It counts as ended well: {codes}")

    def _check_events(self, task, worker):
        """Check that the events of a task are those that it has written, from the first byte on."""
        size, offset = worker.events.size, worker._offset
        received = worker.events.read(size - offset, offset)
        files = self._files(task, worker)
        self.job.fail_unless(
            any(bytes(each[:offset]) == received for each in files) and size >= offset,
            f"{self.name} has received of {task} {received[-200:]!r}, of {[bytes(f[-200:]) for f in files]}",
        )

    def _files(self, task, worker):
        """Return what was written of a file, from each of its beginnings on."""
        name, _, _ = worker._file.partition(" ")
        return self.job.written.get((task, name)) or [b""]

    def _check_all_events(self, folder):
        """Check that who is told a good end has all events."""
        for task, worker in folder._by_task.items():
            files = self._files(task, worker)
            # In one short answer is not always room for all that a late watcher lacks.
            is_late = worker.has_more and _watch_port.CHUNK < 1000
            is_whole = worker._offset == len(files[-1]) or is_late or not worker.facts
            self.job.fail_unless(
                is_whole or self.job.is_unkept,
                f"{self.name} has {worker._offset} of {len(files[-1])} bytes of {task}.",
            )


class _Job:
    """The tasks, their supervisor, and what is known of them."""

    def __init__(self, world, machine):
        self.world, self.machine = world, machine
        self.network = SimulatedNetwork(
            world,
            late=world.pick((0.0, 0.02), SETTING),
            cut=world.pick((0.0, 0.02, 0.1), SETTING),
            latest=4.0,
            is_lossy=lambda address: False,
        )
        self.servers, self.strangers, self.taken = {}, set(), set()
        #: The addresses at which a port has listened.
        self.every_server = set()
        self.total, self.length = 4 + world.choose(10, SETTING), world.pick((1, 60), SETTING)
        self.is_counted = world.choose(3, SETTING) < 2
        self.has_launcher = world.choose(4, SETTING) == 3
        self.tasks, self.running, self.every = {}, [], {}
        #: What was written to each file; each beginning of one is another part.
        self.written = {}
        #: By process: with which code its program has ended.
        self.codes = {}
        self.is_over, self.over_at = False, 0.0
        #: When the first task of the last generation has ended.
        self.first_end = 0.0
        #: Whether files of events were removed, or had no room.
        self.is_unkept = False
        self.most_untold = 0
        self.slack = 0.2 + 25.0 * (world._stall > 0)

    def fail_unless(self, is_right, text):
        """Let the world fail: an error may be the program's."""
        if not is_right:
            self.world.fail(Violation(text))

    def resize(self, count):
        """Let the cluster have this many tasks."""
        names = ["chief:0"] * self.has_chief + [f"worker:{i}" for i in range(count)]
        self.tasks = {name: f"10.0.0.{i + 1}:2222" for i, name in enumerate(names)}
        for name, address in self.tasks.items():
            if name not in self.every:
                self.every[name] = _Task(self, name, address)

    has_chief = False

    def check_port(self, task, environ, code):
        """Check what a task has left that has ended its port."""
        process = self.world.current.process
        is_written = not process.own["events"].lines or task.address not in self.every_server
        self.fail_unless(is_written, f"{task.name} has told its end, and not written its last events.")
        server = self.network._rpc_servers.get(task.address)
        self.fail_unless(
            server is None or self.network._processes[server] is not process,
            f"The port of {task.name} is open after its end.",
        )
        if code == 0 and not self.has_launcher:
            left = list(self.files(environ))
            self.fail_unless(not left or bool(self.world.faults), f"{task.name} leaves its files {left}.")

    @staticmethod
    def files(environ):
        """Return the files of events beside that of an environment."""
        from pathlib import Path

        return Path(environ["UNISONO_EVENTS"]).parent.glob("*.jsonl")

    def supervise(self):
        """Start the tasks, and all of them again where one has failed."""
        world = self.world
        os.mkdir(f"{ROOT}/log/events")
        for generation in range(4):
            self.first_end, names = float("inf"), list(self.tasks)
            self.running = [self.every[name] for name in names]
            for task in self.running:
                environ = {WATCH_VARIABLES[0]: _KEY}
                if self.is_counted:
                    environ["UNISONO_GENERATION"] = str(generation)
                if self.has_launcher:
                    environ["UNISONO_EVENTS"] = f"{ROOT}/log/events/{task.name.replace(':', '-')}.jsonl"
                task.start(environ)
            for task in self.running:
                task.process.wait()
                if task.process.error is not None:
                    raise task.process.error
            if all(task.code == 0 for task in self.running):
                break
            if not world.choose(4):
                break
            if world.choose(3, SETTING) == 2:
                self.resize(1 + world.choose(3))
            world.sleep(world.pick((0.5, 8.0, 80.0)))
        self.is_over, self.over_at = True, world.now


def _disturb(world, job, watchers):
    """Let one thing go wrong."""
    kind = world.pick(_KINDS, "fault kind")
    if not world.fault(0.8, kind):
        return
    world.note("fault", "test", "test", kind)
    task, watcher = world.pick(job.running), world.pick(watchers)
    if kind == "kill task":
        task.process.kill()
    elif kind == "raise":
        task.raises = True
    elif kind in ("pause task", "pause watcher"):
        process, seconds = (task if kind == "pause task" else watcher).process, world.uniform(0.0, 20.0)
        process.own["paused"] = process.own.get("paused", 0.0) + seconds
        job.slack += seconds
        process.pause(seconds)
    elif kind in ("cut off", "part"):
        if kind == "part":
            job.network.part(task.name, watcher.name, world.uniform(0.0, 20.0), both=bool(world.choose(2)))
        job.network.cut_off(task.address)
    elif kind in ("rotate", "removed", "full"):
        job.is_unkept |= kind != "rotate"
        path = task.process.own.get("environ", {}).get("UNISONO_EVENTS", "")
        disk = job.machine.disks["log" if job.has_launcher else "tmp"]
        if kind == "full":
            disk.room = world.pick((0, 100))
            world.call_later(world.uniform(1.0, 20.0), lambda: setattr(disk, "room", float("inf")))
        elif kind == "removed":
            shutil.rmtree(path.rpartition("/")[0] or f"{ROOT}/tmp/none", ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(path or f"{ROOT}/tmp/none")
                # It begins again with the next line.
                job.written[task.name, path.rpartition("/")[2]].append(bytearray())
    elif kind == "kill watcher":
        watcher.process.kill()
    elif kind == "port":
        job.taken.add(task.address)
        world.call_later(5.0, lambda: job.taken.discard(task.address))


def watch(world):
    """Watchers look at a job of one to three workers."""
    world.settle()
    world.limit = 3000.0
    disks = {"tmp": Disk(world), "log": Disk(world)}
    machine = Machine(world, "host-a", disks, own=tuple(disks))
    job = _Job(world, machine)
    job.has_chief = world.choose(3, SETTING) == 2
    job.resize(1 + world.choose(3, SETTING))
    events, real_problem = _Events(job), _watch_port.own_folder_problem

    def create_connection(address, timeout):
        if f"{address[0]}:{address[1]}" not in job.servers:
            raise ConnectionRefusedError
        return contextlib.nullcontext()

    def own_environ():
        return world.current.process.own["environ"]

    with (
        contextlib.ExitStack() as received,
        FileDoors(world, Machine(world, "checker", disks)),
        pytest.MonkeyPatch.context() as patches,
    ):

        def receives():
            # Of killed watchers, too.
            made = ReceivedBytes()
            received.callback(made.close)
            return made

        patches.setattr(_worker_folder, "ReceivedBytes", receives)
        patches.setattr(_watch_port, "RpcServer", lambda *args, budget: _Server(job, *args[:3]))
        patches.setattr(_watch_port, "process_environ", own_environ)
        patches.setattr(_watch_port, "process_events", events)
        patches.setattr(_watch_port, "sys", _Sys(world))
        # Simulated folders have no mode.
        patches.setattr(_watch_port, "own_folder_problem", lambda path, denied: real_problem(path, 0))
        patches.setattr(_watch_port, "CHUNK", world.pick((4 << 20, 300), SETTING))
        patches.setattr(_address_folder, "process_environ", own_environ)
        patches.setattr(_address_folder, "RpcClient", lambda *args, **options: _Client(job, *args, **options))
        of_socket = _StandInModule(socket, {"create_connection": create_connection})
        patches.setattr(_address_folder, "socket", of_socket)
        watchers = [_Watcher(job, i) for i in range(1 + world.choose(3, SETTING))]
        if world.choose(5, SETTING) == 4:
            # Of more watchers than that some are not told.
            patches.setattr(_watch_port, "_MOST_WATCHERS", 1)
            job.most_untold = 99
        world.faults_left = world.choose(4, SETTING)
        supervisor = world.process("supervisor", job.supervise)
        while not supervisor.wait(world.uniform(0.5, 4.0)):
            if world.faults_left and job.running:
                _disturb(world, job, watchers)
        if supervisor.error is not None:
            raise supervisor.error
        for watcher in watchers:
            watcher.process.wait()
            if watcher.process.error is not None:
                raise watcher.process.error


class _Sys(_StandInModule):
    """`sys` with the hook for errors of the process that runs."""

    def __init__(self, world):
        super().__init__(sys, {})
        self._world = world

    def __getattr__(self, name):
        if name == "excepthook":
            return type("_Hook", (), {"error": self._world.current.process.own["error"]})
        return super().__getattr__(name)


PROTOCOLS = {"watch": watch}
