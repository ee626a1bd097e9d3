"""An object store in memory with the consistency of Amazon's: what fsspec's clients are asked for.

An object is there whole or not at all, a listing shows each object whose writing has been acknowledged,
nothing is renamed, and `mode="create"` writes only where there is none. A request can fail before it is
carried out or after: then the client repeats it, as its library does. One that was sent by a process which
has died meanwhile may still be carried out.

Tests: tests/unit/test_simulated_files.py.
"""

import contextlib
import datetime
import os

import pytest

from unisono._system import _object_store

#: How often a client sends a request.
_TRIES = 5
#: Seconds within which a request arrives.
LATEST = 1.0


class ObjectStore:
    """The objects of a store, by their whole names.

    Args:
        failing: the probability that a request fails.
    """

    def __init__(self, world, failing=0.0):
        self.world, self.failing = world, failing
        #: Returns the error of a request, before it is carried out or after; None for none.
        self.refusal = lambda name, key, is_done: None
        self.objects = {}
        self.requests = 0

    def deliver(self, run):
        """Carry out, soon, a request of a process that has died, or never."""

        def deliver():
            with contextlib.suppress(OSError):
                run()

        if self.world.choose(2, "delay"):
            self.world.call_later(self.world.uniform(0.0, LATEST), deliver)

    def put(self, key, content, is_new=False):
        """Write an object."""
        if is_new and key in self.objects:
            raise FileExistsError(key)
        self.objects[key] = bytes(content), self.world.wall, self.requests

    def get(self, key):
        """Return an object."""
        if key not in self.objects:
            raise FileNotFoundError(key)
        return self.objects[key]


class StoreDoors:
    """Replaces fsspec's way to a client, while its block runs.

    Args:
        doors: the doors for files of the same world.
    """

    def __init__(self, doors):
        self._doors = doors
        self._patches = pytest.MonkeyPatch()

    def __enter__(self):
        import fsspec

        def url_to_fs(url, **options):
            return _Client(self._doors), url.partition("://")[2]

        self._patches.setattr(fsspec.core, "url_to_fs", url_to_fs)
        self._patches.setattr(_object_store, "require_packages", lambda *_: None)
        return self

    def __exit__(self, *_):
        self._patches.undo()


class _Client:
    """What `StorePath` asks of a client of fsspec."""

    def __init__(self, doors):
        self._doors, self._store = doors, doors.machine.disks["store"]

    def _request(self, name, key, run):
        """Send a request, and again where it or its answer is lost."""
        store, world = self._store, self._doors.world
        if (error := store.refusal(name, key, False)) is not None:
            raise error
        for left in reversed(range(_TRIES)):
            store.requests += 1
            self._send(name, key, run)
            is_lost = world.fault(store.failing, "lost request")
            if not is_lost:
                answer = run()
                if (error := store.refusal(name, key, True)) is not None:
                    raise error
                if not world.fault(store.failing, "lost answer"):
                    return answer
            if not left:
                raise ConnectionError(f"the {'request' if is_lost else 'answer'} was lost")
            world.sleep(1.0)
        raise AssertionError

    def _send(self, name, key, run):
        """Send a request; where the process ends meanwhile, it may be carried out later, once."""
        process, store = self._doors.world.current.process, self._store
        if name not in ("PUT", "DELETE"):
            self._doors.gate(name, key)
            return
        sent = [True]

        def at_end():
            if sent:
                store.deliver(run)

        process.at_end(at_end)
        try:
            self._doors.gate(name, key)
        finally:
            if not process.is_dead:
                sent.clear()

    def find(self, key, detail=True, prefix=""):
        return self._request("LIST", key, lambda: self._listed(f"{key}/{prefix}"))

    def _listed(self, begin):
        return {key: self._facts(key) for key in sorted(self._store.objects) if key.startswith(begin)}

    def ls(self, key, detail=True):
        def run():
            entries = {}
            for name in self._listed(f"{key}/"):
                first, _, rest = name[len(key) + 1 :].partition("/")
                path = f"{key}/{first}"
                entries[path] = {"name": path, "type": "directory", "size": 0} if rest else self._facts(path)
            if not entries:
                raise FileNotFoundError(key)
            return list(entries.values())

        return self._request("LIST", key, run)

    def info(self, key):
        def run():
            if key in self._store.objects:
                return self._facts(key)
            if self._listed(f"{key}/"):
                return {"name": key, "type": "directory", "size": 0}
            raise FileNotFoundError(key)

        return self._request("HEAD", key, run)

    def _facts(self, key):
        content, at, number = self._store.get(key)
        written = datetime.datetime.fromtimestamp(at, datetime.UTC)
        return {
            "name": key,
            "type": "file",
            "size": len(content),
            "LastModified": written,
            "ETag": str(number),
        }

    def cat_file(self, key):
        return self._request("GET", key, lambda: self._store.get(key)[0])

    def get_file(self, key, file):
        content = self.cat_file(key)
        with open(os.fspath(file), "wb") as stream:
            stream.write(content)

    def pipe_file(self, key, content, mode="overwrite"):
        self._request("PUT", key, lambda: self._store.put(key, content, mode == "create"))

    def put_file(self, file, key):
        with open(file, "rb") as stream:
            content = stream.read()
        self._request("PUT", key, lambda: self._store.put(key, content))

    def rm_file(self, key):
        # Amazon's store answers alike where there is none.
        self._request("DELETE", key, lambda: self._store.objects.pop(key, None))
