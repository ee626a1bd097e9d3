"""The error for a variable of a model that was not created in its strategy's scope.

Tests: tests/virtual/training/test_failures.py.
"""

from __future__ import annotations

import keras

from unisono._context import creator_of
from unisono._errors import MixedStrategyError, ScopeError


def created_outside(
    variable: keras.Variable, model: keras.Model, strategy: object
) -> ScopeError | MixedStrategyError:
    """Return the error for a model's variable that was created outside of the scope.

    Where the strategy holds other variables of the model, this one was added to it later.
    """
    creator = creator_of(variable)
    if creator is not None:
        return MixedStrategyError(
            "A model must be compiled in the scope of the strategy that holds its variables. Received: "
            f"variable {variable.path!r} of {creator!r}, compiled in the scope of {strategy!r}. "
            "Build the model again in the second scope, or compile it in the first."
        )
    received = (
        "A model must be created in the scope of the strategy that trains it. Received: variable "
        f"{variable.path!r} of {model.name!r}, which was created outside of the scope of {strategy!r}"
    )
    if not any(creator_of(v) is strategy for v in model.variables):
        return ScopeError(
            f"{received}. Write\n    with strategy.scope():\n        model = ...\n        model.compile(...)"
        )
    added = "layer.enable_lora(4)" if "lora" in variable.name else "model = ...  # or what adds to it"
    return ScopeError(
        f"{received}, in which others of its variables were. Variables that a model gets later, as by "
        "`layer.enable_lora(4)` or with another layer, are created in the scope, too. Write\n"
        f"    with strategy.scope():\n        {added}\n        model.compile(...)"
    )
