"""The tasks of one generation: where each listens, what is in its environment; pure."""

from __future__ import annotations

import dataclasses
import json
import secrets
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from unisono.cli._options import LaunchOptions, UserProgram
from unisono.cluster_resolver._spec import Task, with_port

HOST = "127.0.0.1"

#: Variables that tell a process of its cluster: a task must not inherit those of the launcher.
CLUSTER_VARIABLES = (
    "TF_CONFIG",
    "JAX_COORDINATOR_ADDRESS",
    "JAX_COORDINATOR_PORT",
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
    "JAX_LOCAL_DEVICE_IDS",
)

#: Marks every process of a launch, also those that its tasks start and forget.
MARK = "UNISONO_LAUNCH"

#: Thread pools that libraries make for themselves, each as large as the machine.
_POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclasses.dataclass(frozen=True)
class RunPaths:
    """The files of a launch, all below one directory.

    Args:
        root: the directory, absolute.
    """

    root: Path

    def log(self, task: Task) -> Path:
        """Everything that a task prints, over all generations."""
        return self.root / f"{task.type}-{task.index}.log"

    def error(self, task: Task, generation: int) -> Path:
        """The exception that ended a task."""
        return self.root / "errors" / f"g{generation}-{task.type}-{task.index}.json"

    def progress(self, task: Task, generation: int) -> Path:
        """Where a task writes how far it is."""
        return self.root / "progress" / f"g{generation}-{task.type}-{task.index}"

    @property
    def fence(self) -> Path:
        """Holds the number of the generation that may write."""
        return self.root / "fence"

    @property
    def finished(self) -> Path:
        """Is there when all that train have ended well: the evaluator finishes then."""
        return self.root / "finished"

    @property
    def history(self) -> Path:
        """What happened, a JSON object per line."""
        return self.root / "history.jsonl"

    @property
    def capacity(self) -> Path:
        """Written by others: how many workers there is room for."""
        return self.root / "capacity"

    @property
    def compilation_cache(self) -> Path:
        """What JAX has compiled, for the next generation."""
        return self.root / "compilation_cache"


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """One generation of tasks.

    Args:
        generation: its number, from 0.
        addresses: each task's `"host:port"`; the order is that of the start-up block.
        place: the launch's files.
        options: what was asked for.
        gpus: what CUDA_VISIBLE_DEVICES may name, to be divided; empty where there are none.
    """

    generation: int
    addresses: Mapping[Task, str]
    place: RunPaths
    options: LaunchOptions
    gpus: tuple[str, ...] = ()

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks."""
        return tuple(self.addresses)

    @property
    def shown(self) -> Task:
        """The task whose output appears on the terminal: the chief, or worker 0."""
        return min(self.tasks, key=lambda t: (t.type != "chief", t.type != "worker", t.index))

    def environment(self, task: Task) -> dict[str, str]:
        """What tells a task who it is."""
        variables = {
            "TF_CONFIG": tf_config(self.addresses, task),
            "UNISONO_GENERATION": str(self.generation),
            "UNISONO_FENCE": str(self.place.fence),
            "UNISONO_FINISHED": str(self.place.finished),
            "UNISONO_PROGRESS": str(self.place.progress(task, self.generation)),
            "UNISONO_GRACE": f"{self.options.grace:g}",
        }
        if self.options.devices_per_worker is not None and task.type != "ps":
            variables["UNISONO_DEVICES_PER_WORKER"] = str(self.options.devices_per_worker)
        if self.gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus_of(task))
        return variables

    def gpus_of(self, task: Task) -> tuple[str, ...]:
        """The GPUs of a task: JAX takes the memory of every GPU that it sees. Servers have none."""
        computing = [each for each in self.tasks if each.type != "ps"]
        return gpu_share(self.gpus, computing.index(task), len(computing)) if task in computing else ()


def tasks_of(options: LaunchOptions, workers: int) -> tuple[Task, ...]:
    """Return the tasks of a generation with so many workers, the chief first.

    >>> [str(t) for t in tasks_of(LaunchOptions(workers=2, ps=1, chief=True), 2)]
    ['chief:0', 'worker:0', 'worker:1', 'ps:0']
    """
    counts = {"chief": int(options.chief), "worker": workers, "ps": options.ps}
    counts["evaluator"] = int(options.evaluator)
    return tuple(Task(job, index) for job, count in counts.items() for index in range(count))


def gpu_share(gpus: Sequence[str], index: int, tasks: int) -> tuple[str, ...]:
    """Return the GPUs of one of `tasks` tasks: an even part, or one that others have, too.

    >>> gpu_share("0123", 1, 2), gpu_share("01", 2, 3), gpu_share("", 0, 2)
    (('2', '3'), ('0',), ())
    """
    if not gpus:
        return ()
    part = len(gpus) // tasks
    return tuple(gpus[index * part : (index + 1) * part]) if part else (gpus[index % len(gpus)],)


def make_plan(
    options: LaunchOptions,
    generation: int,
    workers: int,
    ports: Sequence[int],
    place: RunPaths,
    gpus: tuple[str, ...] = (),
) -> LaunchPlan:
    """Return the plan of a generation; `ports` has one for each of `tasks_of(options, workers)`."""
    tasks = tasks_of(options, workers)
    addresses = {task: with_port(HOST, port) for task, port in zip(tasks, ports, strict=True)}
    return LaunchPlan(generation, addresses, place, options, gpus)


def tf_config(addresses: Mapping[Task, str], task: Task) -> str:
    """Return the TF_CONFIG of a task; the evaluator is not part of the cluster, as TensorFlow has it.

    >>> tf_config({Task("worker", 0): "127.0.0.1:2222"}, Task("worker", 0))
    '{"cluster": {"worker": ["127.0.0.1:2222"]}, "task": {"type": "worker", "index": 0}}'
    """
    cluster: dict[str, list[str]] = {}
    for each, address in addresses.items():
        if each.type != "evaluator":
            cluster.setdefault(each.type, []).append(address)
    return json.dumps({"cluster": cluster, "task": {"type": task.type, "index": task.index}})


def thread_share(cores: int, tasks: int) -> int:
    """Return how many threads each of `tasks` processes gets, at least one.

    >>> thread_share(8, 3), thread_share(2, 4)
    (2, 1)
    """
    return max(1, cores // tasks)


def base_environment(
    environ: Mapping[str, str], options: LaunchOptions, tasks: int, cores: int, place: RunPaths
) -> dict[str, str]:
    """Return what every task and every spare of a launch starts with.

    What the user has set stays, but for the variables of a cluster: they come with the task.

    Args:
        environ: the launcher's environment.
        options: what was asked for.
        tasks: how many processes share the machine.
        cores: how many cores there are.
        place: the launch's files.
    """
    share = thread_share(cores, tasks)
    kept = {
        name: value
        for name, value in environ.items()
        if name not in CLUSTER_VARIABLES and not name.startswith("UNISONO_")
    }
    ours = dict.fromkeys(_POOLS, str(share))
    # XLA's pool on CPU hangs below two threads per device, which collectives hold while they wait.
    ours["PJRT_NPROC"] = str(max(share, 2 * (options.devices_per_worker or 1)))
    ours["PYTHONUNBUFFERED"] = "1"
    # After that of a launch around this one, which ends this one's processes, too.
    ours[MARK] = "/".join(filter(None, [environ.get(MARK), secrets.token_hex(8)]))
    if options.restarts:
        ours["JAX_COMPILATION_CACHE_DIR"] = str(place.compilation_cache)
        # A second's, by default: most models of tests and tutorials take less, several times.
        ours["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    return ours | kept


def shell_lines(
    plan: LaunchPlan, base: Mapping[str, str], inherited: Mapping[str, str], program: UserProgram
) -> str:
    """Return, for each task, lines that start it in a shell of its own.

    Files of the launch are left out: without a launcher nobody makes or reads them.
    """
    common = {name: value for name, value in base.items() if inherited.get(name) != value}
    blocks = []
    for task in plan.tasks:
        every = common | plan.environment(task)
        variables = {n: v for n, v in every.items() if not v.startswith(str(plan.place.root))}
        lines = [f"# {task}"]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in sorted(variables.items())]
        command = ["python", *(["-m"] if program.is_module else []), program.target, *program.args]
        blocks.append("\n".join([*lines, shlex.join(command)]))
    return "\n\n".join(blocks) + "\n"


def start_up_block(plan: LaunchPlan, base: Mapping[str, str], program: UserProgram) -> str:
    """Return what will run where, for people."""
    options = plan.options
    devices = options.devices_per_worker
    rows = []
    for task, address in plan.addresses.items():
        gpus = ",".join(plan.gpus_of(task))
        own = f"{devices} virtual device{'s' * (devices > 1)}" if devices and task.type != "ps" else ""
        own = own or (f"GPU {gpus}" if gpus else "")
        shown = "shown here" if task == plan.shown else ""
        rows.append([str(task), address, own, plan.place.log(task).name, shown])
    count = len(plan.tasks)
    head = f"unisono: {count} tasks run" if count > 1 else "unisono: 1 task runs"
    head = f"{head} {program.text}"
    threads = base.get("OMP_NUM_THREADS", "?")
    foot = [
        f"  threads per task: {threads}; logs and history: {plan.place.root}",
        f"  {_policy_text(options, len(plan.tasks))}",
    ]
    return "\n".join([head, *_table(rows), *foot])


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns below each other; those without any entry are left out."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    wide = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width] for row in rows]
    return ["  " + "  ".join(cells).rstrip() for cells in wide]


def _policy_text(options: LaunchOptions, tasks: int) -> str:
    if not options.restarts:
        return "no restarts: the first failure ends all (--max-restarts allows some)"
    restarts = f"{options.restarts} restart{'s' * (options.restarts != 1)}"
    text = f"at most {restarts} in {options.window / 60:g} minutes"
    spares = options.spare_count(tasks)
    text += f", {spares} warm spare{'s' * (spares != 1)}"
    if options.elastic:
        text += f", {options.elastic[0]} to {options.elastic[1]} workers"
    return text
