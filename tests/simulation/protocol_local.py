"""`LocalUpdates`: phases, exchanges beside the steps, backups within a phase, other numbers of workers.

The layout, the state between steps, the train function's phases, `ExchangeBesideSteps`, `LocalPhase` and
`PhaseEnd` are the project's; a step and the programs around it are NumPy. After each step, each worker's own
values and what it shares must have the bits of `Twin`.
"""

import dataclasses
import types

import numpy as np

from tests.simulation._local_model import (
    FunctionOfModel,
    LayoutOfModel,
    LocalModel,
    LoneOfModel,
    local_doors,
    of_state,
    outer_state,
    to_state,
)
from tests.simulation._local_twin import FIRST, MEAN, SUM, WEIGHTS, Twin, taken_step
from tests.simulation._stub_programs import Replicas, Wires, placed
from tests.simulation._world import SETTING, Violation
from unisono._system._signals import RESTART_WANTED
from unisono.cluster_resolver._spec import Task
from unisono.launcher import _restart_policy as decide
from unisono.local_updates._local_layout import fitted_rows
from unisono.local_updates._local_updates import LocalUpdates
from unisono.training.trainer._trainer_step import TrainerTask

_KILLED = 137
#: Seconds from the first failure of a generation to the end of its last worker, without a stop.
_BOUND = 60.0
#: What a callback sets a weight to.
_CHANGED = np.full(2, 3, np.float32)


# --- a job -------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Settings:
    """What a program is given."""

    sync: LocalUpdates
    fragments: list
    has_outer: bool
    epoch: int
    total: int
    every: int
    change_at: int


@dataclasses.dataclass
class _Backup:
    """A backup: its steps, the variables by list, the slots of all, the phase; and what is right."""

    steps: int
    parts: list
    slots: np.ndarray
    local: tuple
    size: int
    twin: Twin


class _Job:
    """Generations of workers, and what the checker knows of them."""

    def __init__(self, world, settings):
        self.world, self.settings = world, settings
        self.backup = None
        #: What all replicas have after each number of steps.
        self.line = {}
        self.ask_at = None
        self.hits, self.failures, self.wires = [], [], None

    def begin(self, size):
        """Note from what a generation continues."""
        found = self.backup
        if found is None:
            self.line = {0: self._new(size)}
        else:
            twin = found.twin if found.size == size else found.twin.resized(size)
            self.line = {found.steps: twin}

    def _new(self, size):
        settings = self.settings
        return Twin(settings.sync, settings.fragments, settings.has_outer, size)

    def twin(self, steps):
        """Return what all have after some steps, the end of an epoch included."""
        settings = self.settings
        last = max(self.line)
        while last < steps:
            twin = self.line[last].copy()
            twin.step()
            last += 1
            if last == settings.change_at:
                twin.set_weight(WEIGHTS[1], _CHANGED)
            if last % settings.epoch == 0:
                twin.end()
            self.line[last] = twin
        return self.line[steps]


