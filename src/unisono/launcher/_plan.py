"""The plan of one generation: each task's address, environment and files; pure."""

from __future__ import annotations

import dataclasses
import json
import secrets
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from unisono._backend import devices_asked_for
from unisono.cluster_resolver._spec import Task, with_port
from unisono.launcher._options import LaunchOptions, UserProgram
from unisono.rpc._transport._keys import FILE_VARIABLE

#: Tasks listen on loopback only: neither JAX's coordinator nor Gloo authenticates its peers.
HOST = "127.0.0.1"

#: Variables that describe a process' cluster: a task must not inherit the launcher's.
CLUSTER_VARIABLES = (
    "TF_CONFIG",
    "JAX_COORDINATOR_ADDRESS",
    "JAX_COORDINATOR_PORT",
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
    "JAX_LOCAL_DEVICE_IDS",
)

#: The variable that marks every process of a launch, including daemons that its tasks start: they inherit it.
MARK = "UNISONO_LAUNCH"

#: The launcher's variables for its tasks, which do not inherit an outer launch's.
OF_A_LAUNCH = (
    MARK,
    "UNISONO_CLUSTER_KEY",
    "UNISONO_CLUSTER_KEY_FILE",
    "UNISONO_DEVICES_PER_WORKER",
    "UNISONO_EVENTS",
    "UNISONO_FENCE",
    "UNISONO_FINISHED",
    "UNISONO_GENERATION",
    "UNISONO_GRACE",
    "UNISONO_PROGRESS",
    "UNISONO_PS_DIRECTORY",
)

#: The sizes of libraries' own thread pools, by default one thread per core of the machine in every task.
POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class RunPaths:
    """The files of a launch, all below one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        #: The number of the generation that may write.
        self.fence = root / "fence"
        #: The directory in which parameter servers keep their state.
        self.servers = root / "servers"
        #: Exists once all training tasks have succeeded: the evaluator finishes then.
        self.finished = root / "finished"
        #: The program, its tasks and the restarts that are allowed.
        self.launch = root / "launch.json"
        #: Events, one JSON object per line.
        self.history = root / "history.jsonl"
        #: In it others write how many workers there is room for.
        self.capacity = root / "capacity"
        #: The secret of the cluster, which each launch makes anew; its restarts keep it.
        self.cluster_key = root / "cluster_key"
        #: JAX's compilation cache, which the next generation reuses.
        self.compilation_cache = root / "compilation_cache"

    def log(self, task: Task) -> Path:
        """Return the log of a task's output, over all generations."""
        return self.root / f"{task.type}-{task.index}.log"

    def error(self, task: Task, generation: int) -> Path:
        """Return the file for the exception that ended a task."""
        return self.root / "errors" / f"g{generation}-{task.type}-{task.index}.json"

    def progress(self, task: Task, generation: int) -> Path:
        """Return the file in which a task writes its last step."""
        return self.root / "progress" / f"g{generation}-{task.type}-{task.index}"

    def events(self, task: Task) -> Path:
        """Return the file of what a task did, over all generations, one JSON object per line."""
        return self.root / "events" / f"{task.type}-{task.index}.jsonl"


@dataclasses.dataclass(frozen=True)
class LaunchPlan:
    """One generation of tasks.

    Args:
        addresses: each task's `"host:port"`, in the order of the start-up block.
        gpus: the values for CUDA_VISIBLE_DEVICES, to be divided among the tasks; empty without GPUs.
    """

    generation: int
    addresses: Mapping[Task, str]
    paths: RunPaths
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

    @property
    def has_servers(self) -> bool:
        """True if some tasks are parameter servers, whose messages need a key."""
        return any(task.type == "ps" for task in self.tasks)

    def environment(self, task: Task) -> dict[str, str]:
        """Return the variables that are particular to a task."""
        variables = {
            "TF_CONFIG": tf_config(self.addresses, task),
            "UNISONO_GENERATION": str(self.generation),
            "UNISONO_FENCE": str(self.paths.fence),
            "UNISONO_FINISHED": str(self.paths.finished),
            "UNISONO_EVENTS": str(self.paths.events(task)),
            "UNISONO_PROGRESS": str(self.paths.progress(task, self.generation)),
            "UNISONO_GRACE": f"{self.options.grace:g}",
        }
        if task.type == "ps":
            variables["UNISONO_PS_DIRECTORY"] = str(self.paths.servers)
        if self.options.devices_per_worker is not None and task.type != "ps":
            variables["UNISONO_DEVICES_PER_WORKER"] = str(self.options.devices_per_worker)
        if self.options.interface is not None:
            variables["UNISONO_INTERFACE"] = self.options.interface
        if self.has_servers:
            variables[FILE_VARIABLE] = str(self.paths.cluster_key)
        if self.gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus_of(task))
        return variables

    def gpus_of(self, task: Task) -> tuple[str, ...]:
        """Return the GPUs of a task; parameter servers have none.

        They are divided, because JAX preallocates memory on every GPU that it sees.
        """
        return gpus_of(task, self.gpus, self.tasks)


