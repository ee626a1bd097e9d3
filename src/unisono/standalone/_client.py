"""The client of standalone servers: a function or a program on a cluster elsewhere.

Tests: tests/cluster/test_standalone.py, tests/unit/standalone/test_agent.py.
"""

from __future__ import annotations

import dataclasses
import functools
import getpass
import modulefinder
import os
import platform
import re
import secrets
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

from unisono._errors import ClusterError, InvalidArgumentError, InvalidTypeError
from unisono._system._environ import process_environ
from unisono.cluster_resolver._spec import ClusterSpec, Task
from unisono.launcher._function_call import (
    CALL_PREFIX,
    call_folder,
    pickle_call,
    raise_failure,
    read_results,
    result_path,
    time_limit,
)
from unisono.launcher._launch import make_run_paths, report, stop_signals
from unisono.launcher._options import LaunchOptions, UserProgram
from unisono.launcher._plan import LaunchPlan, RunPaths
from unisono.launcher._supervisor import Launch, Outcome, Supervisor
from unisono.launcher.terminal._console import BackgroundConsole, Console
from unisono.rpc._transport._client import RpcClient
from unisono.rpc._transport._keys import new_secret
from unisono.rpc._versions import installed
from unisono.standalone._link import Claim, ServerInfo, ServerLink
from unisono.standalone._protocol import CLIENT, LEASE_SECONDS, LIMIT, SERVER, read_standalone_keys
from unisono.standalone._remote_machines import RemoteMachines, RemoteProgram, ServerAccess, ServerTimeouts
from unisono.standalone._slots import Slots

#: Seconds between SIGTERM and SIGKILL where a function is called: a notebook waits for them.
_GRACE = 3.0
_CALL = "call"


@dataclasses.dataclass(frozen=True)
class ClusterRun:
    """How a client runs something on servers.

    Args:
        wait: seconds to wait for servers that train for another client.
        lease: seconds without a sign of the client after which servers end its training.
        server_timeout: seconds to wait for a server that was lost.

    Raises:
        InvalidArgumentError: when a number is out of range.
    """

    wait: float = 0.0
    lease: float = LEASE_SECONDS
    server_timeout: float = 300.0

    def __post_init__(self) -> None:
        for name, least in (("wait", 0.0), ("lease", 1.0), ("server_timeout", 0.0)):
            value = getattr(self, name)
            if not least <= value <= 86_400:
                raise InvalidArgumentError(
                    f"`{name}` must be from {least:g} to 86400 seconds. Received: {name}={value!r}."
                )


