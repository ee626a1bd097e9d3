"""What real code gets instead of `threading`, `queue`, `time`, `concurrent.futures`, `secrets` and `random`.

`simulated()` puts it in place in all modules of the project, and takes it away again: modules that say
`import threading`, those that say `from threading import Lock`, default values of arguments and class
attributes such as `clock=time.monotonic`, factories of dataclasses, and locks that a module made when it was
imported. Other modules, and other threads of this process, keep the real ones. `extend(os, getpid=...)` adds
replacements, which the next `simulated()` puts in place.

What it does not reach: classes of the project that derive from a class of `threading`, and libraries.

Tests: tests/unit/test_simulation.py.
"""

import _thread
import concurrent
import concurrent.futures
import contextlib
import functools
import heapq
import itertools
import logging
import os
import queue
import random
import secrets
import sys
import threading
import time
import types
import uuid
from concurrent.futures import CancelledError, InvalidStateError

import greenlet

from tests.simulation._world import ACTIVE

# --- locks -------------------------------------------------------------------------------------------------


class Lock:
    """A lock; acquiring and releasing it are points at which others may run."""

    __slots__ = ("__weakref__", "depth", "owner", "waiters")

    is_reentrant = False

    def __init__(self):
        self.reset()

    def reset(self):
        self.owner, self.depth, self.waiters = None, 0, []

    def acquire(self, blocking=True, timeout=-1):
        world = ACTIVE.world
        if world is None or world.is_over:
            _leave(world)
            return True
        me = world.current
        owner = self.owner
        if owner is not None and owner is me and self.is_reentrant:
            self.depth += 1
            return True
        if world._preempt and blocking:
            world.give_way()
        if self.owner is not None and not self._wait(world, blocking, timeout):
            return False
        self.owner, self.depth = me, 1
        return True

    def _wait(self, world, blocking, timeout):
        end = None if timeout is None or timeout < 0 else world.now + timeout
        # One that a killed process held was another one's in reality.
        while self.owner is not None and not self.owner.process.is_dead:
            if not blocking:
                return False
            left = None if end is None else end - world.now
            if (left is not None and left <= 0) or not world.block(self.waiters, left, "a lock"):
                return False
        return True

    def release(self):
        world = ACTIVE.world
        if world is None or world.is_over:
            return
        if self.owner is None or (self.is_reentrant and self.owner is not world.current):
            raise RuntimeError("release unlocked lock")
        self.depth -= 1
        if not self.depth:
            self.owner = None
            if self.waiters:
                world.wake(self.waiters)
            if world._preempt:
                world.give_way(0.3)

    def abandon(self, process):
        if self.owner is not None and self.owner.process is process:
            self.owner, self.depth = None, 0
            if self.waiters:
                ACTIVE.world.wake(self.waiters)

    def locked(self):
        return self.owner is not None

    def __enter__(self):
        world = ACTIVE.world
        # The most frequent way: not held, and no thread is interrupted.
        if self.owner is None and world is not None and not world._preempt and not world.is_over:
            self.owner, self.depth = world.current, 1
            return True
        return self.acquire()

    def __exit__(self, *_):
        world = ACTIVE.world
        is_short = self.depth == 1 and not self.waiters and world is not None and not world._preempt
        if is_short and self.owner is world.current:
            self.owner, self.depth = None, 0
        else:
            self.release()

    # for Condition

    def _is_owned(self):
        return self.owner is ACTIVE.world.current

    def _save(self):
        depth, self.depth, self.owner = self.depth, 0, None
        if self.waiters:
            ACTIVE.world.wake(self.waiters)
        return depth

    def _restore(self, depth):
        world = ACTIVE.world
        if self.owner is not None:
            self._wait(world, True, None)
        self.owner, self.depth = world.current, depth


def _leave(world):
    if world is not None:
        raise greenlet.GreenletExit


class RLock(Lock):
    """A lock that its owner may acquire again."""

    __slots__ = ()
    is_reentrant = True


