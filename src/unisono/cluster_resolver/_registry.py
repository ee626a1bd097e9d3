"""The cluster resolvers that `resolve()` asks, one line each: class -> the module that has it.

A new resolver is a file of this package, a line in `__init__.pyi`, which gives it its public name, and one
here where the environment shows that it applies.

Tests: tests/unit/cluster_resolver/test_detect.py.
"""

#: Those that `resolve()` asks, in this order: what a user writes, what Ray Train says, whose processes have
#: the variables of the Slurm step or pod in which Ray was started, what a scheduler sets, the variables that
#: may be left over from an outer job, and last the hosts of platforms, on which any of these may be started.
DETECTED = {
    "TFConfigClusterResolver": "_base",
    "RayClusterResolver": "_ray",
    "SlurmClusterResolver": "_slurm",
    "MPIClusterResolver": "_mpi",
    "JaxClusterResolver": "_jax",
    "SageMakerClusterResolver": "_hosts",
    "SkyPilotClusterResolver": "_hosts",
}
