"""`unisono launch --on slurm`: a batch script whose step runs the tasks, and what follows its job.

The script restarts a step that failed; Slurm starts the script again after a lost node, a preemption, and
exit code 42.

Tests: tests/unit/launcher/engines/test_slurm_job.py.
"""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Any

from unisono._errors import InvalidArgumentError
from unisono._system._signals import RESTART_WANTED
from unisono.launcher._launch import check_program, make_run_paths
from unisono.launcher._options import LaunchOptions
from unisono.launcher._plan import tasks_of
from unisono.launcher.engines._engine import FunctionCall, Submission
from unisono.launcher.engines._engine_task import PRINT_KEY, run_command
from unisono.launcher.engines._settings import LOGS, SlurmSettings
from unisono.launcher.engines._shared_folder import call_in_folder
from unisono.launcher.engines._slurm_job import HOLDER, SlurmJob, check_is_free, check_with_slurm, ended_tasks

HONOURED = frozenset({"devices_per_worker", "interface"})

#: The tasks get SIGTERM so many seconds, besides `--grace`, before the time limit: they may be compiling.
_AHEAD = 60


#: The message of `srun` on a task that has ended badly, and its exit code.
ENDS = {
    "Exited with exit code ": "",
    "Killed.*": 137,
    "Terminated.*": 143,
    "Aborted.*": 134,
    "Segmentation fault.*": 139,
}


def render(submission: Submission[SlurmSettings]) -> str:
    """Return the batch script."""
    check_program(submission.program)
    words = _arguments(submission)
    for word in words:
        # What follows a line break would be a line of the script.
        if "\n" in word or (word.startswith(("--chdir=", "--output=")) and "\\" in word):
            raise InvalidArgumentError(
                "An argument of sbatch must have no line break, and a folder no backslash. "
                f"Received: {word!r}. Rename the script or its folder, or write the argument in one line."
            )
    lines = [f"#SBATCH {shlex.quote(word)}" for word in words]
    return "\n".join(["#!/bin/bash", *lines, "", *_body(submission)]) + "\n"


def run(submission: Submission[SlurmSettings]) -> int:
    """Submit the batch script, and follow its job until the end."""
    script = render(submission)
    check_with_slurm(script)
    folder = make_run_paths(_root(submission)).root
    if submission.log_dir is not None:
        check_is_free(folder)
    logs = None if submission.log_dir else folder / LOGS
    is_array, is_call = submission.settings.array is not None, submission.program.is_call
    return SlurmJob(script, submission.options, folder, logs, is_array, is_call).follow()


def call(submission: Submission[SlurmSettings], function: FunctionCall) -> list[Any]:
    """Call a function in the tasks of a job."""
    if submission.settings.array is not None:
        raise InvalidArgumentError(
            f"A function must be called in one job. Received: array={submission.settings.array!r}. Write a "
            "script that reads SLURM_ARRAY_TASK_ID, and `unisono launch --on slurm --array`."
        )
    return call_in_folder(run, ended_tasks, submission, function, 'time="0:10:00"')


def _root(submission: Submission[SlurmSettings]) -> Path:
    return (submission.log_dir or Path()).resolve()


def _arguments(submission: Submission[SlurmSettings]) -> list[str]:
    options, settings, program = submission.options, submission.settings, submission.program
    job = "%A_%a" if settings.array else "%j"
    given = {
        "job-name": program.target if program.is_module else Path(program.target).stem,
        "chdir": str(Path().resolve()),
        "output": f"{_root(submission)}/slurm-".replace("%", "%%") + f"{job}.log",
        "open-mode": "append",
        "signal": f"TERM@{math.ceil(options.grace) + _AHEAD}",
        "nodes": _nodes(options, settings),
        "ntasks": None if options.elastic else len(tasks_of(options, options.workers)),
        "ntasks-per-node": settings.tasks_per_node,
        "gpus-per-node": settings.gpus_per_node,
        "cpus-per-task": settings.cpus_per_task,
        "partition": settings.partition,
        "time": settings.time,
        "account": settings.account,
        "array": settings.array,
    }
    return [
        *(f"--{name}={value}" for name, value in given.items() if value is not None),
        "--requeue",
        *settings.sbatch,
    ]


def _nodes(options: LaunchOptions, settings: SlurmSettings) -> str | None:
    """Return how many nodes: the fewest and the most where the number of workers may change."""
    each = settings.tasks_per_node
    if options.elastic is None:
        tasks = len(tasks_of(options, options.workers))
        if settings.nodes is not None and each is not None and tasks > settings.nodes * each:
            raise InvalidArgumentError(
                "The nodes must have a place for each task. Received: "
                f"{tasks} tasks for {settings.nodes} nodes with {each} tasks each. Write `--nodes "
                f"{math.ceil(tasks / each)}`, or more tasks per node (`--ntasks-per-node`)."
            )
        return None if settings.nodes is None else str(settings.nodes)
    if settings.nodes is not None:
        raise InvalidArgumentError(
            "`--elastic` says how many nodes there are: as many as its workers need. Received: `--nodes "
            f"{settings.nodes}`, too. Leave `--nodes` out; `--ntasks-per-node` is the workers of a node."
        )
    least, most = (math.ceil(len(tasks_of(options, workers)) / (each or 1)) for workers in options.elastic)
    return f"{least}-{most}"


