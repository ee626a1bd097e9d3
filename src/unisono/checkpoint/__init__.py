"""Checkpoints: everything that training needs to go on, together, atomically and checked."""

from __future__ import annotations

from unisono._errors import CheckpointError, CheckpointMismatchError
from unisono.checkpoint._checkpoint import Checkpoint, CheckpointManager
from unisono.checkpoint._finished import mark_finished
from unisono.checkpoint._preemption import PreemptionCheckpointHandler, TerminationConfig

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointMismatchError",
    "PreemptionCheckpointHandler",
    "TerminationConfig",
    "mark_finished",
]
