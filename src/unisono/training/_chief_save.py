"""Files of a model: written once, by the first of several workers, and whole; optimizers' variables in them.

Tests: tests/cluster/test_chief.py, tests/virtual/strategies/test_compressed_gradients.py,
tests/virtual/strategies/test_local_updates.py.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from typing import TypeAlias, TypeVar

import keras
import numpy as np

from unisono._context import current
from unisono._features import load
from unisono._system._blocks import set_for_block
from unisono._tracebacks import warning_at_program
from unisono._types import KerasWrap, UserValue
from unisono.step._keras_internals import trained_variables
from unisono.step._layout import from_file, gathered_for_file, is_added, making_slot, own_layout
from unisono.training._binding import holder_of

#: The variable for which an optimizer makes one of the same form.
_REFERENCE: ContextVar[keras.Variable | None] = ContextVar("unisono_slot_reference", default=None)


def _build_optimizer(
    original: Callable[..., None], self: keras.Optimizer, variables: Sequence[keras.Variable]
) -> None:
    """Build an optimizer, with the variables that its strategy's state layout adds."""
    original(self, variables)
    context = current()
    replicated = None if context is None else context.strategy._replicated
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
    replicated = None if context is None else context.strategy._replicated
    if replicated is not None:
        replicated.state_layout.note_slot(variable)
    return variable


def _add_variable_like(
    original: Callable[..., keras.Variable],
    self: keras.Optimizer,
    reference_variable: keras.Variable,
    *args: object,
    **kwargs: object,
) -> keras.Variable:
    """Make an optimizer's variable of the form of another one, as which it may lie."""
    with set_for_block(_REFERENCE, reference_variable):
        return original(self, reference_variable, *args, **kwargs)


def new_slot_reference() -> keras.Variable | None:
    """Return the variable for which an optimizer is making one of the same form; None for no such."""
    return _REFERENCE.get()


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


#: What Keras' saving functions return.
Result = TypeVar("Result")

#: Calls one of them so that the file is whole.
_Writer: TypeAlias = Callable[[Callable[..., Result], inspect.BoundArguments], Result]


def wraps() -> list[KerasWrap]:
    """Return what is wrapped of Keras' saving."""
    saving = keras.saving
    functions = [(saving, "save_model"), (keras.models, "save_model"), (saving, "save_weights")]
    methods = [(keras.Model, name) for name in ("save", "save_weights", "export")]
    written = [(owner, name, written_once) for owner, name in (*methods, *functions)]
    read = [(saving, "load_model", model_from_store), (keras.models, "load_model", model_from_store)]
    weights = [(owner, "load_weights", weights_from_store) for owner in (keras.Model, saving)]
    optimizers: list[KerasWrap] = [
        (keras.Optimizer, "build", _build_optimizer),
        (keras.Optimizer, "add_variable", _add_variable),
        (keras.Optimizer, "add_variable_from_reference", _add_variable_like),
        (keras.Optimizer, "save_own_variables", _save_own_variables),
        (keras.Optimizer, "load_own_variables", _load_own_variables),
    ]
    return [*written, *read, *weights, *optimizers]


def model_from_store(
    original: Callable[..., Result], filepath: UserValue, *args: UserValue, **kwargs: UserValue
) -> Result:
    """Call Keras' `load_model` with a copy of what lies in an object store."""
    if not _may_be_address(filepath):
        return original(filepath, *args, **kwargs)
    with load("copy of a stored model")(filepath) as path:
        return original(path, *args, **kwargs)


def weights_from_store(
    original: Callable[..., Result],
    model: keras.Model,
    filepath: UserValue,
    *args: UserValue,
    **kwargs: UserValue,
) -> Result:
    """Call Keras' `load_weights` with a copy of what lies in an object store."""
    return model_from_store(functools.partial(original, model), filepath, *args, **kwargs)


def written_once(
    original: Callable[..., Result], model: keras.Model, *args: object, **kwargs: object
) -> Result | None:
    """Call Keras' `save`, `save_weights` or `export` on the first of several workers."""
    strategy = holder_of(model)
    is_alone = strategy is None or strategy.process_group.size == 1
    if is_alone and not _may_be_address(args[0] if args else kwargs.get("filepath")):
        return original(model, *args, **kwargs)
    write: _Writer[Result] = load("atomic writing of a model")
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    bound.apply_defaults()
    if strategy is None or is_alone:
        return write(original, bound)
    path = str(bound.arguments["filepath"])
    context = current()
    # In `fit` it may be the first worker's callback alone that saves, after all have gathered.
    if context is None or not context.is_of_method:
        variables = getattr(getattr(model, "optimizer", None), "variables", ())
        strategy._gather_state([*model.variables, *gathered_for_file(variables)])
    result = write(original, bound) if strategy.is_chief else None
    strategy.process_group.share_file(path)
    return result


def _may_be_address(filepath: UserValue) -> bool:
    """Return whether a path looks like that of an object in a store.

    >>> _may_be_address("s3://bucket/m.keras"), _may_be_address("m.keras"), _may_be_address("hf://user/model")
    (True, False, False)
    """
    # Keras has its own way to a repository of models.
    text = str(filepath) if isinstance(filepath, (str, os.PathLike)) else ""
    return ":/" in text and not text.startswith("hf://")
