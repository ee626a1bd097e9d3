"""Which branches of the project's packages the schedules reach, by coverage.py.

A branch is a pair of lines of which one may follow the other, such as the two ways out of an `if`. What by
nature is no protocol is not counted: `_no_protocol` says what, and why.

Tests: tests/unit/test_simulation.py.
"""

import concurrent.futures
import dataclasses
import json
import multiprocessing
import tempfile
import time
from pathlib import Path

from tests.simulation._no_protocol import lines_left_out

SOURCE = Path(__file__).parents[2] / "src" / "unisono"
#: The packages that have protocols: a row has the modules of one folder, not those below it.
PACKAGES = (
    "cluster",
    "cluster/liveness",
    "cluster/rendezvous",
    "rpc",
    "rpc/_transport",
    "parameter_server/chief",
    "parameter_server/server",
    "parameter_server/state",
    "parameter_server/worker",
    "launcher",
    "standalone",
    "checkpoint/commits",
)

#: Modules of these packages that are no protocol: none decides about a message, a file or a failure.
LEFT_OUT = {
    "cluster/_batch_fingerprint": "a hash of what a batch is",
    "cluster/_jax_internals": "JAX's private names",
    "cluster/_lone_task": "the texts of warnings, by variables of the environment",
    "cluster/_own_address": "which addresses the platform has",
    "cluster/_program_digest": "a hash of a program's files",
    "rpc/_ports": "reads which ports may be used",
    "cluster/liveness/_task_events": "lines of a log, for people",
    "cluster/rendezvous/_mismatch": "the texts of errors",
    **dict.fromkeys(
        (
            "parameter_server/chief/_fit_callbacks",
            "parameter_server/chief/_partition",
            "parameter_server/chief/_placement",
            "parameter_server/chief/_plans",
            "parameter_server/chief/_remote_array",
            "parameter_server/worker/_batch_spec",
            "parameter_server/worker/_table_rows",
        ),
        "the layout of variables and batches, and callbacks of Keras",
    ),
    "parameter_server/server/_programs": "XLA's programs, which are a stub",
}


_SPAWN = multiprocessing.get_context("spawn")


@dataclasses.dataclass
class Reached:
    """What the schedules reach of one or several modules.

    Args:
        missing: branches that are not reached, as pairs of lines; a negative line is a function's end.
    """

    statements: int = 0
    run: int = 0
    branches: int = 0
    taken: int = 0
    missing: tuple[tuple[int, int], ...] = ()

    def join(self, other):
        """Add what is reached of other modules."""
        for field in ("statements", "run", "branches", "taken"):
            setattr(self, field, getattr(self, field) + getattr(other, field))

    def row(self):
        """The cells of a table."""
        statements = 100 * self.run / max(1, self.statements)
        branches = 100 * self.taken / max(1, self.branches)
        return f"{statements:.0f}% of {self.statements} | {branches:.0f}% of {self.branches}"


def names():
    """Return the names of all protocols, which are imported in another process: their imports count, too."""
    with concurrent.futures.ProcessPoolExecutor(1, _SPAWN) as pool:
        return pool.submit(_imported_names).result()


def _imported_names():
    from tests.simulation.protocols import protocols

    return list(protocols())


def measure(names, first, most, seconds, jobs):
    """Run schedules of protocols; return what they reach, by module below `src/unisono`, and which failed.

    Args:
        names: of the protocols.
        first: the first seed.
        most: schedules of each protocol at most.
        seconds: for each protocol.
    """
    import coverage

    with tempfile.TemporaryDirectory() as folder:
        jobs = min(jobs, len(names))
        tasks = [(names[i::jobs], first, most, seconds, f"{folder}/data.{i}") for i in range(jobs)]
        # Not forked: what runs when the project is imported is reached, too.
        with concurrent.futures.ProcessPoolExecutor(jobs, _SPAWN) as pool:
            failed = [name for each in pool.map(_run, tasks) for name in each]
        collected = coverage.Coverage(data_file=f"{folder}/all", **_OPTIONS)
        collected.combine([path for *_, path in tasks])
        own = [str(SOURCE / package / "*.py") for package in PACKAGES]
        collected.json_report(outfile=f"{folder}/report.json", include=own, ignore_errors=True)
        files = json.loads(Path(folder, "report.json").read_text())["files"]
    return {_module(path): _reached(_module(path), each) for path, each in files.items()}, failed


#: `branch` and greenlets; the project's own settings are for its tests.
_OPTIONS = {"branch": True, "concurrency": ["greenlet"], "config_file": False, "source": [str(SOURCE)]}


def _module(path):
    return str(Path(path).resolve().relative_to(SOURCE)).removesuffix(".py")


def _reached(module, each):
    out = lines_left_out(module, (SOURCE / f"{module}.py").read_text())

    def lines(name):
        return sum(line not in out for line in each[name])

    def branches(name):
        return [(begin, end) for begin, end in each[name] if begin not in out]

    run, missing = lines("executed_lines"), branches("missing_branches")
    taken = len(branches("executed_branches"))
    statements = run + lines("missing_lines")
    return Reached(statements, run, taken + len(missing), taken, tuple(missing))


def _run(task):
    """Run schedules of protocols in this process; return the names of those that failed."""
    import coverage

    names, first, most, seconds, path = task
    collected = coverage.Coverage(data_file=path, **_OPTIONS)
    collected.start()
    failed = []
    try:
        from tests.simulation._primitives import simulated
        from tests.simulation._runner import run_many
        from tests.simulation.protocols import protocols

        known = protocols()
        with simulated() as look:
            for name in names:
                seeds, until = range(first, first + most), time.monotonic() + seconds
                _, failures = run_many(known[name], seeds, look, until=until)
                failed += [name] * bool(failures)
    finally:
        collected.stop()
        collected.save()
    return failed


def table(found):
    """Return the packages as a table, without the modules that are no protocol."""
    lines = ["| package | statements | branches |", "|---|---|---|"]
    total = Reached()
    for package in PACKAGES:
        row = Reached()
        for module, each in found.items():
            if str(Path(module).parent) == package and module not in LEFT_OUT:
                row.join(each)
        total.join(row)
        lines.append(f"| `{package}` | {row.row()} |")
    lines.append(f"| all | {total.row()} |")
    return "\n".join(lines)


def missing(found, part):
    """Return the branches that are not reached, a line for each module of which the path has a part."""
    lines = []
    for module, each in sorted(found.items()):
        if part in module and str(Path(module).parent) in PACKAGES and module not in LEFT_OUT:
            pairs = ", ".join(f"{begin}-{'end' if end < 0 else end}" for begin, end in sorted(each.missing))
            lines.append(f"{module}: {each.row()}; not reached: {pairs or 'none'}")
    return "\n".join(lines)
