"""How fast a cluster recovers from a fault: two workers of `unisono launch`, warm spares, one machine.

    python benchmarks/recovery.py            # about three minutes on two cores
    python benchmarks/recovery.py --seeds 20 # twenty random plans of two faults each instead

Detection: from the last step of the worker that is hit until the launcher detects its end. Next step:
until the first step of the next generation is done. Steps lost: those repeated. The final weights must
be bit for bit those of an undisturbed run.
"""

import argparse
import dataclasses
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

EPOCHS, BATCH, ROWS = 6, 50, 1500
STEPS = EPOCHS * ROWS // BATCH
TASKS = ["worker:0", "worker:1"]
#: Seconds after which a run counts as hung, on however busy a machine.
LIMIT = 600
#: What happens to a task in random plans; "kill both" happens to all.
KINDS = ("kill while saving", "kill", "fail", "stop", "kill both")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What goes wrong in a run.

    Args:
        faults: a `FaultPlan`.
        saving: `[generation, step]` of the faults that come while a backup is written.
        save_freq: of `BackupAndRestore`.
    """

    faults: Any
    saving: tuple[Any, ...] = ()
    save_freq: Any = 5

    def to_json(self):
        """The plan as text."""
        return json.dumps([self.faults.to_json(), self.saving, self.save_freq])

    @classmethod
    def from_json(cls, text):
        """Inverse of `to_json`."""
        from unisono.testing import FaultPlan

        faults, saving, save_freq = json.loads(text)
        return cls(FaultPlan.from_json(faults), tuple(saving), save_freq)

    @property
    def restarts(self):
        """How many generations end by a fault."""
        return len({fault.generation for fault in self.faults.faults})

    @property
    def flags(self):
        """What the launcher needs to notice the faults."""
        return ["--stall-timeout", "8"] if any(f.kind == "stop" for f in self.faults.faults) else []

    def __str__(self):
        text = ", then ".join(
            " and ".join(
                f"{f.kind} {f.task} after step {f.step}"
                + (" while saving" if [f.generation, f.step] in [list(s) for s in self.saving] else "")
                for f in self.faults.faults
                if f.generation == generation
            )
            for generation in range(self.restarts)
        )
        return f"{text} (a backup every {self.save_freq})"


def random_plan(seed):
    """Two faults in two generations; half of the time the second comes one step after the first."""
    from unisono.testing import FaultPlan

    draw = random.Random(seed)
    first = draw.randrange(10, STEPS // 2)
    second = first + 1 if draw.random() < 0.5 else draw.randrange(first + 1, STEPS - 10)
    faults, saving = FaultPlan(), []
    # Each kind comes first in a fifth of the seeds.
    kinds = KINDS[seed % len(KINDS)], draw.choice(KINDS)
    for generation, kind in enumerate(kinds):
        step = second if generation else first
        if kind == "kill while saving":
            # The step before it, which asks for the backup, is surely done in this generation.
            step = max(step, first + 2 * generation)
            saving.append([generation, step])
        for task in TASKS if kind == "kill both" else [draw.choice(TASKS)]:
            faults = getattr(faults, kind.split()[0])(task, step, generation)
    return Plan(faults, tuple(saving), draw.choice([5, "auto"]))


def train(folder, plan, waits):
    """What every worker runs."""
    import unisono

    strategy = unisono.MultiWorkerMirroredStrategy()
    import keras
    from sklearn.datasets import load_digits

    keras.utils.set_random_seed(3)
    data = load_digits()
    x, y = (data.data[:ROWS] / 16).astype("f4"), data.target[:ROWS].astype("i4")
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((64,)),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
    plan = Plan.from_json(plan)
    generation = int(os.environ["UNISONO_GENERATION"])
    backup = unisono.callbacks.BackupAndRestore(folder / "backup", save_freq=plan.save_freq)

    class Steady(keras.callbacks.Callback):
        """Waits for the warm spares, and for backups that are written when a fault is due."""

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch, self.found = epoch, []

        def on_train_batch_begin(self, batch, logs=None):
            if waits and batch == 20 and self.epoch == 0:
                wait_for_spares(folder)

        def on_train_batch_end(self, batch, logs=None):
            step = self.epoch * (ROWS // BATCH) + batch
            if [generation, step + 1] in plan.saving:
                self.found = backups_in(folder)
                backup.save_now()
            if [generation, step] in plan.saving:
                wait_until(lambda: is_saving(folder, self.found), "a backup")

    callbacks = [Steady(), plan.faults.callback(history=folder / "history"), backup]
    verbose = 2 if plan.save_freq == "auto" else 0
    model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=verbose, callbacks=callbacks)


def backups_in(folder):
    """The names of backups, and of those that are being written or deleted."""
    return sorted(os.listdir(folder / "backup")) if (folder / "backup").exists() else []


def is_saving(folder, before):
    """Whether a backup is being written, or has been since `before`."""
    now = backups_in(folder)
    return now != before or any(name.endswith(".partial") for name in now)


def wait_until(condition, what, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds} s for {what}")
        time.sleep(0.001)


def wait_for_spares(folder, seconds=60):
    """Let the warm spares finish their imports: in a run of hours they have long been ready."""
    deadline = time.monotonic() + seconds
    history = folder / "log" / "history.jsonl"
    idle_since, used = time.monotonic(), None
    while time.monotonic() < deadline:
        events = [json.loads(line) for line in history.read_text().splitlines()]
        pids = [e["pid"] for e in events if e["event"] == "spare"]
        now = [cpu_time(pid) for pid in pids]
        if len(pids) < 2 or now != used:
            idle_since, used = time.monotonic(), now
        elif time.monotonic() - idle_since > 1.5:
            return
        time.sleep(0.1)


def cpu_time(pid):
    """The clock ticks that a process has used, 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def launch(folder, plan, steady=True):
    """Run a cluster; returns its exit code and what it printed."""
    command = [sys.executable, "-m", "unisono", "launch", "-n", "2", "--max-restarts", "4", *plan.flags]
    command += ["--log-dir", str(folder / "log"), os.path.abspath(__file__)]
    command += ["--train", str(folder), "--plan", plan.to_json(), *(["--steady"] if steady else [])]
    env = dict(os.environ, KERAS_BACKEND="jax")
    done = run(command, env)
    return done.returncode, done.stdout + done.stderr


