"""What describes a cluster: `unisono.cluster_resolver`."""

from unisono.cluster._resolvers import ClusterResolver, SimpleClusterResolver, TFConfigClusterResolver
from unisono.cluster._spec import ClusterSpec
from unisono.cluster._tpu import TPUClusterResolver

__all__ = [
    "ClusterResolver",
    "ClusterSpec",
    "SimpleClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
]
