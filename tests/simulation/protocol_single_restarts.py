"""A launch with parameter servers: a task that fails starts again alone, while the others go on.

Real: the launcher's supervisor, its policy, its table of processes with spares, and heartbeats. A stub: what
tasks do. A chief (a task of its own, or worker 0) trains batches while all servers and one worker are there;
an evaluator ends after the training. Promised, and checked:

- no other task is ended because one has failed, and no number has two processes;
- a failed task is started again after its delay, and within a bound, as often as `--max-restarts` says;
- errors that another start does not change end the launch, with their code, and name their task;
- a chief that saves has its servers until it has ended;
- a launch that ends with 0 has trained all batches, and leaves no process behind.

Tests: tests/unit/test_simulated_files.py.
"""

import contextlib
import json
import signal

import pytest

from tests.simulation._disk import Disk
from tests.simulation._file_doors import Machine
from tests.simulation._world import SETTING, Violation
from tests.simulation.protocol_generations import LaunchOfWorld, doors
from unisono._system._signals import RESTART_WANTED
from unisono.cluster.liveness._heartbeat_file import HeartbeatFile
from unisono.launcher import _machines
from unisono.launcher import _restart_policy as decide
from unisono.launcher._options import LaunchOptions
from unisono.launcher._restart_policy import chief_of, serving_tasks

_STEP, _STALL, _GRACE = 0.3, 20.0, 6.0
_STOPPED, _KILLED = 128 + signal.SIGTERM, 128 + signal.SIGKILL
#: Seconds from a failure to the new process' first step, at most, beside the delay: until a stall is seen and
#: its stacks are written, a process that hangs at its end, imports, and slow threads.
_BACK_WITHIN = _STALL + 25.0
#: Seconds for a launch in all, and for each fault.
_BOUND = 90.0
#: Errors by which a program ends; the second ones are the same at each start.
_ERRORS = {
    "raise": "failed: ValueError: batch {}",
    "raise the same": "failed: ValueError: no file data.csv",
    "misuse": "failed: unisono.InvalidArgumentError: `batch_size` must be whole",
    "apart": "failed: ValueError: alone",
}
_KINDS = ("kill", *_ERRORS, "stall", "pause", "spare", "stop", "term", "wall")


