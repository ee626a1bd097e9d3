"""`unisono launch --on mpi`: the tasks are the ranks of one `mpirun`, which ends all when one fails.

MPI restarts nothing: a batch system that starts the script again does, such as Slurm.
"""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from unisono._errors import InvalidArgumentError
from unisono._system._signals import RESTART_WANTED
from unisono.cluster_resolver._spec import Task
from unisono.launcher._launch import check_program, make_run_paths, stop_signals
from unisono.launcher._options import LaunchOptions
from unisono.launcher._plan import RunPaths, tasks_of
from unisono.launcher._restart_policy import Failure, exit_text
from unisono.launcher._run_files import BestEffort, Tail, last_lines, locked
from unisono.launcher.engines._engine import FunctionCall, Submission
from unisono.launcher.engines._engine_task import PRINT_KEY, STOP_SIGNAL, run_command
from unisono.launcher.engines._settings import LOGS, MpiSettings, rank_hosts
from unisono.launcher.engines._shared_folder import call_in_folder, failure_report, has_saved
from unisono.launcher.terminal._console import BackgroundConsole, Console
from unisono.launcher.terminal._printable import prefixed

HONOURED = frozenset({"devices_per_worker", "interface"})

_LOG = "mpi.log"
#: Seconds for `mpirun --version`, on however busy a machine.
_SECONDS = 120.0
#: Seconds between two looks at `mpirun`.
_POLL = 0.1
_KILLED = re.compile(r"process rank (\d+) with PID \d+ on node \S+ exited on signal (\d+)")
#: Open MPI 4 writes `[[1760,1],1]`, and 5 `[prterun-host-24563@1,1]`.
_ENDED = re.compile(r"Process name: \[\S+,(\d+)\] Exit code: (\d+)")


def render(submission: Submission[MpiSettings]) -> str:
    """Return a script that runs `mpirun`, with Open MPI's options."""
    return _script(submission, _folder(submission))


def run(submission: Submission[MpiSettings]) -> int:
    """Run `mpirun`, and follow it until the end."""
    script = _script(submission, _folder(submission))
    _check_is_open_mpi()
    paths = make_run_paths(_folder(submission))
    screen = BackgroundConsole(Console(sys.stderr, sys.stdout))
    with closing(screen), locked(paths.root, BestEffort(screen.say, paths.root)):
        return _follow(_started(script, paths), submission.options, paths, screen)


