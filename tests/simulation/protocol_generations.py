"""A launch with restarts: the launcher's supervisor and policy, the fence, heartbeats, backups, consensus.

The supervisor, the table of processes with its spares, `HeartbeatFile`, `BackgroundWriter`, the commits and
`PeriodicConsensus` are the project's; a task is a process that trains nothing, and its collectives fail as
Gloo's do. Tasks and spares are killed and stopped, single tasks and whole launches get SIGTERM, machines are
lost while their tasks run on, more or fewer are there, clocks jump, launchers are killed.
"""

import contextlib
import io
import itertools
import json
import os
import signal
import sys

import pytest

from tests.simulation._disk import Disk
from tests.simulation._file_doors import ROOT, FileDoors, Machine
from tests.simulation._launch_checks import LaunchChecks
from tests.simulation._stub_training import batches_in, snapshot_after
from tests.simulation._world import SETTING, Violation
from unisono._errors import CheckpointError
from unisono._system._object_store import place_of
from unisono._system._signals import RESTART_WANTED
from unisono.checkpoint import _writer
from unisono.checkpoint._series import CommitSeries
from unisono.checkpoint._writer import BackgroundWriter
from unisono.checkpoint.commits import _commits
from unisono.checkpoint.preemption import _save_consensus
from unisono.cluster.liveness._heartbeat_file import HeartbeatFile
from unisono.launcher import _machines, _stall_detector, _supervisor
from unisono.launcher import _restart_policy as decide
from unisono.launcher._machines import LocalMachine
from unisono.launcher._options import LaunchOptions
from unisono.launcher._plan import MARK, RunPaths

_KILLED = 128 + signal.SIGKILL
#: Seconds of a step, and after how many there is a backup.
_STEP, _EVERY = 0.3, 3
_STALL, _GRACE = 15.0, 6.0
#: Seconds from the loss of a task to the next generation's first step, at most: the stall, SIGTERM's grace
#: and the delays before restarts.
_BOUND = 120.0


#: Seconds from SIGTERM to the end of a launch, beside the grace of its tasks: looks of the launcher, and of
#: the test, and slow threads.
_STOP_SLACK = 15.0


class Collectives:
    """The messages of one generation: each waits for all processes, and fails where one has ended."""

    def __init__(self, world, size):
        self.world, self.size = world, size
        self.members, self.waiters, self.parts, self.answers = {}, [], {}, {}
        self.round = 0

    def join(self, rank, process):
        self.members[rank] = process
        process.at_end(self.wake)

    def wake(self):
        while self.world.wake(self.waiters):
            pass

    def is_broken(self):
        return any(process.is_dead or process.own.get("lost") for process in self.members.values())

    def gather(self, rank, data):
        """Return what all have sent."""
        number = self.round
        self.parts[rank] = data
        if len(self.parts) == self.size:
            self.answers[number] = [self.parts[i] for i in range(self.size)]
            self.parts, self.round = {}, number + 1
            self.wake()
        while number not in self.answers:
            if self.is_broken():
                raise RuntimeError("Gloo all-reduce failed: Connection closed by peer")
            self.world.block(self.waiters, 600.0, "a collective")
        return self.answers[number]


