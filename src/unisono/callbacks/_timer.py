"""`StepTimer`: how long steps take, and where the time goes, in the logs of each epoch."""

from __future__ import annotations

import math
from time import perf_counter
from typing import Any

import jax
import keras

from unisono._checks import checked_whole
from unisono._errors import InvalidArgumentError, UnsupportedError
from unisono._types import Logs
from unisono.training._binding import strategy_of
from unisono.training.groups._peak_flops import checked_peak
from unisono.training.groups._step_profile import HostTimes
from unisono.training.groups._step_sample import StepParts, StepSampler
from unisono.training.groups._step_work import StepWork, WorkTotals
from unisono.training.trainer._protocol import timer_of

#: The numbers of a sample.
SAMPLED = ("host_ms", "compute_ms", "exchange_ms")


def split_of(steps: HostTimes, seconds: float, parts: StepParts | None = None) -> dict[str, float]:
    """Return the times that `StepTimer` adds to the logs of an epoch, and the speed in rows.

    >>> split_of(HostTimes(data=0.5, batches=100, rows=3200), 2.0, StepParts(0.5, 0.25, 0.125, steps=10))
    {'data_ms': 5.0, 'host_ms': 12.5, 'compute_ms': 25.0, 'exchange_ms': 12.5, 'step_ms': 20.0, 'examples_per_s': 1600.0}
    """  # noqa: E501
    sampled = dict.fromkeys(SAMPLED, math.nan) if parts is None else parts.per_step()
    if not steps.batches or seconds <= 0:
        # An epoch whose batches were all done before, in the run that this one resumes.
        return {"data_ms": 0.0, **sampled, "step_ms": 0.0, "examples_per_s": 0.0}
    return {
        "data_ms": 1000 * steps.data / steps.batches,
        **sampled,
        "step_ms": 1000 * seconds / steps.batches,
        "examples_per_s": steps.rows / seconds,
    }


def speed_of(work: WorkTotals, seconds: float, peak: float | None) -> dict[str, float]:
    """Return how fast an epoch computed, of what is known.

    >>> speed_of(WorkTotals(rows=64, tokens=640, flops=4e12), 2.0, 8e12)
    {'tflop_per_s': 2.0, 'tokens_per_s': 320.0, 'mfu': 0.25}
    """
    flops = work.flops / seconds if seconds > 0 else 0.0
    speed = {"tflop_per_s": flops / 1e12}
    if work.tokens:
        speed["tokens_per_s"] = work.tokens / seconds if seconds > 0 else 0.0
    return speed if peak is None else {**speed, "mfu": flops / peak}


