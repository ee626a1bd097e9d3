"""What every task of `ps_recovery.py` runs: steps that leave a trace on each server, and notes.

Each step adds one to its own place of a vector on each server, notes there how many updates it had pulled and
which batch of its worker's dataset it has taken, and trains two variables with SGD, which are large enough to
travel in 16 bits. Tasks write what they do to `<task>.jsonl`, in lines that outlive them.

    python _ps_counts.py FOLDER OPTIONS    # in a task of `unisono launch`
"""

import functools
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


#: The first value of what is trained. In 16 bits, numbers below it are not those of single steps.
FIRST = 4097.0


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
    from unisono.parameter_server.server._durable import DurableStore
    from unisono.parameter_server.server._store import VariableStore

    push, reset, start = VariableStore.push, VariableStore.reset, DurableStore.__init__

    def noted_reset(self, *args, **kwargs):
        reset(self, *args, **kwargs)
        if not getattr(self.journal, "is_replaying", False):
            note("reset")

    def noted_push(self, pushed, **options):
        with self.lock:
            if getattr(self.journal, "is_replaying", False) or self._is_applied(pushed.closure):
                return push(self, pushed, **options)
            number = self.applied_count + 1
            note("intent", closure=pushed.closure, number=number)
            applied = push(self, pushed, **options)
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
    from unisono.parameter_server.server._client import ServerClient
    from unisono.rpc._ops import Op
    from unisono.parameter_server.worker._step_worker import StepWorker

    run, send, counts = StepWorker._closure, ServerClient.send, {"run": 0, "push": 0}

    def noted_run(self, task):
        counts["run"] += 1
        note("run", closure=task.frame.meta["closure"])
        die_at("before a step", counts["run"])
        run(self, task)

    def noted_send(self, server, op, *args, **kwargs):
        sent = send(self, server, op, *args, **kwargs)
        if op in (Op.PUSH, Op.PULL) and not counts["push"]:
            note("types", pulled=args[0].get("dtype"), pushed=[str(a.dtype) for a in (*args, ())[1]])
        if op is Op.PUSH:
            counts["push"] += 1
            if any(point[:2] == [ME, "between pushes"] for point in OPTIONS["points"]) and server == 0:
                # The first server has applied it, the second one gets nothing.
                sent.exception()
                die_at("between pushes", counts["push"])
        return sent

    StepWorker._closure, ServerClient.send = noted_run, noted_send


def watch_chief():
    """Note what is sent to workers and acknowledged by them, and when a task is missed."""
    from unisono.parameter_server.chief._workers import WorkerPool

    watch_absence()
    run, lost = WorkerPool._run, WorkerPool._lost

    def noted_run(self, worker, closures, watermark):
        told = [{"closure": c.number, "index": int(c.payload.arrays[0]), "worker": worker} for c in closures]
        for each in told:
            note("send", **each)
        replies = run(self, worker, closures, watermark)

        def ended(each, done):
            if done.exception() is None:
                note("acknowledge", **each)

        for each, sent in zip(told, replies, strict=True):
            sent.add_done_callback(functools.partial(ended, each))
        return replies

    def noted_loss(self, worker, error):
        note("lost", task=f"worker:{worker}")
        lost(self, worker, error)

    WorkerPool._run, WorkerPool._lost = noted_run, noted_loss


def watch_absence():
    """Note when a server is missed."""
    from unisono.parameter_server.server._client import _Attempts

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
    # On each server, in one variable: a count, and for each step whether it was applied, how many updates it
    # had pulled, and for each worker and batch how often that was used.
    parts = np.cumsum([1, size, size])
    with strategy.scope():
        layer = keras.layers.Layer()
        notes = [
            layer.add_weight(name=f"notes{i}", shape=(1 + 4 * size,), initializer="zeros")
            for i in range(SERVERS)
        ]
        trained = [
            layer.add_weight(
                name=f"trained{i}", shape=(2048,), initializer=keras.initializers.Constant(FIRST)
            )
            for i in range(SERVERS)
        ]
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build(trained)
    coordinator = unisono.coordinator.ClusterCoordinator(strategy)

    def dataset_fn(context):
        return unisono.data.Dataset.range(
            context.input_pipeline_id * size, (context.input_pipeline_id + 1) * size
        )

    @unisono.function
    def step(index, iterator):
        with unisono.GradientTape() as tape:
            # Its gradient is 1, and reads the variable.
            loss = sum(keras.ops.sum(v.value + 0 * v.value**2) for v in trained)
        optimizer.apply_gradients(zip(tape.gradient(loss, trained), trained, strict=True))
        place = keras.ops.one_hot(index, size)
        batch = keras.ops.one_hot(next(iterator), 2 * size)
        for variable in notes:
            count = variable.value[0]
            variable.assign_add(keras.ops.concatenate([keras.ops.ones(1), place, place * count, batch]))
        return index

    saved = unisono.checkpoint.Checkpoint(layer=layer, optimizer=optimizer)
    newest = unisono.checkpoint.latest_checkpoint(FOLDER / "saved")
    done = 0
    if newest:
        saved.restore(newest)
        done = int(notes[0].numpy()[0])
    note("starts", index=done)
    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    while done < size and not (FOLDER / "finish").exists():
        for index in range(done, min(done + OPTIONS["save_every"], size)):
            coordinator.schedule(step, args=(np.int32(index), iterator))
            time.sleep(OPTIONS["pause"])
            done = index + 1
        coordinator.join()
        # A chief that is killed after its last step has none to run when it starts again.
        (FOLDER / "homes.json").write_text(json.dumps([strategy._job.variables[v].homes[0] for v in notes]))
        saved.save(FOLDER / "saved" / "steps")
        note("saved", index=done)
    # By server, as they are numbered.
    homes = dict(zip(json.loads((FOLDER / "homes.json").read_text()), notes, strict=True))
    values = [[part.tolist() for part in np.split(homes[i].numpy(), parts)] for i in range(SERVERS)]
    counts = [int(n) for v in trained for n in np.unique(FIRST - v.numpy())]
    result = {"done": done, "values": values, "trained": counts}
    (FOLDER / "values.part").write_text(json.dumps(result))
    os.replace(FOLDER / "values.part", FOLDER / "values.json")


{"ps": watch_server, "worker": watch_worker, "chief": watch_chief}[TASK["type"]]()

import unisono

note("process", pid=os.getpid())
train(unisono.ParameterServerStrategy(max_staleness=OPTIONS["staleness"], **OPTIONS.get("types", {})))
