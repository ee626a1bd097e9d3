"""`ExponentialMovingAverage`: averages of variables, in which late values count most.

Source: https://www.tensorflow.org/versions/r1.15/api_docs/python/tf/train/ExponentialMovingAverage

Tests: tests/virtual/estimator/test_scaffold.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import keras

from unisono._errors import UnsupportedError
from unisono.estimator._train_op import OtherUpdate, require_call


class ExponentialMovingAverage:
    """Keeps an average of each variable: `decay * average + (1 - decay) * value` in each step.

    Args:
        decay: number from 0 to 1; how much of an average stays in each step, such as 0.999.
        num_updates: whole number or variable; a number of steps, such as the global step, with which the
            decay grows up to `decay`: `(1 + num_updates) / (10 + num_updates)`. None for a constant decay.
        zero_debias: bool; has no effect, as an average begins with the first value of its variable.
        name: string; the last part of the names of averages.

    >>> ExponentialMovingAverage(0.99).name
    'ExponentialMovingAverage'
    """

    def __init__(
        self,
        decay: float,
        num_updates: object = None,
        zero_debias: bool = False,
        name: str = "ExponentialMovingAverage",
    ) -> None:
        self._decay, self._num_updates, self._name = decay, num_updates, name
        #: By the variable's identity: it, and its average.
        self._averages: dict[int, tuple[keras.Variable, keras.Variable]] = {}

    @property
    def name(self) -> str:
        """The last part of the names of averages."""
        return self._name

    def apply(self, var_list: Sequence[keras.Variable] | None = None) -> OtherUpdate:
        """Return the update of the averages, for `EstimatorSpec.train_op`.

        Args:
            var_list: sequence of variables; None for all trainable ones.

        Returns:
            An `OtherUpdate` for `EstimatorSpec.train_op`.

        Raises:
            ContextError: the call is outside of a model_fn.
            UnsupportedError: `var_list` has something else than variables.
        """
        call = require_call("ExponentialMovingAverage.apply")
        pairs = []
        for variable in call.store.trainable_variables if var_list is None else var_list:
            if not isinstance(variable, keras.Variable):
                raise UnsupportedError(
                    "An ExponentialMovingAverage is one of variables. Received: "
                    f"{type(variable).__name__}. Let `tf.summary.scalar` follow a loss."
                )
            if id(variable) not in self._averages:
                self._averages[id(variable)] = (variable, self._made(variable))
            pairs.append(self._averages[id(variable)])
        call.initializers.append(lambda variables: _begin(pairs))
        return OtherUpdate(lambda: self._update(pairs))

    def _made(self, variable: keras.Variable) -> keras.Variable:
        parent, _, own = self._path(variable).rpartition("/")
        with keras.name_scope(own, override_parent=parent):
            return keras.Variable(
                "zeros", tuple(variable.shape), variable.dtype, trainable=False, name=self._name,
                aggregation="only_first_replica",
            )  # fmt: skip

    def _update(self, pairs: Sequence[tuple[keras.Variable, keras.Variable]]) -> None:
        decay: Any = self._decay
        if self._num_updates is not None:
            count = jnp.asarray(getattr(self._num_updates, "value", self._num_updates), jnp.float32)
            decay = jnp.minimum(decay, (1.0 + count) / (10.0 + count))
        for variable, average in pairs:
            share = jnp.asarray(1.0 - decay, average.dtype)
            average.assign_sub((average.value - variable.value) * share)

    def average(self, var: keras.Variable) -> keras.Variable | None:
        """Return the average of a variable.

        Args:
            var: Keras variable.

        Returns:
            A Keras variable; None where `apply` was not called with `var`.
        """
        pair = self._averages.get(id(var))
        return None if pair is None else pair[1]

    def average_name(self, var: keras.Variable) -> str:
        """Return the name of the average of a variable, which need not exist yet.

        Args:
            var: Keras variable.

        Returns:
            A string, the path of the variable and the name of the averages.

        Raises:
            ContextError: the call is outside of a model_fn.
        """
        return f"{self._path(var)}/{self._name}"

    def variables_to_restore(
        self, moving_avg_variables: Sequence[keras.Variable] | None = None
    ) -> dict[str, keras.Variable]:
        """Return the variables that a `Saver` restores to evaluate a model with the averages.

        Args:
            moving_avg_variables: sequence of variables whose values are restored from averages; None for all
                trainable ones.

        Returns:
            The variables of the model_fn so far, by the names from which they are restored.

        Raises:
            ContextError: the call is outside of a model_fn.
        """
        store = require_call("ExponentialMovingAverage.variables_to_restore").store
        averaged = store.trainable_variables if moving_avg_variables is None else list(moving_avg_variables)
        known = {id(variable) for variable in averaged}
        by_average = {self.average_name(variable): variable for variable in averaged}
        others = {self._path(v): v for v in store.used if id(v) not in known and v is not store.global_step}
        return by_average | others | {"global_step": store.global_step}

    def _path(self, variable: keras.Variable) -> str:
        path: str | None = require_call("ExponentialMovingAverage").store.path_of(variable)
        return variable.path if path is None else path


def _begin(pairs: Sequence[tuple[keras.Variable, keras.Variable]]) -> None:
    for variable, average in pairs:
        average.assign(variable.value)
