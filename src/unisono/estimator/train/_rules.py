"""Keras optimizers with the update rules of TensorFlow 1, where Keras' differ.

Tests: tests/unit/estimator/test_optimizers.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras


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