class Condition:
    """A condition variable."""

    def __init__(self, lock=None):
        self._lock = RLock() if lock is None else lock
        self._waiters = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self):
        return self._lock.acquire()

    def __exit__(self, *_):
        self._lock.release()

    def wait(self, timeout=None):
        if not self._lock._is_owned():
            raise RuntimeError("cannot wait on un-acquired lock")
        depth = self._lock._save()
        was_woken = ACTIVE.world.block(self._waiters, timeout, "a condition")
        self._lock._restore(depth)
        return was_woken

    def wait_for(self, predicate, timeout=None):
        end = None if timeout is None else ACTIVE.world.now + timeout
        while not (result := predicate()):
            left = None if end is None else end - ACTIVE.world.now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n=1):
        if not self._lock._is_owned():
            raise RuntimeError("cannot notify on un-acquired lock")
        for _ in range(n):
            if not ACTIVE.world.wake(self._waiters):
                break

    def notify_all(self):
        self.notify(len(self._waiters))

    def reset(self):
        self._lock.reset()
        self._waiters.clear()

    def abandon(self, process):
        self._lock.abandon(process)


class Event:
    """A flag."""

    def __init__(self):
        self._flag, self._waiters = False, []

    def is_set(self):
        return self._flag

    def set(self):
        world = ACTIVE.world
        self._flag = True
        while self._waiters and world.wake(self._waiters):
            pass
        if world is not None and world._preempt:
            world.give_way()

    def clear(self):
        self._flag = False

    def wait(self, timeout=None):
        if not self._flag:
            ACTIVE.world.block(self._waiters, timeout, "an event")
        return self._flag

    def reset(self):
        self._flag, self._waiters = False, []

    def abandon(self, process):
        pass


class Semaphore:
    """A semaphore."""

    def __init__(self, value=1):
        self._value, self._most, self._waiters = value, None, []

    def acquire(self, blocking=True, timeout=None):
        world = ACTIVE.world
        if world._preempt:
            world.give_way()
        end = None if timeout is None else world.now + timeout
        while not self._value:
            left = None if end is None else end - world.now
            expired = left is not None and left <= 0
            if not blocking or expired or not world.block(self._waiters, left, "a semaphore"):
                return False
        self._value -= 1
        return True

    def release(self, n=1):
        if self._most is not None and self._value + n > self._most:
            raise ValueError("Semaphore released too many times")
        self._value += n
        for _ in range(n):
            ACTIVE.world.wake(self._waiters)

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *_):
        self.release()


class BoundedSemaphore(Semaphore):
    """A semaphore that is not released too often."""

    def __init__(self, value=1):
        super().__init__(value)
        self._most = value


class Barrier(threading.Barrier):
    """A barrier."""

    def __init__(self, parties, action=None, timeout=None):
        super().__init__(parties, action, timeout)
        self._cond = Condition(Lock())


# --- threads -----------------------------------------------------------------------------------------------


class Thread:
    """A fiber."""

    _numbers = itertools.count(1)

    def __init__(
        self, group=None, target=None, name=None, args=(), kwargs=None, *, daemon=None, context=None
    ):
        self._target, self._args, self._kwargs = target, args, kwargs or {}
        self.name = str(name) if name else "thread"
        self.daemon = bool(daemon)
        self.ident = self.native_id = None
        self._has_started = self._has_ended = False
        self._waiters = []

    def start(self):
        if self._has_started:
            raise RuntimeError("threads can only be started once")
        self._has_started = True
        self._spawn(ACTIVE.world.current.process)
        ACTIVE.world.give_way()

    def _spawn(self, process):
        fiber = ACTIVE.world.spawn(self._bootstrap, self.name, process)
        fiber.thread = self
        self.ident = self.native_id = fiber.number

    def _bootstrap(self):
        try:
            self.run()
        except SystemExit:
            pass
        finally:
            self._has_ended = True
            world = ACTIVE.world
            while self._waiters and world.wake(self._waiters):
                pass

    def run(self):
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def join(self, timeout=None):
        if not self._has_started:
            raise RuntimeError("cannot join thread before it is started")
        if not self._has_ended:
            ACTIVE.world.block(self._waiters, timeout, f"the end of the thread {self.name}")

    def is_alive(self):
        return self._has_started and not self._has_ended


