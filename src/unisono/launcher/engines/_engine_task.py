"""`unisono run`: one task of a cluster that an engine has started; its number says which task it is."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import signal
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from unisono._errors import InvalidArgumentError
from unisono.cluster_resolver._base import ClusterResolver
from unisono.cluster_resolver._mpi import MPIClusterResolver, end_mpi, is_mpi_rank
from unisono.cluster_resolver._slurm import SlurmClusterResolver, started_by_mpirun
from unisono.cluster_resolver._spec import Task, read_index, split_address
from unisono.launcher import _task
from unisono.launcher._launch import check_program, cores, environ, job_description, visible_gpus
from unisono.launcher._options import LaunchOptions, UserProgram
from unisono.launcher._plan import MARK, LaunchPlan, RunPaths, base_environment, gpus_of, tasks_of
from unisono.rpc._ports import ports_to_choose_from
from unisono.rpc._transport._keys import FILE_VARIABLE, VARIABLE

#: The signal that `mpirun` forwards to its ranks; a second after SIGTERM it kills them.
STOP_SIGNAL = signal.SIGUSR2
#: Each job has ports of its own on a node: blocks of this size, below those that the system gives out.
_BLOCK, _PORTS = 64, range(10_000, 31_760)

#: Of a launcher that watches its tasks: an engine does not.
OF_A_SUPERVISOR = (MARK, "UNISONO_EVENTS", "UNISONO_FINISHED", "UNISONO_PROGRESS")

#: A command of the shell that prints a key for a cluster.
PRINT_KEY = f"{shlex.quote(sys.executable)} -c 'import secrets; print(secrets.token_hex(32))'"


def run_command(options: LaunchOptions, log_dir: str, program: UserProgram, hosts: Sequence[str] = ()) -> str:
    """Return the command of each task, for a shell.

    Args:
        log_dir: as it is written there, such as `'"$logs"'`.
        hosts: of the tasks by their number, where the engine does not say.
    """
    flags = [
        *(f"--{name}" for name in ("chief", "evaluator") if getattr(options, name)),
        f"--ps={options.ps}",
        f"--max-restarts={options.restarts}",
        f"--grace={options.grace:g}",
    ]
    if options.devices_per_worker is not None:
        flags.append(f"--devices-per-worker={options.devices_per_worker}")
    if options.interface is not None:
        flags.append(shlex.quote(f"--interface={options.interface}"))
    if hosts:
        flags.append(shlex.quote(f"--hosts={','.join(hosts)}"))
    words = [shlex.quote(sys.executable), "-m unisono run", *flags, f"--log-dir={log_dir}", program.text]
    return " ".join(words)


def run_task(
    options: LaunchOptions, program: UserProgram, log_dir: Path | None, hosts: str | None = None
) -> NoReturn:
    """Become one task of the cluster that `srun` or `mpirun` has started.

    Args:
        options: of the launch; its number of workers is what the other jobs leave.
        log_dir: for logs and records of exceptions, the same for all tasks; None leaves the output as it is.
        hosts: of the ranks of MPI, separated by commas, as for `MPIClusterResolver`.

    Raises:
        InvalidArgumentError: outside of an engine, or with fewer tasks than jobs need.
    """
    check_program(program)
    variables = environ()
    addresses, rank = place(variables, hosts)
    end_mpi()
    plan = task_plan(options, addresses, variables, log_dir)
    task = plan.tasks[rank]
    job = task_job(plan, task, program, variables)
    if is_mpi_rank(variables):
        job["sigterm"] = STOP_SIGNAL
    if log_dir is None:
        job |= {"log": None, "error": None}
    else:
        for folder in ("errors", "events"):
            (plan.paths.root / folder).mkdir(parents=True, exist_ok=True)
        # For `unisono watch`; no launcher is beside the tasks, who share the folder.
        job["environ"]["UNISONO_EVENTS"] = str(plan.paths.events(task))
    here = [t for t, a in plan.addresses.items() if _host(a) == _host(plan.addresses[task])]
    gpus = len(_shared_gpus(variables))
    base = base_environment(variables, options, len(here), _cores_of(len(here)), plan.paths, gpus)
    # The C library reads its variables when a program starts.
    reader, writer = os.pipe()
    os.write(writer, json.dumps(job).encode() + b"\n")
    os.close(writer)
    os.dup2(reader, 0)
    os.close(reader)
    kept = {name: value for name, value in base.items() if name not in OF_A_SUPERVISOR}
    os.execve(sys.executable, [sys.executable, _task.__file__, str(os.getppid())], kept)


def place(variables: Mapping[str, str], hosts: str | None = None) -> tuple[Sequence[str], int]:
    """Return the addresses of all tasks, by their number, and this task's number.

    >>> place({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    (['127.0.0.1:10000', '127.0.0.1:10001'], 1)
    """
    resolver: ClusterResolver
    if (
        "SLURM_PROCID" in variables
        and "SLURM_STEP_NODELIST" in variables
        and not started_by_mpirun(variables)
    ):
        port = _first_port(read_index(variables.get("SLURM_JOB_ID", "")) or 0, variables)
        resolver = SlurmClusterResolver(port_base=port, auto_set_gpu=False, environ=dict(variables))
    elif is_mpi_rank(variables):
        port = _first_port(zlib.crc32(variables.get("PMIX_NAMESPACE", "").encode()), variables)
        resolver = MPIClusterResolver(hosts, port, environ=variables)
    else:
        raise InvalidArgumentError(
            "`unisono run` must be started by `srun`, or by `mpirun` with two tasks or more. Received: no "
            "variables of a Slurm step or of MPI. Write `srun unisono run train.py`, or `unisono launch -n 2 "
            "train.py` without them."
        )
    addresses = resolver.cluster_spec().as_dict()["worker"]
    return addresses, resolver.process_id


def _first_port(job: int, variables: Mapping[str, str]) -> int:
    ports = ports_to_choose_from(_PORTS, variables)
    return ports.start + _BLOCK * (job % max(1, len(ports) // _BLOCK))


def task_plan(
    options: LaunchOptions, addresses: Sequence[str], variables: Mapping[str, str], log_dir: Path | None
) -> LaunchPlan:
    """Return who is what: chief, workers, parameter servers and the evaluator, in this order."""
    others = len(tasks_of(options, 0))
    workers = len(addresses) - others
    if workers < (0 if options.chief else 1):
        raise InvalidArgumentError(
            f"There must be a task for each of {', '.join(map(str, tasks_of(options, 1)))}. Received: "
            f"{len(addresses)} tasks. Write `srun -n {others + 1}` or `mpirun -n {others + 1}`, or more."
        )
    options = dataclasses.replace(options, workers=workers, elastic=None)
    generation = read_index(variables.get("UNISONO_GENERATION", "")) or 0
    places = dict(zip(tasks_of(options, workers), addresses, strict=True))
    return LaunchPlan(generation, places, RunPaths((log_dir or Path()).resolve()), options)


def task_job(
    plan: LaunchPlan, task: Task, program: UserProgram, variables: Mapping[str, str]
) -> dict[str, Any]:
    """Return the job of a task, as for one of a launch on this machine; a supervisor's files are left out."""
    job = job_description(plan, task, program)
    own: dict[str, str] = {n: v for n, v in job["environ"].items() if n not in OF_A_SUPERVISOR}
    if FILE_VARIABLE in own and not plan.paths.cluster_key.exists():
        # Of a cluster that was started by hand, on one machine without any.
        del own[FILE_VARIABLE]
        own |= {name: variables[name] for name in (VARIABLE, FILE_VARIABLE) if name in variables}
    here = [t for t, a in plan.addresses.items() if _host(a) == _host(plan.addresses[task])]
    if gpus := _shared_gpus(variables):
        own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus_of(task, gpus, here))
    return job | {"environ": own}


def _host(address: str) -> str:
    return split_address(address)[0]


def _shared_gpus(variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs of this machine for its tasks to divide; none where Slurm has given each its own."""
    of_node = read_index(variables.get("SLURM_GPUS_ON_NODE", "").rpartition(":")[2]) or 0
    if of_node and "CUDA_VISIBLE_DEVICES" not in variables:
        return tuple(map(str, range(of_node)))
    gpus = visible_gpus(variables)
    return () if len(gpus) < of_node else gpus


def _cores_of(tasks: int) -> int:
    """Return the cores that the tasks of this machine have in all.

    An engine may have bound each task to cores of its own, and has not bound itself to them.
    """
    own = cores()
    try:
        of_engine = len(os.sched_getaffinity(os.getppid())) if hasattr(os, "sched_getaffinity") else own
    except OSError:  # another user's process
        of_engine = own
    return own * tasks if own < of_engine else own