def tasks_of(options: LaunchOptions, workers: int) -> tuple[Task, ...]:
    """Return the tasks of a generation with `workers` workers, the chief first.

    >>> [str(t) for t in tasks_of(LaunchOptions(workers=2, ps=1, chief=True), 2)]
    ['chief:0', 'worker:0', 'worker:1', 'ps:0']
    """
    counts = {"chief": int(options.chief), "worker": workers, "ps": options.ps}
    counts["evaluator"] = int(options.evaluator)
    return tuple(Task(job, index) for job, count in counts.items() for index in range(count))


def gpus_of(task: Task, gpus: Sequence[str], beside: Sequence[Task]) -> tuple[str, ...]:
    """Return the GPUs of a task: an even share, or a shared GPU where there are too few; none for servers.

    >>> tasks = [Task("worker", 0), Task("worker", 1), Task("ps", 0)]
    >>> [gpus_of(task, "0123", tasks) for task in tasks], gpus_of(tasks[1], "0", tasks)
    ([('0', '1'), ('2', '3'), ()], ('0',))
    """
    computing = [each for each in beside if each.type != "ps"]
    if not gpus or task not in computing:
        return ()
    index, part = computing.index(task), len(gpus) // len(computing)
    return tuple(gpus[index * part : (index + 1) * part]) if part else (gpus[index % len(gpus)],)


def make_plan(
    options: LaunchOptions,
    generation: int,
    workers: int,
    ports: Sequence[int],
    paths: RunPaths,
    gpus: tuple[str, ...] = (),
) -> LaunchPlan:
    """Return the plan of a generation; `ports` has one for each of `tasks_of(options, workers)`."""
    tasks = tasks_of(options, workers)
    addresses = {task: with_port(HOST, port) for task, port in zip(tasks, ports, strict=True)}
    return LaunchPlan(generation, addresses, paths, options, gpus)


def tf_config(addresses: Mapping[Task, str], task: Task) -> str:
    """Return the TF_CONFIG of a task; as in TensorFlow, the evaluator is not part of the cluster.

    >>> tf_config({Task("worker", 0): "127.0.0.1:2222"}, Task("worker", 0))
    '{"cluster": {"worker": ["127.0.0.1:2222"]}, "task": {"type": "worker", "index": 0}}'
    """
    cluster: dict[str, list[str]] = {}
    for each, address in addresses.items():
        if each.type != "evaluator":
            cluster.setdefault(each.type, []).append(address)
    return json.dumps({"cluster": cluster, "task": {"type": task.type, "index": task.index}})


