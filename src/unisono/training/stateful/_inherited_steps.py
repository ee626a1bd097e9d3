"""Keras' own steps where a step in TensorFlow's form calls them: `super().train_step(data)`.

Tests: tests/virtual/training/stateful/test_steps.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras

from unisono._types import PyTree
from unisono.step._keras_internals import build_for_batch
from unisono.step._program import current_frame
from unisono.training.trainer._trainer_step import UPDATED, TrainerTask, variables_of


def inherited_step(original: Callable[..., Any], model: keras.Model, task: TrainerTask, data: PyTree) -> Any:
    """Run Keras' own step with the values that the variables have, and assign those that it returns."""
    # Does nothing for what is built.
    build_for_batch(model, data)
    lists = variables_of(model, task)
    state = tuple([v.value for v in part] for part in lists)
    result, new = original(model, state, data)
    if task is TrainerTask.PREDICT:
        new = (state[0], new)
    frame = current_frame()
    for name, variables, before, after in zip(task.value, lists, state, new, strict=True):
        is_updated = name in UPDATED and frame is not None
        with frame.scope.synced() if is_updated and frame is not None else contextlib.nullcontext():
            for variable, old, value in zip(variables, before, after, strict=True):
                if value is not old:
                    variable.assign(value)
    return result
