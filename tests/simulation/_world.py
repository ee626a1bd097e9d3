"""A world with virtual time: fibers run one at a time, processes can be killed, and a seed has the choice.

Everything that could go one way or another is a *choice*: who runs next, whether a thread is interrupted at a
lock, how long a message takes, whether a process is killed. A choice is a whole number, 0 being the quietest
(first come first served, no interruption, the shortest way, no fault). Choices are drawn from a seed, or are
taken from a list: the choices of an earlier run give that run again, and a list with more zeros is a simpler
one, which is how failing schedules are shrunk.

What protocols, and other parts of this package, may rely on:

=======================================  ===================================================================
`World(seed)`, `World(choices=[...])`    a world; `world.run(main)` runs `main()` in it, returns its result
`world.now`, `world.wall`                seconds since the start; the wall clock, which `wall_offset` moves
`world.choose(n, kind)`                  a choice below `n`; `chance(p, kind)`, `uniform(low, high, kind)` and
                                         `pick(sequence, kind)` are made of it (0: the first of a sequence)
`world.fault(p, kind)`                   `chance`, as long as faults are left (`world.faults_left`)
`world.give_way(share)`                  a point at which others may run: a thread is interrupted there
`world.point()`                          a point at which the process may be killed, and nothing else happens
`world.sleep(seconds)`                   waits
`world.block(waiters, timeout, why)`     waits on a list until `world.wake(waiters)`; False when time is over
`world.call_later(seconds, fn)`          calls a function that does not wait; gives a `Timer`: `cancel()`
`world.spawn(fn, name, process=None)`    a new fiber, of the present process by default
`world.process(name, body)`              a new `Process` whose first fiber runs `body()`; it ends with it
`process.kill()`                         ends it at once: none of its fibers runs again
`process.pause(seconds)`                 stops it for a while, as SIGSTOP does
`process.risk`                           the probability of a kill at each of its switches
`process.at_end(fn)`                     called when it ends, however: what the operating system releases
`process.wait(timeout)`                  waits for its end; then `error`, `result`, `is_killed`
`world.note(kind, source, target, text)` a line of the sequence diagram
`world.check(is_right, text)`            raises `Violation`
=======================================  ===================================================================

A world fails with `Deadlock` when no event is left and a fiber waits that is not a daemon of the end, with
`Overdue` after `world.limit` seconds or `world.most_switches`, and with the exception of a fiber.

Tests: tests/unit/test_simulation.py.
"""

import itertools
import random
import traceback
from collections import Counter
from heapq import heappop, heappush

import greenlet

#: Kinds of choices. Those of faults begin with `FAULT`: they are taken away first when a schedule is shrunk.
FAULT, ORDER, PREEMPT, DELAY, SETTING, DATA = "fault", "order", "preempt", "delay", "setting", "data"
#: What `uniform` distinguishes.
_STEPS = 1024
#: Makes the seed of what is no choice another one.
_OF_IDENTITIES = 1 << 64
#: The wall clock at the start of each world: 2030-01-01.
EPOCH = 1_893_456_000.0


class Active:
    """The world in which code runs at present: primitives ask here."""

    world = None
    #: See `World.shared_locks`.
    shared_locks = ()


ACTIVE = Active()


class Violation(AssertionError):
    """A promise that did not hold."""


class Deadlock(Violation):
    """No event is left, and somebody waits."""


class Overdue(Violation):
    """Something has not ended within its bound."""


class Fiber(greenlet.greenlet):
    """A thread of the simulation."""

    def __init__(self, world, fn, name, process):
        super().__init__(self._body, world.hub)
        self.world, self.fn, self.name, self.process = world, fn, name, process
        #: What it waits for, and whether it was woken rather than timed out.
        self.why, self.was_woken, self.timer = "", False, None
        self.waiters = None
        self.number = next(world.numbers)
        #: The object of the class `Thread` that it runs, and its values of `threading.local`.
        self.thread = None

    def time_out(self):
        """Go on, as the time of a wait is over."""
        self.waiters.remove(self)
        self.waiters = self.timer = None
        self.world.ready.append(self)

    def _body(self):
        world = self.world
        try:
            self.fn()
        except greenlet.GreenletExit:
            pass
        except BaseException as error:
            if not world.is_over and not self.process.is_dead:
                world.fail(error, f"{self.process.name}/{self.name}")
        finally:
            world.fibers.pop(self, None)


