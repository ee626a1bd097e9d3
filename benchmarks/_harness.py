"""Start the processes of the suite, let them take turns, and keep what they measured.

All processes of one workload are started one after the other and stay: an idle one costs no time. Then they
take turns, an epoch each, over several rounds. So a busy moment of the machine meets all of them, and every
model is compiled once.
"""

import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import workloads
from _rows import FIRST_COLD, FIRST_WARM, PEAK, Point
from peers import NEEDS

from unisono.launcher._launch import cores
from unisono.launcher._options import LaunchOptions
from unisono.launcher._plan import RunPaths, base_environment, make_plan
from unisono.cluster_resolver._spec import Task

#: Seconds until the first step, and for one action, on however slow a machine.
START_LIMIT, TURN_LIMIT = 300, 180
#: Seconds for the end of a process before it is killed.
END_LIMIT = 10
#: Lines of a failed process that are shown.
TAIL = 15
#: What users of XLA on CPUs may have set, which would change what is measured.
CLEARED = ("PJRT_NPROC", "NPROC", "XLA_FLAGS", "TF_CONFIG", "JAX_COMPILATION_CACHE_DIR", "KERAS_BACKEND")


class Budget:
    """The time that a run may take.

    Args:
        seconds: from now on; None: as long as it takes.
        clock: tells seconds, for tests.
    """

    def __init__(self, seconds=None, clock=time.monotonic):
        self.seconds, self._clock = seconds, clock
        self._until = math.inf if seconds is None else clock() + seconds

    def left(self):
        """Seconds until the end; negative after it."""
        return self._until - self._clock()

    def reason(self):
        """The text that stands in place of a verdict."""
        return f"left out by the budget of {self.seconds:g} s"


class CaseFailedError(Exception):
    """A process of a case ended or did not answer in time; the message has the end of its output."""


def free_ports(count):
    """Ports of this machine that nothing listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def environment(case, rank, ports, cache, hosts=None):
    """The variables of a process: what its peer needs, and nothing that the user's shell has set."""
    env = {k: v for k, v in os.environ.items() if k not in CLEARED}
    env |= {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "1"}
    if cache:
        env["JAX_COMPILATION_CACHE_DIR"] = str(cache)
    if case.processes > 1 and case.peer.startswith("unisono"):
        env |= launched(env, rank, ports)
    elif case.processes > 1:
        env["OMP_NUM_THREADS"] = "1"  # as `torchrun` sets it
    if hosts is not None:
        env["GLOO_SOCKET_IFNAME"] = "eth0"
        for other, port in enumerate(ports):
            known = f"127.0.0.1:{port}"
            env["TF_CONFIG"] = env.get("TF_CONFIG", "").replace(known, f"{hosts.address(other)}:{port}")
    if (case.peer == "DataParallel" or "by hand" in case.peer) and case.devices > 1:
        # With fewer threads than two for each device they hang in a collective, and XLA aborts the process.
        env["PJRT_NPROC"] = str(max(os.cpu_count() or 1, 2 * case.devices))
    return env


def launched(env, rank, ports):
    """The variables that `unisono launch` gives a worker, without those that name files of the launch."""
    options, paths = LaunchOptions(workers=len(ports)), RunPaths(Path("/launch"))
    plan = make_plan(options, 0, len(ports), ports, paths)
    every = base_environment(env, options, len(ports), cores(), paths)
    every |= plan.environment(Task("worker", rank))
    return {name: value for name, value in every.items() if not value.startswith(str(paths.root))}


