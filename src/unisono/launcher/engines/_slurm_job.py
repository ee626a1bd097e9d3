"""A job of Slurm: submitted, followed, cancelled."""

from __future__ import annotations

import dataclasses
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

from unisono._errors import ClusterError, InvalidArgumentError
from unisono._system._signals import RESTART_WANTED
from unisono.cluster_resolver._slurm_hostlist import expand_hosts
from unisono.cluster_resolver._spec import Task, read_index
from unisono.launcher._launch import stop_signals
from unisono.launcher._options import LaunchOptions
from unisono.launcher._plan import RunPaths, tasks_of
from unisono.launcher._restart_policy import STALLED, Failure
from unisono.launcher._run_files import Tail, last_lines
from unisono.launcher.engines._shared_folder import failure_report, has_saved
from unisono.launcher.terminal._console import BackgroundConsole, Console
from unisono.launcher.terminal._printable import prefixed

#: The file in a log directory with the number of the job that writes there.
HOLDER = "slurm-job"
#: Seconds for a command of Slurm: longer than it waits for the controller.
_SECONDS = 120.0
#: Seconds between two questions about a job.
_POLL = 1.0
#: Seconds without an answer of the controller, which may be started again, after which the following ends.
_UNANSWERED = 300.0
#: States from which a job does not come back; the exit code of a job that ended in it without one of its own.
_ENDED = {
    "COMPLETED": 0, "FAILED": 1, "CANCELLED": 128 + signal.SIGTERM, "TIMEOUT": STALLED, "DEADLINE": STALLED,
    "NODE_FAIL": 1, "BOOT_FAIL": 1, "OUT_OF_MEMORY": 128 + signal.SIGKILL, "PREEMPTED": 128 + signal.SIGTERM,
}  # fmt: skip
#: Of these, those in which Slurm has sent the tasks SIGTERM first, so that they could save.
_TAKEN_AWAY = ("CANCELLED", "TIMEOUT", "DEADLINE", "PREEMPTED")
_FIELD = re.compile(r"(?<!\S)(JobId|ArrayTaskId|JobState|Reason|Restarts|ExitCode|NodeList)=(\S*)")
_TASK_ENDED = re.compile(r"srun: error: \S+: tasks? ([0-9,\[\]-]+): (.+)")


@dataclasses.dataclass(frozen=True)
class JobState:
    """The state of a job of Slurm.

    Args:
        index: its index in an array of jobs; empty outside of one.
    """

    job: str
    state: str
    reason: str
    nodes: str
    exit_code: int
    index: str = ""

    @property
    def has_ended(self) -> bool:
        """True if the job has ended for good."""
        return self.state in _ENDED

    @property
    def code(self) -> int:
        """The exit code of a job that has ended."""
        return self.exit_code or _ENDED[self.state]

    @property
    def text(self) -> str:
        """The state as a line says it."""
        if self.state == "RUNNING":
            return f"runs on {self.nodes}"
        reason = f" ({self.reason})" if self.reason not in ("None", "") else ""
        return self.state.lower().replace("_", " ") + reason


def read_states(text: str) -> list[JobState]:
    """Return the states that `scontrol show job -o` prints: several for an array of jobs.

    >>> read_states("JobId=7 JobState=FAILED Reason=NonZeroExitCode Restarts=1 ExitCode=0:9 NodeList=n[1-2]")
    [JobState(job='7', state='FAILED', reason='NonZeroExitCode', nodes='n[1-2]', exit_code=137, index='')]
    """
    states = []
    for line in text.splitlines():
        fields = dict(_FIELD.findall(line))
        if "JobState" in fields:
            code, _, number = fields.get("ExitCode", "0:0").partition(":")
            # A line that was cut says less.
            killed = read_index(number) or 0
            states.append(
                JobState(
                    fields.get("JobId", ""),
                    fields["JobState"],
                    fields.get("Reason", ""),
                    fields.get("NodeList", ""),
                    128 + killed if killed else read_index(code) or 0,
                    fields.get("ArrayTaskId", ""),
                )
            )
    return states


