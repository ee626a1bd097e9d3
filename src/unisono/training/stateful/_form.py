"""Calls of `fit` and the like of models whose steps are in TensorFlow's form: which step, and of what data.

Tests: tests/virtual/training/stateful/test_steps.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import keras

from unisono._types import PyTree
from unisono.training._step_form import is_stateful
from unisono.training.trainer._trainer_step import TASKS, TrainerTask

#: Models whose data have elements that are no tuples, with the names of the methods that take them.
_BARE: weakref.WeakKeyDictionary[keras.Model, set[TrainerTask]] = weakref.WeakKeyDictionary()

#: What the last call of a method of a model runs; of models with a step in TensorFlow's form alone.
_RUNNING: weakref.WeakKeyDictionary[keras.Model, TrainerTask] = weakref.WeakKeyDictionary()


def note_call(model: keras.Model, name: str, data: object) -> None:
    """Note which step a call runs, and whether its data have elements that Keras makes tuples of."""
    task = _RUNNING[model] = TASKS[name]
    dataset = getattr(getattr(data, "position", None), "dataset", None)
    # A call with one batch has no elements: what it is given is `x`.
    is_bare = name.endswith("_on_batch")
    if dataset is not None:
        is_bare = not isinstance(dataset.element_spec, (tuple, list))
    (set.add if is_bare else set.discard)(_BARE.setdefault(model, set()), task)


def preparation_of(model: keras.Model) -> Callable[[PyTree], None] | None:
    """Return what creates the variables of the step that the last call runs; None where Keras does."""
    task = _RUNNING.get(model)
    if task is None or not is_stateful(model, task):
        return None
    getattr(model, f"make_{task.function}")()
    return getattr(getattr(model, task.function), "prepare", None)


def as_tensorflow(model: keras.Model, task: TrainerTask, batch: PyTree) -> PyTree:
    """Return a batch as TensorFlow gives it to a step: without what there is not."""
    if not isinstance(batch, tuple):
        return batch
    while len(batch) > 1 and batch[-1] is None:
        batch = batch[:-1]
    is_bare = len(batch) == 1 and task in _BARE.get(model, ())
    return batch[0] if is_bare and not isinstance(batch[0], (tuple, list)) else batch
