"""The random state of the process outside of models: Python's, NumPy's, and PyTorch's where it is loaded.

Tests: tests/virtual/checkpoint/test_checkpoint.py.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np

from unisono._errors import CheckpointMismatchError
from unisono._system._json import MALFORMED
from unisono.step.variables._seeds import set_step_state, step_state


class RandomState:
    """The generators that Keras' data adapters and users' programs draw from, for a `Checkpoint`.

    Keras' layers keep the state of theirs in variables, which belong to the model.
    """

    def get_state(self) -> dict[str, Any]:
        """Return the state, as values that a checkpoint can hold."""
        state: dict[str, Any] = {"python": random.getstate(), "numpy": np.random.get_state()}
        if (steps := step_state()) is not None:
            state["steps"] = steps
        # Not imported here: a program that has not loaded PyTorch draws nothing from it.
        torch = sys.modules.get("torch")
        if torch is not None:
            state["torch"] = torch.get_rng_state().numpy()
        return state

    def set_state(self, state: dict[str, Any]) -> None:
        """Set the generators to a state.

        Raises:
            CheckpointMismatchError: it is none that `get_state` has returned.
        """
        try:
            self._set(state)
        except MALFORMED as error:
            raise CheckpointMismatchError(
                "A random state must come from `get_state`. Received: one that cannot be set "
                f"({type(error).__name__}: {error}). Restore an earlier checkpoint."
            ) from error

    def _set(self, state: dict[str, Any]) -> None:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        if "steps" in state:
            set_step_state(state["steps"])
        torch = sys.modules.get("torch")
        if torch is not None and "torch" in state:
            # A copy: what was read may be read-only, of which `from_numpy` warns.
            torch.set_rng_state(torch.from_numpy(np.array(state["torch"])))