class _Worker:
    """A worker of a generation."""

    def __init__(self, job, wires, rank):
        self.job, self.world, self.rank, self.size = job, job.world, rank, wires.size
        settings = job.settings
        self.settings, self.model = settings, LocalModel(settings)
        self._slow = self.world.pick((0.1, 0.1, 1.0))
        self.function = None
        process = self.world.current.process
        process.own["rank"] = rank
        self.wires = wires
        if self.size > 1:
            replicas = Replicas(wires, rank)
            process.own["replicas"] = replicas
            self.layout = replicas.state_layout = LayoutOfModel(replicas, settings)
            self.layout._added[self.model.optimizer] = outer_state(settings)
            self.function = FunctionOfModel(self.model, replicas, TrainerTask.TRAIN)
            self.model.train_function = self.function
        else:
            self.layout = LoneOfModel(settings)
        self.phases = self.layout.phases
        self.model.strategy = types.SimpleNamespace(
            _replicated=types.SimpleNamespace(state_layout=self.layout)
        )

    def run(self):
        """Train; return the exit code."""
        settings, steps = self.settings, self._restored()
        self._check(steps)
        while steps < settings.total:
            count = self._count(steps)
            self._take(steps, count)
            steps += count
            if steps == settings.change_at:
                self._change()
            is_asked = steps == self.job.ask_at
            if is_asked and steps % settings.epoch:
                self._save(steps)
                return RESTART_WANTED
            if steps % settings.epoch == 0:
                self.phases.end(self.model)
                self._state = None
            self._check(steps)
            if steps % settings.every == 0 and not self.phases.is_in_phase(self.model):
                self._save(steps)
        self.wires.gather("end", self.rank, b"")
        return 0

    def _change(self):
        """Set a weight, as a callback does after a batch: the next step begins with what variables hold."""
        self.model.jax_state_sync()
        self.model.trainable_variables[1]._value = placed(_CHANGED)
        self._state = None

    def _restored(self):
        """Restore the newest backup, as `BackupAndRestore` does; return its number of steps."""
        found, model = self.job.backup, self.model
        self._state = None
        if found is None:
            for variable, i in zip(model.trainable_variables, range(len(WEIGHTS)), strict=True):
                variable._value = placed(np.full(2, i + 1, np.float32))
            self.phases.begin(model)
            return 0
        for variables, values in zip(model.parts, found.parts, strict=True):
            for variable, value in zip(variables, values, strict=True):
                variable._value = placed(value)
        slots = fitted_rows((self.size, 1), found.slots if found.size > 1 else found.slots[0])
        model.optimizer.variables[0]._value = placed(slots[self.rank][None])
        steps = model.optimizer.variables[1]
        steps._value = np.zeros_like(steps._value)
        self.phases.begin(model)
        facts, arrays = found.local
        if found.steps % self.settings.epoch and facts is not None:
            self.phases.resume(model, facts, arrays)
        return found.steps

    def _count(self, steps):
        """Return how many steps the next group has: each worker may choose another number."""
        settings, job = self.settings, self.job
        ends = [settings.total, *(e for e in (job.ask_at, settings.change_at) if e is not None and e > steps)]
        ends += [steps - steps % n + n for n in (settings.epoch, settings.every)]
        count = min(1 + self.world.choose(3), min(ends) - steps)
        limit = self.function and self.function.loop.limit
        return min(count, limit()) if limit else count

    def _take(self, steps, count):
        world, function = self.world, self.function
        if function is None:
            for number in range(steps, steps + count):
                world.sleep(self._seconds())
                values, slot = of_state([[v._value for v in part] for part in self.model.parts])
                new, slot = taken_step(values, slot[0], 0, number)
                state = [[v._value for v in part] for part in self.model.parts]
                for part, values in zip(self.model.parts, to_state(state, new, slot[None]), strict=True):
                    for variable, value in zip(part, values, strict=True):
                        variable._value = placed(value)
            return
        if self._state is None:
            self._state = self.model.state()
        first = steps - function.num_steps
        group = types.SimpleNamespace(world=world, count=count, seconds=self._seconds, first=first)
        function.carried.done.clear()
        function.begin_with(self._state)
        function.start(group)
        self._state = function.carried.keep(function._state, function.num_steps)

    def _seconds(self):
        return self.world.uniform(0.01, self._slow)

    def _save(self, steps):
        """Save the state; all workers read what lies on all."""
        world, model = self.world, self.model
        model.jax_state_sync()
        facts, arrays = self.phases.to_parts(model)
        arrays = {name: np.array(x) for name, x in arrays.items()}
        parts = [[np.array(v._value) for v in part] for part in model.parts]
        slots = self.wires.gather("slots", self.rank, np.array(model.optimizer.variables[0]._value))
        if self._state is not None:
            model._jax_state_synced = False
        if self.rank:
            return
        # A file that is complete or absent: what disks do is another protocol's.
        world.sleep(world.uniform(0.0, 1.0))
        twin = self.job.twin(steps)
        self.job.backup = _Backup(steps, parts, np.concatenate(slots), (facts, arrays), self.size, twin)

    def _check(self, steps):
        """Compare what the worker has with what all of them must have."""
        twin = self.job.twin(steps)
        function = self.function
        if function is None or self._state is None:
            state = [[v._value for v in part] for part in self.model.parts]
        else:
            state = [[part[i] for i in range(len(part))] for part in self._state]
        shared, slot = of_state(state)
        self._compare(steps, "shares", shared, twin.shared)
        self._compare(steps, "has in its slot", {"slot": slot[0]}, {"slot": twin.slots[self.rank]})
        if function is not None and self._state is not None:
            names = (WEIGHTS, (MEAN, FIRST), (), (SUM,))
            rows = {
                name: function.carried.held.values[p][i][1][0]
                for p, part in enumerate(names)
                for i, name in enumerate(part)
            }
            self._compare(steps, "has by itself", rows, twin.rows[self.rank])

    def _compare(self, steps, what, found, wanted):
        for name, value in found.items():
            self.world.check(
                np.asarray(value).tobytes() == wanted[name].tobytes(),
                lambda name=name, value=value: (
                    f"After {steps} steps worker {self.rank} {what} {name} = {np.ravel(value)}, "
                    f"not {np.ravel(wanted[name])}: {self.settings}"
                ),
            )


