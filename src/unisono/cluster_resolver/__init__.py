"""What describes a cluster: `unisono.cluster_resolver`. Names are loaded when they are first used."""

from __future__ import annotations

import importlib
from typing import Any

from unisono._names import no_attribute

#: Where each public name lives.
_HOMES = {
    "_base": ["ClusterResolver", "SimpleClusterResolver", "TFConfigClusterResolver"],
    "_detect": ["resolve"],
    "_gce": ["GCEClusterResolver"],
    "_jax": ["JaxClusterResolver"],
    "_kubernetes": ["KubernetesClusterResolver", "KubernetesExecutableLocation"],
    "_mpi": ["MPIClusterResolver"],
    "_slurm": ["SlurmClusterResolver"],
    "_spec": ["ClusterSpec", "Timeouts"],
    "_tpu": ["TPUClusterResolver"],
    "_union": ["UnionClusterResolver", "UnionResolver"],
}

_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605 (computed, and tested)


def __getattr__(name: str) -> Any:
    module = _MODULE_OF.get(name)
    if module is None:
        raise no_attribute(__name__, name, __all__)
    value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
