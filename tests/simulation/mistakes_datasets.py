"""Mistakes in how far the datasets of workers are."""

from tests.simulation._planted import Mistake

_WORKERS = "unisono.parameter_server.chief._workers:WorkerPool"
_DATA = "unisono.parameter_server.worker._worker_data"
_WORKER = "unisono.parameter_server.worker._step_worker:StepWorker"
_STORE = "unisono.parameter_server.server._store:VariableStore"
_QUEUE = "unisono.parameter_server.chief._queue:ClosureQueue"


def _mistake(name, place, old, new):
    return Mistake(name, place, old, new, "datasets")


MISTAKES = (
    _mistake(
        "a worker that comes again begins its data anew",
        f"{_WORKERS}.iterate",
        "self._used[worker, name].encode()",
        "[0]",
    ),
    _mistake(
        "servers are not asked how far a lost worker's data are",
        f"{_WORKERS}._on_hello_answer",
        "if worker in self._were_lost and self._of_data:",
        "if False:",
    ),
    _mistake(
        "a batch that is given back is lost",
        f"{_DATA}:TakenBatches.give_back",
        "source.returned.appendleft((number, batch))",
        "pass",
    ),
    _mistake(
        "a batch that is given back gets another number",
        f"{_DATA}:TakenBatches.give_back",
        "(number, batch)",
        "(number + 1, batch)",
    ),
    _mistake(
        "a batch whose update was there already is not given back",
        f"{_WORKER}._closure",
        'if taken and meta.get("again") and _had_been_applied(pushes) and not self._are_used(taken):',
        "if False:",
    ),
    Mistake(
        "a batch counts as often as closures push it",
        f"{_STORE}.push",
        "self._check_batches(push)",
        "pass",
        "slow_workers",
    ),
    Mistake(
        "all batches below the newest one count as used",
        "unisono.parameter_server.state._push:UsedBatches.add",
        "self.left.update(range(max(self.count + 1, number - _NEWEST), number))",
        "pass",
        "lost_workers",
    ),
    Mistake(
        "batches that were left out are forgotten where servers' answers are joined",
        "unisono.parameter_server.state._push:UsedBatches.join",
        "{n for n in self.left | other.left if n not in self and n not in other}",
        "set()",
        "lost_workers",
    ),
    Mistake(
        "batches that were left out count as used where the chief knew of none",
        "unisono.parameter_server.state._push:UsedBatches.join",
        "self.left | other.left",
        "self.left",
        "lost_workers",
    ),
    Mistake(
        "a worker that returns passes over the batches that were left out",
        f"{_DATA}:WorkerData.iterate",
        "if number in unused:",
        "if False:",
        "lost_workers",
    ),
    _mistake(
        "a closure that is prepared after an error has no result",
        f"{_QUEUE}._prepare_all",
        "self._drop_cancelled()",
        "pass",
    ),
    _mistake(
        "an error that belongs to no closure is not raised",
        f"{_DATA}:WorkerData.change",
        "self._errors[name] = error",
        "pass",
    ),
)
