"""`TensorBoard`: what Keras' callback of this name writes, without TensorFlow.

Source: https://keras.io/api/callbacks/tensorboard/
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Mapping
from typing import Any, Literal

import jax
import keras
import numpy as np

from unisono import summary
from unisono._checks import whole_number
from unisono._errors import InvalidArgumentError
from unisono._system._object_store import folder_of, given_place
from unisono._system._packages import require_packages
from unisono._types import ArrayLike, Logs
from unisono.training._binding import strategy_of

_LOG = logging.getLogger("unisono")


def is_chief() -> bool:
    """Return whether this process writes for its cluster.

    >>> is_chief()
    True
    """
    # The one place where this callback asks; the cluster's own answer belongs here when it has one.
    return jax.process_index() == 0


class TensorBoard(keras.callbacks.Callback):
    """Write losses, metrics, weights and profiles of `fit` and `evaluate` for TensorBoard.

    Training goes to `log_dir/train`, validation to `log_dir/validation`. With an `update_freq`
    other than `"epoch"`, `unisono.summary` calls in layers and train steps are written too. Of several
    workers the first writes for all; a subclass with `chief_only = False` writes on each.

    Args:
        log_dir: the directory; also one in an object store, `s3://bucket/logs` or `gs://bucket/logs`, where
            summaries appear at the ends of epochs.
        histogram_freq: every how many epochs to write a histogram of each weight; 0 for never.
        write_graph: whether to write the layers of a Sequential or Functional model.
        write_images: whether to write each weight also as an image, with its histogram.
        write_steps_per_second: whether to write the speed, in training steps per second.
        update_freq: every how many batches to write `batch_loss` and its like; `"batch"` for 1,
            `"epoch"` for epochs alone.
        profile_batch: the number of the training batch to profile, counted from 1, or the first
            and the last of several, which may be a string such as `"10,20"`; 0 for none.
        embeddings_freq: every how many epochs to write the weights of Embedding layers for the
            projector; 0 for never.

    Raises:
        InvalidArgumentError: naming the argument that cannot be used.
        MissingPackageError: when the packages of `unisono[tensorboard]` are missing.

    >>> TensorBoard("logs", update_freq=0)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    unisono.InvalidArgumentError: ...
    """

    #: Of several workers, the first writes for all.
    chief_only = True

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        histogram_freq: int = 0,
        write_graph: bool = False,
        write_images: bool = False,
        write_steps_per_second: bool = False,
        update_freq: Literal["batch", "epoch"] | int = "epoch",
        profile_batch: int | str | tuple[int, int] = 0,
        embeddings_freq: int = 0,
    ) -> None:
        super().__init__()
        # Now, and not at the end of the first epoch.
        require_packages("TensorBoard", "tensorboard", "tensorboard", "PIL")
        self.log_dir = str(given_place(log_dir))
        self.histogram_freq = _checked_count("histogram_freq", histogram_freq)
        self.embeddings_freq = _checked_count("embeddings_freq", embeddings_freq)
        self.write_graph, self.write_images = write_graph, write_images
        self.write_steps_per_second = write_steps_per_second
        #: Every how many batches; 0 for epochs alone.
        self.update_freq = _checked_update_freq(update_freq)
        self._profile = _Profile(self.log_dir, *_checked_range(profile_batch))
        self._is_timing = write_steps_per_second and self.update_freq > 0
        # Keras then reads a step's logs in another thread, and the devices need not wait.
        self.async_safe = not (self._profile.is_wanted or self._is_timing)
        #: True if steps must run one by one: summaries in the model and profiles are of single steps.
        self._sees_batches = self.update_freq > 0 or self._profile.is_wanted
        self._writers: dict[str, summary.SummaryWriter] = {}
        self._is_training = False
        self._steps_per_call = 1
        self._batches_before = 0  # of the running epoch
        self._ends: list[int] = []
        self._test_batches = 0
        self._began = 0.0
        self._epoch_began = 0.0

    def set_model(self, model: keras.Model) -> None:
        """Keras' hook: note the model."""
        super().set_model(model)
        # Here, because Keras moves the whole state where a batch's hook asks for `self.model`.
        self._steps_per_call = max(1, int(model.steps_per_execution))

    # --- training ------------------------------------------------------------------------------

    def on_train_begin(self, logs: Logs = None) -> None:
        """Open the files."""
        self._end()  # An earlier `fit` may have failed.
        self._is_training = True
        self._batches_before = self._test_batches = 0
        self._ends.clear()
        if self.write_graph:
            self._write_graph()
        if self.update_freq:
            _TRAINING.start(self, self._writer("train"), self.update_freq)

    def on_train_end(self, logs: Logs = None) -> None:
        """Close the files."""
        self._end()

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Count the batches of the epochs before."""
        self._batches_before += max(self._ends, default=0)
        self._ends.clear()
        self._epoch_began = time.perf_counter()

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Say the step to summaries in the model, and start a profile."""
        step = self._batches_before + batch + 1
        if self.update_freq:
            summary.set_step(step)
        if is_chief():
            self._profile.starting(step, step + self._steps_per_call - 1)
        if self._is_timing:
            self._began = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Write the numbers so far. Keras may call this from another thread."""
        # Keras counts the last call of an epoch as full, also where data for fewer steps were left.
        end = min(batch + 1, (self.params or {}).get("steps") or batch + 1)
        self._ends.append(end)
        first, step = self._batches_before + batch + 1 - self._steps_per_call, self._batches_before + end
        self._profile.ended(step)
        if not self.update_freq or step // self.update_freq == first // self.update_freq:
            return
        values = dict(logs) if isinstance(logs, Mapping) else {}
        if self._is_timing:
            values["steps_per_second"] = (step - first) / (time.perf_counter() - self._began)
        self._write_scalars("train", "batch_{}", values, step)

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Write the epoch's numbers, and histograms and embeddings in the epochs that are due."""
        logs = dict(logs or {})
        train = {k: v for k, v in logs.items() if not k.startswith("val_")}
        validation = {k.removeprefix("val_"): v for k, v in logs.items() if k.startswith("val_")}
        train.setdefault("learning_rate", self._current_rate())
        if self.write_steps_per_second:
            seconds = time.perf_counter() - self._epoch_began
            train["steps_per_second"] = max(self._ends, default=0) / seconds
        self._write_scalars("train", "epoch_{}", train, epoch)
        if (strategy := strategy_of(self.model)) is not None:
            self._write_scalars("train", "{}", strategy._numbers_of_workers, epoch)
        if validation:
            self._write_scalars("validation", "epoch_{}", validation, epoch)
        if self.histogram_freq and epoch % self.histogram_freq == 0:
            self._write_weights(epoch)
        if self.embeddings_freq and epoch % self.embeddings_freq == 0 and is_chief():
            with folder_of(self.log_dir) as folder:
                _write_embeddings(self.model, folder)
        for writer in self._writers.values():
            writer.flush()

    # --- evaluation ----------------------------------------------------------------------------

    def on_test_begin(self, logs: Logs = None) -> None:
        """Send summaries in the model to the validation's file."""
        if self.update_freq:
            _TESTING.start(self, self._writer("validation"), self.update_freq)

    def on_test_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Say the step to summaries in the model."""
        self._test_batches += 1
        if self.update_freq:
            summary.set_step(self._test_batches)

    def on_test_end(self, logs: Logs = None) -> None:
        """Write the evaluation's numbers over the steps of training."""
        optimizer = self.model.optimizer
        if optimizer is not None:
            step = int(optimizer.iterations)
            self._write_scalars("validation", "evaluation_{}_vs_iterations", logs or {}, step)
        _TESTING.stop(self)
        if not self._is_training:
            self._end()

    # --- parts ---------------------------------------------------------------------------------

    def _writer(self, name: str) -> summary.SummaryWriter:
        """The writer of a part; opened when it is first needed."""
        if name not in self._writers:
            self._writers[name] = (
                summary.create_file_writer(os.path.join(self.log_dir, name))
                if is_chief()
                else summary.create_noop_writer()
            )
        return self._writers[name]

    def _end(self) -> None:
        self._is_training = False
        self._profile.stop()
        _TESTING.stop(self)
        _TRAINING.stop(self)
        while self._writers:
            self._writers.popitem()[1].close()

    def _write_scalars(self, name: str, tag: str, values: Mapping[str, Any], step: int) -> None:
        for key, value in values.items():
            self._writer(name).write("scalar", tag.format(key), step, np.asarray(value))

    def _current_rate(self) -> ArrayLike:
        optimizer = self.model.optimizer
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            optimizer = optimizer.inner_optimizer
        return float(keras.ops.convert_to_tensor(optimizer.learning_rate))

    def _write_weights(self, epoch: int) -> None:
        for weight in self.model.weights:
            value = keras.ops.convert_to_numpy(weight).astype("float32")
            self._writer("train").write("histogram", f"{weight.path}/histogram", epoch, value)
            pixels = _as_images(value) if self.write_images else None
            if pixels is not None:
                self._writer("train").write("image", f"{weight.path}/image", epoch, pixels)

    def _write_graph(self) -> None:
        # By name, as Keras' own callback does: the class of functional models is not public.
        if type(self.model).__name__ not in ("Functional", "Sequential"):
            return
        try:
            model = self.model.to_json()
        except (NotImplementedError, TypeError, ValueError) as error:
            _LOG.warning("The layers of %r are not written for TensorBoard: %s", self.model.name, error)
            return
        self._writer("train").write("keras_model", "keras", 0, model)