class StepTimer(keras.callbacks.Callback):
    """Add a step's time and its parts (data, host, compute, exchange) to the logs of each epoch of `fit`.

    `step_ms` is the time from batch to batch, in milliseconds; `data_ms` is how long of it the host
    waited for the data. It waits while the devices compute: where `data_ms` is well below `step_ms`
    the wait is hidden behind the steps, and where it is nearly `step_ms` the input is what to make
    faster, for example by `Dataset.map(..., num_parallel_calls=AUTOTUNE)` and
    `Dataset.prefetch(2)`. `examples_per_s` counts the rows of all replicas.

    The other parts come from a sample, of one program in ten seconds at most: the
    host waits for the devices before and behind it, and XLA's profile says when they worked.
    `compute_ms` is the time in which a device of this process computed; `exchange_ms` that in which
    its devices only exchanged values with others, or waited for them, in this process or in others;
    `host_ms` the rest. An exchange that is hidden behind computation is not counted. They are NaN
    until a program has run twice, and while another profile runs (`TensorBoard(profile_batch=…)`).
    All steps but the samples are left alone; without this callback there are no samples.

    `tflop_per_s` is the speed of one device, in 10^12 operations a second of matrix products and
    convolutions. `mfu` is its share of the peak in the device's data sheet for the model's `compute_dtype`,
    where the kind of device is known; `unisono.callbacks.set_peak_flops` adds others. The operations are
    counted once for each program, when it is traced: calls of libraries, such as cuDNN's attention, do not
    count, and a `train_step` in TensorFlow's form is not counted at all (NaN). `tokens_per_s` is there where
    the first input is `[rows, tokens]`, of integers; `memory_gb`, the most memory in use so far, where JAX
    has it for the device.

    Keras' progress bar, its `History` and all other callbacks get the numbers, wherever this one is listed.
    Validation does not count, nor does what a sample costs; the first epoch includes compiling.
    Nothing is done for single batches, so Keras continues to read logs in a thread of its own.

    Args:
        tokens_per_row: for `tokens_per_s`; None to see it in the data, 0 for none.
        peak_flops: operations a second of one device at most; None to take them from the table.

    Raises:
        InvalidArgumentError: when training begins, if no strategy holds the model.
        UnsupportedError: likewise, where a cluster of parameter servers runs the steps.

    >>> import keras, unisono
    >>> with unisono.OneDeviceStrategy("cpu:0").scope():
    ...     model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    ...     model.compile("sgd", "mse")
    >>> history = model.fit(
    ...     keras.ops.ones((8, 2)), keras.ops.ones((8, 1)), verbose=0, callbacks=[StepTimer()]
    ... )
    >>> sorted(history.history)
    ['compute_ms', 'data_ms', 'examples_per_s', 'exchange_ms', 'host_ms', 'loss', 'step_ms', 'tflop_per_s']
    """

    #: True if other callbacks must come after this one, wherever it is listed.
    _adds_to_logs = True

    def __init__(self, tokens_per_row: int | None = None, peak_flops: float | None = None) -> None:
        super().__init__()
        if tokens_per_row is not None:
            hint = "Leave it out where the data shows it."
            tokens_per_row = checked_whole(tokens_per_row, "tokens_per_row", 0, hint)
        self._tokens_per_row = tokens_per_row
        self._peak = None if peak_flops is None else checked_peak(peak_flops)
        self._work: StepWork | None = None
        self._done = WorkTotals()
        self._before = HostTimes()
        self._began = 0.0
        self._sampler = StepSampler()
        #: Seconds that samples had taken when the epoch began.
        self._sampling = 0.0
        #: When the devices had finished the steps of the epoch; None while they compute.
        self._ended: float | None = None

    def on_train_begin(self, logs: Logs = None) -> None:
        """Find the clock, and begin the first epoch, whose hook a resumed run does not call."""
        timer = timer_of(self.model.train_function)
        if timer is None:
            if (strategy := strategy_of(self.model)) is not None:
                raise UnsupportedError(
                    "StepTimer measures steps that this process runs. Received: "
                    f"{self.model.name!r}, which trains under {strategy!r}. Leave it out: on parameter "
                    "servers the logs of epochs have `steps_per_second`, and the parts of a step "
                    "(`data_ms`, `pull_ms`, `compute_ms`, `push_ms`)."
                )
            raise InvalidArgumentError(
                "StepTimer needs a model that a strategy trains. Received: "
                f"{self.model.name!r}, compiled outside of every scope. Write\n"
                "    with strategy.scope():\n        model = ...\n        model.compile(...)"
            )
        timer.sampler = self._sampler
        self._work = timer.count_work()
        self._work.tokens_per_row = self._tokens_per_row
        self._begin()

    def on_train_end(self, logs: Logs = None) -> None:
        """Take no more samples."""
        if (timer := timer_of(self.model.train_function)) is not None:
            timer.sampler = None
            if timer.events is None or not timer.events.is_read:
                timer.work = None

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Note where the clock stands."""
        self._begin()

    def _begin(self) -> None:
        # Not the hook itself, which `BackupAndRestore` disables in an epoch that it resumes.
        self._before = self._reading()
        self._began, self._ended = perf_counter(), None
        self._sampling = self._sampler.seconds
        self._done = WorkTotals() if self._work is None else self._work.done
        self._sampler.ask()

    def on_test_begin(self, logs: Logs = None) -> None:
        """End the epoch's time before its validation, which needs the last step's weights anyway."""
        if self._ended is None:
            # Steps run ahead: without this wait, the rest of the last ones would not count.
            written = (*self.model.trainable_variables, *self.model.metrics_variables)
            jax.block_until_ready([v.value for v in written])
            self._ended = perf_counter()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Add the numbers to the logs. Keras has read the epoch's results: the devices are done."""
        ended = perf_counter() if self._ended is None else self._ended
        if logs is not None:
            seconds = ended - self._began - (self._sampler.seconds - self._sampling)
            logs.update(split_of(self._reading().since(self._before), seconds, self._sampler.parts))
            if self._work is not None:
                logs.update(self._speed(self._work, seconds))

    def _speed(self, work: StepWork, seconds: float) -> dict[str, float]:
        peak = work.peak if self._peak is None else self._peak
        speed, memory = speed_of(work.done.since(self._done), seconds, peak), work.memory()
        return speed if memory is None else {**speed, "memory_gb": memory / 1e9}

    def get_state(self) -> dict[str, Any]:
        """Return nothing for a checkpoint to keep: times belong to one process."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Do nothing: the times belong to this process.

        Args:
            state: from `get_state`.
        """

    def _reading(self) -> HostTimes:
        timer = timer_of(self.model.train_function)
        return HostTimes() if timer is None else timer.read()
