"""`unisono launch --on ray`: actors of Ray that run the tasks, and the rules of a launch on this machine.

Tests: tests/cluster/test_ray_cluster.py, tests/unit/ray/test_ray_engine.py.
"""

from __future__ import annotations

import dataclasses
import logging
import shlex
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from unisono._errors import ClusterError, InvalidArgumentError
from unisono._system._environ import process_environ
from unisono._system._json import parse_json
from unisono._system._packages import require_packages
from unisono.cluster_resolver._spec import split_address
from unisono.launcher._launch import check_program
from unisono.launcher._options import LaunchOptions
from unisono.launcher._plan import CLUSTER_VARIABLES, OF_A_LAUNCH
from unisono.launcher.engines._engine import FunctionCall, Submission
from unisono.launcher.engines._settings import RaySettings
from unisono.ray._reservation import Reservation, Resources, checked_resources

HONOURED = frozenset({"devices_per_worker", "interface", "stall_timeout", "cool_down"})

#: Seconds for a connection with the cluster: Ray itself tries for two minutes, and ends the process then.
_CONNECT = 10.0


def render(submission: Submission[RaySettings]) -> str:
    """Return a script that runs this launch as a job of Ray, on the cluster itself."""
    check_program(submission.program)
    script = Path(submission.program.target)
    if script.is_absolute() or ".." in script.parts:
        raise InvalidArgumentError(
            "The script of a job of Ray must be below the current directory, which travels with it. "
            f"Received: {str(script)!r}. Write `--print {script.name}` in the script's folder."
        )
    _reservation(submission.options, submission.settings)
    # In a job the cluster is the job's own.
    flags = _flags(submission.options) + _flags(dataclasses.replace(submission.settings, address=None))
    if submission.log_dir is not None:
        flags.append(f"--log-dir={submission.log_dir}")
    words = ["python", "-m", "unisono", "launch", "--on", "ray", *flags]
    return "\n".join(
        [
            "#!/bin/bash",
            "# RAY_API_SERVER_ADDRESS is the dashboard of the cluster: http://10.0.0.1:8265.",
            f"exec ray job submit --working-dir . -- {shlex.join(words)} {submission.program.text}",
            "",
        ]
    )


def _flags(record: LaunchOptions | RaySettings) -> list[str]:
    """Return the flags of the fields that do not have their defaults."""
    flags = []
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if value != field.default:
            name = "--" + field.name.replace("_", "-")
            every = value if field.name == "resource" else [value]
            texts = [f"{v[0]}:{v[1]}" if field.name == "elastic" else f"{v}" for v in every]
            flags += [name] if value is True else [f"{name}={text}" for text in texts]
    return flags


def run(submission: Submission[RaySettings]) -> int:
    """Start the tasks on the cluster, and follow them until the end.

    The script and the modules beside it that it imports travel to the actors, as to standalone servers.
    """
    check_program(submission.program)
    reservation = _reservation(submission.options, submission.settings)
    with ExitStack() as stack:
        where = stack.enter_context(_connected(submission.settings.address))
        servers = stack.enter_context(reservation.servers(Path(submission.program.target).name, where))
        from unisono.standalone._client import ClusterRun, run_program_on_cluster

        options = submission.options
        names = ("devices_per_worker", "max_restarts", "grace", "stall_timeout", "cool_down", "interface")
        return run_program_on_cluster(
            servers.slots,
            submission.program,
            ClusterRun(),
            submission.log_dir,
            access=servers.access,
            elastic=servers.elastic,
            **{name: getattr(options, name) for name in names},
        )


def _reservation(options: LaunchOptions, settings: RaySettings) -> Reservation:
    """Return Ray's reservation; parameter servers get CPUs and memory of what `--resource` names.

    The tasks get the variables of this process, as on other engines.
    """
    worker = _resources(settings.resource)
    ps = {name: amount for name, amount in worker.items() if name in ("CPU", "memory")}
    runtime_env = _runtime_env(settings.runtime_env_json)
    reservation = Reservation(
        options, worker, checked_resources("resource", ps or None), settings.placement or "PACK", runtime_env
    )
    # Once it is known that `runtime_env` is as Ray describes it.
    given = (runtime_env or {}).get("env_vars") or {}
    return dataclasses.replace(reservation, variables=travelling(process_environ(), given))


