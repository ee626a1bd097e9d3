"""How a cluster with parameter servers survives SIGKILL: a chief, two workers and two servers, launched.

    python benchmarks/ps_recovery.py               # one row for each kind of failure, about three minutes
    python benchmarks/ps_recovery.py --seeds 20    # random plans of two faults each instead
    python benchmarks/ps_recovery.py --log-cost    # steps/s of an MLP with the servers' log and without

Detected: from the kill until a task that needs the killed one misses it (of the chief: the launcher).
Steps go on: until the next step is acknowledged to the chief. Works again: until the restarted task has done
a step. Lost: updates that a worker has acknowledged and a server does not have. Twice: updates that a server
has applied more than once. All are counted from the tasks' own notes (`_ps_counts.py`), and compared with the
variables at the end. Processes start cold, without warm spares.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent))

from tests.ps_history import Event, HistoryError, check_history
from unisono.testing import FaultPlan

WORKERS, SERVERS = ["worker:0", "worker:1"], ["ps:0", "ps:1"]
#: Seconds after which a run counts as hung, on however busy a machine.
LIMIT = 400
#: Seconds for which a stopped task is stopped.
STOPPED = 1.0
#: What a task does to itself at the worst moment: before it computes, between its pushes to two servers, and
#: after an update was applied and before it is answered.
POINTS = {"before a step": WORKERS, "between pushes": WORKERS, "before the answer": SERVERS}
KINDS = ("kill worker", "kill ps", "kill all workers", "kill chief", "stop", *POINTS)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What goes wrong in a run.

    Args:
        faults: what the driver does to tasks when so many steps are acknowledged.
        points: task, place and count of what tasks do to themselves.
        staleness: the bound.
        environ: more variables for the tasks.
        types: of the strategy: `push_dtype` and `pull_dtype`.
    """

    faults: FaultPlan = dataclasses.field(default_factory=FaultPlan)
    points: tuple = ()
    staleness: int | None = None
    environ: tuple = ()
    types: tuple = (None, None)

    def __str__(self):
        texts = [f"{f.kind} {f.task} after step {f.step}" for f in self.faults.faults]
        texts += [f"kill {task} {point} {count}" for task, point, count in self.points]
        return f"{' and '.join(texts)} (max_staleness={self.staleness}, types={self.types})"


def random_plan(seed):
    """Two faults; each kind comes first in an eighth of the seeds."""
    draw = random.Random(seed)
    faults, points = FaultPlan(), []
    for number, kind in enumerate((KINDS[seed % len(KINDS)], draw.choice(KINDS))):
        step = draw.randrange(10, 60) + 60 * number
        if kind in POINTS:
            # Each worker makes half of the steps.
            count = step if kind == "before the answer" else step // 2
            points.append((draw.choice(POINTS[kind]), kind, count))
        elif kind == "stop":
            faults = faults.stop(draw.choice(WORKERS + SERVERS), step)
        else:
            every = {"kill worker": [draw.choice(WORKERS)], "kill ps": [draw.choice(SERVERS)]}
            for task in (every | {"kill all workers": WORKERS, "kill chief": ["chief:0"]})[kind]:
                faults = faults.kill(task, step)
    staleness = draw.choice([None, 0, 1, 3])
    types = tuple(draw.choice([None, "bfloat16"]) for _ in range(2))
    return Plan(faults, tuple(points), staleness, types=types)


def start(command, env, out):
    """Start a command; tests put a forked one in its place."""
    with out.open("w") as file:
        return subprocess.Popen(
            command, env=env, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )


class Run:
    """A cluster that runs, and what its tasks note.

    Args:
        folder: for all files.
        plan: what goes wrong.
    """

    def __init__(self, folder, plan):
        self.folder, self.plan, self.kills = folder, plan, []
        (folder / "saved").mkdir(parents=True)
        options = {"steps": 4000, "save_every": 40, "pause": 0.01}
        options |= {"staleness": plan.staleness, "points": plan.points}
        options["types"] = dict(zip(("push_dtype", "pull_dtype"), plan.types, strict=True))
        command = [sys.executable, "-m", "unisono", "launch", "-n", "2", "--ps", "2", "--chief"]
        command += ["--log-dir", str(folder / "log"), "--grace", "5"]
        command += [str(HERE / "_ps_counts.py"), str(folder), json.dumps(options)]
        self.process = start(command, {**os.environ, **dict(plan.environ)}, folder / "out")
        self.deadline = time.monotonic() + LIMIT

    def notes(self, task, *kinds):
        """What a task has noted, in order."""
        return read_lines(self.folder / f"{task.replace(':', '-')}.jsonl", kinds)

    def events(self, kind):
        """What the launcher has noted."""
        return [e for e in read_lines(self.folder / "log" / "history.jsonl") if e["event"] == kind]

    def pid(self, task):
        """The number of a task's newest process."""
        return [e["pid"] for e in self.events("started") if e["task"] == task][-1]

    def wait(self, condition, what):
        """Wait until a condition holds."""
        while not condition():
            if time.monotonic() > self.deadline or self.process.poll() is not None:
                raise TimeoutError(
                    f"The cluster has ended with {self.process.poll()}, or too late, before {what}"
                )
            time.sleep(0.005)

    def carry_out(self):
        """Let everything go wrong, and wait until all tasks work again."""
        for fault in sorted(self.plan.faults.faults, key=lambda f: f.step):
            self.wait(
                lambda f=fault: len(self.notes("chief:0", "acknowledge")) > f.step, f"step {fault.step}"
            )
            self.do(fault)
        for number, (task, point, _) in enumerate(self.plan.points):
            mark = self.folder / f"point-{number}"
            self.wait(mark.exists, f"{task} dies {point}")
            self.kills += [(task, n["at"]) for n in self.notes(task, "dies") if n["point"] == point]
        for task, at in self.kills:
            self.wait(lambda t=task, a=at: self.works_again(t, a), f"{task} works again")
        (self.folder / "finish").touch()
        self.wait((self.folder / "values.json").exists, "the end of the chief's program")
        if code := self.process.wait(max(1.0, self.deadline - time.monotonic())):
            raise AssertionError(f"The launcher ended with {code}")

    def do(self, fault):
        """Carry out a fault from outside."""
        pid = self.pid(fault.task)
        if fault.kind == "stop":
            os.kill(pid, signal.SIGSTOP)
            time.sleep(STOPPED)
            os.kill(pid, signal.SIGCONT)
            return
        # A task may just be starting after the fault before.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.kills.append((fault.task, time.time()))

    def works_again(self, task, at):
        """When a task that was killed has done something of use; None before that."""
        kinds = {
            "worker": ("process", "run"),
            "ps": ("recovered", "apply"),
            "chief": ("starts", "acknowledge"),
        }
        first, then = kinds[task.split(":")[0]]
        starts = [n["at"] for n in self.notes(task, first) if n["at"] > at]
        done = [n["at"] for n in self.notes(task, then) if starts and n["at"] > starts[0]]
        return done[0] if done else None

    def logs(self):
        """What all have written."""
        paths = [self.folder / "out", *sorted((self.folder / "log").glob("*.log"))]
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in paths)

    def end(self):
        """End the launcher, which ends its tasks."""
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


def read_lines(path, kinds=()):
    """The notes of a file, without a last line that is only half there."""
    if not path.exists():
        return []
    notes = map(json.loads, path.read_text().split("\n")[:-1])
    return [n for n in notes if not kinds or n["kind"] in kinds]


def applied_on(notes):
    """The closures that a server has applied, in order, of each chief; and those that it has lost again.

    An update after whose note the server was killed may be applied or not: its next start says it.
    """
    chiefs, lost, pending = [[]], [], None
    for note in notes:
        if note["kind"] == "reset":
            chiefs.append([])
        elif note["kind"] == "intent":
            pending = note["closure"]
        elif note["kind"] == "apply":
            chiefs[-1].append(note["closure"])
            pending = None
        elif note["kind"] == "recovered":
            applied, count = chiefs[-1], note["number"]
            if pending is not None and count == len(applied) + 1:
                applied.append(pending)
            lost += applied[count:]
            del applied[count:]
            pending = None
    return chiefs, lost


