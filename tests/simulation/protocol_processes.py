"""A launch on one machine, with all that it has of the system: processes, pipes, signals, locks, files.

Real: `Supervisor`, `LocalMachine`, `Process`, `KeptOutput`, `SparePool`, `OrphanReaper` and its program, the
start of a task and the report of its end (`_task.main`, `run`), locks, history, logs, the console, and the
reader of `unisono watch`. A stub: what a program computes, and how it takes its variables over. Promised, and
checked:

- a launch leaves no process behind, in no group and with no parent, whatever a task has started; nor does a
  launcher that was killed; neither signals a process of somebody else, whose number was a task's before;
- a launcher that ends has waited for all its children and closed all its pipes;
- it ends with 0, with 42, or with the code of the first failure, whose task and error it names, also where
  the disk is full; a task that hangs has left its stacks in its log;
- logs have what tasks have printed, byte for byte, each start behind a line of its own; the terminal shows
  each line of the chief once;
- the report of a launch names the first failure and its log; who lacks a package is not started again;
- one launcher uses a folder; a new generation has new ports; a watcher sees each launch and its end.

Tests: tests/unit/test_simulated_launches.py.
"""

import contextlib
import io
import shutil
import signal
import sys
from pathlib import Path

from tests.simulation._disk import Disk
from tests.simulation._file_doors import ROOT, Machine
from tests.simulation._kernel import Kernel
from tests.simulation._task_programs import TaskPrograms, doors
from tests.simulation._world import SETTING, Violation
from tests.simulation.protocol_generations import Collectives
from unisono._errors import ClusterError
from unisono._system._object_store import place_of
from unisono._system._signals import RESTART_WANTED
from unisono.cluster.liveness._heartbeat_file import HeartbeatFile
from unisono.launcher import _launch
from unisono.launcher import _restart_policy as decide
from unisono.launcher._options import LaunchOptions, UserProgram
from unisono.launcher._plan import MARK, RunPaths, base_environment, start_up_block, tasks_of
from unisono.launcher._run_files import BestEffort, locked
from unisono.launcher._supervisor import Launch, Supervisor
from unisono.launcher.terminal._console import BackgroundConsole, Console
from unisono.watch._job_reader import JobReader
from unisono.watch._log_folder import LocalFolder

_STEP, _EVERY = 0.3, 3
_STALL, _GRACE = 12.0, 4.0
#: Seconds for a launch in all, and for each fault.
_BOUND = 120.0
_STOPPED, _KILLED = 128 + signal.SIGTERM, 128 + signal.SIGKILL
#: Seconds from the end of a launcher to the end of all that it has started.
_SWEPT = 3.0
_PROGRAM = UserProgram("train.py", ("--lr", "0.1"))
#: Codes by which programs end, as a shell shows them: of Python, of shells, of the commands `timeout` and
#: `env`, and what the system cuts off.
_CODES = (1, 2, 77, 124, 127, 137, 255, -1, 512 + 9)
_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM, signal.SIGHUP)
_KINDS = (
    "exit", "raise", "signal", "message", "hang", "stopped", "kill launcher", "kill reaper", "kill spare",
    "full", "full and raise", "removed", "second launcher", "stop", "stop twice", "capacity", "truncated",
    "terminal", "ports", "preempt", "raise and stop", "lacks",
)  # fmt: skip
#: What ends a task by force.
_FATAL = ("exit", "raise", "signal", "message", "hang", "stopped", "lacks")
#: What keeps logs from having all.
_SPOILS = ("full", "full and raise", "removed", "truncated")


class _Stream(io.StringIO):
    """A terminal that somebody may close."""

    gone = False

    def write(self, text):
        if self.gone:
            raise BrokenPipeError
        return super().write(text)


