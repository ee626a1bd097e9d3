"""Unisono: the programming model of `tf.distribute.Strategy` for Keras 3 and JAX.

Create a strategy, build and compile a model in its `scope()`, and call `fit`; or write your own
loop with `strategy.run` and `strategy.reduce`. Names are loaded when they are first used, so
that `import unisono` starts neither JAX nor Keras.
"""

from __future__ import annotations

import importlib
from typing import Any

from unisono import _backend, _names, _tracebacks

_backend.select_jax()
_tracebacks.install()

__version__ = "0.1.0"

#: Where each public name lives.
_HOMES = {
    "_errors": [
        "BackendError", "CancelledError", "CheckpointError", "CheckpointMismatchError",
        "CheckpointUnmatchedError", "CheckpointUnreadableError", "ContextError", "DeviceError",
        "ClusterError", "InvalidArgumentError", "InvalidTypeError",
        "MissingPackageError", "MixedStrategyError", "OutOfRangeError", "ScopeError", "TapeError",
        "UnisonoError", "UnsupportedError",
    ],
    "_values": ["DistributedValues", "IndexedSlices", "Mirrored", "PerReplica", "ReduceOp"],
    "evaluator._sidecar": ["SidecarEvaluator"],
    "_launch_function": ["launch"],
    "standalone._server": ["run_standard_server"],
    "_context": [
        "ReplicaContext", "experimental_set_strategy", "get_replica_context", "get_strategy",
        "has_strategy", "in_cross_replica_context",
    ],
    "collectives._cross_device": [
        "CommunicationImplementation", "CommunicationOptions", "CrossDeviceOps",
        "HierarchicalCopyAllReduce", "NcclAllReduce", "ReductionToOneDevice", "RingAllReduce",
    ],
    "data._distribute": ["DistributedDataset"],
    "data._iterator": ["DistributedIterator"],
    "data._sharding": ["InputContext", "InputOptions", "InputReplicationMode", "ValueContext"],
    "step.variables._variable": ["Variable"],
    "step.variables._sharded_variable": ["ShardedVariable"],
    "step.functions._function": ["function"],
    "step._tape": ["GradientTape", "value_and_grad"],
    "step.variables._merge_rules": ["VariableAggregation", "VariableSynchronization"],
    "strategies._base": ["Strategy"],
    "strategies._extended": ["StrategyExtended"],
    "strategies._options": ["RunOptions"],
    "strategies._central_storage": ["CentralStorageStrategy"],
    "strategies._mirrored": ["MirroredStrategy"],
    "strategies._multi_worker": ["CollectiveAllReduceStrategy", "MultiWorkerMirroredStrategy"],
    "strategies._parameter_server": ["ParameterServerStrategy"],
    "strategies.parameter_server._server_task": ["Server"],
    "strategies._one_device": ["OneDeviceStrategy"],
    "strategies._tpu": ["TPUStrategy"],
}  # fmt: skip

_MODULES = [
    "callbacks",
    "checkpoint",
    "cluster_resolver",
    "coordinator",
    "data",
    "estimator",
    "experimental",
    "export",
    "feature_column",
    "nn",
    "partitioners",
    "preprocessing",
    "standalone",
    "summary",
    "testing",
    "tf",
    "tpu",
]

_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted([*_MODULE_OF, *_MODULES, "__version__"])  # noqa: PLE0605 (computed, and tested)

#: Names whose use needs the default strategy, so that code outside every scope works.
_NEEDS_DEFAULT = {"get_strategy", "get_replica_context", "function", "value_and_grad", "GradientTape"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"unisono.{name}")
    module = _MODULE_OF.get(name)
    if module is None:
        raise _names.no_attribute("unisono", name, __all__)
    if name in _NEEDS_DEFAULT:
        importlib.import_module("unisono.strategies._one_device")
    if name == "function":
        # Its programs donate what variables hold: from now on an assignment gives a variable its own array.
        importlib.import_module("unisono.training._bind").install()
    value = getattr(importlib.import_module(f"unisono.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
