"""Public names: how modules load theirs, and what is said of names that they do not have.

A module or package lists its public names once, in the imports of the stub beside it (`__init__.pyi`): type
checkers and editors read them there, and `lazy_names` loads them. Names of tf.distribute that Unisono has
under another name, or not yet, are in `HINTS` with what to write instead: every name of tf.distribute either
works or has an entry there.

Tests: tests/unit/test_tf_names.py.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import pkgutil
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from unisono._tracebacks import mark_explained

_KERAS = "is Keras' own. In Unisono write `import keras`"
_RPC = "is TensorFlow's generic gRPC server, which is not part of Unisono. Use the package `grpcio`"


def _write(what: str) -> str:
    return f"has another name. In Unisono write `{what}`"


def _moved(module: str, names: str) -> dict[str, str]:
    """Return the hints for names that a module here has, with spaces between them."""
    return {name: _write(f"unisono.{module}.{name}") for name in names.split()}


#: From a name below `unisono` to the rest of a sentence that begins with that name.
HINTS: dict[str, str] = {
    # parameter servers
    "ParameterServerStrategyV2": _write("unisono.ParameterServerStrategy"),
    "experimental_get_current_worker_index": _write("unisono.coordinator.get_current_worker_index"),
    "run_standard_tensorflow_server": _write("unisono.run_standard_server"),
    # the Estimator, and what tf.contrib.distribute had for it
    "CoordinatorMode": _write("unisono.estimator.DistributeConfig(remote_cluster=...)"),
    **_moved(
        "estimator",
        "DistributeConfig Estimator EstimatorSpec EvalSpec ModeKeys RunConfig TrainSpec train_and_evaluate",
    ),
    **dict.fromkeys(["compat", "contrib"], _write("from unisono import tf")),
    "experimental.rpc": _RPC,
    # old names
    "AllReduceCrossTowerOps": _write("unisono.NcclAllReduce"),
    "CrossTowerOps": _write("unisono.CrossDeviceOps"),
    "DistributedVariable": _write("unisono.Variable"),
    "DistributionStrategy": _write("unisono.Strategy"),
    "MirroredVariable": _write("unisono.Variable"),
    "Monitor": _write("unisono.function"),
    "ReductionToOneDeviceCrossTowerOps": _write("unisono.ReductionToOneDevice"),
    "StandardInputStep": _write("strategy.run"),
    "StandardSingleLossStep": _write("strategy.run"),
    "Step": _write("strategy.run"),
    "StrategyExtendedV1": _write("unisono.StrategyExtended"),
    "StrategyV1": _write("unisono.Strategy"),
    "SyncOnReadVariable": _write("unisono.Variable(..., synchronization='on_read')"),
    "TowerContext": _write("unisono.ReplicaContext"),
    "UpdateContext": _write("strategy.extended.update"),
    "get_cross_tower_context": _write("unisono.in_cross_replica_context"),
    "get_distribution_strategy": _write("unisono.get_strategy"),
    "get_loss_reduction": _write("unisono.nn.compute_average_loss"),
    "get_tower_context": _write("unisono.get_replica_context"),
    "has_distribution_strategy": _write("unisono.has_strategy"),
    "require_tower_context": _write("unisono.get_replica_context"),
    # names that are in another module here
    **_moved("coordinator", "ClusterCoordinator PerWorkerValue PerWorkerValues RemoteValue"),
    **_moved("data", "AutoShardPolicy Dataset"),
    **_moved(
        "checkpoint",
        "Checkpoint CheckpointManager PreemptionCheckpointHandler PreemptionWatcher TerminationConfig",
    ),
    **_moved("partitioners", "FixedShardsPartitioner MaxSizePartitioner MinSizePartitioner Partitioner"),
    **_moved("nn", "compute_average_loss scale_regularization_loss"),
    "BackupAndRestore": _write("unisono.callbacks.BackupAndRestore"),
    "ClusterSpec": _write("unisono.cluster_resolver.ClusterSpec"),
    "CollectiveCommunication": _write("unisono.CommunicationImplementation"),
    "CollectiveHints": _write("unisono.CommunicationOptions"),
    "distribute": _write("unisono.MirroredStrategy"),
    "experimental_connect_to_cluster": _write("unisono.tpu.experimental_connect_to_cluster"),
    "experimental_run_v2": _write("strategy.run"),
    "initialize_tpu_system": _write("unisono.tpu.experimental.initialize_tpu_system"),
    "train": _write("unisono.checkpoint"),
    "tpu.experimental.embedding": "has no counterpart. In Unisono write `keras.layers.Embedding`",
    # Keras
    **dict.fromkeys(["keras", "layers", "losses", "metrics", "optimizers"], _KERAS),
}  # fmt: skip


def no_attribute(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """Return the error for a name that a module does not have.

    >>> print(no_attribute("unisono", "MirorredStrategy", ["MirroredStrategy"]))
    module 'unisono' has no attribute 'MirorredStrategy'. Did you mean `unisono.MirroredStrategy`?
    """
    path = f"{module}.{name}".removeprefix("unisono.")
    hint = HINTS.get(path) or (None if name.startswith("_") else HINTS.get(name))
    text = f"module {module!r} has no attribute {name!r}"
    alike = difflib.get_close_matches(name, known, n=1)
    if hint is not None:
        text += f": it {hint}."
    elif alike:
        text += f". Did you mean `{module}.{alike[0]}`?"
    return missing_name(text, name)


def missing_name(text: str, name: str) -> AttributeError:
    """Return the error for a name that an object does not have, whose text says what to write instead."""
    # Without an object, in whose names Python would look for a second suggestion.
    return mark_explained(AttributeError(text, name=name, obj=None))


def feature_module(module: str, used: str) -> ModuleType:
    """Import a module of Unisono, whose folder may have been taken away.

    Args:
        module: such as `unisono.sharding._sharded_layout`.
        used: what needs it, for the message.

    Raises:
        MissingPackageError: the folder of this module, or of one that it needs, is not there.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("unisono."):
            raise
        from unisono._errors import MissingPackageError

        raise MissingPackageError(
            f"`{used}` needs `{error.name}`. Received: an installation without it. Write: pip install "
            "--force-reinstall unisono",
            name=error.name,
        ) from error