class Running:
    """The processes of a case, from their start to `close`.

    Args:
        case: what they run.
        folder: for their files and output.
        cache: JAX's compilation cache.
        command: the program that serves, for tests.
        hosts: `tests.hosts.Hosts`, one for each process; None for this machine.
    """

    def __init__(self, case, folder, cache=None, command=None, hosts=None):
        self.case, self._folder = case, Path(folder)
        ports = free_ports(case.processes)
        command = command or [sys.executable, str(Path(__file__).with_name("_serve.py"))]
        self._processes, self._buffers = [], []
        for rank in range(case.processes):
            given = dataclasses.asdict(case) | {"rank": rank, "port": ports[0], "folder": str(folder)}
            here = command
            if hosts is not None:
                here, given["host"] = hosts.command(rank, *command), hosts.address(0)
            with open(self._log(rank), "w") as log:
                self._processes.append(
                    subprocess.Popen(
                        [*here, json.dumps(given)],
                        env=environment(case, rank, ports, cache, hosts),
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        start_new_session=True,
                    )
                )
            self._buffers.append(b"")

    def first_step(self, left=math.inf):
        """Wait at most `left` seconds for the first step; return its seconds since the programs' start."""
        return self._answers(min(START_LIMIT, left))["seconds"]

    def turn(self, action, left=math.inf):
        """Do an action once, within `left` seconds; return what the slowest process measured."""
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):  # its end is reported with its output below
                process.stdin.write(f"{action}\n".encode())
                process.stdin.flush()
        return self._answers(min(TURN_LIMIT, left))

    def close(self):
        """End the processes."""
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(END_LIMIT)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            process.stdout.close()

    def _answers(self, limit):
        until = time.monotonic() + limit
        answers = [self._answer(rank, until) for rank in range(len(self._processes))]
        return max(answers, key=lambda answer: answer["seconds"])

    def _answer(self, rank, until):
        pipe = self._processes[rank].stdout
        while b"\n" not in self._buffers[rank]:
            left = until - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                raise CaseFailedError(f"{self.case}: no answer in time\n{self._tails()}")
            chunk = os.read(pipe.fileno(), 65536)
            if not chunk:
                code = self._processes[rank].wait()
                raise CaseFailedError(f"{self.case}: process {rank} ended with {code}\n{self._tails()}")
            self._buffers[rank] += chunk
        line, _, self._buffers[rank] = self._buffers[rank].partition(b"\n")
        return json.loads(line)

    def _log(self, rank):
        return self._folder / f"output-{rank}"

    def _tails(self):
        lines = []
        for rank in range(len(self._processes)):
            lines += [f"  [{rank}] {line}" for line in self._log(rank).read_text().splitlines()[-TAIL:]]
        return "\n".join(lines)


@dataclasses.dataclass
class Measured:
    """What was measured, and why the rest was not.

    Args:
        values: by point, one number for each round: rows per second, seconds or bytes.
        missing: by case, a reason.
    """

    values: dict
    missing: dict

    def append(self, case, measure, value):
        """Keep one value."""
        self.values.setdefault(Point(case, measure), []).append(value)


def read_files():
    """Import what all peers import once, so that no first step waits for the disk."""
    program = "import unisono, keras, jax"
    subprocess.run([sys.executable, "-c", program], env=dict(os.environ), check=True, timeout=START_LIMIT)


def points_of(rows):
    """All points of rows by workload and case, each once and in order."""
    found = {}
    for row in rows:
        for claim in row.claims:
            for point in (claim.ours, claim.theirs):
                cases = found.setdefault(point.case.workload, {})
                measures = cases.setdefault(point.case, [])
                if point.measure not in measures:
                    measures.append(point.measure)
    return found


def measure(rows, rounds, starts, tell=lambda text: None, running=Running, budget=None):
    """Measure the points of some rows, in the rows' order until the budget is spent.

    Args:
        rows: of `_rows.ROWS`.
        rounds: how often each action takes its turn, after one turn that does not count; None: as often as
            the workload says.
        starts: how often programs are started for the time of their first step.
        tell: is called with lines about the progress.
        running: starts the processes of a case, for tests.
        budget: a `Budget`; None: there is time for all.

    Returns:
        `Measured`.
    """
    measured, budget = Measured({}, {}), budget or Budget()
    if any(claim.ours.measure in (FIRST_COLD, FIRST_WARM) for row in rows for claim in row.claims):
        read_files()
    for workload, cases in points_of(rows).items():
        with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
            block = _Block(Path(folder), cases, measured, tell, running, budget)
            try:
                began = time.monotonic()
                tell(f"{workload}: {len(cases)} cases")
                block.start(starts)
                block.take_turns(rounds or workloads.workload(workload).rounds)
                tell(f"{workload}: {time.monotonic() - began:.0f} s")
            finally:
                block.close()
    return measured


