"""Names of `tf.train`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono import (
    Server as Server,
)
from unisono.checkpoint import (
    Checkpoint as Checkpoint,
    list_variables as list_variables,
    load_checkpoint as load_checkpoint,
)
from unisono.cluster_resolver import (
    ClusterSpec as ClusterSpec,
)
from unisono.estimator.train import (
    AdadeltaOptimizer as AdadeltaOptimizer,
    AdagradOptimizer as AdagradOptimizer,
    AdamOptimizer as AdamOptimizer,
    CheckpointSaverHook as CheckpointSaverHook,
    CheckpointSaverListener as CheckpointSaverListener,
    ExponentialMovingAverage as ExponentialMovingAverage,
    FeedFnHook as FeedFnHook,
    FinalOpsHook as FinalOpsHook,
    FtrlOptimizer as FtrlOptimizer,
    GlobalStepWaiterHook as GlobalStepWaiterHook,
    GradientDescentOptimizer as GradientDescentOptimizer,
    LoggingTensorHook as LoggingTensorHook,
    MomentumOptimizer as MomentumOptimizer,
    NanLossDuringTrainingError as NanLossDuringTrainingError,
    NanTensorHook as NanTensorHook,
    Optimizer as Optimizer,
    ProfilerHook as ProfilerHook,
    ProximalAdagradOptimizer as ProximalAdagradOptimizer,
    ProximalGradientDescentOptimizer as ProximalGradientDescentOptimizer,
    RMSPropOptimizer as RMSPropOptimizer,
    Saver as Saver,
    Scaffold as Scaffold,
    SecondOrStepTimer as SecondOrStepTimer,
    SessionRunArgs as SessionRunArgs,
    SessionRunContext as SessionRunContext,
    SessionRunHook as SessionRunHook,
    SessionRunValues as SessionRunValues,
    StepCounterHook as StepCounterHook,
    StopAtStepHook as StopAtStepHook,
    SummarySaverHook as SummarySaverHook,
    SyncReplicasOptimizer as SyncReplicasOptimizer,
    cosine_decay as cosine_decay,
    cosine_decay_restarts as cosine_decay_restarts,
    create_global_step as create_global_step,
    exponential_decay as exponential_decay,
    get_global_step as get_global_step,
    get_or_create_global_step as get_or_create_global_step,
    global_step as global_step,
    init_from_checkpoint as init_from_checkpoint,
    inverse_time_decay as inverse_time_decay,
    linear_cosine_decay as linear_cosine_decay,
    natural_exp_decay as natural_exp_decay,
    piecewise_constant as piecewise_constant,
    piecewise_constant_decay as piecewise_constant_decay,
    polynomial_decay as polynomial_decay,
)
from unisono.tf.adapters._records import (
    BytesList as BytesList,
    Example as Example,
    Feature as Feature,
    FeatureList as FeatureList,
    FeatureLists as FeatureLists,
    Features as Features,
    FloatList as FloatList,
    Int64List as Int64List,
    SequenceExample as SequenceExample,
)
from unisono.tf.adapters._saving import (
    CheckpointManagerV2 as _unisono_tf_adapters__saving_CheckpointManagerV2,
    latest_checkpoint as latest_checkpoint,
)
from unisono.tf.train import (
    experimental as experimental,
)

CheckpointManager = _unisono_tf_adapters__saving_CheckpointManagerV2
