"""A job with its faults: started, watched, started again where it had to end, and judged."""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import ps_recovery
from soaking import faults, forks, training, watch
from soaking.plans import JOBS, PATIENCE

#: Seconds without a step, or without an end, after which a job hangs, on however busy a machine.
LIMIT = 120.0
#: Seconds without a step after which the launcher ends the tasks: no fault lasts so long.
STALL = 60
#: Of clients and servers.
KEY = "5e" * 32
#: How often a job is started again after it ended with an error that names its cause.
RESTARTS = 4
#: Lines that are the cause of an end that a fault of this kind may have.
CAUSES = {
    "kill": r"are used up",
    "term": r"are used up",
    "damage": r"all damaged",
    "full": r"No space left|no room|disk is full",
    "cut": r"ClusterError|PeerLostError|UnavailableError|did not|lost",
    "stop": r"ClusterError|PeerLostError|lost|stall",
}


class SoakError(Exception):
    """A job has not ended as it must."""


class Run:
    """A job that runs.

    Args:
        plan: what goes wrong.
        folder: for what the tasks note, on a disk that has room.
        disk: for everything else.
        expected: the file of one device, see `training.train_alone`.
        hosts: the machines, None for this one.
    """

    def __init__(self, plan, folder, disk, expected, hosts):
        self.plan, self.folder, self.disk, self.expected = plan, folder, disk, expected
        self.job, self.hosts = JOBS[plan.job], hosts
        self.tasks, self.log = self.job.tasks, disk / "log"
        self.killed, self.lines, self.ends, self.fired = [], [], [], 0
        self.damaged, self.refused = set(), 0
        self.uses = watch.Uses()
        self.kept, self.before = watch.children(os.getpid()), watch.files()
        for each in (folder, disk / "saved"):
            each.mkdir(parents=True)
        # What `_ps_counts.py` saves is a backup, too.
        (folder / "saved").symlink_to(disk / "saved")
        self.launcher, self.code = None, None
        with contextlib.ExitStack() as held:
            self.addresses = [self._address(i, held) for i in range(self.job.servers)]
        self.served = {}
        for i in range(self.job.servers):
            self.serve(i)
        self.start()

    # --- the launcher

    def start(self):
        """Start the launcher; again where it has ended."""
        arguments = ["launch", *self.job.flags, "--log-dir", str(self.log), "--grace", "20"]
        arguments += ["--stall-timeout", str(STALL)]
        if self.job.cluster:
            arguments += ["--cluster", self.job.cluster.format(*self.addresses), "--wait", "60"]
        if self.plan.cold:
            most = ["--max-restarts", "20"]
        else:
            # Few: what fails at each start must end.
            most = ["--max-restarts", "10" if self.job.program in ("counts", "tables") else "3"]
            most += [] if self.job.cluster else ["--spares", "0"]
        self.launcher = self._command([*arguments, *most, *self._program()], "launcher", 0)
        self.code = None

    def serve(self, i):
        """Start server i, again where it has ended."""
        arguments = ["serve", "--address", self.addresses[i], "--dir", str(self.disk / f"served-{i}")]
        arguments += ["--spares", "1" if self.plan.cold else "0"]
        self.kept.discard(self.served.get(f"server:{i}"))
        self.served[f"server:{i}"] = self._command(arguments, f"server-{i}", i if self.hosts else 0)
        self.kept.add(self.served[f"server:{i}"])

    def _address(self, i, held):
        # All are held until the last one is found: they are different.
        if self.hosts is not None:
            return f"{self.hosts.address(i)}:2222"
        probe = held.enter_context(socket.create_server(("127.0.0.1", 0)))
        return f"127.0.0.1:{probe.getsockname()[1]}"

    def _command(self, arguments, name, host):
        """Start the command `unisono` on a host; return the id of its process."""
        output = self.folder / f"{name}.log"
        environ = {"UNISONO_CLUSTER_KEY": KEY} if self.job.cluster else {}
        holder = None if self.hosts is None else self.hosts.holder(host)
        if not self.plan.cold:
            body = functools.partial(forks.command, arguments, host)
            return forks.fork(body, output, environ, holder)
        command = [sys.executable, "-m", "unisono", *arguments]
        if self.hosts is not None:
            command = self.hosts.command(host, *command)
        with output.open("a") as file:
            # Its end is waited for as that of a forked one.
            return subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **environ},
            ).pid

    def _program(self):
        plan, kind = self.plan, self.job.program
        if kind == "counts":
            options = {"steps": 4000, "save_every": 40, "pause": 0.01}
            options |= {"staleness": plan.staleness, "points": []}
            program = Path(ps_recovery.__file__).with_name("_ps_counts.py")
            return [str(program), str(self.folder), json.dumps(options)]
        options = {"job": kind, "free": plan.free, "every": 10 if kind == "tables" else 1}
        options |= {"save": 5, "pause": 0.005, "patience": PATIENCE, "expected": str(self.expected)}
        options |= {"epochs": -(-plan.steps // training.EPOCH), "faults": [f.step for f in plan.faults]}
        return [training.__file__, str(self.folder), str(self.disk), json.dumps(options)]

    def has_ended(self):
        """Whether the launcher has ended; its exit code is then known."""
        if self.code is None:
            pid, status = os.waitpid(self.launcher, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    # --- what the tasks note

    def note(self, text):
        """Keep a text for the report of a failure."""
        self.lines.append(text)

    def notes(self, task, *kinds):
        """What a task has noted, in order."""
        return ps_recovery.read_lines(self.folder / f"{task.replace(':', '-')}.jsonl", kinds)

    def events(self, kind):
        """What the launcher has noted; a line may be cut where the disk was full."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for line in (self.log / "history.jsonl").read_text(errors="replace").split("\n")[:-1]:
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line))
        return [event for event in found if event.get("event") == kind]

    def steps(self):
        """How many steps are done."""
        if self.job.program == "counts":
            return len(self.notes("chief:0", "acknowledge"))
        done = [n["step"] for t in self.tasks for n in self.notes(t, "step")[-1:]]
        return 1 + max(done, default=-1)

    def is_done(self):
        """Whether the training has ended as it should."""
        if self.job.program == "counts":
            return (self.folder / "values.json").exists()
        return any(self.notes(task, "done") for task in self.tasks)

    def pid(self, target):
        """The process of a task or the launcher that runs now, None where there is none."""
        if target == "launcher":
            return self.launcher if watch.is_alive(self.launcher) else None
        if target in self.served:
            return self.served[target]
        pids = [n["pid"] for n in self.notes(target, "process")[-1:]]
        return pids[0] if pids and watch.is_alive(pids[0]) else None

    # --- from the first step to the last

    def carry_out(self):
        """Let everything go wrong, and wait for the end.

        Raises:
            SoakError: it is not as it must be.
        """
        for fault in self.plan.faults:
            self.wait(lambda f=fault: self.steps() >= f.step, f"step {fault.step}")
            time.sleep(fault.after)
            self.note(f"{self.steps()} steps: {fault}")
            faults.fire(fault, self)
            self.mark()
            self.fired += 1
        if self.job.program == "counts":
            goal = self.steps() + PATIENCE
            self.wait(lambda: self.steps() >= goal, f"step {goal}")
            (self.folder / "finish").touch()
        self.wait(lambda: self.is_done() and self.has_ended(), "the end", ends=True)
        if self.code and not self.was_asked():
            raise SoakError(f"the launcher ended with {self.code} after all was done")
        self.judge()

    def mark(self):
        """Let the training go on behind the fault that happens now."""
        (self.folder / f"fault-{self.fired}").touch()

    def wait(self, condition, what, ends=False):
        """Wait for a condition, and start the launcher again where it has ended; return the value.

        Raises:
            SoakError: it takes too long, or the launcher has ended in a wrong way.
        """
        deadline, steps, sampled = time.monotonic() + LIMIT, self.steps(), 0.0
        while not (value := condition()):
            if self.has_ended() and not (ends and self.is_done() and self.code == 0):
                self.begin_again()
            if (now := self.steps()) != steps:
                deadline, steps = time.monotonic() + LIMIT, now
            if time.monotonic() > deadline:
                self.show_stacks()
                raise SoakError(f"HANGS: {LIMIT:g} s after step {steps}, waiting for {what}")
            if time.monotonic() - sampled > 0.5:
                sampled = time.monotonic()
                self.obey()
                found = {t: self.pid(t) for t in (*self.tasks, *self.served, "launcher")}
                self.uses.sample({pid: name for name, pid in found.items() if pid}, steps)
            time.sleep(0.01)
        return value

    def was_asked(self):
        """Whether the launcher has ended because of a signal, which may arrive before it handles any."""
        return "launcher" in self.killed and self.code in (-9, -15, 42, 143)

    def begin_again(self):
        """Start the launcher again, if it was right to end.

        Raises:
            SoakError: it was not.
        """
        self.check_left_behind()
        wrong = [n for task in self.tasks for n in self.notes(task, "wrong")]
        text = (self.folder / "launcher.log").read_text(errors="replace")
        self.note(f"the launcher ended with {self.code}")
        if wrong:
            raise SoakError(f"WRONG NUMBERS: {wrong[0]}")
        if self.code == 0 and not self.was_asked():
            raise SoakError("ENDS EARLY: the launcher ended with 0 and the training is not done")
        if not self.was_asked():
            last = " ".join(text.splitlines()[-12:])
            kinds = {fault.kind for fault in self.plan.faults[: self.fired + 1]}
            if not any(re.search(CAUSES[kind], last) for kind in kinds & set(CAUSES)):
                raise SoakError(f"UNCLEAR END with {self.code}")
            self.ends.append(text.splitlines()[-1])
            if "all damaged" in last:
                self.move_away()
            if len(self.ends) > RESTARTS:
                raise SoakError(f"ENDS AGAIN AND AGAIN: {self.ends}")
        self.killed = [each for each in self.killed if each != "launcher"]
        self.start()

    def obey(self):
        """Do what the error at each start says, where many restarts are allowed: the launcher goes on."""
        if not self.damaged:
            return
        text = (self.folder / "launcher.log").read_text(errors="replace")
        refused = len(re.findall("failed: .*all damaged", text))
        if refused > self.refused + 2:
            self.refused = refused
            self.note("all backups are damaged, and moved away")
            self.move_away()

    def move_away(self):
        """Do what the error says where all backups are damaged: train from the beginning.

        Raises:
            SoakError: one of them was left alone.
        """
        if others := {path.name for path in self.disk.glob("backup/[!.]*")} - self.damaged:
            raise SoakError(f"UNUSED: {sorted(others)} are as they were written")
        shutil.rmtree(self.disk / "backup")

    def show_stacks(self):
        """Let all tasks write their stacks into their logs."""
        for task in self.tasks:
            if pid := self.pid(task):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(1.0)

    # --- at the end

    def judge(self):
        """Check what the job has left and what it has computed.

        Raises:
            SoakError: it is not as it must be.
        """
        self.check_left_behind()
        self.end_servers()
        if more := watch.files() - self.before:
            raise SoakError(f"FILES are left: {sorted(more)}")
        if stalled := self.events("stalled"):
            raise SoakError(f"STALLED: {stalled[0]['task']} {stalled[0]['detail']}")
        if grown := self.uses.grown():
            raise SoakError(f"GROWS: {'; '.join(grown)}")
        if self.job.program == "counts":
            try:
                verdict = ps_recovery.judge(self)
            except ps_recovery.HistoryError as error:
                raise SoakError(f"WRONG HISTORY: {error}") from error
            if verdict.lost or verdict.twice:
                raise SoakError(f"WRONG HISTORY: {verdict}")

    def end_servers(self):
        """End the servers of a standalone client, and check that each has ended the tasks.

        Raises:
            SoakError: it has not, or ends with an error.
        """
        for name, pid in self.served.items():
            deadline = time.monotonic() + LIMIT
            while tasks := [p for p in watch.descendants(pid) if "_orphan_reaper" not in watch.command_of(p)]:
                if self.plan.cold or time.monotonic() > deadline:
                    break
                time.sleep(0.01)
            os.kill(pid, signal.SIGTERM)
            while watch.is_alive(pid) and time.monotonic() < deadline:
                time.sleep(0.01)
            if tasks and not self.plan.cold:
                raise SoakError(f"ORPHANS: {name} has {tasks} when its client has ended")
            code = None if watch.is_alive(pid) else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if code != 0:
                raise SoakError(f"{name} does not end with 0 on SIGTERM, but with {code}")
        self.kept -= {*self.served.values()}
        self.served.clear()
        self.check_left_behind()

    @property
    def kills(self):
        """The tasks that may have failed, as `ps_recovery.judge` asks for them."""
        away = {fault.kind for fault in self.plan.faults} & {"cut", "one-way"} and self.hosts is not None
        named = {*self.killed} & {*self.tasks}
        every = self.tasks if away or {*self.killed} - named else named
        return [(task, 0.0) for task in every]

    def check_left_behind(self):
        """Check that no process outlives the launcher."""
        if left := watch.left_behind(self.kept):
            raise SoakError(f"ORPHANS: {', '.join(left)}")

    def report(self):
        """What has happened, and what all have written."""
        texts = [*self.lines]
        paths = [*sorted(self.folder.glob("*.log")), *sorted(self.log.glob("*.log"))]
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                texts.append(f"--- {path.name}\n{path.read_text(errors='replace')[-6000:]}")
        return "\n".join(texts)

    def end(self):
        """End everything, and remove the files on the disk."""
        for host in range(self.job.hosts):
            forks.set_clock(host, 0.0)
        if not self.has_ended():
            os.kill(self.launcher, signal.SIGKILL)
            os.waitpid(self.launcher, 0)
        for pid in self.served.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.kept -= {*self.served.values()}
        watch.left_behind(self.kept)
        shutil.rmtree(self.disk, ignore_errors=True)
