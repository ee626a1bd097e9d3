"""The compiled programs of one train function: one for each mode, and for each number of slots.

Tests: tests/virtual/training/test_counts.py, tests/virtual/training/test_exact.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import keras
from jax.sharding import PartitionSpec

from unisono._mesh import AXIS
from unisono._types import PyTree
from unisono.step._dispatch import CompiledStep
from unisono.step._engines import SHARDED, UNSHARDED
from unisono.training.groups._batch_placement import BatchGroup
from unisono.training.groups._batch_policy import Mode
from unisono.training.groups._multi_step import multi_step_program, of_constant_count
from unisono.training.replica._losses import check_labels
from unisono.training.trainer._fit_state import FitState
from unisono.training.trainer._merge_once import merge_once
from unisono.training.trainer._protocol import State
from unisono.training.trainer._trainer_step import TrainerStep, TrainerTask

#: How the arrays of a structure lie on the replicas; a prefix of the structure.
Specs: TypeAlias = Any

#: From the state and batches to outputs and the new state.
StepProgram: TypeAlias = CompiledStep[State, PyTree, PyTree]


class ProgramKey(NamedTuple):
    """What distinguishes the programs of one step, besides the shapes of its arguments.

    Args:
        mode: how the rows of a batch reach the replicas.
        true_rows: of a padded batch; 0 for others.
        slots: how many batches there is room for; 1 for a program without a loop.
        sizes: how many variables each part of the state has: after a layer was frozen, its weights lie in
            another part.
        keeps_state: whether the state that the program is given can be used again.
    """

    mode: Mode
    true_rows: int
    slots: int
    sizes: tuple[int, ...]
    keeps_state: bool = False
    #: True if batches are numbers of rows of arrays on the devices.
    chooses: bool = False


class StepPrograms(dict[ProgramKey, StepProgram]):
    """The programs of a step, each made when it is first asked for.

    Args:
        is_constant: whether a group always has as many batches as its program has room for.
    """

    def __init__(self, step: TrainerStep, state: FitState, is_constant: bool = False) -> None:
        super().__init__()
        self._step, self._state, self._is_constant = step, state, is_constant
        #: Whether the processes agree in each program of several steps how many the next ones have.
        self.agree = step.replicas.process_group.size > 1 and not is_constant
        #: The program of the last group, and its key.
        self._last: tuple[ProgramKey, StepProgram] | None = None
        #: By mode, true rows and sizes: the single step, which JAX traces once for all programs of it.
        self._traced: dict[tuple[Mode, int, tuple[int, ...]], Callable[..., PyTree]] = {}

    def of_group(self, group: BatchGroup) -> StepProgram:
        """Return the program of a group."""
        true_rows = group.rows if group.mode is Mode.PADDED else 0
        sizes, chooses = self._state.sizes, group.choice is not None
        key = ProgramKey(group.mode, true_rows, group.slots, sizes, group.keeps_state, chooses)
        # To compare is cheaper than to hash, which calls Python code for the mode.
        if self._last is not None and key == self._last[0]:
            return self._last[1]
        if key not in self:
            if self._step.task is TrainerTask.TRAIN:
                # Here it costs nothing beside the compilation, and the first batch has come.
                _, *labelled = keras.utils.unpack_x_y_sample_weight(group.first)
                check_labels(self._step.model, *labelled)
            self[key] = self.compile(key, group)
        self._last = key, self[key]
        return self[key]

    def remove(self, program: StepProgram) -> None:
        """Forget a program that was traced, and will not run."""
        self._last = None
        del self[next(key for key, found in self.items() if found is program)]

    def compile(self, key: ProgramKey, group: BatchGroup) -> StepProgram:
        """Return a new program; JAX compiles it at its first call."""
        replicas = self._step.replicas
        step, batch, outputs = self._single_step(key)
        same = key.mode, key.true_rows, key.sizes
        if same not in self._traced:
            self._traced[same] = jax.jit(self._state.in_step(step, key.mode is Mode.JOINED))
        whole = self._traced[same]
        # It may run again up to any of its steps.
        is_masked = self._is_constant and key.keeps_state
        if self._merges_once(key) and not is_masked:
            otherwise = multi_step_program(jax.jit(step), slots=key.slots) if key.slots > 1 else step
            whole = self._state.in_step(merge_once(self._step, key.slots, otherwise))
        elif key.slots > 1 and self._is_constant:
            from unisono.training.groups._constant_loop import constant_loop

            whole = constant_loop(whole, key.slots, is_masked)
        elif key.slots > 1:
            whole = multi_step_program(whole, slots=key.slots)
        if key.slots > 1:
            if self._is_constant and not is_masked:
                whole = of_constant_count(whole, key.slots)
            batch, outputs = (UNSHARDED, _stacked(batch)), _stacked(outputs)
        if group.choice is not None:
            rows = replicas.mesh.sharded if key.mode is Mode.JOINED else None
            whole, batch = group.choice.program(whole, batch, key.slots, rows)
        if key.slots > 1 and self.agree:
            from unisono.training.groups._agreed_size import with_agreed_size

            axis = AXIS if replicas.num_replicas_in_sync > 1 else None
            whole, batch, outputs = with_agreed_size(whole, axis), (SHARDED, batch), (outputs, UNSHARDED)
        around: Any = contextlib.nullcontext
        if self._step.task is TrainerTask.TRAIN:
            steps = key.slots if self._is_constant else 1
            around = functools.partial(replicas.state_layout.compiling, steps)
        specs, shardings = self._state.specs, self._state.shardings
        if key.mode is Mode.JOINED:
            # Outside of `jax.shard_map` arrays are whole, and XLA decides what each device computes.
            return CompiledStep(whole, replicas.mesh, shardings, donates=not key.keeps_state, around=around)
        return CompiledStep(
            whole,
            replicas.mesh,
            state_shardings=shardings,
            in_specs=(specs, batch),
            out_specs=(outputs, specs),
            process_group=replicas.process_group,
            donates=not key.keeps_state,
            result_sharding=replicas.mesh.results,
            around=around,
        )

    def _merges_once(self, key: ProgramKey) -> bool:
        """Return whether the replicas of a program may exchange what they computed at its end alone."""
        replicas = self._step.replicas
        if key.mode is not Mode.SPLIT or replicas.num_replicas_in_sync == 1:
            return False
        return self._step.gathers_predictions or self._step.task is TrainerTask.TEST

    def _single_step(
        self, key: ProgramKey
    ) -> tuple[Callable[[State, PyTree], tuple[PyTree, State]], Specs, Specs]:
        """Return the step of one batch, and how the batch and the outputs lie on the replicas."""
        step = self._step
        if key.mode in (Mode.WHOLE, Mode.JOINED):
            return step.whole, UNSHARDED, UNSHARDED
        if key.mode is Mode.PADDED:
            return functools.partial(step.padded, key.true_rows), SHARDED, UNSHARDED
        is_split = step.task is TrainerTask.PREDICT and not step.gathers_predictions
        return step.split, SHARDED, SHARDED if is_split else UNSHARDED


def _stacked(spec: Specs) -> PartitionSpec:
    """Return how several arrays lie as one, of which each lies like `spec`."""
    return PartitionSpec(None, *spec)