def _check_is_open_mpi() -> None:
    mpirun = shutil.which("mpirun")
    said = "no `mpirun` on this machine"
    if mpirun is not None:
        version = subprocess.run(
            [mpirun, "--version"], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        if "Open MPI" in version.stdout:
            return
        said = f"{mpirun}, which says {(version.stdout or version.stderr).strip().partition(chr(10))[0]!r}"
    raise InvalidArgumentError(
        f"`--on mpi` starts the tasks with `mpirun` of Open MPI. Received: {said}. Install it (Debian: "
        "`apt-get install openmpi-bin`), or load its module. MPICH runs `mpirun -n 4 python train.py`."
    )


def _started(script: str, paths: RunPaths) -> subprocess.Popen[bytes]:
    # Linux ends `mpirun`, and so all ranks, where this process is killed.
    bound = ["setpriv", "--pdeathsig", "TERM"] if shutil.which("setpriv") else []
    with (paths.root / _LOG).open("wb") as log:
        # In a session of its own: Ctrl-C arrives here alone.
        return subprocess.Popen(
            [*bound, "bash", "-c", script],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def call(submission: Submission[MpiSettings], function: FunctionCall) -> list[Any]:
    """Call a function in the ranks of `mpirun`."""
    return call_in_folder(run, ended_tasks, submission, function, 'mpirun=("--timeout", "600")')


def _folder(submission: Submission[MpiSettings]) -> Path:
    if submission.log_dir is not None:
        return submission.log_dir.resolve()
    return Path(LOGS).resolve() / time.strftime("mpi-%Y%m%d-%H%M%S")


def _script(submission: Submission[MpiSettings], folder: Path) -> str:
    check_program(submission.program)
    options, settings = submission.options, submission.settings
    for flag, asked in (("--max-restarts", options.max_restarts), ("--elastic", options.elastic)):
        if asked:
            raise InvalidArgumentError(
                f"MPI starts no task again. Received: `{flag}` with `--on mpi`. Leave it out; `--on slurm` "
                "and a launch on this machine have restarts."
            )
    count = len(tasks_of(options, options.workers))
    words = ["mpirun", f"-n {count}", "--map-by slot", "--bind-to none"]
    hosts = []
    if settings.hostfile is None:
        words.append(f"--host localhost:{count}")
    else:
        hosts = _hosts(settings.hostfile, count)
        words.append(f"--hostfile {shlex.quote(str(Path(settings.hostfile).resolve()))}")
    words += map(shlex.quote, settings.mpirun)
    task = run_command(options, '"$logs"', submission.program, hosts)
    return "\n".join(
        [
            "#!/bin/bash",
            f"cd {shlex.quote(str(Path().resolve()))}",
            f"logs={shlex.quote(str(folder))}",
            'mkdir -p "$logs"',
            'rm -rf "$logs/errors" "$logs/fence"',
            *_key(options),
            f"exec {' '.join(words)} {task}",
            "",
        ]
    )


def _key(options: LaunchOptions) -> list[str]:
    if not options.ps:
        return []
    return [f'(umask 077; rm -f "$logs/cluster_key"; {PRINT_KEY} >"$logs/cluster_key")']


def _hosts(hostfile: str, count: int) -> list[str]:
    """Return each rank's host."""
    hosts = rank_hosts(hostfile)
    if count > len(hosts):
        raise InvalidArgumentError(
            f"The hostfile must have a slot for each task. Received: {len(hosts)} slots in {hostfile!r} for "
            f"{count} tasks. Write more slots, such as `{hosts[-1]} slots={count - len(hosts) + 1}`."
        )
    return hosts[:count]


def first_ended(log: str, options: LaunchOptions) -> list[Failure]:
    """Return the task that ended first, as `mpirun` says it; empty where it says nothing.

    >>> log = "mpirun noticed that process rank 1 with PID 9 on node a exited on signal 9 (Killed)."
    >>> first_ended(log, LaunchOptions(workers=2))[0].detail
    'was killed by SIGKILL (exit code 137)'
    """
    # Open MPI 5 breaks lines where they become too long.
    text = " ".join(log.split())
    killed, ended = _KILLED.search(text), _ENDED.search(text)
    match, base = (killed, 128) if killed else (ended, 0)
    if match is None:
        return []
    tasks, rank, code = tasks_of(options, options.workers), int(match[1]), base + int(match[2])
    task = tasks[rank] if rank < len(tasks) else Task("worker", rank)
    return [Failure(task, 0.0, code, exit_text(code))]


def ended_tasks(paths: RunPaths, options: LaunchOptions) -> list[Failure]:
    """Return the task that ended first, as the log of `mpirun` says it."""
    return first_ended((paths.root / _LOG).read_text(errors="replace"), options)


def _follow(
    process: subprocess.Popen[bytes], options: LaunchOptions, paths: RunPaths, screen: BackgroundConsole
) -> int:
    """Show the chief's output until the end; return the exit code."""
    with stop_signals() as stop_requests:
        screen.say(f"unisono: mpirun has process id {process.pid}; logs: {paths.root}")
        shown = tasks_of(options, options.workers)[0]
        screen.follow(shown, Tail(paths.log(shown), 0))
        _wait(process, options.grace, stop_requests)
        screen.finish()
        code = process.wait()
        if stop_requests:
            saved = code == RESTART_WANTED or has_saved(paths, options, 0)
            saved = saved and stop_requests[0] != signal.SIGINT
            return RESTART_WANTED if saved else 128 + stop_requests[0]
        if code not in (0, RESTART_WANTED):
            log = paths.root / _LOG
            text = failure_report(paths, 0, ended_tasks(paths, options))
            screen.say(text or f"unisono: the end of {log}:\n{prefixed(log.name, last_lines(log, 0))}")
        return code


def _wait(process: subprocess.Popen[bytes], grace: float, stop_requests: list[int]) -> None:
    """Wait for the end of `mpirun`; end it where this process is asked to stop.

    Args:
        grace: seconds that the tasks have after the first signal; the second one kills them.
    """
    asked_at = None
    while process.poll() is None:
        if stop_requests and asked_at is None:
            asked_at = time.monotonic()
            process.send_signal(STOP_SIGNAL)
        late = asked_at is not None and time.monotonic() - asked_at > grace
        if late or len(stop_requests) > 1:
            process.terminate()
            return
        time.sleep(_POLL)
