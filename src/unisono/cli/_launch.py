"""The command `unisono launch`: a cluster of processes on this machine."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from unisono._errors import InvalidArgumentError
from unisono.cli._console import BackgroundScreen, Screen
from unisono.cli._options import LaunchOptions, UserProgram
from unisono.cli._plan import (
    LaunchPlan,
    RunPaths,
    base_environment,
    make_plan,
    shell_lines,
    start_up_block,
    tasks_of,
)
from unisono.cli._processes import free_ports
from unisono.cli._supervisor import Launch, Outcome, Supervisor
from unisono.cluster_resolver._spec import Task


def run_program(options: LaunchOptions, program: UserProgram, log_dir: Path | None) -> int:
    """Launch a program; return the launcher's exit code.

    Raises:
        InvalidArgumentError: when the script is not there or the directory cannot be used.
        ClusterError: when another launcher uses the directory, or no ports are free.
    """
    check_program(program)
    place = make_place(log_dir)
    base = base_environment(environ(), options, _count(options), cores(), place)
    screen = BackgroundScreen(Screen(sys.stderr, sys.stdout))
    with closing(screen), stop_signals() as asked:
        outcome = Supervisor(
            Launch(
                options,
                place,
                base,
                lambda plan, task: job_of(plan, task, program),
                screen,
                lambda: tuple(asked),
                lambda plan: start_up_block(plan, base, program),
                visible_gpus(environ()),
            )
        ).run()
        text = report(outcome)
        if text:
            screen.say(text)
    return outcome.code


def dry_run(options: LaunchOptions, program: UserProgram, log_dir: Path | None) -> str:
    """Return each task's variables and command, as lines for a shell; starts nothing."""
    check_program(program)
    place = RunPaths((log_dir or Path(tempfile.gettempdir()) / "unisono-dry-run").resolve())
    workers = options.worker_range[1]
    tasks = tasks_of(options, workers)
    plan = make_plan(options, 0, workers, free_ports(len(tasks)), place, visible_gpus(environ()))
    base = base_environment(environ(), options, len(tasks), cores(), place)
    return shell_lines(plan, base, environ(), program)


def check_program(program: UserProgram) -> None:
    """Check that a script is there.

    Raises:
        InvalidArgumentError: when it is not.
    """
    path = Path(program.target)
    if not program.is_module and not path.is_file() and not (path / "__main__.py").is_file():
        raise InvalidArgumentError(
            f"The script must be a file. Received: {program.target!r}. "
            "Write `unisono launch -n 2 train.py`, or `unisono launch -n 2 -m package.module`."
        )


def make_place(log_dir: Path | None) -> RunPaths:
    """Return the directory of a launch, made if need be; a new temporary one by default.

    Raises:
        InvalidArgumentError: when it cannot be made.
    """
    if log_dir is None:
        return RunPaths(Path(tempfile.mkdtemp(prefix="unisono-")))
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgumentError(
            f"The log directory must be one that can be made. Received: {str(log_dir)!r} ({error.strerror}). "
            "Write `--log-dir logs`."
        ) from None
    return RunPaths(log_dir.resolve())


def environ() -> Mapping[str, str]:
    """Return the environment of this process."""
    return os.environ


def visible_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[str, ...]:
    """Return what the tasks may share: the user's choice, or all GPUs of NVIDIA.

    Args:
        environ: the environment.
        devices: where the system's device files are.
    """
    if "CUDA_VISIBLE_DEVICES" in environ:
        return tuple(name for name in environ["CUDA_VISIBLE_DEVICES"].split(",") if name)
    files = (path.name.removeprefix("nvidia") for path in devices.glob("nvidia[0-9]*"))
    return tuple(sorted((name for name in files if name.isdigit()), key=int))


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _count(options: LaunchOptions) -> int:
    return len(tasks_of(options, options.worker_range[1]))


def job_of(plan: LaunchPlan, task: Task, program: UserProgram) -> dict[str, Any]:
    """Return what a task is told: who it is, what to run, where to write."""
    return {
        "environ": plan.environment(task),
        "kind": "module" if program.is_module else "script",
        "target": program.target,
        "args": list(program.args),
        "sys_path": None,
        "log": str(plan.place.log(task)),
        "error": str(plan.place.error(task, plan.generation)),
    }


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Yield the signals by which this process was asked to stop, instead of stopping.

    What is ignored stays so: `nohup` and background jobs of shells want that.
    """
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    every = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    numbers = [number for number in every if signal.getsignal(number) != signal.SIG_IGN]
    before: Mapping[int, Any] = {number: signal.signal(number, note) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def report(outcome: Outcome) -> str:
    """Return how a launch ended; the traceback of what failed first comes last."""
    lines = []
    if outcome.detail:
        lines.append(f"unisono: {outcome.detail}")
    if outcome.failure is not None:
        task = outcome.failure.task
        lines.append(
            f"unisono: {task} {outcome.failure.detail}, in generation {outcome.plan.generation}; "
            f"its log is {outcome.plan.place.log(task)}"
        )
    if outcome.report:
        lines.append(outcome.report)
    return "\n".join(lines)
