"""The command `unisono launch`: run a cluster of processes on this machine."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from unisono._checks import digits
from unisono._errors import InvalidArgumentError
from unisono._system._packages import require_packages
from unisono.cluster_resolver._spec import Task
from unisono.cluster_resolver._tf_config import read_tf_config
from unisono.launcher._function_call import path_of_call, result_path
from unisono.launcher._options import LaunchOptions, UserProgram
from unisono.launcher._plan import (
    MARK,
    LaunchPlan,
    RunPaths,
    base_environment,
    make_plan,
    shell_lines,
    start_up_block,
    tasks_of,
)
from unisono.launcher._processes import free_ports
from unisono.launcher._supervisor import Launch, Outcome, Supervisor
from unisono.launcher.terminal._console import BackgroundConsole
from unisono.launcher.terminal._live_console import LiveTable, ReportingConsole, live_console
from unisono.launcher.terminal._printable import plain, prefixed


def run_program(options: LaunchOptions, program: UserProgram, log_dir: Path | None) -> int:
    """Launch a program; return the launcher's exit code.

    Raises:
        InvalidArgumentError: when the script does not exist or the directory cannot be used.
        MissingPackageError: a package that parameter servers need is not installed.
        ClusterError: when another launcher uses the directory, or no ports are free.
    """
    check_program(program)
    _check_is_no_task(environ())
    if options.ps:
        # Now, and not in each task.
        require_packages("`--ps`", "cluster", "zmq", "xxhash", "flatbuffers")
    paths = make_run_paths(log_dir)
    count = len(tasks_of(options, options.worker_range[1]))
    gpus = visible_gpus(environ())
    base = base_environment(environ(), options, count, cores(), paths, len(gpus))
    table = LiveTable(paths)
    console = live_console(sys.stderr, sys.stdout, table) or ReportingConsole(sys.stderr, sys.stdout, table)
    screen = BackgroundConsole(console)
    with closing(screen), stop_signals() as stop_requests:
        outcome = Supervisor(
            Launch(
                options,
                paths,
                base,
                lambda plan, task: job_description(plan, task, program),
                screen,
                lambda: tuple(stop_requests),
                lambda plan: start_up_block(plan, base, program),
                gpus,
                show=lambda seen: screen.call(lambda: console.show(seen)),
                title=Path(program.target).name,
            )
        ).run()
        screen.call(lambda: console.end(report_parts(outcome)))
    return outcome.code


def dry_run(options: LaunchOptions, program: UserProgram, log_dir: Path | None) -> str:
    """Return the variables and the command of each task, as lines for a shell, without starting any."""
    check_program(program)
    paths = RunPaths((log_dir or Path(tempfile.gettempdir()) / "unisono-dry-run").resolve())
    workers = options.worker_range[1]
    tasks = tasks_of(options, workers)
    gpus = visible_gpus(environ())
    plan = make_plan(options, 0, workers, free_ports(len(tasks)), paths, gpus)
    base = base_environment(environ(), options, len(tasks), cores(), paths, len(gpus))
    return shell_lines(plan, base, environ(), program)


def check_program(program: UserProgram) -> None:
    """Check that the script exists, and is Python."""
    path = Path(program.target)
    if not program.is_module and path.suffix == ".ipynb":
        raise InvalidArgumentError(
            f"The script must be a Python program. Received: the notebook {program.target!r}. Write "
            "`unisono.launch(train, workers=2)` in the notebook, or make a script of it: "
            f"`jupyter nbconvert --to script {program.target}`."
        )
    if program.is_module and (path.suffix == ".py" or len(path.parts) > 1):
        name = ".".join(path.with_suffix("").parts if path.suffix == ".py" else path.parts)
        raise InvalidArgumentError(
            f"A module is given by its name. Received: -m {program.target!r}. Write `unisono launch -n 2 "
            f"{program.target}` for a script, or `-m {name}`."
        )
    if not program.is_module and not path.is_file() and not (path / "__main__.py").is_file():
        raise InvalidArgumentError(
            f"The script must be a file. Received: {program.target!r}. "
            "Write `unisono launch -n 2 train.py`, or `unisono launch -n 2 -m package.module`."
        )


def _check_is_no_task(variables: Mapping[str, str]) -> None:
    """Check that TF_CONFIG does not make this machine one of several: each would train a model of its own."""
    config = read_tf_config(variables.get("TF_CONFIG"))
    tasks = sum(len(config.cluster.task_indices(job)) for job in config.cluster)
    # A task of a launch may launch a cluster itself: that TF_CONFIG is its own.
    if tasks > 1 and config.task_type is not None and MARK not in variables:
        raise InvalidArgumentError(
            "`unisono launch` starts all tasks of a cluster, on this machine. Received: TF_CONFIG, in which "
            f"it is {config.task_type}:{config.task_id} of {tasks} tasks. Start the program itself on each "
            "host, `python train.py`; or `unisono serve` on each host and once `unisono launch --cluster "
            "host1:2222,host2:2222 train.py`. For a cluster of this machine alone: `env -u TF_CONFIG unisono "
            "launch …`."
        )


def make_run_paths(log_dir: Path | None) -> RunPaths:
    """Create the directory of a launch where it is missing, by default a new temporary one, and return it."""
    if log_dir is None:
        return RunPaths(Path(tempfile.mkdtemp(prefix="unisono-")))
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(
            "The log directory must exist, or the launcher must be able to create it. "
            f"Received: {str(log_dir)!r} ({error.strerror}). Write `--log-dir logs`."
        ) from None
    return RunPaths(log_dir.resolve())


def environ() -> Mapping[str, str]:
    """Return the environment of this process."""
    return os.environ


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[str, ...]:
    """Return the GPUs that the tasks share: CUDA_VISIBLE_DEVICES, by default all NVIDIA GPUs."""
    if "CUDA_VISIBLE_DEVICES" in environ:
        return tuple(name for name in environ["CUDA_VISIBLE_DEVICES"].split(",") if name)
    # Device files instead of JAX or nvidia-smi: to import JAX takes seconds and would start CUDA in the
    # launcher.
    files = (path.name.removeprefix("nvidia") for path in devices.glob("nvidia[0-9]*"))
    return tuple(sorted((name for name in files if digits(name) is not None), key=int))


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def job_description(plan: LaunchPlan, task: Task, program: UserProgram) -> dict[str, Any]:
    """Return the job that is sent to a task's process: its environment, its program and its files."""
    of_call = (
        {
            "kind": "call",
            "sys_path": path_of_call(Path(program.target)),
            "result": str(result_path(plan.paths, task)),
        }
        if program.is_call
        else {}
    )
    return {
        "environ": plan.environment(task),
        "kind": "module" if program.is_module else "script",
        "target": program.target,
        "args": list(program.args),
        "title": f"unisono {task} {Path(program.target).name}",
        "sys_path": None,
        "log": str(plan.paths.log(task)),
        "error": str(plan.paths.error(task, plan.generation)),
        **of_call,
    }


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collect the signals that ask this process to stop, and yield their list.

    Signals that are ignored stay ignored: `nohup` and a shell's background jobs rely on that.
    """
    stop_requests: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        stop_requests.append(number)

    # Python lets the main thread alone handle signals.
    is_main = threading.current_thread() is threading.main_thread()
    every = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if is_main else ()
    numbers = [number for number in every if signal.getsignal(number) != signal.SIG_IGN]
    before: Mapping[int, Any] = {number: signal.signal(number, note) for number in numbers}
    try:
        yield stop_requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def report(outcome: Outcome) -> str:
    """Return how a launch ended, with the traceback of the first failure at the end."""
    return "\n".join(text for text, _ in report_parts(outcome))


def report_parts(outcome: Outcome) -> list[tuple[str, str]]:
    """Return the parts of a report, and of each how a line begins on a terminal that has it already."""
    parts = []
    if outcome.detail:
        parts.append((f"unisono: {outcome.detail}",) * 2)
    if outcome.failure is not None:
        task = outcome.failure.task
        said = f"unisono: {task} {outcome.failure.detail}"
        log = outcome.plan.paths.log(task)
        parts.append((f"{said}, in generation {outcome.plan.generation}; its log is {log}", said))
        if outcome.report.strip():
            text = prefixed(task, outcome.report.rstrip())
            parts.append((text, plain(text.splitlines()[-1])))
    return parts
