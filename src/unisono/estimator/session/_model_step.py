"""A user's `model_fn` as the step of one replica.

Each execution of a step calls `model_fn` again, which makes its layers anew around the variables of a store.
What it returns is kept with the names of the values that hooks may ask for.

Tests: tests/virtual/estimator/test_train.py, tests/virtual/estimator/test_model_fn.py.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from unisono._context import ReplicaContext
from unisono._errors import InvalidArgumentError
from unisono._types import PyTree, UserValue
from unisono._values import Mirrored, ReduceOp
from unisono.estimator._spec import EstimatorSpec, ModeKeys, metric_of
from unisono.estimator._train_op import ModelCall, OtherUpdate, TrainOp, entered_call, train_ops_of
from unisono.estimator.hooks._logging import NanLossDuringTrainingError
from unisono.spi import VariablesByPath, running_step
from unisono.step._tape import GradientTape

GLOBAL_STEP = "global_step"

#: The name of the predictions in a step's results for `predict`; values of a dict are `predictions/key`.
PREDICTIONS = "predictions"


class ModelVariables(VariablesByPath):
    """The variables of a model_fn, and the number of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self._global_step: keras.Variable | None = None

    @property
    def global_step(self) -> keras.Variable:
        """The variable that counts steps."""
        if self._global_step is None:
            raise InvalidArgumentError("The variables of a model_fn are made when it is run first.")
        return self._global_step

    @contextlib.contextmanager
    def entered(self) -> Iterator[ModelVariables]:
        """Let a run of the model_fn get its variables from here."""
        with super().entered():
            self._global_step = keras.Variable(
                0, dtype="int32", trainable=False, aggregation="only_first_replica", name=GLOBAL_STEP
            )
            yield self


@dataclasses.dataclass(frozen=True, eq=False)
class ModelFunction:
    """A model_fn with the arguments that do not change."""

    function: Callable[..., Any]
    params: UserValue
    config: Any

    def __call__(self, features: PyTree, labels: PyTree, mode: str) -> EstimatorSpec:
        """Call the user's function.

        Raises:
            InvalidArgumentError: it has no argument for the labels, or returns something else than a spec.
        """
        known = argument_names(self.function)
        given: dict[str, Any] = {}
        if "labels" in known:
            given["labels"] = labels
        elif labels is not None:
            raise InvalidArgumentError(
                "A model_fn that gets labels needs an argument for them. Received: a model_fn with the "
                f"arguments {sorted(known)}. Write `def model_fn(features, labels, mode):`."
            )
        every = {"mode": mode, "config": self.config, "params": copy.deepcopy(self.params)}
        given |= {name: value for name, value in every.items() if name in known}
        spec = self.function(features=features, **given)
        if not isinstance(spec, EstimatorSpec):
            raise InvalidArgumentError(
                f"model_fn should return an EstimatorSpec. Received: {type(spec).__name__}. Write "
                "`return EstimatorSpec(mode, loss=loss, train_op=train_op)`."
            )
        if spec.mode != mode:
            raise InvalidArgumentError(
                f"model_fn should return an EstimatorSpec of the mode that it got, {mode!r}. Received: "
                f"mode={spec.mode!r}. Write `EstimatorSpec(mode, ...)`."
            )
        return spec