class _Job(TaskPrograms):
    """A launch, its tasks, and what the checker knows of them."""

    def __init__(self, world, kernel, options, total):
        super().__init__(world, kernel)
        self.options, self.total = options, total
        self.paths = RunPaths(place_of(f"{ROOT}/disk/launch"))
        #: What tasks do besides: ignore SIGTERM, start others, and leave them behind.
        self.ignores = world.choose(4, SETTING) == 3
        self.starts = world.choose(2, SETTING) == 1
        self.is_background = world.choose(2, SETTING) == 1
        self.launcher = self.plan = None
        self.launches = 0
        self.signals, self.orders = [], {}
        self.trained = self.saved = 0
        self.groups, self.running = {}, {}
        #: When which task has failed, with which code and which text.
        self.failures = []
        self.messages, self.shown = _Stream(), _Stream()
        self.stopped_at = None
        self.ports = set()
        self.begun = 0
        #: Processes that are given a task, or were.
        self.assigned = set()
        self.is_over, self.killed_spares = False, []
        #: What was shown by earlier launches, and whether a task was asked to save.
        self.shown_before, self.is_preempted = 0, False

    # --- the launcher ----------------------------------------------------------------------------------

    def launch(self):
        """Be the launcher; return how it has ended."""
        entry = self.kernel.current
        entry.handlers[signal.SIGTERM] = lambda: self.signals.append(signal.SIGTERM)
        self.launches += 1
        self.shown_before = len(self.shown.getvalue())
        self.paths.root.mkdir(parents=True, exist_ok=True)
        count = len(tasks_of(self.options, self.options.worker_range[1]))
        base = base_environment({}, self.options, count, 2, self.paths)
        self.mark = base[MARK]
        screen = Console(self.messages, self.shown, rewrites=False)
        shown = BackgroundConsole(screen) if self.is_background else screen
        launch = Launch(
            self.options,
            self.paths,
            base,
            self._described,
            shown,
            lambda: tuple(self.signals),
            lambda plan: start_up_block(plan, base, _PROGRAM),
            title="train.py",
        )
        self.is_over, self.killed_spares = False, []
        outcome = Supervisor(launch).run()
        self.is_over = True
        if self.is_background:
            shown.close()
        self._check_left(entry)
        return outcome

    def _described(self, plan, task):
        if plan is not self.plan:
            self._begin(plan)
        return _launch.job_description(plan, task, _PROGRAM)

    def signalled(self, sender, target, number):
        """Note that a launcher ends one of its spares."""
        if sender is self.launcher and target not in self.assigned and target.argv[2:] == ["warm"]:
            self.killed_spares.append(target)

    def about_to_assign(self, target):
        """Let a spare end right before it gets its task: its launcher has seen that it runs."""
        # It may be killed before it has read that.
        self.assigned.add(target)
        if target.argv[2:] == ["warm"] and self.world.fault(0.1, "kill spare"):
            self.kernel._die(target, signal.SIGKILL)

    def _begin(self, plan):
        self.fail_unless(
            not self.killed_spares,
            f"Spares wait for the next generation, and are killed: {self.killed_spares}",
        )
        # At the worst moment: it is known to run, and does not any more.
        spares = [e for e in self.kernel.living() if e.job is None and e.argv[2:] == ["warm"]]
        if spares and self.world.fault(0.2, "kill spare"):
            self.kernel._die(spares[0], signal.SIGKILL)
        self.plan, self.begun = plan, self.begun + 1
        ports = {address.rpartition(":")[2] for address in plan.addresses.values()}
        again = ports & self.ports
        self.fail_unless(
            not again or plan.generation == 0, f"A generation has the ports {again} of the one before."
        )
        self.ports = ports
        workers = sum(task.type == "worker" for task in plan.tasks)
        self.groups[self.launches, plan.generation] = Collectives(self.world, workers)

    def _check_left(self, entry):
        """Check what a launcher has when it ends: no processes, no children to wait for, no pipes."""
        left = [each for each in self.kernel.living(self.mark) if each is not entry]
        self.fail_unless(not left, f"A launch must leave no process behind: {left}")
        self.fail_unless(not entry.children, f"A launcher has not waited for {entry.children}.")
        held = self.kernel.held(entry)
        self.fail_unless(not held, f"A launcher must close its pipes, and has {len(held)} at its end.")

    # --- a task ----------------------------------------------------------------------------------------

    def taken(self, entry):
        """Note that a process has a task now."""
        key = self.launches, int(entry.job["environ"]["UNISONO_GENERATION"])
        before = self.running.get(entry.task)
        self.fail_unless(
            before is None or not before.is_alive, f"{entry.task} has two processes: {before} and {entry}."
        )
        self.running[entry.task], entry.key, entry.has_stepped = entry, key, False
        environ, options = entry.job["environ"], self.options
        found = environ.get("UNISONO_DEVICES_PER_WORKER"), environ.get("UNISONO_INTERFACE")
        devices = None if options.devices_per_worker is None else str(options.devices_per_worker)
        self.fail_unless(found == (devices, options.interface), f"{entry} gets the options {found}.")

    def run_script(self, path):
        """Be the program of a task."""
        entry = self.kernel.current
        self.fail_unless(path == "train.py", f"The program is {path}.")
        self.world.sleep(self.world.uniform(0.0, 0.5))
        entry.handlers[signal.SIGTERM] = None if self.ignores else lambda: self._asked(entry)
        if self.starts:
            self.start_others(entry)
        if entry.task.type == "evaluator":
            self._evaluate(entry)
        else:
            self._train(entry)

    @staticmethod
    def _asked(entry):
        entry.wants_end = True

    def _train(self, entry):
        world, rank, environ = self.world, entry.task.index, entry.job["environ"]
        group = self.groups[entry.key]
        group.join(rank, entry.process)
        heart = HeartbeatFile(
            Path(environ["UNISONO_PROGRESS"]),
            Path(environ["UNISONO_FENCE"]),
            environ["UNISONO_GENERATION"],
        )
        batches = int(group.gather(rank, str(self.saved).encode())[0])
        self.print(entry, f"begins at {batches}")
        while batches < self.total:
            world.sleep(_STEP)
            self._obey(entry)
            every = group.gather(rank, f"{batches} {int(entry.wants_end)}".encode())
            self.fail_unless(
                len({each.split()[0] for each in every}) == 1, f"Workers are at different batches: {every}"
            )
            batches += 1
            self.trained = max(self.trained, batches)
            heart.beat()
            entry.has_stepped = True
            self.print(entry, f"{entry.task} step {batches}")
            wants = any(each.endswith(b" 1") for each in every)
            if rank == 0 and (wants or batches % _EVERY == 0 or batches == self.total):
                self.saved = batches
            if wants:
                group.gather(rank, b"saved")
                sys.exit(RESTART_WANTED)
        group.gather(rank, b"end")

    def _evaluate(self, entry):
        finished = Path(entry.job["environ"]["UNISONO_FINISHED"])
        while not finished.exists():
            self.world.sleep(1.0)
            self._obey(entry)
            if entry.wants_end:
                sys.exit(_STOPPED)
        self.fail_unless(
            self.trained == self.total or bool(self.world.faults["removed"]),
            f"An evaluator is told the end after {self.trained} of {self.total} batches.",
        )

    def _obey(self, entry):
        """Do what a fault wants of a program."""
        kind = self.orders.get(entry)
        # Nothing is known of the pace of a program that has not made a step, or of an evaluator.
        if kind is None or (kind == "hang" and not entry.has_stepped):
            return
        del self.orders[entry]
        self.world.note("fault", entry.name, entry.name, kind)
        if kind == "exit":
            code = self.world.pick(_CODES)
            self._failed(entry, code & 0xFF, f"exit code {code & 0xFF}")
            sys.exit(code)
        if kind == "raise":
            text = self.world.pick(("no such file: data.csv", "first\nsecond", "bad \x1b[31m value"))
            self._failed(entry, 1, "ValueError: " + text.splitlines()[0][:3])
            raise ValueError(text)
        if kind == "lacks":
            self._failed(entry, 1, "No module named")
            raise ModuleNotFoundError("No module named 'pandas'", name="pandas")
        if kind == "message":
            self._failed(entry, 1, "exit code 1")
            sys.exit("no data")
        if kind == "signal":
            number = self.world.pick(_SIGNALS)
            self._failed(entry, 128 + number, signal.Signals(number).name)
            entry.process.own["code"] = -number
            entry.process.kill()
        # A collective that waits for ever, or a debugger.
        self._failed(entry, decide.STALLED, "no progress")
        if kind == "hang":
            self.world.sleep(1e4)

    def _failed(self, entry, code, text):
        self.failures.append((self.world.now, entry.task, code, text, entry))