class Timer(Thread):
    """A function that is called later; it is a fiber only then."""

    def __init__(self, interval, function, args=None, kwargs=None):
        super().__init__(target=function, name="timer", args=args or (), kwargs=kwargs)
        self.interval, self.function, self._event = interval, function, None

    def start(self):
        if self._has_started:
            raise RuntimeError("threads can only be started once")
        self._has_started = True
        process = ACTIVE.world.current.process
        self._event = ACTIVE.world.call_later(self.interval, lambda: process.is_dead or self._spawn(process))

    def cancel(self):
        if self._event is not None:
            self._event.cancel()
        self._has_started = self._has_ended = True


class _MainThread:
    name, daemon, ident, native_id = "MainThread", False, 0, 0

    def is_alive(self):
        return True


_MAIN = _MainThread()


def current_thread():
    """Return the present thread; the first one of a process is no object of `Thread`."""
    world = ACTIVE.world
    fiber = world and world.current
    if fiber is None:
        return _MAIN
    if fiber.thread is None:
        fiber.thread = _MainThread()
        fiber.thread.ident = fiber.thread.native_id = fiber.number
    return fiber.thread


def get_ident():
    """Return the number of the present thread."""
    world = ACTIVE.world
    return world.current.number if world is not None and world.current is not None else 0


def _alive_threads():
    world = ACTIVE.world
    return [f.thread for f in world.fibers if f.process is world.current.process and f.thread is not None]


class local:
    """Values of the present thread."""

    def __new__(cls, *args, **kwargs):
        self = object.__new__(cls)
        object.__setattr__(self, "_local", (args, kwargs, {}))
        return self

    def __getattribute__(self, name):
        if name in ("__class__", "_local", "__init__"):
            return object.__getattribute__(self, name)
        values = _values_of(self)
        if name == "__dict__":
            return values
        return values[name] if name in values else object.__getattribute__(self, name)

    def __setattr__(self, name, value):
        _values_of(self)[name] = value

    def __delattr__(self, name):
        try:
            del _values_of(self)[name]
        except KeyError:
            raise AttributeError(name) from None


def _values_of(own):
    args, kwargs, by_fiber = object.__getattribute__(own, "_local")
    key = ACTIVE.world and ACTIVE.world.current
    if key not in by_fiber:
        by_fiber[key] = {}
        if type(own).__init__ is not object.__init__:
            own.__init__(*args, **kwargs)
    return by_fiber[key]


# --- queues ------------------------------------------------------------------------------------------------


class Queue:
    """A queue."""

    def __init__(self, maxsize=0):
        self.maxsize, self.queue = maxsize, []
        self._getters, self._putters, self._joiners = [], [], []
        self.unfinished_tasks = 0

    def _push(self, item):
        self.queue.append(item)

    def _pop(self):
        return self.queue.pop(0)

    def put(self, item, block=True, timeout=None):
        world = ACTIVE.world
        full = self.maxsize > 0
        if full and not _wait_until(
            lambda: len(self.queue) < self.maxsize, self._putters, block, timeout, "room in a queue"
        ):
            raise queue.Full
        self._push(item)
        self.unfinished_tasks += 1
        if self._getters:
            world.wake(self._getters)
        if world._preempt:
            world.give_way()

    def get(self, block=True, timeout=None):
        if not self.queue and not _wait_until(
            lambda: self.queue, self._getters, block, timeout, "an item of a queue"
        ):
            raise queue.Empty
        item = self._pop()
        if self._putters:
            ACTIVE.world.wake(self._putters)
        return item

    def put_nowait(self, item):
        self.put(item, block=False)

    def get_nowait(self):
        return self.get(block=False)

    def empty(self):
        return not self.queue

    def full(self):
        return 0 < self.maxsize <= len(self.queue)

    def qsize(self):
        return len(self.queue)

    def task_done(self):
        if not self.unfinished_tasks:
            raise ValueError("task_done() called too many times")
        self.unfinished_tasks -= 1
        while not self.unfinished_tasks and self._joiners:
            ACTIVE.world.wake(self._joiners)

    def join(self):
        _wait_until(lambda: not self.unfinished_tasks, self._joiners, True, None, "the tasks of a queue")


