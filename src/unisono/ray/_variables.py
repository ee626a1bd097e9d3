"""The variables of the shell that travel to tasks on Ray; pure.

On one machine, and under Slurm, a task has the variables of the shell that has launched it. Ray's nodes may
be other machines with other users, so that what describes this machine, its programs and its sessions stays
here, and so does what Ray or another cluster has set. The others travel to the actors as their arguments: Ray
shows a `runtime_env` in its dashboard and its logs.

Tests: tests/unit/ray/test_ray_engine.py, tests/cluster/test_ray_cluster.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from unisono.launcher._plan import CLUSTER_VARIABLES, OF_A_LAUNCH

#: Of this machine: its user and folders, where its programs and libraries are, its devices, its terminal.
_OF_THIS_MACHINE = (
    *("_", "HOME", "HOST", "HOSTNAME", "HOSTTYPE", "LOGNAME", "MACHTYPE", "MAIL", "OLDPWD", "OSTYPE", "PWD"),
    *("SHELL", "SHLVL", "TEMP", "TMP", "TMPDIR", "USER", "USERNAME", "KUBECONFIG", "KRB5CCNAME"),
    *("CPATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "LIBRARY_PATH", "MANPATH", "PATH", "PKG_CONFIG_PATH"),
    *(
        "PYTHONEXECUTABLE",
        "PYTHONHOME",
        "PYTHONPATH",
        "PYTHONPYCACHEPREFIX",
        "PYTHONSTARTUP",
        "PYTHONUSERBASE",
    ),
    *("CUDA_HOME", "CUDA_PATH", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"),
    *("ROCR_VISIBLE_DEVICES", "COLORTERM", "COLUMNS", "DISPLAY", "LINES", "LS_COLORS", "STY", "TERM", "TMUX"),
)
#: The same, by the beginnings of their names; and of the clusters and jobs in which this program runs.
_BEGINNINGS = (
    *("BASH_", "CONDA_", "DBUS_", "DOCKER_", "DYLD_", "GPG_", "SSH_", "SUDO_", "TERM_", "TMUX_", "TPU_"),
    *("VIRTUAL_ENV", "VSCODE_", "WAYLAND_", "XDG_"),
    *("HYDRA_", "KUBERNETES_", "LSB_", "OMPI_", "PBS_", "PMI", "PRTE_", "RAY_", "SBATCH_", "SLURM"),
)


def travelling(environ: Mapping[str, str], given: Collection[str] = ()) -> dict[str, str]:
    """Return the variables that tasks on Ray get from the shell.

    Args:
        environ: of the shell.
        given: the names that `runtime_env` sets, which take precedence.

    >>> travelling({"HF_TOKEN": "a", "PATH": "/bin", "RAY_ADDRESS": "b", "NAME": "c"}, given=["NAME"])
    {'HF_TOKEN': 'a'}
    """
    staying = {*_OF_THIS_MACHINE, *CLUSTER_VARIABLES, *OF_A_LAUNCH, *given}
    return {n: value for n, value in environ.items() if n not in staying and not n.startswith(_BEGINNINGS)}