class _Block:
    """The cases of one workload."""

    def __init__(self, folder, cases, measured, tell, running, budget):
        self._folder, self._cases, self._measured, self._tell = folder, cases, measured, tell
        self._running_class, self._budget = running, budget
        self._running = {}
        self._made = 0
        #: The longest start so far, by which the time of the next one is guessed.
        self._longest = 0.0

    def start(self, starts):
        """Start all cases, one after the other, and measure their first steps."""
        for case, measures in self._cases.items():
            package = NEEDS.get(case.peer)
            if package and importlib.util.find_spec(package) is None:
                self._measured.missing[case] = f"not measured: pip install {package}"
            elif self._budget.left() <= self._longest:
                self._measured.missing[case] = self._budget.reason()
            elif any(measure not in (FIRST_COLD, FIRST_WARM) for measure in measures):
                with self._failures(case):
                    self._running[case] = self._first_step(case, FIRST_COLD, self._cache(case, 0))
        for number in range(starts):
            for case, measures in self._cases.items():
                if case in self._measured.missing or self._budget.left() <= self._longest:
                    continue
                with self._failures(case):
                    cache = self._cache(case, number)
                    if cache and (number or case not in self._running):
                        self._first_step(case, FIRST_COLD, cache).close()
                    if FIRST_WARM in measures:
                        self._first_step(case, FIRST_WARM, cache).close()

    def take_turns(self, rounds):
        """Let all cases do all of their actions, in turns."""
        for case in list(self._running):
            for action in self._actions(case):
                with self._failures(case):
                    peak = self._running[case].turn(action, self._budget.left())["peak"]
                    if action == "fit":
                        self._measured.append(case, PEAK, peak)
                if case in self._measured.missing:
                    break
        for number in range(rounds):
            for case in list(self._running):
                for action in self._actions(case):
                    if case in self._running:
                        with self._failures(case, has_values=number > 0):
                            told = self._running[case].turn(action, self._budget.left())
                            self._measured.append(case, action, told["rows"] / told["seconds"])
            self._tell(f"  round {number + 1} of {rounds}")
            if self._budget.left() <= 0:
                return

    def close(self):
        """End all processes."""
        for running in self._running.values():
            running.close()

    def _actions(self, case):
        """What a case does in each round; `fit` first, so that its memory is that of `fit` alone."""
        actions = [m for m in self._cases[case] if m not in (FIRST_COLD, FIRST_WARM, PEAK)]
        if PEAK in self._cases[case] and "fit" not in actions:
            actions.append("fit")
        return sorted(actions, key=lambda action: action != "fit")

    def _cache(self, case, number):
        """A compilation cache for each start, where the first step is measured."""
        if not {FIRST_COLD, FIRST_WARM} & set(self._cases[case]):
            return None
        return self._folder / f"cache-{list(self._cases).index(case)}-{number}"

    def _first_step(self, case, measure, cache):
        self._made += 1
        folder = self._folder / str(self._made)
        folder.mkdir()
        running = self._running_class(case, folder, cache)
        began = time.monotonic()
        try:
            seconds = running.first_step(self._budget.left())
        except BaseException:
            running.close()
            raise
        self._longest = max(self._longest, time.monotonic() - began)
        self._tell(f"  {case}: {measure} {seconds:.1f} s")
        self._measured.append(case, measure, seconds)
        return running

    @contextlib.contextmanager
    def _failures(self, case, has_values=False):
        """Keep the reason why a case failed, end it, and go on; values of a spent budget count."""
        try:
            yield
        except CaseFailedError as error:
            if self._budget.left() > 0:
                self._tell(str(error))
                self._measured.missing[case] = f"failed: {str(error).splitlines()[0]}"
            elif not has_values:
                self._measured.missing[case] = self._budget.reason()
            if running := self._running.pop(case, None):
                running.close()