def argument_names(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of a function's arguments; of a `functools.partial`, those that are left."""
    given = function.keywords if isinstance(function, functools.partial) else {}
    return frozenset(inspect.signature(function).parameters) - frozenset(given)


class ModelStep:
    """One mode of a model_fn as the step of one replica."""

    def __init__(self, model_fn: ModelFunction, mode: str, variables: ModelVariables) -> None:
        self._model_fn, self._mode, self.variables = model_fn, mode, variables
        #: All workers stop alike where the loss of one is no number.
        self.shared_errors = (NanLossDuringTrainingError,)
        self._first: tuple[EstimatorSpec, ModelCall] | None = None
        #: By name, the values of the first run that hooks may ask for: they are known by identity.
        self.exposed: dict[str, Any] = {}
        #: Which of these each step returns: the loss and all other scalars.
        self.scalars: frozenset[str] = frozenset()

    @property
    def spec(self) -> EstimatorSpec:
        """The result of the first run, whose hooks the loop calls."""
        if self._first is None:
            raise InvalidArgumentError("A model_fn must be run before its spec is known.")
        return self._first[0]

    @property
    def call(self) -> ModelCall:
        """The first run."""
        if self._first is None:
            raise InvalidArgumentError("A model_fn must be run before it is known what it exposes.")
        return self._first[1]

    def returning(self, names: Iterable[str]) -> Callable[[PyTree], Mirrored[Any]]:
        """Return the step, which returns named values."""
        wanted = sorted(names)
        return lambda element: Mirrored(self._run(element, wanted))

    def create(self, element: PyTree) -> Mirrored[Any]:
        """Run the step the first time, which makes the variables."""
        return Mirrored(self._run(element, None))

    def _run(self, element: PyTree, wanted: Iterable[str] | None) -> dict[str, jax.Array]:
        features, labels = element
        running = running_step()
        if running.replica is None:
            raise InvalidArgumentError("The step of a model_fn runs in a replica.")
        # Losses and gradients are averaged, as in `fit`.
        with running.averaging(True), self.variables.entered():
            with GradientTape(persistent=True) as tape:
                call = ModelCall(self._mode, tape, self.variables)
                with entered_call(call):
                    spec = self._model_fn(features, labels, self._mode)
            if self._mode == ModeKeys.TRAIN:
                self._update(spec, call)
            exposed = _exposed(spec, call)
            if self._first is None:
                self._first, self.exposed = (spec, call), exposed
                self.scalars = frozenset(name for name, x in exposed.items() if jnp.ndim(x) == 0)
            chosen = self.scalars if wanted is None else wanted
            return {name: _of_all(exposed[name], running.replica) for name in chosen}

    def _update(self, spec: EstimatorSpec, call: ModelCall) -> None:
        """Make the updates that the train op asks for, and count the step."""
        step, running = self.variables.global_step, running_step()
        ops = train_ops_of(spec.train_op, call)
        for op in ops:
            if isinstance(op, OtherUpdate):
                with running.alike() if op.is_alike else nullcontext():
                    op.make()
                continue
            with running.averaging(False) if op.are_shares else nullcontext():
                op.optimizer.apply_gradients(op.gradients_and_variables)
        named = [op for op in ops if isinstance(op, TrainOp) and op.global_step is not None]
        if named or not running.has_written(step):
            with running.alike():
                step.assign_add(max(1, len(named)))


def _exposed(spec: EstimatorSpec, call: ModelCall) -> dict[str, Any]:
    """Return the values that hooks may ask for, by name."""
    exposed: dict[str, Any] = {} if spec.loss is None else {"loss": spec.loss}
    given = spec.predictions
    own = given if isinstance(given, Mapping) else {PREDICTIONS: given}
    predict = {f"{PREDICTIONS}/{key}": x for key, x in own.items()} if isinstance(given, Mapping) else own
    others = dict(predict) if spec.mode == ModeKeys.PREDICT else {}
    # Those of a `MultiHead` have pairs as keys.
    shown = {"/".join(key) if isinstance(key, tuple) else key: x for key, x in own.items()}
    # Last, as reading a pair exposes its value, too, by another name.
    metrics = ((n, x[0]) for n, x in (spec.eval_metric_ops or {}).items() if x is not metric_of(x))
    for name, value in [*call.exposed.items(), *shown.items(), *metrics, *others.items()]:
        exposed.setdefault(name, value)
    return {name: x for name, x in exposed.items() if isinstance(x, (jax.Array, np.ndarray, np.generic))}


def _of_all(value: object, replica: ReplicaContext) -> jax.Array:
    """Return a value as one device has it: the mean of numbers, and the rows of all replicas."""
    array: jax.Array = jnp.asarray(value)
    if replica.num_replicas_in_sync == 1:
        return array
    if array.ndim:
        gathered: jax.Array = replica.all_gather(array, 0)
        return gathered
    if jnp.issubdtype(array.dtype, jnp.inexact):
        mean: jax.Array = replica.all_reduce(ReduceOp.MEAN, array)
        return mean
    first = jnp.where(jnp.equal(replica.replica_id_in_sync_group, 0), array, jnp.zeros_like(array))
    return replica.all_reduce(ReduceOp.SUM, first.astype(jnp.int32)).astype(array.dtype)
