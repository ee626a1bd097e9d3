"""Who owns a model or a variable: the strategy in whose scope it was created or compiled.

Checkpoints, callbacks, the evaluator and the export ask here.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, TypeAlias

import keras

from unisono._context import creator_of, current, note_creator
from unisono._errors import MixedStrategyError
from unisono._features import load
from unisono.step._layout import Phases

if TYPE_CHECKING:
    from unisono.strategies._base import Strategy

#: What a strategy can hold.
Held: TypeAlias = "keras.Model | keras.Variable"

_BOUND: weakref.WeakKeyDictionary[keras.Model, Strategy] = weakref.WeakKeyDictionary()


def check_no_distribution() -> None:
    """Raise where `keras.distribution` distributes variables and data, too."""
    distribution = keras.distribution.distribution()
    if distribution is not None:
        raise MixedStrategyError(
            "A model is distributed by one strategy. Received: a strategy of Unisono while "
            f"keras.distribution.distribution() is a {type(distribution).__name__}. "
            "Write `keras.distribution.set_distribution(None)` first."
        )


def current_strategy() -> Strategy | None:
    """Return the strategy of this code; None for the default one."""
    context = current()
    return None if context is None or context.strategy._is_default else context.strategy


def mark_creation(thing: Held) -> None:
    """Note the current strategy on a model or variable that is being created."""
    note_creator(thing, current_strategy())


def bind(model: keras.Model, strategy: Strategy | None) -> None:
    """Let a strategy run a model's `fit`, `evaluate` and `predict`; None for Keras itself."""
    if strategy is None:
        _BOUND.pop(model, None)
    else:
        _BOUND[model] = strategy


def strategy_of(model: keras.Model) -> Strategy | None:
    """Return the strategy that a compiled model is bound to, or None."""
    return _BOUND.get(model)


def phases_of(model: keras.Model) -> Phases:
    """Return when the replicas of a compiled model exchange what they have learned."""
    strategy = strategy_of(model)
    replicated = None if strategy is None else strategy._replicated
    return Phases() if replicated is None else replicated.state_layout.phases


def holder_of(thing: Held) -> Strategy | None:
    """Return the strategy that a model belongs to, compiled or not, or a variable."""
    bound = _BOUND.get(thing) if isinstance(thing, keras.Model) else None
    return bound or creator_of(thing)


def writes_files(model: keras.Model) -> bool:
    """Return whether this process writes the files of a model: the first of several workers does, for all."""
    return bool(getattr(holder_of(model), "is_chief", True))


def holder_by_scope(model: keras.Model) -> Strategy | None:
    """Return the current strategy, else the one in whose scope the model's variables were created."""
    strategy = current_strategy()
    if strategy is not None:
        return strategy
    found = {creator for v in (model, *model.variables) if (creator := creator_of(v)) is not None}
    if len(found) > 1:
        raise MixedStrategyError(
            "All variables of a model must be created in the scope of one strategy. Received: "
            f"{model.name!r} with variables of {sorted(map(repr, found))}. Build the model in one scope."
        )
    return found.pop() if found else None


def sole_creator(model: keras.Model) -> Strategy | None:
    """Return the strategy in whose scope all variables of a model were created, else None.

    Of a model without variables, the one in whose scope it was created.
    """
    creators = {creator_of(thing) for thing in model.variables or [model]}
    return creators.pop() if len(creators) == 1 else None


def check_variables(model: keras.Model, strategy: Strategy) -> None:
    """Check that all variables of the model were created in the scope of `strategy`."""
    for variable in model.variables:
        if creator_of(variable) is not strategy:
            raise load("mistake")("variable outside of the scope", variable, model, strategy)