class SimpleQueue(Queue):
    """A queue without a limit."""


class LifoQueue(Queue):
    """A stack."""

    def _pop(self):
        return self.queue.pop()


class PriorityQueue(Queue):
    """A queue that hands out the smallest item."""

    def _push(self, item):
        heapq.heappush(self.queue, item)

    def _pop(self):
        return heapq.heappop(self.queue)


def _wait_until(is_ready, waiters, block, timeout, why):
    world = ACTIVE.world
    end = None if timeout is None else world.now + timeout
    while not is_ready():
        left = None if end is None else end - world.now
        if not block or (left is not None and left <= 0):
            return False
        world.block(waiters, left, why)
    return True


# --- futures -----------------------------------------------------------------------------------------------


class Future:
    """A result that will be there later; an error of a callback, which is only logged in reality, fails."""

    def __init__(self):
        self._state, self._result, self._error = "PENDING", None, None
        self._waiters, self._callbacks = [], []

    def __class_getitem__(cls, item):
        return cls

    def __repr__(self):
        return f"<Future {self._state}>"

    def cancel(self):
        if self._state in ("RUNNING", "FINISHED"):
            return False
        if self._state == "PENDING":
            self._state = "CANCELLED"
            self._tell()
        return True

    def cancelled(self):
        return self._state == "CANCELLED"

    def running(self):
        return self._state == "RUNNING"

    def done(self):
        return self._state in ("FINISHED", "CANCELLED")

    def add_done_callback(self, fn):
        if self.done():
            self._call(fn)
        else:
            self._callbacks.append(fn)

    def result(self, timeout=None):
        self._await(timeout)
        if self._error is not None:
            try:
                raise self._error
            finally:
                self = None  # noqa: PLW0642
        return self._result

    def exception(self, timeout=None):
        self._await(timeout)
        return self._error

    def _await(self, timeout):
        if not self.done() and not ACTIVE.world.block(self._waiters, timeout, "a result") and not self.done():
            raise TimeoutError
        if self._state == "CANCELLED":
            raise CancelledError

    def set_running_or_notify_cancel(self):
        if self._state == "CANCELLED":
            return False
        if self._state != "PENDING":
            raise RuntimeError("Future in unexpected state")
        self._state = "RUNNING"
        return True

    def set_result(self, result):
        self._settle(result, None)

    def set_exception(self, error):
        self._settle(None, error)

    def _settle(self, result, error):
        world = ACTIVE.world
        if world is not None and world._preempt:
            world.give_way()
        if self.done():
            raise InvalidStateError(f"{self._state}: {self!r}")
        self._result, self._error, self._state = result, error, "FINISHED"
        self._tell()

    def _tell(self):
        world = ACTIVE.world
        while self._waiters and world.wake(self._waiters):
            pass
        callbacks, self._callbacks = self._callbacks, []
        for fn in callbacks:
            self._call(fn)

    def _call(self, fn):
        try:
            fn(self)
        except Exception as error:
            ACTIVE.world.fail(error, "callback of a future")