class Process:
    """A group of fibers that ends as a whole."""

    def __init__(self, world, name):
        self.world, self.name = world, name
        self.is_dead = self.is_killed = self.is_paused = False
        self.risk = 0.0
        self.result = self.error = None
        self.pid = 1000 + next(world.numbers)
        #: The stand-ins for objects that each process has of its own, by what made them.
        self.own = {}
        self._parked, self._waiters, self._at_end = [], [], []

    def __repr__(self):
        return f"Process({self.name}, pid {self.pid})"

    def kill(self):
        """End at once, as SIGKILL does."""
        if not self.is_dead:
            self.is_killed = True
            self.world.note("kill", self.name, self.name, "killed")
            self._end()
        if self.world.current is not None and self.world.current.process is self:
            self.world.hub.switch()

    def pause(self, seconds):
        """Stop for a while."""
        if self.is_dead or self.is_paused:
            return
        self.is_paused = True
        self.world.note("pause", self.name, self.name, f"stopped for {seconds:.1f} s")
        self.world.call_later(seconds, self._go_on)

    def at_end(self, fn):
        """Call a function when the process ends; it must not wait."""
        self._at_end.append(fn)

    def wait(self, timeout=None):
        """Wait for the end; return whether it has ended."""
        return self.is_dead or self.world.block(self._waiters, timeout, f"end of {self.name}")

    def _go_on(self):
        self.is_paused = False
        parked, self._parked = self._parked, []
        self.world.ready.extend(parked)

    def _end(self):
        self.is_dead = True
        for fn in self._at_end:
            fn()
        for lock in self.world.shared_locks:
            lock.abandon(self)
        while self._waiters:
            self.world.wake(self._waiters)

    def _run(self, body):
        try:
            self.result = body()
        except greenlet.GreenletExit:
            raise
        except BaseException as error:
            if self.world.is_over:
                raise
            self.error = error
            if isinstance(error, Violation):
                # Also of a process whose end the protocol does not look at, such as a reader.
                self.world.fail(error, self.name)
            self.world.note("end", self.name, self.name, f"ended by {type(error).__name__}")
        if not self.is_dead and not self.world.is_over:
            self._end()


class Timer:
    """Something that will happen."""

    __slots__ = ("fn",)

    def __init__(self, fn):
        self.fn = fn

    def cancel(self):
        """Let it not happen."""
        self.fn = None


