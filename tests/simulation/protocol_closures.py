"""Scheduled closures: a chief hands them to workers, which pull, compute and push, while all of them die.

Real: `WorkerPool`, `ClosureQueue` and its decisions, `StepWorker`, `ChiefHeartbeats`, and what
`protocol_servers` has. A stub: the program of a step, which XLA computes in reality. Promised, and checked:

- each closure that has ended counts once on each server; one that failed or was dropped on all or none;
- between a closure's pull and its own update a server applies at most `max_staleness` others;
- results are those of their closures; an error of a closure is raised once;
- the job ends, and its tasks with it.

Tests: tests/unit/test_simulation.py.
"""

import numpy as np
import pytest

from tests.simulation._world import SETTING
from tests.simulation.protocol_servers import Plan, Servers, run_servers
from unisono._errors import CancelledError, ClusterError
from unisono.cluster_resolver._spec import Task
from unisono.parameter_server.chief import _closures
from unisono.parameter_server.chief._closures import Rules
from unisono.parameter_server.chief._workers import RunRequest, WorkerPool
from unisono.parameter_server.server._chief_presence import ChiefHeartbeats
from unisono.parameter_server.state._create import NewVariable
from unisono.parameter_server.state._push import COUNTER_BITS
from unisono.parameter_server.state._variables import StoredSpec
from unisono.parameter_server.strategy._serve import CHIEF_SECONDS
from unisono.parameter_server.worker._step_plan import PushPlan, StepPlan
from unisono.parameter_server.worker._step_worker import StepWorker
from unisono.rpc._ops import Op

#: Numbers of the variables on each server: sums of closures, and what each closure had pulled of them.
SUMS, SEEN = range(2)
#: Seconds after the end of the chief within which all tasks end; more after faults: one that was away may
#: wait for a chief.
ENDS_WITHIN = 60.0


class StepProgram:
    """What a closure computes: it adds one at its own place, and notes how many updates it has seen."""

    def __init__(self, world, servers, pace):
        self.world, self.servers, self.pace = world, servers, pace
        self.compiled_count = 0

    def __call__(self, *given):
        values, (one_hot,) = given[: self.servers], given[self.servers :]
        if not self.compiled_count:
            # Others go on while a program is compiled.
            self.compiled_count = 1
            self.world.sleep(self.world.uniform(0.0, 3.0))
        if one_hot.sum() != 1:
            raise ValueError("the closure's own error")
        self.world.sleep(self.world.uniform(0.0, 0.2 + self.pace))
        seen = [one_hot * float(np.asarray(value, "float32").sum()) for value in values]
        return [one_hot, *seen, np.float32(np.argmax(one_hot))]


