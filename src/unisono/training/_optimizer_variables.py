"""The variables of an optimizer: those that a strategy's state layout adds, and files of Keras without them.

Tests: tests/virtual/strategies/test_compressed_gradients.py, tests/virtual/strategies/test_local_updates.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence

import keras
import numpy as np

from unisono._context import current
from unisono._tracebacks import warning_at_program
from unisono._types import KerasWrap
from unisono.step._keras_internals import trained_variables
from unisono.step._layout import from_file, is_added, making_slot, own_layout


def wraps() -> list[KerasWrap]:
    """Return what is wrapped of optimizers' variables."""
    return [
        (keras.Optimizer, "build", _build_optimizer),
        (keras.Optimizer, "add_variable", _add_variable),
        (keras.Optimizer, "save_own_variables", _save_own_variables),
        (keras.Optimizer, "load_own_variables", _load_own_variables),
    ]


def _build_optimizer(
    original: Callable[..., None], self: keras.Optimizer, variables: Sequence[keras.Variable]
) -> None:
    """Build an optimizer, with the variables that its strategy's state layout adds."""
    original(self, variables)
    context = current()
    replicated = None if context is None else context.strategy.replicated
    # The optimizer inside applies the gradients, and is built by itself.
    if replicated is not None and not isinstance(self, keras.optimizers.LossScaleOptimizer):
        replicated.state_layout.extend(self, trained_variables(self))


def _add_variable(
    original: Callable[..., keras.Variable], self: keras.Optimizer, *args: object, **kwargs: object
) -> keras.Variable:
    """Make an optimizer's variable, and let its strategy's state layout see it."""
    with making_slot():
        variable = original(self, *args, **kwargs)
    context = current()
    replicated = None if context is None else context.strategy.replicated
    if replicated is not None:
        replicated.state_layout.note_slot(variable)
    return variable


def _own_variables(optimizer: keras.Optimizer) -> list[keras.Variable]:
    return [v for v in optimizer.variables if not is_added(v)]


def _save_own_variables(
    original: Callable[..., None], self: keras.Optimizer, store: MutableMapping[str, np.ndarray]
) -> None:
    """Save the variables that the optimizer has under every strategy, in a file of Keras."""
    own = _own_variables(self)
    if len(own) == len(self.variables):
        return original(self, store)
    for i, variable in enumerate(own):
        layout = own_layout(variable)
        store[str(i)] = variable.numpy() if layout is None else layout.to_file(variable)
    return None


def _load_own_variables(
    original: Callable[..., None], self: keras.Optimizer, store: Mapping[str, np.ndarray]
) -> None:
    """Load what `_save_own_variables` has saved."""
    own = _own_variables(self)
    if len(store.keys()) != len(own):
        # Keras warns, and names the file of its caller.
        with warning_at_program():
            return original(self, store)
    if len(own) == len(self.variables):
        return original(self, store)
    for i, variable in enumerate(own):
        variable.assign(from_file(variable, np.asarray(store[str(i)])))
    return None