class _Recording:
    """The default writer that a callback sets for summaries in the model, while `fit` runs.

    One for the process, as the default is: the callback that started last has it, and one whose
    `fit` failed, so that Keras never called its `on_train_end`, loses it to the next.
    """

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._owner: TensorBoard | None = None

    def start(self, owner: TensorBoard, writer: summary.SummaryWriter, every: int) -> None:
        """Make `writer` the default, for steps that are a multiple of `every`."""
        self._stack.close()
        self._owner = owner
        self._stack.enter_context(writer.as_default(step=0))
        self._stack.enter_context(summary.record_if(lambda: summary.get_step() % every == 0))

    def stop(self, owner: TensorBoard) -> None:
        """Put back the default that was, if `owner` still has it."""
        if self._owner is owner:
            self._owner = None
            self._stack.close()


_TRAINING, _TESTING = _Recording(), _Recording()


class _Profile:
    """A trace of a range of training steps; the first and last are counted from 1, or 0 for none."""

    def __init__(self, log_dir: str, first: int, last: int) -> None:
        self._log_dir, self._first, self._last = log_dir, first, last
        self._files = contextlib.ExitStack()
        self._is_running = False
        self._is_done = False
        self.is_wanted = first > 0

    def starting(self, first: int, last: int) -> None:
        """Start when the steps that begin now reach into the range."""
        if self.is_wanted and not self._is_running and not self._is_done and last >= self._first:
            jax.profiler.start_trace(self._files.enter_context(folder_of(self._log_dir)))
            self._is_running = True

    def ended(self, step: int) -> None:
        """Stop after the last step of the range."""
        if self._is_running and step >= self._last:
            self.stop()

    def stop(self) -> None:
        """Write the trace, if one runs."""
        if self._is_running:
            self._is_running, self._is_done = False, True
            with self._files:
                jax.profiler.stop_trace()


