"""Mistakes in what a launcher has of the system: processes, groups, pipes, locks, files."""

from tests.simulation._planted import Mistake

_PROCESSES = "unisono.launcher._processes"
_REAPER = "unisono.launcher._orphan_reaper"
_FILES = "unisono.launcher._run_files"
_GENERATION = "unisono.launcher._generation"
_TASK = "unisono.launcher._task"
_POLICY = "unisono.launcher._restart_policy"


def _mistake(name, place, old, new):
    return Mistake(name, place, old, new, "processes")


MISTAKES = (
    _mistake(
        "what a task has started runs on after its end",
        f"{_PROCESSES}:Process.poll",
        "self._signal_group(signal.SIGKILL)",
        "pass",
    ),
    _mistake("daemons of tasks are not swept", f"{_REAPER}:sweep", "os.kill(pid, signal.SIGKILL)", "pass"),
    _mistake("spares are swept as well", f"{_REAPER}:sweep", "*spared, os.getpid()", "os.getpid()"),
    _mistake("a killed launcher's daemons run on", f"{_REAPER}:main", "sweep(sys.argv[1])", "pass"),
    _mistake(
        "a killed launcher's groups are not known",
        f"{_REAPER}:remaining_groups",
        "groups.add(number)",
        "pass",
    ),
    _mistake(
        "the group of a task that has ended is watched on",
        f"{_PROCESSES}:Process.poll",
        "self._guard.remove(self.pid)",
        "pass",
    ),
    _mistake(
        "a task's end of a pipe stays open", f"{_PROCESSES}:KeptOutput.given", "os.close(self._write)", "pass"
    ),
    _mistake("a pipe of a task stays open", f"{_PROCESSES}:Process.poll", "self.kept.close()", "pass"),
    _mistake(
        "the input of a spare that has ended stays open",
        f"{_PROCESSES}:Process.poll",
        "self._popen.stdin.close()",
        "pass",
    ),
    _mistake(
        "a pipe of a task that could not be started stays open",
        f"{_PROCESSES}:Process.__init__",
        "self.kept.close()",
        "pass",
    ),
    _mistake(
        "a spare that has ended is an error",
        f"{_PROCESSES}:Process.assign",
        "except BrokenPipeError:",
        "except FileNotFoundError:",
    ),
    _mistake(
        "two launchers use a folder",
        f"{_FILES}:locked",
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
    ),
    _mistake(
        "a generation has the ports of the one before",
        f"{_PROCESSES}:free_ports",
        "if port not in avoid:",
        "if True:",
    ),
    _mistake(
        "an error is lost where the disk is full",
        f"{_TASK}:_write",
        '_keep(b"\\0" + json.dumps(short).encode() + b"\\0")',
        "pass",
    ),
    _mistake(
        "a full disk ends a launch",
        f"{_FILES}:BestEffort.attempt",
        "except OSError as error:",
        "except KeyError as error:",
    ),
    _mistake(
        "a generation begins within a line of the log",
        f"{_GENERATION}:TaskGroup._open_log",
        'b"" if file.read(1) == b"\\n" else b"\\n"',
        'b""',
    ),
    _mistake(
        "a task that hangs leaves no stacks",
        f"{_GENERATION}:TaskGroup._request_stack_trace",
        "process.send(signal.SIGUSR1)",
        "pass",
    ),
    _mistake(
        "who ignores SIGTERM is waited for",
        f"{_POLICY}:next_action",
        "now >= _kill_time(state, state.ending)",
        "False",
    ),
    _mistake(
        "the code of a program is not cut to eight bits",
        f"{_TASK}:exit_code",
        "error.code & 0xFF",
        "error.code",
    ),
    _mistake(
        "a signal's code is its number",
        f"{_POLICY}:shell_code",
        "128 - code if code < 0 else code",
        "abs(code)",
    ),
    _mistake(
        "only the beginning of a task's last words is kept",
        f"{_PROCESSES}:KeptOutput.read",
        "(self._bytes + part)[-_KEPT:]",
        "(self._bytes + part)[:100]",
    ),
    _mistake(
        "a task that could not be started counts as one that runs",
        f"{_GENERATION}:TaskGroup._start",
        "self._codes[task] = _NOT_STARTED",
        "pass",
    ),
    _mistake(
        "the history does not say the end",
        "unisono.launcher._supervisor:Supervisor.run",
        'self._history.write("quit", exit_code=outcome.code, detail=outcome.detail)',
        "pass",
    ),
)
