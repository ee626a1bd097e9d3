"""What every task of `ps_recovery.py` runs: steps that leave a trace on each server, and notes.

Each step adds one to its own place of a vector on each server, notes there how many updates it had pulled,
and trains two variables with SGD. Tasks write what they do to `<task>.jsonl`, in lines that outlive them.

    python _ps_counts.py FOLDER OPTIONS    # in a task of `unisono launch`
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

FOLDER, OPTIONS = Path(sys.argv[1]), json.loads(sys.argv[2])
TASK = json.loads(os.environ["TF_CONFIG"])["task"]
ME = f"{TASK['type']}:{TASK['index']}"
SERVERS = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["ps"])
FILE = os.open(FOLDER / f"{TASK['type']}-{TASK['index']}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def note(kind, **fields):
    os.write(FILE, json.dumps({"kind": kind, "at": time.time(), **fields}).encode() + b"\n")


def die_at(point, count):
    """End by SIGKILL at a planned place, once."""
    for number, (task, where, at) in enumerate(OPTIONS["points"]):
        mark = FOLDER / f"point-{number}"
        if (task, where) == (ME, point) and count >= at and not mark.exists():
            mark.touch()
            note("dies", point=point)
            os.kill(os.getpid(), signal.SIGKILL)


def watch_server():
    """Note each update before and after it is applied, and what a server finds when it starts."""
    from unisono.ps._durable import DurableStore
    from unisono.ps._store import VariableStore

    push, reset, start = VariableStore.push, VariableStore.reset, DurableStore.__init__

    def noted_reset(self, *args, **kwargs):
        reset(self, *args, **kwargs)
        if not getattr(self.journal, "is_replaying", False):
            note("reset")

    def noted_push(self, pushed):
        with self.lock:
            if getattr(self.journal, "is_replaying", False) or self._is_applied(pushed.closure):
                return push(self, pushed)
            number = self.applied_count + 1
            note("intent", closure=pushed.closure, number=number)
            applied = push(self, pushed)
            note("apply", closure=pushed.closure, number=number)
            die_at("before the answer", number)
            return applied

    def noted_start(self, *args, **kwargs):
        start(self, *args, **kwargs)
        note("recovered", source=self.recovery.source, number=self.store.applied_count)

    VariableStore.push, VariableStore.reset, DurableStore.__init__ = noted_push, noted_reset, noted_start


def watch_worker():
    """Note each closure that is run, and when a server is missed."""
    watch_absence()
    from unisono.ps._client import ServerClient
    from unisono.ps.worker._step_worker import StepWorker

    run, push, counts = StepWorker._closure, ServerClient.push, {"run": 0, "push": 0}

    def noted_run(self, task):
        counts["run"] += 1
        note("run", closure=task.frame.meta["closure"])
        die_at("before a step", counts["run"])
        run(self, task)

    def noted_push(self, server, *args, **kwargs):
        sent = push(self, server, *args, **kwargs)
        counts["push"] += 1
        if any(point[:2] == [ME, "between pushes"] for point in OPTIONS["points"]) and server == 0:
            # The first server has applied it, the second one gets nothing.
            sent.exception()
            die_at("between pushes", counts["push"])
        return sent

    StepWorker._closure, ServerClient.push = noted_run, noted_push


def watch_chief():
    """Note what is sent to workers and acknowledged by them, and when a task is missed."""
    from unisono.ps.scheduling._workers import WorkerPool

    watch_absence()
    run, lost = WorkerPool._run, WorkerPool._lost

    def noted_run(self, worker, closure, watermark):
        index = int(closure.payload.arrays[0])
        note("send", closure=closure.number, index=index, worker=worker)
        sent = run(self, worker, closure, watermark)

        def ended(done):
            if done.exception() is None:
                note("acknowledge", closure=closure.number, index=index, worker=worker)

        sent.add_done_callback(ended)
        return sent

    def noted_loss(self, worker, error):
        note("lost", task=f"worker:{worker}")
        lost(self, worker, error)

    WorkerPool._run, WorkerPool._lost = noted_run, noted_loss


def watch_absence():
    """Note when a server is missed."""
    from unisono.ps._client import _Attempts

    lost = _Attempts._lost

    def noted(self, error):
        note("lost", task=str(error.task))
        lost(self, error)

    _Attempts._lost = noted


def train(strategy):
    """The chief's program: continues from its checkpoint, until the file `finish` is there."""
    import keras
    import numpy as np

    import unisono

    size = OPTIONS["steps"]
    with strategy.scope():
        layer = keras.layers.Layer()

        def weight(name, shape=()):
            # In turn on the servers: each goes to the one with the fewest bytes.
            return [
                layer.add_weight(name=f"{name}{i}", shape=shape, initializer="zeros") for i in range(SERVERS)
            ]

        count, applied, pulled = weight("count"), weight("applied", (size,)), weight("pulled", (size,))
        trained = weight("trained")
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build(trained)
    coordinator = unisono.coordinator.ClusterCoordinator(strategy)

    @unisono.function
    def step(index):
        with unisono.GradientTape() as tape:
            loss = sum(v.value for v in trained)
        optimizer.apply_gradients(zip(tape.gradient(loss, trained), trained, strict=True))
        place = keras.ops.one_hot(index, size)
        for server in range(SERVERS):
            pulled[server].assign_add(place * count[server].value)
            applied[server].assign_add(place)
            count[server].assign_add(1.0)
        return index

    saved = unisono.checkpoint.Checkpoint(layer=layer, optimizer=optimizer)
    newest = unisono.checkpoint.latest_checkpoint(FOLDER / "saved")
    first = 0
    if newest:
        saved.restore(newest)
        first = int(count[0].numpy())
    note("starts", index=first)
    done = first
    while done < size and not (FOLDER / "finish").exists():
        for index in range(done, min(done + OPTIONS["save_every"], size)):
            coordinator.schedule(step, args=(np.int32(index),))
            time.sleep(OPTIONS["pause"])
            done = index + 1
        coordinator.join()
        saved.save(FOLDER / "saved" / "steps")
        note("saved", index=done)
    values = [[v.numpy().tolist() for v in each] for each in (count, applied, pulled, trained)]
    homes = [sorted(strategy.job.placed[v].homes) for each in (count, applied, pulled, trained) for v in each]
    (FOLDER / "values.json").write_text(json.dumps({"done": done, "values": values, "homes": homes}))


{"ps": watch_server, "worker": watch_worker, "chief": watch_chief}[TASK["type"]]()

import unisono

note("process", pid=os.getpid())
train(unisono.ParameterServerStrategy(max_staleness=OPTIONS["staleness"]))