def thread_share(cores: int, tasks: int) -> int:
    """Return the number of threads for each of `tasks` processes, at least one.

    >>> thread_share(8, 3), thread_share(2, 4)
    (2, 1)
    """
    return max(1, cores // tasks)


#: For parameter servers and their workers, which allocate and copy whole models at each step. Copies of 4 MB
#: or more pass the caches by: the C library's own limit is a part of the largest cache, 190 MB on a virtual
#: machine of a large server, where a copy of 80 MB took 12 ms, and takes 6. Memory is kept up to 256 MB,
#: where threads of XLA find it: with 20 million parameters a step of two workers and a server took 162 ms of
#: CPU time in all processes, and takes 149; a worker has 950 MB instead of 840 (2 cores, glibc 2.36,
#: 2026-11-22).
_OF_LARGE_ARRAYS = (
    ":glibc.cpu.x86_non_temporal_threshold=0x400000"
    ":glibc.malloc.mmap_threshold=0x10000000:glibc.malloc.trim_threshold=0x10000000:glibc.malloc.arena_max=1"
)


#: The part of a GPU's memory that JAX takes when it starts, the variable that changes it, and how the names
#: of all variables begin that do: JAX rejects two names for the same.
_OF_A_GPU, _FRACTION = 0.75, "XLA_CLIENT_MEM_FRACTION"
_MEMORY_OF_JAX = ("XLA_CLIENT_", "XLA_PYTHON_CLIENT_")


def base_environment(
    environ: Mapping[str, str],
    options: LaunchOptions,
    tasks: int,
    cores: int,
    paths: RunPaths,
    gpus: int = 0,
) -> dict[str, str]:
    """Return the environment that every task and every spare of a launch starts with.

    The user's variables win, except for a cluster's or a launch's, which are part of the task's job.
    """
    share = thread_share(cores, tasks)
    kept = {name: value for name, value in environ.items() if name not in (*CLUSTER_VARIABLES, *OF_A_LAUNCH)}
    ours = dict.fromkeys(POOLS, str(share))
    # A collective blocks a thread of XLA's CPU pool while it waits for its peers, and the pool runs the
    # programs, too: with fewer than two threads per device, processes with two devices each hang (measured,
    # jaxlib 0.10.2).
    # One device per task would do with one thread. With it a transformer takes 374 ms of CPU time a step
    # instead of 457, an MLP 2.9 ms instead of 2.5, a ResNet the same (2 tasks, 2 cores, 2026-11-22).
    # Parameter servers and their workers have no collectives: with one thread, a step of an MLP takes 4.4 ms
    # of CPU time in all processes instead of 5.1 (2 workers, 1 server, 2 cores, 2026-11-22).
    least = options.devices_per_worker or devices_asked_for(environ)
    ours["PJRT_NPROC"] = str(max(share, least if options.ps and least == 1 else 2 * least))
    # XLA takes the working memory of each program from the system anew. In huge pages it has 512 times fewer
    # page faults: a transformer's step of two replicas took 447 ms instead of 520, in the same memory (2
    # cores, glibc 2.36, 2026-11-22). Other C libraries ignore it.
    ours["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    if options.ps:
        ours["GLIBC_TUNABLES"] += _OF_LARGE_ARRAYS
    sharing = -(-(tasks - options.ps) // gpus) if gpus else 1
    if sharing > 1 and not any(name.startswith(_MEMORY_OF_JAX) for name in environ):
        # The second process on a GPU would find no memory.
        ours[_FRACTION] = f"{_OF_A_GPU / sharing:.2f}"
    ours["PYTHONUNBUFFERED"] = "1"
    # A nested launch appends its mark: the outer one then finds and ends the inner one's processes.
    ours[MARK] = "/".join(filter(None, [environ.get(MARK), secrets.token_hex(8)]))
    if options.restarts:
        ours["JAX_COMPILATION_CACHE_DIR"] = str(paths.compilation_cache)
        # JAX's default, one second, skips most programs of small models, of which there are several per
        # start.
        ours["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    return ours | kept


def shell_lines(
    plan: LaunchPlan, base: Mapping[str, str], inherited: Mapping[str, str], program: UserProgram
) -> str:
    """Return, for each task, the lines that start it in a shell of its own.

    Variables that name files of the launch are left out: only a launcher creates and reads those files.
    """
    common = {name: value for name, value in base.items() if inherited.get(name) != value}
    blocks = []
    for task in plan.tasks:
        every = common | plan.environment(task)
        variables = {n: v for n, v in every.items() if not v.startswith(str(plan.paths.root))}
        lines = [f"# {task}"]
        lines += [f"export {name}={shlex.quote(value)}" for name, value in sorted(variables.items())]
        command = ["python", *(["-m"] if program.is_module else []), program.target, *program.args]
        blocks.append("\n".join([*lines, shlex.join(command)]))
    return "\n\n".join(blocks) + "\n"


def start_up_block(plan: LaunchPlan, base: Mapping[str, str], program: UserProgram) -> str:
    """Return the block for the terminal that lists the tasks, their devices and their logs."""
    options = plan.options
    devices = options.devices_per_worker
    rows = []
    for task, address in plan.addresses.items():
        gpus = ",".join(plan.gpus_of(task))
        own = f"{devices} virtual device{'s' * (devices > 1)}" if devices and task.type != "ps" else ""
        own = own or (f"GPU {gpus}" if gpus else "")
        shown = "shown here" if task == plan.shown else ""
        rows.append([str(task), address, own, plan.paths.log(task).name, shown])
    count = len(plan.tasks)
    head = f"unisono: {count} tasks run" if count > 1 else "unisono: 1 task runs"
    head = f"{head} {program.text}"
    threads = base.get("OMP_NUM_THREADS", "?")
    foot = [
        f"  threads per task: {threads}; logs and history: {plan.paths.root}",
        f"  {_policy_text(options, len(plan.tasks))}",
    ]
    workers = sum(task.type in ("chief", "worker") for task in plan.tasks)
    if 0 < len(plan.gpus) < workers and not plan.has_servers:
        foot.append(
            "  workers share GPUs: MultiWorkerMirroredStrategy needs one for each, which NCCL demands"
        )
    return "\n".join([head, *_table(rows), *foot])


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows with aligned columns, without the columns that are empty."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    wide = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width] for row in rows]
    return ["  " + "  ".join(cells).rstrip() for cells in wide]


def _policy_text(options: LaunchOptions, tasks: int) -> str:
    if not options.restarts:
        return "no restarts: the first failure ends all tasks (--max-restarts allows some)"
    restarts = f"{options.restarts} restart{'s' * (options.restarts != 1)}"
    text = f"at most {restarts} in {options.window / 60:g} minutes"
    spares = options.spare_count(tasks)
    text += f", {spares} warm spare{'s' * (spares != 1)}"
    if options.restarts_tasks:
        text = f"a task that fails starts again, the others go on: {text}"
    if options.elastic:
        text += f", {options.elastic[0]} to {options.elastic[1]} workers"
    return text
