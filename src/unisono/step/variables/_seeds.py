"""The random generator of code in steps that names no seed, as TensorFlow's programs do.

Keras' own generator cannot be used while a program is traced.

Tests: tests/virtual/training/stateful/test_random.py.
"""

from __future__ import annotations

import keras
import numpy as np

_GENERATORS: list[keras.random.SeedGenerator] = []

#: The seed for the generator, where it was set before there is one.
_FIRST_SEEDS: list[int] = []


def step_generator() -> keras.random.SeedGenerator:
    """Return the generator, whose state a step that draws of it takes."""
    if not _GENERATORS:
        seed = _FIRST_SEEDS[0] & 0xFFFFFFFF if _FIRST_SEEDS else None
        # With it, as its state is not to be assigned by the step that needs it first.
        _GENERATORS.append(keras.random.SeedGenerator(seed))
    return _GENERATORS[0]


def set_step_seed(seed: int) -> None:
    """Let random numbers of code in steps that names no seed begin with one.

    Args:
        seed: any integer.

    >>> set_step_seed(7)
    """
    if _GENERATORS:
        set_step_state(np.asarray([seed & 0xFFFFFFFF, 0], np.uint32))
    else:
        # A generator would start JAX, and programs set seeds before they make virtual devices.
        _FIRST_SEEDS[:] = [seed]


def step_state() -> np.ndarray | None:
    """Return the state of the generator; None where no step has used it."""
    return np.asarray(_GENERATORS[0].state.value) if _GENERATORS else None


def set_step_state(state: np.ndarray) -> None:
    """Set the state of the generator.

    Args:
        state: from `step_state`, in this process or another.
    """
    step_generator().state.assign(state)
