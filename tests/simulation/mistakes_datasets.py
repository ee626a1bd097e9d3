"""Mistakes in how far the datasets of workers are."""

from tests.simulation._planted import Mistake

_WORKERS = "unisono.parameter_server.chief._workers:WorkerPool"
_DATA = "unisono.parameter_server.worker._worker_data"
_WORKER = "unisono.parameter_server.worker._step_worker:StepWorker"
_QUEUE = "unisono.parameter_server.chief._queue:ClosureQueue"


def _mistake(name, place, old, new):
    return Mistake(name, place, old, new, "datasets")


MISTAKES = (
    _mistake(
        "a worker that comes again begins its data anew",
        f"{_WORKERS}.iterate",
        '"skip": self._used[worker][name]',
        '"skip": 0',
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
        "source.returned.appendleft(batch)",
        "pass",
    ),
    _mistake(
        "a batch that is given back counts as used",
        f"{_DATA}:TakenBatches.give_back",
        "source.used -= 1",
        "pass",
    ),
    _mistake(
        "a batch whose update was there already is not given back",
        f"{_WORKER}._closure",
        'if taken and meta.get("again") and _had_been_applied(pushes) and not self._are_used(taken):',
        "if False:",
    ),
    _mistake(
        "a batch whose update is there is given back as its answer was lost",
        f"{_WORKER}._closure",
        "and not self._are_used(taken)",
        "",
    ),
    _mistake(
        "a worker says hello before its pushes are done",
        f"{_WORKER}._execute",
        "concurrent.futures.wait(self._pushing)",
        "pass",
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