def _body(job, wires, rank):
    world = job.world
    process = world.current.process
    wires.join(rank, process)
    try:
        return _Worker(job, wires, rank).run()
    except RuntimeError as error:
        job.failures.append(
            decide.Failure(Task("worker", rank), world.wall, 1, f"failed: RuntimeError: {error}")
        )
        return 1
    except Violation as error:
        world.fail(error)
        raise


def _disturb(world, job, processes):
    """Let one thing go wrong."""
    running = [(rank, p) for rank, p in enumerate(processes) if not p.is_dead]
    kinds = ("pause", "kill", "cut") if len(processes) > 1 else ("pause", "kill")
    if not running or not world.fault(0.8, kind := world.pick(kinds, "fault kind")):
        return 0.0
    rank, process = world.pick(running)
    if kind == "kill":
        job.hits.append(rank)
        at = world.wall
        process.kill()
        job.failures.append(decide.Failure(Task("worker", rank), at, _KILLED, "was killed by SIGKILL"))
    elif kind == "cut":
        other = (rank + 1) % len(processes)
        job.hits += [rank, other]
        job.wires.cut(rank, other)
    elif kind == "pause":
        seconds = world.uniform(0.0, 20.0)
        process.pause(seconds)
        return seconds
    return 0.0


def local_updates(world):
    """Workers train apart and exchange, while they are killed, stopped and slow, and start again."""
    world.settle()
    settings = _settings(world)
    job = _Job(world, settings)
    world.limit = 3000.0
    size = 1 + world.choose(3, SETTING)
    is_elastic = world.choose(3, SETTING) == 2
    with local_doors():
        world.faults_left = world.choose(4, SETTING)
        # A preempted job saves at once.
        asks = [1 + world.choose(settings.total - 1, SETTING) for _ in range(world.choose(3, SETTING))]
        while not _generation(world, job, size, asks):
            if is_elastic:
                size = 1 + world.choose(3, SETTING)


def _settings(world):
    every = 2 + world.choose(4, SETTING)
    parts = 1 + world.choose(min(every, 3), SETTING)
    overlap = world.choose(every + 1, SETTING)
    sync = LocalUpdates(every, lambda: None, parts, overlap or False)
    fragments = [[WEIGHTS[i] for i in places] for places in sync._split([8] * len(WEIGHTS))]
    has_outer = world.choose(2, SETTING) == 1
    epoch, total = 5 + world.choose(8, SETTING), 12 + world.choose(12, SETTING)
    changes = world.pick((None, 3 + world.choose(8, SETTING)), SETTING)
    return _Settings(sync, fragments, has_outer, epoch, total, 3 + world.choose(4, SETTING), changes)


def _generation(world, job, size, asks):
    """Run a generation to its end; return whether all is trained."""
    wires = job.wires = Wires(world, size)
    job.hits, job.failures = [], []
    job.begin(size)
    first = 0 if job.backup is None else job.backup.steps
    job.ask_at = next((at for at in sorted(asks) if at > first), None)
    processes = [
        world.process(f"worker{rank}", lambda rank=rank: _body(job, wires, rank)) for rank in range(size)
    ]
    failed_at, stopped = None, 0.0
    while not all(p.is_dead for p in processes):
        next(p for p in processes if not p.is_dead).wait(world.uniform(0.2, 2.0))
        if world.faults_left:
            stopped += _disturb(world, job, processes)
        if failed_at is None and any(p.is_dead for p in processes):
            failed_at = world.now
        world.check(
            failed_at is None or world.now - failed_at < _BOUND + stopped,
            lambda: f"No worker may wait for ever for one that has ended.\n{world.stacks()}",
        )
    for process in processes:
        if process.error is not None:
            raise process.error
    codes = {p.result for p in processes if not p.is_killed}
    if codes == {0} and len(job.failures) == 0:
        return True
    if job.failures:
        cause = decide.root_cause(job.failures)
        world.check(
            cause.task.index in job.hits,
            lambda: f"The cause must be one of {job.hits}, not {cause}, of {job.failures}",
        )
    else:
        world.check(
            codes == {RESTART_WANTED} and job.backup.steps == job.ask_at,
            lambda: f"Workers that are asked to save at {job.ask_at} must do so, not end with {codes}.",
        )
    return False


PROTOCOLS = {"local_updates": local_updates}