@dataclasses.dataclass
class Verdict:
    """What a history shows: updates lost and applied twice, the largest staleness, and the steps."""

    steps: int
    lost: int = 0
    #: How long before the first kill the oldest of these was applied.
    lost_seconds: float = 0.0
    twice: int = 0
    stalest: int = 0
    #: Batches of workers' own datasets that were used again, or passed over, on any server.
    repeated: int = 0
    skipped: int = 0

    def add_batches(self, used):
        """Count what a server says of the batches: each worker takes its own in order."""
        half = len(used) // 2
        for each in (used[:half], used[half:]):
            self.repeated += sum(max(0, int(v) - 1) for v in each)
            last = max((i for i, v in enumerate(each) if v), default=-1)
            self.skipped += sum(v == 0 for v in each[: last + 1])


def judge(run):
    """Check the notes of all tasks against each other and against the variables at the end.

    Raises:
        HistoryError: they contradict each other, or an update came too late.
    """
    fallen = {e["task"] for e in run.events("failed")} - {task for task, _ in run.kills}
    if fallen:
        raise HistoryError(f"{', '.join(sorted(fallen))} failed, and nothing was done to it")
    chief = run.notes("chief:0", "send", "acknowledge", "starts")
    index_of = {n["closure"]: n["index"] for n in chief if n["kind"] == "send"}
    begin = max(i for i, n in enumerate(chief) if n["kind"] == "starts")
    first = chief[begin]["index"]
    # What an earlier chief was told is in the checkpoint with which the last one has started, or runs again.
    acknowledged = {n["closure"] for n in chief[begin:] if n["kind"] == "acknowledge"}
    ran = {n["closure"] for task in WORKERS for n in run.notes(task, "run")}
    result = json.loads((run.folder / "values.json").read_text())
    done = result["done"]
    verdict = Verdict(steps=done)
    for task, values in zip(SERVERS, result["values"], strict=True):
        (count,), applied, pulled, batches = values
        chiefs, dropped = applied_on(run.notes(task))
        every = [closure for each in chiefs for closure in each]
        verdict.twice += len(every) - len(set(every)) + sum(max(0, int(v) - 1) for v in applied)
        missing = acknowledged - set(every)
        verdict.lost += len(missing)
        if not set(every) <= ran:
            raise HistoryError(f"{task} has applied closures that no worker has run: {set(every) - ran}")
        zeros = sum(v == 0 for v in applied[:done])
        if zeros != len({index_of[c] for c in missing}):
            raise HistoryError(f"{task} lacks {zeros} steps at the end, and {len(missing)} in its history")
        if count != done - zeros or any(applied[done:]):
            raise HistoryError(f"{task} has counted {count} of {done} steps, and lacks {zeros}")
        verdict.add_batches(batches)
        times = [n["at"] for n in run.notes(task, "apply") if n["closure"] in dropped]
        verdict.lost_seconds = max([verdict.lost_seconds, *(run.kills[0][1] - at for at in times)])
        if not dropped:
            verdict.stalest = max(verdict.stalest, staleness(run, chiefs[-1], index_of, pulled, first))
    if not verdict.lost and {*result["trained"]} != {done}:
        raise HistoryError(f"SGD has made {result['trained']} steps, not {done}")
    return verdict


def staleness(run, applied, index_of, pulled, first):
    """The largest staleness of the last chief's updates on a server, none above the bound."""
    events = [Event("schedule", closure) for closure in applied]
    pulls = {}
    for closure in applied:
        pulls.setdefault(int(pulled[index_of[closure]]) - first, []).append(closure)
    for position, closure in enumerate(applied):
        events += [Event("pull", each) for each in pulls.get(position, ())]
        events.append(Event("apply", closure, 0))
    return check_history(events, 1, run.plan.staleness)