class World:
    """Fibers, a clock that jumps to the next event, and the choices.

    Args:
        seed: of the choices.
        choices: those of an earlier run, instead; behind their end each is 0.
        is_recorded: whether choices, and who sent what when, are kept (`choices`, `kinds`, `notes`).
        limit: seconds of virtual time.
    """

    def __init__(self, seed=0, choices=None, is_recorded=False, limit=3600.0, most_switches=400_000):
        self.seed, self.limit, self.most_switches = seed, limit, most_switches
        self.random = random.Random(seed)
        self._draw = self.random.random
        #: For names and numbers that differ between processes; no choice.
        self.identities = random.Random(seed + _OF_IDENTITIES)
        self._given = None if choices is None else iter(choices)
        self.is_recorded = is_recorded or choices is not None
        #: Draws that need not be kept take the short way.
        self._is_plain = not self.is_recorded
        self.choices, self.kinds, self.notes = [], [], []
        if self.is_recorded:
            self.choose = self._choose_and_keep
            self.chance = self._chance_and_keep
        self.hub = greenlet.getcurrent()
        self._to_hub = self.hub.switch
        self.now, self.wall_offset = 0.0, 0.0
        self.ready, self.events, self.numbers = [], [], itertools.count(1)
        self.fibers = {}
        self.current = None
        self.is_over = False
        self.switches = 0
        #: Faults that happened, by kind, and how many more may.
        self.faults, self.faults_left = Counter(), 0
        #: The processes that have locked files, by the files' numbers.
        self.locked_files = {}
        #: What protocols count.
        self.counts = Counter()
        #: Locks of modules, which in reality each process has of its own.
        self.shared_locks = ACTIVE.shared_locks
        self._failure = None
        self._order = self._preempt = self._stall = 0.0

    def settle(self):
        """Draw how wild this world is: how often threads are interrupted, overtaken, or slow."""
        self._order = self.pick((0.0, 1.0, 0.3), SETTING)
        self._preempt = self.pick((0.0, 0.1, 0.5), SETTING)
        self._stall = self.pick((0.0, 0.0, 0.02), SETTING)

    # --- choices -------------------------------------------------------------------------------------

    def choose(self, n, kind=DATA):
        """Return a whole number from 0 to n - 1."""
        return int(self._draw() * n)

    def chance(self, p, kind=DATA):
        """Return True with a probability."""
        return self._draw() < p

    def _choose_and_keep(self, n, kind=DATA):
        chosen = (
            min(next(self._given, 0), n - 1) if self._given is not None else int(self.random.random() * n)
        )
        self.choices.append(chosen)
        self.kinds.append(kind)
        return chosen

    def _chance_and_keep(self, p, kind=DATA):
        is_so = bool(next(self._given, 0)) if self._given is not None else self.random.random() < p
        self.choices.append(int(is_so))
        self.kinds.append(kind)
        return is_so

    def uniform(self, low, high, kind=DELAY):
        """Return a number between two."""
        return low + (high - low) * self.choose(_STEPS, kind) / _STEPS

    def pick(self, sequence, kind=DATA):
        """Return one of a sequence, of which the first is the quietest."""
        return sequence[self.choose(len(sequence), kind)]

    def fault(self, p, kind):
        """Return whether a fault happens here; never when none is left."""
        if self.faults_left <= 0 or not p or not self.chance(p, f"{FAULT} {kind}"):
            return False
        self.faults_left -= 1
        self.faults[kind] += 1
        return True

    # --- time and fibers -----------------------------------------------------------------------------

    @property
    def wall(self):
        """The wall clock, in seconds since 1970."""
        return EPOCH + self.now + self.wall_offset

    def call_later(self, seconds, fn):
        """Call a function, which must not wait, after some seconds."""
        timer = Timer(fn)
        heappush(self.events, (self.now + (seconds if seconds > 0.0 else 0.0), next(self.numbers), timer))
        return timer

    def spawn(self, fn, name="fiber", process=None):
        """Start a fiber, of the present process by default."""
        fiber = Fiber(self, fn, name, process or self.current.process)
        self.fibers[fiber] = None
        self.ready.append(fiber)
        return fiber

    def process(self, name, body):
        """Start a process."""
        process = Process(self, name)
        self.spawn(lambda: process._run(body), "main", process)
        return process

    def give_way(self, share=1.0):
        """Let others run, if the choice says so: the present thread is interrupted here.

        Args:
            share: of the world's probability of interruptions; 0 for a point that always gives way.
        """
        if self.is_over:
            raise greenlet.GreenletExit
        fiber = self.current
        if fiber is None:
            return
        if share:
            # The most frequent of all calls.
            p = self._preempt * share
            if not p or not (self._draw() < p if self._is_plain else self.chance(p, PREEMPT)):
                return
        self.ready.append(fiber)
        self._to_hub()

    def point(self):
        """Let the present process be killed here, between two calls that no other thread sees apart."""
        fiber = self.current
        if fiber is None or self.is_over:
            return
        process = fiber.process
        if process.risk and self.faults_left > 0 and self.fault(process.risk, f"kill {process.name}"):
            process.kill()

    def block(self, waiters, timeout=None, why=""):
        """Wait on a list until woken; return False when the time was over before."""
        if self.is_over:
            raise greenlet.GreenletExit
        fiber = self.current
        if fiber is None:
            raise RuntimeError(f"Only a fiber can wait. Received: the scheduler's own code, for {why}.")
        fiber.why, fiber.was_woken, fiber.waiters = why, False, waiters
        waiters.append(fiber)
        if timeout is not None:
            # As `call_later` does: most events are these.
            timer = fiber.timer = Timer(fiber.time_out)
            at = self.now + timeout if timeout > 0.0 else self.now
            heappush(self.events, (at, next(self.numbers), timer))
        self._to_hub()
        return fiber.was_woken

    def sleep(self, seconds):
        """Wait for some seconds."""
        self.block([], seconds, "sleep")

    def wake(self, waiters):
        """Wake the first fiber of a list; return whether there was one."""
        if not waiters or self.is_over:
            return False
        fiber = waiters.pop(0)
        fiber.was_woken, fiber.waiters = True, None
        if fiber.timer is not None:
            fiber.timer.fn = fiber.timer = None
        self.ready.append(fiber)
        return True

    # --- the run -------------------------------------------------------------------------------------

    def run(self, main):
        """Run a function as the first process, which is never killed, to its end; then end everything."""
        ended = []
        process = Process(self, "test")
        self.spawn(lambda: ended.append(main()), "main", process)
        before, ACTIVE.world = ACTIVE.world, self
        try:
            for lock in self.shared_locks:
                lock.reset()
            self._loop(ended)
        finally:
            self._end_all()
            ACTIVE.world = before
        return ended[0]

    def _loop(self, ended):
        ready, events = self.ready, self.events
        # A failure may also be the last act of the first process.
        while self._failure is None and not ended:
            count = len(ready)
            if not count:
                self._next_event(events)
                continue
            place, order, stall = 0, self._order, self._stall
            if count > 1 and order and (order == 1.0 or self.chance(order, ORDER)):
                place = self.choose(count, ORDER)
            fiber = ready.pop(place)
            process = fiber.process
            if process.is_dead:
                continue
            if process.is_paused:
                process._parked.append(fiber)
                continue
            if process.risk and self.faults_left > 0 and self.fault(process.risk, f"kill {process.name}"):
                process.kill()
                continue
            if stall and self.chance(stall, DELAY):
                self.call_later(self.uniform(0.0, 2.0), lambda fiber=fiber: ready.append(fiber))
                continue
            self.switches += 1
            if self.switches > self.most_switches:
                raise Overdue(f"{self.switches} switches, at {self.now:.1f} s\n{self.stacks()}")
            self.current = fiber
            fiber.switch()
            self.current = None
        if self._failure is not None:
            raise self._failure

    def _next_event(self, events):
        ready = self.ready
        while events:
            self.now, _, timer = heappop(events)
            if self.now > self.limit:
                raise Overdue(f"It must end within {self.limit:g} s.\n{self.stacks()}")
            if timer.fn is not None:
                timer.fn()
            # What happens at the same moment may be seen in any order.
            if ready and (not events or events[0][0] > self.now):
                return
        if not ready:
            raise Deadlock(f"No event is left at {self.now:.1f} s, and these wait:\n{self.stacks()}")

    def fail(self, error, where=""):
        """Let the whole run fail."""
        if self._failure is None:
            if where:
                error.add_note(f"in the thread {where}, at {self.now:.3f} s")
            self._failure = error

    def _end_all(self):
        self.is_over = True
        self.events.clear()
        # The first wait, or point to give way, of what they do now ends them.
        for _ in range(3):
            for fiber in list(self.fibers):
                if fiber:
                    self.current = fiber
                    fiber.throw()
                else:
                    self.fibers.pop(fiber)
        self.current = None

    def stacks(self):
        """Return where each fiber waits."""
        lines = []
        for fiber in self.fibers:
            if fiber.process.is_dead:
                continue
            frame = fiber.gr_frame
            lines.append(f"{fiber.process.name}/{fiber.name} waits for {fiber.why or 'its turn'}:")
            if frame is not None:
                own = [f for f in traceback.extract_stack(frame) if "/tests/simulation/_" not in f.filename]
                lines += [f"    {f.filename.rpartition('/')[2]}:{f.lineno} {f.name}" for f in own[-6:]]
        return "\n".join(lines)

    # --- what was seen -------------------------------------------------------------------------------

    def note(self, kind, source, target, text):
        """Keep a line for the sequence diagram."""
        if self.is_recorded:
            self.notes.append((self.now, kind, source, target, text))

    def check(self, is_right, text):
        """Raise `Violation` where a promise does not hold."""
        if not is_right:
            raise Violation(text() if callable(text) else text)
