"""A cluster of dictionaries: servers and a worker that know bytes and arrays, in one process."""

import functools

import jax
import jax.export
import numpy as np

import unisono
from unisono._lowering._compiler_options import compiler_options
from unisono.step._keras_internals import trained_variables
from unisono.training.pushed._push_layout import PushLayout
from unisono.training.pushed._server_update import OptimizerUpdates
from unisono.training.pushed._worker_step import WorkerStep
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
    """

    def __init__(self, variables, optimizers, num_servers):
        self.servers = [{} for _ in range(num_servers)]
        self.homes, self.programs = {}, {}
        self.updates = {id(o): OptimizerUpdates(o) for o in optimizers}
        self.servers_of = {}
        for optimizer in optimizers:
            trained = trained_variables(optimizer)
            self.servers_of[id(optimizer)] = [i % num_servers for i in range(len(trained))]
            slots = self.updates[id(optimizer)].homes(self.servers_of[id(optimizer)])
            homes = [*([s] for s in self.servers_of[id(optimizer)]), *map(sorted, slots)]
            for variable, home in zip([*trained, *optimizer.variables], homes, strict=True):
                self.create(variable, home)
        for number, variable in enumerate(variables):
            if id(variable) not in self.homes:
                self.create(variable, [number % num_servers])

    def create(self, variable, homes):
        self.homes[id(variable)] = list(homes)
        for home in homes:
            self.servers[home][id(variable)] = np.array(variable.value)

    def read(self, variable):
        return self.servers[self.homes[id(variable)][0]][id(variable)]

    def run(self, program, arrays):
        """Compute a step, push it, and return its result."""
        return self.push(program, self.compute(program, arrays))

    def compute(self, program, arrays):
        states = [self.read(s.variable) for s in program.streams]
        for stream, state in zip(program.streams, states, strict=True):
            self.servers[self.homes[id(stream.variable)][0]][id(stream.variable)] = stream.advanced(state)
        given = [*map(self.read, program.reads), *states, *(arrays[i] for i in program.arrays)]
        return [np.asarray(x) for x in loaded(program.blob)(*given)]

    def push(self, program, outputs):
        gradients, extras, adds, assigns, results = program.split(outputs)
        pushed = {(id(o), id(v)): g for (o, v), g in zip(program.gradients, gradients, strict=True)} | {
            (id(o), n): x for (o, n), x in zip(program.extras, extras, strict=True)
        }
        for optimizer in program.optimizers:
            self.update(optimizer, program.has_gradient(optimizer), pushed)
        for variable, delta in zip(program.adds, adds, strict=True):
            for home in self.homes[id(variable)]:
                self.servers[home][id(variable)] = self.servers[home][id(variable)] + delta
        for variable, value in zip(program.assigns, assigns, strict=True):
            for home in self.homes[id(variable)]:
                self.servers[home][id(variable)] = value
        return program.result.rebuild(results)

    def update(self, optimizer, present, pushed):
        """Let all servers update by pushed arrays, which are named by optimizer and variable, or name."""
        for number in range(len(self.servers)):
            self._update(number, optimizer, present, pushed)

    def _update(self, number, optimizer, present, pushed):
        update = self.update_program(number, optimizer, present)
        own = self.servers[number]
        given = [own[id(v)] for v in update.reads]
        given += [pushed[id(optimizer), id(v)] for v in update.gradients]
        given += [pushed[id(optimizer), name] for name in update.extras]
        for variable, value in zip(update.writes, loaded(update.blob)(*given), strict=True):
            own[id(variable)] = np.asarray(value)

    def update_program(self, number, optimizer, present):
        key = number, id(optimizer), present
        if key not in self.programs:
            servers = self.servers_of[id(optimizer)]
            self.programs[key] = self.updates[id(optimizer)].program(number, servers, present)
        return self.programs[key]


def cluster_of(model, num_servers):
    every = [v for part in variables_of(model, TrainerTask.TRAIN) for v in part]
    others = [model.second_optimizer] if hasattr(model, "second_optimizer") else []
    return DictCluster(every, [model.optimizer, *others], num_servers)


def trained(model, strategy, batches, num_servers):
    """Train a model on a cluster of dictionaries; return the logs of each step and the cluster."""
    cluster = cluster_of(model, num_servers)
    step = WorkerStep(model, strategy, TrainerTask.TRAIN)
    logs = [cluster.run(step.program(batch), jax.tree.leaves(batch)) for batch in batches]
    return logs, cluster, step
