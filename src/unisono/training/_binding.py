"""Which strategy holds a variable or a model: the one in whose scope it was created."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from unisono._context import STRATEGY_MARK, check_holder, current
from unisono._errors import MixedStrategyError, ScopeError


def current_strategy() -> Any | None:
    """Return the strategy of this code; None for the default one."""
    context = current()
    return None if context is None or context.strategy.is_default else context.strategy


def note_creation(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    """Around `Variable.__init__`: mark the variable with the current strategy."""
    object.__setattr__(self, STRATEGY_MARK, current_strategy())
    original(self, *args, **kwargs)


def assign_here(original: Callable[..., Any], self: Any, value: Any) -> Any:
    """Around `Variable.assign`.

    Raises:
        MixedStrategyError: in the scope or a replica of a strategy that does not hold the variable.
    """
    check_holder(self)
    return original(self, value)


def holder_by_scope(model: Any) -> Any | None:
    """Return the current strategy, else the one in whose scope the model's variables were made.

    Raises:
        MixedStrategyError: when several strategies hold variables of the model.
    """
    strategy = current_strategy()
    if strategy is not None:
        return strategy
    marks = {mark for v in (model, *model.variables) if (mark := getattr(v, STRATEGY_MARK, None)) is not None}
    if len(marks) > 1:
        raise MixedStrategyError(
            "All variables of a model must be created in the scope of one strategy. Received: "
            f"{model.name!r} with variables of {sorted(map(repr, marks))}. Build the model in one scope."
        )
    return marks.pop() if marks else None


def check_variables(model: Any, strategy: Any) -> None:
    """Raise when a variable of the model was not made in the scope of `strategy`.

    Raises:
        ScopeError: for a variable of no strategy.
        MixedStrategyError: for one of another strategy.
    """
    for variable in model.variables:
        mark = getattr(variable, STRATEGY_MARK, None)
        if mark is strategy:
            continue
        if mark is None:
            raise ScopeError(
                "A model must be created in the scope of the strategy that trains it. Received: variable "
                f"{variable.path!r} of {model.name!r}, which was created outside of the scope of "
                f"{strategy!r}. Write\n    with strategy.scope():\n"
                "        model = ...\n        model.compile(...)"
            )
        raise MixedStrategyError(
            "A model must be compiled in the scope of the strategy that holds its variables. Received: "
            f"variable {variable.path!r} of {mark!r}, compiled in the scope of {strategy!r}. "
            "Build the model anew in the second scope, or compile it in the first."
        )
