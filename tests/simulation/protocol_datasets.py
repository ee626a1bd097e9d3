"""Datasets that workers make for themselves: which batches are in the servers' updates.

Real: `WorkerDatasets`, `WorkerData`, `StepWorker` with plans for each form of batches, `WorkerPool` with how
far it lets workers resume, and what `protocol_closures` has. A stub: the program of a step, which notes the
batch that it gets. Promised, and checked:

- no batch of a worker is in the updates twice, whoever was killed; one that is left out is the worker's next
  one when it returns;
- a batch that was given back is taken again; each epoch begins with the first batch;
- the end of a worker's data, and an error of the function that makes them, are raised, and are no other's;
- batches of another form get a plan of their own.

Tests: tests/unit/test_simulation.py.
"""

import functools
import types

import numpy as np

from tests.simulation._world import SETTING
from tests.simulation.protocol_closures import Closures
from tests.simulation.protocol_servers import Plan, run_servers
from unisono._errors import OutOfRangeError
from unisono.cluster_resolver._spec import Task
from unisono.parameter_server.chief._closures import Rules
from unisono.parameter_server.chief._worker_datasets import WorkerDatasets
from unisono.parameter_server.chief._workers import BatchFunction, RunRequest, WorkerPool
from unisono.parameter_server.server._chief_presence import ChiefHeartbeats
from unisono.parameter_server.state._create import NewVariable
from unisono.parameter_server.state._variables import StoredSpec
from unisono.parameter_server.worker._step_plan import PushPlan, StepPlan

#: The number of the variable on each server: which batches of which worker are in it, for each epoch.
TAKEN = 0
EPOCHS = 2


def _left_out(taken):
    """Return for each worker how many of its batches are left out before others that are used."""
    return [int(np.max(np.flatnonzero(own), initial=-1)) + 1 - int(own.sum()) for own in taken]


def batches(count, broken, context):
    """Return the batches of a worker: each holds its worker and its number, and the last one is longer."""
    worker = context.input_pipeline_id
    if worker == broken:
        raise ValueError("the dataset's own error")
    return [np.array([worker, i] + [0] * (i == count - 1), "float32") for i in range(count)]


class BatchProgram:
    """What a closure computes: a one at the place of its batch.

    Args:
        longest: the seconds that it takes at most.
    """

    def __init__(self, world, shape, longest=0.3):
        self.world, self.shape, self.longest = world, shape, longest
        self.compiled_count = 0

    def __call__(self, value, epoch, batch):
        if not self.compiled_count:
            self.compiled_count = 1
            self.world.sleep(self.world.uniform(0.0, 2.0))
        self.world.sleep(self.world.uniform(0.0, self.longest))
        taken = np.zeros(self.shape, "float32")
        worker, number = map(int, batch[:2])
        taken[int(epoch), worker, number] = 1
        return [taken, np.float32(100 * worker + number)]