def wait(fs, timeout=None, return_when=concurrent.futures.ALL_COMPLETED):
    """Wait for futures, as `concurrent.futures.wait`."""
    fs = set(fs)
    waiters = []

    def is_enough():
        done = [f for f in fs if f.done()]
        if return_when == concurrent.futures.FIRST_COMPLETED:
            return bool(done) or not fs
        failed = return_when == concurrent.futures.FIRST_EXCEPTION and any(
            not f.cancelled() and f._error is not None for f in done
        )
        return failed or len(done) == len(fs)

    if not is_enough():
        for f in fs:
            f.add_done_callback(lambda _: waiters and ACTIVE.world.wake(waiters))
        _wait_until(is_enough, waiters, True, timeout, "results")
    done = {f for f in fs if f.done()}
    return concurrent.futures._base.DoneAndNotDoneFutures(done, fs - done)


def as_completed(fs, timeout=None):
    """Return futures as they end, as `concurrent.futures.as_completed`."""
    ended = Queue()
    fs = list(dict.fromkeys(fs))
    for f in fs:
        f.add_done_callback(ended.put)
    end = None if timeout is None else ACTIVE.world.now + timeout
    for _ in fs:
        try:
            yield ended.get(timeout=None if end is None else end - ACTIVE.world.now)
        except queue.Empty:
            raise TimeoutError from None


