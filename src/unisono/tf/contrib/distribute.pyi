"""Names of `tf.contrib.distribute`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono import (
    CrossDeviceOps as _unisono_CrossDeviceOps,
    ReductionToOneDevice as _unisono_ReductionToOneDevice,
    ReplicaContext as _unisono_ReplicaContext,
    Strategy as _unisono_Strategy,
    get_replica_context as _unisono_get_replica_context,
    get_strategy as _unisono_get_strategy,
    has_strategy as _unisono_has_strategy,
    in_cross_replica_context as _unisono_in_cross_replica_context,
    run_standard_server as _unisono_run_standard_server,
)
from unisono.estimator import (
    DistributeConfig as DistributeConfig,
)
from unisono.tf.adapters._contrib import (
    all_reduce_ops as _unisono_tf_adapters__contrib_all_reduce_ops,
    collective_all_reduce as _unisono_tf_adapters__contrib_collective_all_reduce,
    mirrored as _unisono_tf_adapters__contrib_mirrored,
    one_device as _unisono_tf_adapters__contrib_one_device,
    parameter_server as _unisono_tf_adapters__contrib_parameter_server,
    tpu as _unisono_tf_adapters__contrib_tpu,
)

AllReduceCrossTowerOps = _unisono_tf_adapters__contrib_all_reduce_ops
CollectiveAllReduceStrategy = _unisono_tf_adapters__contrib_collective_all_reduce
CrossTowerOps = _unisono_CrossDeviceOps
DistributionStrategy = _unisono_Strategy
MirroredStrategy = _unisono_tf_adapters__contrib_mirrored
OneDeviceStrategy = _unisono_tf_adapters__contrib_one_device
ParameterServerStrategy = _unisono_tf_adapters__contrib_parameter_server
ReductionToOneDeviceCrossTowerOps = _unisono_ReductionToOneDevice
TPUStrategy = _unisono_tf_adapters__contrib_tpu
TowerContext = _unisono_ReplicaContext
get_cross_tower_context = _unisono_in_cross_replica_context
get_distribution_strategy = _unisono_get_strategy
get_tower_context = _unisono_get_replica_context
has_distribution_strategy = _unisono_has_strategy
run_standard_tensorflow_server = _unisono_run_standard_server
