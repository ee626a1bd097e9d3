"""The public names of `unisono.checkpoint`; they are loaded when they are first used."""

from unisono._errors import (
    CheckpointError as CheckpointError,
    CheckpointMismatchError as CheckpointMismatchError,
    CheckpointUnmatchedError as CheckpointUnmatchedError,
    CheckpointUnreadableError as CheckpointUnreadableError,
)
from unisono.checkpoint._checkpoint import Checkpoint as Checkpoint
from unisono.checkpoint._manager import CheckpointManager as CheckpointManager
from unisono.checkpoint._markers import mark_finished as mark_finished
from unisono.checkpoint._reader import (
    CheckpointReader as CheckpointReader,
    latest_checkpoint as latest_checkpoint,
    list_variables as list_variables,
    load_checkpoint as load_checkpoint,
)
from unisono.checkpoint._restoring import RestoreStatus as RestoreStatus
from unisono.checkpoint.preemption._handler import (
    PreemptionCheckpointHandler as PreemptionCheckpointHandler,
    TerminationConfig as TerminationConfig,
)
from unisono.checkpoint.preemption._watcher import PreemptionWatcher as PreemptionWatcher
