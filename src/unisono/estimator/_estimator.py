"""`Estimator`: trains, evaluates and predicts what a `model_fn` describes.

Source of the names: https://www.tensorflow.org/versions/r1.15/api_docs/python/tf/estimator/Estimator

Tests: tests/virtual/estimator/test_train.py, tests/virtual/estimator/test_evaluate.py.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import keras
import numpy as np

from unisono._errors import CheckpointError, InvalidArgumentError, InvalidTypeError
from unisono._system._object_store import place_of
from unisono._types import PyTree
from unisono.checkpoint._reader import latest_checkpoint, load_checkpoint
from unisono.estimator._run_config import RunConfig
from unisono.estimator._spec import ModeKeys, checked_call, checked_hooks, checked_listeners
from unisono.estimator._warm_start import initializer_of
from unisono.estimator.hooks._stopping import StopAtStepHook
from unisono.estimator.session._evaluate import PassTask, evaluate, predictions
from unisono.estimator.session._input import InputFunction
from unisono.estimator.session._model_step import ModelFunction, argument_names
from unisono.estimator.session._progress import shown_progress
from unisono.estimator.session._saving import global_step_in, newest_checkpoint
from unisono.estimator.session._train import Training, TrainTask, can_write_summaries
from unisono.spi import Executables, default_strategy

if TYPE_CHECKING:
    from unisono.estimator.hooks._checkpoints import CheckpointSaverListener
    from unisono.estimator.hooks._hook import SessionRunHook
    from unisono.strategies._base import Strategy
    from unisono.strategies._replicated import ReplicatedStrategy

_LOG = logging.getLogger("unisono")

_MODEL_FN_ARGUMENTS = frozenset({"features", "labels", "mode", "params", "config"})


class Estimator:
    """Trains, evaluates and predicts what a `model_fn` describes, on any strategy.

    Each call of `train`, `evaluate` and `predict` makes the variables anew and restores them from the newest
    checkpoint of `model_dir`, which makes training go on where it ended, in this process or a later one.

    Args:
        model_fn: from `features`, and `labels`, `mode`, `params`, `config` where it has arguments of these
            names, to an `EstimatorSpec`. It is run each time a program is traced: what it computes with
            arrays is compiled.
        model_dir: directory of checkpoints and event files; by default `config`'s, or a temporary one.
        config: a `RunConfig`.
        params: hyperparameters for the argument `params`: a dict by name, or an object of the user's.
        warm_start_from: path of a checkpoint, or a `WarmStartSettings`: what the variables begin with where
            `model_dir` has no checkpoint.

    Raises:
        InvalidArgumentError: for a `model_fn` of other arguments, or two different `model_dir`s.

    >>> import unisono
    >>> def model_fn(features, labels, mode):
    ...     output = keras.layers.Dense(1)(features)
    ...     return unisono.estimator.EstimatorSpec(mode, predictions={"output": output})
    >>> estimator = Estimator(model_fn, params=None)
    >>> estimator.latest_checkpoint() is None
    True
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: object = None,
        warm_start_from: object = None,
    ) -> None:
        _check_model_fn(model_fn, params)
        self._config = _with_model_dir(config, model_dir)
        self._model_fn = model_fn
        self._params = copy.deepcopy({} if params is None else params)
        self._warm_start = warm_start_from
        self._executables = Executables()
        _LOG.info("Using the model_dir %s.", self.model_dir)

    @property
    def model_dir(self) -> str:
        """The directory of checkpoints and event files."""
        directory: str = self._config.model_dir
        return directory

    @property
    def config(self) -> RunConfig:
        """A copy of the configuration."""
        return copy.copy(self._config)

    @property
    def params(self) -> Any:
        """A copy of the hyperparameters."""
        return copy.deepcopy(self._params)

    @property
    def model_fn(self) -> Callable[..., Any]:
        """The model_fn, of the arguments `features`, `labels`, `mode` and `config`."""

        def public(features: PyTree, labels: PyTree, mode: str, config: RunConfig) -> Any:
            return ModelFunction(self._model_fn, self._params, config)(features, labels, mode)

        return public

    # --- training -----------------------------------------------------------------------------

    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Sequence[SessionRunHook] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[CheckpointSaverListener] | None = None,
    ) -> Self:
        """Train until the data end, or for some steps.

        Args:
            input_fn: returns a dataset of pairs of features and labels, batched; one element is for one
                replica. It gets `mode`, `params`, `config` and `input_context` where it has such arguments.
            hooks: `SessionRunHook`s.
            steps: how many steps from now on.
            max_steps: the number of steps in all, with earlier calls.
            saving_listeners: `CheckpointSaverListener`s.

        Returns:
            This Estimator.

        Raises:
            InvalidArgumentError: for both of `steps` and `max_steps`, or a number below 1.
        """
        checked_call(input_fn, "input_fn")
        given, listeners = list(checked_hooks(hooks, "hooks")), list(checked_listeners(saving_listeners))
        _check_steps(steps, max_steps)
        strategy = _replicated(self._config.train_distribute)
        path = newest_checkpoint(self.model_dir, strategy.process_group)
        if max_steps is not None and path is not None and global_step_in(path) >= max_steps:
            _LOG.warning("Skipping training since max_steps has already saved.")
            return self
        if steps is not None or max_steps is not None:
            given.append(StopAtStepHook(steps, max_steps))
        self._seed()
        data = self._data(input_fn, ModeKeys.TRAIN)
        task = TrainTask(
            self._function, strategy, path, given, initializer_of(self._warm_start), self._executables,
            config=self._config, model_dir=self.model_dir, listeners=listeners,
        )  # fmt: skip
        with shown_progress() if strategy.is_chief else contextlib.nullcontext():
            Training(task, data).run()
        return self

    # --- evaluation and predictions --------------------------------------------------------------

    def evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
        checkpoint_path: str | os.PathLike[str] | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Return the metrics of a checkpoint by name, with `loss`, the mean over steps, and `global_step`.

        Args:
            input_fn: as for `train`.
            steps: how many steps; None for all data.
            hooks: `SessionRunHook`s.
            checkpoint_path: of the checkpoint; the newest one by default. Without any, initial values are
                evaluated.
            name: of the evaluation, if there are several: each has its own event files.

        Raises:
            InvalidArgumentError: for `steps` that are not above 0, or an input without data.
        """
        checked_call(input_fn, "input_fn")
        given = checked_hooks(hooks, "hooks")
        _check_steps(steps, None)
        task = self._evaluation(self._config.eval_distribute, checkpoint_path, given, "evaluate")
        data = self._data(input_fn, ModeKeys.EVAL)
        log_dir = self.eval_dir(name) if can_write_summaries(self._config) else None
        return evaluate(task, data, steps, log_dir)

    def predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: Sequence[str] | str | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
        checkpoint_path: str | os.PathLike[str] | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """Yield the predictions of a checkpoint, one example or one batch at a time, on one device.

        Args:
            input_fn: returns features, or pairs of features and labels, which are left out.
            predict_keys: which predictions; None for all.
            hooks: `SessionRunHook`s.
            checkpoint_path: of the checkpoint; the newest one by default.
            yield_single_examples: False yields whole batches.

        Yields:
            A dict of arrays by name, where `EstimatorSpec.predictions` is one; else an array. The "classes"
            of a canned Estimator are bytes.
        """
        checked_call(input_fn, "input_fn")
        given = checked_hooks(hooks, "hooks")
        task = self._evaluation(None, checkpoint_path, given, "predict")
        data = self._data(input_fn, ModeKeys.PREDICT)
        yield from self._predictions(task, data, predict_keys, yield_single_examples)

    def _predictions(
        self, task: PassTask, data: InputFunction, keys: Sequence[str] | str | None, single: bool
    ) -> Iterator[Any]:
        return predictions(task, data, keys, single)

    def _evaluation(
        self,
        strategy: Strategy | None,
        path: str | os.PathLike[str] | None,
        hooks: Sequence[Any],
        what: str,
    ) -> PassTask:
        # The chief alone evaluates where variables live on servers.
        replicated = _replicated(None if strategy is not None and strategy._workers_make_data else strategy)
        if path is None:
            checkpoint = newest_checkpoint(self.model_dir, replicated.process_group)
        else:
            checkpoint = os.fspath(path)
        if checkpoint is None:
            _LOG.info(
                "Could not find trained model in %s, running initialization to %s.", self.model_dir, what
            )
        self._seed()
        initialize = initializer_of(self._warm_start)
        return PassTask(self._function, replicated, checkpoint, hooks, initialize, self._executables)

    def export_saved_model(
        self,
        export_dir_base: str | os.PathLike[str],
        serving_input_receiver_fn: Callable[[], Any],
        assets_extra: object = None,
        as_text: bool = False,
        checkpoint_path: str | os.PathLike[str] | None = None,
        experimental_mode: str = ModeKeys.PREDICT,
    ) -> str:
        """Write the predictions of a checkpoint as a StableHLO artefact, which `unisono.export.load` reads.

        Args:
            export_dir_base: directory of exports; the new one is called by the time in seconds.
            serving_input_receiver_fn: gives a `ServingInputReceiver`, such as what
                `build_raw_serving_input_receiver_fn` returns.
            assets_extra: must be None.
            as_text: accepted for TensorFlow's signature.
            checkpoint_path: of the checkpoint; the newest one by default.
            experimental_mode: must be `ModeKeys.PREDICT`.

        Returns:
            The path of the new directory. It takes the receiver's tensors, and gives those of the output
            `serving_default`, of the only one of `export_outputs`, or else the predictions.

        Raises:
            CheckpointError: there is no checkpoint.
            InvalidArgumentError: an argument cannot be used.
        """
        from unisono.estimator._serving import export_model

        if assets_extra is not None or experimental_mode != ModeKeys.PREDICT:
            raise InvalidArgumentError(
                "An artefact holds predictions alone. Received: "
                f"assets_extra={assets_extra!r}, experimental_mode={experimental_mode!r}. Leave them out."
            )
        checked_call(serving_input_receiver_fn, "serving_input_receiver_fn")
        task = self._evaluation(None, self._checkpoint(checkpoint_path), (), "export")
        return export_model(task, export_dir_base, serving_input_receiver_fn)

    export_savedmodel = export_saved_model

    def experimental_export_all_saved_models(
        self,
        export_dir_base: str | os.PathLike[str],
        input_receiver_fn_map: Mapping[str, Callable[[], Any]],
        assets_extra: object = None,
        as_text: bool = False,
        checkpoint_path: str | os.PathLike[str] | None = None,
    ) -> str:
        """Write the predictions of a checkpoint, as `export_saved_model`.

        Args:
            export_dir_base: directory in which the artefact gets a new one.
            input_receiver_fn_map: from `ModeKeys.PREDICT` to a serving input receiver function.
            assets_extra: see `export_saved_model`.
            as_text: see `export_saved_model`.
            checkpoint_path: see `export_saved_model`.

        Raises:
            InvalidArgumentError: for other modes: an artefact holds predictions alone.
        """
        if set(input_receiver_fn_map) != {ModeKeys.PREDICT}:
            raise InvalidArgumentError(
                f"An artefact holds predictions alone. Received: the modes {sorted(input_receiver_fn_map)}. "
                "Pass `{ModeKeys.PREDICT: serving_input_receiver_fn}`."
            )
        receiver_fn = input_receiver_fn_map[ModeKeys.PREDICT]
        return self.export_saved_model(export_dir_base, receiver_fn, assets_extra, as_text, checkpoint_path)

    # --- what was trained ------------------------------------------------------------------------

    def latest_checkpoint(self) -> str | None:
        """Return the path of the newest checkpoint of `model_dir`, or None."""
        return latest_checkpoint(self.model_dir)

    def get_variable_names(self) -> list[str]:
        """Return the names of all variables of the newest checkpoint.

        Raises:
            CheckpointError: there is none.
        """
        return sorted(load_checkpoint(self._checkpoint(None)).get_variable_to_shape_map())

    def get_variable_value(self, name: str) -> np.ndarray:
        """Return a variable of the newest checkpoint.

        Args:
            name: one of `get_variable_names()`; `:0` at its end is left out.

        Raises:
            CheckpointError: there is no checkpoint, or no variable of this name.
        """
        return load_checkpoint(self._checkpoint(None)).get_tensor(name.removesuffix(":0"))

    def eval_dir(self, name: str | None = None) -> str:
        """Return the directory of the event files of an evaluation.

        Args:
            name: of the evaluation.
        """
        return os.path.join(self.model_dir, f"eval_{name}" if name else "eval")

    def _parts(self) -> dict[str, Any]:
        """Return the constructor's arguments, by name, for an Estimator of another process.

        `config` is a dict of a RunConfig's arguments, without strategies.
        """
        config = self._config._arguments()
        for name in ("train_distribute", "eval_distribute", "experimental_distribute"):
            config[name] = None
        return {
            "model_fn": self._model_fn,
            "config": config,
            "params": None if self._params == {} else self._params,
            "warm_start_from": self._warm_start,
        }

    def _with_model_fn(self, model_fn: Callable[..., Any]) -> Self:
        """Return an Estimator that is this one with another `model_fn`, which gets no `params`.

        Args:
            model_fn: as of the constructor.
        """
        new = copy.copy(self)
        new._model_fn, new._params, new._executables = model_fn, {}, Executables()
        return new

    def _checkpoint(self, path: str | os.PathLike[str] | None) -> str:
        """Return the path of a checkpoint that exists; the newest one for None."""
        checkpoint = self.latest_checkpoint() if path is None else os.fspath(path)
        if checkpoint is None:
            raise CheckpointError(
                f"Could not find trained model in model_dir: {self.model_dir}. Received: a directory without "
                "checkpoints. Call `train` first, or pass `checkpoint_path`."
            )
        return checkpoint

    @property
    def _function(self) -> ModelFunction:
        return ModelFunction(self._model_fn, self._params, self._config)

    def _data(self, input_fn: Callable[..., Any], mode: str) -> InputFunction:
        given = {"mode": mode, "params": self.params, "config": self.config}
        return InputFunction(self._input_fn(input_fn, mode), given)

    def _input_fn(self, input_fn: Callable[..., Any], mode: str) -> Callable[..., Any]:
        """Return the input_fn whose elements a step takes; canned Estimators encode them."""
        return input_fn

    def _seed(self) -> None:
        if self._config.tf_random_seed is not None:
            keras.utils.set_random_seed(self._config.tf_random_seed)


def _check_model_fn(model_fn: Callable[..., Any], params: object) -> None:
    if model_fn is None:
        raise InvalidArgumentError("model_fn must be provided to Estimator. Received: None.")
    checked_call(model_fn, "model_fn")
    known = argument_names(model_fn)
    if "features" not in known:
        raise InvalidArgumentError(
            f"model_fn must include features argument. Received: a model_fn with {sorted(known)}. Write "
            "`def model_fn(features, labels, mode):`."
        )
    if params is not None and "params" not in known:
        raise InvalidArgumentError(
            "model_fn does not include params argument, but params is passed to Estimator. Received: params="
            f"{params!r}. Write `def model_fn(features, labels, mode, params):`."
        )
    others = known - _MODEL_FN_ARGUMENTS
    if others:
        raise InvalidArgumentError(
            f"model_fn has following not expected args: {sorted(others)}. Received: a model_fn with "
            f"{sorted(known)}. Pass them with `params`, or `functools.partial`."
        )


def _with_model_dir(config: RunConfig | None, model_dir: str | os.PathLike[str] | None) -> RunConfig:
    """Return a configuration that names the directory of an Estimator."""
    if config is not None and not isinstance(config, RunConfig):
        raise InvalidTypeError(
            f"config must be an instance of `RunConfig`. Received: {type(config).__name__}. Write "
            "`RunConfig(save_checkpoints_steps=100)`."
        )
    config = config or RunConfig()
    own = None if model_dir is None else os.fspath(model_dir)
    place_of(own or "")
    if own == "":
        raise InvalidArgumentError("model_dir should be non-empty. Received: model_dir=''.")
    if own is not None and config.model_dir is not None and own != config.model_dir:
        raise InvalidArgumentError(
            "`model_dir` are set both in constructor and `RunConfig`, but with different values. Received: "
            f"{own!r} and {config.model_dir!r}. Leave one of them out."
        )
    directory = own or config.model_dir
    if directory is None:
        directory = tempfile.mkdtemp()
        _LOG.warning("Using a temporary folder as model_dir: %s.", directory)
    return config.replace(model_dir=directory)


def _check_steps(steps: int | None, max_steps: int | None) -> None:
    if steps is not None and max_steps is not None:
        raise InvalidArgumentError(
            f"Can not provide both steps and max_steps. Received: {steps} and {max_steps}. Leave one out."
        )
    for name, value in (("steps", steps), ("max_steps", max_steps)):
        if value is not None and value <= 0:
            raise InvalidArgumentError(f"Must specify {name} > 0. Received: {name}={value}.")


def _replicated(strategy: Strategy | None) -> ReplicatedStrategy:
    """Return the strategy whose replicas run the steps."""
    if strategy is None:
        return default_strategy()
    if strategy._replicated is None:
        raise strategy._unsupported("train_distribute")
    return strategy._replicated