def first_killed(log: str, options: LaunchOptions) -> list[Failure]:
    """Return the task that ended first, as `srun` says it; empty where it says nothing.

    >>> first_killed("srun: error: n2: task 1: Killed", LaunchOptions(workers=2))[0].task
    Task(type='worker', index=1)
    """
    match = _TASK_ENDED.search(log)
    if match is None:
        return []
    number = int(expand_hosts(f"[{match[1].strip('[]')}]")[0])
    tasks = tasks_of(options, options.worker_range[1])
    task = tasks[number] if number < len(tasks) else Task("worker", number)
    return [Failure(task, 0.0, 1, f"ended: srun says '{match[2]}'")]


def ended_tasks(paths: RunPaths, options: LaunchOptions) -> list[Failure]:
    """Return the task that ended first, as the log of `srun` says it."""
    log = paths.root / "step.log"
    return first_killed(log.read_text(errors="replace"), options) if log.exists() else []


def check_with_slurm(script: str) -> None:
    """Ask Slurm whether it would take a batch script."""
    if shutil.which("sbatch") is None:
        raise InvalidArgumentError(
            "`--on slurm` submits with Slurm's command sbatch. Received: no `sbatch` on this machine. Run it "
            "on a login node of the cluster, or write `--print` and submit the file there."
        )
    done = _slurm("sbatch", "--test-only", text=script)
    if done.returncode:
        lines = re.sub(r"^(sbatch|allocation failure): (error: )?", "", done.stderr.strip(), flags=re.M)
        said = "; ".join(dict.fromkeys(lines.splitlines()))
        raise InvalidArgumentError(
            f"Slurm must accept the job. Received: {said}. `sinfo` lists partitions and nodes; "
            "`unisono launch --on slurm --print` shows the file that was submitted."
        )


def check_is_free(folder: Path) -> None:
    """Check that no job writes its logs into a folder."""
    holder = folder / HOLDER
    number = holder.read_text().strip() if holder.exists() else ""
    states = read_states(_slurm("scontrol", "show", "job", "-o", number).stdout) if number else []
    if any(not state.has_ended for state in states):
        raise ClusterError(
            f"A log directory must serve one job at a time. Received: {folder}, which Slurm job {number} "
            f"uses ({states[0].text}). Write `--log-dir` with another directory, or `scancel {number}`."
        )


def _slurm(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, input=text, capture_output=True, text=True, timeout=_SECONDS, check=False)