# --- the world around it ------------------------------------------------------------------------------------


def _disturb(world, job):
    """Let one thing go wrong."""
    kernel, kind = job.kernel, world.pick(_KINDS, "fault kind")
    running = [each for each in job.running.values() if each.is_alive and each.job]
    if not job.launcher.is_alive or not world.fault(0.9, kind):
        return
    world.note("fault", "test", "test", kind)
    target = world.pick(running) if running else None
    if kind in _FATAL and target is not None:
        job.orders[target] = kind
        if kind == "stopped":
            job._failed(target, decide.STALLED, "is stopped")
            target.process.pause(1e4)
    elif kind == "kill launcher":
        job.launcher.process.own["code"] = -signal.SIGKILL
        job.launcher.process.kill()
    elif kind in ("kill reaper", "kill spare"):
        every = [e for e in kernel.living() if e.name.startswith("orphan_reaper") == (kind == "kill reaper")]
        others = [each for each in every if each.job is None and each.argv]
        if others:
            kernel._deliver(world.pick(others), signal.SIGKILL)
    elif kind in ("full", "full and raise"):
        if target is not None and kind != "full":
            job.orders[target] = "raise"
        disk = job.kernel.machine.disks["disk"]
        disk.room = world.pick((0, 20, 300))
        world.call_later(world.uniform(1.0, 30.0), lambda: setattr(disk, "room", float("inf")))
    elif kind == "removed":
        shutil.rmtree(job.paths.root, ignore_errors=True)
    elif kind == "second launcher" and job.begun:
        _try_second(world, job)
    elif kind == "truncated" and target is not None:
        with contextlib.suppress(OSError):
            job.paths.log(target.task).write_bytes(b"")
    elif kind == "terminal":
        world.pick((job.shown, job.messages)).gone = True
    elif kind == "ports":
        held = [port for port in range(10_000, 10_016) if port not in kernel.ports][:6]
        kernel.ports.update(dict.fromkeys(held))
        world.call_later(world.uniform(1.0, 20.0), lambda: [kernel.ports.pop(p, None) for p in held])
    elif kind == "preempt" and target is not None and target.task.type == "worker":
        job.is_preempted = True
        kernel._deliver(target, signal.SIGTERM)
    elif kind == "raise and stop" and target is not None:
        job.orders[target] = "raise"
        job.stopped_at, launcher = world.now, job.launcher
        world.call_later(world.uniform(0.3, 4.0), lambda: kernel._deliver(launcher, signal.SIGTERM))
    elif kind in ("stop", "stop twice"):
        job.stopped_at = world.now if job.stopped_at is None else job.stopped_at
        launcher = job.launcher
        kernel._deliver(launcher, signal.SIGTERM)
        if kind == "stop twice":
            world.call_later(world.uniform(0.5, 2.0), lambda: kernel._deliver(launcher, signal.SIGTERM))
    elif kind == "capacity":
        with contextlib.suppress(OSError):
            job.paths.capacity.write_text(world.pick(("1\n", "2", "many", "", "-1", "1_0")))


