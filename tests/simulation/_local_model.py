"""A model that `LocalUpdates` trains in the simulated world: its variables, and steps that are NumPy.

The layout, the state between steps and the train function are the project's but for what a real model and
its mesh decide.

Tests: tests/unit/test_simulated_local.py.
"""

import contextlib
import types
import weakref

import numpy as np
import pytest

from tests.simulation._local_twin import FIRST, MEAN, SUM, WEIGHTS, Outer, taken_step
from tests.simulation._stub_programs import Program, placed, programs
from unisono.local_updates import _local_training
from unisono.local_updates._local_layout import Fragment, LocalLayout, PairLayout, _OuterState
from unisono.local_updates._local_training import LocalPhases, LocalState, LocalTrainFunction
from unisono.sharding._shards import WholeLayout
from unisono.step._layout import VariableLayout
from unisono.step.variables._merge_rules import Merge
from unisono.training.trainer._trainer_function import TrainerFunction
from unisono.training.trainer._trainer_step import TrainerTask

_RULES = {MEAN: Merge.MEAN, SUM: Merge.SUM, FIRST: Merge.FIRST}


class _Variable:
    def __init__(self, name, value):
        self.path = self.name = name
        self._value = placed(value)
        self.dtype = self._value.dtype


class LocalModel:
    """What `LocalUpdates` has of a model: variables, and where Keras keeps a loop's state."""

    def __init__(self, settings):
        self.trainable_variables = [_Variable(n, np.zeros(2, np.float32)) for n in WEIGHTS]
        self.non_trainable_variables = [
            _Variable(MEAN, np.zeros(1, np.float32)),
            _Variable(FIRST, np.zeros(1, np.int32)),
        ]
        self.metrics_variables = [_Variable(SUM, np.zeros(1, np.float32))]
        count = len(settings.fragments)
        steps = np.zeros(() if count == 1 else (count,), np.int32)
        own = [_Variable("slot", np.zeros((1, 1), np.float32)), _Variable("steps", steps)]
        outer = [
            _Variable(f"outer_{i}_{k}", np.zeros(2, np.float32))
            for i, names in enumerate(settings.fragments)
            for k in range(len(names) * settings.has_outer)
        ]
        self.optimizer = _Optimizer([*own, *outer], self.trainable_variables)
        self._jax_state, self._jax_state_synced, self.train_function = None, True, None

    @property
    def parts(self):
        return (
            self.trainable_variables,
            self.non_trainable_variables,
            self.optimizer.variables,
            self.metrics_variables,
        )

    def jax_state_sync(self):
        """Let the variables have a loop's state, as Keras does."""
        if self._jax_state is None or self._jax_state_synced:
            return
        for variables, name in zip(self.parts, TrainerTask.TRAIN.value, strict=True):
            for variable, value in zip(variables, self._jax_state[name], strict=True):
                variable._value = value
        self._jax_state_synced = True

    def state(self):
        """Return what the variables hold, which are empty while a loop runs."""
        self.jax_state_sync()
        self._jax_state_synced = False
        return tuple([v._value for v in part] for part in self.parts)


class _Optimizer:
    def __init__(self, variables, weights):
        self.variables, self._trainable_variables = variables, weights


class _SlotLayout(VariableLayout):
    """How a variable of the inner optimizer lies: a row on each replica."""

    def enter(self, array, in_replica):
        return array[0]

    def leave(self, value, in_replica):
        return value[None]


def outer_state(settings):
    """Return what `LocalLayout.extend` notes of the model's optimizer."""
    fragments, place = [], 2
    for names in settings.fragments:
        count = len(names) * settings.has_outer
        weights = [WEIGHTS.index(n) for n in names]
        outer = Outer() if settings.has_outer else None
        fragments.append(Fragment(weights, outer, list(range(place, place + count))))
        place += count
    return _OuterState(1, fragments)


class LayoutOfModel(LocalLayout):
    """The layout, of a model that was built before."""

    def __init__(self, replicas, settings):
        self._mesh, self._group = replicas.mesh, replicas.process_group
        self._whole, self._version = WholeLayout(self._mesh), 0
        self.sync, self.phases = settings.sync, LocalPhases()
        self.exchange_mesh = replicas.exchange_mesh
        self._added = weakref.WeakKeyDictionary()

    def prepare(self, optimizer, variables=()):
        return True


class LoneOfModel:
    """What a lone replica has of `LoneLayout`."""

    def __init__(self, settings):
        self._state = outer_state(settings)
        self.phases = LocalPhases()

    def added(self, optimizer):
        return self._state


class _State(LocalState):
    """The state between steps, of variables whose layouts are known."""

    _changed = (0, 1)

    def _layouts_of_state(self):
        mesh, layout = self._replicas.mesh, self._layout
        others = {name: PairLayout(mesh, rule) for name, rule in _RULES.items()}
        optimizer = [layout.of(v) for v in self._model.optimizer.variables]
        optimizer[0] = _SlotLayout(mesh)
        return (
            [PairLayout(mesh, Merge.KEEP) for _ in WEIGHTS],
            [others[MEAN], others[FIRST]],
            optimizer,
            [others[SUM]],
        )

    @property
    def engine(self):
        return self._replicas.engine


class FunctionOfModel(LocalTrainFunction):
    state_type = _State


def _init(self, model, replicas, task):
    self._replicas, self._task = replicas, task
    self.carried = self.state_type(model, replicas, task)
    self.loop = types.SimpleNamespace(limit=None, is_eager=False, group_size=types.SimpleNamespace(wish=4))
    self._programs = types.SimpleNamespace(agree=True)
    self._state, self._is_placed, self._is_result, self.num_steps = (), False, False, 0


def _prepare(self, group):
    if not self._is_placed:
        self._state = self.carried.place(self._state, None)
        self._is_placed = True


def _start(self, group):
    """Take the steps of a group, as `TrainerFunction.start`: each is a program."""
    self.prepare(group)
    world, rank = group.world, self._replicas.process_group.index

    def step(state, number):
        values, slot = of_state(state)
        new, slot = taken_step(values, slot[0], rank, number)
        return (), to_state(state, new, slot[None])

    program = Program(self.carried.in_step(step), self._replicas.mesh)
    for _ in range(group.count):
        world.sleep(group.seconds())
        _, self._state = program(self._state, group.first + self.num_steps, self.carried.done)
        self.num_steps += 1
    return (), None


def of_state(state):
    """Return the values by name, and the slot."""
    values = dict(zip(WEIGHTS, state[0], strict=True))
    values |= {MEAN: state[1][0], FIRST: state[1][1], SUM: state[3][0]}
    return values, state[2][0]


def to_state(state, new, slot):
    return (
        [new[n] for n in WEIGHTS],
        [new[MEAN], new[FIRST]],
        [slot, *state[2][1:]],
        [new[SUM]],
    )


@contextlib.contextmanager
def local_doors():
    """Put what trains besides `LocalUpdates` into the world."""
    with programs(), pytest.MonkeyPatch.context() as patches:
        for name, stand_in in (("__init__", _init), ("prepare", _prepare), ("start", _start)):
            patches.setattr(TrainerFunction, name, stand_in)
        patches.setattr(_local_training, "_why_not", lambda model: None)
        patches.setattr(_local_training, "strategy_of", lambda model: model.strategy)
        yield