class ThreadPoolExecutor(concurrent.futures.Executor):
    """Threads that wait for work."""

    def __init__(self, max_workers=None, thread_name_prefix="pool", initializer=None, initargs=()):
        self._most, self._name = max_workers or 4, thread_name_prefix
        self._tasks, self._threads, self._is_closed = Queue(), [], False
        self._initializer, self._initargs, self._idle = initializer, initargs, 0

    def submit(self, fn, /, *args, **kwargs):
        if self._is_closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = Future()
        self._tasks.put((future, fn, args, kwargs))
        if self._tasks.qsize() > self._idle and len(self._threads) < self._most:
            thread = Thread(target=self._work, name=f"{self._name}_{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def _work(self):
        if self._initializer is not None:
            self._initializer(*self._initargs)
        while True:
            self._idle += 1
            item = self._tasks.get()
            self._idle -= 1
            if item is None:
                return
            future, fn, args, kwargs = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = fn(*args, **kwargs)
            except greenlet.GreenletExit:
                raise
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    def map(self, fn, *iterables, timeout=None, chunksize=1):
        futures = [self.submit(fn, *args) for args in zip(*iterables, strict=False)]
        return (future.result(timeout) for future in futures)

    def shutdown(self, wait=True, *, cancel_futures=False):
        self._is_closed = True
        if cancel_futures:
            for item in self._tasks.queue:
                item[0].cancel()
            self._tasks.queue.clear()
        for _ in self._threads:
            self._tasks.put(None)
        if wait:
            for thread in self._threads:
                thread.join()


# --- clocks, names -----------------------------------------------------------------------------------------


def _of_world(read, real):
    """Return a function of the active world, or the real one where there is none."""

    @functools.wraps(real)
    def stand_in(*args, **kwargs):
        world = ACTIVE.world
        return real(*args, **kwargs) if world is None else read(world, *args, **kwargs)

    return stand_in


_CLOCKS = {
    "monotonic": lambda world: world.now,
    "perf_counter": lambda world: world.now,
    "process_time": lambda world: world.now,
    "thread_time": lambda world: world.now,
    "time": lambda world: world.wall,
    "monotonic_ns": lambda world: int(world.now * 1e9),
    "perf_counter_ns": lambda world: int(world.now * 1e9),
    "time_ns": lambda world: int(world.wall * 1e9),
    "sleep": lambda world, seconds: world.sleep(seconds),
}
_SECRETS = {
    "token_hex": lambda world, nbytes=32: f"{world.identities.getrandbits(8 * nbytes):0{2 * nbytes}x}",
    "token_bytes": lambda world, nbytes=32: world.identities.randbytes(nbytes),
    "token_urlsafe": lambda world, nbytes=32: f"{world.identities.getrandbits(8 * nbytes):x}",
    "randbits": lambda world, k: world.identities.getrandbits(k),
    "randbelow": lambda world, n: world.identities.randrange(n),
    "choice": lambda world, sequence: world.identities.choice(sequence),
}
_RANDOM = (
    "random",
    "randrange",
    "randint",
    "uniform",
    "choice",
    "shuffle",
    "sample",
    "getrandbits",
    "expovariate",
)


class _StandInModule(types.ModuleType):
    """A module of which some names are replaced."""

    def __init__(self, real, names):
        super().__init__(real.__name__)
        self.__dict__.update(names)
        self._real = real

    def __getattr__(self, name):
        return getattr(self._real, name)


#: By module: what stands in for its names.
_NAMES: dict[types.ModuleType, dict[str, object]] = {
    threading: {
        "Lock": Lock, "RLock": RLock, "Condition": Condition, "Event": Event, "Thread": Thread,
        "Timer": Timer,
        "Semaphore": Semaphore, "BoundedSemaphore": BoundedSemaphore, "Barrier": Barrier, "local": local,
        "current_thread": current_thread, "get_ident": get_ident, "get_native_id": get_ident,
        "main_thread": lambda: _MAIN, "enumerate": _alive_threads,
        "active_count": lambda: len(_alive_threads()),
    },
    queue: {
        "Queue": Queue, "SimpleQueue": SimpleQueue, "LifoQueue": LifoQueue, "PriorityQueue": PriorityQueue,
    },
    concurrent.futures: {
        "Future": Future, "wait": wait, "as_completed": as_completed,
        "ThreadPoolExecutor": ThreadPoolExecutor,
    },
    time: {name: _of_world(read, getattr(time, name)) for name, read in _CLOCKS.items()},
    secrets: {name: _of_world(read, getattr(secrets, name)) for name, read in _SECRETS.items()},
    random: {
        **{
            name: _of_world(
                lambda world, *args, _name=name, **kwargs: getattr(world.identities, _name)(*args, **kwargs),
                getattr(random, name),
            )
            for name in _RANDOM
        },
        "SystemRandom": lambda: random.Random(ACTIVE.world.identities.random()),
    },
    os: {
        "getpid": _of_world(lambda world: world.current.process.pid if world.current else 1, os.getpid),
        "urandom": _of_world(lambda world, n: world.identities.randbytes(n), os.urandom),
    },
    uuid: {
        "uuid4": _of_world(
            lambda world: uuid.UUID(int=world.identities.getrandbits(128), version=4), uuid.uuid4
        ),
    },
}  # fmt: skip


def extend(module, **names):
    """Let names of a module be replaced too; for code that needs a simulated file system, or processes.

    A name may be a class or a function. The next `simulated()` puts them in place.
    """
    _NAMES.setdefault(module, {}).update(names)


# --- put in place ------------------------------------------------------------------------------------------

_LOCKS = (_thread.LockType, type(threading.RLock()), threading.Condition, threading.Event)


class _Replacement:
    """What was replaced where."""

    def __init__(self, prefixes):
        self._prefixes = tuple(prefixes)
        self._stand_ins = {}
        for module, names in _NAMES.items():
            for name, fake in names.items():
                real = getattr(module, name)
                self._stand_ins[id(real)] = real, fake
            self._stand_ins[id(module)] = module, _StandInModule(module, names)
        futures = self._stand_ins[id(concurrent.futures)][1]
        self._stand_ins[id(concurrent)] = concurrent, _StandInModule(concurrent, {"futures": futures})
        self._seen, self._undo = set(), []
        self.locks = []

    def look(self):
        """Replace what modules have that were imported since."""
        for name, module in list(sys.modules.items()):
            if name in self._seen or not name.startswith(self._prefixes):
                continue
            self._seen.add(name)
            for key, value in list(vars(module).items()):
                found, fake = self._stand_in(value)
                if found:
                    self._put(vars(module), key, value, fake)
                elif isinstance(value, _LOCKS):
                    self.locks.append(_like(value))
                    self._put(vars(module), key, value, self.locks[-1])
                elif isinstance(value, type) and value.__module__ == name:
                    self._look_at_class(value)
                elif isinstance(value, types.FunctionType) and value.__module__ == name:
                    self._look_at_function(value)

    def _stand_in(self, value):
        real, fake = self._stand_ins.get(id(value), (None, None))
        return (True, fake) if real is value and real is not None else (False, None)

    def _put(self, names, key, value, fake):
        names[key] = fake
        self._undo.append(lambda: names.__setitem__(key, value))

    def _look_at_class(self, owner):
        for key, value in list(vars(owner).items()):
            found, fake = self._stand_in(value)
            if found:
                setattr(owner, key, fake)
                self._undo.append(lambda key=key, value=value: setattr(owner, key, value))
            elif isinstance(value, property):
                for fn in (value.fget, value.fset):
                    self._look_at_function(fn)
            elif isinstance(value, type) and value.__qualname__.startswith(owner.__qualname__ + "."):
                self._look_at_class(value)
            else:
                self._look_at_function(getattr(value, "__func__", value))

    def _look_at_function(self, fn):
        while fn is not None:
            if not isinstance(fn, types.FunctionType):
                return
            defaults = fn.__defaults__
            if defaults and any(self._stand_in(d)[0] for d in defaults):
                fn.__defaults__ = tuple(self._stand_in(d)[1] if self._stand_in(d)[0] else d for d in defaults)
                self._undo.append(lambda fn=fn, defaults=defaults: setattr(fn, "__defaults__", defaults))
            for name, value in list((fn.__kwdefaults__ or {}).items()):
                found, fake = self._stand_in(value)
                if found:
                    self._put(fn.__kwdefaults__, name, value, fake)
            # Where the factories of a dataclass are.
            for cell in fn.__closure__ or ():
                with contextlib.suppress(ValueError):
                    value = cell.cell_contents
                    found, fake = self._stand_in(value)
                    if found:
                        cell.cell_contents = fake
                        self._undo.append(
                            lambda cell=cell, value=value: setattr(cell, "cell_contents", value)
                        )
            fn = getattr(fn, "__wrapped__", None)

    def undo(self):
        """Put everything back."""
        while self._undo:
            self._undo.pop()()


def _like(lock):
    if isinstance(lock, threading.Condition):
        return Condition()
    if isinstance(lock, threading.Event):
        return Event()
    return RLock() if isinstance(lock, _LOCKS[1]) else Lock()


def points_around(*functions):
    """Make functions, given as pairs of an owner and a name, points at which a process may be killed.

    It returns a function that undoes that. They are points before and after the call.
    """
    before = [(owner, name, getattr(owner, name)) for owner, name in functions]

    def wrapped(real):
        @functools.wraps(real)
        def call(*args, **kwargs):
            world = ACTIVE.world
            if world is None:
                return real(*args, **kwargs)
            world.point()
            result = real(*args, **kwargs)
            world.point()
            return result

        return call

    for owner, name, real in before:
        setattr(owner, name, wrapped(real))

    def undo():
        for owner, name, real in before:
            setattr(owner, name, real)

    return undo


#: Pairs of an owner and a name: `simulated` puts points around them.
POINTS = []


@contextlib.contextmanager
def simulated(prefixes=("unisono",)):
    """Put the stand-ins in place during a block; it gets a function that looks after modules imported since.

    Args:
        prefixes: names of modules whose names are replaced begin with one of these.
    """
    replacement = _Replacement(prefixes)
    log = logging.getLogger("unisono")
    was_disabled = log.disabled
    undo_points = points_around(*POINTS)
    try:
        replacement.look()
        ACTIVE.shared_locks = replacement.locks
        log.disabled = True
        yield replacement.look
    finally:
        log.disabled = was_disabled
        undo_points()
        ACTIVE.shared_locks = ()
        replacement.undo()
