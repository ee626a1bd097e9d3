"""Learning rates that fall with the number of steps.

Source: https://www.tensorflow.org/versions/r1.15/api_docs/python/tf/train

Tests: tests/unit/estimator/test_optimizers.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import keras

from unisono._errors import InvalidArgumentError
from unisono._types import ArrayLike
from unisono.estimator._docstrings import Texts

_TEXTS = Texts(
    {
        "learning_rate": "number, or float array of shape `()`; the rate at step 0.",
        "global_step": "whole number or variable; the steps so far, as `get_global_step` returns them.",
        "decay_steps": "number above 0; the steps of an interval.",
        "first_decay_steps": "number above 0; the steps of the first interval.",
        "staircase": "bool; whether the rate changes at the ends of intervals alone.",
        "end_learning_rate": "number; the rate at the end.",
        "power": "number; the exponent of the rest of the interval, 1 for a rate that falls along a line.",
        "cycle": "bool; whether the rate begins again at the end, each time with a longer interval.",
        "alpha": "number from 0 to 1; the lowest rate, divided by the first one.",
        "t_mul": "number; the length of an interval, divided by the length of the one before.",
        "m_mul": "number; the first rate of an interval, divided by the first rate of the one before.",
        "num_periods": "number; how many waves of the cosine there are in `decay_steps`.",
        "name": "string; has no effect.",
    },
    "The learning rate, a float array of shape `()`.",
    {"InvalidArgumentError": "`global_step` is None."},
)


def _number(value: ArrayLike) -> jax.Array:
    number = value.value if isinstance(value, keras.Variable) else keras.ops.convert_to_tensor(value)
    return jnp.asarray(number).astype(jnp.promote_types(jnp.asarray(number).dtype, jnp.float32))


def _part(global_step: ArrayLike, decay_steps: ArrayLike, staircase: bool = False) -> jax.Array:
    """Return the number of intervals that have passed."""
    if global_step is None:
        raise InvalidArgumentError(
            "`global_step` must be given. Received: None. Write `tf.train.get_or_create_global_step()`."
        )
    part = _number(global_step) / _number(decay_steps)
    return jnp.floor(part) if staircase else part


def _by_intervals(
    name: str, does: str, decay_rate: str, example: str, result: float, factor: Callable[..., jax.Array]
) -> Callable[..., jax.Array]:
    """Return a rate that changes by a factor of `decay_rate` and the number of intervals that have passed."""

    def decay(
        learning_rate: ArrayLike,
        global_step: ArrayLike,
        decay_steps: ArrayLike,
        decay_rate: ArrayLike,
        staircase: bool = False,
        name: str | None = None,
    ) -> jax.Array:
        part = _part(global_step, decay_steps, staircase)
        return _number(learning_rate) * factor(_number(decay_rate), part)

    decay.__name__ = decay.__qualname__ = name
    decay.__doc__ = f"Return a rate that is {does}.\n\n>>> round(float({name}({example})), 4)\n{result}\n"
    return _TEXTS.with_texts(decay_rate=decay_rate)(decay)


exponential_decay = _by_intervals(
    "exponential_decay", "multiplied by `decay_rate` in each interval",
    "number; the factor of the rate in each interval.", "1.0, 20, 10, 0.5", 0.25, jnp.power,
)  # fmt: skip
natural_exp_decay = _by_intervals(
    "natural_exp_decay", "multiplied by `exp(-decay_rate)` in each interval",
    "number; what each interval subtracts from the exponent.", "1.0, 10, 10, 1.0", 0.3679,
    lambda rate, part: jnp.exp(-rate * part),
)  # fmt: skip
inverse_time_decay = _by_intervals(
    "inverse_time_decay", "divided by one plus `decay_rate` for each interval",
    "number; what each interval adds to the divisor.", "1.0, 10, 10, 1.0", 0.5,
    lambda rate, part: 1 / (1 + rate * part),
)  # fmt: skip


@_TEXTS.with_texts(decay_steps="number above 0; in how many steps the rate falls to `end_learning_rate`.")
def polynomial_decay(
    learning_rate: ArrayLike,
    global_step: ArrayLike,
    decay_steps: ArrayLike,
    end_learning_rate: ArrayLike = 0.0001,
    power: float = 1.0,
    cycle: bool = False,
    name: str | None = None,
) -> jax.Array:
    """Return a rate that falls to an end in so many steps.

    >>> float(polynomial_decay(1.0, 5, 10, 0.0))
    0.5
    """
    part, end = _part(global_step, decay_steps), _number(end_learning_rate)
    # With `cycle`, by the number of intervals begun so far.
    part = part / jnp.maximum(jnp.ceil(part), 1) if cycle else jnp.minimum(part, 1)
    return (_number(learning_rate) - end) * jnp.power(1 - part, power) + end


@_TEXTS
def cosine_decay(
    learning_rate: ArrayLike,
    global_step: ArrayLike,
    decay_steps: ArrayLike,
    alpha: ArrayLike = 0.0,
    name: str | None = None,
) -> jax.Array:
    """Return a rate that falls like half a wave of a cosine.

    >>> float(cosine_decay(1.0, 10, 10))
    0.0
    """
    wave = _wave(jnp.minimum(_part(global_step, decay_steps), 1))
    rate: jax.Array = _number(learning_rate) * ((1 - alpha) * wave + alpha)
    return rate


@_TEXTS
def cosine_decay_restarts(
    learning_rate: ArrayLike,
    global_step: ArrayLike,
    first_decay_steps: ArrayLike,
    t_mul: float = 2.0,
    m_mul: float = 1.0,
    alpha: ArrayLike = 0.0,
    name: str | None = None,
) -> jax.Array:
    """Return a rate that falls like half a wave of a cosine, again and again.

    >>> float(cosine_decay_restarts(1.0, 10, 10))
    1.0
    """
    part = _part(global_step, first_decay_steps)
    if t_mul == 1.0:
        number = jnp.floor(part)
        part = part - number
    else:
        number = jnp.floor(jnp.log(1 - part * (1 - t_mul)) / math.log(t_mul))
        length = jnp.power(t_mul, number)
        part = (part - (1 - length) / (1 - t_mul)) / length
    wave = jnp.power(m_mul, number) * _wave(part)
    rate: jax.Array = _number(learning_rate) * ((1 - alpha) * wave + alpha)
    return rate


@_TEXTS.with_texts(alpha="number; added to the line.", beta="number; added to the product.")
def linear_cosine_decay(
    learning_rate: ArrayLike,
    global_step: ArrayLike,
    decay_steps: ArrayLike,
    num_periods: float = 0.5,
    alpha: float = 0.0,
    beta: float = 0.001,
    name: str | None = None,
) -> jax.Array:
    """Return a rate that falls like a line times a cosine.

    >>> round(float(linear_cosine_decay(1.0, 10, 10)), 4)
    0.001
    """
    part = jnp.minimum(_part(global_step, decay_steps), 1)
    return _number(learning_rate) * ((alpha + 1 - part) * _wave(2 * num_periods * part) + beta)


def _wave(part: jax.Array) -> jax.Array:
    return 0.5 * (1 + jnp.cos(math.pi * part))


@_TEXTS.with_texts(
    x="whole number or variable; the steps so far, as `get_global_step` returns them.",
    boundaries="sequence of numbers of steps in ascending order; each one the last step of a rate.",
    values="sequence of rates, one more than boundaries.",
    raises={"InvalidArgumentError": "there is not one rate more than boundaries."},
)
def piecewise_constant(
    x: ArrayLike, boundaries: Sequence[float], values: Sequence[ArrayLike], name: str | None = None
) -> jax.Array:
    """Return one of several rates.

    >>> [float(piecewise_constant(step, [10, 20], [1.0, 0.5, 0.25])) for step in (10, 11, 21)]
    [1.0, 0.5, 0.25]
    """
    if len(values) != len(boundaries) + 1:
        raise InvalidArgumentError(
            f"There must be one value more than boundaries. Received: {len(values)} values and "
            f"{len(boundaries)} boundaries."
        )
    rate, step = jnp.asarray(values[0]), _number(x)
    for boundary, value in zip(boundaries, values[1:], strict=True):
        rate = jnp.where(step > boundary, value, rate)
    return rate
