"""Starting a TPU, under TensorFlow's names; JAX needs neither call, and old programs have both."""

from unisono.cluster._tpu import (
    TPUClusterResolver,
    experimental_connect_to_cluster,
    initialize_tpu_system,
)

__all__ = ["TPUClusterResolver", "experimental_connect_to_cluster", "initialize_tpu_system"]