def _body(submission: Submission[SlurmSettings]) -> list[str]:
    """Return the commands of the batch script."""
    options, settings = submission.options, submission.settings
    root = shlex.quote(str(_root(submission)))
    setup = [each for line in settings.setup for each in (line, _checked(line))]
    lines = [*setup, 'job="${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}"']
    lines += [f"logs={root}" if submission.log_dir else f'logs={root}/{LOGS}/"$job"', 'mkdir -p "$logs"']
    lines += _TAKEN
    if settings.array:
        lines += ['logs="$logs/$SLURM_ARRAY_TASK_ID"', 'mkdir -p "$logs"']
    if options.elastic is not None:
        lines.append(f"tasks=$((SLURM_JOB_NUM_NODES * {settings.tasks_per_node or 1}))")
        most = len(tasks_of(options, options.elastic[1]))
        lines.append(f"[ $tasks -le {most} ] || tasks={most}")
    if options.ps:
        lines.append(f'[ -e "$logs/cluster_key" ] || (umask 077; {PRINT_KEY} >"$logs/cluster_key")')
    return [
        *lines,
        *_WATCH,
        *_FIRST_GENERATION,
        "while true; do",
        *_step(submission),
        *_after(options),
        "done",
    ]


def _checked(line: str) -> str:
    """Return the commands that end a job after a failed line of `--setup`."""
    text = shlex.quote(f"unisono: --setup must succeed. Received: {line}")
    return f"code=$?; [ $code = 0 ] || {{ echo {text} >&2; exit $code; }}"


#: Commands that refuse a directory in which the tasks of another job write.
_TAKEN = (
    f'other=$(cat "$logs/{HOLDER}" 2>/dev/null)',
    '[ "$other" = "$job" ] || [ -z "$other" ] || [ -z "$(squeue -h -j "$other" 2>/dev/null)" ] || {',
    '    echo "unisono: a log directory must serve one job at a time. Received: $logs, which Slurm job '
    '$other uses. Write --log-dir with another directory." >&2',
    "    exit 2",
    "}",
    f'echo "$job" >"$logs/{HOLDER}"',
)

_FIRST_GENERATION = (
    "export UNISONO_GENERATION=0",
    'if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then',
    '    UNISONO_GENERATION=$(($(cat "$logs/fence") + 1))',
    "else",
    '    rm -rf "$logs/errors"',
    "fi",
)

#: `srun` kills all tasks after a failure, but waits for ever for those whose slurmstepd was killed. Slurm's
#: controller knows better, once it is asked to cancel the step.
_WATCH = (
    "watch_step() {",
    "    trap 'kill $! 2>/dev/null; exit' TERM",
    "    step=",
    '    until [ -n "$step" ]; do',
    "        sleep 5 & wait",
    """        step=$(sed -n 's/^srun: .*Terminating StepId=//p' "$logs/step.log" | head -1)""",
    "    done",
    "    seconds=$(scontrol show config | sed -n 's/^KillWait *= *\\([0-9]*\\).*/\\1/p')",
    "    sleep $((${seconds:-30} + 15)) & wait",
    '    echo "unisono: step $step does not end by itself: it is cancelled"',
    '    scancel "$step"',
    "}",
)


def _step(submission: Submission[SlurmSettings]) -> list[str]:
    options, settings = submission.options, submission.settings
    step = ["srun", "--kill-on-bad-exit=1", "--distribution=block"]
    if options.elastic is not None:
        step.append("--ntasks=$tasks")
    if settings.cpus_per_task is not None:
        # Since Slurm 22.05 a step does not inherit it.
        step.append(f"--cpus-per-task={settings.cpus_per_task}")
    command = run_command(options, '"$logs"', submission.program)
    expressions = " ".join(f"-e 's/^srun: error: .*: {text}/{code}/p'" for text, code in ENDS.items())
    return [
        '    echo "unisono: generation $UNISONO_GENERATION on $SLURM_JOB_NODELIST"',
        # An earlier generation may have had more workers.
        *['    rm -f "$logs"/result-*'] * submission.program.is_call,
        # Whole or not at all: Slurm may end the script here, and the next start reads the file.
        '    echo "$UNISONO_GENERATION" >"$logs/fence.new" && mv "$logs/fence.new" "$logs/fence"',
        '    : >"$logs/step.log"',
        "    watch_step & watch=$!",
        f'    {" ".join(step)} {command} 2>"$logs/step.log"',
        "    code=$?",
        "    kill $watch 2>/dev/null; wait $watch",
        '    cat "$logs/step.log"',
        # The code of `srun` is the highest one, also of tasks that it has ended itself.
        f'    first=$(sed -n {expressions} "$logs/step.log" | head -1)',
        "    code=${first:-$code}",
    ]


def _after(options: LaunchOptions) -> list[str]:
    """Return the commands after a step."""
    requeue = f'    [ $code != {RESTART_WANTED} ] || scontrol requeue "$SLURM_JOB_ID"'
    if not options.restarts:
        return [requeue, "    exit $code"]
    return [
        requeue,
        f"    [ $code != 0 ] && [ $code != {RESTART_WANTED} ] || exit $code",
        '    failures="$failures $SECONDS" recent=0',
        "    for at in $failures; do",
        f"        [ $((SECONDS - at)) -ge {options.window:g} ] || recent=$((recent + 1))",
        "    done",
        f"    [ $recent -le {options.restarts} ] || exit $code",
        "    UNISONO_GENERATION=$((UNISONO_GENERATION + 1))",
    ]