def _try_second(world, job):
    """Let another launcher use the same folder."""
    first = job.launcher

    def second():
        with contextlib.suppress(OSError):
            job.paths.root.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(ClusterError), locked(job.paths.root, BestEffort(print, job.paths.root)):
            if first.is_alive and not job.is_over and not world.faults["removed"]:
                world.fail(Violation("A second launcher has the folder of one that runs."))

    job.kernel.start("second", second)


class _Watcher:
    """Somebody who looks at the launch all the time, as `unisono watch` does."""

    def __init__(self, world, job):
        self.world, self.job = world, job
        self.reader = JobReader(LocalFolder(job.paths.root))
        self.seen = []

    def look(self):
        shown = self.reader.refresh()
        self.seen.append((shown.state, shown.generation, shown.exit_code))
        return shown

    def check_end(self, outcome):
        """Check that the end of a launch is seen."""
        shown = self.look()
        self.world.check(
            shown.exit_code == outcome.code and shown.generation == outcome.plan.generation,
            lambda: (
                f"Who looks at a launch sees {self.seen[-5:]}, and it has ended with {outcome.code} in "
                f"generation {outcome.plan.generation}."
            ),
        )


def processes(world):
    """Launches whose tasks end in all ways, and whose launchers and helpers are killed."""
    world.settle()
    world.limit = 2000.0
    workers = 1 + world.choose(3, SETTING)
    options = LaunchOptions(
        workers=workers,
        evaluator=world.choose(3, SETTING) == 2,
        max_restarts=world.pick((0, 10, 1), SETTING),
        devices_per_worker=world.pick((None, 2), SETTING),
        interface=world.pick((None, "eth0"), SETTING),
        spares=world.pick((0, None, 1), SETTING),
        elastic=(1, workers) if workers > 1 and world.choose(3, SETTING) == 2 else None,
        grace=_GRACE,
        stall_timeout=_STALL,
        cool_down=1.0,
    )
    machine = Machine(world, "host-a", {"disk": Disk(world), "tmp": Disk(world)}, own=("disk", "tmp"))
    kernel = Kernel(world, machine, {})
    job = _Job(world, kernel, options, 6 + world.choose(20, SETTING))
    kernel.on_signal, kernel.on_input = job.signalled, job.about_to_assign
    with doors(world, machine, kernel, job):
        world.faults_left = world.choose(4, SETTING)
        watcher = _Watcher(world, job)
        _strangers(world, kernel)
        for _ in range(6):
            job.signals.clear()
            job.stopped_at, job.failures, job.orders = None, [], {}
            job.is_preempted = False
            before = dict(world.faults)
            job.launcher = kernel.start("launcher", job.launch)
            began = world.now
            while not job.launcher.process.wait(world.uniform(0.7, 4.0)):
                watcher.look()
                if world.faults_left:
                    _disturb(world, job)
                world.check(
                    world.now - began < _BOUND * (1 + sum(world.faults.values())),
                    lambda: f"A launch must end or go on within its bound.\n{world.stacks()}",
                )
            process = job.launcher.process
            if process.error is not None:
                raise process.error
            faults = {kind: count - before.get(kind, 0) for kind, count in world.faults.items()}
            if process.is_killed:
                _check_swept(world, job, faults)
                continue
            _check_end(world, job, process.result, faults, watcher)
            if process.result.code == 0:
                return


