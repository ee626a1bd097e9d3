"""Checkpoints: everything that training needs to resume, written together, atomically, and verified."""

from __future__ import annotations

from unisono._errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointUnmatchedError,
    CheckpointUnreadableError,
)
from unisono.checkpoint._checkpoint import Checkpoint
from unisono.checkpoint._manager import CheckpointManager
from unisono.checkpoint._markers import mark_finished
from unisono.checkpoint._reader import CheckpointReader, latest_checkpoint, list_variables, load_checkpoint
from unisono.checkpoint._restoring import RestoreStatus
from unisono.checkpoint.preemption._handler import PreemptionCheckpointHandler, TerminationConfig
from unisono.checkpoint.preemption._watcher import PreemptionWatcher

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointManager",
    "CheckpointMismatchError",
    "CheckpointReader",
    "CheckpointUnmatchedError",
    "CheckpointUnreadableError",
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
    "RestoreStatus",
    "TerminationConfig",
    "latest_checkpoint",
    "list_variables",
    "load_checkpoint",
    "mark_finished",
]
