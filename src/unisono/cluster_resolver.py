"""What describes a cluster: `unisono.cluster_resolver`."""

from typing import Any

from unisono._names import no_attribute
from unisono.cluster._gce import GCEClusterResolver
from unisono.cluster._jax import JaxClusterResolver
from unisono.cluster._kubernetes import ExecutableLocation as KubernetesExecutableLocation
from unisono.cluster._kubernetes import KubernetesClusterResolver
from unisono.cluster._mpi import MPIClusterResolver
from unisono.cluster._resolve import resolve
from unisono.cluster._resolvers import ClusterResolver, SimpleClusterResolver, TFConfigClusterResolver
from unisono.cluster._slurm import SlurmClusterResolver
from unisono.cluster._spec import ClusterSpec, Timeouts
from unisono.cluster._tpu import TPUClusterResolver
from unisono.cluster._union import UnionResolver

#: TensorFlow's newer name.
UnionClusterResolver = UnionResolver

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "GCEClusterResolver",
    "JaxClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "MPIClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "Timeouts",
    "UnionClusterResolver",
    "UnionResolver",
    "resolve",
]


def __getattr__(name: str) -> Any:
    raise no_attribute(__name__, name, __all__)