class _TaskProcess:
    """A process of the table: what the launcher has of a task, or of a spare that waits for one."""

    kept = None

    def __init__(self, launch, warm):
        self.launch, self.warm, self.task = launch, warm, None
        self.loss, self.ended_at = "", None
        self.wants_end = False
        self._job, self._waiters = None, []
        self.process = launch.machine.process(f"process.{next(launch.numbers)}", self._work)
        self.pid = self.process.pid
        self.process.at_end(self._end)
        launch.processes.append(self)

    def _work(self):
        world = self.launch.world
        # Imports.
        world.sleep(world.uniform(0.5, 1.5))
        while self._job is None:
            world.block(self._waiters, None, "a job")
        return self.launch.train(self, self._job)

    def assign(self, job):
        if self.process.is_dead:
            return False
        world = self.launch.world
        if self._job is not None:
            world.fail(Violation(f"{self.task} was given to a process that had {self._job['task']}."))
        self._job, self.task = job, job["task"]
        self.process.own["generation"] = self.launch.launches, job["generation"]
        # A spare may take its job in the middle of its imports.
        world.wake(self._waiters)
        self.launch.tasks.append(self)
        return True

    def _end(self):
        # Of a process whose machine was lost before, the launcher does not see the end.
        if not self.loss:
            self.ended_at = self.launch.world.wall
        self.launch.wake()

    def poll(self):
        if self.loss:
            return _KILLED
        if not self.process.is_dead:
            return None
        if self.process.is_killed:
            return self.process.own.get("code", _KILLED)
        return 1 if self.process.error is not None else self.process.result

    def send(self, number):
        if number == signal.SIGTERM and not self.loss:
            world = self.launch.world
            self.launch.asked(self)
            # A handler is called where Python looks for signals.
            world.call_later(world.uniform(0.0, 0.5), self._want_end)

    def _want_end(self):
        self.wants_end = True

    def kill(self):
        if not self.loss:
            self.process.kill()

    def lose(self):
        """Lose the machine: the launcher cannot reach the process, which may run on."""
        self.loss, self.ended_at = "its machine was lost", self.launch.world.wall
        self.process.own["lost"] = True
        self.launch.collectives[self.process.own["generation"]].wake()
        self.launch.wake()


#: In no environment: a launcher whose world has ended may sweep in its `finally`, and real processes then.
_NO_MARK = "simulated-4f0c2c1e-6c5b-4a53-9d0e-0b8f5f4a7d11"


class _Machines(LocalMachine):
    """The table of processes: the real one, whose processes are this world's."""

    def __init__(self, launch):
        def job(plan, task):
            return {"generation": plan.generation, "task": task, "plan": plan}

        super().__init__(launch.options, launch.paths, {MARK: _NO_MARK}, job, ())
        self._launch = launch

    @contextlib.contextmanager
    def running(self, wake, files):
        self._launch.wake = wake
        with super().running(wake, files):
            yield

    def plan(self, generation, workers):
        plan = super().plan(generation, workers)
        self._launch.begin(plan)
        return plan

    def _start(self, log, warm=False):
        return _TaskProcess(self._launch, warm)

    def capacity(self, paths):
        return self._launch.capacity


class _NoReaper:
    """The process that ends what a launcher leaves behind: this world does."""

    def __init__(self, mark):
        pass

    def close(self):
        pass


class Screen:
    def say(self, text):
        pass

    def follow(self, task, tail):
        pass

    def finish(self):
        pass

    def flush(self):
        pass