class _ServersLaunch(LaunchOfWorld):
    """The launch, and what the checker knows of it."""

    def __init__(self, world, machine, options, total):
        super().__init__(world, machine, options, total)
        #: Batches whose changes the servers have; they keep them in their logs.
        self.done = self.saved = 0
        #: What a fault lets a task raise at its next step, and when each task has failed, in order.
        self.raises, self.failures = {}, []
        #: The tasks whose programs raise at each start.
        self.broken = set()
        #: Processes of tasks that were started again alone.
        self.restarted = set()
        #: The last failure of each task that has not been started again.
        self.away = {}
        self.has_ended, self.ended_at = False, 0.0
        self.asked_at = None
        #: Whether the chief ran when the launch was asked to stop.
        self.leads_at_stop = False

    def living(self, job=None):
        """Return the tasks' processes that run."""
        return [t for t in self.tasks if not t.process.is_dead and job in (None, t.task.type)]

    def fail(self, process, kind):
        """Note a failure: its task is to be started again."""
        self.failures.append((self.world.now, process.task, kind))
        self.away[process.task] = self.world.now, len(self.failures) - 1
        self.hit.append(process.task)

    def asked(self, process):
        """Check that a task may be asked to end, which its launcher does."""
        over = self.has_ended or self.signals or self.asked_at is not None or self._gives_up()
        self.check(over, lambda: f"{process.task} is asked to end while the launch goes on.")
        chief = chief_of(self.plan.tasks)
        saves = [t for t in self.living() if t.task == chief and not t.process.is_paused]
        if process.task in serving_tasks(self.plan.tasks) and not self.away and not self._gives_up():
            self.check(not saves, lambda: f"{process.task} is asked to end before the chief has ended.")

    def _gives_up(self):
        """Return whether a failure may end the launch."""
        kinds = [kind for _, _, kind in self.failures]
        same = [task for _, task, kind in self.failures if kind == "raise the same"]
        return (
            {"misuse", "apart"} & set(kinds)
            or len(set(same)) < len(same)
            or len(kinds) > self.options.restarts
            # Whether it counts is decided when its time is over.
            or bool(self.world.faults["pause"])
        )

    def check(self, is_right, text):
        """Let the world fail: a task's exception would be its failure."""
        if not is_right:
            self.world.fail(Violation(text()))

    def _must_give_up(self, end):
        """Return whether failures that the launcher has seen long before a time are too many, or final."""
        seen = [f for f in self.failures if f[0] < end - 5.0 and f[2] != "stall"]
        finals = [kind for _, _, kind in seen if kind in ("misuse", "apart")]
        same = [task for _, task, kind in seen if kind == "raise the same"]
        # One that is asked to save, or stopped, may end the generation before that is decided.
        if not self.options.restarts_tasks or self.world.faults["term"] or self.world._stall:
            return False
        return bool(finals) or len(set(same)) < len(same) or len(seen) > self.options.restarts

    # --- tasks ---------------------------------------------------------------------------------------

    def begin(self, plan):
        """Note a generation: only a chief that has saved is followed by another one."""
        self.plan = plan
        self.fenced_at[self.launches, plan.generation] = self.world.now
        self.check(
            plan.generation == 0 or self.asked_at is not None or not self.options.restarts_tasks,
            lambda: f"Generation {plan.generation} begins, and tasks start again alone.",
        )
        self.away.clear()
        self.asked_at = None

    def train(self, process, job):
        """Be a task; return its exit code."""
        task, plan = job["task"], job["plan"]
        others = [t for t in self.living() if t.task == task and t is not process]
        self.check(not others, lambda: f"{task} has two processes.")
        if task in self.away:
            self.check(
                not self._must_give_up(self.world.now),
                lambda: f"{task} starts again at {self.world.now:.1f} s after {self.failures}.",
            )
            self._check_delay(task)
            self.restarted.add(process)
        heart = HeartbeatFile(
            plan.paths.progress(task, plan.generation), plan.paths.fence, str(plan.generation)
        )
        role = {"ps": self._serve, "evaluator": self._evaluate}.get(task.type, self._work)
        if task == chief_of(plan.tasks):
            role = self._lead
        try:
            return role(process, heart, plan)
        except ValueError as error:
            return self._end_with_error(process, plan, error)

    def _check_delay(self, task):
        """Check when a task that has failed is there again."""
        failed_at, count = self.away.pop(task)
        # Of failures at about the same moment the launcher may see any one first, and a stall much later.
        earlier = sum(at < failed_at - 2.0 and kind != "stall" for at, _, kind in self.failures[:count])
        least = 0.0 if not earlier else min(30.0, 0.5 * 2.0 ** (earlier - 1))
        waited = self.world.now - failed_at
        # A process that was paused may have been counted as failed, too.
        if not self.world.faults["pause"]:
            self.check(
                waited >= least,
                lambda: f"After {earlier} restarts {task} is there after {waited:.2f} s, not {least:g}.",
            )

    def _end_with_error(self, process, plan, error):
        kind, text = error.args
        record = {
            "at": self.world.wall,
            "code": 1,
            "summary": text,
            "traceback": text,
            "apart": kind == "apart",
        }
        with contextlib.suppress(OSError):
            plan.paths.error(process.task, plan.generation).write_text(json.dumps(record))
        # What Python does at its end may take for ever.
        self.world.sleep(self.world.pick((0.1, 2.0, 1000.0)))
        return 1

    def _step(self, process):
        """Let a fault raise, and return whether the task was asked to end."""
        self.world.sleep(_STEP)
        kind = self.raises.pop(process, None)
        if kind == "raise the same":
            # A file that is missing is so at the next start, too.
            self.broken.add(process.task)
        if kind is None and process.task in self.broken:
            kind = "raise the same"
        if kind is not None:
            self.fail(process, kind)
            raise ValueError(kind, _ERRORS[kind].format(self.done))
        return process.wants_end

    def _serve(self, process, heart, plan):
        while not self._step(process):
            pass
        return _STOPPED

    def _evaluate(self, process, heart, plan):
        while not self._step(process):
            if plan.paths.finished.exists():
                self.check(self.has_ended, lambda: "An evaluator is told the end before it.")
                return 0
        return _STOPPED

    def _work(self, process, heart, plan):
        # A chief waits at its end for workers that it has not met; not for one that is started after it.
        met = not self.has_ended or process not in self.restarted
        while not self._step(process):
            heart.beat()
            if self.has_ended and met:
                return 0
        return _STOPPED

    def _lead(self, process, heart, plan):
        servers = self.options.ps
        while self.done < self.total:
            if self._step(process):
                # What it saves are the servers' values.
                self.world.sleep(self.world.uniform(0.0, 1.0))
                if len(self.living("ps")) == servers:
                    self.saved = self.done
                    return RESTART_WANTED
                continue
            heart.beat()
            workers = [t for t in self.living("worker") if t is not process]
            alone = self.options.workers == 0 or (not self.options.chief and self.options.workers == 1)
            if len(self.living("ps")) == servers and (workers or alone):
                self.done += 1
        self.has_ended, self.ended_at = True, self.world.now
        return 0

    # --- what is promised ------------------------------------------------------------------------------

    def look(self):
        """Check that tasks that have failed are there again in time."""
        if self.signals or self.has_ended or self._gives_up() or not self.options.restarts_tasks:
            return
        for task, (at, count) in self.away.items():
            bound = _BACK_WITHIN + min(30.0, 0.5 * 2.0**count) + 6.0 * (self.world._stall > 0)
            self.check(
                self.world.now - at <= bound,
                lambda task=task, at=at: f"{task} is away since {self.world.now - at:.1f} s.",
            )

    def ended(self, outcome):
        """Check how the launch has ended."""
        world, code, first = self.world, outcome.code, outcome.failure
        if code == 0:
            world.check(self.done == self.total, lambda: f"{self.done} of {self.total}, and the code is 0.")
            world.check(not self._must_give_up(self.ended_at), lambda: f"{self.failures}, and the code is 0.")
            return
        if self.signals:
            allowed = {_STOPPED, RESTART_WANTED}
            if self._gives_up() or (self.has_ended and self.hit):
                allowed |= {1, _KILLED, decide.STALLED}
            world.check(code in allowed, lambda: f"A launch that was asked to stop ends with {code}.")
            # A second signal kills.
            quiet = dict(world.faults) == {"stop": 1} and not world._stall and self.leads_at_stop
            world.check(
                code == RESTART_WANTED or not quiet or self.has_ended,
                lambda: f"A chief that is asked to end saves, and the code is {code}.",
            )
            if code == RESTART_WANTED:
                world.check(self.saved == self.done, lambda: f"{self.saved} of {self.done} are saved.")
            return
        if code == RESTART_WANTED:
            world.check(bool(world.faults["term"]), "Only a chief that was asked ends with 42.")
            world.check(not self.options.restarts, "With restarts it is started again.")
            return
        # After the training a failure, such as the evaluator's, is not repaired.
        world.check(
            bool(self._gives_up()) or (self.has_ended and bool(self.hit)),
            lambda: f"{self.failures} with {self.options.restarts} restarts end no launch: {outcome}",
        )
        if first is not None and not world.faults["wall"]:
            world.check(first.task in self.hit, lambda: f"The error must name one of {self.hit}: {first}")