class Datasets(Closures):
    """A cluster whose workers make their own data."""

    def __init__(self, world, plan, folder):
        super().__init__(world, plan, folder)
        self.fails = None
        #: Batches of each worker, and whose function raises.
        self.count = world.pick((plan.closures + 3, 2), SETTING)
        # Not the first one, as whom the chief looks at the first batch.
        self.broken = plan.workers - 1 if plan.workers > 1 and world.choose(8, SETTING) == 1 else None
        self.shape = EPOCHS, plan.workers, self.count

    def program(self):
        """Return what loads programs for one worker: the stub of a step's."""
        program = BatchProgram(self.world, self.shape)
        return lambda digest, data: program

    def lead(self):
        """Train epochs on the workers' data, and end the cluster."""
        world, plan = self.world, self.plan
        chief = Task("chief", 0)
        client = self.client(chief)
        number = self.starts = self.starts + 1
        generation = client.begin_job(number)
        self.jobs.append(generation)
        for server in range(plan.servers):
            client.create_variables(server, [NewVariable(StoredSpec("taken", self.shape, "float32"))])
        workers = [
            self.network.rpc_client(Task("worker", i), f"worker{i}", chief) for i in range(plan.workers)
        ]
        pushes = [
            PushPlan(s, (0,), {"updates": [], "adds": [TAKEN], "assigns": []}) for s in range(plan.servers)
        ]
        steps = StepPlan("program", ((0, TAKEN),), 0, (0, 1), tuple(pushes), (1,))

        def prepare(request, form):
            world.sleep(world.uniform(0.0, 1.0))
            pool.add_plan(f"step {form}", steps, [b"program"], request.function.name, form)

        rules = Rules(None, per_worker=2, together=world.pick((1, 4)))
        pool = WorkerPool(workers, rules, prepare, generation, find_used=client.used_batches)
        pool.start()
        heartbeats = ChiefHeartbeats([*client._clients, *workers], generation)
        self.train(pool, client)
        world.faults_left = 0
        self.ending.append(number)
        heartbeats.close()
        pool.end(0)
        client.end(0)

    def train(self, pool, client):
        """Train epochs; a worker's data may end, or be broken."""
        plan = self.plan
        job = types.SimpleNamespace(pool=pool, num_workers=plan.workers)
        data = WorkerDatasets(job, functools.partial(batches, self.count, self.broken))
        function = BatchFunction("step", (0,), lambda form: None)
        for epoch in range(EPOCHS):
            if epoch:
                data.restart()
            data._function = types.SimpleNamespace(
                run=lambda iterators, tally, epoch=epoch: pool.queue.schedule(
                    RunRequest(None, [np.float32(epoch)], function, tuple(iterators))
                )
            )
            first = pool.queue.next_number
            results, error, drops = [], None, None
            try:
                for _ in range(plan.closures):
                    # One by one: what is scheduled raises the error of an earlier closure.
                    results.append(data.run(None))
                if self.world.choose(3) == 1:
                    drops = self.leave(pool, first)
                self.wait_for(pool.queue)
                self.fill(client, epoch, pool.queue, lambda: data.run(None), results)
            except (OutOfRangeError, ValueError) as raised:
                error = raised
            self.judge_epoch(client, epoch, results, error, drops)
        data.forget()

    def fill(self, client, epoch, queue, run, results):
        """Schedule closures while batches are left out: workers that are lost take them when they return."""
        world, plan = self.world, self.plan
        faults, world.faults_left = world.faults_left, 0
        end = world.now + 60.0
        for _ in range(3):
            if plan.servers > 1 or not any(_left_out(client.read((0, TAKEN))[epoch])):
                break
            while queue.num_workers < plan.workers and world.now < end:
                world.sleep(0.2)
            for _ in range(plan.workers):
                results.append(run())
            queue.join()
        world.faults_left = faults

    def leave(self, pool, first):
        """Leave some closures, as a `fit` that was interrupted; return whether they may be dropped."""
        world = self.world
        world.sleep(world.uniform(0.0, 3.0))
        drops = bool(world.choose(2))
        pool.leave(first + world.choose(self.plan.closures), drops)
        return drops

    def wait_for(self, queue):
        """Wait for all closures, in one of two ways."""
        if self.world.choose(2):
            queue.join()
        while not queue.done():
            self.world.sleep(0.2)

    def judge_epoch(self, client, epoch, results, error, drops):
        """Check which batches are in the updates.

        Args:
            drops: whether closures that were left may be dropped; None where none was left.
        """
        world, plan = self.world, self.plan
        kind = None if error is None else type(error)
        if kind is ValueError:
            world.check(self.broken is not None, lambda: f"No dataset is broken: {error!r}.")
        elif kind is OutOfRangeError:
            most = max(plan.closures, len(results))
            world.check(self.count < most, lambda: f"No data end: {error!r}.")
        world.check(all(r.done() for r in results), "Each closure has a result, or an error, after `join`.")
        used = sum(result.exception() is None for result in results)
        if error is None and drops is None:
            world.check(used == len(results), "All closures have results.")
        # What was dropped may still be under way.
        end = world.now + 60.0
        while error is not None and world.now < end and len(set(self.totals(client, epoch))) > 1:
            world.sleep(1.0)
        for server in range(plan.servers):
            taken = client.read((server, TAKEN))[epoch]
            total = int(taken.sum())
            world.check(
                taken.max() <= 1, lambda taken=taken: f"A batch is in the updates once: {taken.tolist()}."
            )
            is_whole = error is None and not drops
            world.check(
                total == len(results) if is_whole else used <= total <= len(results),
                lambda total=total: f"{used} of {len(results)} closures have used {total} batches.",
            )
            if error is None:
                all_totals = self.totals(client, epoch)
                world.check(
                    len(set(all_totals)) == 1,
                    lambda all_totals=all_totals: f"A closure counts on all servers or none: {all_totals}.",
                )
            if plan.servers > 1 or error is not None:
                # A closure that ran twice may have other batches on other servers.
                continue
            world.check(
                not any(_left_out(taken)),
                lambda taken=taken: f"No batch is left out before one that is used: {taken.tolist()}.",
            )

    def totals(self, client, epoch):
        """Return how many batches are in each server's updates."""
        return [client.read((s, TAKEN))[epoch].sum() for s in range(self.plan.servers)]


def datasets(world):
    """Workers make their data; they are killed, and started again."""
    plan = Plan(servers=1 + world.choose(2, SETTING), workers=1 + world.choose(3, SETTING), closures=5)
    run_servers(world, plan, Datasets)


class LostWorkers(Datasets):
    """A cluster whose workers are killed as they ask a server, which gets their last requests late."""

    def __init__(self, world, plan, folder):
        super().__init__(world, plan, folder)
        self.network.last_words = 0.1


def lost_workers(world):
    """Workers are killed while their last requests are on the way."""
    plan = Plan(servers=1 + world.choose(2, SETTING), workers=1 + world.choose(2, SETTING), closures=5)
    run_servers(world, plan, LostWorkers)


class SlowWorkers(LostWorkers):
    """A cluster where a slow worker has a lost closure while another one takes its batch again."""

    def program(self):
        """Return what loads programs for one worker: the stub of a step's."""
        program = BatchProgram(self.world, self.shape, self.world.pick((0.3, 10.0)))
        return lambda digest, data: program


def slow_workers(world):
    """The same with more workers, of which some are slow."""
    plan = Plan(servers=1 + world.choose(2, SETTING), workers=2 + world.choose(2, SETTING), closures=5)
    run_servers(world, plan, SlowWorkers)


PROTOCOLS = {"datasets": datasets, "lost_workers": lost_workers, "slow_workers": slow_workers}
