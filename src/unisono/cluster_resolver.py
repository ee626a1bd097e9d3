"""What describes a cluster: `unisono.cluster_resolver`."""

from unisono.cluster._resolvers import ClusterResolver, TPUClusterResolver

__all__ = ["ClusterResolver", "TPUClusterResolver"]