def run(command, env):
    """Run a command to its end; tests put a forked one in its place."""
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT, check=False)


def outcome(folder, plan, steady=True):
    """The records of a run, checked, what the launcher noted, and what was printed."""
    from unisono.testing import check_history, read_history

    code, text = launch(folder, plan, steady=steady)
    if code:
        raise SystemExit(f"The cluster ended with code {code}.\n{text[-3000:]}")
    records = read_history(folder / "history")
    check_history(records)
    events = [json.loads(line) for line in (folder / "log" / "history.jsonl").read_text().splitlines()]
    return records, events, text


def last_weights(records):
    return {r.weights for r in records if r.step == STEPS - 1}


def measured(records, events, generation):
    """Seconds from a generation's last step to detection and to the next step, and steps done again."""
    before = [r for r in records if r.generation == generation]
    after = [r for r in records if r.generation == generation + 1]
    # The worker that is hit makes no further step; the others may make half a step more.
    hit = min(max(r.time for r in before if r.task == task) for task in TASKS)
    noticed = min(
        e["time"]
        for e in events
        if e["generation"] == generation and e["event"] in NOTICED and e["time"] >= hit
    )
    lost = max(r.step for r in before) + 1 - min(r.step for r in after)
    return noticed - hit, min(r.time for r in after) - hit, lost


#: The launcher's events for a task that has ended or is stuck.
NOTICED = ("failed", "stalled", "ended")


def scenarios():
    from unisono.testing import FaultPlan

    middle = STEPS // 2
    return {
        "SIGKILL of worker 1": Plan(FaultPlan().kill("worker:1", middle)),
        "SIGKILL of worker 0": Plan(FaultPlan().kill("worker:0", middle)),
        "SIGKILL while a backup is written": Plan(FaultPlan().kill("worker:0", middle), ([0, middle],)),
        "exception on worker 1": Plan(FaultPlan().fail("worker:1", middle)),
        "SIGSTOP of worker 1 (stall timeout 8 s)": Plan(FaultPlan().stop("worker:1", middle)),
    }


def undisturbed(folder):
    """The weights of a run without faults, and how often it has found that it should save."""
    from unisono.testing import FaultPlan

    records, _, text = outcome(folder, Plan(FaultPlan(), save_freq="auto"), steady=False)
    found = re.findall(r"unisono: (a backup every .*)", text)
    return last_weights(records), found


def row(root, plan, expected, steady):
    """Run a plan; one cell for each generation that it ends, and whether the weights are as expected."""
    records, events, _ = outcome(root, plan, steady=steady)
    cells = [measured(records, events, generation) for generation in range(plan.restarts)]
    return cells, "yes" if last_weights(records) == expected else "NO"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=0, help="run this many random plans instead")
    parser.add_argument("--first", type=int, default=0, help="the first of the seeds")
    parser.add_argument("--train", type=Path, help="run one worker in this process")
    parser.add_argument("--plan")
    parser.add_argument("--steady", action="store_true", help="wait for the warm spares at step 20")
    options = parser.parse_args()
    if options.train:
        train(options.train, options.plan, options.steady)
        return
    with tempfile.TemporaryDirectory() as root:
        expected, found = undisturbed(Path(root) / "undisturbed")
        print("\n".join(found), end="\n\n")
        if not options.seeds:
            print("| fault                                    | detected | next step | lost | same weights |")
            print(f"|{'-' * 42}|{'-' * 10}|{'-' * 11}|{'-' * 6}|{'-' * 14}|")
            for number, (name, plan) in enumerate(scenarios().items()):
                [(noticed, following, lost)], same = row(Path(root) / str(number), plan, expected, True)
                print(
                    f"| {name:40} | {noticed:6.2f} s | {following:7.2f} s | {lost:4} | {same:12} |",
                    flush=True,
                )
            return
        for seed in range(options.first, options.first + options.seeds):
            plan = random_plan(seed)
            print(f"seed {seed}: {plan}", flush=True)
            cells, same = row(Path(root) / f"seed-{seed}", plan, expected, False)
            for noticed, following, lost in cells:
                print(f"    detected {noticed:.2f} s, next step {following:.2f} s, {lost} steps lost")
            print(f"    same weights: {same}", flush=True)


if __name__ == "__main__":
    main()
