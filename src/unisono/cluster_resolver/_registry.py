"""The cluster resolvers, one line each: class -> the module that has it.

A new resolver is a file of this package and a line here: then it has its public name, and, in the first
table, `resolve()` finds it.

Tests: tests/unit/cluster_resolver/test_detect.py.
"""

from __future__ import annotations

#: Those that `resolve()` asks, in this order: what a user writes, what a scheduler sets, and last the
#: variables that may be left over from an outer job.
DETECTED = {
    "TFConfigClusterResolver": "_base",
    "SlurmClusterResolver": "_slurm",
    "MPIClusterResolver": "_mpi",
    "JaxClusterResolver": "_jax",
}

#: Those that a program makes itself: nothing in the environment shows that they apply.
ON_REQUEST = {
    "GCEClusterResolver": "_gce",
    "KubernetesClusterResolver": "_kubernetes",
    "SimpleClusterResolver": "_base",
    "TPUClusterResolver": "_tpu",
    "UnionClusterResolver": "_union",
    "UnionResolver": "_union",
}