def _strangers(world, kernel):
    """Let others start processes on the machine, which have numbers that were free."""

    def starts():
        while True:
            world.sleep(1.0)
            entry = kernel.start("stranger", lambda: world.sleep(4.0))
            entry.is_foreign = True

    world.spawn(starts, "strangers")


def _check_swept(world, job, faults):
    """A launcher that was killed leaves no process behind; without its helper, no task."""
    world.sleep(_SWEPT + 10.0 * (world._stall > 0))
    left = [each for each in job.kernel.living() if each.name != "second"]
    if world.faults["kill reaper"]:
        left = [each for each in left if each.argv and each.argv[0].endswith("_task.py")]
    world.check(not left, lambda: f"A launcher was killed, and its processes run on: {left}")
    for each in job.kernel.living():
        each.process.kill()


def _check_end(world, job, outcome, faults, watcher):
    code, failure = outcome.code, outcome.failure
    is_kept = not any(world.faults[kind] for kind in _SPOILS)
    if is_kept:
        watcher.check_end(outcome)
        _check_logs(world, job)
        _check_shown(world, job)
    told = _launch.report(outcome)
    if failure is not None:
        log = str(job.paths.log(failure.task))
        world.check(
            str(failure.task) in told and log in told, lambda: f"The report must name {failure}: {told}"
        )
    if code == 0:
        world.check(
            job.trained == job.total == job.saved,
            lambda: f"{job.trained} of {job.total} batches are trained, {job.saved} saved; the code is 0.",
        )
        return
    if job.stopped_at is not None:
        codes = {each[2] for each in job.failures} | {_STOPPED, RESTART_WANTED, 1, _KILLED}
        world.check(code in codes, lambda: f"A launch that was asked to stop ends with {code}.")
        return
    # A process that cannot be started is a failure, too.
    forks = 126 if faults.get("fork") else None
    if code == RESTART_WANTED:
        world.check(
            not job.options.restarts or job.options.elastic is not None or job.is_preempted,
            lambda: f"No task was asked to save, and the launch ends with 42: {outcome}",
        )
        return
    world.check(
        bool(job.failures) or forks is not None,
        lambda: f"Nothing has failed, and the code is {code}: {outcome}",
    )
    count = len(job.failures) + faults.get("fork", 0)
    is_lacking = any(text == "No module named" for *_, text, _ in job.failures) or job.is_preempted
    world.check(
        count > job.options.restarts
        or job.options.elastic is not None
        or job.trained == job.total
        or is_lacking,
        lambda: f"{count} failures with {job.options.restarts} restarts end no launch: {outcome}",
    )
    # Which of the tasks that wait for each other hangs, is not known.
    hit = [
        each
        for each in job.failures
        if each[2] == code and (each[1] == failure.task or each[3] == "no progress")
    ]
    world.check(
        bool(hit) or code == forks,
        lambda: f"The first failure must be one of {job.failures}, not {failure} with {code}",
    )
    if hit and code != _KILLED:
        _check_report(world, job, outcome, hit)


