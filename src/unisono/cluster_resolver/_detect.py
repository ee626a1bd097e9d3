"""Which of the resolvers describes this process' cluster."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping

from unisono.cluster_resolver._base import ClusterResolver, TFConfigClusterResolver, process_environ
from unisono.cluster_resolver._jax import JaxClusterResolver, is_jax_process
from unisono.cluster_resolver._mpi import MPIClusterResolver, is_mpi_rank, read_rank
from unisono.cluster_resolver._slurm import SlurmClusterResolver, is_slurm_step
from unisono.cluster_resolver._spec import read_index


def resolve(environ: MutableMapping[str, str] | None = None) -> ClusterResolver | None:
    """Return the resolver of the launcher that started this process.

    The first of these that is there: TF_CONFIG, a Slurm job step, `mpirun`, JAX's variables. A step or an
    MPI job of one task is none: an interactive shell is one, too.

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
    if environ.get("TF_CONFIG", "").strip():
        return TFConfigClusterResolver(environ=environ)
    if is_slurm_step(environ) and not _started_by_mpirun(environ):
        return SlurmClusterResolver(environ=environ)
    if is_mpi_rank(environ):
        return MPIClusterResolver(environ=environ)
    if is_jax_process(environ):
        return JaxClusterResolver(environ=environ)
    return None


def _started_by_mpirun(environ: Mapping[str, str]) -> bool:
    """`mpirun` starts its daemons with `srun`, and the ranks inherit the daemons' Slurm variables."""
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    step = tuple(read_index(environ.get(name, "")) for name in names)
    return is_mpi_rank(environ) and read_rank(environ) != step