class LaunchOfWorld:
    """A launch, and what the checker knows of it."""

    def __init__(self, world, machine, options, total):
        self.world, self.machine, self.options, self.total = world, machine, options, total
        self.paths = RunPaths(place_of(f"{ROOT}/disk/launch"))
        self.place = place_of(f"{ROOT}/disk/backups")
        self.tasks, self.processes, self.collectives, self.signals = [], [], {}, []
        self.numbers = itertools.count(1)
        self.capacity = None
        self.checks = LaunchChecks(world, options)
        self.wake = lambda: None
        #: The newest backup whose writing was acknowledged, and the most batches that were trained.
        self.acknowledged = self.trained = 0
        #: Generations that have trained a batch.
        self.training = set()
        #: When each generation of each launcher began, and the tasks that faults have hit.
        self.fenced_at, self.hit = {}, []
        self.finished = False
        self.launches = 0
        #: When it was asked to stop.
        self.stopped_at = 0.0

    def begin(self, plan):
        key = self.launches, plan.generation
        self.fenced_at[key] = self.world.now
        self.checks.begin(key, plan, self.capacity)
        self.collectives[key] = Collectives(self.world, sum(t.type == "worker" for t in plan.tasks))

    def asked(self, task):
        """Note that a task gets SIGTERM."""

    def run(self):
        """Be the launcher; return how it ended."""
        self.launches += 1
        launch = _supervisor.Launch(
            self.options,
            self.paths,
            {},
            lambda plan, task: {},
            Screen(),
            lambda: tuple(self.signals),
            machines=_Machines(self),
        )
        self.paths.root.mkdir(parents=True, exist_ok=True)
        outcome = _supervisor.Supervisor(launch).run()
        left = [each for each in self.processes if not each.process.is_dead and not each.loss]
        self.world.check(not left, lambda: f"A launch must leave no process behind: {len(left)}")
        return outcome

    def train(self, task, job):
        """Be a task; return its exit code."""
        plan, rank = job["plan"], job["task"].index
        process = self.world.current.process
        key = self.launches, plan.generation
        group = self.collectives[key]
        group.join(rank, process)
        heart = HeartbeatFile(
            plan.paths.progress(job["task"], plan.generation), plan.paths.fence, str(plan.generation)
        )
        try:
            return self._steps(task, rank, key, heart, lambda data: group.gather(rank, data))
        except RuntimeError as error:
            self._report(plan, job["task"], error)
            # What Python does at its end may take a while, or for ever.
            self.world.sleep(self.world.uniform(0.0, 2.0))
            return 1
        except Violation as error:
            # Otherwise it would be the failure of a task, which the launcher starts again.
            self.world.fail(error)
            raise

    def _report(self, plan, task, error):
        record = {"at": self.world.wall, "code": 1, "summary": f"failed: {error}", "traceback": str(error)}
        with contextlib.suppress(OSError):
            plan.paths.error(task, plan.generation).write_text(json.dumps(record))

    def _steps(self, task, rank, key, heart, gather):
        world = self.world
        series = writer = None
        batches = 0
        if rank == 0:
            batches, series = self._restored()
            writer = BackgroundWriter(self.place)
        batches = int(gather(str(batches).encode())[0])
        several = self.collectives[key].size > 1
        consensus = _save_consensus.PeriodicConsensus(gather) if several else _save_consensus.SaveConsensus()
        consensus.begin(batches)
        while batches < self.total:
            world.sleep(_STEP)
            every = gather(str(batches).encode())
            world.check(len(set(every)) == 1, f"Workers are at different batches: {every}")
            batches += 1
            self.trained = max(self.trained, batches)
            self.training.add(key)
            heart.beat()
            beat_at = world.now
            agreed = consensus.agree(batches, task.wants_end)
            ends = agreed is not None and batches >= agreed
            if writer is not None and (ends or batches % _EVERY == 0 or batches == self.total):
                writer.wait()
                writer.submit(lambda n=batches, at=beat_at: self._write(series, n, key, at))
            if ends:
                self._close(writer)
                consensus.finish()
                self.checks.saved(key, batches, self.acknowledged)
                return RESTART_WANTED
        self._close(writer)
        gather(b"end")
        if rank == 0:
            self.finished = True
        return 0

    @staticmethod
    def _close(writer):
        if writer is not None:
            writer.close()
            writer.wait()

    def _restored(self):
        _commits.check_place(self.place, writes=True)
        _commits.sweep(self.place)
        series = CommitSeries(self.place, "backup", 2, in_one_file=True)
        found = series.newest()
        batches = 0 if found is None else batches_in(self.world, found[1])
        self.world.check(
            self.acknowledged <= batches <= self.trained,
            lambda: (
                f"A generation must go on after batch {self.acknowledged} to {self.trained}, not {batches}."
            ),
        )
        return batches, series

    def _check(self, is_right, text):
        """Let the world fail: an error of the writer's thread would only be kept."""
        if not is_right:
            self.world.fail(Violation(text() if callable(text) else text))

    def _write(self, series, batches, key, beat_at):
        world = self.world
        later = [at for other, at in self.fenced_at.items() if other > key]
        # Between two looks at the fence, a second passes.
        self._check(
            not later or beat_at <= min(later) + 1.5,
            lambda: f"Generation {key} writes at {world.now:.1f} s, a later one began at {min(later):.1f} s.",
        )
        try:
            series.write(_commits.newest_number(self.place, "backup") + 1, snapshot_after(batches))
            series.trim()
        except (CheckpointError, OSError):
            self._check(bool(world.faults), "A backup must be written when nothing has failed.")
            return
        self.acknowledged = max(self.acknowledged, batches)