def _as_images(weight: ArrayLike) -> ArrayLike | None:
    """A weight as grey images of shape `(k, height, width, 1)`, as Keras draws it; None for others.

    >>> _as_images(np.zeros((5, 3))).shape
    (1, 3, 5, 1)
    """
    weight = np.squeeze(weight)
    if weight.ndim == 1:
        return weight[None, :, None, None]
    if weight.ndim == 2:
        return (weight.T if weight.shape[0] > weight.shape[1] else weight)[None, :, :, None]
    if weight.ndim == 3:
        if keras.config.image_data_format() == "channels_last":
            weight = weight.transpose(2, 0, 1)
        return weight[..., None]
    return weight if weight.ndim == 4 and weight.shape[-1] in (1, 3, 4) else None


def _write_embeddings(model: keras.Model, log_dir: str) -> None:
    """Write the weights of Embedding layers where TensorBoard's projector looks for them."""
    layers = [layer for layer in model.layers if isinstance(layer, keras.layers.Embedding)]
    if not layers:
        return
    os.makedirs(os.path.join(log_dir, "embeddings"), exist_ok=True)
    entries = []
    for layer in layers:
        path = f"embeddings/{layer.name}.tsv"
        np.savetxt(os.path.join(log_dir, path), keras.ops.convert_to_numpy(layer.embeddings), delimiter="\t")
        entries.append(f'embeddings {{ tensor_name: "{layer.name}" tensor_path: "{path}" }}\n')
    with open(os.path.join(log_dir, "projector_config.pbtxt"), "w", encoding="utf-8") as file:
        file.writelines(entries)


# --- arguments ---------------------------------------------------------------------------------


def _checked_count(name: str, value: Any) -> int:
    count = whole_number(value, 0)
    if count is None:
        raise InvalidArgumentError(
            f"`{name}` must be a number of epochs, or 0 for never. Received: {name}={value!r}. "
            f"Write `{name}=1`."
        )
    return count


def _checked_update_freq(value: Any) -> int:
    if value == "epoch":
        return 0
    if value == "batch":
        return 1
    count = whole_number(value, 1)
    if count is None:
        raise InvalidArgumentError(
            "`update_freq` must be 'epoch', 'batch', or a number of batches of at least 1. Received: "
            f"update_freq={value!r}. Write `update_freq='epoch'` to write at the ends of epochs alone."
        )
    return count


def _checked_range(value: Any) -> tuple[int, int]:
    if isinstance(value, str) and re.fullmatch(r"\d+(,\d+)?", value):
        # As TensorFlow takes it, too.
        first, _, last = value.partition(",")
        value = int(first), int(last or first)
    pair = value if isinstance(value, (tuple, list)) else (value, value)
    is_pair = len(pair) == 2 and all(whole_number(n, 0) is not None for n in pair)
    if not is_pair or pair[0] > pair[1] or (pair[0] == 0 and pair[1] > 0):
        raise InvalidArgumentError(
            "`profile_batch` must be 0, the number of a batch, or the first and the last of several, "
            f"counted from 1. Received: profile_batch={value!r}. Write `profile_batch=(10, 20)`."
        )
    return int(pair[0]), int(pair[1])