class Closures(Servers):
    """A cluster whose chief schedules closures."""

    def __init__(self, world, plan, folder):
        super().__init__(world, plan, folder)
        self.bound = world.pick((None, 0, 1, 2), SETTING)
        self.fails = plan.closures // 2 if world.choose(8, SETTING) == 1 else None
        #: By generation, closure and server: which of the server's updates it was.
        self.places = {}
        self.tasks = []

    def is_lossy(self, address):
        return address.startswith("ps")

    def handled(self, index, server, client, frame):
        """Handle a request of a server, and note which of its updates a closure was."""
        answer = super().handled(index, server, client, frame)
        if frame.op is Op.PUSH and answer.meta.get("applied"):
            self.places[frame.meta["closure"], index] = answer.meta["count"]
        return answer

    def program(self):
        """Return what loads programs for one worker: the stub of a step's."""
        program = StepProgram(self.world, self.plan.servers, self.pace)
        return lambda digest, data: program

    def work(self, index):
        """Be a worker."""
        client = self.client(Task("worker", index))
        program = self.program()
        rpc_server = None
        worker = StepWorker(
            index,
            self.plan.workers,
            client,
            program,
            lambda *args: rpc_server.reply(*args),
            lambda client: client.task == Task("chief", 0),
        )
        rpc_server = self.network.rpc_server(f"worker{index}", worker.handle)
        worker.start()
        rpc_server.start()
        self.wait_for_end(worker)
        self.world.sleep(1.0)
        rpc_server.close()
        worker.close()
        worker.join(5.0)

    def lead(self):
        """Schedule closures, wait for them, and end the cluster."""
        world, plan = self.world, self.plan
        chief = Task("chief", 0)
        client = self.client(chief)
        number = self.starts = self.starts + 1
        generation = client.begin_job(number)
        self.jobs.append(generation)
        specs = [StoredSpec(name, (plan.closures,), "float32") for name in ("sums", "seen")]
        for server in range(plan.servers):
            client.create_variables(server, [NewVariable(spec) for spec in specs])
        workers = [
            self.network.rpc_client(Task("worker", i), f"worker{i}", chief) for i in range(plan.workers)
        ]
        rules = Rules(self.bound, per_worker=2, together=world.pick((1, 4)))
        pool = WorkerPool(
            workers, rules, lambda request, form: None, generation, find_used=client.used_batches
        )
        pool.start()
        heartbeats = ChiefHeartbeats([*client._clients, *workers], generation)
        pushes = [
            PushPlan(s, (0, 1 + s), {"updates": [], "adds": [SUMS, SEEN], "assigns": []})
            for s in range(plan.servers)
        ]
        pulls = tuple((s, SUMS) for s in range(plan.servers))
        steps = StepPlan("program", pulls, 0, (0,), tuple(pushes), (1 + plan.servers,))
        pool.add_plan("step", steps, [b"program"])
        results = []
        error = None
        try:
            for place in range(plan.closures):
                one_hot = np.zeros(plan.closures, "float32")
                if place != self.fails:
                    one_hot[place] = 1
                results.append(pool.queue.schedule(RunRequest("step", [one_hot])))
                if world.choose(4) == 1:
                    world.sleep(world.uniform(0.0, 2.0))
            pool.queue.join()
        except ValueError as raised:
            error = raised
        if error is not None and number < self.starts:
            raise ClusterError("Another chief has taken over, and dropped the variables.") from error
        world.check((error is None) == (self.fails is None), f"A closure's error is raised: {error}")
        self.judge_closures(client, generation, results)
        # From here on nothing happens any more: all tasks are there, or come, to be told.
        world.faults_left = 0
        self.ending.append(number)
        heartbeats.close()
        pool.end(0)
        client.end(0)

    def judge_closures(self, client, generation, results):
        """Check what the closures have left."""
        world = self.world
        has_ended = []
        for place, result in enumerate(results):
            world.check(result.done(), lambda place=place: f"Closure {place} has a result after `join`.")
            error = result.exception()
            if error is None:
                found = float(result.result().arrays[0])
                world.check(found == place, lambda place=place, found=found: f"{place} has {found}'s result.")
                has_ended.append(place)
            else:
                world.check(isinstance(error, (CancelledError, ValueError)), lambda error=error: repr(error))
                world.check(self.fails is not None, lambda error=error: f"No closure fails: {error!r}.")
        end, all_sums = world.now + ENDS_WITHIN, self.sums(client)
        # What was dropped may be under way: a worker that is lost to the chief reaches the servers.
        while len(set(map(tuple, all_sums))) > 1 and len(has_ended) < len(results) and world.now < end:
            world.sleep(1.0)
            all_sums = self.sums(client)
        for server, sums in enumerate(all_sums):
            seen = client.read((server, SEEN))
            for place in range(self.plan.closures):
                least = int(place in has_ended)
                world.check(
                    least <= sums[place] <= 1,
                    lambda sums=sums, server=server: f"Closures count once. Server {server} has {sums}.",
                )
            world.check(sums == all_sums[0], lambda: f"A closure counts on all servers or none: {all_sums}.")
            for place in has_ended:
                update = self.places.get(((generation << COUNTER_BITS) + place, server))
                if update is None or self.bound is None:
                    continue  # the server was killed between the update and its answer
                missed = update - 1 - seen[place]
                world.check(
                    missed <= self.bound,
                    lambda place=place, missed=missed: (
                        f"A closure misses at most {self.bound} updates. Closure {place} missed {missed}."
                    ),
                )

    def sums(self, client):
        """Return what each server holds of the closures."""
        return [client.read((server, SUMS)).tolist() for server in range(self.plan.servers)]

    def run(self):
        """Run the job to its end, and wait for that of its tasks."""
        # Of few closures several go in one message, too.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_closures, "_WAIT_FOR_EACH", self.world.pick((16, 1), SETTING))
            super().run()
        end = self.world.now + ENDS_WITHIN + (CHIEF_SECONDS if self.world.faults else 0.0)
        for thread in self.watches:
            thread.join(max(0.0, end - self.world.now))
        left = [thread.name for thread in self.watches if thread.is_alive()]
        self.world.check(not left, f"All tasks end with the job. Left: {left}")


def closures(world):
    """A chief schedules closures; workers are killed, and started again."""
    plan = Plan(servers=1 + world.choose(2, SETTING), workers=1 + world.choose(3, SETTING), closures=6)
    run_servers(world, plan, Closures)


def closures_and_restarts(world):
    """Servers, workers and the chief are killed, and started again."""
    chiefs = 1 + world.choose(2, SETTING)
    plan = Plan(servers=1 + world.choose(2, SETTING), workers=2, closures=5, chiefs=chiefs, durable=True)
    run_servers(world, plan, Closures)


PROTOCOLS = {"closures": closures, "closures_and_restarts": closures_and_restarts}