def _exit_at_once(world, code):
    process = world.current.process
    process.own["code"] = code
    process.kill()


@contextlib.contextmanager
def doors(world, machine):
    """Put what a launch touches besides files into the world."""
    with FileDoors(world, Machine(world, "checker", machine.disks)), pytest.MonkeyPatch.context() as patches:
        patches.setattr(os, "_exit", lambda code: _exit_at_once(world, code))
        patches.setattr(_supervisor, "locked", lambda root, files: contextlib.nullcontext())
        patches.setattr(_supervisor, "has_room", lambda root: True)
        patches.setattr(
            _stall_detector,
            "is_stopped",
            lambda pid: any(p.pid == pid and p.is_paused for p in machine.processes),
        )
        patches.setattr(_machines, "OrphanReaper", _NoReaper)
        patches.setattr(_machines, "free_ports", lambda count, avoid: list(range(5000, 5000 + count)))
        patches.setattr(_machines, "sweep", lambda mark, spares: set())
        patches.setattr(_writer, "_WORKING", set())
        patches.setattr(sys, "stderr", io.StringIO())
        yield


#: What may go wrong; the second ones are what is announced, and ends no task by force.
_KINDS = ("kill", "pause", "stall", "lost", "wall", "stop", "term", "capacity", "spare", "launcher")
_ANNOUNCED = ("term", "capacity", "stop", "spare")


def _disturb(world, launch, launcher, kinds):
    """Let one thing go wrong."""
    running = [task for task in launch.tasks if not task.process.is_dead]
    spares = [each for each in launch.processes if each.task is None and not each.process.is_dead]
    kind = world.pick(kinds, "fault kind")
    if not world.fault(0.9, kind):
        return
    task = world.pick(running) if running else None
    world.note("fault", "test", str(task and task.task), kind)
    if kind == "wall":
        world.wall_offset += world.pick((3600.0, -3600.0, 86_400.0))
    elif kind == "stop":
        launch.signals.append(signal.SIGTERM)
        launch.stopped_at = world.now
        launch.wake()
        launch.checks.stop(launch.total - launch.trained, running)
    elif kind == "capacity":
        launch.capacity = world.pick((1, 2, 3))
        launch.checks.change_capacity(launch.capacity)
    elif kind == "spare":
        if spares:
            world.pick(spares).process.kill()
    elif kind == "launcher":
        for each in (*running, *spares):
            each.process.kill()
        launcher.kill()
    elif kind == "term" and task is not None:
        task.send(signal.SIGTERM)
        launch.checks.ask(task.process.own["generation"], launch.total - launch.trained)
    elif task is not None:
        launch.hit.append(task.task)
        if kind != "pause":
            launch.checks.fail(task.process.own["generation"], task.task)
        if kind == "kill":
            task.process.kill()
        elif kind == "pause":
            task.process.pause(world.uniform(0.0, 5.0))
        elif kind == "stall":
            task.process.pause(10 * _BOUND)
        else:
            task.process.pause(world.uniform(0.0, 5.0))
            task.lose()


def generations(world):
    """A launch whose tasks, machines, clocks and launchers fail, until all batches are trained."""
    world.settle()
    elastic = world.choose(3, SETTING) == 2
    workers = 1 + world.choose(3, SETTING)
    total = 12 + world.choose(12, SETTING)
    _launches(world, elastic, workers, total, world.choose(4, SETTING), _KINDS)


def preemptions(world):
    """A launch whose tasks are asked to save: all or one of them, or because other machines are there."""
    world.settle()
    elastic = world.choose(2, SETTING) == 1
    workers = 2 + world.choose(2, SETTING)
    # So many that a change of the size has time.
    total = 40 + world.choose(8, SETTING)
    _launches(world, elastic, workers, total, 1 + world.choose(2, SETTING), _ANNOUNCED)


