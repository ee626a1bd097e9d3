"""A job on parameter servers, as the chief has it: servers, workers, variables and what is scheduled.

Tests: tests/virtual/strategies/test_parameter_server.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import keras
import numpy as np

from unisono._errors import ClusterError
from unisono.parameter_server.chief._closures import Rules
from unisono.parameter_server.chief._plans import PlanMaker
from unisono.parameter_server.chief._remote_variables import RemoteVariables
from unisono.parameter_server.chief._streams import RandomStreams
from unisono.parameter_server.chief._workers import BatchFunction, RunRequest, RunResult, WorkerPool
from unisono.parameter_server.programs._function_step import FunctionProgram
from unisono.parameter_server.programs._worker_program import Destination, WorkerProgram
from unisono.parameter_server.server._chief_presence import ChiefHeartbeats, leave_end_marker
from unisono.parameter_server.server._client import ServerClient
from unisono.parameter_server.server._traffic import StepTally
from unisono.parameter_server.worker._step_plan import OWN_INDEX
from unisono.rpc._calls import RequestClient

if TYPE_CHECKING:
    from unisono.step._call_signature import CallArray


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The connections of a chief.

    Args:
        servers: clients of the parameter servers, in the order of their indices.
        workers: clients of the workers, likewise.
        generation: how often the job was started before, at least.
        close: ends what this process serves itself.
        is_supervised: whether a launcher ends the tasks when the chief has ended.
    """

    servers: Sequence[RequestClient]
    workers: Sequence[RequestClient]
    generation: int = 0
    close: Callable[[], None] = lambda: None
    is_supervised: bool = False


class Job:
    """What the chief does with a cluster.

    Args:
        push_dtype: the type in which large gradients are pushed; None for that of their variables.
        pull_dtype: likewise of the weights that steps train.
    """

    def __init__(
        self, cluster: Cluster, rules: Rules, push_dtype: str | None = None, pull_dtype: str | None = None
    ) -> None:
        self._cluster = cluster
        self.client = ServerClient(cluster.servers)
        try:
            generation = self.client.begin_job(cluster.generation)
        except ClusterError:
            self._dismiss()
            raise
        self.variables = RemoteVariables(self.client, self._settle, push_dtype, pull_dtype)
        self.streams = RandomStreams()
        self._plans = PlanMaker(self.variables, self.client)
        self.pool = WorkerPool(
            cluster.workers,
            rules,
            self._prepare,
            generation,
            find_used=self.client.used_batches,
        )
        #: Where the programs of workers will run.
        self.destination = Destination(self.variables.may_be_table, self.pool.find_platforms)
        self.pool.start()
        self._heartbeats = ChiefHeartbeats([*cluster.servers, *cluster.workers], generation)
        #: By `id` of a program, which is kept, function and form of batches: the name of its plan.
        self._names: dict[tuple[int, str | None, str | None], tuple[WorkerProgram, str]] = {}
        self._plan_numbers = itertools.count()
        self._preparing = threading.local()
        #: What users made for this job, one of each class.
        self.owned: dict[type, object] = {}
        self._is_ended = False

    @property
    def num_workers(self) -> int:
        """How many workers the cluster has."""
        return self.pool.num_workers

    # --- programs ------------------------------------------------------------------------------

    def place(self, found: FunctionProgram) -> None:
        """Bring the variables of a function to the servers, where they are not there yet."""
        pairs = [(variable, None) for variable in found.variables]
        self.variables.place(pairs, found.step.optimizers, found.step.tables)

    def use(self, program: WorkerProgram, of_batches: tuple[BatchFunction, str] | None = None) -> str:
        """Bring a program to workers and servers, once; return the name of its plan."""
        function, form = (None, None) if of_batches is None else (of_batches[0].name, of_batches[1])
        # Functions, and batches of several forms, may have one program.
        key = (id(program), function, form)
        if key in self._names:
            return self._names[key][1]
        name = str(next(self._plan_numbers))
        arrays = [
            OWN_INDEX if number == program.worker else number if of_batches else place
            for place, number in enumerate(program.arrays)
        ]
        plan, programs = self._plans.plan(program, arrays)
        self.pool.add_plan(name, plan, programs, function, form)
        self._names[key] = program, name
        return name

    def run(
        self, program: WorkerProgram, arrays: Sequence[CallArray], tally: StepTally | None = None
    ) -> Future[RunResult]:
        """Schedule a run of a program; return its result, later."""
        name = self.use(program)
        specs = program.specs[len(program.reads) + len(program.streams) :]
        # As the program was traced: JAX turns 64 bits into 32. The call has no number of the worker.
        sent = [
            np.asarray(arrays[i], spec.dtype)
            for i, spec in zip(program.arrays, specs, strict=True)
            if i != program.worker
        ]
        states = self.streams.take(program.streams) if program.streams else []
        return self.pool.queue.schedule(RunRequest(name, sent, states=states, tally=tally))

    def release(self, programs: Sequence[WorkerProgram], variables: Sequence[keras.Variable]) -> None:
        """Free what the servers hold for programs that will not run any more.

        The values come back to the chief, and programs that use them again bring them to the servers.
        """
        gone = {id(program) for program in programs}
        optimizers = list({id(o): o for program in programs for o in program.optimizers}.values())
        slots = [v for optimizer in optimizers for v in optimizer.variables]
        self.variables.release([*variables, *slots])
        self._names = {key: named for key, named in self._names.items() if key[0] not in gone}
        self._plans.forget(optimizers)

    def _prepare(self, request: RunRequest, form: str) -> None:
        self._preparing.now = True
        try:
            function = request.function
            # Otherwise the function was traced meanwhile, and takes other batches: the worker is asked again.
            if function is not None and request.reads == function.reads:
                function.trace(form)
        finally:
            self._preparing.now = False

    # --- reading and the end -------------------------------------------------------------------

    def _settle(self) -> None:
        """Wait for what was scheduled, before the chief reads or writes a variable."""
        if not getattr(self._preparing, "now", False):
            self.pool.queue.join()

    @contextlib.contextmanager
    def around_call(self) -> Iterator[None]:
        """Surround a call that schedules closures: where it is left by an error, nothing waits for them.

        After an exception what was scheduled runs on, so that the variables are those after the last step
        that began. An interrupt drops what no worker has begun. Keras reads logs in threads, which Python
        waits for before a program ends.
        """
        first = self.pool.queue.next_number
        try:
            yield
        except BaseException as error:
            self.pool.leave(first, drops=not isinstance(error, Exception))
            raise

    def _dismiss(self) -> None:
        """Let the tasks end of a job that cannot begin: they would wait for a chief."""
        if not self._cluster.is_supervised:
            for client in (self.client, ServerClient(self._cluster.workers, self.client.generation)):
                client.end(1)
        self._cluster.close()

    def end(self, code: int = 0) -> None:
        """Let all tasks of the cluster end.

        Where a launcher watches over a chief that fails they go on: it starts the chief again, or ends them.
        """
        if self._is_ended:
            return
        self._is_ended = True
        self._heartbeats.close()
        if code and self._cluster.is_supervised:
            self.pool.close()
            self.client.close()
        else:
            away = self.pool.away
            # A launcher ends those that come later.
            self.pool.end(code, away if self._cluster.is_supervised else leave_end_marker(away, code))
            leave_end_marker(self.client.end(code), code)
        self._cluster.close()
