"""Others that speak with standalone servers while a client trains there: watchers, programs, versions.

Real: all of `protocol_links`, the checks of requests, and what a server shows to those who look at a job. A
wrong program knows the job, and each of its requests has one thing wrong; a watcher asks for what may be
looked at. A server may also be started again as a version whose answers lack a field. Promised, and checked:

- a request that is wrong is answered with an error, changes nothing, and the server goes on;
- a watcher sees files as they are written, of two folders alone, and renews no lease;
- a server of another version is waited for as if there was none, and the error names it;
- the launch is as `protocol_links` checks it.

Tests: tests/unit/test_simulated_standalone.py.
"""

from tests.simulation._world import SETTING
from tests.simulation.protocol_links import run_links
from unisono.cluster_resolver._spec import Task
from unisono.rpc._calls import PeerLostError, RequestNumbers
from unisono.rpc._frames import Frame, blob
from unisono.rpc._ops import Op

#: Seconds in which an answer arrives, where the connection is not lost.
_CALL_SECONDS = 5.0
_NEW = "new.txt"


def _wrong_of_job(job):
    """Return requests of a job that are wrong, as operation, fields and arrays."""
    data = [blob(b"x")]
    place = {"name": _NEW, "offset": 0, "size": 1}
    start = {
        "key": "k", "task": "worker:0", "generation": 0, "description": {},
        "shape": {"tasks": 1, "devices": None, "ps": False},
    }  # fmt: skip
    every = (
        (Op.PUT, {**place, "name": f"../{_NEW}"}, data),
        (Op.PUT, {**place, "name": ["a"]}, data),
        (Op.PUT, {**place, "offset": -1}, data),
        (Op.PUT, {**place, "size": "1"}, data),
        (Op.PUT, place, []),
        (Op.PUT, place, data * 2),
        (Op.GET, {"name": "absent", "offset": 0}, []),
        (Op.GET, {"name": "train.py", "offset": 0.5}, []),
        (Op.START, {**start, "key": ""}, []),
        (Op.START, {**start, "task": "boss:0"}, []),
        (Op.START, {**start, "generation": -1}, []),
        (Op.START, {**start, "shape": {"tasks": 0}}, []),
        (Op.START, {**start, "description": "print()"}, []),
        (Op.SIGNAL, {"key": "k", "number": 65}, []),
        (Op.SIGNAL, {"key": "k", "number": True}, []),
        (Op.POLL, {"seen": ["k"]}, []),
        (Op.POLL, {"seen": {"k": [0]}}, []),
        (Op.PORTS, {"count": 0}, []),
        (Op.PORTS, {"count": 1, "avoid": "7000"}, []),
        (Op.PORTS, {"count": 1, "avoid": [True]}, []),
        (Op.RUN, {}, []),
        (Op.HELLO, {"client": "wrong", "lease": 0.5}, []),
        (Op.HELLO, {"client": "wrong", "lease": "10"}, []),
        (Op.HELLO, {"client": "", "lease": 10.0}, []),
    )
    return [(op, {"job": job, **meta}, arrays) for op, meta, arrays in every]


def _wrong_of_others():
    """Return requests without the job, or of another one."""
    return [
        (Op.HELLO, {"job": "../other", "client": "wrong", "lease": 10.0}, []),
        (Op.PUT, {"job": 5, "name": _NEW, "offset": 0, "size": 1}, [blob(b"x")]),
        *((op, meta, []) for op in (Op.END, Op.SWEEP, Op.POLL, Op.SIGNAL) for meta in ({}, {"job": "other"})),
        (Op.STATUS, {"folder": ""}, []),
        (Op.STATUS, {"name": "progress/../../secret", "offset": 0}, []),
        (Op.STATUS, {"name": "progress/g0-worker-0", "offset": -1}, []),
    ]


