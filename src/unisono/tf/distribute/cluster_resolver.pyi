"""Names of `tf.distribute.cluster_resolver`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.cluster_resolver import (
    ClusterResolver as ClusterResolver,
    GCEClusterResolver as GCEClusterResolver,
    KubernetesClusterResolver as KubernetesClusterResolver,
    KubernetesExecutableLocation as KubernetesExecutableLocation,
    SimpleClusterResolver as SimpleClusterResolver,
    SlurmClusterResolver as SlurmClusterResolver,
    TFConfigClusterResolver as TFConfigClusterResolver,
    TPUClusterResolver as TPUClusterResolver,
    UnionClusterResolver as UnionClusterResolver,
    UnionResolver as UnionResolver,
)
