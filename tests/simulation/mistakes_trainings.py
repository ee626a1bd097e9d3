"""Mistakes in how a chief trains."""

from tests.simulation._planted import Mistake

_CHIEF = "unisono.parameter_server.chief"
_RUNNER = f"{_CHIEF}._step_runner:RemoteStepRunner"


def _of_fits(name, place, old, new):
    return Mistake(name, f"{_CHIEF}.{place}", old, new, "fits")


def _of_steps(name, method, old, new):
    return Mistake(name, f"{_RUNNER}.{method}", old, new, "named_steps")


MISTAKES = (
    _of_fits("a read does not wait for steps", "_job:Job._settle", "self.pool.queue.join()", "pass"),
    _of_fits(
        "two runs draw the same random numbers",
        "_streams:RandomStreams._advance",
        "following = stream.advanced(state)",
        "following = state",
    ),
    _of_fits(
        "a validation goes on with the data of the one before",
        "_worker_datasets:RunningCalls.around_test",
        "self._validation.restart()",
        "pass",
    ),
    _of_fits(
        "of several steps the last predictions are returned",
        "_train_function:RemoteTrainFunction._joined",
        "self._task is not TrainerTask.PREDICT or len(results) == 1",
        "True",
    ),
    _of_steps(
        "training ends with the first worker without data",
        "_look_for_data",
        "if len(self._ended) == count:",
        "if self._ended:",
    ),
    _of_steps(
        "more steps are scheduled than were asked for",
        "_run_group",
        "min(room * self._job.num_workers, most - done)",
        "room * self._job.num_workers",
    ),
    _of_steps(
        "an answer without a step draws random numbers",
        "_run_group",
        "stream.variable.assign(state)",
        "pass",
    ),
)