def lazy_names(
    module: str, more: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a module or package that loads its names on first use.

    Source: https://scientific-python.org/specs/spec-0001/

    Args:
        module: its name; the stub beside it, such as `__init__.pyi`, imports the public names as
            `from home import name as public_name`.
        more: public names that the module defines itself.
    """
    homes = _read_stub(module)
    every = sorted({*homes, *more})

    def getattr_(name: str) -> Any:
        if name not in homes:
            raise no_attribute(module, name, every)
        home, own = homes[name]
        if home == module:
            return feature_module(f"{module}.{own}", f"{module}.{own}")
        value = getattr(feature_module(home, f"{module}.{name}"), own)
        setattr(sys.modules[module], name, value)
        return value

    return getattr_, lambda: list(every), every


def _read_stub(module: str) -> dict[str, tuple[str, str]]:
    """From each public name to the module that has it, and its name there."""
    package, _, own = module.rpartition(".")
    is_package = hasattr(sys.modules[module], "__path__")
    text = pkgutil.get_data(module, "__init__.pyi") if is_package else pkgutil.get_data(package, f"{own}.pyi")
    if text is None:
        raise ImportError(f"The module {module!r} must have a stub beside it. Install Unisono again.")
    homes: dict[str, tuple[str, str]] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom):
            homes.update({a.asname or a.name: (node.module or module, a.name) for a in node.names})
        elif isinstance(node, ast.Assign):  # another name for one that is imported above
            homes[ast.unparse(node.targets[0])] = homes[ast.unparse(node.value)]
    return homes