def _resources(texts: Sequence[str]) -> Resources:
    """Return the amounts of Ray's resources that texts name.

    >>> _resources(["CPU=2", "GPU=0.5"])
    {'CPU': 2.0, 'GPU': 0.5}
    """
    amounts: dict[str, float] = {}
    for text in texts:
        name, _, amount = text.partition("=")
        try:
            amounts[name] = float(amount)
            checked_resources("resource", {name: amounts[name]})
        except ValueError:  # also from `checked_resources`
            raise InvalidArgumentError(
                "`--resource` must be a resource of Ray and an amount above 0. Received: "
                f"{text!r}. Write `--resource CPU=4` or `--resource GPU=1`."
            ) from None
    return checked_resources("resource", amounts or None)


def _runtime_env(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        parsed = parse_json(text)
    except ValueError as error:
        parsed = error
    if not isinstance(parsed, dict):
        raise InvalidArgumentError(
            f"`--runtime-env-json` must be an object in JSON. Received: {text!r}"
            f"{f' ({parsed})' if isinstance(parsed, ValueError) else ''}. Write "
            """`--runtime-env-json '{"env_vars": {"NAME": "value"}}'`."""
        )
    return parsed


@contextmanager
def _connected(address: str | None) -> Iterator[str]:
    """Connect this process with a cluster of Ray, unless the program has done it; give the cluster's address.

    Raises:
        ClusterError: no cluster is there.
    """
    require_packages("A launch on Ray", "ray", "ray")
    import ray

    where = address or process_environ().get("RAY_ADDRESS") or "auto"
    if ray.is_initialized():
        yield where
        return
    connect(where)
    try:
        yield where
    finally:
        ray.shutdown()


def connect(where: str) -> None:
    """Connect this process with the cluster of Ray at an address.

    Raises:
        ClusterError: no cluster is there.
    """
    import ray

    _check_listens(where)
    try:
        ray.init(address=where, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, SystemExit) as error:
        raise _no_cluster(where, str(error).partition("\n")[0]) from error


def _check_listens(where: str) -> None:
    if where in ("auto", "local"):
        return
    try:
        host, port = split_address(where.partition("://")[2] or where)
        socket.create_connection((host, port), _CONNECT).close()
    except (OSError, ValueError) as error:
        raise _no_cluster(where, str(error)) from error


def _no_cluster(where: str, why: str) -> ClusterError:
    return ClusterError(
        f"A cluster of Ray must run at the address. Received: {where!r} ({why}). Write `--address "
        "HOST:6379`, or `ray start --head` to start a cluster on this machine."
    )


def call(submission: Submission[RaySettings], function: FunctionCall) -> list[Any]:
    """Call a function in the tasks; return the values of the chief and the workers."""
    if submission.log_dir is not None:
        raise InvalidArgumentError(
            "`log_dir` is for engines whose nodes share a folder. Received: "
            f"{str(submission.log_dir)!r} with on='ray', which brings each task's output here. Leave it out."
        )
    reservation = _reservation(submission.options, submission.settings)
    name = getattr(function.fn, "__name__", type(function.fn).__name__)
    with _connected(submission.settings.address) as where, reservation.servers(name, where) as servers:
        return servers.call(function.fn, function.args, submission.options, function.timeout)


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

    Ray's nodes may be other machines with other users: what describes this machine, its programs and its
    sessions stays here, and so does what Ray or another cluster has set. The others travel as arguments of
    the actors: Ray shows a `runtime_env` in its dashboard and its logs.

    Args:
        environ: of the shell.
        given: the names that `runtime_env` sets, which take precedence.

    >>> travelling({"HF_TOKEN": "a", "PATH": "/bin", "RAY_ADDRESS": "b", "NAME": "c"}, given=["NAME"])
    {'HF_TOKEN': 'a'}
    """
    staying = {*_OF_THIS_MACHINE, *CLUSTER_VARIABLES, *OF_A_LAUNCH, *given}
    return {n: value for n, value in environ.items() if n not in staying and not n.startswith(_BEGINNINGS)}
