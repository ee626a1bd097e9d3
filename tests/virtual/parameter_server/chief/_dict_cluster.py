"""A cluster of dictionaries: servers and a worker that know bytes and arrays, in one process."""

import functools
import itertools

import jax
import jax.export
import numpy as np

import unisono
from unisono._lowering._compiler_options import compiler_options
from unisono.parameter_server.chief._partition import shard_bounds
from unisono.parameter_server.chief._placement import Division, VariablePart
from unisono.parameter_server.programs._push_layout import PushLayout
from unisono.parameter_server.programs._server_update import OptimizerUpdates
from unisono.parameter_server.programs._worker_step import WorkerStep
from unisono.step._keras_internals import trained_variables
from unisono.training.trainer._trainer_step import TrainerTask, variables_of


class DictStrategy(unisono.OneDeviceStrategy):
    """One replica, whose variables lie on servers."""

    def __init__(self):
        super().__init__("cpu:0")
        self._state_layout = PushLayout(self.mesh)


@functools.cache
def loaded(blob):
    """Return the compiled function of a serialized program."""
    program = jax.export.deserialize(bytearray(blob))
    return jax.jit(program.call, compiler_options=compiler_options("cpu"))


class DictCluster:
    """Servers as dictionaries of arrays, by the place of a variable.

    Args:
        variables: of the model and its optimizers.
        optimizers: built.
        num_servers: over which the variables are spread in turn.
        shards: into how many parts variables are divided, where they have as many rows.
    """

    def __init__(self, variables, optimizers, num_servers, shards=1):
        self.servers = [{} for _ in range(num_servers)]
        self.divisions, self.programs = {}, {}
        self.updates = {id(o): OptimizerUpdates(o) for o in optimizers}
        self.divisions_of = {}
        placement = itertools.count()

        def division(shape):
            count = min(shards, shape[0]) if shape else 1
            if count == 1:
                return Division.copies([next(placement) % num_servers])
            bounds = shard_bounds(shape[0], count)
            return Division(tuple(VariablePart(next(placement) % num_servers, rows) for rows in bounds))

        for optimizer in optimizers:
            trained = [division(v.shape) for v in trained_variables(optimizer)]
            self.divisions_of[id(optimizer)] = trained
            slots = self.updates[id(optimizer)].divisions(trained)
            every = [*trained_variables(optimizer), *optimizer.variables]
            for variable, own in zip(every, [*trained, *slots], strict=True):
                self.create(variable, own)
        for variable in variables:
            if id(variable) not in self.divisions:
                self.create(variable, Division.copies([next(placement) % num_servers]))

    def create(self, variable, division):
        self.divisions[id(variable)] = division
        self.write(variable, np.array(variable.value))

    def write(self, variable, value):
        for part in self.divisions[id(variable)].parts:
            self.servers[part.server][id(variable), part] = part.of(value)

    def read(self, variable):
        division = self.divisions[id(variable)]
        return division.joined([self.servers[p.server][id(variable), p] for p in division.pulled])

    def run(self, program, arrays):
        """Compute a step, push it, and return its result."""
        return self.push(program, self.compute(program, arrays))

    def compute(self, program, arrays):
        states = [self.read(s.variable) for s in program.streams]
        for stream, state in zip(program.streams, states, strict=True):
            self.write(stream.variable, stream.advanced(state))
        given = [*map(self.read, program.reads), *states, *(arrays[i] for i in program.arrays)]
        return [np.asarray(x) for x in loaded(program.blob)(*given)]

    def push(self, program, outputs):
        left = iter(outputs)
        groups = program.gradients, program.extras, program.adds, program.assigns
        gradients, extras, adds, assigns = ([next(left) for _ in group] for group in groups)
        pushed = {(u, id(v)): g for (u, v), g in zip(program.gradients, gradients, strict=True)} | {
            (u, n): x for (u, n), x in zip(program.extras, extras, strict=True)
        }
        for call in program.updates:
            own = {name: array for (update, name), array in pushed.items() if update == call}
            self.update(call.optimizer, program.has_gradient(call), own)
        for variable, delta in zip(program.adds, adds, strict=True):
            self.write(variable, self.read(variable) + delta)
        for variable, value in zip(program.assigns, assigns, strict=True):
            self.write(variable, value)
        return program.result.rebuild(list(left))

    def update(self, optimizer, present, pushed):
        """Let all servers update by pushed arrays, which are named by the `id` of a variable, or name."""
        for number in range(len(self.servers)):
            self._update(number, optimizer, present, pushed)

    def _update(self, number, optimizer, present, pushed):
        update = self.update_program(number, optimizer, present)
        own = self.servers[number]
        given = [p.part.of(pushed[id(p.variable)]) for p in update.gradients]
        given += [pushed[name] for name in update.extras]
        values, _ = loaded(update.blob)([own[piece.key] for piece in update.values], [], given)
        for piece, value in zip(update.values, values, strict=True):
            own[piece.key] = np.asarray(value)

    def update_program(self, number, optimizer, present):
        key = number, id(optimizer), present
        if key not in self.programs:
            divisions = self.divisions_of[id(optimizer)]
            self.programs[key] = self.updates[id(optimizer)].program(number, divisions, present)
        return self.programs[key]


def cluster_of(model, num_servers):
    every = [v for part in variables_of(model, TrainerTask.TRAIN) for v in part]
    others = [model.second_optimizer] if hasattr(model, "second_optimizer") else []
    return DictCluster(every, [model.optimizer, *others], num_servers)


def trained(model, strategy, batches, num_servers):
    """Train a model on a cluster of dictionaries; return the logs of each step and the cluster."""
    cluster = cluster_of(model, num_servers)
    step = WorkerStep(model, strategy._replicas, TrainerTask.TRAIN)
    logs = [cluster.run(step.program(batch), jax.tree.leaves(batch)) for batch in batches]
    return logs, cluster, step