class _Other:
    """A process that speaks with one server."""

    def __init__(self, cluster, client, server):
        self.cluster, self.world, self.client, self.server = cluster, cluster.world, client, server
        self._numbers = RequestNumbers()

    def ask(self, rpc_client, op, meta, arrays=()):
        """Return the answer; None where the connection or the server is lost."""
        try:
            return rpc_client.call(Frame(op, self._numbers.next(), 0, meta, arrays), _CALL_SECONDS)
        except PeerLostError:
            return None

    def run(self):
        """Speak with the server, as long as the client is there."""
        rpc_client = self.cluster.network.rpc_client(Task("server", 0), self.server.name, Task("client", 1))
        try:
            while not self.client.is_dead:
                self.world.sleep(self.world.uniform(0.1, 2.0))
                self.speak(rpc_client)
        finally:
            rpc_client.close()

    def speak(self, rpc_client):
        """Ask something."""
        raise NotImplementedError


class _WrongClient(_Other):
    def speak(self, rpc_client):
        held = self.server.agent._book.held
        job = "none" if held is None else held.job
        wrong = self.world.pick([*_wrong_of_others(), *_wrong_of_job(job)])
        answer = self.ask(rpc_client, *wrong)
        self.world.check(
            answer is None or answer.op is Op.ERROR,
            lambda: f"A wrong request has the answer {answer} {answer.meta}: {wrong}",
        )
        paths = [path for path in self.server.root.rglob(_NEW) if path.is_file()]
        self.world.check(not paths, lambda: f"A wrong request has written {paths}: {wrong}")


class _Watcher(_Other):
    def speak(self, rpc_client):
        status = self.ask(rpc_client, Op.STATUS, {})
        if status is None or self.world.choose(2):
            return
        folder = self.world.pick(("progress", "events", "errors"))
        listed = self.ask(rpc_client, Op.STATUS, {"folder": folder})
        if listed is None or listed.op is Op.ERROR:
            why = "" if listed is None else f"{listed.meta}"
            is_right = listed is None or "must be one of" in why or "No such file" in why
            self.world.check(is_right, lambda: f"A watcher is told {why}")
            return
        files = listed.meta["files"]
        # Of no job there is nothing to see.
        self.world.check(folder != "errors" or not files, f"A watcher sees {files}.")
        for name in sorted(files):
            self._look(rpc_client, f"{folder}/{name}")
        self._look(rpc_client, "train.py", is_refused=True)

    def _look(self, rpc_client, name, is_refused=False):
        answer = self.ask(rpc_client, Op.STATUS, {"name": name, "offset": 0})
        if answer is None:
            return
        is_error = answer.op is Op.ERROR
        self.world.check(is_refused or not is_error, lambda: f"{name} must be seen: {answer.meta}")
        data = b"" if is_error else answer.arrays[0].tobytes()
        self.world.check(not is_refused or not data, lambda: f"A watcher reads {name}: {data!r}")


def _another_version(world, cluster, client):
    """Start a server again as another version, and once more as the right one."""
    world.sleep(world.uniform(0.0, 20.0))
    server = world.pick(list(cluster.servers.values()))
    if client.is_dead or server.process.is_dead or not world.fault(0.5, "other version"):
        return
    world.note("fault", "test", server.name, "other version")
    for lacks in (("taken",), ()):
        server.process.kill()
        world.sleep(world.uniform(0.0, 8.0))
        server.lacks = lacks
        server.start()
        world.sleep(world.uniform(0.0, 15.0))


def wrong_clients(world):
    """A client trains on servers with which others speak, too."""

    def begin(cluster, client):
        servers = list(cluster.servers.values())
        kinds = world.pick(((_WrongClient, _Watcher), (_WrongClient,), (_Watcher,)), SETTING)
        for number, kind in enumerate(kinds):
            other = kind(cluster, client, world.pick(servers))
            cluster.machine.process(f"other.{number}", other.run)
        world.spawn(lambda: _another_version(world, cluster, client), "versions")

    run_links(world, begin)


PROTOCOLS = {"wrong_clients": wrong_clients}
