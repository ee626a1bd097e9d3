"""The public names of `unisono.estimator.hooks`; they are loaded when they are first used."""

from unisono.estimator.hooks._checkpoints import (
    CheckpointSaverHook as CheckpointSaverHook,
    CheckpointSaverListener as CheckpointSaverListener,
    InMemoryEvaluatorHook as InMemoryEvaluatorHook,
)
from unisono.estimator.hooks._early_stopping import (
    make_early_stopping_hook as make_early_stopping_hook,
    read_eval_metrics as read_eval_metrics,
    stop_if_higher_hook as stop_if_higher_hook,
    stop_if_lower_hook as stop_if_lower_hook,
    stop_if_no_decrease_hook as stop_if_no_decrease_hook,
    stop_if_no_increase_hook as stop_if_no_increase_hook,
)
from unisono.estimator.hooks._hook import (
    HookSession as HookSession,
    SessionRunArgs as SessionRunArgs,
    SessionRunContext as SessionRunContext,
    SessionRunHook as SessionRunHook,
    SessionRunValues as SessionRunValues,
)
from unisono.estimator.hooks._logging import (
    LoggingTensorHook as LoggingTensorHook,
    NanLossDuringTrainingError as NanLossDuringTrainingError,
    NanTensorHook as NanTensorHook,
    StepCounterHook as StepCounterHook,
)
from unisono.estimator.hooks._runner import HookRunner as HookRunner
from unisono.estimator.hooks._stopping import (
    FeedFnHook as FeedFnHook,
    FinalOpsHook as FinalOpsHook,
    GlobalStepWaiterHook as GlobalStepWaiterHook,
    StopAtStepHook as StopAtStepHook,
)
from unisono.estimator.hooks._summaries import (
    ProfilerHook as ProfilerHook,
    SummarySaverHook as SummarySaverHook,
)
from unisono.estimator.hooks._timer import (
    NeverTriggerTimer as NeverTriggerTimer,
    SecondOrStepTimer as SecondOrStepTimer,
)
