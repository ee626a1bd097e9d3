"""The public names of `unisono.cluster_resolver`; they are loaded when they are first used."""

from unisono.cluster_resolver._base import (
    ClusterResolver as ClusterResolver,
    SimpleClusterResolver as SimpleClusterResolver,
    TFConfigClusterResolver as TFConfigClusterResolver,
)
from unisono.cluster_resolver._detect import resolve as resolve
from unisono.cluster_resolver._gce import GCEClusterResolver as GCEClusterResolver
from unisono.cluster_resolver._hosts import (
    SageMakerClusterResolver as SageMakerClusterResolver,
    SkyPilotClusterResolver as SkyPilotClusterResolver,
)
from unisono.cluster_resolver._jax import JaxClusterResolver as JaxClusterResolver
from unisono.cluster_resolver._kubernetes import (
    KubernetesClusterResolver as KubernetesClusterResolver,
    KubernetesExecutableLocation as KubernetesExecutableLocation,
)
from unisono.cluster_resolver._mpi import MPIClusterResolver as MPIClusterResolver
from unisono.cluster_resolver._ray import RayClusterResolver as RayClusterResolver
from unisono.cluster_resolver._slurm import SlurmClusterResolver as SlurmClusterResolver
from unisono.cluster_resolver._spec import ClusterSpec as ClusterSpec, Timeouts as Timeouts
from unisono.cluster_resolver._tpu import TPUClusterResolver as TPUClusterResolver
from unisono.cluster_resolver._union import (
    UnionClusterResolver as UnionClusterResolver,
    UnionResolver as UnionResolver,
)
