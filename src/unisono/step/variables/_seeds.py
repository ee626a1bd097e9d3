"""The random generator of code in steps that names no seed, as TensorFlow's programs do.

Keras' own generator cannot be used while a program is traced.

Tests: tests/virtual/training/stateful/test_random.py.
"""

from __future__ import annotations

import keras
import numpy as np

from unisono.step._program import current_frame

_GENERATORS: list[keras.random.SeedGenerator] = []


def seed_of_step(seed: int | None) -> int | keras.random.SeedGenerator | None:
    """Return the seed for random numbers; in a step that names none, a generator, whose state the step takes.

    Args:
        seed: of the code.

    >>> seed_of_step(3), seed_of_step(None)
    (3, None)
    """
    if seed is not None or current_frame() is None:
        return seed
    if not _GENERATORS:
        _GENERATORS.append(keras.random.SeedGenerator())
    return _GENERATORS[0]


def set_step_seed(seed: int) -> None:
    """Let the generator of steps begin with a seed.

    Args:
        seed: any integer.
    """
    if not _GENERATORS:
        _GENERATORS.append(keras.random.SeedGenerator(seed))
    set_step_state(np.asarray([seed & 0xFFFFFFFF, 0], np.uint32))


def step_state() -> np.ndarray | None:
    """Return the state of the generator; None where no step has used it."""
    return np.asarray(_GENERATORS[0].state.value) if _GENERATORS else None


def set_step_state(state: np.ndarray) -> None:
    """Set the state of the generator.

    Args:
        state: from `step_state`, in this process or another.
    """
    if not _GENERATORS:
        _GENERATORS.append(keras.random.SeedGenerator())
    _GENERATORS[0].state.assign(state)
