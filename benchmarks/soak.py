"""Random jobs and random faults, as long as wanted: each job must end as if nothing had happened.

    python benchmarks/soak.py --minutes 3                 # what CI runs
    python benchmarks/soak.py --minutes 480 --seed 10000  # a night
    python benchmarks/soak.py --seed 17 --runs 1          # one plan again
    python benchmarks/soak.py --only workers --minutes 5  # one kind of job

A plan is drawn from its seed: a kind of job, and four to eight faults (`soaking/plans.py`). A job trains with
`fit` and backups, and its weights are compared with those of one device after each step; or it counts updates
on parameter servers, each of which must be applied once. It may end with an error that names the cause, and
is then started again. Wrong numbers, ends without a clear cause, jobs that hang, and processes, files,
descriptors and memory that are left or gathered are failures, printed with the seed and what all wrote.

Before the jobs some random models and steps are trained on virtual devices, each compared with one device
(`tests/random_models`), with other seeds in each run.

Most processes are forked from one that has imported everything (`soaking/forks.py`), a tenth of the jobs
start as users start them. With root the faults happen in namespaces, and nothing outside is touched.
"""

import argparse
import collections
import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from soaking import faults, forks, jobs, plans, training, watch
from tests.hosts import Hosts, why_not

#: Bytes of the disk that a job fills.
DISK = 48 << 20
#: Steps of the longest plan.
STEPS = 8 * 30 + 25 + plans.PATIENCE + plans.REST + training.EPOCH


def in_namespaces():
    """Run this program again, with a network and mounts of its own, where that is possible."""
    if os.environ.get("UNISONO_SOAK") or os.geteuid() or not shutil.which("unshare"):
        return
    os.environ["UNISONO_SOAK"] = "1"
    # What tasks of this user leave there is theirs, then.
    lines = ["set -e", "ip link set lo up"]
    for folder in watch.SHARED:
        lines += [f"mkdir -m 700 -p {folder}", f"mount -t tmpfs -o mode=700 soak {folder}"]
    script = "\n".join([*lines, 'exec "$@"'])
    command = ["unshare", "--net", "--mount", "sh", "-c", script, "soak", sys.executable, *sys.orig_argv[1:]]
    os.execvp(command[0], command)


