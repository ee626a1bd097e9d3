"""The random generator of code in steps that names no seed, as TensorFlow's programs do.

Keras' own generator cannot be used while a program is traced.

Tests: tests/virtual/training/stateful/test_random.py.
"""

from __future__ import annotations

import keras
import numpy as np

from unisono.step._program import current_frame

_GENERATORS: list[keras.random.SeedGenerator] = []

#: The seed for the generator, where it was set before there is one.
_FIRST_SEEDS: list[int] = []


def seed_of_step(seed: int | None) -> int | keras.random.SeedGenerator | None:
    """Return the seed for random numbers; in a step that names none, a generator, whose state the step takes.

    Args:
        seed: of the code.

    >>> seed_of_step(3), seed_of_step(None)
    (3, None)
    """
    if seed is not None or current_frame() is None:
        return seed
    return _generator()


def _generator() -> keras.random.SeedGenerator:
    if not _GENERATORS:
        seed = _FIRST_SEEDS[0] & 0xFFFFFFFF if _FIRST_SEEDS else None
        # With it, as its state is not to be assigned by the step that needs it first.
        _GENERATORS.append(keras.random.SeedGenerator(seed))
    return _GENERATORS[0]


def set_step_seed(seed: int) -> None:
    """Let the generator of steps begin with a seed.

    Args:
        seed: any integer.
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
    _generator().state.assign(state)