def _check_report(world, job, outcome, hit):
    """Check that the error, and what is behind it, is told."""
    *_, text, _ = hit[-1]
    detail = outcome.failure.detail
    world.check(text in detail or len(hit) > 1, lambda: f"The error must say {text!r}. It says {detail!r}.")
    if text.startswith("ValueError") and len(hit) == 1:
        world.check(
            "ValueError" in outcome.report, lambda: f"The report must have the traceback: {outcome.report!r}"
        )
    is_kept = not any(world.faults[kind] for kind in _SPOILS)
    if text == "no progress" and is_kept:
        log = job.paths.log(outcome.failure.task).read_bytes()
        world.check(b"Thread 0x1" in log, lambda: f"A task that hangs must leave its stacks: {log[-300:]!r}")


def _check_shown(world, job):
    """The terminal has each line that the first task has printed in this launch once, in its order."""
    if job.pieces.kind != "lines" or job.shown.gone:
        return
    first = next(iter(job.plan.tasks)) if job.plan is not None else None
    starts = [entry for entry in job.printed.get(first, ()) if entry.key[0] == job.launches]
    printed = [line for entry in starts for line in bytes(entry.printed).decode().splitlines() if line]
    prefix = f"[{first}] "
    shown = [
        line.removeprefix(prefix)
        for line in job.shown.getvalue()[job.shown_before :].splitlines()
        if line.removeprefix(prefix)
    ]
    world.check(shown == printed, lambda: f"{first} has printed {printed[-3:]}, and shown is {shown[-3:]}.")


def _check_logs(world, job):
    """A log has what its task has printed, each start behind a line of its own."""
    for task, starts in job.printed.items():
        log, position = job.paths.log(task).read_bytes(), 0
        for entry in starts:
            printed = bytes(entry.printed)
            at = log.find(printed, position)
            world.check(
                at >= 0,
                lambda entry=entry, printed=printed: f"{entry} has printed {printed[:80]!r}.",
            )
            before, _, line = log[:at].rpartition(b"--- ")
            begins = f"{task}, generation {entry.key[1]} ---\n".encode()
            world.check(
                at == 0 or not printed or (line == begins and before[-1:] in (b"", b"\n")),
                lambda begins=begins, line=line, before=before: (
                    f"A start is behind {begins!r}, on its own line, not {before[-20:]!r} {line!r}"
                ),
            )
            position = at + len(printed)


PROTOCOLS = {"processes": processes}
