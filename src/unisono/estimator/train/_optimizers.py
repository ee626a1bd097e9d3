"""The optimizers of TensorFlow 1, each a thin cover of a Keras optimizer.

Source: https://www.tensorflow.org/versions/r1.15/api_docs/python/tf/train

Tests: tests/unit/estimator/test_optimizers.py, tests/virtual/estimator/test_train_names.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras

from unisono._errors import UnsupportedError
from unisono._types import ArrayLike
from unisono.estimator import _train_op
from unisono.estimator._collections import unique_name
from unisono.estimator._docstrings import Texts, argument, class_of
from unisono.estimator._train_op import GradientAndVariable, TrainOp

_METHOD_TEXTS = Texts(
    {
        "loss": "float array of shape `()`, which the model_fn has computed.",
        "grads_and_vars": "pairs of a gradient and its variable, such as `compute_gradients` returns.",
        "global_step": "variable of `get_global_step`, to which 1 is added; None leaves that to the loop.",
        "var_list": "sequence of variables; None for all trainable ones.",
        "gate_gradients": "any value; has no effect.",
        "aggregation_method": "any value; has no effect.",
        "colocate_gradients_with_ops": "any value; has no effect.",
        "name": "string; has no effect.",
        "grad_loss": "must be None.",
    },
    raises={
        "ContextError": "the call is outside of a model_fn.",
        "UnsupportedError": "`grad_loss` is not None.",
    },
)

#: The texts for arguments of optimizers.
_TEXTS = Texts(
    {
        "learning_rate": "number, float array of shape `()` such as `exponential_decay` returns, or schedule "
        "of Keras.",
        "accum_name": "string; has no effect.",
        "beta1": "number from 0 to 1; how much of the mean of gradients stays in each step.",
        "beta2": "number from 0 to 1; how much of the mean of squares of gradients stays in each step.",
        "centered": "bool; whether the squared mean of gradients is subtracted from the mean of squares.",
        "epsilon": "number; added to the mean of squares before its root is taken.",
        "initial_accumulator_value": "number; the first value of the sums of squares of gradients.",
        "l1_regularization_strength": "number; how strongly absolute values of variables are kept small.",
        "l2_regularization_strength": "number; how strongly squares of variables are kept small.",
        "l2_shrinkage_regularization_strength": "number; the factor of twice the variable that is "
        "added to its gradient.",
        "learning_rate_power": "number, at most 0; 0 for a constant rate.",
        "linear_name": "string; has no effect.",
        "momentum": "number, or float array of shape `()`; how much of the sum of gradients stays.",
        "name": "string; the name of the optimizer.",
        "rho": "number from 0 to 1; how much of the means of squares stays in each step.",
        "use_locking": "bool; has no effect.",
        "use_nesterov": "bool; whether gradients are as if taken one step ahead.",
    }
)


class Optimizer:
    """The base of TensorFlow 1's optimizers.

    Args:
        optimizer: Keras optimizer that makes the updates.

    >>> Optimizer(keras.optimizers.SGD(0.1, name="steps")).get_name()
    'steps'
    """

    def __init__(self, optimizer: keras.Optimizer) -> None:
        #: The Keras optimizer that makes the updates.
        self.optimizer = optimizer

    @_METHOD_TEXTS.with_texts(returns="A `TrainOp` for `EstimatorSpec.train_op`.")
    def minimize(
        self,
        loss: ArrayLike,
        global_step: keras.Variable | None = None,
        var_list: Sequence[keras.Variable] | None = None,
        gate_gradients: object = None,
        aggregation_method: object = None,
        colocate_gradients_with_ops: object = None,
        name: str | None = None,
        grad_loss: object = None,
    ) -> TrainOp:
        """Return the update that makes a loss smaller, for `EstimatorSpec.train_op`."""
        _check_grad_loss(grad_loss)
        return _train_op.minimize(self.optimizer, loss, global_step, var_list)

    @_METHOD_TEXTS.with_texts(returns="A list of pairs of a gradient, an array or None, and its variable.")
    def compute_gradients(
        self,
        loss: ArrayLike,
        var_list: Sequence[keras.Variable] | None = None,
        gate_gradients: object = None,
        aggregation_method: object = None,
        colocate_gradients_with_ops: object = None,
        grad_loss: object = None,
    ) -> list[GradientAndVariable]:
        """Return pairs of a gradient, which may be clipped, and its variable."""
        _check_grad_loss(grad_loss)
        return _train_op.compute_gradients(self.optimizer, loss, var_list)

    @_METHOD_TEXTS.with_texts(
        returns="A `TrainOp` for `EstimatorSpec.train_op`; None outside of a model_fn, where it is made.",
        raises={},
    )
    def apply_gradients(
        self,
        grads_and_vars: Iterable[GradientAndVariable],
        global_step: keras.Variable | None = None,
        name: str | None = None,
    ) -> TrainOp | None:
        """Return the update by gradients, for `EstimatorSpec.train_op`; outside of a model_fn, make it."""
        if _train_op.current_call() is not None:
            return _train_op.apply_gradients(self.optimizer, grads_and_vars, global_step)
        self.optimizer.apply_gradients(list(grads_and_vars))
        if global_step is not None:
            global_step.assign_add(1)
        return None

    def get_name(self) -> str:
        """Return the optimizer's name.

        Returns:
            A string.
        """
        name: str = self.optimizer.name
        return name

    def variables(self) -> list[keras.Variable]:
        """Return the optimizer's own variables.

        Returns:
            A list of Keras variables.
        """
        return list(self.optimizer.variables)


def _check_grad_loss(grad_loss: object) -> None:
    if grad_loss is not None:
        raise UnsupportedError(
            "The gradient is the loss' own. Received: grad_loss. Multiply the loss by it, and add up."
        )


def _rate(rate: Any) -> Any:
    """Return a learning rate as Keras takes it.

    In a model_fn a number stays part of the program, as in TensorFlow 1: a checkpoint does not bring back an
    old one. Elsewhere Keras makes a variable of it.
    """
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule) or callable(rate):
        return rate
    is_number = not isinstance(rate, (keras.Variable, jax.core.Tracer))
    return float(rate) if is_number and _train_op.current_call() is None else _value_of(rate)


def _value_of(number: object) -> Callable[[], jax.Array]:
    return lambda: number.value if isinstance(number, keras.Variable) else keras.ops.convert_to_tensor(number)


#: In place of the default of an argument that must be given.
_REQUIRED = inspect.Parameter.empty

#: The arguments of optimizers that have no effect.
_IGNORED = ("use_locking", "accum_name", "linear_name")


def _optimizer(
    name: str,
    doc: str,
    arguments: Mapping[str, object],
    make: Callable[..., keras.Optimizer],
    texts: Texts = _TEXTS,
) -> type[Any]:
    """Return a class of optimizers.

    Args:
        arguments: the arguments in their order, with their defaults.
        make: a function of the learning rate, the name, and of further arguments by their names, that returns
            the Keras optimizer.
    """

    def init(self: Optimizer, learning_rate: object, name: str, **given: object) -> None:
        options = {key: value for key, value in given.items() if key not in _IGNORED}
        Optimizer.__init__(self, make(_rate(learning_rate), unique_name(name), **options))

    types = {type: "ArrayLike", bool: "bool", float: "float", str: "str", type(None): "str | None"}
    every = [
        argument(key, value, "ArrayLike" if key == "learning_rate" else types[type(value)])
        for key, value in arguments.items()
    ]
    return texts(class_of(name, (Optimizer,), doc, every, init))


# fmt: off
GradientDescentOptimizer = _optimizer(
    "GradientDescentOptimizer",
    """Subtracts gradients times a rate.

    >>> optimizer = GradientDescentOptimizer(0.2)
    """,
    {"learning_rate": _REQUIRED, "use_locking": False, "name": "GradientDescent"},
    lambda rate, name: keras.optimizers.SGD(rate, name=name),
)
MomentumOptimizer = _optimizer(
    "MomentumOptimizer",
    """Subtracts a sum of gradients that decays, times a rate.

    >>> optimizer = MomentumOptimizer(0.1, 0.9, use_nesterov=True)
    """,
    {
        "learning_rate": _REQUIRED, "momentum": _REQUIRED, "use_locking": False, "name": "Momentum",
        "use_nesterov": False,
    },
    lambda rate, name, **options: MomentumRule(rate, name, {"momentum": 0.0}, options),
)
AdamOptimizer = _optimizer(
    "AdamOptimizer",
    """Adam, with TensorFlow's `epsilon`: that of the paper's note before section 2.1.

    >>> optimizer = AdamOptimizer()
    """,
    {
        "learning_rate": 0.001, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "use_locking": False,
        "name": "Adam",
    },
    lambda rate, name, beta1, beta2, epsilon: keras.optimizers.Adam(rate, beta1, beta2, epsilon, name=name),
    _TEXTS.with_texts(epsilon="number; added to the root of the mean of squares."),
)
AdagradOptimizer = _optimizer(
    "AdagradOptimizer",
    """Gradients by the root of the sum of their squares.

    >>> optimizer = AdagradOptimizer(0.1)
    """,
    {"learning_rate": _REQUIRED, "initial_accumulator_value": 0.1, "use_locking": False, "name": "Adagrad"},
    lambda rate, name, initial_accumulator_value: keras.optimizers.Adagrad(
        rate, initial_accumulator_value, epsilon=0.0, name=name
    ),
)
AdadeltaOptimizer = _optimizer(
    "AdadeltaOptimizer",
    """Adadelta.

    >>> optimizer = AdadeltaOptimizer()
    """,
    {"learning_rate": 0.001, "rho": 0.95, "epsilon": 1e-8, "use_locking": False, "name": "Adadelta"},
    lambda rate, name, rho, epsilon: keras.optimizers.Adadelta(rate, rho, epsilon, name=name),
    _TEXTS.with_texts(epsilon="number; added to the means before their roots are taken."),
)
RMSPropOptimizer = _optimizer(
    "RMSPropOptimizer",
    """RMSProp, whose mean of squares begins with 1.

    >>> optimizer = RMSPropOptimizer(0.01)
    """,
    {
        "learning_rate": _REQUIRED, "decay": 0.9, "momentum": 0.0, "epsilon": 1e-10, "use_locking": False,
        "centered": False, "name": "RMSProp",
    },
    lambda rate, name, **options: RMSPropRule(
        rate, name, {"rms": 1.0, "momentum": 0.0} | ({"mg": 0.0} if options["centered"] else {}), options
    ),
    _TEXTS.with_texts(
        decay="number from 0 to 1; how much of the mean of squares stays in each step.",
        momentum="number from 0 to 1; how much of a step is part of the next one.",
    ),
)
FtrlOptimizer = _optimizer(
    "FtrlOptimizer",
    """Follow the regularized leader.

    >>> optimizer = FtrlOptimizer(0.1, l1_regularization_strength=0.01)
    """,
    {
        "learning_rate": _REQUIRED, "learning_rate_power": -0.5, "initial_accumulator_value": 0.1,
        "l1_regularization_strength": 0.0, "l2_regularization_strength": 0.0, "use_locking": False,
        "name": "Ftrl", "accum_name": None, "linear_name": None, "l2_shrinkage_regularization_strength": 0.0,
    },
    lambda rate, name, **options: keras.optimizers.Ftrl(rate, **options, name=name),
)
ProximalGradientDescentOptimizer = _optimizer(
    "ProximalGradientDescentOptimizer",
    """Gradient descent, after which weights are made smaller by L1 and L2.

    >>> optimizer = ProximalGradientDescentOptimizer(0.1)
    """,
    {
        "learning_rate": _REQUIRED, "l1_regularization_strength": 0.0, "l2_regularization_strength": 0.0,
        "use_locking": False, "name": "ProximalGradientDescent",
    },
    lambda rate, name, **strengths: ProximalRule(rate, name, {}, strengths),
)
ProximalAdagradOptimizer = _optimizer(
    "ProximalAdagradOptimizer",
    """Adagrad, after which weights are made smaller by L1 and L2.

    >>> optimizer = ProximalAdagradOptimizer(0.1)
    """,
    {
        "learning_rate": _REQUIRED, "initial_accumulator_value": 0.1, "l1_regularization_strength": 0.0,
        "l2_regularization_strength": 0.0, "use_locking": False, "name": "ProximalAdagrad",
    },
    lambda rate, name, initial_accumulator_value, **strengths: ProximalRule(
        rate, name, {"accumulator": initial_accumulator_value}, strengths
    ),
)
# fmt: on


class SyncReplicasOptimizer:
    """Named for its error: the strategy decides whether steps wait for all replicas.

    Args:
        opt: any value; has no effect.
        arguments: further values; have no effect.
        options: further values; have no effect.

    Raises:
        UnsupportedError: always.

    >>> SyncReplicasOptimizer(None)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    unisono.UnsupportedError: ...
    """

    def __init__(self, opt: object, *arguments: object, **options: object) -> None:
        raise UnsupportedError(
            "The strategy decides whether steps wait for all replicas. Received: a SyncReplicasOptimizer. "
            "Use the optimizer itself, with `RunConfig(train_distribute=MultiWorkerMirroredStrategy())`."
        )


class SlotOptimizer(keras.Optimizer):
    """A Keras optimizer with slots of given first values."""

    def __init__(
        self, learning_rate: object, name: str, slots: dict[str, float], options: dict[str, Any]
    ) -> None:
        super().__init__(learning_rate=learning_rate, name=name)
        self._first_values = dict(slots)
        self._slots: dict[str, list[keras.Variable]] = {}
        self.options = dict(options)

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Make the slots."""
        if self.built:
            return
        super().build(variables)
        for slot, value in self._first_values.items():
            self._slots[slot] = self.add_optimizer_variables(
                variables, slot, keras.initializers.Constant(value)
            )

    def slot(self, variable: keras.Variable, name: str) -> keras.Variable:
        """Return a slot of a variable."""
        return self._slots[name][self._get_variable_index(variable)]

    def update_step(self, gradient: jax.Array, variable: keras.Variable, learning_rate: jax.Array) -> None:
        """Update a variable and its slots."""
        rate = jnp.asarray(learning_rate).astype(variable.dtype)
        before = {name: self.slot(variable, name).value for name in self._first_values}
        value, after = self.rule(jnp.asarray(gradient).astype(variable.dtype), variable.value, rate, before)
        self.assign(variable, value)
        for name, slot in after.items():
            self.assign(self.slot(variable, name), slot)

    def rule(
        self, gradient: jax.Array, value: jax.Array, rate: jax.Array, slots: dict[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the new value of a variable and of its slots."""
        raise NotImplementedError

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        known = super().get_config()
        return {
            "learning_rate": known["learning_rate"],
            "name": known["name"],
            "slots": dict(self._first_values),
            "options": dict(self.options),
        }


class MomentumRule(SlotOptimizer):
    """A sum of gradients that decays, times the learning rate of the step.

    In Keras' `SGD` the rate of each step is in the sum: with a rate that changes, that is another rule.
    """

    def rule(
        self, gradient: jax.Array, value: jax.Array, rate: jax.Array, slots: dict[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the new value and the sum."""
        momentum = self.options["momentum"]
        momentum = jnp.asarray(momentum() if callable(momentum) else momentum).astype(value.dtype)
        total = momentum * slots["momentum"] + gradient
        step = gradient + momentum * total if self.options["use_nesterov"] else total
        return value - rate * step, {"momentum": total}


class RMSPropRule(SlotOptimizer):
    """Gradients by the root of their mean square, whose first value is 1 and not 0 as in Keras."""

    def rule(
        self, gradient: jax.Array, value: jax.Array, rate: jax.Array, slots: dict[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the new value and the slots."""
        decay, epsilon = self.options["decay"], self.options["epsilon"]
        after = {"rms": slots["rms"] + (jnp.square(gradient) - slots["rms"]) * (1 - decay)}
        variance = after["rms"]
        if self.options["centered"]:
            after["mg"] = slots["mg"] + (gradient - slots["mg"]) * (1 - decay)
            variance = variance - jnp.square(after["mg"])
        step = rate * gradient / jnp.sqrt(variance + epsilon)
        after["momentum"] = self.options["momentum"] * slots["momentum"] + step
        return value - after["momentum"], after


class ProximalRule(SlotOptimizer):
    """A gradient step, by the root of the sum of squares where there is that slot, then L1 and L2."""

    def rule(
        self, gradient: jax.Array, value: jax.Array, rate: jax.Array, slots: dict[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return the new value and the sum of squares."""
        l1, l2 = (self.options[f"{kind}_regularization_strength"] for kind in ("l1", "l2"))
        after = {name: total + jnp.square(gradient) for name, total in slots.items()}
        own = rate
        for total in after.values():
            own = rate / jnp.sqrt(total)
        moved = value - own * gradient
        if l1 > 0:
            moved = jnp.sign(moved) * jnp.maximum(jnp.abs(moved) - own * l1, 0)
        return moved / (1 + l2 * own), after
