"""Compare the speed of this checkout with that of another revision, in turns, in one run.

    python benchmarks/against.py main                  # all rows but `import`: about half an hour
    python benchmarks/against.py v0.1.0 'ps-*' fit-2-devices
    python benchmarks/against.py HEAD~20 --quick

The other revision gets a work tree of its own in a temporary folder, which is removed at the end. Both sides
run in this environment: PYTHONPATH chooses the source. Both run the benchmarks of this checkout; where the
other source cannot run them, it runs its own.

In each round both sides do the same once, one after the other, and the next round begins with the other side.
A ratio compares the two values of a round; it is above 1 where this checkout is faster. The table has the
median of the ratios and the interval in which it lies with 95%, of wall time and of CPU time. Wall time gives
the verdict, or CPU time where wall time tells nothing. The exit code is 1 if a row is slower by more than 3%
for sure.
"""

import argparse
import contextlib
import dataclasses
import fnmatch
import functools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import _pairs
from _harness import CaseFailedError, Running
from _report import markdown
from _rows import Case

HERE = Path(__file__).resolve().parent
#: How often the processes of a row are started: one may be faster than another for as long as it lives.
STARTS = 3


@dataclasses.dataclass(frozen=True)
class Side:
    """A source and the benchmarks that run it.

    Args:
        checkout: whose `src` is imported.
        benchmarks: a folder.
    """

    checkout: Path
    benchmarks: Path

    @property
    def command(self):
        """The beginning of a command that runs a program with this source."""
        return ["env", f"PYTHONPATH={self.checkout / 'src'}", sys.executable]

    def own(self):
        """The same source with its own benchmarks."""
        return dataclasses.replace(self, benchmarks=self.checkout / "benchmarks")


@dataclasses.dataclass(frozen=True)
class Value:
    """What a side did in a round.

    Args:
        rate: how much in a second of wall time.
        cpu_rate: how much in a second of CPU time; None where that is not known.
    """

    rate: float
    cpu_rate: float | None


class Turns:
    """An action of processes that stay."""

    def __init__(self, case, action):
        self._case, self._action = case, action

    @contextlib.contextmanager
    def started(self, side):
        """Start the processes, let them warm up, and return what takes a turn."""
        with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder:
            running = Running(self._case, folder, command=[*side.command, str(side.benchmarks / "_serve.py")])
            try:
                running.first_step()
                running.turn(self._action)
                yield functools.partial(self._turn, running)
            finally:
                running.close()

    def _turn(self, running):
        told = running.turn(self._action)
        return Value(told["rows"] / told["seconds"], told["rows"] / told["cpu"])


class Start:
    """A program from its start to the end of its first step, with an empty compilation cache."""

    def __init__(self, case):
        self._case = case

    @contextlib.contextmanager
    def started(self, side):
        """Return a function that starts the program once."""
        yield functools.partial(self._turn, side)

    def _turn(self, side):
        with tempfile.TemporaryDirectory(prefix="unisono-bench-") as folder, cpu_of_children() as spent:
            command = [*side.command, str(side.benchmarks / "_serve.py")]
            running = Running(self._case, folder, Path(folder) / "cache", command)
            try:
                seconds = running.first_step()
            finally:
                running.close()
        return Value(1 / seconds, 1 / spent())


class Import:
    """`import unisono` in a new process: the quickest row, and what every program begins with."""

    @contextlib.contextmanager
    def started(self, side):
        """Let Python compile the source, and return a function that imports it once."""
        self._turn(side)
        yield functools.partial(self._turn, side)

    def _turn(self, side):
        with cpu_of_children() as spent:
            began = time.perf_counter()
            subprocess.run([*side.command, "-c", "import unisono"], check=True, cwd=side.checkout)
            seconds = time.perf_counter() - began
        return Value(1 / seconds, 1 / spent())


class Cluster:
    """Steps of a cluster with parameter servers, which is started for each turn."""

    def __init__(self, model):
        self._model = model

    @contextlib.contextmanager
    def started(self, side):
        """Return a function that starts the program once."""
        yield functools.partial(self._turn, side)

    def _turn(self, side):
        program = (
            "import json, sys; sys.path.insert(0, sys.argv[1]); import parameter_server as p; "
            "measured = p.measured('Unisono', sys.argv[2]) if hasattr(p, 'measured') else "
            "{'steps_per_second': p.steps_per_second('Unisono', sys.argv[2])}; print(json.dumps(measured))"
        )
        command = [*side.command, "-c", program, str(side.benchmarks), self._model]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise CaseFailedError(f"parameter servers, {self._model}\n{ended.stderr}")
        told = json.loads(ended.stdout.splitlines()[-1])
        cpu = told.get("cpu_per_step")
        return Value(told["steps_per_second"], 1 / cpu if cpu else None)


@dataclasses.dataclass(frozen=True)
class Row:
    """Something that both sides do.

    Args:
        what: for readers.
        work: has `started(side)`.
        rounds: how many, and with `--quick`.
        by_name_only: whether it is left out unless it is named.
    """

    what: str
    work: Turns | Start | Import | Cluster
    rounds: tuple[int, int] = (27, 9)
    by_name_only: bool = False


