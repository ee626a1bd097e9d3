"""How fast a cluster goes on after a fault: two workers of `unisono launch`, warm spares, one machine.

    python benchmarks/recovery.py            # about three minutes on two cores
    python benchmarks/recovery.py --seeds 20 # and twenty random plans of two faults each

Detection: from the last step of the worker that is hit until the launcher knows. Next step: until
the first step of the next generation is done. Steps lost: those done again. The final weights must
be bit for bit those of a run that nothing disturbed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EPOCHS, BATCH, ROWS = 6, 50, 1500
STEPS = EPOCHS * ROWS // BATCH
TASKS = ["worker:0", "worker:1"]


def train(folder, plan, waits):
    """What every worker runs."""
    import unisono

    strategy = unisono.MultiWorkerMirroredStrategy()
    import keras
    from sklearn.datasets import load_digits

    from unisono.testing import FaultPlan

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
    plan = FaultPlan.from_json(plan)

    class Steady(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if waits and batch == 20 and self.epoch == 0:
                wait_for_spares(folder)

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

    callbacks = [
        Steady(),
        plan.callback(history=folder / "history"),
        unisono.callbacks.BackupAndRestore(folder / "backup", save_freq=5),
    ]
    model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=callbacks)


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


def launch(folder, plan, *options, steady=True):
    """Run a cluster; returns its exit code and what it printed."""
    command = [sys.executable, "-m", "unisono.cli", "launch", "-n", "2", "--max-restarts", "4", *options]
    command += ["--log-dir", str(folder / "log"), os.path.abspath(__file__)]
    command += ["--train", str(folder), "--plan", plan.to_json(), *(["--steady"] if steady else [])]
    env = dict(os.environ, KERAS_BACKEND="jax")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    return done.returncode, done.stdout + done.stderr


def outcome(folder, plan, *options, steady=True):
    """The records of a run, checked, and what the launcher noted."""
    from unisono.testing import check_history, read_history

    code, text = launch(folder, plan, *options, steady=steady)
    if code:
        raise SystemExit(f"The cluster ended with code {code}.\n{text[-3000:]}")
    records = read_history(folder / "history")
    check_history(records)
    events = [json.loads(line) for line in (folder / "log" / "history.jsonl").read_text().splitlines()]
    return records, events


def last_weights(records):
    return {r.weights for r in records if r.step == STEPS - 1}


def measured(records, events, fault):
    """Seconds to detection and to the next step, and steps done again."""
    before = [r for r in records if r.generation == fault.generation]
    after = [r for r in records if r.generation == fault.generation + 1]
    hit = max(r.time for r in before if r.task == fault.task)
    noticed = min(
        e["time"]
        for e in events
        if e["generation"] == fault.generation and e["event"] in NOTICED and e["time"] >= hit
    )
    lost = max(r.step for r in before) + 1 - min(r.step for r in after)
    return noticed - hit, min(r.time for r in after) - hit, lost


#: What the launcher writes when it has seen that a task is gone or stuck.
NOTICED = ("failed", "stalled", "ended")


def scenarios():
    from unisono.testing import FaultPlan

    middle = STEPS // 2
    return {
        "SIGKILL of worker 1": (FaultPlan().kill("worker:1", middle), ()),
        "SIGKILL of worker 0": (FaultPlan().kill("worker:0", middle), ()),
        "SIGKILL while a backup is written": (FaultPlan().kill("worker:0", 27), ()),
        "exception on worker 1": (FaultPlan().fail("worker:1", middle), ()),
        "SIGSTOP of worker 1 (stall timeout 3 s)": (
            FaultPlan().stop("worker:1", middle),
            ("--stall-timeout", "3"),
        ),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=0, help="run so many random plans as well")
    parser.add_argument("--train", type=Path, help="run one worker in this process")
    parser.add_argument("--plan")
    parser.add_argument("--steady", action="store_true", help="wait for the warm spares at step 20")
    options = parser.parse_args()
    if options.train:
        train(options.train, options.plan, options.steady)
        return
    from unisono.testing import FaultPlan

    with tempfile.TemporaryDirectory() as root:
        records, _ = outcome(Path(root) / "undisturbed", FaultPlan(), steady=False)
        expected = last_weights(records)
        print("| fault                                    | detected | next step | lost | same weights |")
        print(f"|{'-' * 42}|{'-' * 10}|{'-' * 11}|{'-' * 6}|{'-' * 14}|")
        for number, (name, (plan, extra)) in enumerate(scenarios().items()):
            records, events = outcome(Path(root) / str(number), plan, *extra)
            found, following, lost = measured(records, events, plan.faults[0])
            same = "yes" if last_weights(records) == expected else "NO"
            print(f"| {name:40} | {found:6.2f} s | {following:7.2f} s | {lost:4} | {same:12} |", flush=True)
        for seed in range(options.seeds):
            plan = FaultPlan.at_random(seed, TASKS, STEPS)
            records, _ = outcome(Path(root) / f"seed-{seed}", plan, steady=False)
            same = "same weights" if last_weights(records) == expected else "OTHER WEIGHTS"
            faults = ", ".join(f"{f.kind} {f.task} after step {f.step}" for f in plan.faults)
            print(f"seed {seed}: {faults}: {same}", flush=True)


if __name__ == "__main__":
    main()