class Expected:
    """What one device computes, by kind of job.

    Args:
        folder: for the files.
    """

    def __init__(self, folder):
        self._folder = folder

    def of(self, job):
        """The file of a kind of job."""
        program = plans.JOBS[job].program
        kind = program if program in training.TABLE else "others"
        path = self._folder / f"{kind}.npz"
        if program != "counts" and not path.exists():
            epochs = -(-STEPS // training.EPOCH)
            log = self._folder / f"{kind}.log"
            pid = forks.fork(lambda: training.train_alone(kind, epochs, path), log)
            if os.waitpid(pid, 0)[1]:
                raise SystemExit(log.read_text())
        return path


class Table:
    """What has happened so far."""

    def __init__(self):
        self.fired, self.passed, self.failed = (collections.defaultdict(list) for _ in range(3))
        self.seconds, self.ends = 0.0, 0

    def add(self, run, seconds, error):
        """Count a run."""
        self.seconds += seconds
        self.ends += len(run.ends)
        for kind in {fault.kind for fault in run.plan.faults}:
            (self.failed if error else self.passed)[run.plan.job, kind].append(run.plan.seed)
        for fault in run.plan.faults[: run.fired]:
            self.fired[run.plan.job, fault.kind].append(run.plan.seed)

    def __str__(self):
        lines = [
            "| job          | fault   | runs | faults fired | passed | failed | seeds that failed",
            "|--------------|---------|------|--------------|--------|--------|------------------",
        ]
        for job, kind in sorted({*self.passed, *self.failed}):
            key = job, kind
            counts = len(self.fired[key]), len(self.passed[key]), len(self.failed[key])
            runs, seeds = counts[1] + counts[2], " ".join(map(str, self.failed[key]))
            cells = f"{runs:4} | {counts[0]:12} | {counts[1]:6} | {counts[2]:6} | {seeds}"
            lines.append(f"| {job:12} | {kind:7} | {cells}")
        every = sum(map(len, self.fired.values()))
        failed = {seed for seeds in self.failed.values() for seed in seeds}
        runs = {seed for seeds in [*self.passed.values(), *self.failed.values()] for seed in seeds}
        rate = 60 * every / max(self.seconds, 1.0)
        lines.append(
            f"{len(runs)} runs, {every} faults ({rate:.1f} a minute), {self.ends} ends with a clear error, "
            f"{len(failed)} runs failed"
        )
        return "\n".join(lines)


def carry_out(plan, root, expected, hosts, table):
    """Run a plan; return what went wrong, None where all went well."""
    began, error = time.monotonic(), None
    run = jobs.Run(plan, root / f"seed-{plan.seed}", root / "disk" / f"seed-{plan.seed}", expected, hosts)
    try:
        run.carry_out()
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
        print(f"seed {plan.seed}: {plan}\n{run.report()}", flush=True)
        print(f"seed {plan.seed} FAILED: {error}", flush=True)
        print(f"again: python benchmarks/soak.py --seed {plan.seed} --runs 1", flush=True)
    finally:
        run.end()
    seconds = time.monotonic() - began
    table.add(run, seconds, error)
    if not error:
        ends = f", {len(run.ends)} ends with a clear error" * bool(run.ends)
        print(f"seed {plan.seed}: {plan}: exact, {seconds:.1f} s{ends}", flush=True)
        shutil.rmtree(run.folder)
    return error


def random_models(options):
    """Check some random models and steps; return whether all are as on one device, or say why not."""
    first = random.SystemRandom().randrange(1_000_000)
    command = [sys.executable, "-m", "tests.random_models", str(first), str(first + options.models)]
    done = subprocess.run(
        command, check=False, cwd=HERE.parent, capture_output=True, text=True, timeout=60 * options.models
    )
    print(done.stdout.splitlines()[-1] if not done.returncode else done.stdout + done.stderr, flush=True)
    if done.returncode:
        print(f"random models FAILED. Again: python {' '.join(command[1:])}", flush=True)
    return not done.returncode


def soak(options, root):
    """Run plans until the time is over; return whether all went well."""
    for name in ("disk", "tmp"):
        (root / name).mkdir()
    # Also of all tasks: what they leave there is theirs.
    os.environ["TMPDIR"] = tempfile.tempdir = str(root / "tmp")
    if os.environ.get("UNISONO_SOAK"):
        disk = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "soak", str(root / "disk")]
        subprocess.run(disk, check=True, timeout=30)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(root / "compiled")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    watch.adopt_orphans()
    forks.import_all()
    missing = faults.missing(root / "disk")
    for kind, reason in missing.items():
        print(f"no faults of the kind {kind}: {reason}", flush=True)
    expected, table = Expected(root), Table()
    names = options.only.split(",") if options.only else list(plans.JOBS)
    if reason := why_not() if os.environ.get("UNISONO_SOAK") else "needs root":
        left_out = [name for name in names if plans.JOBS[name].hosts > 1]
        print(f"no jobs of the kind {', '.join(left_out)}: {reason}", flush=True)
        names = [name for name in names if name not in left_out]
    seed, runs, deadline = options.seed, 0, time.monotonic() + 60 * options.minutes
    well = random_models(options) if options.models and not options.runs else True
    while (runs < options.runs) if options.runs else (time.monotonic() < deadline):
        plan = plans.random_plan(seed, names, missing)
        seed += 1
        if plan is not None:
            runs += 1
            count = plans.JOBS[plan.job].hosts
            with Hosts(count) if count > 1 else contextlib.nullcontext() as hosts:
                well &= carry_out(plan, root, expected.of(plan.job), hosts, table) is None
    print(table, flush=True)
    return well


def main():
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=3.0, help="no new job begins after these")
    parser.add_argument("--seed", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--runs", type=int, default=0, help="this many jobs, however long they take")
    parser.add_argument(
        "--models", type=int, default=8, help="so many random models and steps before the jobs"
    )
    parser.add_argument("--only", default="", help=f"kinds of jobs: {','.join(plans.JOBS)}")
    options = parser.parse_args()
    in_namespaces()
    os.environ.setdefault("KERAS_BACKEND", "jax")
    # Not a TemporaryDirectory: forked processes would remove it when they end.
    root = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        well = soak(options, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    sys.exit(not well)


if __name__ == "__main__":
    main()