class SlurmJob:
    """A job that was submitted.

    Args:
        logs: where a folder with the number of the job has the tasks' logs; None for those in `folder`.
        is_array: whether there are several jobs, whose output is not shown.
        is_call: whether the job is of use to this process alone: each signal cancels it.

    Raises:
        InvalidArgumentError: Slurm has refused it.
    """

    def __init__(
        self,
        script: str,
        options: LaunchOptions,
        folder: Path,
        logs: Path | None,
        is_array: bool,
        is_call: bool = False,
    ) -> None:
        done = _slurm("sbatch", "--parsable", text=script)
        if done.returncode:
            raise InvalidArgumentError(f"Slurm must accept the job. Received: {done.stderr.strip()}.")
        self.number = done.stdout.strip().partition(";")[0]
        self._options, self._is_array = options, is_array
        self._is_call = is_call
        self._log = folder / f"slurm-{self.number}.log"
        if logs is None:
            (folder / HOLDER).write_text(f"{self.number}\n")
        self._paths = RunPaths(folder if logs is None else logs / self.number)

    def follow(self) -> int:
        """Show state and chief's output until the end; return the exit code. Ctrl-C cancels the job."""
        screen = BackgroundConsole(Console(sys.stderr, sys.stdout))
        with closing(screen), stop_signals() as stop_requests:
            screen.say(f"unisono: submitted Slurm job {self.number}; logs: {self._paths.root}")
            if not self._is_array:
                shown = tasks_of(self._options, self._options.worker_range[1])[0]
                screen.follow(shown, Tail(self._paths.log(shown), 0))
            states = self._watch(screen, stop_requests)
            screen.finish()
            if stop_requests and not self._is_call and signal.SIGINT not in stop_requests:
                screen.say(f"unisono: the job continues; `scancel {self.number}` ends it")
                return 128 + stop_requests[0]
            if stop_requests:
                return 128 + (signal.SIGINT if signal.SIGINT in stop_requests else stop_requests[0])
            code = max(map(self._code, states))
            if code:
                screen.say(self._report(states))
            return code

    def _watch(self, screen: BackgroundConsole, stop_requests: list[int]) -> list[JobState]:
        """Wait until the job has ended, or this process is asked to end by another signal than Ctrl-C."""
        shown, obeyed = "", 0
        while True:
            states = self._states()
            text = _text(states)
            if text != shown:
                screen.say(f"unisono: Slurm job {self.number} {text}")
                shown = text
            is_left = set(stop_requests) - {signal.SIGINT} and not self._is_call
            if is_left or all(state.has_ended for state in states):
                return states
            if len(stop_requests) > obeyed:
                screen.say(f"unisono: the job is cancelled{' by SIGKILL' if obeyed else ''}")
                _slurm("scancel", *(["--signal=KILL", "--full"] if obeyed else []), self.number)
                obeyed = len(stop_requests)
            until = time.monotonic() + _POLL
            while time.monotonic() < until and len(stop_requests) == obeyed:
                time.sleep(0.05)

    def _states(self) -> list[JobState]:
        """Ask for the states, for a while also where the controller does not answer."""
        until = time.monotonic() + _UNANSWERED
        while True:
            done = _slurm("scontrol", "show", "job", "-o", self.number)
            states = read_states(done.stdout)
            if states:
                return states
            if time.monotonic() > until or "Invalid job id" in done.stderr:
                raise ClusterError(
                    f"Slurm must know job {self.number}. Received: {done.stderr.strip() or 'no answer'}. "
                    f"`sacct -j {self.number}` says more where Slurm keeps accounts; the logs are in "
                    f"{self._paths.root}."
                )
            time.sleep(_POLL)

    def _code(self, state: JobState) -> int:
        """Return the exit code of a job that has ended: 42 if its tasks had saved before Slurm ended them."""
        paths = RunPaths(self._paths.root / state.index)
        if state.state not in _TAKEN_AWAY or not paths.fence.exists():
            return state.code
        generation = read_index(paths.fence.read_text().strip()) or 0
        return RESTART_WANTED if has_saved(paths, self._options, generation) else state.code

    def _report(self, states: list[JobState]) -> str:
        """Return why the job failed."""
        if self._is_array:
            failed = next(state for state in states if not state.has_ended or state.code)
            return f"unisono: job {failed.job} {failed.text}; logs are in {self._paths.root}"
        try:
            generation = read_index(self._paths.fence.read_text().strip()) or 0
            text = failure_report(self._paths, generation, ended_tasks(self._paths, self._options))
        except OSError:
            text = ""  # the script has ended before its first step, or its folder is not shared
        if text:
            return text
        end = prefixed(self._log.name, last_lines(self._log, 0))
        where = f"the end of {self._log}:\n{end}" if end else f"there is no log of the job at {self._log}"
        return f"unisono: {where}"


def _text(states: list[JobState]) -> str:
    if len(states) == 1:
        return states[0].text
    counts = Counter(state.state.lower() for state in states)
    return ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))


def folder_of_job(name: str) -> Path | None:
    """Return the log folder of the newest job of a name, of this user; None where there is no such job.

    Slurm knows it by the file of the job's own output, which `unisono launch --on slurm` puts there.
    """
    if shutil.which("squeue") is None:
        return None
    numbers = _slurm("squeue", "--me", "--noheader", "--format=%A", f"--name={name}").stdout.split()
    for number in sorted({n for n in numbers if n.isdigit()}, key=int, reverse=True):
        output = re.search(r"(?m)^\s*StdOut=(.+)$", _slurm("scontrol", "show", "job", number).stdout)
        if output is not None and (folder := Path(output[1]).parent).is_dir():
            return folder
    return None