def _launches(world, elastic, workers, total, faults, kinds):
    world.limit = 1200.0
    restarts = world.pick((10, 10, 1, 0), SETTING)
    options = LaunchOptions(
        workers=workers,
        max_restarts=restarts,
        elastic=(1, workers) if elastic else None,
        spares=world.pick((None, 0, 1, 4), SETTING),
        grace=_GRACE,
        stall_timeout=_STALL,
        cool_down=1.0,
    )
    disk = Disk(world)
    machine = Machine(world, "host-a", {"disk": disk, "tmp": Disk(world)}, own=("disk", "tmp"))
    launch = LaunchOfWorld(world, machine, options, total)
    if elastic and kinds is _ANNOUNCED:
        launch.capacity = world.pick((None, 1, 2), SETTING)
        launch.checks.change_capacity(launch.capacity)
    with doors(world, machine):
        world.faults_left = faults
        outcome = None
        for _ in range(6):
            launch.signals.clear()
            launcher = machine.process("launcher", launch.run)
            began = world.now
            while not launcher.wait(world.uniform(1.0, 6.0)):
                launch.checks.look(launch.tasks, launch.processes)
                if world.faults_left:
                    _disturb(world, launch, launcher, kinds)
                world.check(
                    world.now - began < _BOUND * (1 + sum(world.faults.values())),
                    lambda: f"A launch must end or go on within its bound.\n{world.stacks()}",
                )
            if launcher.error is not None:
                raise launcher.error
            outcome = launcher.result if not launcher.is_killed else None
            if outcome is not None and not _goes_on(world, launch, outcome, restarts):
                break
            # The kernel ends the tasks of a launcher that has ended; others start it again.
            for each in launch.processes:
                each.process.kill()
            world.sleep(1.0)
        if outcome is not None and outcome.code == 0:
            world.check(
                launch.finished and launch.trained == launch.total,
                lambda: (
                    f"{launch.trained} of {launch.total} batches are trained, and the launch ends with 0."
                ),
            )
            world.check(
                launch.acknowledged == launch.total or bool(world.faults),
                lambda: f"The last backup is after {launch.acknowledged} batches of {launch.total}.",
            )


def _goes_on(world, launch, outcome, restarts):
    """Check the code of a launch; return whether a scheduler starts it again."""
    code = outcome.code
    if launch.signals:
        launch.checks.stopped(code, launch.tasks)
        took = world.now - launch.stopped_at
        world.check(
            took <= _GRACE + _STOP_SLACK,
            lambda: f"A launch that was asked to stop must end within its grace, not after {took:.1f} s.",
        )
        if set(world.faults) == {"stop"} and not world._stall:
            world.check(
                # Where all is trained, tasks are at their end already.
                (code in (0, RESTART_WANTED) or launch.trained == launch.total)
                and launch.acknowledged == launch.trained,
                lambda: (
                    f"Tasks that are asked to end save first: {launch.acknowledged} of {launch.trained} "
                    f"batches are saved, and the launch ends with {code}."
                ),
            )
        return code != 0
    # Without restarts a launch is started again by others, also for another size.
    if code == RESTART_WANTED and not restarts and ("term" in world.faults or launch.options.elastic):
        # Tasks that are ended while they start have trained nothing, and those that a fault ends cannot save.
        last = max(task.process.own["generation"] for task in launch.tasks)
        if last in launch.training and not world._stall and not launch.checks.may_drop():
            launch.checks.saved_at_end(launch.tasks)
        return True
    if code == 0:
        launch.checks.trained()
        return False
    fatal = [kind for kind in world.faults.elements() if kind in ("kill", "stall", "lost", "pause")]
    world.check(
        len(fatal) > restarts or "capacity" in world.faults,
        lambda: (
            f"{len(fatal)} failures with {restarts} restarts must not end a launch, with {code}: {outcome}"
        ),
    )
    if outcome.failure is not None and "wall" not in world.faults:
        world.check(
            outcome.failure.task in launch.hit,
            lambda: f"The error must name one of {launch.hit}, not {outcome.failure}",
        )
        world.check(
            code in (_KILLED, decide.STALLED),
            lambda: f"The code must be that of the first failure: {outcome}",
        )
    return False


PROTOCOLS = {"generations": generations, "preemptions": preemptions}
