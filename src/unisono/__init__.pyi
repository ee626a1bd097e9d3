"""The public names of `unisono`; they are loaded when they are first used."""

from unisono import (
    callbacks as callbacks,
    checkpoint as checkpoint,
    cluster_resolver as cluster_resolver,
    coordinator as coordinator,
    data as data,
    estimator as estimator,
    experimental as experimental,
    export as export,
    feature_column as feature_column,
    nn as nn,
    partitioners as partitioners,
    preprocessing as preprocessing,
    ray as ray,
    spi as spi,
    standalone as standalone,
    summary as summary,
    testing as testing,
    tf as tf,
    tpu as tpu,
)
from unisono._context import (
    ReplicaContext as ReplicaContext,
    experimental_set_strategy as experimental_set_strategy,
    get_replica_context as get_replica_context,
    get_strategy as get_strategy,
    has_strategy as has_strategy,
    in_cross_replica_context as in_cross_replica_context,
)
from unisono._errors import (
    BackendError as BackendError,
    CancelledError as CancelledError,
    CheckpointError as CheckpointError,
    CheckpointMismatchError as CheckpointMismatchError,
    CheckpointUnmatchedError as CheckpointUnmatchedError,
    CheckpointUnreadableError as CheckpointUnreadableError,
    ClusterError as ClusterError,
    ContextError as ContextError,
    DeviceError as DeviceError,
    InvalidArgumentError as InvalidArgumentError,
    InvalidTypeError as InvalidTypeError,
    MissingPackageError as MissingPackageError,
    MixedStrategyError as MixedStrategyError,
    NeedsValueError as NeedsValueError,
    OutOfRangeError as OutOfRangeError,
    ScopeError as ScopeError,
    TapeError as TapeError,
    UnisonoError as UnisonoError,
    UnsupportedError as UnsupportedError,
)
from unisono.cli._launch_function import launch as launch
from unisono._values import (
    DistributedValues as DistributedValues,
    IndexedSlices as IndexedSlices,
    Mirrored as Mirrored,
    PerReplica as PerReplica,
    ReduceOp as ReduceOp,
)
from unisono.compression._compressed_all_reduce import CompressedAllReduce as CompressedAllReduce
from unisono.collectives._cross_device import (
    CommunicationImplementation as CommunicationImplementation,
    CommunicationOptions as CommunicationOptions,
    CrossDeviceOps as CrossDeviceOps,
    HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
    NcclAllReduce as NcclAllReduce,
    ReductionToOneDevice as ReductionToOneDevice,
    RingAllReduce as RingAllReduce,
)
from unisono.local_updates._local_updates import LocalUpdates as LocalUpdates
from unisono.data._distribute import DistributedDataset as DistributedDataset
from unisono.data._iterator import DistributedIterator as DistributedIterator
from unisono.data._sharding import (
    InputContext as InputContext,
    InputOptions as InputOptions,
    InputReplicationMode as InputReplicationMode,
    ValueContext as ValueContext,
)
from unisono.evaluator._sidecar import SidecarEvaluator as SidecarEvaluator
from unisono.standalone._server import run_standard_server as run_standard_server
from unisono.step._tape import GradientTape as GradientTape, value_and_grad as value_and_grad
from unisono.step.functions._function import function as function
from unisono.step.variables._merge_rules import (
    VariableAggregation as VariableAggregation,
    VariableSynchronization as VariableSynchronization,
)
from unisono.parameter_server.tables._sharded_variable import ShardedVariable as ShardedVariable
from unisono.step.variables._variable import Variable as Variable
from unisono.strategies._base import Strategy as Strategy
from unisono.strategies._central_storage import CentralStorageStrategy as CentralStorageStrategy
from unisono.strategies._extended import StrategyExtended as StrategyExtended
from unisono.strategies._mirrored import MirroredStrategy as MirroredStrategy
from unisono.cluster.strategy._multi_worker import (
    CollectiveAllReduceStrategy as CollectiveAllReduceStrategy,
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from unisono.strategies._one_device import OneDeviceStrategy as OneDeviceStrategy
from unisono.strategies._options import RunOptions as RunOptions
from unisono.parameter_server.strategy._parameter_server import (
    ParameterServerStrategy as ParameterServerStrategy,
)
from unisono.strategies._tpu import TPUStrategy as TPUStrategy
from unisono.parameter_server.strategy._server_task import Server as Server
from unisono.training.replica._per_replica_layers import per_replica as per_replica

__version__: str
