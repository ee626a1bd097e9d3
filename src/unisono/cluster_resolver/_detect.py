"""Which of the resolvers describes this process' cluster."""

from __future__ import annotations

import importlib
from collections.abc import MutableMapping

from unisono._system._environ import process_environ
from unisono.cluster_resolver._base import ClusterResolver

#: The classes that `resolve()` asks, each with its module, in this order: what a user writes, what
#: Ray Train says, whose processes have the variables of the Slurm step or pod in which Ray was started, what
#: a scheduler sets, the variables that may be left over from an outer job, and last the hosts of platforms,
#: on which any of these may be started.
DETECTED = {
    "TFConfigClusterResolver": "_base",
    "RayClusterResolver": "_ray",
    "SlurmClusterResolver": "_slurm",
    "MPIClusterResolver": "_mpi",
    "JaxClusterResolver": "_jax",
    "SageMakerClusterResolver": "_hosts",
    "SkyPilotClusterResolver": "_hosts",
}


def resolve(environ: MutableMapping[str, str] | None = None) -> ClusterResolver | None:
    """Return the resolver of the launcher that started this process.

    The first that applies: TF_CONFIG or Vertex AI's CLUSTER_SPEC, Ray Train, a Slurm job step, `mpirun`,
    JAX's variables, SageMaker, SkyPilot. A Slurm step, an MPI job or a list of hosts with a single task does
    not count: an interactive shell is one, too.

    Args:
        environ: read this instead of the process' environment. In a Slurm step with GPUs its
            CUDA_VISIBLE_DEVICES is set to this task's share, as by `SlurmClusterResolver()`.

    Returns:
        The resolver, None where the environment describes no cluster.

    Raises:
        InvalidArgumentError: when the launcher's variables cannot be used.
        BackendError: in an MPI job without mpi4py.

    >>> resolve({}) is None
    True
    >>> type(resolve({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'})).__name__
    'TFConfigClusterResolver'
    """
    environ = process_environ() if environ is None else environ
    for name, module in DETECTED.items():
        # Imported one by one: what comes after the first that applies is not loaded.
        kind: type[ClusterResolver] = getattr(
            importlib.import_module(f"unisono.cluster_resolver.{module}"), name
        )
        resolver = kind.detect(environ)
        if resolver is not None:
            return resolver
    return None