ROWS = {
    "fit-1-device": Row("fit, MLP, 1 device", Turns(Case("unisono", "mlp"), "fit")),
    "fit-2-devices": Row("fit, MLP, 2 devices", Turns(Case("unisono", "mlp", 2), "fit")),
    "callback-2-devices": Row(
        "fit, MLP, a callback sees batches, 2 devices", Turns(Case("unisono", "mlp", 2), "fit, callback")
    ),
    "cnn-2-devices": Row("fit, CNN, 2 devices", Turns(Case("unisono", "cnn", 2), "fit"), (15, 6)),
    "evaluate-2-devices": Row("evaluate, MLP, 2 devices", Turns(Case("unisono", "mlp", 2), "evaluate")),
    "predict-2-devices": Row("predict, MLP, 2 devices", Turns(Case("unisono", "mlp", 2), "predict")),
    "loop-2-devices": Row(
        "loop with GradientTape, MLP, 2 devices", Turns(Case("unisono loop", "mlp", 2), "loop")
    ),
    "ps-mlp": Row("parameter servers, MLP", Cluster("mlp"), (10, 6)),
    "ps-wide": Row("parameter servers, two layers of 4096", Cluster("wide"), (10, 6)),
    "start-1-device": Row("first step, MLP, 1 device, cold cache", Start(Case("unisono", "mlp")), (10, 6)),
    "import": Row("import unisono", Import(), (10, 6), by_name_only=True),
}


@contextlib.contextmanager
def cpu_of_children():
    """Return the CPU time of processes that are started and waited for in a block, once it has ended."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)

    def spent():
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        return now.ru_utime - before.ru_utime + now.ru_stime - before.ru_stime

    yield spent


@contextlib.contextmanager
def checked_out(revision):
    """Return a work tree of a revision, which is there for a block.

    Raises:
        SystemExit: there is no such revision.
    """

    def git(*arguments):
        return subprocess.run(
            ["git", "-C", str(HERE), *arguments], capture_output=True, text=True, check=False
        )

    with tempfile.TemporaryDirectory(prefix="unisono-against-") as folder:
        tree = Path(folder).resolve() / "tree"
        made = git("worktree", "add", "--detach", str(tree), revision)
        if made.returncode:
            sys.exit(f"against.py: git has no work tree of {revision!r}: {made.stderr.strip()}")
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))


def selected(names):
    """The rows of some names or patterns, in the table's order; all but those by name without any."""
    for name in names:
        if not fnmatch.filter(ROWS, name):
            sys.exit(f"against.py: a row must be one of {', '.join(ROWS)}, or a pattern. Received: {name!r}")
    return {
        key: row
        for key, row in ROWS.items()
        if any(fnmatch.fnmatch(key, name) for name in names) or not (names or row.by_name_only)
    }


def compare(row, rounds, new, old):
    """Let two sides take turns in a row; return the values of both."""
    found: tuple[list, list] = ([], [])
    starts = min(STARTS, rounds // 3) or 1
    for start in range(starts):
        with contextlib.ExitStack() as stack:
            turns = [stack.enter_context(row.work.started(side)) for side in (new, old)]
            for number in range(start, rounds, starts):
                for which in (0, 1) if number // starts % 2 else (1, 0):
                    found[which].append(turns[which]())
    return found


def with_benchmarks(compared: Callable, old: Side):
    """Call a comparison with this checkout's benchmarks for both; with the other's own where that fails."""
    try:
        return compared(old)
    except CaseFailedError as error:
        if old.own() == old:
            raise
        print(f"{str(error).splitlines()[0]}: the other side's own benchmarks are tried", file=sys.stderr)
        return compared(old.own())


def result(new, old):
    """The ratios of wall time and of CPU time, None where that is not known, and those that judge."""
    wall = _pairs.ratios([v.rate for v in new], [v.rate for v in old])
    cpu = None
    if all(v.cpu_rate for v in (*new, *old)):
        cpu = _pairs.ratios([v.cpu_rate for v in new], [v.cpu_rate for v in old])
    judging = cpu if cpu is not None and wall.verdict == _pairs.NOT_TOLD else wall
    return wall, cpu, judging


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision", help="what this checkout is compared with")
    parser.add_argument("rows", nargs="*", help=f"names or patterns: {', '.join(ROWS)}")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--rounds", type=int, help="how often each side takes its turn in a row")
    return parser.parse_args()


def main():
    options = arguments()
    rows = selected(options.rows)
    lines, lost = [["row", "measured", "wall time", "CPU time", "verdict"]], []
    with checked_out(options.revision) as tree:
        new, old = Side(HERE.parent, HERE), Side(tree, HERE)
        for name, row in rows.items():
            rounds = options.rounds or row.rounds[options.quick]
            try:
                values = with_benchmarks(functools.partial(compare, row, rounds, new), old)
            except CaseFailedError as error:
                print(error, file=sys.stderr)
                lines.append([f"`{name}`", row.what, "", "", "failed"])
                lost.append(name)
                continue
            wall, cpu, judging = result(*values)
            verdict = judging.verdict + (" (CPU time)" if judging is cpu and judging is not wall else "")
            lines.append([f"`{name}`", row.what, str(wall), str(cpu or ""), verdict])
            print(f"{name}: wall {wall}, CPU {cpu}: {verdict}", file=sys.stderr, flush=True)
            if judging.is_loss:
                lost.append(name)
    print(f"This checkout against {options.revision}, {os.cpu_count()} cores; above 1: this one is faster.\n")
    print(markdown(lines))
    if lost:
        sys.exit(f"\nSlower by more than {_pairs.ACCEPTED:.0%} for sure, or failed: {', '.join(lost)}")


if __name__ == "__main__":
    main()
