"""Readings of steps that are not traced: each replica computes its own rows.

Tests: tests/virtual/training/test_step_reading.py.
"""

from __future__ import annotations

import dataclasses

import keras

from unisono._types import PyTree
from unisono.step._keras_internals import all_layers
from unisono.step.variables._merge_rules import Merge, kind_of, merge_rule
from unisono.training.replica._rows import is_per_replica, is_synchronized
from unisono.training.replica._step_reading import StepReading, read_step


def unread_step(model: keras.Model, training: bool, why: str) -> StepReading:
    """Return what is known of a step that is not read, in which each replica computes its own rows.

    Args:
        training: whether the model's layers train.
        why: a batch cannot be filled up.
    """
    layers = [x for x in all_layers(model) if training and is_per_replica(x) and x.trainable]
    return StepReading(apart=tuple(x.name for x in layers if not is_synchronized(x)), unfillable=why)


def read_per_replica(
    model: keras.Model, training: bool, batch: PyTree, replicas: int, why: str
) -> StepReading:
    """Return what is known of a step in TensorFlow's form, in which each replica computes its own rows.

    What it computes is not read: only whether the model's forward pass relates rows, and what it writes.

    Args:
        training: whether the model's layers train.
        batch: as that of `read_step`.
        replicas: at least 2.
        why: a batch cannot be filled up.
    """
    known = unread_step(model, training, why)
    forward = read_step(model, training, batch, replicas)
    if not forward.findings:
        # Such a model may have no `call`, or another one than its step uses.
        return known
    others = [f"each replica computes its own rows, although {forward.mixes}"] if forward.mixes else []
    rules = {
        v.path: (forward.rules.get(id(v)), merge_rule(kind_of(v))) for v in model.non_trainable_variables
    }
    paths = [path for path, (read, declared) in rules.items() if read not in (None, Merge.KEEP, declared)]
    if paths:
        others.append(f"copies of {paths[0]!r} become one as they are declared, not as the layer writes them")
    return dataclasses.replace(known, draws=forward.draws, others=tuple(others))