def run_on_cluster(
    cluster: Mapping[str, Any] | ClusterSpec, fn: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    """Call a function in a task on each server of a cluster, and return the value of the first task.

    Args:
        cluster: a dict from each job to the addresses of its servers.
        fn: the function; each task has its TF_CONFIG.
        args: its arguments, the same in each task.
        options: as of `call_on_cluster`.

    Returns:
        What the function has returned in the chief, or in worker 0.

    Raises:
        Exception: as `call_on_cluster`.
    """
    return call_on_cluster(cluster, fn, args, **options)[0]


def call_on_cluster(
    cluster: Mapping[str, Any] | ClusterSpec | Slots,
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    devices_per_worker: int | None = None,
    max_restarts: int | None = None,
    elastic: tuple[int, int] | None = None,
    timeout: float | None = None,
    access: ServerAccess | None = None,
    **run: float,
) -> list[Any]:
    """Call a function in a task on each server of a cluster, and return the values of the tasks that train.

    Output of all tasks is shown here, each line with its task's name.

    Args:
        cluster: a dict from each job to the addresses of its servers.
        devices_per_worker: the number of virtual CPU devices of each task; None for the function's choice.
        max_restarts: restarts after failures within ten minutes. None means none after an exception of the
            function, and ten after the loss of a server.
        elastic: the fewest and the most workers: after the loss of a server the others continue.
        timeout: seconds after which all tasks are killed; None for no limit.
        access: how the servers are reached; None for addresses at which `unisono serve` listens.
        run: `wait`, `lease` and `server_timeout`, see `ClusterRun`.

    Returns:
        The values of the chief and the workers; None for a worker of parameter servers' chief.

    Raises:
        InvalidTypeError: when `fn` is not callable.
        InvalidArgumentError: when the cluster cannot be used, or `fn` or `args` cannot be pickled.
        ServerBusyError: when a server trains for another client.
        ClusterError: when a server does not answer, or a task died without an exception.
        Exception: the exception of the function in the task that failed first.
    """
    if not callable(fn):
        raise InvalidTypeError(f"`fn` must be a function. Received: fn={fn!r}.")
    slots = Slots.of(cluster)
    options = slots.options(
        devices_per_worker=devices_per_worker,
        max_restarts=max_restarts,
        elastic=elastic,
        grace=_GRACE,
        stall_timeout=0.0,
    )
    program = _function_program(fn, tuple(args))
    screen = _CallConsole(sys.stderr, sys.stdout)
    name = getattr(fn, "__qualname__", type(fn).__name__)
    with call_folder() as root:
        paths = RunPaths(root)
        what = f"the function {name}"
        outcome = _run(
            slots, options, program, paths, screen, time_limit(timeout), ClusterRun(**run), what, access
        )
        if outcome.failure is not None or outcome.code:
            raise_failure(outcome, paths)
        return read_results(paths, outcome.plan)


class _CallConsole(Console):
    """A console that names no logs: a function's call removes its own at its end."""

    def say(self, text: str) -> None:
        """Show a message of the launcher."""
        super().say(re.sub(rf" \(log: [^)]*{CALL_PREFIX}[^)]*\)", "", text))


def _function_program(fn: Callable[..., Any], args: tuple[Any, ...]) -> RemoteProgram:
    def describe(paths: RunPaths, task: Task) -> dict[str, Any]:
        return {
            "kind": "call",
            "target": str(paths.root / _CALL),
            "program": str(paths.root / FOLDER),
            "result": str(result_path(paths, task)),
        }

    return RemoteProgram({_CALL: pickle_call(fn, args), **loaded_sources(sys.modules)}, describe)


def run_program_on_cluster(
    cluster: Mapping[str, Any] | Slots,
    program: UserProgram,
    run: ClusterRun,
    log_dir: Path | None,
    files: Sequence[Path] = (),
    access: ServerAccess | None = None,
    **options: Any,
) -> int:
    """Run a script or a module in a task on each server of a cluster; return the launcher's exit code.

    The script and the modules beside it that it imports travel with the job.

    Args:
        cluster: a dict from each job to the addresses of its servers.
        files: more files that travel with the job, relative to the current directory.
        access: how the servers are reached; None for addresses at which `unisono serve` listens.

    Raises:
        InvalidArgumentError: when the cluster, the script or a file cannot be used.
        ServerBusyError: when a server trains for another client.
        ClusterError: when a server does not answer.
    """
    slots = Slots.of(cluster)
    remote = _script_program(program, files)
    paths = make_run_paths(log_dir)
    screen = BackgroundConsole(Console(sys.stderr, sys.stdout))
    with closing(screen), stop_signals() as signals:
        what, local = program.text, slots.options(**options)
        outcome = _run(slots, local, remote, paths, screen, lambda: tuple(signals), run, what, access)
        if text := report(outcome):
            screen.say(text)
    return outcome.code


def _script_program(program: UserProgram, files: Sequence[Path]) -> RemoteProgram:
    brought = given_files(files)
    names = {path.as_posix(): f"{FOLDER}/{path.as_posix()}" for path in files}
    if not program.is_module:
        script = Path(program.target)
        brought |= script_sources(script)
        names[program.target] = f"{FOLDER}/{script.name}"
    else:
        for each in map(Path, program.args):
            # A script that a module runs, as in `-m unisono.tf train.py`.
            if each.suffix == ".py" and each.is_file():
                brought |= script_sources(each)
                names[str(each)] = f"{FOLDER}/{each.name}"

    def there(root: Path, text: str) -> str:
        return str(root / names[text]) if text in names else text

    def describe(paths: RunPaths, task: Task) -> dict[str, Any]:
        return {
            "kind": "module" if program.is_module else "script",
            "target": there(paths.root, program.target),
            "args": [there(paths.root, each) for each in program.args],
            "program": str(paths.root / FOLDER),
        }

    return RemoteProgram(brought, describe)


def _run(
    slots: Slots,
    options: LaunchOptions,
    program: RemoteProgram,
    paths: RunPaths,
    screen: Console | BackgroundConsole,
    stop_requests: Callable[[], tuple[int, ...]],
    run: ClusterRun,
    what: str,
    access: ServerAccess | None = None,
) -> Outcome:
    if options.ps:
        # The servers of a job have a key of their own: this cluster's stays with its servers.
        program = dataclasses.replace(
            program, files={**program.files, paths.cluster_key.name: new_secret().encode()}
        )
    claim = Claim(secrets.token_hex(16), f"{describe_client()}, {what}", run.lease)
    access = access or _serving()
    links: dict[str, ServerLink] = {}
    timeouts = ServerTimeouts(busy=run.wait, lost=run.server_timeout)
    machines = RemoteMachines(slots, links, options, paths, program, screen.say, timeouts, access)
    warned: set[str] = set()

    def prepare(link: ServerLink) -> None:
        check_versions(link.address, link.info, screen.say, warned)
        for name, data in program.files.items():
            link.put(name, data)

    with closing(machines):
        for address in slots.addresses:
            links[address] = ServerLink(address, access.connect(address), claim, prepare, machines.wake)
        machines.claim_all(stop_requests)
        start_text = functools.partial(_start_text, what=what)
        launch = Launch(
            options,
            paths,
            {},
            lambda plan, task: {},
            screen,
            stop_requests,
            start_text,
            machines=machines,
            title=what,
            servers=access.places,
        )
        return Supervisor(launch).run()


def _serving() -> ServerAccess:
    """Return how servers are reached that run `unisono serve` with the key of this environment."""
    keys = read_standalone_keys(process_environ(), CLIENT)
    return ServerAccess(lambda address: RpcClient(SERVER, address, keys, LIMIT))


def check_versions(address: str, info: ServerInfo, say: Callable[[str], None], warned: set[str]) -> None:
    """Compare the packages of a server with those here."""
    own = platform.python_version()
    if own.split(".")[:2] != info.python.split(".")[:2]:
        raise ClusterError(
            "Client and servers must have the same version of Python, as functions travel as its bytecode. "
            f"Received: {own} here and {info.python} at {address}."
        )
    ours = installed("cloudpickle")
    other = {n: (v, info.packages.get(n)) for n, v in ours.items() if info.packages.get(n) != v}
    if other and address not in warned:
        warned.add(address)
        texts = ", ".join(
            f"{name} {here} here and {there or 'none'} there" for name, (here, there) in other.items()
        )
        say(f"unisono: the server {address} has other versions: {texts}")


def describe_client() -> str:
    """Return how this process describes itself to others, as `me@laptop (process 123)`."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a container without a name for its user
        user = str(os.geteuid())
    return f"{user}@{platform.node()} (process {os.getpid()})"


def _start_text(plan: LaunchPlan, what: str) -> str:
    rows = [f"  {task}  {address}" for task, address in plan.addresses.items()]
    count = len(plan.tasks)
    head = f"unisono: {count} tasks run" if count > 1 else "unisono: 1 task runs"
    # The files of a function's call are removed with its end.
    foot = [] if plan.paths.root.name.startswith(CALL_PREFIX) else [f"  logs and history: {plan.paths.root}"]
    return "\n".join([f"{head} {what}", *rows, *foot])


#: Bytes of all sources together.
_MOST_BYTES = 64 << 20
#: The folder on a server.
FOLDER = "program"


def loaded_sources(modules: Mapping[str, ModuleType]) -> dict[str, bytes]:
    """Return the sources of the modules that are neither installed nor Python's own.

    Returns:
        The content of each file, by its name in the folder of the job's modules.
    """
    files = {}
    is_installed = _installed_folders()
    for name, module in list(modules.items()):
        path = _source_of(module)
        if path is None or name == "__main__" or is_installed(path.parent) or not _is_at_its_name(name, path):
            continue
        folder = name.replace(".", "/")
        target = f"{folder}/__init__.py" if path.name == "__init__.py" else f"{folder}.py"
        files[f"{FOLDER}/{target}"] = path.read_bytes()
    return _checked(files)


def _source_of(module: object) -> Path | None:
    file = getattr(module, "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py"):
        return None
    path = Path(file)
    return path if path.is_file() else None


def _is_at_its_name(name: str, path: Path) -> bool:
    # A module that was loaded by a path alone cannot be imported by its name.
    stem = path.parent.name if path.name == "__init__.py" else path.stem
    return name.rpartition(".")[2] == stem


def _installed_folders() -> Callable[[Path], bool]:
    """Return a function that says whether a folder belongs to Python or to what is installed.

    It looks at each folder once: with Keras and JAX imported there are 3084 modules in 425 folders: a
    launch spent 0.96 s of CPU time on all their paths, and spends 0.05 s now (2026-11-22).
    """
    own = Path(__file__).resolve().parents[1]
    places = {own, *(Path(p).resolve() for p in sysconfig.get_paths().values())}
    names = {"site-packages", "dist-packages"}

    @functools.cache
    def is_installed(folder: Path) -> bool:
        resolved = folder.resolve()
        return bool(names & {*folder.parts, *resolved.parts} or places & {resolved, *resolved.parents})

    return is_installed


def script_sources(script: Path) -> dict[str, bytes]:
    """Return a script and the modules beside it that it imports."""
    try:
        files = {f"{FOLDER}/{script.name}": script.read_bytes()}
    except OSError as error:
        raise InvalidArgumentError(
            f"The script must be a file that can be read. Received: {str(script)!r} ({error.strerror})."
        ) from None
    root = script.resolve().parent
    # It looks in this folder alone: other modules are installed on the servers.
    finder = modulefinder.ModuleFinder(path=[str(root)])
    try:
        finder.run_script(str(script))
    except SyntaxError:  # the task shows it
        return files
    for module in finder.modules.values():
        path = _source_of(module)
        if path is not None and root in path.resolve().parents:
            files[f"{FOLDER}/{path.resolve().relative_to(root).as_posix()}"] = path.read_bytes()
    return _checked(files)


def given_files(paths: Sequence[Path]) -> dict[str, bytes]:
    """Return files and folders that the user names, by their names relative to this process' directory."""
    files: dict[str, bytes] = {}
    for path in paths:
        is_readable = path.is_dir() or path.is_file()  # not a pipe, which would wait for a writer
        if path.is_absolute() or ".." in path.parts or not is_readable:
            raise InvalidArgumentError(
                "A file that travels with a job must be below the current directory. "
                f"Received: {str(path)!r}. Write a relative name, such as `--files data/vocabulary.txt`."
            )
        every = [p for p in sorted(path.rglob("*")) if p.is_file()] if path.is_dir() else [path]
        files |= {f"{FOLDER}/{each.as_posix()}": each.read_bytes() for each in every}
    return _checked(files)


def _checked(files: dict[str, bytes]) -> dict[str, bytes]:
    size = sum(map(len, files.values()))
    if size > _MOST_BYTES:
        largest = max(files, key=lambda name: len(files[name]))
        raise InvalidArgumentError(
            f"The files that travel with a job must have at most {_MOST_BYTES >> 20} MiB. Received: "
            f"{size >> 20} MiB in {len(files)} files, the largest {largest}. Put data where the servers "
            "find them."
        )
    return files