def measured(run):
    """Seconds from the first kill until it was detected, steps went on, and all killed tasks worked again."""
    at = run.kills[0][1]
    tasks = {task for task, _ in run.kills}
    if "chief:0" in tasks:
        noticed = [e["time"] for e in run.events("ended") if e["time"] > at]
    else:
        others = ["chief:0", *WORKERS]
        noticed = [
            n["at"] for t in others for n in run.notes(t, "lost") if n["at"] > at and n["task"] in tasks
        ]
    next_step = min(n["at"] for n in run.notes("chief:0", "acknowledge") if n["at"] > min(noticed))
    again = max(run.works_again(task, killed) for task, killed in run.kills)
    return min(noticed) - at, next_step - at, again - at


def outcome(plan, show=measured):
    """Run a plan; return what `show` says, and the verdict."""
    with tempfile.TemporaryDirectory() as root:
        run = Run(Path(root) / "run", plan)
        try:
            run.carry_out()
            return show(run), judge(run)
        except BaseException:
            print(f"{plan}\n{run.logs()}", flush=True)
            raise
        finally:
            run.end()


def scenarios():
    """The rows of the table."""
    no_log = (("UNISONO_PS_LOG", "0"), ("UNISONO_PS_SNAPSHOT_SECONDS", "1"))
    return {
        "worker": Plan(FaultPlan().kill("worker:1", 60)),
        "all workers": Plan(FaultPlan().kill("worker:0", 60).kill("worker:1", 60)),
        "server, with its log": Plan(FaultPlan().kill("ps:0", 60)),
        "server, a snapshot every second": Plan(FaultPlan().kill("ps:0", 60), environ=no_log),
        "chief": Plan(FaultPlan().kill("chief:0", 60)),
    }


def print_table(only):
    """Print a row for each scenario whose name has `only` in it."""
    print("| SIGKILL of                      | detected | steps go on | works again | lost         | twice |")
    print("|---------------------------------|----------|-------------|-------------|--------------|-------|")
    for name, plan in scenarios().items():
        if only in name:
            times, verdict = outcome(plan)
            cells = "{:6.2f} s | {:9.2f} s | {:9.2f} s".format(*times)
            lost = f"{verdict.lost}, of {verdict.lost_seconds:.1f} s" if verdict.lost else "0"
            print(f"| {name:31} | {cells} | {lost:12} | {verdict.twice:5} |", flush=True)


def print_plans(first, seeds):
    """Run random plans, and print a line for each."""
    for seed in range(first, first + seeds):
        plan = random_plan(seed)
        _, verdict = outcome(plan, lambda run: None)
        if verdict.lost or verdict.twice:
            raise SystemExit(f"seed {seed}: {plan}: {verdict}")
        found = f"{verdict.steps} steps once on each server, staleness {verdict.stalest} at most, "
        found += f"{verdict.repeated} batches again, {verdict.skipped} passed over"
        print(f"seed {seed}: {plan}: {found}", flush=True)


def print_log_cost(rounds):
    """Steps per second of an MLP with Adam, in turn with the log and without."""
    from parameter_server import steps_per_second

    for _ in range(rounds):
        for switch in ("1", "0"):
            os.environ["UNISONO_PS_LOG"] = switch
            rate = steps_per_second("Unisono", "mlp")
            print(f"{'with' if switch == '1' else 'without'} log: {rate:.0f} steps/s", flush=True)


def main():
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=0, help="run this many random plans instead")
    parser.add_argument("--first", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--only", default="", help="only the rows with this text in their names")
    parser.add_argument("--log-cost", type=int, nargs="?", const=1, default=0, help="so many rounds instead")
    options = parser.parse_args()
    if options.log_cost:
        print_log_cost(options.log_cost)
    elif options.seeds:
        print_plans(options.first, options.seeds)
    else:
        print_table(options.only)


if __name__ == "__main__":
    main()