def _disturb(world, launch):
    running = launch.living()
    kind = world.pick(_KINDS, "fault kind")
    spares = [each for each in launch.processes if each.task is None and not each.process.is_dead]
    if not running or not world.fault(0.9, kind):
        return
    # Of servers, workers, chiefs and evaluators alike.
    target = world.pick(running)
    chief = [t for t in running if t.task == chief_of(launch.plan.tasks)]
    world.note("fault", "test", str(target.task), kind)
    if kind == "kill":
        launch.fail(target, kind)
        target.process.kill()
    elif kind in _ERRORS:
        launch.raises[target] = kind
    elif kind == "stall":
        launch.fail(target, kind)
        target.process.pause(10 * _BOUND)
    elif kind == "pause":
        launch.hit.append(target.task)
        target.process.pause(world.uniform(0.0, 5.0))
    elif kind == "spare" and spares:
        world.pick(spares).process.kill()
    elif kind == "stop":
        launch.leads_at_stop = bool(chief)
        launch.signals.append(signal.SIGTERM)
        launch.wake()
    elif kind == "term" and chief:
        launch.asked_at = world.now
        chief[0].send(signal.SIGTERM)
    elif kind == "wall":
        world.wall_offset += world.pick((3600.0, -3600.0, 86_400.0))


def single_restarts(world):
    """A launch with servers, whose tasks are killed, stopped and raise, until all batches are trained."""
    world.settle()
    world.limit = 1500.0
    chief = world.choose(2, SETTING) == 1
    options = LaunchOptions(
        workers=1 + world.choose(2, SETTING),
        ps=1 + world.choose(2, SETTING),
        chief=chief,
        evaluator=world.choose(3, SETTING) == 2,
        max_restarts=world.pick((None, 10, 1, 0), SETTING),
        spares=world.pick((None, 0, 2), SETTING),
        grace=_GRACE,
        stall_timeout=_STALL,
    )
    disk = Disk(world)
    machine = Machine(world, "host-a", {"disk": disk, "tmp": Disk(world)}, own=("disk", "tmp"))
    launch = _ServersLaunch(world, machine, options, 10 + world.choose(20, SETTING))
    with doors(world, machine), pytest.MonkeyPatch.context() as patches:
        patches.setattr(_machines, "write_secret", lambda path, text: path.write_text(text))
        patches.setattr(_machines, "remove_sockets", list)
        world.faults_left = world.choose(5, SETTING)
        launcher = machine.process("launcher", launch.run)
        began = world.now
        while not launcher.wait(world.uniform(0.5, 4.0)):
            launch.look()
            if world.faults_left:
                _disturb(world, launch)
            world.check(
                world.now - began < _BOUND * (1 + sum(world.faults.values())),
                lambda: f"A launch must end or go on within its bound.\n{world.stacks()}",
            )
        if launcher.error is not None:
            raise launcher.error
        launch.ended(launcher.result)
        key = launch.paths.cluster_key
        world.check(not key.exists(), "The key of a cluster is removed with it.")


PROTOCOLS = {"single_restarts": single_restarts}
